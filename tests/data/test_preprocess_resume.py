"""A run that ends anywhere (kill -9, full disk, error) and is resumed writes the same bytes as an uninterrupted one."""

import io
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
from data.test_text_input import write_gz, write_lines, write_parquet, write_zst

from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from tools.preprocess import journal, text_input
from tools.preprocess import tokenize_run as token_run
from tools.preprocess.tokenize_run import preprocess
from tools.preprocess.workers import Job

ROOT = Path(__file__).resolve().parents[2]
BYTES = Job({"tokenizer_type": "ByteTokenizer"})
SETTINGS: dict[str, Any] = {"job": replace(BYTES, append_eod=True), "max_bad_fraction": 0.5}
FILES = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.txt"]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the run read some hundred blocks, and write an entry of the journal after every few of them."""
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(token_run, "JOURNAL_BYTES", 30_000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of every format, with empty texts and bad lines in them, and return their directory."""
    out = tmp_path_factory.mktemp("corpus")
    texts = ["" if i % 29 == 5 else f"text {i} ü {i * i}\n" * (i % 17) for i in range(700)]
    for name, write in zip(FILES, (write_lines, write_gz, write_zst, write_parquet), strict=False):
        write(out / name, texts)
    lines = (out / "a.jsonl").read_bytes().split(b"\n")
    for i in range(3, len(lines), 50):
        lines[i] = b"17" if i % 100 == 3 else lines[i][:-7] + b"\xff"
    (out / "a.jsonl").write_bytes(b"\n".join(lines))
    (out / "e.txt").write_text("the end")
    return out


def inputs(corpus: Path) -> list[str]:
    return [str(corpus / name) for name in FILES]


def contents(prefix: Path) -> dict[str, bytes]:
    """Return the contents of all files whose names begin with the prefix, by the rest of the name."""
    return {path.name.removeprefix(prefix.name): path.read_bytes() for path in prefix.parent.glob(prefix.name + "*")}


def in_child(function: Callable[[], Any]) -> int:
    """Call the function in a forked process, and return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 9
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of an uninterrupted run; all other runs must write the same."""
    prefix = tmp_path_factory.mktemp("expected") / "o"
    preprocess(inputs(corpus), str(prefix), **SETTINGS)
    files = contents(prefix)
    assert sorted(files) == [".rejects.jsonl", *(f"_text_document.{x}" for x in ("bin", "idx", "json"))]
    assert len(files[".rejects.jsonl"].splitlines()) == 14
    return files


def looks_complete(prefix: Path) -> bool:
    return Path(f"{prefix}_text_document.idx").exists()


def dies_at(number: int, function: Callable[[], Any]) -> Callable[[], Any]:
    """Return `function` with a kill -9 just before the `number`-th call that makes something durable or visible."""
    calls = itertools.count()

    def killing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call

    def run() -> None:
        os.fsync, os.replace, os.unlink = killing(os.fsync), killing(os.replace), killing(os.unlink)
        os.ftruncate = killing(os.ftruncate)
        function()

    return run


def test_kill_before_every_durable_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys make one pair visible while the other is not; every other run replaces an earlier pair."""
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 200)
    monkeypatch.setattr(token_run, "JOURNAL_BYTES", 700)
    lines = [json.dumps({"text": f"text {i}", "title": f"title {i}"}) for i in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "oops"]))
    settings = SETTINGS | {"job": replace(SETTINGS["job"], keys=("text", "title"))}

    def run(prefix: Path, resume: bool = False) -> None:
        preprocess([str(tmp_path / "a.jsonl")], str(prefix), resume=resume, **settings)

    (tmp_path / "expected").mkdir()
    run(tmp_path / "expected" / "o")
    expected_files = contents(tmp_path / "expected" / "o")
    assert len(expected_files) == 7
    for number in range(200):
        prefix = tmp_path / str(number) / "o"
        prefix.parent.mkdir()
        for name, content in expected_files.items() if number % 2 else ():
            Path(f"{prefix}{name}").write_bytes(content if "json" in name else b"of an earlier run")
        status = in_child(dies_at(number, lambda: run(prefix)))  # noqa: B023
        if status == 0:
            break
        assert status == -signal.SIGKILL
        for key in settings["job"].keys:
            if Path(f"{prefix}_{key}_document.idx").exists() and not number % 2:
                assert all(Path(f"{prefix}_{key}_document.{x}").exists() for x in ("bin", "json"))
                IndexedDataset(f"{prefix}_{key}_document")
        run(prefix, resume=number % 4 > 1 or Path(f"{prefix}.journal").exists())  # without a journal nothing is kept
        assert contents(prefix) == expected_files, f"killed before call {number}"
    assert 20 < number < 199


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_of_the_command(corpus: Path, expected: dict[str, bytes], tmp_path: Path, workers: int) -> None:
    """The tool itself is killed while its workers are running."""
    code = (
        "import sys; from tools.preprocess import text_input, tokenize_run; text_input.BLOCK_BYTES = 3000;"
        "tokenize_run.JOURNAL_BYTES = 30_000; from tools.preprocess_data import main; sys.exit(main(sys.argv[1:]))"
    )
    prefix = tmp_path / "o"
    command = [sys.executable, "-c", code, "--input", *inputs(corpus), "--output-prefix", str(prefix), "--append-eod"]
    command += ["--tokenizer-type", "ByteTokenizer", "--workers", str(workers), "--max-bad-fraction", "0.5"]
    process = programs.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    entries, deadline = Path(f"{prefix}.journal"), time.monotonic() + 60
    while time.monotonic() < deadline and not (entries.exists() and entries.read_bytes().count(b"\n") > 3):
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert entries.exists() and not looks_complete(prefix)

    def run_again(*flags: str) -> subprocess.CompletedProcess[str]:
        return programs.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)

    refused, resumed, repeated = run_again(), run_again("--resume"), run_again("--resume")
    assert refused.returncode == 3 and "continue it with --resume, or discard it with" in refused.stderr
    assert resumed.returncode == repeated.returncode == 0, resumed.stderr
    assert "resuming after" in resumed.stderr and "complete already" in repeated.stderr
    assert contents(prefix) == expected


