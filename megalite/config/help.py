"""The pages of --help: fifteen flags, three examples and the groups; --help GROUP: the flags of a section of
options.py; --help all: every flag. Imports no torch."""

import argparse
import difflib
import functools
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megalite.config.field import base_type, facts_of, flag_of, spellings
from megalite.config.options import SECTIONS, ConfigError, options
from megalite.config.tables import table_beside

PAGES = table_beside(__file__, "help")


def asked_for(argv: Sequence[str]) -> str | None:
    """The page that is asked for: "", a group, all, or an unknown word; None where no help is asked for."""
    for i, word in enumerate(argv):
        name, _, topic = word.partition("=")
        if name in ("-h", "--help"):
            following = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("-") else ""
            return topic or following
    return None


def help_text(topic: str, presets: Sequence[str]) -> str:
    """Raises ConfigError where there is no such page."""
    if topic not in ("", "all", *SECTIONS):
        near = difflib.get_close_matches(topic, ("all", *SECTIONS), 1)
        meant = f"did you mean {near[0]}?" if near else f"give one of {', '.join(SECTIONS)}, all"
        raise ConfigError([f"--help {topic} is not a page of the help; {meant}"])
    form = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
    parser = argparse.ArgumentParser(usage="%(prog)s FLAGS", add_help=False, formatter_class=form)
    parser.description = "Pretrain a GPT over a tensor x pipeline x data parallel mesh. Megatron-LM's flags."
    parser.epilog = "A switch --x is also --no-x and --x=false. More of Megatron-LM's flags: docs/megatron.md."
    if topic == "":
        _add(parser.add_argument_group("to begin with"), PAGES["first"].split(), presets, short=True)
        parser.epilog = _rest(parser.prog)
    for section in SECTIONS if topic == "all" else [topic] if topic else ():
        group = parser.add_argument_group(section, PAGES["groups"][section])
        names = [f.name for of, f in options() if of == section]
        _add(group, ["preset", "config", *names] if section == "model" else names, presets)
    return parser.format_help().rstrip()


def _rest(prog: str) -> str:
    start = prog if prog.startswith("megalite") else f"python {os.path.relpath(sys.argv[0]) if sys.argv[0] else prog}"
    counts = Counter(section for section, _ in options())
    lines = ["examples:"]
    for what, flags in PAGES["examples"].items():
        words = textwrap.wrap(f"{start} {flags}", 110, break_long_words=False, break_on_hyphens=False)
        lines += [f"  # {what}", "  " + " \\\n      ".join(words)]
    lines += [
        "",
        "more:",
        *(f"  --help {name:<13} {about} ({counts[name]} options)" for name, about in PAGES["groups"].items()),
    ]
    return "\n".join([*lines, f"  --help {'all':<13} every flag"])


def _add(group: Any, names: Sequence[str], presets: Sequence[str], short: bool = False) -> None:
    """Add the flags of these options. `short`: one line for each, with all its spellings that take a value."""
    fields = {f.name: f for _, f in options()}
    for name in names:
        if name in PAGES["first of all"]:
            metavar, text = PAGES["first of all"][name]
            group.add_argument(f"--{name}", metavar=metavar, help=text.format(presets=", ".join(presets)))
            continue
        f = fields[name]
        kind, facts = base_type(f), facts_of(f)
        shown = "" if f.default is None or kind == "bool" or facts.required else f" (default {f.default})"
        spelt = [flag for flag, constant in spellings(f) if constant is None or not short]
        for flag, constant in spellings(f)[: 1 if short else None]:
            negative = kind == "bool" and constant is not f.default
            text = facts.help + shown if flag == flag_of(name) else f"{flag_of(name)} {constant}"
            if constant is not None:
                if negative or flag == flag_of(name) or kind != "bool":  # not a flag that sets the default
                    group.add_argument(flag, action="store_true", help=text.replace("%", "%%"))
            else:
                metavar = "{" + ",".join(facts.choices) + "}" if facts.choices and not short else kind.upper()
                group.add_argument(*(spelt if short else [flag]), metavar=metavar, help=text.replace("%", "%%"))
