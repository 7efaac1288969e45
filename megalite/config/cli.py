"""The command line: defaults < --preset NAME < --config FILE.toml < flags.

Flags are generated from the dataclasses of options.py, with - or _ between words; they cannot be abbreviated. A bool
takes --x, --no-x, --disable-x and a value (--x=false). The problem of a misspelled flag suggests the nearest one. A
flag of Megatron-LM that megalite does not have is treated as megatron_flags.txt says.

All problems are printed at once, before torch is imported, and the exit code is 2.

--help shows the most used flags, three examples and the groups; --help GROUP shows the flags of a section of
options.py, and --help all shows every flag.
"""

import argparse
import difflib
import functools
import os
import re
import shlex
import sys
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, replace
from typing import Any

from megalite.common.console import print_err
from megalite.common.exits import Finished
from megalite.common.tables import load_table
from megalite.common.wording import plural
from megalite.config import options as configs
from megalite.config import plugins
from megalite.config.config_file import read_config_file
from megalite.config.megatron_flags import INSTEAD, OPTION, classify_flags, closest_match, known_flags
from megalite.config.option import LIST_TYPES, OptionSpec, flag_name, flags_of, mask_url_secrets, option_spec, type_name
from megalite.config.options import SECTIONS, Config, ConfigError, iter_options
from megalite.config.problems import Problem
from megalite.config.validation import find_ineffective, find_problems

HELP_PAGES = load_table(__file__, "help_pages")
_TYPES = {"int": int, "float": float, "ints": int, "floats": float}  # the types that texts are converted to
ExtraChecks = Callable[[Config, list[str]], Sequence[str]]
WorldSizeOf = Callable[[Config], int | None]
Presets = Mapping[str, Mapping[str, Any]]
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass
class ParsedArgs:
    """The arguments of a command line, by option."""

    values: dict[str, Any] = field(default_factory=dict)  # option -> its text or texts, or the value of its flag
    megatron_flags: list[tuple[str, list[str]]] = field(default_factory=list)  # flags of Megatron-LM, with their values
    problems: list[str] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)  # options whose value is missing or invalid
    misspelled: set[str] = field(default_factory=set)  # options that misspelled flags may refer to
    notes: list[str] = field(default_factory=list)

    def set_value(self, name: str, value: Any) -> None:
        """Set the value of an option. The last of several values counts, as in Megatron-LM."""
        if self.values.get(name, value) != value:
            texts = (" ".join(v) if isinstance(v, list) else str(v) for v in (self.values[name], value))
            self.notes.append(
                f"{name} is given twice, as {' and as '.join(map(mask_url_secrets, texts))}; the last one counts"
            )
        self.values[name] = value

    def add_stray(self, args: list[str], previous_flag: str, option: str, value: Any) -> None:
        """Add the problem of arguments that belong to no flag.

        Args:
            args: these arguments.
            previous_flag: the flag before them; "" at the start of the command line.
            option: the option that this flag sets to a text; "" if it sets none.
            value: the value of that option; None if there is none.
        """
        text = f"unexpected {plural('argument', len(args))} {', '.join(map(repr, args))}"
        if isinstance(value, str):  # a value with spaces, which the shell has split
            self.unreadable.add(option)
            flag = previous_flag.partition("=")[0]
            quoted = shlex.quote(" ".join([value, *args]))
            self.problems.append(f"{text} after {flag} {value}; quote a value that has spaces: {flag} {quoted}")
            return
        if previous_flag:
            text += f" after {previous_flag}"
        self.problems.append(f"{text}; a flag comes before its value, as in --lr 3e-4")


def _is_flag(arg: str) -> bool:
    return re.match(r"--?[A-Za-z]", arg) is not None


def parse_args(argv: Sequence[str]) -> ParsedArgs:
    """Parse `argv` without converting values: each argument is a flag, a value of one, or part of a problem."""
    return _ArgumentParser(argv).parse()


