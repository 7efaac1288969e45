"""The choice of slow and nightly tests that a presubmit run adds (support/durations.py)."""

import durations
import pytest


def test_tests_of_changed_files_come_first_and_fill_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "changed_files", lambda: frozenset(["tests/b.py"]))
    items = [("tests/a.py::x", 6.0), ("tests/b.py::y", 7.0), ("tests/c.py::z", 3.0)]
    assert list(durations.select_within_budget(10.0, items)) == ["tests/b.py::y", "tests/c.py::z"]


def test_slow_tests_guard_their_own_file_and_their_area() -> None:
    assert durations.paths_guarded_by("tests/nn/test_a.py::b[c]") == ("tests/nn/test_a.py", "megalite/nn")
    for area in durations.GUARDED_PATHS:
        assert (durations.ROOT / "tests" / area).is_dir()
    listed = {line.name for line in durations.read_lines() if line.group == durations.PRESUBMIT}
    assert all((durations.ROOT / path).exists() for test in listed for path in durations.paths_guarded_by(test))
