"""The ledger counts what a run has read of each source; when the blend changes, the run continues with the rest."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from token_files import write_numbered

from megalite.config.options import DataConfig
from megalite.data.datasets.blended_dataset import build_blend
from megalite.data.datasets.ledger import DataLedger
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Return prefixes of pairs with 600, 960 and 300 tokens in documents of all lengths; all token ids differ."""
    directory, rng = tmp_path_factory.mktemp("ledger"), np.random.default_rng(0)
    prefixes = []
    for i, tokens in enumerate((600, 960, 300)):
        cuts = np.sort(rng.choice(tokens, 20, replace=False))
        lengths = np.diff(np.concatenate([[0], cuts, [tokens]])).tolist()
        prefixes.append(write_numbered(directory / "abc"[i], lengths, 1000 * i).prefix)
    return prefixes[0], prefixes[1], prefixes[2]


def make_ledger(paths: list[str], seq_length: int, seed: int = 1) -> DataLedger:
    return DataLedger(build_blend(paths, seq_length, seed, "train"), seed)


def reopened(saved: dict[str, object], paths: list[str], seq_length: int) -> tuple[DataLedger, list[str]]:
    ledger = make_ledger(paths, seq_length)
    notes = ledger.resume(json.loads(json.dumps(saved)))
    return ledger, notes


def test_resume_with_the_same_blend_is_the_same_run(files: tuple[str, str, str], tmp_path: Path) -> None:
    a, b, _ = files
    paths = ["0.3", a, "0.7", b]
    uninterrupted = make_ledger(paths, 8)
    resumed, notes = reopened(uninterrupted.to_json(57), paths, 8)
    assert notes == []
    index = np.arange(57, 300)
    assert np.array_equal(uninterrupted.blend.samples(index), resumed.blend.samples(index))
    assert resumed.totals(200) == uninterrupted.totals(200)
    resumed_twice, _ = reopened(resumed.to_json(130), paths, 8)
    assert np.array_equal(
        uninterrupted.blend.samples(np.arange(130, 300)), resumed_twice.blend.samples(np.arange(130, 300))
    )
    assert resumed_twice.totals(200) == uninterrupted.totals(200) and len(resumed_twice.eras) == 1
    for suffix in (".bin", ".idx"):  # a moved file is the same source
        (tmp_path / f"moved{suffix}").write_bytes(Path(a + suffix).read_bytes())
    moved, notes = reopened(uninterrupted.to_json(57), ["0.3", str(tmp_path / "moved"), "0.7", b], 8)
    assert notes == [] and np.array_equal(moved.blend.samples(index), uninterrupted.blend.samples(index))


def test_ledger_totals_equal_the_tokens_read(files: tuple[str, str, str]) -> None:
    a, b, _ = files
    ledger = make_ledger(["1", a, "3", b], 8)
    for consumed in (0, 1, 40, 200, 90):  # the last one goes back
        rows = ledger.blend.samples(np.arange(consumed))[:, :-1].reshape(-1)
        totals = {total.name: total for total in ledger.totals(consumed).values()}
        for prefix, first, tokens in ((a, 0, 600), (b, 1000, 960)):
            own_tokens = rows[(rows >= first) & (rows < first + tokens)]
            assert totals[prefix].tokens == own_tokens.size
            assert totals[prefix].epochs == own_tokens.size / tokens
            starts = ledger.blend.datasets[(a, b).index(prefix)]._data.pointers // 4 + first  # type: ignore[attr-defined]
            assert totals[prefix].documents == np.isin(own_tokens, starts).sum()