class _ArgumentParser:
    """Splits a command line into flags and their values, from left to right."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.option_flags = {flag: (f, constant) for _, f in iter_options() for flag, constant in flags_of(f)}
        self.megatron_flags = known_flags()
        self.remaining = deque(argv)
        self.parsed = ParsedArgs()

    def parse(self) -> ParsedArgs:
        """Return the arguments by option."""
        previous_flag = ""
        text_option = ""  # the option that the previous flag sets to a text; "" if there is none
        while self.remaining:
            arg = self.remaining.popleft()
            if not _is_flag(arg):
                strays = [arg, *self._take_values()]
                self.parsed.add_stray(strays, previous_flag, text_option, self.parsed.values.get(text_option))
                continue
            previous_flag = arg
            text_option = self._parse_flag(arg)
        return self.parsed

    def _take_values(self, max_values: int | None = None) -> list[str]:
        """Remove and return the arguments before the next flag, at most `max_values`."""
        values: list[str] = []
        while self.remaining and not _is_flag(self.remaining[0]) and (max_values is None or len(values) < max_values):
            values.append(self.remaining.popleft())
        return values

    def _next_is_known_flag(self) -> bool:
        """Return True if the next argument is a flag of an option or of Megatron-LM, or if there is none."""
        if not self.remaining:
            return True
        flag = self.remaining[0].partition("=")[0].replace("_", "-")
        return flag in ("--preset", "--config", "-h", "--help", *self.option_flags, *self.megatron_flags)

    def _parse_flag(self, arg: str) -> str:
        """Parse a flag with its values; return the option that it sets to a text, or ""."""
        head, equals, value = arg.partition("=")
        flag = head if head in self.megatron_flags else head.replace("_", "-")
        inline_values = [value] if equals else None
        if flag in ("--preset", "--config"):
            return self._parse_value(flag, flag[2:], "str", inline_values)
        if flag not in self.option_flags:
            self._parse_other_flag(flag, inline_values)
            return ""
        f, constant = self.option_flags[flag]
        if constant is not None:
            self._parse_switch(flag, f, constant, inline_values)
            return ""
        return self._parse_value(flag, f.name, type_name(f), inline_values, option_spec(f))

    def _parse_other_flag(self, flag: str, inline_values: list[str] | None) -> None:
        """Parse a flag that sets no option: it is Megatron-LM's or unknown."""
        known = self.megatron_flags.get(flag)
        is_unknown = known is None or known.verdict in (INSTEAD, OPTION)
        if inline_values is not None:
            values = inline_values
        else:
            values = self._take_values(None if is_unknown or known is None else known.values)
        if not is_unknown:
            self.parsed.megatron_flags.append((flag, values))
            return
        if known is not None:
            remedy = known.reason
        else:
            megatron_names = [name for name, other in self.megatron_flags.items() if other.verdict != INSTEAD]
            remedy = closest_match(flag, [*self.option_flags, *megatron_names])
        if not remedy:
            advice = "; see --help"
        elif known:
            advice = f"; {remedy}" if remedy.startswith("no flag") else f"; use {remedy}"
        else:
            advice = f"; did you mean {remedy}?"
        self.parsed.problems.append(f"unknown flag {flag}{advice}")
        self.parsed.misspelled |= _options_named_in(remedy or "")

    def _parse_switch(self, flag: str, f: Field[Any], constant: Any, inline_values: list[str] | None) -> None:
        """Parse a flag that sets its option to a constant, or with "false" undoes that."""
        values = inline_values or []
        if inline_values is None and self.remaining and self.remaining[0].lower() in _BOOLS:
            values = [self.remaining.popleft()]
        switch_value = _BOOLS.get(values[0].lower()) if values else True
        if switch_value is None:
            self.parsed.problems.append(f"{flag}={values[0]} is neither true nor false; give one, or no value")
            self.parsed.unreadable.add(f.name)
        elif switch_value:
            self.parsed.set_value(f.name, constant)
        else:
            self.parsed.set_value(f.name, not constant if type_name(f) == "bool" else f.default)

    def _parse_value(
        self, flag: str, name: str, kind: str, inline_values: list[str] | None, spec: OptionSpec | None = None
    ) -> str:
        """Parse a flag with a value or several; return `name` if it becomes a text, else ""."""
        is_list = kind in LIST_TYPES
        values = inline_values if inline_values is not None else self._take_values(None if is_list else 1)
        if not values and spec is not None and spec.may_look_like_flag and not self._next_is_known_flag():
            values = [self.remaining.popleft()]
        if spec is not None and spec.bare_value is not None:
            switch_value = _BOOLS.get(values[0].lower()) if values else True
            if switch_value is not None:
                values = [spec.bare_value if switch_value else "off"]
        if not values:
            example = "-1" if kind in _TYPES else "-TEXT"
            remedy = f"give it after the flag (one that starts with -: {flag}={example})"
            self.parsed.problems.append(f"{flag} needs a value; {remedy}")
            self.parsed.unreadable.add(name)
            return ""
        if spec is not None and spec.accumulates:
            self.parsed.values.setdefault(name, []).extend(values)
            return ""
        self.parsed.set_value(name, values if is_list else values[0])
        return name if kind == "str" else ""


