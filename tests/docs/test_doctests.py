"""The examples in docstrings of the package and of the tools give the results that they show."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.joinpath("megalite").rglob("*.py"), *ROOT.joinpath("tools").rglob("*.py")])
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in FILES
    if re.search(r"^ *>>> ", path.read_text("utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed
