"""The rules of tests/support/style_rules.py hold in this repository, and each reports a small tree that violates it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import style_rules
import toml_tables

Rule = Callable[[Path], Iterator[str]]


@pytest.mark.parametrize("rule", style_rules.RULES, ids=lambda rule: rule.__name__)
def test_repository_follows_the_rule(rule: Rule) -> None:
    assert list(rule(style_rules.ROOT)) == []


SHAPES = "| `S` | sequence |\n| `B` | micro-batch |\n| `D` | width |\n"
FAULTS: dict[str, dict[str, str]] = toml_tables.read_table("repository/style_violations")


@pytest.mark.parametrize("fault", FAULTS)
def test_rule_detects_a_violation(fault: str, tmp_path: Path) -> None:
    for name, text in {"docs/shapes.md": SHAPES, "pyproject.toml": "", **FAULTS[fault]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines_of = {rule.__name__: list(rule(tmp_path)) for rule in style_rules.RULES}
    assert len(lines_of.pop(fault.strip())) == 1, lines_of
    assert not any(lines_of.values()), lines_of


def test_every_rule_has_a_violation() -> None:
    assert {fault.strip() for fault in FAULTS} == {rule.__name__ for rule in style_rules.RULES}


def test_rules_accept_correct_code(tmp_path: Path) -> None:
    files = {
        "docs/shapes.md": SHAPES,
        "docs/a.md": "`nn/a.py: A.g`, `nn/a.py: A.h`, [a](shapes.md)\n```\nnn/a.py: f\n  nn/a.py: A.g\n```\n",
        "docs/wide.md": f"| {'cell ' * 30} |\n\n```\n{'code ' * 30}\n```\n\n- [{'link ' * 30}](shapes.md)\n",
        "megalite/nn/a.py": "import os\n\nclass A:\n    def g(self): self.i, self.h = 1, self.g\n\ndef f(x_SBD):\n"
        "    S, B, _ = x_SBD.shape\n    y_sBD = scatter(x_SBD)\n    return A().g(y_sBD=y_sBD)\n",
        "megalite/training/b.py": "from megalite.nn.a import A\n",
        "megalite/common/environment.py": "import os\nx = os.environ\n",
        "megalite/launch/c.py": "from megalite.common import environment\nx = environment.getenv('A')\n",
        "megalite/common/d.py": "import typing\nif typing.TYPE_CHECKING:\n    from megalite.config.options import A\n",
        "megalite/config/options.py": "class A: ...\n",
        "megalite/checkpoint/storage.py": "def f(self, a): storage_of(a).write_text(a, self.storage.write_text(a, ''))\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [line for rule in style_rules.RULES for line in rule(tmp_path)] == []
