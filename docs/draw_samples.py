"""Draw docs/samples.png: how documents become samples, read by the package from a file of twelve small documents.

python -m docs.draw_samples docs/samples.png
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.data_path import split_fractions
from megalite.data.datasets.epoch_order import build_epoch
from megalite.data.datasets.gpt_dataset import GPTDataset, TokenStream
from megalite.data.datasets.packed_dataset import PackedDataset
from megalite.data.datasets.permutation import fold, permute
from megalite.data.files.indexed_dataset import IndexedDataset
from tools.plots.style import Picture, color, save
from tools.preprocess.indexed_writer import IndexedWriter

LENGTHS = (14, 5, 9, 3, 22, 7, 4, 11, 6, 16, 8, 5)
SPLIT, SEQ_LENGTH, SEED = "10,1,1", 16, 1
DOCUMENT_COLORS = (
    *("#4c8ed9", "#f2a65a", "#5aa469", "#d96b6b", "#8f78c4", "#a98467"),
    *("#d98cb3", "#7a8793", "#b5a642", "#3fa7a7", "#2f5f94", "#b06a1e"),
)
GAP = 1.2  # between samples, in tokens
PADDING = -1  # instead of a document

Documents = NDArray[np.int64]  # the document of each token


@dataclass(frozen=True)
class Row:
    """A sample or a bin in the order of training.

    Attributes:
        documents: The document of each of its tokens.
        number: Its number in the order of the token stream, or of the bins.
    """

    documents: Documents
    number: int


@dataclass(frozen=True)
class Example:
    """The samples of a small data set.

    Attributes:
        file: The document of each token of the file.
        sets: The documents of the training, validation and test set.
        epoch_tokens: The tokens of an epoch of the training set.
        stream: The first epoch of the token stream, and the start of the second.
        samples: The samples that start in the first epoch.
        num_cut: The documents that samples cut.
        bins: The bins of the first epoch with best-fit packing.
        num_cut_by_packing: The documents that bins cut.
        padding: The fraction of the bins that is padding.
    """

    file: Documents
    sets: list[range]
    epoch_tokens: int
    stream: Documents
    samples: list[Row]
    num_cut: int
    bins: list[Row]
    num_cut_by_packing: int
    padding: float


def read_example() -> Example:
    """Write the documents to a file, and return what the package reads from it."""
    lengths = np.array(LENGTHS, np.int32)
    document_of = np.append(np.repeat(np.arange(len(LENGTHS)), LENGTHS), PADDING)  # a token's id is its position
    pad = len(document_of) - 1
    fractions = [fraction or (0.0, 0.0) for fraction in split_fractions(SPLIT)]
    sets = [range(round(start * len(LENGTHS)), round(end * len(LENGTHS))) for start, end in fractions]
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "example"
        with IndexedWriter(prefix, np.int32) as writer:
            writer.add_many(np.arange(pad), lengths)
            writer.finish()
        data = IndexedDataset(prefix)
        plain = GPTDataset(data, sets[0], SEQ_LENGTH, SEED)
        packed = PackedDataset(data, sets[0], SEQ_LENGTH, SEED, pad)
        epoch_tokens, num_bins = plain.num_tokens, packed.plan.num_bins
        num_samples = -(-epoch_tokens // SEQ_LENGTH)
        samples = document_of[plain.samples(np.arange(num_samples))]
        bins = document_of[packed.samples(np.arange(num_bins))]
    key = fold(SEED, "train")
    epochs = [build_epoch(lengths[: len(sets[0])], fold(key, "documents", epoch)) for epoch in (0, 1)]
    stream = np.concatenate([np.repeat(epoch.order, lengths[epoch.order]) for epoch in epochs])
    first_epoch = epochs[0]
    document_ends = first_epoch.starts[:-1] % SEQ_LENGTH + np.diff(first_epoch.starts)  # from the start of a sample
    sample_starts = TokenStream(epoch_tokens, key).sample_starts(np.arange(num_samples), SEQ_LENGTH)
    bin_numbers = permute(np.arange(num_bins), num_bins, fold(key, "bins", 0))
    return Example(
        file=document_of[:-1],
        sets=sets,
        epoch_tokens=epoch_tokens,
        stream=stream[: num_samples * SEQ_LENGTH + SEQ_LENGTH // 2].astype(np.int64),
        samples=[Row(row, int(start) // SEQ_LENGTH) for row, start in zip(samples, sample_starts, strict=True)],
        num_cut=int((document_ends > SEQ_LENGTH + 1).sum()),
        bins=[Row(row, int(number)) for row, number in zip(bins, bin_numbers, strict=True)],
        num_cut_by_packing=packed.plan.pieces.num_cut,
        padding=packed.plan.padding,
    )


def draw_tokens(
    axis: Any, x: float, documents: Documents, label_start: int | None = None, cuts: Sequence[int] = ()
) -> None:
    """Draw tokens side by side in the colors of their documents, with the documents' numbers.

    Args:
        x: The position of the first token.
        documents: The document of each token.
        label_start: The first token that is a label only, which is drawn pale.
        cuts: Positions where samples start; a number stands in the widest part between them.
    """
    changes = (np.flatnonzero(np.diff(documents)) + 1).tolist()
    for start, end in zip([0, *changes], [*changes, len(documents)], strict=True):
        document = int(documents[start])
        if document == PADDING:
            axis.barh(0, end - start, left=x + start, height=1, color="white", edgecolor="#999999", hatch="////")
            continue
        document_color = DOCUMENT_COLORS[document]
        input_end = end if label_start is None else max(start, min(end, label_start))
        axis.barh(0, input_end - start, left=x + start, height=1, color=document_color, edgecolor="white")
        axis.barh(0, end - input_end, left=x + input_end, height=1, color=document_color, alpha=0.35)
        edges = [start, *(cut for cut in cuts if start < cut < input_end), input_end]
        width, left = max((b - a, a) for a, b in zip(edges, edges[1:], strict=False))
        if width >= 2:
            axis.text(x + left + width / 2, 0, str(document), ha="center", va="center", color="white")


def picture() -> Picture:
    """Return the file, the token stream, the samples in the order of training, and the same documents packed."""
    example = read_example()
    num_samples = len(example.samples)
    step = SEQ_LENGTH + 1 + GAP
    packing = f"{example.num_cut_by_packing} document cut instead of {example.num_cut}"

    def note(axis: Any, x: float, text: str) -> None:
        axis.text(x, -0.98, text, ha="center", va="center", color=color("muted"))

    def draw_file(axis: Any) -> None:
        draw_tokens(axis, 0, example.file)
        ends = [0, *np.cumsum(LENGTHS).tolist()]
        for name, documents in zip(("training", "valid.", "test"), example.sets, strict=True):
            start, end = ends[documents.start], ends[documents.stop]
            axis.plot([start + 0.2, end - 0.2], [-0.66, -0.66], color=color("ink"), linewidth=1.2)
            note(axis, (start + end) / 2, name)

    def draw_stream(axis: Any) -> None:
        cuts = [i * SEQ_LENGTH for i in range(num_samples + 1)]
        draw_tokens(axis, 0, example.stream, cuts=cuts)
        axis.plot([example.epoch_tokens] * 2, [-0.62, 0.8], color=color("ink"), linewidth=2)
        axis.text(example.epoch_tokens + 0.6, 0.72, "epoch 1, in another order", va="center")
        for i, cut in enumerate(cuts):
            axis.plot([cut, cut], [-0.8, 0.62], color=color("ink"), linewidth=1, linestyle=(0, (3, 2)))
            if i < num_samples:
                note(axis, cut + SEQ_LENGTH / 2, f"sample {i}")

    def draw_rows(axis: Any, rows: Sequence[Row], noun: str, label_start: int | None) -> None:
        for i, row in enumerate(rows):
            draw_tokens(axis, i * step, row.documents, label_start)
            note(axis, i * step + step / 2 - GAP / 2, f"{noun} {row.number}")

    def draw(width: float) -> Any:
        from matplotlib.figure import Figure

        fig = Figure((width, 5.3), layout="constrained", facecolor=color("paper"))
        axes = fig.subplots(4, 1, height_ratios=(1.8, 2.15, 1.8, 1.8))
        titles = (
            f"1  File: {len(LENGTHS)} documents, divided into three sets by --split {SPLIT}",
            f"2  Token stream: the training documents of each epoch, shuffled, and cut every {SEQ_LENGTH} tokens",
            "3  Order of training: the samples, shuffled, each with one more token (pale), which is only a label",
            f"4  With --document-packing best-fit: {packing}, {100 * example.padding:.0f} % padding (hatched)",
        )
        for axis, title, top in zip(axes, titles, (0.6, 0.95, 0.6, 0.6), strict=True):
            axis.set_title(title, loc="left", fontweight="bold", color=color("ink"))
            axis.set_xlim(-0.5, max(len(example.file) + 1, len(example.stream) + 1, num_samples * step))
            axis.set_ylim(-1.2, top)
            axis.axis("off")
        draw_file(axes[0])
        draw_stream(axes[1])
        draw_rows(axes[2], example.samples, "sample", SEQ_LENGTH)
        draw_rows(axes[3], example.bins, "bin", None)
        return fig

    return Picture("samples", "Documents, the token stream, and samples in the order of training.", draw)


if __name__ == "__main__":
    save(picture(), Path(sys.argv[1]))
