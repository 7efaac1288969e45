"""Tables of tests that hold no code, in TOML files below tests/."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def read(name: str) -> dict[str, Any]:
    """NAME.toml."""
    return tomllib.loads((Path(__file__).parents[1] / f"{name}.toml").read_text("utf-8"))


MESSAGES = read("support/expected_messages")


def spelt(words: Mapping[str, str]) -> Callable[[str], str]:
    """What makes flags of a line in which such words stand for others, and these perhaps for others again."""

    def flags(line: str) -> str:
        return " ".join(flags(words[word]) if word in words else word for word in line.split())

    return flags
