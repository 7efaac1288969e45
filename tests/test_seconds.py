"""The tests of each class are done in the time that it has, by what they took when they were recorded."""

import pytest
import seconds
from seconds import COMMIT

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
