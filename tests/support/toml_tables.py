"""Tables of test cases, in TOML files below tests/."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Return the table tests/NAME.toml."""
    return tomllib.loads((Path(__file__).parents[1] / f"{name}.toml").read_text("utf-8"))


MESSAGES = read_table("support/expected_messages")


def expander(abbreviations: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that expands the abbreviations of a line into flags, recursively."""

    def flags(line: str) -> str:
        return " ".join(flags(abbreviations[word]) if word in abbreviations else word for word in line.split())

    return flags
