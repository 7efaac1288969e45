#!/usr/bin/env python
"""Write docs/flags.md from the dataclasses of megalite/config/options.py, and docs/megatron.md from megatron_flags.txt.

python docs/document_flags.py > docs/flags.md
python docs/document_flags.py --megatron > docs/megatron.md
"""

import sys
import tomllib
from collections import Counter
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config import megatron_flags
from megalite.config.field import base_type, facts_of, refused, spellings
from megalite.config.megatron_flags import DEPENDENT, INSTEAD, NO_EFFECT, OPTION, REFUSED, WARNED, Flag
from megalite.config.options import SECTIONS, options
from tools.program import parser_of

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TAKES = {flag: f.name for _, f in options() for flag, value in spellings(f) if value is None}  # a value
OUTSIDE = ("gone from Megatron-LM", "other programs of Megatron-LM", "DeepSpeed", "forks of Megatron-LM")


def flags_page() -> str:
    lines = [TEXTS["flags"]]
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
    named = {"does": OPTION, "nothing": NO_EFFECT, "dependent": DEPENDENT, "warned": WARNED, "refused": REFUSED}
    numbers = {name: count[verdict] for name, verdict in named.items()}
    lines = [TEXTS["megatron"].format(flags=len(theirs), accepted=100 * accepted / len(theirs), **numbers)]
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
