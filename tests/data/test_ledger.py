"""What a run has seen of each source, and that it continues with what is left when the blend changes."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from token_files import numbered

from megalite.data.errors import DataError
from megalite.data.samples.blend import build_blend
from megalite.data.samples.ledger import Ledger


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """600, 960 and 300 tokens in documents of all lengths; every token is another number."""
    folder, rng = tmp_path_factory.mktemp("ledger"), np.random.default_rng(0)
    made = []
    for k, tokens in enumerate((600, 960, 300)):
        cuts = np.sort(rng.choice(tokens, 20, replace=False))
        lengths = np.diff(np.concatenate([[0], cuts, [tokens]])).tolist()
        made.append(numbered(folder / "abc"[k], lengths, 1000 * k).prefix)
    return made[0], made[1], made[2]


def ledger(paths: list[str], seq_length: int, seed: int = 1) -> Ledger:
    return Ledger(build_blend(paths, seq_length, seed, "train"), seed)


def reopened(saved: dict[str, object], paths: list[str], seq_length: int) -> tuple[Ledger, list[str]]:
    made = ledger(paths, seq_length)
    notes = made.go_on(json.loads(json.dumps(saved)))
    return made, notes


def test_resuming_with_the_same_blend_is_the_same_run(files: tuple[str, str, str], tmp_path: Path) -> None:
    a, b, _ = files
    paths = ["0.3", a, "0.7", b]
    straight = ledger(paths, 8)
    again, notes = reopened(straight.to_json(57), paths, 8)
    assert notes == []
    index = np.arange(57, 300)
    assert np.array_equal(straight.blend.samples(index), again.blend.samples(index))
    assert again.totals(200) == straight.totals(200)
    twice, _ = reopened(again.to_json(130), paths, 8)
    assert np.array_equal(straight.blend.samples(np.arange(130, 300)), twice.blend.samples(np.arange(130, 300)))
    assert twice.totals(200) == straight.totals(200) and len(twice.eras) == 1
    for suffix in (".bin", ".idx"):  # a moved file is the same source
        (tmp_path / f"moved{suffix}").write_bytes(Path(a + suffix).read_bytes())
    moved, notes = reopened(straight.to_json(57), ["0.3", str(tmp_path / "moved"), "0.7", b], 8)
    assert notes == [] and np.array_equal(moved.blend.samples(index), straight.blend.samples(index))


def test_totals_are_what_was_read(files: tuple[str, str, str]) -> None:
    a, b, _ = files
    made = ledger(["1", a, "3", b], 8)
    for consumed in (0, 1, 40, 200, 90):  # also back again
        rows = made.blend.samples(np.arange(consumed))[:, :-1].reshape(-1)
        totals = {total.name: total for total in made.totals(consumed).values()}
        for prefix, first, tokens in ((a, 0, 600), (b, 1000, 960)):
            own = rows[(rows >= first) & (rows < first + tokens)]
            assert totals[prefix].tokens == own.size
            assert totals[prefix].epochs == own.size / tokens
            begins = made.blend.datasets[(a, b).index(prefix)]._data.pointers // 4 + first  # type: ignore[attr-defined]
            assert totals[prefix].documents == np.isin(own, begins).sum()


ERA = st.tuples(st.integers(0, 60), st.sampled_from([4, 8, 16]), st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=40)
@example([(33, 16, 1, 1), (32, 4, 5, 1), (23, 16, 1, 1)])
@given(st.lists(ERA, min_size=2, max_size=4))
def test_every_token_once_per_epoch_whatever_the_blend_becomes(
    files: tuple[str, str, str], eras: list[tuple[int, int, int, int]]
) -> None:
    a, b, _ = files
    seen: Counter[int] = Counter()
    saved, consumed = None, 0
    for samples, seq_length, left, right in eras:
        paths = [str(left), a, str(right), b]
        made = ledger(paths, seq_length) if saved is None else reopened(saved, paths, seq_length)[0]
        rows = made.blend.samples(np.arange(consumed, consumed + samples))[:, :-1]
        seen.update(rows.reshape(-1).tolist())
        consumed += samples
        saved = made.to_json(consumed)
    taken = made.eras[-1].taken(consumed - made.eras[-1].begin)
    ends = [
        source._line.after(source._taken + n, seq_length) for source, n in zip(made.blend.datasets, taken, strict=True)
    ]
    for total, first, tokens, line in zip(saved["sources"], (0, 1000), (600, 960), ends, strict=True):
        counts = [seen[first + i] for i in range(tokens)]
        assert sum(counts) == total["tokens"] and total["epochs"] == total["tokens"] / tokens
        full = int(total["epochs"])
        # of an epoch that no era has read through, each era may have read one sample that ends in the next epoch
        assert sum(count not in (full, full + 1) for count in counts) <= line.skip
        assert line.skip <= sum(length - 1 for _, length, _, _ in eras)


def test_a_source_comes_another_goes(files: tuple[str, str, str]) -> None:
    a, b, c = files
    first = ledger(["1", a, "1", b], 8)
    second, notes = reopened(first.to_json(60), ["1", b, "1", c], 8)
    assert [note.partition(",")[0] for note in notes[1:]] == [f"{c} is new", f"{a} is no longer used"]
    rows = second.blend.samples(np.arange(60, 140))
    b_before = {int(t) for t in first.blend.samples(np.arange(60))[:, :-1].reshape(-1) if 1000 <= t < 2000}
    b_after = {int(t) for t in rows[:, :-1].reshape(-1) if 1000 <= t < 2000}
    assert len(b_before) == 240 and len(b_after) == 320 and not b_before & b_after
    third, _ = reopened(second.to_json(140), ["1", a, "1", b], 8)  # and comes back where it was
    a_before = {int(t) for t in first.blend.samples(np.arange(60))[:, :-1].reshape(-1) if t < 1000}
    a_after = {int(t) for t in third.blend.samples(np.arange(140, 200))[:, :-1].reshape(-1) if t < 1000}
    assert len(a_before) == len(a_after) == 240 and not a_before & a_after
    assert {t.name: t.tokens for t in third.totals(200).values()} == {a: 480, b: 800, c: 320}


def test_another_seed_and_a_damaged_ledger_are_refused(files: tuple[str, str, str]) -> None:
    a, _, _ = files
    saved = ledger([a], 8, seed=2).to_json(30)
    with pytest.raises(DataError, match="seed=1, but the data so far came in the order of seed 2"):
        ledger([a], 8).go_on(saved)
    good = ledger([a], 8).to_json(30)
    odd = [{"eras": eras} for eras in ([], "x", [{**good["eras"][0], "begin": 31}])]
    for damage in ({"version": 9}, {"consumed": -1}, {"sources": []}, {"sources": [{}]}, *odd):
        with pytest.raises(DataError, match="ledger is damaged"):
            ledger([a], 8).go_on({**good, **damage})
