"""Code that the programs of this directory share: parsers, types of flags, exit codes, and JSON files.

`find_unwritable` checks output paths before the work starts, so that a wrong path does not lose an hour of it.
"""

import argparse
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalite.common import exits
from megalite.common.console import as_typed, print_err
from megalite.common.exits import run_cli
from megalite.common.text_file import read_small_text
from megalite.config.options import ConfigError
from megalite.config.plugins import load_plugins


class Parser(exits.Parser):
    """A parser whose errors name programs in the way this one was started."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 after printing the usage and the message."""
        super().error(as_typed(message))


def make_parser(doc: str | None, name: str | None = None, *, allow_abbrev: bool = False) -> argparse.ArgumentParser:
    """Return an empty parser for a program.

    Args:
        doc: the docstring of the program's module, which --help prints unchanged.
        name: the program's name in the usage line; by default the name of its file.
        allow_abbrev: accept unambiguous prefixes of long flags.
    """
    raw = argparse.RawDescriptionHelpFormatter
    return Parser(name, description=doc, formatter_class=raw, allow_abbrev=allow_abbrev)


def add_max_bad_fraction(parser: argparse.ArgumentParser) -> None:
    """Add --max-bad-fraction, a flag of the programs that read text line by line."""
    parser.add_argument(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="largest fraction of bad lines, which are skipped; default 0: the first bad line ends the run",
    )


class PluginAction(argparse.Action):
    """The action of --plugin in programs that read a run's files but not its options.

    It appends the value to the list of plugins and loads all that were given so far.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        options.setdefault("default", [])
        options.setdefault("help", "FILE.py or module of your own that the run used; may be given several times")
        super().__init__(option_strings, dest, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Load the plugins, or exit with the parser's error."""
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])
        try:
            load_plugins(getattr(namespace, self.dest))
        except ConfigError as error:
            parser.error(str(error))


def move_plugins_first(argv: Sequence[str]) -> list[str]:
    """Return `argv` with every --plugin FILE at its start, since other flags may take names that plugins register."""
    plugins = []
    others = []
    for i, arg in enumerate(argv):
        is_plugin_value = i > 0 and argv[i - 1] == "--plugin"
        if is_plugin_value or arg.partition("=")[0] == "--plugin":
            plugins.append(arg)
        else:
            others.append(arg)
    return plugins + others


Main = Callable[[list[str]], int | None]


def exits_with(code: int, *error_types: type[Exception]) -> Callable[[Main], Main]:
    """Decorate a program's main: print errors of these types, one line per problem, and return `code`."""

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def wrapper(argv: list[str]) -> int | None:
            try:
                return main(argv)
            except error_types as error:
                for problem in getattr(error, "problems", [error]):
                    print_err(f"{Path(inspect.getfile(inspect.unwrap(main))).name}: {problem}")
                return code

        return wrapper

    return decorate


def exit_with_error(text: str, code: int = 3) -> NoReturn:
    """Print one line on stderr and exit.

    Args:
        code: 3 if the program's input cannot be used, 2 for a wrong flag.
    """
    print_err(text)
    raise SystemExit(code)


def run_program(main: Main) -> NoReturn:
    """Run `main` with the arguments of this process, and exit with its code."""
    sys.exit(run_cli(lambda: main(sys.argv[1:]) or 0))


MAX_DIGITS = 18


def positive_int(text: str) -> int:
    """Return an integer of 1 or more, as a type of argparse."""
    if len(text) > MAX_DIGITS or not text.isdecimal() or int(text) < 1:
        shown = text if len(text) <= MAX_DIGITS else f"{text[:MAX_DIGITS]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not a number above 0")
    return int(text)


def number_in_range(number_type: Callable[[str], float], interval: str) -> Callable[[str], float]:
    """Return a type of argparse for numbers in an interval.

    Args:
        number_type: int or float.
        interval: "(0, 1]" or "[0, inf)"; a parenthesis excludes the bound.
    """
    low, high = map(float, interval[1:-1].split(","))

    def parse(text: str) -> float:
        value = number_type(text)
        too_low = value <= low if interval[0] == "(" else value < low
        too_high = value >= high if interval[-1] == ")" else value > high
        if too_low or too_high or math.isnan(value):
            raise argparse.ArgumentTypeError(f"{text} is not in {interval}")
        return value

    parse.__name__ = number_type.__name__  # argparse prints this name when the text is not a number
    return parse


IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


def local_path_str(text: str) -> str:
    """Return a local path, as a type of argparse. A URL would become a directory here, so it is refused.

    The message leaves the URL out, which may contain a secret.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError("a URL, and this takes a local path only; give one")
    return text


def local_path(text: str) -> Path:
    """Return a local path, as `local_path_str` does, as a Path."""
    return Path(local_path_str(text))


def find_unwritable(*, images: tuple[str, ...] = (), **paths: Path | None) -> Iterator[str]:
    """Yield a message for each path that cannot be written.

    Args:
        images: names of paths whose suffix has to be the format of an image.
        paths: the paths by their names in messages; None is skipped.
    """
    for name, path in paths.items():
        if path is None:
            continue
        directory = path.parent
        if not directory.is_dir():
            yield f"{name}={path} cannot be written: {directory} is not a directory; make it"
        elif path.is_dir():
            yield f"{name}={path} is a directory; give the name of a file"
        elif not os.access(path if path.exists() else directory, os.W_OK):
            yield f"{name}={path} cannot be written: no permission; give another path"
        elif name in images and path.suffix.lower() not in IMAGE_SUFFIXES:
            yield f"{name}={path} has no suffix of an image; end it in one of {' '.join(IMAGE_SUFFIXES)}"


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically: a reader, or a process that starts after a kill, finds a complete file."""
    from megalite.common.safe_open import write_atomically

    write_atomically(path, json.dumps(content, indent=1))


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that `write_json` wrote, or {} if it does not exist."""
    return json.loads(read_small_text(path, "a JSON file that this program wrote")) if path.exists() else {}
