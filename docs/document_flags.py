"""The two reference pages of the site that are generated: megalite's flags, and Megatron-LM's flags.

The pages are not in the repository. The site's build adds them (docs/hooks.py). To read one without the site:

    python -m docs.document_flags > flags.md
    python -m docs.document_flags --megatron > megatron_flags.md
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import Field
from itertools import groupby
from typing import Any

from megalite.config import megatron_flags
from megalite.config.megatron_flags import DEPENDENT, INSTEAD, NO_EFFECT, OPTION, REFUSED, WARNED, MegatronFlag
from megalite.config.option import flag_name, flags_of, option_spec, type_name, unsupported_values
from megalite.config.options import SECTIONS, iter_options

FLAGS_INTRO = """\
# Flags

`--preset NAME` and `--config FILE.toml` set several options at once. A preset overrides the defaults, a file overrides
the preset, and a flag overrides both.

Words of a flag are joined by `-` or `_`. A switch `--x` can also be written `--no-x`, `--disable-x`, `--x=true` and
`--x=false`; the table shows the form that changes the default. In a file an option has the name of its flag with `_`,
in the section under which it is listed here.

Flags that only Megatron-LM has: [Megatron-LM's flags](megatron_flags.md).
"""

MEGATRON_INTRO = """\
# Megatron-LM's flags

Every flag of Megatron-LM's parser at d98e8a64 (2026-08-22), by its argument groups, with the verdict of megalite.

| verdict | flags | meaning |
|---|---|---|
| works | {works} | does what it does in Megatron-LM |
| no effect | {no_effect} | accepted; the reason says why there is nothing to do |
| dependent | {dependent} | accepted; matters only together with the named flag, which is refused or gives a warning |
| warning | {warned} | the run starts, with a warning that the request is not met |
| refused | {refused} | the run does not start |
| all | {all} | **{accepted:.0f} % work or have no effect**; dependent flags are not among these |

All refused flags of a command line are reported at once, before anything starts. A value that requests nothing, such as
a size of 1, is accepted for every flag.
"""

# Groups of megatron_flags.txt whose flags are not in Megatron-LM's parser today; the counts leave them out.
OUTSIDE = ("gone from Megatron-LM", "other programs of Megatron-LM", "DeepSpeed", "forks of Megatron-LM")


def flags_page() -> str:
    """Return the page of all options, one table per section of the configuration."""
    lines = [FLAGS_INTRO]
    for section in SECTIONS:
        lines += [f"## {section}", "", "| flag | type | default | meaning |", "|---|---|---|---|"]
        lines += [_option_row(option) for option_section, option in iter_options() if option_section == section]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _option_row(option: Field[Any]) -> str:
    option_facts = option_spec(option)
    flags = ", ".join(f"`{flag}`" for flag in _shown_flags(option))
    kind = " / ".join(option_facts.choices) or type_name(option)
    if option_facts.required:
        default = "required"
    elif option.default is None:
        default = ""
    else:
        default = str(option.default)
    meaning = option_facts.help.replace("|", "&#124;")
    return f"| {flags} | {kind} | {default} | {meaning} |"


def _shown_flags(option: Field[Any]) -> list[str]:
    """Return the flags that set the option.

    For a switch, these are only the flags that change its default, without the `--disable-x` that every switch has.
    """
    if type_name(option) != "bool":
        return [flag for flag, _ in flags_of(option)]
    implied = "--disable-" + flag_name(option.name).removeprefix("--")
    return [flag for flag, value in flags_of(option) if value is not option.default and flag != implied]


def megatron_page() -> str:
    """Return the page of all flags that Megatron-LM or a program related to it has, one table per group."""
    known = {name: flag for name, flag in megatron_flags.known_flags().items() if flag.verdict != INSTEAD}
    count = Counter(flag.verdict for flag in known.values() if flag.group not in OUTSIDE)
    total = count.total()
    intro = MEGATRON_INTRO.format(
        works=count[OPTION],
        no_effect=count[NO_EFFECT],
        dependent=count[DEPENDENT],
        warned=count[WARNED],
        refused=count[REFUSED],
        all=total,
        accepted=100 * (count[OPTION] + count[NO_EFFECT]) / total,
    )
    refused_values = _refused_values()
    lines = [intro]
    for group, members in groupby(known.items(), key=lambda item: item[1].group):
        lines += [f"## {group}", "", "| flag | verdict | reason |", "|---|---|---|"]
        for name, flag in members:
            verdict, reason = _verdict(flag, refused_values.get(name, ()))
            lines.append(f"| `{name}` | {verdict} | {reason} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _refused_values() -> dict[str, Sequence[str]]:
    """Return, by flag, the values of Megatron-LM that megalite refuses for an option which works."""
    values_by_flag: dict[str, Sequence[str]] = {}
    for _, option in iter_options():
        for flag, value in flags_of(option):
            if value is None:
                values_by_flag[flag] = list(unsupported_values().get(option.name, ()))
    return values_by_flag


def _verdict(flag: MegatronFlag, refused_values: Sequence[str]) -> tuple[str, str]:
    """Return the verdict and its reason."""
    if flag.verdict == OPTION:
        return "works", f"refused values: {_quoted(refused_values)}" if refused_values else ""
    if flag.verdict == NO_EFFECT:
        return "no effect", flag.reason
    if flag.verdict == DEPENDENT:
        return "dependent", f"matters only together with `{megatron_flags.primary_flag(flag.feature)}`"
    verdict = "warning" if flag.verdict == WARNED else "refused"
    accepted = f"; accepted values: {_quoted(flag.noop_values)}" if flag.noop_values else ""
    return verdict, flag.reason + accepted


def _quoted(values: Sequence[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", action="store_true", help="print the page of Megatron-LM's flags")
    page = megatron_page() if parser.parse_args().megatron else flags_page()
    sys.stdout.write(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
