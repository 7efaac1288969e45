#!/usr/bin/env python
"""Write docs/flags.md from the dataclasses of megalite/config.py and the lists of megalite/megatron.py.

python tools/document_flags.py > docs/flags.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.cli import flag_of, spellings  # noqa: E402
from megalite.config import REQUIRED, SECTIONS, base_type, options  # noqa: E402
from megalite.megatron import IGNORED, UNSUPPORTED  # noqa: E402


def text() -> str:
    lines = [
        "# Flags",
        "",
        "Made by `tools/document_flags.py`; do not edit. `--preset NAME` and `--config FILE.toml` come before all:",
    ]
    lines += ["defaults, then the preset, then the file, then the flags.", ""]
    for section in SECTIONS:
        lines += [f"## {section}", "", "| flag | type | default | meaning |", "|---|---|---|---|"]
        for where, f in options():
            if where == section:
                names = ", ".join(f"`{flag}`" for flag, _ in spellings(f))
                kind = " / ".join(f.metadata["choices"]) or base_type(f)
                default = "" if f.default is None else "required" if f.name in REQUIRED else str(f.default)
                lines.append(f"| {names} | {kind} | {default} | {f.metadata['help'].replace('|', '&#124;')} |")
        lines.append("")
    lines += ["## Megatron-LM flags that are accepted and ignored, with a note", ""]
    lines += _grouped(IGNORED)
    lines += ["## Megatron-LM flags that are refused, with a line that says why", ""]
    lines += _grouped(UNSUPPORTED)
    assert all(flag_of(f.name).startswith("--") for _, f in options())
    return "\n".join(lines).rstrip() + "\n"


def _grouped(table: object) -> list[str]:
    groups: dict[str, list[str]] = {}
    for flag, (_, reason) in table.items():  # type: ignore[attr-defined]
        groups.setdefault(reason, []).append(f"`{flag}`")
    return [line for reason, flags in groups.items() for line in (f"**{reason}**: {', '.join(flags)}", "")]


if __name__ == "__main__":
    sys.stdout.write(text())
