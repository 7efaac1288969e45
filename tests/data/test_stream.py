"""Every token once per epoch, whatever the sequence length becomes on the way."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megalite.data.samples.epochs import build_epoch
from megalite.data.samples.token_line import Line


def inputs(line: Line, index: NDArray[np.int64], seq_length: int) -> list[tuple[int, int]]:
    """(epoch, token) of every input of the samples."""
    found = []
    epochs, offsets, counts, places = line.cover(line.place(index, seq_length), seq_length)
    for k in np.argsort(places).tolist():
        found += [(int(epochs[k]), int(offsets[k]) + i) for i in range(int(counts[k]))]
    return found


@settings(max_examples=150)
@given(
    tokens=st.integers(1, 60),
    eras=st.lists(st.tuples(st.integers(1, 13), st.integers(0, 30)), max_size=5),
    last=st.integers(1, 13),
)
def test_every_token_once_per_epoch(tokens: int, eras: list[tuple[int, int]], last: int) -> None:
    line, seen = Line(tokens, 5), []
    for seq_length, samples in eras:
        seen += inputs(line, np.arange(samples), seq_length)
        line = line.after(samples, seq_length)
    index = np.arange(3 * tokens // last + 3)
    seen += inputs(line, index, last)
    starts = line.place(index, last)
    columns = line.cover(starts, last + 1)
    epochs, offsets, counts, places = (column[np.argsort(columns[3])] for column in columns)
    assert np.array_equal(np.cumsum(counts)[:-1], places[1:]) and counts.sum() == len(starts) * (last + 1)
    pieces = [zip([e] * n, range(at, at + n), strict=True) for e, at, n in zip(epochs, offsets, counts, strict=True)]
    each = (starts[:, None] + np.arange(last + 1)).reshape(-1)  # token by token
    assert [*itertools.chain(*pieces)] == [*zip(*(a.tolist() for a in line.cover(each, 1)[:2]), strict=True)]
    assert len(set(seen)) == len(seen)
    # whatever segment a sample of the last era begins in, all segments before it are used up
    done = {token for token in seen if token[0] < max(seen)[0] - 1}
    assert done == {(epoch, token) for epoch in range(max(seen)[0] - 1) for token in range(tokens)}


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda x: sum(x) > 0),
    eras=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=4),
    last=st.tuples(st.integers(1, 9), st.integers(0, 20)),
)
def test_documents_begun_are_counted_exactly(
    lengths: list[int], eras: list[tuple[int, int]], last: tuple[int, int]
) -> None:
    sizes = np.array(lengths, np.int32)
    line = Line(int(sizes.sum()), 3)

    def starts_of(epoch: int) -> NDArray[np.int64]:
        return build_epoch(sizes, epoch).starts

    for seq_length, samples in [*eras, last]:
        used = set(inputs(line, np.arange(samples), seq_length))
        # an empty document begins with the token after it, so a token can begin several
        want = sum((epoch, int(s)) in used for epoch in {e for e, _ in used} for s in starts_of(epoch)[:-1])
        middle = samples // 2
        got = [line.documents_begun(range(*part), seq_length, starts_of) for part in ((0, middle), (middle, samples))]
        assert sum(got) == want
        line = line.after(samples, seq_length)


def test_samples_of_an_epoch_are_shuffled_among_themselves() -> None:
    starts = Line(97, 11).place(np.arange(26), 8)  # 13 samples begin in epoch 0, 12 in epoch 1
    assert starts.tolist() != sorted(starts.tolist())
    assert sorted(starts[:13].tolist()) == list(range(0, 104, 8))
    assert sorted(starts[13:25].tolist()) == list(range(104, 200, 8))
    left = Line(10_000, 1).after(300, 8).place(np.arange(300), 16)
    assert not np.array_equal(left, np.sort(left)) and len(set(left.tolist())) == 300
