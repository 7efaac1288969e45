"""Code that the programs of this folder share: the parser of flags, the exit code, and the check that the files they
are asked to write can be written, which comes before the work, so that an hour of it is not lost."""

import argparse
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalite.config import exits
from megalite.config.console import as_typed, print_err
from megalite.config.exits import run_cli
from megalite.config.options import ConfigError
from megalite.config.plugins import load_plugins
from megalite.config.text_file import read_small_text


class Parser(exits.Parser):
    """Names programs in its errors as this one was started."""

    def error(self, message: str) -> NoReturn:
        super().error(as_typed(message))


def parser_of(doc: str | None, name: str | None = None, *, allow_abbrev: bool = False) -> argparse.ArgumentParser:
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


class Plugins(argparse.Action):
    """The action of --plugin in programs that read a run's files but not its options.

    It appends the value to the list of plugins and loads all that were given so far.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any):
        text = "FILE.py or module of your own that the run used; may be given several times"
        super().__init__(option_strings, dest, **{"default": [], "help": text, **more})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])
        try:
            load_plugins(getattr(namespace, self.dest))
        except ConfigError as error:
            parser.error(str(error))


def plugins_first(argv: Sequence[str]) -> list[str]:
    """`argv` with its --plugin FILE before all else, which may have words that they make known."""
    after = ["", *argv]
    places = sorted(range(len(argv)), key=lambda i: "--plugin" not in (after[i], argv[i].partition("=")[0]))
    return [argv[i] for i in places]


Main = Callable[[list[str]], int | None]


def refusing(code: int, *kinds: type[Exception]) -> Callable[[Main], Main]:
    """For a program's main: an error of these kinds is told, each of its problems in a line, and gives `code`."""

    def around(main: Main) -> Main:
        @functools.wraps(main)
        def told(argv: list[str]) -> int | None:
            try:
                return main(argv)
            except kinds as error:
                for problem in getattr(error, "problems", [error]):
                    print_err(f"{Path(inspect.getfile(inspect.unwrap(main))).name}: {problem}")
                return code

        return told

    return around


def refuse(text: str, code: int = 3) -> NoReturn:
    """End a program with one line. `code`: 3, as what it is to read cannot be used, or 2 for a wrong flag."""
    print_err(text)
    raise SystemExit(code)


def run_program(main: Main) -> NoReturn:
    """The program, as it was started."""
    sys.exit(run_cli(lambda: main(sys.argv[1:]) or 0))


MOST_DIGITS = 18


def positive(text: str) -> int:
    """Return an integer of 1 or more, as a type of argparse."""
    if len(text) > MOST_DIGITS or not text.isdecimal() or int(text) < 1:
        shown = text if len(text) <= MOST_DIGITS else f"{text[:MOST_DIGITS]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not a number above 0")
    return int(text)


def number(kind: Callable[[str], float], within: str) -> Callable[[str], float]:
    """Return a type of argparse for numbers of `kind` in the interval `within`, written "(0, 1]" or "[0, inf)"."""
    low, high = map(float, within[1:-1].split(","))

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high or (value == low and within[0] == "(") or (value == high and within[-1] == ")"):
            raise argparse.ArgumentTypeError(f"{text} is not in {within}")
        return value

    read.__name__ = kind.__name__  # argparse prints this name when the text is not a number
    return read


FORMATS = (".png", ".svg", ".pdf")


def local(text: str) -> str:
    """Return a local path, as a type of argparse. A URL would become a directory here, so it is refused.

    The message leaves the URL out, which may contain a secret.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError("a URL, and this takes a local path only; give one")
    return text


def local_path(text: str) -> Path:
    """Return a local path, as `local` does, as a Path."""
    return Path(local(text))


def unwritable(*, pictures: tuple[str, ...] = (), **paths: Path | None) -> Iterator[str]:
    """Why these paths cannot be written: `name=value breaks rule; remedy`. The suffix of `pictures` is their format."""
    for name, path in paths.items():
        if path is None:
            continue
        folder = path.parent
        if not folder.is_dir():
            yield f"{name}={path} cannot be written: {folder} is not a folder; make it"
        elif path.is_dir():
            yield f"{name}={path} is a folder; give the name of a file"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            yield f"{name}={path} cannot be written: no permission; give another path"
        elif name in pictures and path.suffix.lower() not in FORMATS:
            yield f"{name}={path} has no suffix of a picture; end it in one of {' '.join(FORMATS)}"


def write_json(path: Path, content: Any) -> None:
    """A reader, and whoever comes after a kill, finds the last whole text."""
    from megalite.training.logging.run_dir import write_atomically

    write_atomically(path, json.dumps(content, indent=1))


def read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    return json.loads(read_small_text(path, "a JSON file that this program wrote")) if path.exists() else {}
