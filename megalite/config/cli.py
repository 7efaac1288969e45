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

from megalite.config import options as configs
from megalite.config import plugins
from megalite.config.console import complain
from megalite.config.exits import Finished
from megalite.config.field import LISTS, base_type, facts_of, flag_of, masked, spellings
from megalite.config.megatron_flags import INSTEAD, OPTION, answer, known_flags, nearest
from megalite.config.options import SECTIONS, Config, ConfigError, options
from megalite.config.tables import table_beside
from megalite.config.toml import read_toml
from megalite.config.validation import check, without_effect

PAGES = table_beside(__file__, "help")
_TYPES = {"int": int, "float": float, "ints": int, "floats": float}  # what a text becomes
Also = Callable[[Config, list[str]], Sequence[str]]
World = Callable[[Config], int | None]
Presets = Mapping[str, Mapping[str, Any]]
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass
class Words:
    """A command line, taken apart. `given`: option -> its text or texts, or the value that its flag stands for."""

    given: dict[str, Any] = field(default_factory=dict)
    foreign: list[tuple[str, list[str]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unclear: set[str] = field(default_factory=set)  # options that were given a value that cannot be read
    misspelt: set[str] = field(default_factory=set)  # options that misspelt flags may have meant
    notes: list[str] = field(default_factory=list)

    def give(self, name: str, value: Any) -> None:
        """The last one counts, as in Megatron-LM."""
        if self.given.get(name, value) != value:
            texts = (" ".join(v) if isinstance(v, list) else str(v) for v in (self.given[name], value))
            self.notes.append(f"{name} is given twice, as {' and as '.join(map(masked, texts))}; the last one counts")
        self.given[name] = value

    def stray(self, more: list[str], before: str, name: str, value: Any) -> None:
        """Words that no flag takes, after the flag `before`, which sets `name`."""
        if isinstance(value, str):  # a value with spaces, which the shell has split
            self.unclear.add(name)
            flag, whole = before.partition("=")[0], shlex.quote(" ".join([value, *more]))
            where = f" after {flag} {value}; quote a value that has spaces: {flag} {whole}"
        else:
            where = f"{f' after {before}' * bool(before)}; a flag stands before its value, as in --lr 3e-4"
        self.problems.append(f"unexpected word{'s' * (len(more) > 1)} {', '.join(map(repr, more))}{where}")


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def take_apart(argv: Sequence[str]) -> Words:
    """Every word of `argv` as an option, a flag of Megatron-LM, or a problem."""
    ours = {flag: (f, constant) for _, f in options() for flag, constant in spellings(f)}
    theirs, found, rest, before, text = known_flags(), Words(), list(argv), "", ""
    spelt = [flag for flag, known in theirs.items() if known.verdict != INSTEAD]
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            strays = [word]
            while rest and not _is_flag(rest[0]):
                strays.append(rest.pop(0))
            found.stray(strays, before, text, found.given.get(text))
            continue
        before, text = word, ""  # `text`: the option that this flag sets to a text
        head, equals, value = word.partition("=")
        flag = head if head in theirs else head.replace("_", "-")
        values = [value] if equals else []
        f, constant = ours.get(flag, (None, None))
        kind = "str" if flag in ("--preset", "--config") else None if f is None else base_type(f)
        if kind is None:
            known = theirs.get(flag)
            unknown = known is None or known.verdict in (INSTEAD, OPTION)
            most = None if unknown or known is None else known.values
            while rest and not _is_flag(rest[0]) and not equals and (most is None or len(values) < most):
                values.append(rest.pop(0))
            if unknown:
                remedy = known.reason if known is not None else nearest(flag, [*ours, *spelt])
                better = "; see --help" if not remedy else f"; use {remedy}" if known else f"; did you mean {remedy}?"
                found.problems.append(f"unknown flag {flag}{better}")
                found.misspelt |= _named_in(remedy or "")
            else:
                found.foreign.append((flag, values))
        elif f is not None and constant is not None:
            if not equals and rest and rest[0].lower() in _BOOLS:
                values = [rest.pop(0)]
            holds = _BOOLS.get(values[0].lower()) if values else True
            if holds is None:
                found.problems.append(f"{flag}={values[0]} is neither true nor false; give one, or no value")
                found.unclear.add(f.name)
            else:
                found.give(f.name, constant if holds else not constant if kind == "bool" else f.default)
        else:
            name = flag[2:] if f is None else f.name
            lists = kind in LISTS
            while not equals and rest and not _is_flag(rest[0]) and (lists or not values):
                values.append(rest.pop(0))
            if not values:
                remedy = f"give it after the flag (one that begins with -: {flag}=-1)"
                found.problems.append(f"{flag} needs a value; {remedy}")
                found.unclear.add(name)
            elif f is not None and facts_of(f).adds_up:
                found.given.setdefault(name, []).extend(values)
            else:
                found.give(name, values if lists else values[0])
                text = name if kind == "str" else ""
    return found


def _named_in(text: str) -> set[str]:
    """The options whose flags the text names."""
    flags = set(re.findall(r"--[\w-]+", text))
    return {f.name for _, f in options() if flags & {flag for flag, _ in spellings(f)}}


def _typed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of the command line as values of their types; `convert` refuses those that stay texts."""
    fields, typed = {f.name: f for _, f in options()}, {}
    for name, value in given.items():
        to = _TYPES.get(base_type(fields[name]))
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
class Read:
    """A command line without errors. `warnings`: protections and logs that were asked for and do not exist here."""

    config: Config
    notes: list[str]
    warnings: list[str]


def read_all(argv: Sequence[str], presets: Presets, also: Also | None = None, world: World | None = None) -> Read:
    """The configuration that a command line asks for. `also`: finds further problems, of the machine for instance,
    given those found so far. `world`: the number of ranks. Raises ConfigError with the problems of all stages."""
    words = take_apart(argv)
    foreign = answer(words.foreign)
    problems = [*words.problems, *foreign.problems]
    given, unclear = words.given, words.unclear
    words.misspelt.update(*map(_named_in, foreign.problems))
    path, file, follows = given.pop("config", None), {}, []
    if path is not None:
        try:
            file = read_toml(path)
        except ConfigError as error:
            problems += error.problems
            follows = check(Config())  # problems of an empty command line: the file may have had these options
    words.notes += _load_plugins(file, given, problems)
    preset = str(given.pop("preset", "") or file.get("preset", ""))
    file.pop("preset", None)
    if preset and preset not in presets:
        near = difflib.get_close_matches(preset, presets, 1, cutoff=0.8)
        remedy = f"did you mean {near[0]}? There are" if near else "use one of"
        problems.append(f"preset={preset!r} is unknown; {remedy} {', '.join(sorted(presets))}")
    if (preset and preset not in presets) or "preset" in unclear:
        words.misspelt.update(*presets.values())  # options that the preset may have set
    unclear |= words.misspelt - {**file, **given}.keys()
    values: dict[str, Any] = {}
    for source in (file, _typed(given)):  # a wrong type in the file is an error even where a flag wins over it
        typed, wrong = configs.convert_all(source)
        problems += wrong.values()
        unclear |= set(wrong)
        values.update(typed)
    config = configs.build(configs.completed(configs.over_preset(presets.get(preset, {}), values)))
    ranks = world(config) if world else None
    found = check(config, ranks if ranks is None or ranks > 0 else None, unclear=unclear)  # a wrong number is told
    problems += [problem for problem in found if problem not in follows]
    problems += also(config, problems) if also else []
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    if configs.resolved_style(config, megatron_spelling=bool(words.foreign)) == "megatron":
        config = replace(config, log=replace(config.log, log_style="megatron"))
    return Read(config, [*words.notes, *foreign.notes, *without_effect(config)], foreign.warnings)


def _load_plugins(file: dict[str, Any], given: dict[str, Any], problems: list[str]) -> list[str]:
    """Before values are looked at, which may name what plugins register. Returns notes. Raises ConfigError."""
    there, _ = configs.convert_all({name: value for name, value in file.items() if name == "plugin"})
    if words := [*dict.fromkeys([*there.get("plugin", ()), *given.get("plugin", ())])]:
        given["plugin"] = words
    try:
        plugins.load(words)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    return [f"plugin={word!r} is run, as the configuration says" for word in there.get("plugin", ())]


def read(argv: Sequence[str], presets: Presets) -> tuple[Config, list[str]]:
    """The configuration and notes about it. Raises ConfigError with every problem."""
    command = read_all(argv, presets)
    return command.config, [*command.notes, *(f"WARNING: {line}" for line in command.warnings)]


def read_or_exit(
    argv: Sequence[str], presets: Presets, also: Also | None = None, world: World | None = None, quiet: bool = False
) -> Read:
    """As `read_all`, for a program: prints notes, or the help, or all problems and exits with 2. `quiet`: no notes."""
    try:
        if (topic := asked_for(argv)) is not None:
            print(help_text(topic, sorted(presets)))
            raise Finished
        command = read_all(argv, presets, also, world)
    except ConfigError as error:
        for problem in error.problems:
            complain(f"pretrain_gpt.py: {problem}")
        raise SystemExit(2) from None
    for note in [] if quiet else command.notes:
        complain(f"note: {note}")
    return command  # the run prints the warnings, into its log too


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
    parser.epilog = "A switch --x is also --no-x and --x=false. Many more of Megatron-LM's flags are accepted."
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
    groups = (f"  --help {name:<13} {about} ({counts[name]} options)" for name, about in PAGES["groups"].items())
    lines += ["", "more:", *groups]
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
            if flag == flag_of(name):
                text = facts.help + shown
            elif constant is None:
                text = f"same as {flag_of(name)}"
            else:
                text = f"same as {flag_of(name)}={str(constant).lower() if kind == 'bool' else constant}"
            if constant is not None:
                if negative or flag == flag_of(name) or kind != "bool":  # not a flag that sets the default
                    group.add_argument(flag, action="store_true", help=text.replace("%", "%%"))
            else:
                metavar = "{" + ",".join(facts.choices) + "}" if [*facts.choices] and not short else kind.upper()
                group.add_argument(*(spelt if short else [flag]), metavar=metavar, help=text.replace("%", "%%"))
