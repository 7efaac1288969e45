#!/usr/bin/env python
"""Inspect a token file: counts, the lengths of its documents, the text of one document; or verify it completely.

    python tools/inspect_data.py PREFIX [--png lengths.png]
    python tools/inspect_data.py PREFIX --document 17 --tokenizer-type Llama2Tokenizer --tokenizer-model spm.model
    python tools/inspect_data.py PREFIX --verify [--vocab-size N]

--verify reads both files to the end. It checks offsets and counts, and that every id is in the vocabulary (that of
PREFIX.json, or --vocab-size), and counts the documents that end with the end-of-document id. The first fault ends it
with exit code 3.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from megalite.common.console import ProgressBar
from megalite.config.registry import REGISTRIES
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.files.sidecar import check_tokenizer, read_sidecar
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from tools.cli_common import PluginAction, exits_with, make_parser, move_plugins_first, run_program
from tools.merge_datasets import document_blocks
from tools.plots.style import Picture, color, figure, save

CHUNK = 1 << 22  # tokens, or index entries, read at a time
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
MAX_BAR = 50  # characters of the longest bar
MAX_IDS = 24  # ids of a document that are printed


def histogram(lengths: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Return (shortest, longest, number of documents) for lengths 0, 1, 2..3, 4..7, 8..15, ... up to the maximum."""
    counts = np.zeros(33, np.int64)
    for a in range(0, len(lengths), CHUNK):
        counts += np.bincount(np.frexp(lengths[a : a + CHUNK])[1], minlength=33)
    last = int(np.flatnonzero(counts)[-1]) if counts.any() else 0
    return [(1 << k >> 1, max((1 << k) - 1, 0), int(counts[k])) for k in range(last + 1)]


