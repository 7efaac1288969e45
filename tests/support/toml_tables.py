"""Tables of tests that hold no code, in TOML files below tests/."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MOVED = {
    "layouts": "layouts/layouts",
    "verify": "tools/verify",
    "journeys": "docs/user_guides",
    "megatron_figures": "training/megatron_schedules",
    "published_lines": "entry_points/published_scripts",
    "user_mistakes": "entry_points/user_mistakes",
    "house_faults": "repository/style_violations",
    "chaos/breakages": "chaos/mutations",
}  # until all tests use the new names


def read(name: str) -> dict[str, Any]:
    """NAME.toml."""
    return tomllib.loads((Path(__file__).parents[1] / f"{MOVED.get(name, name)}.toml").read_text("utf-8"))


ANSWERS = read("support/expected_messages")


def spelt(words: Mapping[str, str]) -> Callable[[str], str]:
    """What makes flags of a line in which such words stand for others, and these perhaps for others again."""

    def flags(line: str) -> str:
        return " ".join(flags(words[word]) if word in words else word for word in line.split())

    return flags
