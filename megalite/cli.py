"""The command line: Megatron-LM's spellings over an optional TOML file over an optional preset.

    defaults < --preset NAME < --config FILE.toml < flags

Flags are made from the dataclasses of config.py. There are no prefix abbreviations. A misspelt flag is answered with
the nearest one; a Megatron-LM flag without an option here by one line (megatron.py). Everything that is wrong is
printed at once, and the exit code is 2, before torch is imported.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, replace
from typing import Any, NoReturn

from megalite import config as configs
from megalite.config import Config, ConfigError, base_type, options
from megalite.config_check import check, without_effect
from megalite.config_toml import read_toml
from megalite.megatron import IGNORED, UNSUPPORTED

_TYPES = {"int": int, "float": float, "ints": int}  # what a text becomes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def spellings(f: Field[Any]) -> list[tuple[str, Any]]:
    """Every flag that sets this option: (flag, None) when a value follows, else (flag, the value it stands for)."""
    flag, result = flag_of(f.name), []
    if base_type(f) == "bool":
        result.append((flag, True))
        if f.default is True:
            result += [(f"--no-{flag[2:]}", False), (f"--disable-{flag[2:]}", False)]
    else:
        result.append((flag, None))
    for extra in f.metadata["flags"]:
        spelt, _, value = extra.partition("=")
        result.append((spelt, {"": None, "true": True, "false": False}.get(value, value)))
    return result


def build_parser(presets: Sequence[str]) -> argparse.ArgumentParser:
    """A parser whose namespace holds only what was given."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Pretrain a GPT over a tensor x pipeline x data parallel mesh. Megatron-LM's flags.",
    )
    parser.add_argument("--preset", metavar="NAME", help="model shape: " + ", ".join(presets))
    parser.add_argument("--config", metavar="FILE", help="TOML file of options; flags win over it")
    groups = {name: parser.add_argument_group(name) for name in configs.SECTIONS}
    for section, f in options():
        kind = base_type(f)
        shown = "" if f.default is None or kind == "bool" or f.name in configs.REQUIRED else f" (default {f.default})"
        for flag, constant in spellings(f):
            text = f.metadata["help"] + shown if flag == flag_of(f.name) else f"{flag_of(f.name)} {constant}"
            text = text.replace("%", "%%")
            if constant is not None:
                groups[section].add_argument(flag, dest=f.name, action="store_const", const=constant, help=text)
            else:
                choices = f.metadata["choices"]
                groups[section].add_argument(  # as text: `_typed` reports every value that is none of its type
                    flag,
                    dest=f.name,
                    nargs="+" if kind in ("ints", "strs") else None,
                    metavar="{" + ",".join(choices) + "}" if choices else kind.upper(),
                    help=text,
                )
    return parser


def _without_foreign(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str], list[str]]:
    """Take Megatron-LM's other flags out of `argv`: what is left, notes, problems."""
    known = parser._option_string_actions
    left: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag = word.partition("=")[0]
        if not flag.startswith("--") or flag in known:
            left.append(word)
            continue
        table = IGNORED if flag in IGNORED else UNSUPPORTED if flag in UNSUPPORTED else None
        if table is None:
            near = difflib.get_close_matches(flag, [*known, *IGNORED], n=1, cutoff=0.6)
            problems.append(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
            while words and not words[0].startswith("--"):
                words.pop(0)
            continue
        count, reason = table[flag]
        if "=" not in word:
            while words and not words[0].startswith("--") and count != 0:
                words.pop(0)
                count -= 1
        if table is IGNORED:
            notes.append(f"{flag} is ignored: {reason}")
        else:
            problems.append(f"{flag} is a Megatron-LM flag that megalite does not support: {reason}")
    return left, notes, problems


def _typed(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of the command line as values of their types; and name -> problem for those that are none."""
    fields = {f.name: f for _, f in options()}
    made: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name, value in given.items():
        if name not in fields:  # preset, config
            made[name] = value
            continue
        to = _TYPES.get(base_type(fields[name]))
        try:
            if isinstance(value, list) and to is not None:  # 4 5, or as Megatron-LM's tuples 4,5 or (4,5)
                value = [to(v) for word in value for v in word.strip("()").split(",")]
            elif to is not None:
                value = to(value)
        except ValueError:
            pass  # convert says so
        try:
            made[name] = configs.convert(fields[name], value)
        except ValueError as error:
            problems[name] = str(error)
    return made, problems


def read(argv: Sequence[str], presets: Mapping[str, Mapping[str, Any]]) -> tuple[Config, list[str]]:
    """The configuration and notes about flags that were ignored. Raises ConfigError with every problem found."""
    parser = build_parser(sorted(presets))
    words, notes, problems = _without_foreign(argv, parser)
    try:
        given = vars(parser.parse_args(words))
    except ConfigError as error:  # nothing is known of the other words
        raise ConfigError([*problems, *error.problems]) from None
    given, wrong = _typed(given)
    problems += wrong.values()
    values: dict[str, Any] = {}
    path = given.pop("config", None)
    try:
        file = read_toml(path) if path is not None else {}
        preset = str(given.pop("preset", "") or file.get("preset", ""))
        file.pop("preset", None)
        if preset and preset not in presets:
            problems.append(f"preset={preset!r} is unknown; use one of {', '.join(sorted(presets))}")
        configs.build(file)  # a wrong type in the file is an error even where a flag wins over it
        values = {**presets.get(preset, {}), **file, **given}
        made = configs.build(values)
        if configs.resolved_style(made, bool(notes)) == "megatron":  # the notes are of Megatron-LM's own flags
            made = replace(made, log=replace(made.log, log_style="megatron"))
        notes += without_effect(made)
        problems += [p for p in check(made) if p.partition("=")[0].partition(" ")[0] not in wrong]
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return made, notes


def parse(argv: Sequence[str], presets: Mapping[str, Mapping[str, Any]]) -> Config:
    """As `read`, for a program: prints notes, or all problems and exits with code 2."""
    try:
        made, notes = read(argv, presets)
    except ConfigError as error:
        for problem in error.problems:
            print(f"pretrain_gpt.py: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return made