def summary(data: IndexedDataset, info: dict[str, Any] | None) -> str:
    """Return a text with counts, the tokenizer and a histogram of the lengths; `info` is the content of PREFIX.json."""
    lines = [f"{data.prefix}: {len(data)} documents, {data.num_tokens} tokens ({data.dtype})"]
    if info is None:
        lines.append("no prefix.json: the tokenizer that made it is not known")
    else:
        tokenizer = info["tokenizer"]
        vocabulary = f"vocabulary {tokenizer['vocab_size']}, end of document {tokenizer.get('eod')}"
        lines.append(f"made by {tokenizer.get('name')}, {vocabulary}, fingerprint {tokenizer['fingerprint'][:12]}")
        sources = info.get("sources") or []
        lines.append(f"sources: {', '.join(map(str, sources[:5]))}{', ...' if len(sources) > 5 else ''}")
    if len(data):
        lengths = np.sort(data.lengths)  # 4 bytes per document
        quantiles = ((q, int(lengths[min(len(lengths) * q // 100, len(lengths) - 1)])) for q in QUANTILES)
        lines.append(f"tokens per document: mean {data.num_tokens / len(data):.1f}")
        lines.append("  " + "  ".join(f"{q}%: {value}" for q, value in quantiles))
        rows = histogram(data.lengths)
        max_count = max(count for _, _, count in rows)
        for low, high, count in rows:
            name = str(low) if low == high else f"{low}..{high}"
            bar = "#" * math.ceil(MAX_BAR * count / max_count)
            lines.append(f"  {name:>23} {count:>12} {bar}")
    return "\n".join(lines)


def picture(data: IndexedDataset) -> Picture:
    """Return a plot of the histogram, by documents and by tokens."""
    rows = histogram(data.lengths)
    names = [str(low) if low == high else f"{low}-{high}" for low, high, _ in rows]
    tokens = np.bincount(np.frexp(data.lengths)[1], weights=data.lengths, minlength=len(rows))
    title = f"{Path(data.prefix).name}: {len(data):,} documents, {data.num_tokens:,} tokens"

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.9])
        x = np.arange(len(rows))
        document_percent = [100 * count / len(data) for _, _, count in rows]
        axis.bar(x - 0.2, document_percent, 0.4, label="documents", color=color("blue"))
        axis.bar(x + 0.2, 100 * tokens / max(data.num_tokens, 1), 0.4, label="tokens", color=color("orange"))
        axis.set_xticks(x, names, rotation=45, ha="right")
        axis.set_xlabel("tokens per document")
        axis.set_ylabel("share, %")
        axis.set_title(title, loc="left")
        axis.legend()
        return fig

    return Picture("lengths", title, draw)


def show_document(data: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> str:
    """Return the first ids of a document, and its text if there is a tokenizer. Raises DataError."""
    if not 0 <= document < len(data):
        raise DataError(f"document={document} is outside 0..{len(data) - 1}")
    ids = np.asarray(data.document(document)).tolist()
    rest = f" ... ({len(ids) - MAX_IDS} rest)" if len(ids) > MAX_IDS else ""
    lines = [f"document {document}: {len(ids)} tokens: {' '.join(map(str, ids[:MAX_IDS]))}{rest}"]
    if tokenizer is not None:
        for token, token_id in enumerate(ids):
            if not 0 <= token_id < tokenizer.vocab_size:
                position = f"document {document}, token {token}: id {token_id}"
                vocabulary = f"the vocabulary 0..{tokenizer.vocab_size - 1} of {tokenizer.name}"
                raise DataError(f"{data.prefix}.bin: {position} is outside {vocabulary}")
        lines.append(tokenizer.decode(ids))
    return "\n".join(lines)


def check_index(data: IndexedDataset) -> None:
    """Check that sequences are adjacent and documents in order. Raises DataError with the first fault."""
    width = data.dtype.itemsize
    end = 0
    for a in range(0, len(data), CHUNK):
        sizes = data.lengths[a : a + CHUNK].astype(np.int64) * width
        starts = end + np.cumsum(sizes) - sizes
        is_wrong = (sizes < 0) | (data.pointers[a : a + CHUNK] != starts)
        if is_wrong.any():
            i = int(is_wrong.argmax())
            entry = f"document {a + i}: {sizes[i] // width} tokens at byte {data.pointers[a + i]}"
            raise DataError(
                f"{data.prefix}.idx: {entry}, but the one before ends at byte {starts[i]}; write the pair again"
            )
        end = int(starts[-1] + sizes[-1])
    if end != data.num_tokens * width:
        raise DataError(f"{data.prefix}.bin: has {data.num_tokens * width} bytes, but the index accounts for {end}")
    indices = data.document_indices
    for a in range(0, len(indices), CHUNK):
        steps = np.diff(indices[a : a + CHUNK + 1])
        if steps.size and steps.min() < 0:
            raise DataError(f"{data.prefix}.idx: document_indices[{a + int(steps.argmin()) + 1}] decreases")


def verify(
    data: IndexedDataset, info: dict[str, Any] | None, vocab_size: int | None, eod: int | None, bar: ProgressBar
) -> str:
    """Check all tokens and return a report.

    Args:
        data: The token file.
        info: The content of PREFIX.json.
        vocab_size: The upper bound of the ids; None checks only that they are not negative.
        eod: The end-of-document id, if it is known.
        bar: Gets the number of tokens that were read.

    Raises:
        DataError: The message has the file, document, position and id of the first fault.
    """
    check_index(data)
    for key, count in (("documents", len(data)), ("tokens", data.num_tokens)):
        if info is not None and info.get(key, count) != count:
            difference = f"{key} is {info[key]}, but the pair has {count}"
            raise DataError(f"{data.prefix}.json: {difference}; it is of another pair")
    num_nonempty = num_eods = num_final_eods = 0
    for first, last, begin, end in document_blocks(data):
        lengths = data.lengths[first:last]
        ends = begin + np.cumsum(lengths, dtype=np.int64)
        for a in range(begin, end, CHUNK):
            b = min(a + CHUNK, end)
            tokens = np.asarray(data.tokens[a:b])
            bar.add(b - a)
            is_wrong = tokens < 0
            if vocab_size is not None:
                is_wrong |= tokens >= vocab_size
            if is_wrong.any():
                i = int(is_wrong.argmax())
                document = int(np.searchsorted(ends, a + i, side="right"))
                token = a + i - int(ends[document] - lengths[document])
                position = f"document {first + document}, token {token} (position {a + i} of the file)"
                vocabulary = f"the vocabulary 0..{'' if vocab_size is None else vocab_size - 1}"
                problem = f"{position}: id {tokens[i]} is outside {vocabulary}"
                raise DataError(f"{data.prefix}.bin: {problem}; use the tokenizer that made the data")
            if eod is not None:
                num_eods += int(np.count_nonzero(tokens == eod))
                last_tokens = ends[(lengths > 0) & (ends > a) & (ends <= b)] - 1 - a
                num_final_eods += int(np.count_nonzero(tokens[last_tokens] == eod))
        num_nonempty += int(np.count_nonzero(lengths))
    bounds = f"ids below {vocab_size}" if vocab_size else "ids not negative (give --vocab-size to check more)"
    lines = [f"{data.prefix}: sound: {len(data)} documents, {data.num_tokens} tokens, {bounds}"]
    lines.append(f"empty documents: {len(data) - num_nonempty}")
    if eod is not None:
        lines.append(f"documents that end with the end-of-document id {eod}: {num_final_eods} of {num_nonempty}")
        lines.append(f"end-of-document ids inside documents: {num_eods - num_final_eods}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("prefix", help="the token file is the pair PREFIX.bin and PREFIX.idx")
    parser.add_argument("--png", metavar="FILE", help="plot the lengths of the documents")
    parser.add_argument(
        "--document", type=int, metavar="N", help="print document N, counted from 0; as text if a tokenizer is given"
    )
    parser.add_argument("--verify", action="store_true", help="check both files completely")
    parser.add_argument("--tokenizer-type", choices=REGISTRIES["tokenizer_type"])
    parser.add_argument("--plugin", action=PluginAction)
    parser.add_argument("--tokenizer-model", help="file of the tokenizer")
    parser.add_argument("--vocab-file", help="GPT-2 vocab.json")
    parser.add_argument("--merge-file", help="GPT-2 merges.txt")
    parser.add_argument("--tiktoken-pattern", help="pattern by which a TikTokenizer splits text")
    parser.add_argument(
        "--vocab-size", type=int, help="upper bound of the ids; for a NullTokenizer, without the end-of-document id"
    )
    return parser


@exits_with(3, DataError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(move_plugins_first(argv))
    data = IndexedDataset(args.prefix)
    info = read_sidecar(args.prefix)
    tokenizer = None
    if args.tokenizer_type is not None:
        tokenizer = build_tokenizer(
            args.tokenizer_type,
            tokenizer_model=args.tokenizer_model,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
            vocab_size=args.vocab_size,
            tiktoken_pattern=args.tiktoken_pattern,
        )
        check_tokenizer(args.prefix, tokenizer)
    if args.verify:
        tokenizer_info = info["tokenizer"] if info is not None else {}
        vocab_size, eod = tokenizer_info.get("vocab_size"), tokenizer_info.get("eod")
        if tokenizer is not None:
            vocab_size, eod = tokenizer.vocab_size, tokenizer.eod
        elif args.vocab_size is not None:
            vocab_size = args.vocab_size
        with ProgressBar(f"verifying {args.prefix}", data.num_tokens, "tokens") as bar:
            report = verify(data, info, vocab_size, eod, bar)
        print(report)
    if args.document is not None:
        print(show_document(data, args.document, tokenizer))
    if args.png is not None:
        try:
            save(picture(data), args.png)
        except (OSError, ValueError) as error:
            raise DataError(f"png={args.png} cannot be written: {error}") from error
    if not args.verify and args.document is None:
        print(summary(data, info))
    return 0


if __name__ == "__main__":
    run_program(main)
