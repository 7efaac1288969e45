"""Which tests take long: those of tests/long.txt run with `tests/run.sh --long` alone (conftest.py), as those that are
marked so, which take minutes.

    tests/run.sh --long --durations=0 --durations-min=0.5 | tee LOG
    python tests/long_tests.py LOG > tests/long.txt
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

LIST = Path(__file__).with_name("long.txt")
LONG_S = 2.0


def read_list() -> list[str]:
    return LIST.read_text("utf-8").splitlines()


def from_durations(log: str) -> list[str]:
    seconds: Counter[str] = Counter()
    for took, test in re.findall(r"^\s*([\d.]+)s (?:call|setup|teardown) +(tests/.*?)\s*$", log, re.MULTILINE):
        seconds[test] += float(took)  # type: ignore[assignment]
    return sorted(test for test, took in seconds.items() if took > LONG_S)


if __name__ == "__main__":
    print(*from_durations(Path(sys.argv[1]).read_text("utf-8")), sep="\n")