def _options_named_in(text: str) -> set[str]:
    """Return the options whose flags the text names."""
    flags = set(re.findall(r"--[\w-]+", text))
    return {f.name for _, f in iter_options() if flags & {flag for flag, _ in flags_of(f)}}


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert texts of the command line to the types of their options.

    A text that does not convert stays a text; `convert_values` reports it.
    """
    fields = {f.name: f for _, f in iter_options()}
    typed = {}
    for name, value in values.items():
        number_type = _TYPES.get(type_name(fields[name]))
        try:
            if isinstance(value, list) and value[0][:1] == "[" and value[-1][-1:] == "]":  # a list in YAML's form
                value = [item for item in " ".join(value)[1:-1].replace(",", " ").split()]
            if isinstance(value, list) and number_type is not None:  # 4 5, or as Megatron-LM's tuples 4,5 or (4,5)
                value = [number_type(number) for item in value for number in item.strip("()").split(",")]
            elif isinstance(value, str) and number_type is not None:
                value = number_type(value)
        except ValueError:
            pass
        typed[name] = value
    return typed


@dataclass(frozen=True)
class ParsedConfig:
    """The configuration of a command line without errors."""

    config: Config
    notes: list[str]
    warnings: list[str]  # requested protections and logs that megalite does not have


def parse_config(
    argv: Sequence[str], presets: Presets, also: ExtraChecks | None = None, world: WorldSizeOf | None = None
) -> ParsedConfig:
    """Return the configuration of a command line.

    Args:
        also: a function of the configuration and the problems so far that returns more problems, for example with the
            machine.
        world: a function of the configuration that returns the number of ranks; None if it is not known.

    Raises:
        ConfigError: with the problems of all stages.
    """
    args = parse_args(argv)
    megatron_flags = classify_flags(args.megatron_flags)
    problems = [*args.problems, *megatron_flags.problems]
    values = args.values
    unreadable = args.unreadable
    args.misspelled.update(*map(_options_named_in, megatron_flags.problems))
    path = values.pop("config", None)
    file: dict[str, Any] = {}
    ignored: list[Problem] = []
    if path is not None:
        try:
            file = read_config_file(path)
        except ConfigError as error:
            problems += error.problems
            # the unreadable file may set what an empty command line lacks
            ignored = find_problems(Config())
    args.notes += _load_plugins(file, values, problems)
    preset = str(values.pop("preset", "") or file.get("preset", ""))
    file.pop("preset", None)
    if preset and preset not in presets:
        near = difflib.get_close_matches(preset, presets, 1, cutoff=0.8)
        remedy = f"did you mean {near[0]}? There are" if near else "use one of"
        problems.append(f"preset={preset!r} is unknown; {remedy} {', '.join(sorted(presets))}")
    if (preset and preset not in presets) or "preset" in unreadable:
        args.misspelled.update(*presets.values())  # options that the preset may set
    unreadable |= args.misspelled - {**file, **values}.keys()
    merged: dict[str, Any] = {}
    for source in (file, _typed(values)):  # a wrong type in the file is an error even where a flag wins over it
        typed, wrong = configs.convert_values(source)
        problems += wrong.values()
        unreadable |= set(wrong)
        merged = configs.override_options(merged, typed)
    config = configs.build(configs.apply_megatron_defaults(configs.apply_preset(presets.get(preset, {}), merged)))
    ranks = world(config) if world else None
    if ranks is not None and ranks <= 0:  # an invalid number is reported elsewhere
        ranks = None
    problems += [problem for problem in find_problems(config, ranks, unreadable=unreadable) if problem not in ignored]
    problems += also(config, problems) if also else []
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    if configs.effective_log_style(config, megatron_spelling=bool(args.megatron_flags)) == "megatron":
        config = replace(config, log=replace(config.log, log_style="megatron"))
    return ParsedConfig(
        config, [*args.notes, *megatron_flags.notes, *find_ineffective(config)], megatron_flags.warnings
    )


def _load_plugins(file: dict[str, Any], values: dict[str, Any], problems: list[str]) -> list[str]:
    """Load the plugins of the file and of the command line; return a note for each of the file's.

    Must be called before values are checked: they may be names that plugins register.

    Args:
        file: options of the --config file.
        values: options of the command line; "plugin" becomes the plugins of both.
        problems: the problems so far, which an error also reports.

    Raises:
        ConfigError: if a plugin fails.
    """
    from_file, _ = configs.convert_values({name: value for name, value in file.items() if name == "plugin"})
    specs = [*dict.fromkeys([*from_file.get("plugin", ()), *values.get("plugin", ())])]
    if specs:
        values["plugin"] = specs
    try:
        plugins.load_plugins(specs)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    return [f"plugin={spec!r} is run, because the configuration names it" for spec in from_file.get("plugin", ())]


def read(argv: Sequence[str], presets: Presets) -> tuple[Config, list[str]]:
    """Return (configuration, notes and warnings). Raises ConfigError with every problem."""
    parsed = parse_config(argv, presets)
    return parsed.config, [*parsed.notes, *(f"WARNING: {line}" for line in parsed.warnings)]


def parse_config_or_exit(
    argv: Sequence[str],
    presets: Presets,
    also: ExtraChecks | None = None,
    world: WorldSizeOf | None = None,
    quiet: bool = False,
) -> ParsedConfig:
    """Return the configuration of a program's command line, like `parse_config`, and print its notes.

    If --help is requested, print the page and raise `Finished`; if there are problems, print them and exit with 2.

    Args:
        quiet: print no notes.
    """
    try:
        topic = requested_help_topic(argv)
        if topic is not None:
            print(help_text(topic, sorted(presets)))
            raise Finished
        parsed = parse_config(argv, presets, also, world)
    except ConfigError as error:
        for problem in error.problems:
            print_err(f"pretrain_gpt.py: {problem}")
        raise SystemExit(2) from None
    if not quiet:
        for note in parsed.notes:
            print_err(f"note: {note}")
    return parsed  # the run prints the warnings, so that its log has them too


def requested_help_topic(argv: Sequence[str]) -> str | None:
    """Return the requested help page: "" (the first page), a group, "all" or unknown text; None without --help."""
    for i, arg in enumerate(argv):
        name, _, topic = arg.partition("=")
        if name in ("-h", "--help"):
            following = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("-") else ""
            return topic or following
    return None


def help_text(topic: str, presets: Sequence[str]) -> str:
    """Return a page of the help: "" for the first page, a group, or "all". Raises ConfigError for another topic."""
    if topic not in ("", "all", *SECTIONS):
        near = difflib.get_close_matches(topic, ("all", *SECTIONS), 1)
        meant = f"did you mean {near[0]}?" if near else f"give one of {', '.join(SECTIONS)}, all"
        raise ConfigError([f"--help {topic} is not a page of the help; {meant}"])
    form = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
    parser = argparse.ArgumentParser(usage="%(prog)s FLAGS", add_help=False, formatter_class=form)
    parser.description = "Pretrain a GPT over a tensor x pipeline x data parallel mesh. Megatron-LM's flags."
    parser.epilog = "A switch --x is also --no-x and --x=false. Many more of Megatron-LM's flags are accepted."
    if topic == "":
        _add_flags(parser.add_argument_group("most used"), HELP_PAGES["first"].split(), presets, short=True)
        parser.epilog = _epilog(parser.prog)
    for section in SECTIONS if topic == "all" else [topic] if topic else ():
        group = parser.add_argument_group(section, HELP_PAGES["groups"][section])
        names = [f.name for option_section, f in iter_options() if option_section == section]
        _add_flags(group, ["preset", "config", *names] if section == "model" else names, presets)
    return parser.format_help().rstrip()


def _epilog(prog: str) -> str:
    """Return the end of the first help page: examples, and the other pages."""
    if prog.startswith("megalite"):
        program = prog
    else:
        program = f"python {os.path.relpath(sys.argv[0]) if sys.argv[0] else prog}"
    counts = Counter(section for section, _ in iter_options())
    lines = ["examples:"]
    for purpose, flags in HELP_PAGES["examples"].items():
        wrapped = textwrap.wrap(f"{program} {flags}", 110, break_long_words=False, break_on_hyphens=False)
        lines += [f"  # {purpose}", "  " + " \\\n      ".join(wrapped)]
    groups = (f"  --help {name:<13} {about} ({counts[name]} options)" for name, about in HELP_PAGES["groups"].items())
    lines += ["", "more:", *groups]
    return "\n".join([*lines, f"  --help {'all':<13} every flag"])


def _add_flags(group: Any, names: Sequence[str], presets: Sequence[str], short: bool = False) -> None:
    """Add the flags of these options to an argparse group.

    Args:
        short: one entry per option, with all of its flags that take a value; otherwise one entry per flag.
    """
    fields = {f.name: f for _, f in iter_options()}
    for name in names:
        if name in HELP_PAGES["first of all"]:
            metavar, text = HELP_PAGES["first of all"][name]
            group.add_argument(f"--{name}", metavar=metavar, help=text.format(presets=", ".join(presets)))
            continue
        f = fields[name]
        kind = type_name(f)
        spec = option_spec(f)
        shown = "" if f.default is None or kind == "bool" or spec.required else f" (default {f.default})"
        value_flags = [flag for flag, constant in flags_of(f) if constant is None or not short]
        for flag, constant in flags_of(f)[: 1 if short else None]:
            negative = kind == "bool" and constant is not f.default
            if flag == flag_name(name):
                text = spec.help + shown
            elif constant is None:
                text = f"same as {flag_name(name)}"
            else:
                text = f"same as {flag_name(name)}={str(constant).lower() if kind == 'bool' else constant}"
            if constant is not None:
                if negative or flag == flag_name(name) or kind != "bool":  # not a flag that sets the default
                    group.add_argument(flag, action="store_true", help=text.replace("%", "%%"))
            else:
                metavar = "{" + ",".join(spec.choices) + "}" if [*spec.choices] and not short else kind.upper()
                nargs = None if spec.bare_value is None else "?"
                flags = value_flags if short else [flag]
                group.add_argument(*flags, metavar=metavar, nargs=nargs, help=text.replace("%", "%%"))
