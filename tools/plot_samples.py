#!/usr/bin/env python
"""A picture of how documents become samples, drawn from what the program reads for a toy set of documents.

python tools/plot_samples.py --out docs/samples.png
python tools/plot_samples.py --lengths 30 4 9 12 7 --split 4,1,0 --seq-length 10 --seed 3 --out samples.png
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from megalite.config.packages import MissingPackage, needs
from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.samples.blend import split_parts
from megalite.data.samples.epochs import build_epoch
from megalite.data.samples.gpt_dataset import GptDataset
from megalite.data.samples.packed_dataset import PackedDataset
from megalite.data.samples.permutation import fold, permute
from megalite.data.samples.token_line import Line
from tools.plot import positive
from tools.preprocess.indexed_writer import IndexedWriter
from tools.program import parser_of, refusing, run_program

LENGTHS = (14, 5, 9, 3, 22, 7, 4, 11, 6, 16, 8, 5)
COLOURS = (
    *("#4c8ed9", "#f2a65a", "#5aa469", "#d96b6b", "#8f78c4", "#a98467", "#d98cb3", "#7a8793", "#b5a642", "#3fa7a7"),
    *("#2f5f94", "#b06a1e"),
)
GAP = 1.2  # between samples that follow each other, in tokens


def make_figure(heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """A figure with one row of each height; matplotlib is imported here, as only the picture needs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackage(needs("a picture", "matplotlib")) from None
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(hspace=0.06)
    return figure, list(figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights}))


