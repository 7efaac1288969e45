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
from megalite.config.console import as_typed, complain
from megalite.config.exits import as_command
from megalite.config.options import ConfigError
from megalite.config.plugins import load
from megalite.config.tables import table_beside
from megalite.config.text_file import read_small_text


class Parser(exits.Parser):
    """Names programs in its errors as this one was started."""

    def error(self, message: str) -> NoReturn:
        super().error(as_typed(message))


def parser_of(
    doc: str | None, name: str | None = None, *, allow_abbrev: bool = False, flags: str = "", **known: dict[str, Any]
) -> argparse.ArgumentParser:
    """`doc`: of the module, which --help prints as it stands. `flags`, `known`: as of `take`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(name, description=doc, formatter_class=raw, allow_abbrev=allow_abbrev)
    if flags:
        take(parser, flags, **known)
    return parser


def take(parser: Any, table: str, **known: dict[str, Any]) -> None:
    """Add the flags of a table of flags.toml to a parser, or to a group of one. `known`: by flag, in snake case, what
    a table cannot hold (choices, a function, a default of this machine)."""
    own: dict[str, Any] = {"int": int, "float": float, "Path": Path, "local": local, "local_path": local_path}
    own |= {"positive": positive, "Plugins": Plugins, "SUPPRESS": argparse.SUPPRESS}
    for flag, told in table_beside(__file__, "flags")[table].items():
        row = told | {key: own.get(told[key], told[key]) for key in {"type", "action", "help"} & told.keys()}
        if "within" in row:
            row["type"] = number(row["type"], row.pop("within"))
        parser.add_argument(flag, **row, **known.pop(flag.lstrip("-").replace("-", "_"), {}))
    assert not known, f"{table} has no {', '.join(known)}"


class Plugins(argparse.Action):
    """Of --plugin in programs that read a run's files and not its options: loads what is named, again what was."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any):
        text = "FILE.py or module of your own that the run had; may be given again"
        super().__init__(option_strings, dest, **{"default": [], "help": text, **more})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])
        try:
            load(getattr(namespace, self.dest))
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
                    complain(f"{Path(inspect.getfile(inspect.unwrap(main))).name}: {problem}")
                return code

        return told

    return around


def refuse(text: str, code: int = 3) -> NoReturn:
    """End a program with one line. `code`: 3, as what it is to read cannot be used, or 2 for a wrong flag."""
    complain(text)
    raise SystemExit(code)


def run_program(main: Main) -> NoReturn:
    """The program, as it was started."""
    sys.exit(as_command(lambda: main(sys.argv[1:]) or 0))


MOST_DIGITS = 18


def positive(text: str) -> int:
    """A number of argparse that is 1 or more."""
    if len(text) > MOST_DIGITS or not text.isdecimal() or int(text) < 1:
        shown = text if len(text) <= MOST_DIGITS else f"{text[:MOST_DIGITS]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not a number above 0")
    return int(text)


def number(kind: Callable[[str], float], within: str) -> Callable[[str], float]:
    """A type of argparse: a number of this kind within a range, as "(0, 1]" or "[0, inf)"."""
    low, high = map(float, within[1:-1].split(","))

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high or (value == low and within[0] == "(") or (value == high and within[-1] == ")"):
            raise argparse.ArgumentTypeError(f"{text} is not in {within}")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


FORMATS = (".png", ".svg", ".pdf")


def local(text: str) -> str:
    """A path of argparse that is no URL, which would become a folder here; it may hold a secret, so it is not told."""
    if "://" in text:
        raise argparse.ArgumentTypeError("a URL, and this takes a local path only; give one")
    return text


def local_path(text: str) -> Path:
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
    from megalite.train.tell.run_dir import write_atomically

    write_atomically(path, json.dumps(content, indent=1))


def read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    return json.loads(read_small_text(path, "a JSON file that this program wrote")) if path.exists() else {}
