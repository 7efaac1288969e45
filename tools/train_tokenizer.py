#!/usr/bin/env python
"""Train a BPE tokenizer on .jsonl and .txt files, in bounded time and memory.

    python tools/train_tokenizer.py --input corpus/train.jsonl --vocab-size 8192 --model-prefix data/spm
    python tools/train_tokenizer.py --input a.jsonl --tokenizer-type HuggingFaceTokenizer --model-prefix data/bpe

SentencePieceTokenizer   writes PREFIX.model and PREFIX.vocab. Every digit is a token, and characters that are not in
                         the vocabulary become bytes. Ids: 0 unknown, 1 begin, 2 end of document
HuggingFaceTokenizer     writes tokenizer.json and tokenizer_config.json in the directory PREFIX: byte-level BPE, split
                         by GPT-4's pattern. Ids: 0 end of document, 1..256 the bytes

Text is not normalised, and spaces and line ends are preserved, so decoding returns exactly the text that was encoded.
--max-bytes bounds time and memory: the training text is taken evenly from the whole input, in pieces of up to 4 kB.
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
from tools.preprocess.bad_records import ValidTexts
from tools.preprocess.text_input import expand, text_bytes

END = "<|endoftext|>"
# GPT-4's pattern, as in Llama 3: words with the character before them, up to 3 digits, punctuation, line ends, spaces
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_PIECE_BYTES = 4096  # SentencePiece ignores longer "sentences"


def split_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Split texts at line ends into pieces of at most MAX_PIECE_BYTES. A longer line is omitted."""
    for text in texts:
        lines: list[str] = []
        piece_bytes = 0
        for line in text.splitlines(keepends=True):
            line_bytes = len(line.encode("utf-8"))
            if piece_bytes + line_bytes > MAX_PIECE_BYTES and lines:
                yield "".join(lines)
                lines = []
                piece_bytes = 0
            if line_bytes <= MAX_PIECE_BYTES:
                lines.append(line)
                piece_bytes += line_bytes
        if lines:
            yield "".join(lines)


def sample_pieces(pieces: Iterator[str], total_bytes: int, max_bytes: int) -> Iterator[str]:
    """Yield about `max_bytes` of the pieces, evenly spread over `total_bytes`."""
    fraction = min(1.0, max_bytes / max(total_bytes, 1))
    sampled_bytes = 0
    read_bytes = 0
    for piece in pieces:
        piece_bytes = len(piece.encode("utf-8"))
        read_bytes += piece_bytes
        if sampled_bytes + piece_bytes <= read_bytes * fraction or fraction == 1.0:
            sampled_bytes += piece_bytes
            yield piece


class PieceStream:
    """Pieces that a library reads. Raises DataError if there are none.

    SentencePiece replaces an error that happens while it reads by one of its own, so `error` keeps the first.
    """

    def __init__(self, pieces: Iterable[str]):
        self.pieces = pieces
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        is_empty = True
        try:
            for piece in self.pieces:
                is_empty = False
                yield piece
            if is_empty:
                raise DataError("the input holds no text")
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
            raise


def train_sentencepiece(
    pieces: Iterable[str], model_prefix: str, vocab_size: int, threads: int, special_tokens: Sequence[str] = ()
) -> None:
    """Train a SentencePiece model and write its files.

    Args:
        pieces: The training text.
        model_prefix: The path of the files without their suffixes.
        vocab_size: The number of tokens, special ones included.
        threads: The number of threads.
        special_tokens: Tokens that have an id but never come from text.

    Raises:
        DataError: The text is empty, or does not fit the size of the vocabulary.
    """
    import sentencepiece

    stream = PieceStream(pieces)
    prefix = Path(model_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = prefix.with_name(prefix.name + ".partial")
    for suffix in (".vocab", ".model"):
        Path(f"{partial}{suffix}").unlink(missing_ok=True)  # do not write through a link
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(stream),
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
            control_symbols=list(special_tokens),
            character_coverage=0.9999,
            max_sentence_length=2 * MAX_PIECE_BYTES,
            num_threads=threads,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise stream.error or DataError(_clean_error(vocab_size, str(error))) from None
    for suffix in (".vocab", ".model"):
        os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")


def _clean_error(vocab_size: int, error: str) -> str:
    """Return SentencePiece's error message without references to its source, or one with a remedy."""
    if match := re.search(r"Vocabulary size too high.* <= (\d+)", error):
        return _vocab_too_large(vocab_size, int(match[1]))
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        required = "the characters of the text and the special tokens"
        return f"vocab_size={vocab_size} has no room for 256 bytes, {required}; give {match[1]} or more"
    message = " ".join(re.sub(r"INTERNAL: |\S+\.cc\(\d+\) |\[.*\] ", "", error).split())
    return f"SentencePiece cannot train: {message or error}"


def _vocab_too_large(vocab_size: int, max_size: int) -> str:
    return f"vocab_size={vocab_size}: the text gives {max_size} pieces only; give more text, or --vocab-size {max_size}"


def train_hugging_face(
    pieces: Iterable[str], directory: str, vocab_size: int, _: int, special_tokens: Sequence[str] = ()
) -> None:
    """Train a byte-level BPE with the library tokenizers and write its files into `directory`.

    The other arguments and errors are those of `train_sentencepiece`. The number of threads is set by the environment.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    min_size = len(alphabet) + 1 + len(special_tokens)
    if vocab_size < min_size:
        tokens = " ".join([END, *special_tokens])
        raise DataError(f"vocab_size={vocab_size} has no room for 256 bytes and {tokens}; give {min_size} or more")
    model = tokenizers.Tokenizer(models.BPE())
    split_words = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split_words, to_bytes])  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END, *special_tokens], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(iter(PieceStream(pieces)), trainer)
    if model.get_vocab_size() < vocab_size:
        raise DataError(_vocab_too_large(vocab_size, model.get_vocab_size()))
    # what transformers needs to load the directory; it refers to no code
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": None, "unk_token": None}
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(directory, "tokenizer.json"), model.to_str(pretty=True))
    write_atomically(Path(directory, "tokenizer_config.json"), json.dumps(config, indent=2) + "\n")


TRAINERS = {"SentencePieceTokenizer": train_sentencepiece, "HuggingFaceTokenizer": train_hugging_face}


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
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # the only way to set the threads of the library tokenizers
    try:
        files = expand(args.input)
        texts = ValidTexts(files, args.json_keys, args.max_bad_fraction)
        if "-" in files:
            raise DataError("input=- has no size, by which text is taken evenly from all of it; give a file")
        total_bytes = sum(text_bytes(file) for file in files)
        sample = sample_pieces(split_pieces(texts), total_bytes, args.max_bytes)
        pieces = itertools.islice(sample, args.max_sentences)
        TRAINERS[args.tokenizer_type](pieces, args.model_prefix, args.vocab_size, args.workers, args.special_tokens)
        if note := texts.left_out():
            print_err(f"train_tokenizer.py: {note}")
    except OSError as error:
        raise DataError(f"{args.model_prefix}: {error.strerror}") from None
    suffix = ".model" if args.tokenizer_type == "SentencePieceTokenizer" else "/tokenizer.json"
    print(f"{args.model_prefix}{suffix}: {args.vocab_size} pieces")
    return 0


if __name__ == "__main__":
    run_program(main)