def runs(documents: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(document, first position, one behind the last) of the stretches of one document.

    >>> runs(np.array([3, 3, 3, -1, 5]))
    [(3, 0, 3), (-1, 3, 4), (5, 4, 5)]
    """
    borders = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(documents)]
    return [(int(documents[a]), a, b) for a, b in zip(borders, borders[1:], strict=False)]


def bar(
    axis: Any, x: float, documents: NDArray[np.int64], faint_from: int | None = None, cuts: Sequence[int] = ()
) -> None:
    """One token beside the other from x on, coloured by document; -1 is padding. From `faint_from` on they are pale.

    A document's number stands in its widest part between two `cuts`.
    """
    for document, a, b in runs(documents):
        if document < 0:
            axis.barh(0, b - a, left=x + a, height=1, color="white", edgecolor="#999999", hatch="////", linewidth=0.6)
            continue
        colour = COLOURS[document % len(COLOURS)]
        solid = b if faint_from is None else max(a, min(b, faint_from))
        axis.barh(0, solid - a, left=x + a, height=1, color=colour, edgecolor="white", linewidth=0.8)
        if solid < b:
            axis.barh(0, b - solid, left=x + solid, height=1, color=colour, alpha=0.35, linewidth=0)
        parts = [a, *(cut for cut in cuts if a < cut < solid), solid]
        length, begin = max((end - begin, begin) for begin, end in zip(parts, parts[1:], strict=False))
        if length >= 2:
            at = x + begin + length / 2
            axis.text(at, 0, str(document), ha="center", va="center", color="white", fontsize=8.5)


@dataclass(frozen=True)
class Toy:
    """A stand-in for a data set with documents of these lengths. A token is its document's number, padding is -1."""

    file: NDArray[np.int64]
    ranges: list[range]  # documents for training, validation and test
    epoch_tokens: int
    stream: NDArray[np.int64]  # the first epoch and the beginning of the next
    windows: list[tuple[NDArray[np.int64], int]]  # samples in training order, and which window of the stream each is
    bins: list[tuple[NDArray[np.int64], int]]  # the same with best-fit packing
    cut: int  # documents, by windows
    packed: PackedDataset


def read_toy(lengths: list[int], split: str, seq_length: int, seed: int) -> Toy:
    data_lengths = np.array(lengths, np.int32)
    document_of = np.append(np.repeat(np.arange(len(lengths)), lengths), -1)  # by token id; the last one is padding
    pad = len(document_of) - 1
    with tempfile.TemporaryDirectory() as folder:
        with IndexedWriter(Path(folder) / "toy", np.int32) as writer:
            writer.add_many(np.arange(pad), data_lengths)
            writer.finish()
        data = IndexedDataset(Path(folder) / "toy")
        parts = [part or (0.0, 0.0) for part in split_parts(split)]
        ranges = [range(round(a * len(lengths)), round(b * len(lengths))) for a, b in parts]
        train = ranges[0]
        if not train:
            raise DataError(f"split={split!r} leaves no document for training; make its first part larger")
        plain = GptDataset(data, train, seq_length, seed)
        packed = PackedDataset(data, train, seq_length, seed, pad)
        total, bins = plain.num_tokens, packed.plan.num_bins
        count = -(-total // seq_length)  # samples that begin in the first epoch
        rows = document_of[plain.samples(np.arange(count))]
        packed_rows = document_of[packed.samples(np.arange(bins))]
    key = fold(seed, "train")
    epochs = [build_epoch(data_lengths[: len(train)], fold(key, "documents", e)) for e in (0, 1)]
    stream = np.concatenate([np.repeat(epoch.order, data_lengths[epoch.order]) for epoch in epochs])
    stream = stream[: count * seq_length + seq_length // 2].astype(np.int64)
    reach = epochs[0].starts[:-1] % seq_length + np.diff(epochs[0].starts)  # from its window's beginning to its end
    numbers = (Line(total, key).place(np.arange(count), seq_length) // seq_length).tolist()
    bin_numbers = permute(np.arange(bins), bins, fold(key, "bins", 0)).tolist()
    windows = list(zip(rows, numbers, strict=True))
    cut = int((reach > seq_length + 1).sum())
    packing = list(zip(packed_rows, bin_numbers, strict=True))
    return Toy(document_of[:-1], ranges, total, stream, windows, packing, cut, packed)


def draw(lengths: list[int], split: str, seq_length: int, seed: int) -> Any:
    """The figure: file, stream with its cuts, samples in training order, and the same documents packed."""
    toy = read_toy(lengths, split, seq_length, seed)
    count, total, plan = len(toy.windows), toy.epoch_tokens, toy.packed.plan
    tops = (0.6, 0.95, 0.6, 0.6)
    figure, axes = make_figure([top + 1.2 for top in tops])
    width = max(len(toy.file) + 1, len(toy.stream) + 1, max(count, len(toy.bins)) * (seq_length + 1 + GAP))
    for axis, top in zip(axes, tops, strict=True):
        axis.set_xlim(-0.5, width)
        axis.set_ylim(-1.2, top)
        axis.axis("off")

    def title(axis: Any, text: str) -> None:
        axis.set_title(text, loc="left", fontsize=9.5, fontweight="bold")

    def note(axis: Any, x: float, text: str, y: float = -0.98, **options: Any) -> None:
        axis.text(x, y, text, ha="center", va="center", fontsize=8, color="#333333", **options)

    what = f"1  The file: {len(lengths)} documents, divided into training, validation and test by --split {split}"
    title(axes[0], what)
    bar(axes[0], 0, toy.file)
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    for name, part in zip(("train", "valid", "test"), toy.ranges, strict=True):
        if part:
            begin, end = ends[part.start], ends[part.stop]
            axes[0].plot([begin + 0.2, end - 0.2], [-0.66, -0.66], color="#333333", linewidth=1.2)
            note(axes[0], (begin + end) / 2, name)

    title(axes[1], f"2  An epoch: its documents shuffled and laid end to end, cut every {seq_length} tokens")
    bar(axes[1], 0, toy.stream, cuts=[j * seq_length for j in range(count + 1)])
    axes[1].plot([total, total], [-0.62, 0.8], color="black", linewidth=2)
    axes[1].text(total + 0.6, 0.72, "epoch 1, another order", fontsize=8, va="center")
    for j in range(count + 1):
        axes[1].plot([j * seq_length] * 2, [-0.8, 0.62], color="black", linewidth=1, linestyle=(0, (3, 2)))
        if j < count:
            note(axes[1], (j + 0.5) * seq_length, f"window {j}")

    title(axes[2], "3  What is trained on: the windows shuffled, each with the token after it (pale), a label only")
    cut = f"documents cut: {plan.pieces.num_cut} (above: {toy.cut}); {100 * plan.padding:.0f} % padding, hatched"
    title(axes[3], f"4  The same documents with best-fit packing; {cut}")
    step = seq_length + 1 + GAP
    for i, (row, number) in enumerate(toy.windows):
        bar(axes[2], i * step, row, seq_length)
        note(axes[2], i * step + (seq_length + 1) / 2, f"sample {i}: window {number}")
    for i, (row, number) in enumerate(toy.bins):
        bar(axes[3], i * step, row)
        note(axes[3], i * step + (seq_length + 1) / 2, f"sample {i}: bin {number}")
    return figure


@refusing(2, DataError, OSError)
def main(argv: list[str]) -> None:
    parser = parser_of(__doc__, allow_abbrev=True)
    parser.add_argument("--lengths", type=positive, nargs="+", default=list(LENGTHS), help="tokens of each document")
    parser.add_argument("--split", default="10,1,1", help="as --split of training")
    parser.add_argument("--seq-length", type=positive, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="samples.png")
    args = parser.parse_args(argv)
    draw(args.lengths, args.split, args.seq_length, args.seed).savefig(args.out, dpi=200)


if __name__ == "__main__":
    run_program(main)
