"""The tests of each class are done in the time that it has, by what they took when they were recorded."""

from pathlib import Path

import pytest
import seconds
from seconds import COMMIT, EVERYTHING, QUICK, Line

AGAIN = "record it anew on a quiet machine: tests/run.sh --all --record FILE"


@pytest.mark.parametrize("kind", seconds.BUDGET_S)
def test_a_class_is_done_in_its_time(kind: str) -> None:
    needs, most = seconds.needed()[kind], seconds.BUDGET_S[kind]
    assert needs <= most, f"{kind}: {needs:.0f} s of {most:.0f}; mark tests with everything, or make them faster"


def test_no_test_of_a_commit_takes_long() -> None:
    long = [line.name for line in seconds.read() if line.kind == COMMIT and line.seconds > seconds.COMMIT_S]
    assert not long, f"more than {seconds.COMMIT_S} s: mark them with everything"


def test_every_file_of_tests_is_recorded_and_every_test_is_there() -> None:
    files = {str(path.relative_to(seconds.ROOT)) for path in (seconds.ROOT / "tests").rglob("test_*.py")}
    assert files == {line.file for line in seconds.read()}, AGAIN
    for line in seconds.read():
        if line.kind == COMMIT:
            function = line.name.split("::")[1].split("[")[0]
            assert f"def {function}(" in (seconds.ROOT / line.file).read_text("utf-8"), f"{line.name}: {AGAIN}"


def test_a_run_replaces_what_was_known_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "LIST", tmp_path / "seconds.txt")
    (tmp_path / "seconds.txt").write_text(
        "quick 9.00 3 tests/test_seconds.py\nquick 1.00 1 tests/test_taste.py\ncommit 2.00 1 tests/gone.py::test_a\n"
    )
    seconds.read.cache_clear()
    name = "tests/test_seconds.py::test_{}".format
    took = {name("a"): 0.5, name("b"): 0.25, name("c[x y]"): 3.0, name("d"): 8.0}
    try:
        seconds.record(took, {"tests/test_seconds.py::test_d"}, seconds.ran(""))
        assert seconds.read() == (
            Line(EVERYTHING, 8.0, "tests/test_seconds.py"),
            Line(QUICK, 0.75, "tests/test_seconds.py", 2),
            Line(COMMIT, 3.0, "tests/test_seconds.py::test_c[x y]"),
            Line(QUICK, 1.0, "tests/test_taste.py"),
        )
        assert seconds.needed() == {QUICK: 1.75, COMMIT: 4.75 + seconds.GUARDED_S, EVERYTHING: 12.75}
        assert seconds.of_commits() == {"tests/test_seconds.py::test_c[x y]"}
        assert seconds.mean_of_everything() == {"tests/test_seconds.py": 8.0}
        seconds.record({"tests/test_seconds.py::test_a": 0.25}, (), seconds.ran("not commit and not everything"))
        assert seconds.needed() == {QUICK: 1.25, COMMIT: 4.25 + seconds.GUARDED_S, EVERYTHING: 12.25}
        assert list(seconds.within(10.0, [("a", 6.0), ("b", 3.0), ("c", 3.0)])) == ["a", "b"]
    finally:
        monkeypatch.undo()
        seconds.read.cache_clear()