ERA = st.tuples(st.integers(0, 60), st.sampled_from([4, 8, 16]), st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=40)
@example([(33, 16, 1, 1), (32, 4, 5, 1), (23, 16, 1, 1)])
@given(st.lists(ERA, min_size=2, max_size=4))
def test_every_token_once_per_epoch_after_blend_changes(
    files: tuple[str, str, str], eras: list[tuple[int, int, int, int]]
) -> None:
    a, b, _ = files
    seen: Counter[int] = Counter()
    saved, consumed = None, 0
    for samples, seq_length, weight_a, weight_b in eras:
        paths = [str(weight_a), a, str(weight_b), b]
        ledger = make_ledger(paths, seq_length) if saved is None else reopened(saved, paths, seq_length)[0]
        rows = ledger.blend.samples(np.arange(consumed, consumed + samples))[:, :-1]
        seen.update(rows.reshape(-1).tolist())
        consumed += samples
        saved = ledger.to_json(consumed)
    samples_used = ledger.eras[-1].samples_used(consumed - ledger.eras[-1].begin)
    streams = [
        source._stream.advanced_by(source._first_sample + n, seq_length)
        for source, n in zip(ledger.blend.datasets, samples_used, strict=True)
    ]
    for total, first, tokens, stream in zip(saved["sources"], (0, 1000), (600, 960), streams, strict=True):
        counts = [seen[first + i] for i in range(tokens)]
        assert sum(counts) == total["tokens"] and total["epochs"] == total["tokens"] / tokens
        full = int(total["epochs"])
        # each era may have read one sample that ends in an epoch that no era has read completely
        assert sum(count not in (full, full + 1) for count in counts) <= stream.overlap
        assert stream.overlap <= sum(length - 1 for _, length, _, _ in eras)


NAMES = ("a", "b", "c", "link to a", "copy of b", "directory/../c")  # three sources
PAIRS = st.lists(
    st.tuples(st.sampled_from([0.1, 0.25, 1, 3, 600, 1e-4]), st.sampled_from(NAMES)), min_size=1, max_size=5
)


