"""The rules of tests/taste.py hold in this repository, and each can fail: on a small tree with the fault in it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import draw_house
import pytest
import taste

Rule = Callable[[Path], Iterator[str]]


@pytest.mark.parametrize("rule", taste.RULES, ids=lambda rule: rule.__name__)
def test_the_house_is_in_order(rule: Rule) -> None:
    assert list(rule(taste.ROOT)) == []


INDEXED = '- [a](#a)\n\n## By date\n\n<a id="a"></a>\n**2026-11-23, a.** *Holds.* Why.\n'
SHAPES = "| `S` | sequence |\n| `B` | micro-batch |\n| `D` | width |\n"
FAULTS: dict[str, dict[str, str]] = {
    "long_functions": {"megalite/a.py": "def f():\n" + "    pass\n" * taste.FUNCTION_LINES},
    "long_files": {"megalite/a.py": "x = 1\n" * (taste.FILE_LINES + 1)},
    "many_parameters": {"tools/a.py": f"def f({', '.join(f'p{i}' for i in range(taste.PARAMETERS + 1))}): ..."},
    "circles": {
        "megalite/nn/a.py": "from megalite.nn import b\n",
        "megalite/nn/b.py": "def f():\n    from megalite.nn.a import x\n",
    },
    "circles ": {"megalite/nn/a.py": "def f():\n    import megalite.train.b\n", "megalite/train/b.py": ""},
    "circles  ": {"tools/a.py": "from tools.bench import b\n", "tools/bench/b.py": "from tools import a\n"},
    "circles   ": {"megalite/train/a.py": "def f():\n    from tools import b\n", "tools/b.py": ""},
    "twins": {"megalite/nn/a.py": "", "megalite/optim/a.py": ""},
    "twins ": {"megalite/a.py": "class X: ...", "megalite/b.py": "class X: ...\n"},
    "environment_readers": {"megalite/a.py": "import os\n\nx = os.environ['A']\n"},
    "links_followed": {"megalite/data/a.py": "with open('a', 'a+b') as file: ...\n"},
    "links_followed ": {"megalite/train/a.py": "import os\n\nx = os.open('a', os.O_WRONLY | os.O_TRUNC)\n"},
    "links_followed  ": {"megalite/checkpoint/a.py": "def f(path): path.write_text('')\n"},
    "streams_elsewhere": {"megalite/a.py": "import torch\n\ntorch.cuda.synchronize()\n"},
    "streams_elsewhere ": {"megalite/a.py": "def f(x, stream): x.record_stream(stream)\n"},
    "facts_by_name": {"megalite/a.py": "def f(name): return name.endswith('.norm.weight')\n"},
    "facts_by_name ": {"tools/a.py": "def f(spec): return spec.name in ('embedding.word', 'head')\n"},
    "facts_by_name  ": {"megalite/interop/a.py": "def f(name): return name.rsplit('.', 1)[-1] in STACKED\n"},
    "facts_by_name   ": {"megalite/a.py": "def f(entry): return entry.parts[0] == 'embedding.word'\n"},
    "options": {
        "megalite/config/a.py": "class AConfig:\n" + "".join(f"    a{i}: int\n" for i in range(taste.OPTIONS + 1))
    },
    "sizes": {f"megalite/nn/a{i}.py": "x = 1\n" * taste.FILE_LINES for i in range(76)},
    "sizes ": {f"tools/a{i}.py": "x = 1\n" * taste.FILE_LINES for i in range(42)},
    "sizes  ": {"tests/a.py": "x = 1\n" * (taste.LINES["tests"] + 1)},
    "sizes   ": {
        "docs/architecture.md": "```\nnn/a.py: f\n```\n",
        "megalite/nn/a.py": "def f(): ...\n\n\n" + "".join(f"from megalite.nn import a{i}\n" for i in range(28)),
        **{f"megalite/nn/a{i}.py": "x = 1\n" * taste.FILE_LINES for i in range(28)},
    },
    "shapes": {"megalite/nn/a.py": "def f(x_SBQ): ...\n"},
    "shapes ": {"megalite/nn/a.py": "def f(x_sBD):\n    x_SBD = x_sBD\n"},
    "shapes  ": {"megalite/nn/a.py": "def f(x_sBD):\n    g(x_SBD=x_sBD)\n"},
    "shapes   ": {"megalite/nn/a.py": "def f(x_SBD):\n    B, S, D = x_SBD.shape\n"},
    "shapes    ": {"megalite/nn/a.py": 'def f(x):\n    """x [S, B, Q] -> [..., 2D], see [1]."""\n'},
    "lost_files": {"README.md": "see [this](docs/nothing.md)\n"},
    "lost_files ": {"docs/a.md": "`tools/nothing.py`\n"},
    "lost_names": {"docs/a.md": "`no_such_name`\n", "pyproject.toml": ""},
    "lost_places": {"docs/a.md": "`nn/a.py: g`\n", "megalite/nn/a.py": "def f(): ...\n"},
    "lost_places ": {"docs/a.md": "`nn/a.py: A.g`\n", "megalite/nn/a.py": "class A:\n    def f(self): ...\n"},
    "lost_places  ": {
        "docs/a.md": "```\nnn/a.py: f\n  nn/a.py: g   what it does\n```\n",
        "megalite/nn/a.py": "def f(): ...\n\n\ndef g(): ...\n",
    },
    "unindexed": {"docs/decisions.md": INDEXED.replace(" *Holds.*", "")},
    "unindexed ": {"docs/decisions.md": INDEXED.replace("- [a](#a)\n", "")},
    "unindexed  ": {"docs/decisions.md": INDEXED.replace("- [a](#a)\n", "- [a](#a)\n- [b](#b)\n")},
    "unindexed   ": {"docs/decisions.md": INDEXED + "\n**2026-11-23, a.** *Holds.* Why, again.\n"},
    "long_lines": {"docs/a.md": f"{'prose ' * 21}\n"},
    "long_lines ": {"README.md": f"- {'an item ' * 16}\n"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rule_can_fail(fault: str, tmp_path: Path) -> None:
    for name, text in {"docs/shapes.md": SHAPES, "pyproject.toml": "", **FAULTS[fault]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {rule.__name__: list(rule(tmp_path)) for rule in taste.RULES}
    assert len(found.pop(fault.strip())) == 1, found
    assert not any(found.values()), found


def test_every_rule_has_a_fault() -> None:
    assert {fault.strip() for fault in FAULTS} == {rule.__name__ for rule in taste.RULES}


def test_what_keeps_the_rules_is_let_through(tmp_path: Path) -> None:
    right = {
        "docs/shapes.md": SHAPES,
        "docs/a.md": "`nn/a.py: A.g`, `nn/a.py: A.h`, [a](shapes.md)\n```\nnn/a.py: f\n  nn/a.py: A.g\n```\n",
        "docs/wide.md": f"| {'cell ' * 30} |\n\n```\n{'code ' * 30}\n```\n\n- [{'link ' * 30}](shapes.md)\n",
        "megalite/nn/a.py": "import os\n\nclass A:\n    def g(self): self.i, self.h = 1, self.g\n\ndef f(x_SBD):\n"
        "    S, B, _ = x_SBD.shape\n    y_sBD = scatter(x_SBD)\n    return A().g(y_sBD=y_sBD)\n",
        "megalite/train/b.py": "from megalite.nn.a import A\n",
        "docs/decisions.md": INDEXED + "\n**2026-11-24, b.** Why.\n",
        "megalite/config/environment.py": "import os\nx = os.environ\n",
    }
    for name, text in right.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [line for rule in taste.RULES for line in rule(tmp_path)] == []


def test_the_picture_of_the_house_is_todays() -> None:
    """Else: python tests/draw_house.py > docs/house.svg"""
    assert (taste.ROOT / "docs/house.svg").read_text() == draw_house.draw(taste.ROOT)
