"""The command line: defaults < --preset NAME < --config FILE.toml < flags.

Flags are made from the dataclasses of options.py, with - or _ between words; they cannot be abbreviated. A bool takes
--x, --no-x, --disable-x and a value (--x=false). A misspelt flag is answered with the nearest one, and a flag of
Megatron-LM that is no option here as megatron_flags.py says. All problems are printed at once, before torch is
imported, and the exit code is 2. --help shows fifteen flags, three examples and the groups; --help GROUP the flags of a
section of options.py; --help all every flag.
"""

import argparse
import difflib
import functools
import os
import re
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megalite.common.tables import load_table
from megalite.config import options as configs
from megalite.config import plugins
from megalite.config.config_file import read_config_file
from megalite.config.console import print_err
from megalite.config.exits import Finished
from megalite.config.megatron_flags import INSTEAD, OPTION, classify_flags, closest_match, known_flags
from megalite.config.option import LIST_TYPES, flag_name, flags_of, mask_url_secrets, option_spec, type_name
from megalite.config.options import SECTIONS, Config, ConfigError, iter_options
from megalite.config.validation import find_ineffective, find_problems

HELP_PAGES = load_table(__file__, "help_pages")
_TYPES = {"int": int, "float": float, "ints": int, "floats": float}  # what a text becomes
ExtraChecks = Callable[[Config, list[str]], Sequence[str]]
WorldSizeOf = Callable[[Config], int | None]
Presets = Mapping[str, Mapping[str, Any]]
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass
class ParsedArgs:
    """A command line, taken apart. `values`: option -> its text or texts, or the value that its flag stands for."""

    values: dict[str, Any] = field(default_factory=dict)
    megatron_flags: list[tuple[str, list[str]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)  # options that were given a value that cannot be read
    misspelled: set[str] = field(default_factory=set)  # options that misspelt flags may have meant
    notes: list[str] = field(default_factory=list)

    def set_value(self, name: str, value: Any) -> None:
        """The last one counts, as in Megatron-LM."""
        if self.values.get(name, value) != value:
            texts = (" ".join(v) if isinstance(v, list) else str(v) for v in (self.values[name], value))
            self.notes.append(
                f"{name} is given twice, as {' and as '.join(map(mask_url_secrets, texts))}; the last one counts"
            )
        self.values[name] = value

    def add_stray(self, more: list[str], before: str, name: str, value: Any) -> None:
        """Words that no flag takes, after the flag `before`, which sets `name`."""
        if isinstance(value, str):  # a value with spaces, which the shell has split
            self.unreadable.add(name)
            flag, whole = before.partition("=")[0], shlex.quote(" ".join([value, *more]))
            where = f" after {flag} {value}; quote a value that has spaces: {flag} {whole}"
        else:
            where = f"{f' after {before}' * bool(before)}; a flag stands before its value, as in --lr 3e-4"
        self.problems.append(f"unexpected word{'s' * (len(more) > 1)} {', '.join(map(repr, more))}{where}")


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def parse_args(argv: Sequence[str]) -> ParsedArgs:
    """Every word of `argv` as an option, a flag of Megatron-LM, or a problem."""
    ours = {flag: (f, constant) for _, f in iter_options() for flag, constant in flags_of(f)}
    theirs, found, rest, before, text = known_flags(), ParsedArgs(), list(argv), "", ""
    spelt = [flag for flag, known in theirs.items() if known.verdict != INSTEAD]
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            strays = [word]
            while rest and not _is_flag(rest[0]):
                strays.append(rest.pop(0))
            found.add_stray(strays, before, text, found.values.get(text))
            continue
        before, text = word, ""  # `text`: the option that this flag sets to a text
        head, equals, value = word.partition("=")
        flag = head if head in theirs else head.replace("_", "-")
        values = [value] if equals else []
        f, constant = ours.get(flag, (None, None))
        kind = "str" if flag in ("--preset", "--config") else None if f is None else type_name(f)
        if kind is None:
            known = theirs.get(flag)
            unknown = known is None or known.verdict in (INSTEAD, OPTION)
            most = None if unknown or known is None else known.values
            while rest and not _is_flag(rest[0]) and not equals and (most is None or len(values) < most):
                values.append(rest.pop(0))
            if unknown:
                remedy = known.reason if known is not None else closest_match(flag, [*ours, *spelt])
                better = "; see --help" if not remedy else f"; use {remedy}" if known else f"; did you mean {remedy}?"
                found.problems.append(f"unknown flag {flag}{better}")
                found.misspelled |= _options_named_in(remedy or "")
            else:
                found.megatron_flags.append((flag, values))
        elif f is not None and constant is not None:
            if not equals and rest and rest[0].lower() in _BOOLS:
                values = [rest.pop(0)]
            holds = _BOOLS.get(values[0].lower()) if values else True
            if holds is None:
                found.problems.append(f"{flag}={values[0]} is neither true nor false; give one, or no value")
                found.unreadable.add(f.name)
            else:
                found.set_value(f.name, constant if holds else not constant if kind == "bool" else f.default)
        else:
            name = flag[2:] if f is None else f.name
            lists = kind in LIST_TYPES
            while not equals and rest and not _is_flag(rest[0]) and (lists or not values):
                values.append(rest.pop(0))
            if f is not None and (bare := option_spec(f).bare_value) is not None:
                switch = _BOOLS.get(values[0].lower()) if values else True
                if switch is not None:
                    values = [bare if switch else "off"]
            if not values:
                remedy = f"give it after the flag (one that begins with -: {flag}=-1)"
                found.problems.append(f"{flag} needs a value; {remedy}")
                found.unreadable.add(name)
            elif f is not None and option_spec(f).accumulates:
                found.values.setdefault(name, []).extend(values)
            else:
                found.set_value(name, values if lists else values[0])
                text = name if kind == "str" else ""
    return found


def _options_named_in(text: str) -> set[str]:
    """The options whose flags the text names."""
    flags = set(re.findall(r"--[\w-]+", text))
    return {f.name for _, f in iter_options() if flags & {flag for flag, _ in flags_of(f)}}


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of the command line as values of their types; `convert` refuses those that stay texts."""
    fields, typed = {f.name: f for _, f in iter_options()}, {}
    for name, value in values.items():
        to = _TYPES.get(type_name(fields[name]))
        try:
            if isinstance(value, list) and value[0][:1] == "[" and value[-1][-1:] == "]":  # a list as YAML has it
                value = [word for word in " ".join(value)[1:-1].replace(",", " ").split()]
            if isinstance(value, list) and to is not None:  # 4 5, or as Megatron-LM's tuples 4,5 or (4,5)
                value = [to(v) for word in value for v in word.strip("()").split(",")]
            elif isinstance(value, str) and to is not None:
                value = to(value)
        except ValueError:
            pass
        typed[name] = value
    return typed


@dataclass(frozen=True)
class ParsedConfig:
    """A command line without errors. `warnings`: protections and logs that were asked for and do not exist here."""

    config: Config
    notes: list[str]
    warnings: list[str]


def parse_config(
    argv: Sequence[str], presets: Presets, also: ExtraChecks | None = None, world: WorldSizeOf | None = None
) -> ParsedConfig:
    """The configuration that a command line asks for. `also`: finds further problems, of the machine for instance,
    given those found so far. `world`: the number of ranks. Raises ConfigError with the problems of all stages."""
    words = parse_args(argv)
    megatron_flags = classify_flags(words.megatron_flags)
    problems = [*words.problems, *megatron_flags.problems]
    values, unreadable = words.values, words.unreadable
    words.misspelled.update(*map(_options_named_in, megatron_flags.problems))
    path, file, follows = values.pop("config", None), {}, []
    if path is not None:
        try:
            file = read_config_file(path)
        except ConfigError as error:
            problems += error.problems
            follows = find_problems(Config())  # problems of an empty command line: the file may have had these options
    words.notes += _load_plugins(file, values, problems)
    preset = str(values.pop("preset", "") or file.get("preset", ""))
    file.pop("preset", None)
    if preset and preset not in presets:
        near = difflib.get_close_matches(preset, presets, 1, cutoff=0.8)
        remedy = f"did you mean {near[0]}? There are" if near else "use one of"
        problems.append(f"preset={preset!r} is unknown; {remedy} {', '.join(sorted(presets))}")
    if (preset and preset not in presets) or "preset" in unreadable:
        words.misspelled.update(*presets.values())  # options that the preset may have set
    unreadable |= words.misspelled - {**file, **values}.keys()
    merged: dict[str, Any] = {}
    for source in (file, _typed(values)):  # a wrong type in the file is an error even where a flag wins over it
        typed, wrong = configs.convert_values(source)
        problems += wrong.values()
        unreadable |= set(wrong)
        merged.update(typed)
    config = configs.build(configs.apply_megatron_defaults(configs.apply_preset(presets.get(preset, {}), merged)))
    ranks = world(config) if world else None
    found = find_problems(
        config, ranks if ranks is None or ranks > 0 else None, unclear=unreadable
    )  # a wrong number is told
    problems += [problem for problem in found if problem not in follows]
    problems += also(config, problems) if also else []
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    if configs.effective_log_style(config, megatron_spelling=bool(words.megatron_flags)) == "megatron":
        config = replace(config, log=replace(config.log, log_style="megatron"))
    return ParsedConfig(
        config, [*words.notes, *megatron_flags.notes, *find_ineffective(config)], megatron_flags.warnings
    )


def _load_plugins(file: dict[str, Any], values: dict[str, Any], problems: list[str]) -> list[str]:
    """Before values are looked at, which may name what plugins register. Returns notes. Raises ConfigError."""
    there, _ = configs.convert_values({name: value for name, value in file.items() if name == "plugin"})
    if words := [*dict.fromkeys([*there.get("plugin", ()), *values.get("plugin", ())])]:
        values["plugin"] = words
    try:
        plugins.load_plugins(words)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    return [f"plugin={word!r} is run, as the configuration says" for word in there.get("plugin", ())]


def read(argv: Sequence[str], presets: Presets) -> tuple[Config, list[str]]:
    """The configuration and notes about it. Raises ConfigError with every problem."""
    command = parse_config(argv, presets)
    return command.config, [*command.notes, *(f"WARNING: {line}" for line in command.warnings)]


def parse_config_or_exit(
    argv: Sequence[str],
    presets: Presets,
    also: ExtraChecks | None = None,
    world: WorldSizeOf | None = None,
    quiet: bool = False,
) -> ParsedConfig:
    """As `parse_config`, for a program: prints notes, or the help, or all problems and exits with 2. `quiet`: without
    notes."""
    try:
        if (topic := requested_help_topic(argv)) is not None:
            print(help_text(topic, sorted(presets)))
            raise Finished
        command = parse_config(argv, presets, also, world)
    except ConfigError as error:
        for problem in error.problems:
            print_err(f"pretrain_gpt.py: {problem}")
        raise SystemExit(2) from None
    for note in [] if quiet else command.notes:
        print_err(f"note: {note}")
    return command  # the run prints the warnings, into its log too


def requested_help_topic(argv: Sequence[str]) -> str | None:
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
    parser.epilog = "A switch --x is also --no-x and --x=false. Many more of Megatron-LM's flags are accepted."
    if topic == "":
        _add_flags(parser.add_argument_group("to begin with"), HELP_PAGES["first"].split(), presets, short=True)
        parser.epilog = _epilog(parser.prog)
    for section in SECTIONS if topic == "all" else [topic] if topic else ():
        group = parser.add_argument_group(section, HELP_PAGES["groups"][section])
        names = [f.name for of, f in iter_options() if of == section]
        _add_flags(group, ["preset", "config", *names] if section == "model" else names, presets)
    return parser.format_help().rstrip()


def _epilog(prog: str) -> str:
    start = prog if prog.startswith("megalite") else f"python {os.path.relpath(sys.argv[0]) if sys.argv[0] else prog}"
    counts = Counter(section for section, _ in iter_options())
    lines = ["examples:"]
    for what, flags in HELP_PAGES["examples"].items():
        words = textwrap.wrap(f"{start} {flags}", 110, break_long_words=False, break_on_hyphens=False)
        lines += [f"  # {what}", "  " + " \\\n      ".join(words)]
    groups = (f"  --help {name:<13} {about} ({counts[name]} options)" for name, about in HELP_PAGES["groups"].items())
    lines += ["", "more:", *groups]
    return "\n".join([*lines, f"  --help {'all':<13} every flag"])


def _add_flags(group: Any, names: Sequence[str], presets: Sequence[str], short: bool = False) -> None:
    """Add the flags of these options. `short`: one line for each, with all its spellings that take a value."""
    fields = {f.name: f for _, f in iter_options()}
    for name in names:
        if name in HELP_PAGES["first of all"]:
            metavar, text = HELP_PAGES["first of all"][name]
            group.add_argument(f"--{name}", metavar=metavar, help=text.format(presets=", ".join(presets)))
            continue
        f = fields[name]
        kind, facts = type_name(f), option_spec(f)
        shown = "" if f.default is None or kind == "bool" or facts.required else f" (default {f.default})"
        spelt = [flag for flag, constant in flags_of(f) if constant is None or not short]
        for flag, constant in flags_of(f)[: 1 if short else None]:
            negative = kind == "bool" and constant is not f.default
            if flag == flag_name(name):
                text = facts.help + shown
            elif constant is None:
                text = f"same as {flag_name(name)}"
            else:
                text = f"same as {flag_name(name)}={str(constant).lower() if kind == 'bool' else constant}"
            if constant is not None:
                if negative or flag == flag_name(name) or kind != "bool":  # not a flag that sets the default
                    group.add_argument(flag, action="store_true", help=text.replace("%", "%%"))
            else:
                metavar = "{" + ",".join(facts.choices) + "}" if [*facts.choices] and not short else kind.upper()
                nargs = None if facts.bare_value is None else "?"
                flags = spelt if short else [flag]
                group.add_argument(*flags, metavar=metavar, nargs=nargs, help=text.replace("%", "%%"))
