#!/usr/bin/env python
"""Train a SentencePiece BPE tokenizer on .jsonl and .txt files, in bounded time.

    python tools/train_tokenizer.py --input corpus/train.jsonl --vocab-size 8192 --model-prefix data/spm

Text is kept as it is: no normalisation, spaces and line ends included, digits one by one, and bytes for what is not in
the vocabulary, so that decoding gives back exactly what was encoded. --max-bytes bounds the time: pieces of up to
4 kB are taken evenly over the whole input. Ids: 0 unknown, 1 begin, 2 end of document.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.data.indexed import DataError  # noqa: E402
from megalite.data.records import read_texts  # noqa: E402
from megalite.data.text_input import expand  # noqa: E402

PIECE_BYTES = 4096  # SentencePiece leaves out longer "sentences"


def read_pieces(files: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """All text in pieces that end at line ends and are at most PIECE_BYTES (a longer line is left out)."""
    for text in read_texts(files, keys):
        piece, size = [], 0
        for part in text.splitlines(keepends=True):
            n = len(part.encode("utf-8"))
            if size + n > PIECE_BYTES and piece:
                yield "".join(piece)
                piece, size = [], 0
            if n <= PIECE_BYTES:
                piece.append(part)
                size += n
        if piece:
            yield "".join(piece)


def sample_pieces(pieces: Iterator[str], total_bytes: int, max_bytes: int, max_sentences: int | None) -> Iterator[str]:
    """About max_bytes of the pieces, evenly spread, at most max_sentences of them."""
    share, taken, seen, count = min(1.0, max_bytes / max(total_bytes, 1)), 0, 0, 0
    for piece in pieces:
        n = len(piece.encode("utf-8"))
        seen += n
        if taken + n <= seen * share or share == 1.0:
            taken += n
            count += 1
            yield piece
            if count == max_sentences:
                return


def train(
    patterns: Sequence[str],
    model_prefix: str,
    vocab_size: int,
    keys: Sequence[str],
    max_bytes: int,
    max_sentences: int | None,
    threads: int,
) -> None:
    import sentencepiece

    files = expand(patterns)
    total = sum(os.path.getsize(name) for name in files)
    prefix = Path(model_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = prefix.with_name(prefix.name + ".partial")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample_pieces(read_pieces(files, keys), total, max_bytes, max_sentences),
            model_prefix=str(partial),
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            character_coverage=0.9999,
            max_sentence_length=2 * PIECE_BYTES,
            num_threads=threads,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().rstrip(".")
        raise DataError(f"vocab_size={vocab_size}: {reason}; give more text or a smaller vocabulary") from error
    for suffix in (".vocab", ".model"):
        os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="GLOB", help=".jsonl, .json (lines), .txt files")
    parser.add_argument("--model-prefix", required=True, help="writes PREFIX.model and PREFIX.vocab")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY")
    parser.add_argument("--max-bytes", type=int, default=10_000_000, help="text used for training; default 10 MB")
    parser.add_argument("--max-sentences", type=int, help="pieces of text used for training; default: no limit")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads; default: one per core")
    args = parser.parse_args(argv)
    try:
        train(
            args.input,
            args.model_prefix,
            args.vocab_size,
            args.json_keys,
            args.max_bytes,
            args.max_sentences,
            args.workers,
        )
    except DataError as error:
        print(f"train_tokenizer.py: {error}", file=sys.stderr)
        return 3
    print(f"{args.model_prefix}.model: {args.vocab_size} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
