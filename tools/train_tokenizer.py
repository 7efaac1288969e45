#!/usr/bin/env python
"""Train a BPE tokenizer on .jsonl and .txt files, in bounded time and memory.

    python tools/train_tokenizer.py --input corpus/train.jsonl --vocab-size 8192 --model-prefix data/spm
    python tools/train_tokenizer.py --input a.jsonl --tokenizer-type HuggingFaceTokenizer --model-prefix data/bpe

SentencePieceTokenizer   writes PREFIX.model and PREFIX.vocab. Digits stand one by one, and bytes for what is not in the
                         vocabulary. Ids: 0 unknown, 1 begin, 2 end of document
HuggingFaceTokenizer     writes tokenizer.json and tokenizer_config.json in the directory PREFIX: byte-level BPE, split
                         by GPT-4's pattern. Ids: 0 end of document, 1..256 the bytes

Text is kept as it is: no normalisation, spaces and line ends included, so that decoding gives back exactly what was
encoded. --max-bytes bounds time and memory: pieces of up to 4 kB are taken evenly over the whole input.
"""

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.common.safe_open import write_atomically
from megalite.data.errors import DataError
from tools.cli_common import add_max_bad_fraction, exits_with, local_path_str, make_parser, positive_int, run_program
from tools.preprocess.bad_records import GoodTexts
from tools.preprocess.text_input import expand, text_bytes

END = "<|endoftext|>"
# words with the sign before them, digits by threes, signs, line ends, spaces: the pattern of GPT-4 as Llama 3 has it
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECE_BYTES = 4096  # SentencePiece leaves out longer "sentences"


def cut(texts: Iterable[str]) -> Iterator[str]:
    """All text in pieces that end at line ends and are at most PIECE_BYTES (a longer line is left out)."""
    for text in texts:
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


def sample_pieces(pieces: Iterator[str], total_bytes: int, max_bytes: int) -> Iterator[str]:
    """About max_bytes of the pieces, evenly spread."""
    share, taken, seen = min(1.0, max_bytes / max(total_bytes, 1)), 0, 0
    for piece in pieces:
        n = len(piece.encode("utf-8"))
        seen += n
        if taken + n <= seen * share or share == 1.0:
            taken += n
            yield piece


class Handed:
    """Pieces on their way into a library, which makes a text of its own of what goes wrong in reading: `error` is what
    it was. No piece at all is a DataError."""

    def __init__(self, pieces: Iterable[str]):
        self.pieces = pieces
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        some = False
        try:
            for piece in self.pieces:
                some = True
                yield piece
            if not some:
                raise DataError("the input holds no text")
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
            raise


def train(pieces: Iterable[str], model_prefix: str, vocab_size: int, threads: int, special: Sequence[str] = ()) -> None:
    """`special` tokens have ids and are never made from text."""
    import sentencepiece

    handed = Handed(pieces)
    prefix = Path(model_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = prefix.with_name(prefix.name + ".partial")
    for suffix in (".vocab", ".model"):
        Path(f"{partial}{suffix}").unlink(missing_ok=True)  # a link is not written through
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(handed),
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
            control_symbols=list(special),
            character_coverage=0.9999,
            max_sentence_length=2 * PIECE_BYTES,
            num_threads=threads,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise handed.error or DataError(_reason(vocab_size, str(error))) from None
    for suffix in (".vocab", ".model"):
        os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")


def _reason(vocab_size: int, told: str) -> str:
    """SentencePiece's error message without the lines of its source."""
    if most := re.search(r"Vocabulary size too high.* <= (\d+)", told):
        return _too_large(vocab_size, int(most[1]))
    if fewest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", told):
        needed = "the characters of the text and the special tokens"
        return f"vocab_size={vocab_size} has no room for 256 bytes, {needed}; give {fewest[1]} or more"
    words = " ".join(re.sub(r"INTERNAL: |\S+\.cc\(\d+\) |\[.*\] ", "", told).split())
    return f"SentencePiece cannot train: {words or told}"


def _too_large(vocab_size: int, most: int) -> str:
    return f"vocab_size={vocab_size}: the text gives {most} pieces only; give more text, or --vocab-size {most}"


def train_hugging_face(
    pieces: Iterable[str], directory: str, vocab_size: int, _: int, special: Sequence[str] = ()
) -> None:
    """As `train`, a byte-level BPE of the library tokenizers; no normalisation, so every text comes back exactly."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fewest = len(alphabet) + 1 + len(special)
    if vocab_size < fewest:
        tokens = " ".join([END, *special])
        raise DataError(f"vocab_size={vocab_size} has no room for 256 bytes and {tokens}; give {fewest} or more")
    model = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END, *special], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(iter(Handed(pieces)), trainer)
    if model.get_vocab_size() < vocab_size:
        raise DataError(_too_large(vocab_size, model.get_vocab_size()))
    # what transformers needs to load the directory; nothing in it names code
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": None, "unk_token": None}
    Path(directory).mkdir(parents=True, exist_ok=True)
    texts = {"tokenizer.json": model.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    for name, text in texts.items():
        write_atomically(Path(directory, name), text)


TRAINERS = {"SentencePieceTokenizer": train, "HuggingFaceTokenizer": train_hugging_face}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="GLOB", help=".jsonl, .json (lines), .txt files")
    parser.add_argument(
        "--model-prefix",
        type=local_path_str,
        required=True,
        help="output: the file PREFIX.model, or the directory PREFIX",
    )
    parser.add_argument("--tokenizer-type", choices=sorted(TRAINERS), default="SentencePieceTokenizer")
    parser.add_argument("--vocab-size", type=positive_int, default=8192)
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY")
    parser.add_argument("--special-tokens", nargs="+", default=[], metavar="TOKEN", help="e.g. <fim_prefix> <fim_pad>")
    parser.add_argument(
        "--max-bytes", type=positive_int, default=10_000_000, help="bytes of text used for training; default 10 MB"
    )
    parser.add_argument(
        "--max-sentences", type=positive_int, help="pieces of text used for training; default: no limit"
    )
    parser.add_argument(
        "--workers", type=positive_int, default=os.cpu_count() or 1, help="number of threads; default: one per core"
    )
    add_max_bad_fraction(parser)
    return parser


@exits_with(3, DataError)
def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # the library tokenizers knows no other way
    try:
        files = expand(args.input)
        texts = GoodTexts(files, args.json_keys, args.max_bad_fraction)
        if "-" in files:
            raise DataError("input=- has no size, by which text is taken evenly from all of it; give a file")
        total = sum(map(text_bytes, files))
        pieces = itertools.islice(sample_pieces(cut(texts), total, args.max_bytes), args.max_sentences)
        TRAINERS[args.tokenizer_type](pieces, args.model_prefix, args.vocab_size, args.workers, args.special_tokens)
        if told := texts.left_out():
            print_err(f"train_tokenizer.py: {told}")
    except OSError as error:
        raise DataError(f"{args.model_prefix}: {error.strerror}") from None
    written = f"{args.model_prefix}{'.model' if args.tokenizer_type == 'SentencePieceTokenizer' else '/tokenizer.json'}"
    print(f"{written}: {args.vocab_size} pieces")
    return 0


if __name__ == "__main__":
    run_program(main)
