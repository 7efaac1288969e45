#!/usr/bin/env python
"""Write docs/flags.md from the dataclasses of megalite/config/options.py, and docs/megatron.md from megatron_flags.txt.

python tools/document_flags.py > docs/flags.md
python tools/document_flags.py --megatron > docs/megatron.md
"""

import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config import megatron_flags
from megalite.config.field import base_type, facts_of, refused, spellings
from megalite.config.megatron_flags import DEPENDENT, INSTEAD, NO_EFFECT, OPTION, REFUSED, WARNED, Flag
from megalite.config.options import SECTIONS, options
from tools.program import parser_of

TAKES = {flag: f.name for _, f in options() for flag, value in spellings(f) if value is None}  # a value
OUTSIDE = ("gone from Megatron-LM", "other programs of Megatron-LM", "DeepSpeed", "forks of Megatron-LM")


def flags_page() -> str:
    lines = [
        "# Flags",
        "",
        "Made by `tools/document_flags.py`; do not edit. `--preset NAME` and `--config FILE.toml` come before all:",
        "defaults, then the preset, then the file, then the flags. Words are joined by `-` or `_`; a switch `--x` is",
        "also `--no-x`, `--disable-x`, `--x=true` and `--x=false`. Flags of Megatron-LM: [megatron.md](megatron.md).",
        "",
    ]
    for section in SECTIONS:
        lines += [f"## {section}", "", "| flag | type | default | meaning |", "|---|---|---|---|"]
        for f in (f for where, f in options() if where == section):
            flags = [flag for flag, value in spellings(f) if base_type(f) != "bool" or value is not f.default]
            shown = [flag for flag in flags if base_type(f) != "bool" or not flag.startswith(f"--disable-{f.name[:4]}")]
            facts = facts_of(f)
            kind = " / ".join(facts.choices) or base_type(f)
            default = "" if f.default is None else "required" if facts.required else str(f.default)
            meaning = facts.help.replace("|", "&#124;")
            lines.append(f"| {', '.join(f'`{flag}`' for flag in shown)} | {kind} | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def verdict(name: str, flag: Flag) -> str:
    if flag.verdict == OPTION:
        others = ", ".join(f"`{value}`" for value in refused().get(TAKES.get(name, ""), ()))
        return f"does, but for {others}: refused" if others else "does"
    if flag.verdict == DEPENDENT:
        return f"no effect here, because it only matters beside `{megatron_flags.first_of(flag.feature)}`"
    if flag.verdict == NO_EFFECT:
        return f"no effect here, because: {flag.reason}"
    said = "starts with a warning" if flag.verdict == WARNED else "refused"
    harmless = f" (not `{'`, `'.join(flag.neutral)}`)" if flag.neutral else ""
    return f"{said}{harmless}, because: {flag.reason}"


def megatron_page() -> str:
    known = {name: f for name, f in megatron_flags.known_flags().items() if f.verdict != INSTEAD}
    theirs = {name: f for name, f in known.items() if f.group not in OUTSIDE}
    count = Counter(f.verdict for f in theirs.values())
    accepted = count[OPTION] + count[NO_EFFECT]
    lines = [
        "# Megatron-LM's flags",
        "",
        "Made by `tools/document_flags.py --megatron`; do not edit. Every flag of Megatron-LM's parser at d98e8a64",
        "(2026-08-22), by its groups, and what becomes of it on a command line of megalite. A flag that asks for",
        "something that is not here is refused before anything starts, and all that is wrong is said at once. Values",
        "that ask for nothing, such as a size of 1, are accepted whatever the flag.",
        "",
        f"Of {len(theirs)} flags {count[OPTION]} do what they say and {count[NO_EFFECT]} have no effect here, each for",
        f"a reason: **{100 * accepted / len(theirs):.0f} % are accepted**. {count[DEPENDENT]} matter only beside a",
        f"feature that is not here, and have no effect without it; {count[WARNED]} start with a warning;",
        f"{count[REFUSED]} are refused.",
        "",
    ]
    for group, members in groupby(known.items(), key=lambda item: item[1].group):
        lines += [f"## {group}", "", "| flag | here |", "|---|---|"]
        lines += [f"| `{name}` | {verdict(name, flag)} |" for name, flag in members]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = parser_of(__doc__, allow_abbrev=True)
    parser.add_argument("--megatron", action="store_true", help="docs/megatron.md instead of docs/flags.md")
    sys.stdout.write(megatron_page() if parser.parse_args().megatron else flags_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
