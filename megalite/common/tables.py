"""Tables of facts: TOML files next to the modules that read them."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_table(module: str, name: str) -> dict[str, Any]:
    """Return the contents of NAME.toml in the directory of a module."""
    return tomllib.loads(Path(module).with_name(f"{name}.toml").read_text(encoding="utf-8"))