@pytest.mark.parametrize("disk", [False, True], ids=["a worker dies", "the disk is full"])
def test_dead_worker_loses_nothing(corpus: Path, expected: dict, tmp_path: Path, monkeypatch, disk: bool) -> None:
    prefix, write_journal_entry = tmp_path / "o", token_run.TokenizeRun._write_journal_entry

    def write_entry_and_fail(run: token_run.TokenizeRun) -> None:
        write_journal_entry(run)
        if disk:
            raise OSError(28, "No space left on device")
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(token_run.TokenizeRun, "_write_journal_entry", write_entry_and_fail)
        message = "No space left on device" if disk else "a worker process ended with code -9; -9 means that memory"
        with pytest.raises(DataError, match=f"{message}.*continue from there with --resume"):
            preprocess(inputs(corpus), str(prefix), workers=2, **SETTINGS)
    preprocess(inputs(corpus), str(prefix), workers=2, resume=True, **SETTINGS)
    assert contents(prefix) == expected


def leave_interrupted_run(corpus: Path, prefix: Path, number: int = 25) -> None:
    """Leave an interrupted run at the prefix."""
    assert in_child(dies_at(number, lambda: preprocess(inputs(corpus), str(prefix), **SETTINGS))) < 0
    assert Path(f"{prefix}.journal").read_bytes().count(b"\n") > 1


def test_resume_with_other_options_is_refused_without_loss(
    corpus: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    prefix = tmp_path / "o"
    leave_interrupted_run(corpus, prefix)
    before = contents(prefix)
    other = Job({"tokenizer_type": "NullTokenizer", "vocab_size": 501}, append_eod=True)
    message = "an interrupted run was kept here: continue it with --resume, or discard it with --overwrite"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"job": other}, "the interrupted run had tokenizer"),
        ({"job": BYTES}, "the interrupted run had append_eod true, this one has false"),
        ({"resume": False}, message),
    ]
    for changed, reason in cases:
        with pytest.raises(DataError, match=reason):
            preprocess(inputs(corpus), str(prefix), **{"resume": True, **SETTINGS, **changed})
    with pytest.raises(DataError, match="the interrupted run had files"):
        preprocess(inputs(corpus)[1:], str(prefix), resume=True, **SETTINGS)
    assert contents(prefix) == before
    preprocess(inputs(corpus), str(prefix), overwrite=True, **SETTINGS)
    assert contents(prefix) == expected


