"""tools/verify.py finds classical mistakes of distributed training, and reports where they are."""

import json
from pathlib import Path
from typing import Any

import programs
import pytest
from mistakes import MISTAKES, Mistake

CHAOS = Path(__file__).parent
PATHS = [str(CHAOS), str(CHAOS.parent / "support")]
PLUGIN = """
import sys

sys.path += {paths!r}

from mistakes import MISTAKES

MISTAKES[{name!r}].plant()
"""


def wrong_fields(mistake: Mistake, report: dict[str, Any]) -> list[str]:
    """Return what is wrong in verify.py's report about a mistake."""
    first = report["first"] or {}
    wrong = []
    for key, expected in mistake.first.items():
        outer, _, inner = key.partition(".")
        actual = first.get(outer)
        if inner:
            actual = (actual or {}).get(inner)
        matches = actual == expected
        if key in ("where", "ratio_sizes"):
            matches = expected in (actual or "")
        elif key == "ratio":
            matches = actual == pytest.approx(expected, rel=1e-3)
        if not matches:
            wrong.append(f"{key} is {actual!r}, not {expected!r}")
    if not all(mistake.all_differing in name for name in first.get("others", [])):
        wrong.append(f"{first['others']} differ, not only {mistake.all_differing!r}")
    if mistake.wrong_loss and not any(mistake.wrong_loss in line for line in report["one_process"]):
        wrong.append(f"the one process has the errors {report['one_process']}, not {mistake.wrong_loss!r}")
    return wrong


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, marks=pytest.mark.nightly(guards=(mistake.file,)), id=mistake.name)
        for mistake in MISTAKES.values()
    ],
)
def test_verify_locates_a_mistake(mistake: Mistake, tmp_path: Path) -> None:
    plugin, report = tmp_path / "plugin.py", tmp_path / "report.json"
    plugin.write_text(PLUGIN.format(paths=PATHS, name=mistake.name), "utf-8")
    flags = [*mistake.flags.split(), "--plugin", str(plugin), "--steps", "2", "--json", str(report)]
    result = programs.run_python("tools/verify.py", *flags, timeout=120)
    assert result.returncode == 1 and report.is_file(), result.stdout + result.stderr
    assert not wrong_fields(mistake, json.loads(report.read_text("utf-8"))), result.stdout
