"""The tests of each class are done in the time that it has, by what they took when they were recorded."""

import durations
import pytest
from durations import COMMIT

AGAIN = "record it anew on a quiet machine: tests/run.sh --all --record FILE"


@pytest.mark.parametrize("kind", durations.BUDGET_S)
def test_a_class_is_done_in_its_time(kind: str) -> None:
    needs, most = durations.needed()[kind], durations.BUDGET_S[kind]
    assert needs <= most, f"{kind}: {needs:.0f} s of {most:.0f}; mark tests with everything, or make them faster"


def test_no_test_of_a_commit_takes_long() -> None:
    long = [line.name for line in durations.read() if line.kind == COMMIT and line.seconds > durations.COMMIT_S]
    assert not long, f"more than {durations.COMMIT_S} s: mark them with everything"


def test_every_file_of_tests_is_recorded_and_every_test_is_there() -> None:
    files = {str(path.relative_to(durations.ROOT)) for path in (durations.ROOT / "tests").rglob("test_*.py")}
    assert files == {line.file for line in durations.read()}, AGAIN
    for line in durations.read():
        if line.kind == COMMIT:
            function = line.name.split("::")[1].split("[")[0]
            assert f"def {function}(" in (durations.ROOT / line.file).read_text("utf-8"), f"{line.name}: {AGAIN}"