def test_changed_input_is_not_treated_as_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    for text in ("first", "other"):  # of equal length
        write_lines(path, [text])
        [prefix] = preprocess([str(path)], str(tmp_path / "o"), resume=True, job=BYTES)
        assert bytes(IndexedDataset(prefix).document(0).astype("u1")).decode() == text
        assert "nothing to resume, starting from the beginning" in capsys.readouterr().err
        os.utime(prefix + ".idx", (1, 1))


def test_journal_truncated_by_a_power_cut(corpus: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    for i, cut in enumerate((1, 150)):
        prefix = tmp_path / str(i) / "o"
        leave_interrupted_run(corpus, prefix, 40)
        path = Path(f"{prefix}.journal")
        path.write_bytes(path.read_bytes()[:-cut] + b"\0" * 7)
        entries = len(journal._read_entries(path))
        preprocess(inputs(corpus), str(prefix), resume=True, **SETTINGS)
        assert entries > 1 and contents(prefix) == expected


def test_truncated_partial_file_is_refused(corpus: Path, tmp_path: Path) -> None:
    for name in ("_text_document.bin", "_text_document.lengths", ".rejects.jsonl"):
        prefix = tmp_path / name / "o"
        leave_interrupted_run(corpus, prefix, 60)
        path = Path(f"{prefix}{name}.partial")
        path.write_bytes(path.read_bytes()[:10])
        with pytest.raises(DataError, match=f"{name}.partial: shorter than the [0-9]+ bytes written before"):
            preprocess(inputs(corpus), str(prefix), resume=True, **SETTINGS)


def test_second_run_at_a_prefix_is_refused(corpus: Path, tmp_path: Path) -> None:
    header = {"version": 0}
    first = journal.Journal(tmp_path / "o.journal", header, False, False)
    with pytest.raises(DataError, match="o.journal: another process is writing it"):
        preprocess(inputs(corpus), str(tmp_path / "o"), **SETTINGS)
    first.close(remove=True)
    preprocess(inputs(corpus), str(tmp_path / "o"), **SETTINGS)


def test_late_bad_line_can_be_skipped_by_resuming(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["some text"] * 2000)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("[]\n")
    source, prefix = [str(tmp_path / "a.jsonl")], str(tmp_path / "o")
    message = r"a.jsonl:2001: is not a JSON object but list; .*continue from there with --resume"
    with pytest.raises(DataError, match=message):
        preprocess(source, prefix, job=BYTES)
    [pair] = preprocess(source, prefix, resume=True, max_bad_fraction=0.01, job=BYTES)
    assert len(IndexedDataset(pair)) == 2000
    [row] = Path(prefix + ".rejects.jsonl").read_text().splitlines()
    assert json.loads(row)["line"] == 2001


def test_resume_rereads_standard_input(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [f"text {i} " * 8 for i in range(3000)])
    raw = (tmp_path / "a.jsonl").read_bytes()

    def feed(raw: bytes, prefix: Path, execute: Callable[..., Any], **options: Any) -> int:
        """Run in a child whose standard input is a pipe with these bytes, and return its exit status."""

        def run() -> None:
            read_end, write_end = os.pipe()
            if os.fork() == 0:
                os.close(read_end)
                with io.FileIO(write_end, "w") as file:
                    view = memoryview(raw)
                    while view:
                        view = view[file.write(view) :]
                os._exit(0)
            os.close(write_end)
            os.dup2(read_end, 0)
            execute(lambda: preprocess(["-"], str(prefix), **options, job=BYTES))

        return in_child(run)

    assert feed(raw, tmp_path / "expected", lambda run: run()) == 0
    assert feed(raw, tmp_path / "o", lambda run: dies_at(14, run)()) == -signal.SIGKILL
    assert feed(raw.replace(b"text 1", b"text 2"), tmp_path / "o", lambda run: run(), resume=True) == 9
    assert feed(raw, tmp_path / "o", lambda run: run(), resume=True) == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "expected")
