"""Bad lines under --max-bad-fraction: left out, counted by reason, sampled; and when there are too many."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from data.test_preprocess import BAD_LINES, BYTES, run_tool, write_jsonl

from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.files.sidecar import read_info
from tools.preprocess import text_input
from tools.preprocess.journal import Tally
from tools.preprocess.records import SAMPLE_BYTES
from tools.preprocess.rejects import judge
from tools.preprocess.token_run import preprocess

REASONS = {
    **dict.fromkeys(("not json", "cut", "raw nul", "nan", "two objects"), "not-json"),
    **dict.fromkeys(("null", "number", "list"), "not-an-object"),
    **dict.fromkeys(("not a string", "null text"), "not-a-string"),
    **{"missing key": "key-missing", "invalid utf-8": "not-utf-8", "same key twice": "duplicate-key"},
    **{"deep": "nested-too-deeply", "byte order mark": "byte-order-mark", "lone surrogate": "lone-surrogate"},
}


@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_bad_line_is_left_out_counted_and_shown(tmp_path: Path, workers: int) -> None:
    lines = [line for name in REASONS for line in (BAD_LINES[name][0], b'{"text": "fine"}', b"", b'{"text": ""}')]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    source = [str(tmp_path / "in.jsonl")]
    [prefix] = preprocess(source, str(tmp_path / "o"), workers=workers, max_bad_fraction=0.5, job=BYTES)
    assert len(IndexedDataset(prefix)) == len(REASONS)
    info = read_info(prefix)
    assert info and (info["records"], info["empty"]) == (3 * len(REASONS), len(REASONS))
    reasons = list(REASONS.values())
    assert info["bad"] == {reason: reasons.count(reason) for reason in reasons}
    rows = [json.loads(line) for line in (tmp_path / "o.rejects.jsonl").read_bytes().splitlines()]
    found = [(row["file"], row["line"], row["reason"]) for row in rows]
    assert found == [(source[0], 1 + 4 * i, reason) for i, reason in enumerate(reasons)]
    for row, name in zip(rows, REASONS, strict=True):
        raw, detail = BAD_LINES[name]
        assert detail in row["detail"]
        assert row["text"] == raw[:SAMPLE_BYTES].decode("utf-8", "backslashreplace")


def test_samples_are_bounded_and_counts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 2000)
    path = tmp_path / "a.jsonl"
    path.write_bytes((b"[" + b"x" * 999 + b'\n{"text": "y"}\n{"text": 5}\n') * 150)
    preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.7, job=BYTES)
    raw = (tmp_path / "o.rejects.jsonl").read_bytes()
    rows = [json.loads(line)["reason"] for line in raw.splitlines()]
    assert {reason: rows.count(reason) for reason in rows} == {"not-json": 100, "not-a-string": 100}
    assert len(raw) < 200 * (SAMPLE_BYTES + 300)
    info = read_info(tmp_path / "o_text_document")
    assert info and info["bad"] == {"not-json": 150, "not-a-string": 150}


def test_too_many_bad_lines_fail_at_the_end_and_can_be_let_pass(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 90 + b"17\n" * 10)
    arguments = ("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", "--workers", 1)
    arguments += ("--tokenizer-type", "ByteTokenizer")
    got = run_tool(*arguments, "--max-bad-fraction", "0.09")
    assert got.returncode == 3
    assert "10 of 100 lines are bad (10 not-an-object), more than max_bad_fraction=0.09" in got.stderr
    assert len((tmp_path / "o.rejects.jsonl.partial").read_bytes().splitlines()) == 10  # named in the message
    assert f"{tmp_path / 'o.rejects.jsonl.partial'}" in got.stderr
    assert not list(tmp_path.glob("*.idx"))
    got = run_tool(*arguments, "--max-bad-fraction", "0.1", "--resume")
    assert got.returncode == 0 and "left out: 0 texts without tokens; bad lines: 10 not-an-object" in got.stderr
    assert len(IndexedDataset(tmp_path / "o_text_document")) == 90


def test_hopeless_input_is_stopped_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 5000)
    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 20_000)
    with pytest.raises(DataError, match="lines are bad .* key-missing") as caught:
        preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.01, job=replace(BYTES, keys=("content",)))
    assert int(str(caught.value).split(" of ")[1].split()[0]) < 4000


@pytest.mark.parametrize("bad,records,share", [(6, 100, 1.0), (1000, 1000, 0.2)])
def test_judgement(bad: int, records: int, share: float) -> None:
    judge(Tally(records=100, bad={"not-json": 5}), 0.05, 1.0, "see there")
    judge(Tally(records=999, bad={"not-json": 999}), 0.05, 0.9, "see there")  # too few to tell
    judge(Tally(records=1000, bad={"not-json": 1000}), 0.05, 0.01, "see there")  # all of the rest may be good
    with pytest.raises(DataError):
        judge(Tally(records=records, bad={"not-json": bad}), 0.05, share, "see there")


def test_rejects_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n17\n')
    preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.5, job=BYTES)
    assert (tmp_path / "o.rejects.jsonl").exists()
    path.write_bytes(b'{"text": "x"}\n')
    preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.5, job=BYTES)
    assert sorted(p.suffix for p in tmp_path.glob("o*")) == [".bin", ".idx", ".json"]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fraction_outside_its_range(tmp_path: Path, fraction: float) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError, match="max_bad_fraction=.* is not a fraction"):
        preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=fraction, job=BYTES)


def test_standard_input_and_mixed_files_and_progress(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    command = ["--output-prefix", tmp_path / "o", "--tokenizer-type", "ByteTokenizer", "--workers", "2"]
    command += ["--log-interval", "1"]
    lines = '{"text": "a"}\n{"text": "c"}'
    got = run_tool("--input", "-", tmp_path / "b.txt", *command, "--partitions", "4", input=lines, ok=True)
    assert "note: --partitions changes nothing" in got.stderr
    assert "2 documents, 2 tokens: " in got.stderr and "MB/s" in got.stderr
    data = IndexedDataset(tmp_path / "o_text_document")
    assert [chr(data.document(i)[0]) for i in range(len(data))] == ["a", "c", "b"]
    got = run_tool("--input", tmp_path / "b.txt", *command, "--overwrite")
    assert got.returncode == 0 and "% of the input" in got.stderr
    got = run_tool("--input", tmp_path / "b.txt", *command, "--split-sentences")
    assert got.returncode == 2 and "--split-sentences is for BERT and T5" in got.stderr
