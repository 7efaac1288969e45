#!/usr/bin/env python
"""Look into a token file: counts, lengths of its documents, the text of one document; or verify it completely.

    python tools/inspect_data.py PREFIX [--png lengths.png]
    python tools/inspect_data.py PREFIX --document 17 --tokenizer-type Llama2Tokenizer --tokenizer-model spm.model
    python tools/inspect_data.py PREFIX --verify [--vocab-size N]

--verify reads both files to the end: offsets, counts, every id below the vocabulary (of PREFIX.json, or --vocab-size),
how many documents end with the end-of-document id. The first fault is named and the exit code is 3.
"""

import argparse
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
from tools.plots.style import Picture, figure, ink, save

CHUNK = 1 << 22  # tokens, or index entries, read at a time
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
BAR = 50  # characters of the longest bar
SHOWN = 24  # ids printed of a document


def histogram(lengths: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """(shortest, longest, documents) for lengths 0, 1, 2..3, 4..7, 8..15 and so on, up to the longest there is."""
    counts = np.zeros(33, np.int64)
    for a in range(0, len(lengths), CHUNK):
        counts += np.bincount(np.frexp(lengths[a : a + CHUNK])[1], minlength=33)
    last = int(np.flatnonzero(counts)[-1]) if counts.any() else 0
    return [(1 << k >> 1, max((1 << k) - 1, 0), int(counts[k])) for k in range(last + 1)]


def summary(data: IndexedDataset, info: dict[str, Any] | None) -> str:
    lines = [f"{data.prefix}: {len(data)} documents, {data.num_tokens} tokens ({data.dtype})"]
    if info is None:
        lines.append("no prefix.json: the tokenizer that made it is not known")
    else:
        made_by = info["tokenizer"]
        vocabulary = f"vocabulary {made_by['vocab_size']}, end of document {made_by.get('eod')}"
        lines.append(f"made by {made_by.get('name')}, {vocabulary}, fingerprint {made_by['fingerprint'][:12]}")
        sources = info.get("sources") or []
        lines.append(f"sources: {', '.join(map(str, sources[:5]))}{', ...' if len(sources) > 5 else ''}")
    if len(data):
        lengths = np.sort(data.lengths)  # 4 bytes per document
        marks = ((q, int(lengths[min(len(lengths) * q // 100, len(lengths) - 1)])) for q in QUANTILES)
        lines.append(f"tokens per document: mean {data.num_tokens / len(data):.1f}")
        lines.append("  " + "  ".join(f"{q}%: {value}" for q, value in marks))
        rows = histogram(data.lengths)
        most = max(count for _, _, count in rows)
        for low, high, count in rows:
            name = str(low) if low == high else f"{low}..{high}"
            lines.append(f"  {name:>23} {count:>12} {'#' * -(-BAR * count // most)}")
    return "\n".join(lines)


def picture(data: IndexedDataset) -> Picture:
    """The histogram of lengths, by documents and by the tokens in them."""
    rows = histogram(data.lengths)
    names = [str(low) if low == high else f"{low}-{high}" for low, high, _ in rows]
    tokens = np.bincount(np.frexp(data.lengths)[1], weights=data.lengths, minlength=len(rows))
    title = f"{Path(data.prefix).name}: {len(data):,} documents, {data.num_tokens:,} tokens"

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.9])
        places = np.arange(len(rows))
        axis.bar(places - 0.2, [100 * row[2] / len(data) for row in rows], 0.4, label="documents", color=ink("blue"))
        axis.bar(places + 0.2, 100 * tokens / max(data.num_tokens, 1), 0.4, label="tokens", color=ink("orange"))
        axis.set_xticks(places, names, rotation=45, ha="right")
        axis.set_xlabel("tokens per document")
        axis.set_ylabel("share, %")
        axis.set_title(title, loc="left")
        axis.legend()
        return fig

    return Picture("lengths", title, draw)


def show_document(data: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> str:
    if not 0 <= document < len(data):
        raise DataError(f"document={document} is outside 0..{len(data) - 1}")
    ids = np.asarray(data.document(document)).tolist()
    rest = f" ... ({len(ids) - SHOWN} rest)" if len(ids) > SHOWN else ""
    lines = [f"document {document}: {len(ids)} tokens: {' '.join(map(str, ids[:SHOWN]))}{rest}"]
    if tokenizer is not None:
        wrong = [i for i in ids if not 0 <= i < tokenizer.vocab_size]
        if wrong:
            at = f"document {document}, token {ids.index(wrong[0])}: id {wrong[0]}"
            outside = f"outside the vocabulary 0..{tokenizer.vocab_size - 1} of {tokenizer.name}"
            raise DataError(f"{data.prefix}.bin: {at} is {outside}")
        lines.append(tokenizer.decode(ids))
    return "\n".join(lines)


def check_index(data: IndexedDataset) -> None:
    """Sequences lie end to end, documents in order; all entries. Raises DataError with the first fault."""
    width, n, end = data.dtype.itemsize, len(data), 0
    for a in range(0, n, CHUNK):
        sizes = data.lengths[a : a + CHUNK].astype(np.int64) * width
        begins = end + np.cumsum(sizes) - sizes
        wrong = np.flatnonzero((sizes < 0) | (data.pointers[a : a + CHUNK] != begins))
        if wrong.size:
            i = int(wrong[0])
            here = f"document {a + i}: {sizes[i] // width} tokens at byte {data.pointers[a + i]}"
            before = f"the one before ends at byte {begins[i]}"
            raise DataError(f"{data.prefix}.idx: {here}, but {before}; write the pair again")
        end = int(begins[-1] + sizes[-1])
    if end != data.num_tokens * width:
        raise DataError(f"{data.prefix}.bin: has {data.num_tokens * width} bytes, but the index accounts for {end}")
    ends = data.document_indices
    for a in range(0, len(ends), CHUNK):
        steps = np.diff(ends[a : a + CHUNK + 1])
        if steps.size and steps.min() < 0:
            raise DataError(f"{data.prefix}.idx: document_indices[{a + int(steps.argmin()) + 1}] decreases")


def verify(
    data: IndexedDataset, info: dict[str, Any] | None, vocab_size: int | None, eod: int | None, bar: ProgressBar
) -> str:
    """A report of what was checked. Raises DataError with file, document, position and id of the first fault. `bar`
    counts tokens."""
    check_index(data)
    for key, count in (("documents", len(data)), ("tokens", data.num_tokens)):
        if info is not None and info.get(key, count) != count:
            differs = f"{key} is {info[key]}, but the pair has {count}"
            raise DataError(f"{data.prefix}.json: {differs}; it is of another pair")
    ended = filled = separators = 0
    for first, last, begin, end in document_blocks(data):
        lengths = data.lengths[first:last]
        ends = begin + np.cumsum(lengths, dtype=np.int64)
        for a in range(begin, end, CHUNK):
            b = min(a + CHUNK, end)
            tokens = np.asarray(data.tokens[a:b])
            bar.add(b - a)
            if tokens.min() < 0 or (vocab_size is not None and tokens.max() >= vocab_size):
                at = int(np.flatnonzero((tokens < 0) | (tokens >= (vocab_size or 1 << 62)))[0])
                inside = int(np.searchsorted(ends, a + at, side="right"))
                token = a + at - int(ends[inside] - lengths[inside])
                where = f"document {first + inside}, token {token} (position {a + at} of the file): id {tokens[at]}"
                outside = f"outside the vocabulary 0..{'' if vocab_size is None else vocab_size - 1}"
                raise DataError(f"{data.prefix}.bin: {where} is {outside}; use the tokenizer that made the data")
            if eod is not None:
                separators += int(np.count_nonzero(tokens == eod))
                lasts = ends[(lengths > 0) & (ends > a) & (ends <= b)] - 1 - a
                ended += int(np.count_nonzero(tokens[lasts] == eod))
        filled += int(np.count_nonzero(lengths))
    known = f"ids below {vocab_size}" if vocab_size else "ids not negative (give --vocab-size to check more)"
    lines = [f"{data.prefix}: sound: {len(data)} documents, {data.num_tokens} tokens, {known}"]
    lines.append(f"empty documents: {len(data) - filled}")
    if eod is not None:
        lines.append(f"documents that end with the end-of-document id {eod}: {ended} of {filled}")
        lines.append(f"end-of-document ids inside documents: {separators - ended}")
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
    args = build_parser().parse_args(move_plugins_first(argv))
    data, info, tokenizer = IndexedDataset(args.prefix), read_sidecar(args.prefix), None
    if args.tokenizer_type is not None:
        names = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size", "tiktoken_pattern")
        tokenizer = build_tokenizer(args.tokenizer_type, **{name: getattr(args, name) for name in names})
        check_tokenizer(args.prefix, tokenizer)
    if args.verify:
        made_by = info["tokenizer"] if info is not None else {}
        vocab_size, eod = made_by.get("vocab_size"), made_by.get("eod")
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