@pytest.fixture(scope="module")
def prefix_of(files: tuple[str, str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the prefixes of NAMES."""
    directory = tmp_path_factory.mktemp("spelled")
    a, b, c = map(Path, files)
    for suffix in (".bin", ".idx"):
        (directory / f"link{suffix}").symlink_to(f"{a}{suffix}")
        (directory / f"copy{suffix}").write_bytes(Path(f"{b}{suffix}").read_bytes())
    (c.parent / "directory").mkdir()
    indirect = f"{c.parent}/directory/../c"
    return dict(zip(NAMES, (*files, str(directory / "link"), str(directory / "copy"), indirect), strict=True))


@settings(max_examples=60, deadline=None)
@example(jobs=[(40, [(0.1, "a"), (0.1, "link to a")]), (40, [(1, "a")]), (90, [(3, "b"), (1, "a"), (1, "a")])])
@example(jobs=[(40, [(1, "a"), (1, "b")]), (30, [(1, "b"), (1, "a")]), (0, [(1, "c")]), (200, [(1, "b"), (3, "a")])])
@given(jobs=st.lists(st.tuples(st.integers(0, 150), PAIRS), min_size=2, max_size=6))
def test_every_sample_once_per_epoch_after_source_changes(
    prefix_of: dict[str, str], jobs: list[tuple[int, list[tuple[float, str]]]]
) -> None:
    """Each token has been read e or e + 1 times after e epochs and a part of the next one.

    This holds exactly, since the length of each of the three sources is a multiple of that of a sample.
    """
    seen: Counter[int] = Counter()
    saved, consumed = None, 0
    for samples, pairs in jobs:
        paths = [part for weight, name in pairs for part in (str(weight), prefix_of[name])]
        ledger = make_ledger(paths, 4) if saved is None else reopened(saved, paths, 4)[0]
        weights: Counter[int] = Counter()
        for weight, name in pairs:
            weights[NAMES.index(name) % 3] += round(weight * 10_000)
        assert len(ledger.blend.datasets) == len(weights)
        assert ledger.blend.order.numerators == [
            weight * ledger.blend.order.denominator // weights.total() for weight in weights.values()
        ]
        middle = consumed + samples // 2
        rows = ledger.blend.samples(np.arange(consumed, middle))[:, :-1]
        seen.update(rows.reshape(-1).tolist())
        ledger, notes = reopened(ledger.to_json(middle), paths, 4)  # a resume that changes nothing
        assert notes == []
        rows = ledger.blend.samples(np.arange(middle, consumed + samples))[:, :-1]
        seen.update(rows.reshape(-1).tolist())
        consumed += samples
        saved = ledger.to_json(consumed)
        by_digest = {row["digest"]: row for row in saved["sources"]}
        assert sum(row["tokens"] for row in by_digest.values()) == 4 * consumed == seen.total()
        for first, tokens in ((0, 600), (1000, 960), (2000, 300)):
            counts = [seen[first + i] for i in range(tokens)]
            full = sum(counts) // tokens
            assert set(counts) <= {full, full + 1}
    for source in ledger.blend.datasets:
        starts = source._data.pointers // 4 + 1000 * ("a", "b", "c").index(_source_of(source.name, prefix_of))  # type: ignore[attr-defined]
        row = by_digest[source.digest]
        assert row["documents"] == sum(seen[int(token)] for token in starts)
        tokens = sum(seen[int(starts[0]) + i] for i in range(source.num_tokens))
        assert (row["tokens"], row["epochs"]) == (tokens, tokens / source.num_tokens)


def _source_of(prefix: str, prefix_of: dict[str, str]) -> str:
    return "abc"[[*prefix_of.values()].index(prefix) % 3]


@settings(max_examples=20, deadline=None)
@given(jobs=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([8, 16])), min_size=2, max_size=6))
def test_packed_documents_come_once_per_epoch_and_are_counted_once(
    files: tuple[str, str, str], jobs: list[tuple[int, int]]
) -> None:
    """Samples of another length start with the next epoch; the rest of the current one is skipped."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=5000)
    data_config = DataConfig(document_packing="best-fit")
    saved, consumed, epoch, samples_in_epoch, length_before = None, 0, 0, 0, None
    for samples, length in jobs:
        ledger = DataLedger(
            build_blend([files[0]], length, 1, "train", data_config=data_config, tokenizer=tokenizer), 1
        )
        if saved is not None:
            ledger.resume(json.loads(json.dumps(saved)))
        (source,) = ledger.blend.datasets
        num_bins = source.plan.num_bins  # type: ignore[attr-defined]
        if length_before not in (None, length):
            epoch, samples_in_epoch = epoch + (samples_in_epoch > 0), 0
        length_before = length
        for i in range(consumed, consumed + samples):
            if samples_in_epoch == 0:
                seen: Counter[int] = Counter()
            (row,), (pieces,) = ledger.blend.samples(np.array([i])), ledger.blend.piece_lengths(np.array([i])) or ()
            ends = np.cumsum(pieces)
            for start, end in zip(ends - pieces, ends, strict=True):
                seen.update(
                    row[start + 1 : end].tolist()
                )  # labels: a token that two pieces share is a label in one of them
            samples_in_epoch += 1
            if samples_in_epoch == num_bins:
                first = {int(token) for token in source._data.pointers // 4}  # type: ignore[attr-defined]
                assert seen == Counter(set(range(600)) - first)
                epoch, samples_in_epoch = epoch + 1, 0
        consumed += samples
        tokens_before = saved and saved["sources"][0]["tokens"]
        saved = ledger.to_json(consumed)
        if samples and samples % num_bins == 0 and samples_in_epoch == 0 and not tokens_before:
            assert saved["sources"][0]["epochs"] == samples // num_bins


def test_sources_with_equal_digests_are_refused(tmp_path: Path) -> None:
    """The documents have equal lengths and beginnings, like a copy in which one token was replaced."""
    lengths = [5000, 5000, 5000]
    write_numbered(tmp_path / "a", lengths)
    content = bytearray((tmp_path / "a.bin").read_bytes())
    (tmp_path / "b.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    content[4 * 4900 : 4 * 4904] = bytes(16)  # beyond the bytes that the digest reads
    (tmp_path / "b.bin").write_bytes(content)
    with pytest.raises(DataError, match="could not tell them apart; merge them"):
        make_ledger(["1", str(tmp_path / "a"), "1", str(tmp_path / "b")], 8)
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.bin").read_bytes())
    assert len(make_ledger(["1", str(tmp_path / "a"), "1", str(tmp_path / "b")], 8).blend.datasets) == 1


def test_source_given_twice_is_reported(prefix_of: dict[str, str]) -> None:
    a, link = prefix_of["a"], prefix_of["link to a"]
    ledger = make_ledger(["0.1", a, "0.7", prefix_of["b"], "0.2", link, "0.1", a], 4)
    assert ledger.blend.weights == [0.4, 0.7]  # 0.1 + 0.2 + 0.1 in decimal
    assert ledger.blend.notes == [
        f"{a} is in the blend more than once, as {a} and as {link}: it is read once, with the summed weight",
        f"{a} is in the blend more than once: it is read once, with the summed weight",
    ]
    assert make_ledger([a, prefix_of["b"], link], 4).blend.weights == [1200, 960]
    for weight in ("nan", "-1", "inf"):
        with pytest.raises(DataError, match=f"blend weight {weight}"):
            make_ledger(["1", a, weight, a], 4)


def test_ledger_of_version_1_resumes(files: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An old era ends where its order differs from today's: after the first block of a long period, or with a copy."""
    a, b, _ = files

    def version_1_ledger(paths: list[str], consumed: int, twice: bool = False) -> dict[str, object]:
        saved = json.loads(json.dumps(make_ledger(paths, 4).to_json(consumed)))
        for era in saved["eras"]:
            for share in era["sources"]:
                del share["gave"]
            if twice:
                era["sources"] = [{**share, "weight": share["weight"] / 2} for share in era["sources"] for _ in "ab"]
        return {**saved, "version": 1}

    unchanged, notes = reopened(version_1_ledger(["0.3", a, "0.7", b], 57), ["0.3", a, "0.7", b], 4)
    assert notes == [] and len(unchanged.eras) == 1
    monkeypatch.setattr("megalite.data.datasets.blended_dataset.MAX_PERIOD", 20)
    paths = ["123457", a, "1000003", b]
    unchanged, notes = reopened(version_1_ledger(paths, 20), paths, 4)
    assert notes == [] and len(unchanged.eras) == 1
    reordered, notes = reopened(version_1_ledger(paths, 57), paths, 4)
    assert [note.partition(":")[0] for note in notes] == ["this version mixes the blend in another order"]
    first, rest = reordered.blend.order.samples_per_source(20), reordered.blend.order.samples_per_source(17)
    assert [share.gave for share in reordered.eras[0].sources] == [2 * x + y for x, y in zip(first, rest, strict=True)]
    resumed, notes = reopened(reordered.to_json(70), paths, 4)
    assert notes == [] and np.array_equal(
        resumed.blend.samples(np.arange(70, 90)), reordered.blend.samples(np.arange(70, 90))
    )
    copies, notes = reopened(version_1_ledger([a], 60, twice=True), [a], 4)
    assert [share.gave for share in copies.eras[0].sources] == [30]  # each copy gave the same samples
    rows = copies.blend.samples(np.arange(60, 60 + 120))[:, :-1].reshape(-1).tolist()
    assert len(set(rows)) == 480 and not set(rows) & set(
        make_ledger([a], 4).blend.samples(np.arange(30))[:, :-1].reshape(-1)
    )


def test_source_added_and_another_removed(files: tuple[str, str, str]) -> None:
    a, b, c = files
    first = make_ledger(["1", a, "1", b], 8)
    second, notes = reopened(first.to_json(60), ["1", b, "1", c], 8)
    assert [note.partition(",")[0] for note in notes[1:]] == [f"{c} is new", f"{a} is no longer used"]
    rows = second.blend.samples(np.arange(60, 140))
    b_before = {int(token) for token in first.blend.samples(np.arange(60))[:, :-1].reshape(-1) if 1000 <= token < 2000}
    b_after = {int(token) for token in rows[:, :-1].reshape(-1) if 1000 <= token < 2000}
    assert len(b_before) == 240 and len(b_after) == 320 and not b_before & b_after
    third, _ = reopened(second.to_json(140), ["1", a, "1", b], 8)  # a returns and continues where it was
    a_before = {int(token) for token in first.blend.samples(np.arange(60))[:, :-1].reshape(-1) if token < 1000}
    a_after = {int(token) for token in third.blend.samples(np.arange(140, 200))[:, :-1].reshape(-1) if token < 1000}
    assert len(a_before) == len(a_after) == 240 and not a_before & a_after
    assert {total.name: total.tokens for total in third.totals(200).values()} == {a: 480, b: 800, c: 320}


def test_other_seed_or_damaged_ledger_is_refused(files: tuple[str, str, str]) -> None:
    a, _, _ = files
    saved = make_ledger([a], 8, seed=2).to_json(30)
    with pytest.raises(DataError, match="seed=1, but the data so far came in the order of seed 2"):
        make_ledger([a], 8).resume(saved)
    good = make_ledger([a], 8).to_json(30)
    damaged_eras = [{"eras": eras} for eras in ([], "x", [{**good["eras"][0], "begin": 31}])]
    for damage in ({"version": 9}, {"consumed": -1}, {"sources": []}, {"sources": [{}]}, *damaged_eras):
        with pytest.raises(DataError, match="ledger is damaged"):
            make_ledger([a], 8).resume({**good, **damage})
