"""What the documents say: their commands, and the files, flags and names that they mention."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# made from the code, and compared with it elsewhere; decisions.md tells what was there once
GENERATED, HISTORY = {"flags.md", "megatron.md"}, {"decisions.md"}
DOCUMENTS = sorted(p for p in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """`words` of a command line, without what a shell does with its output; `place`: document and first words."""

    place: str
    words: tuple[str, ...]


def fences(path: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block."""
    yield from FENCE.findall(path.read_text(encoding="utf-8"))


def spans(path: Path) -> list[str]:
    """The texts between single backquotes, outside fenced blocks."""
    return SPAN.findall(FENCE.sub("", path.read_text(encoding="utf-8")))


def commands_of(text: str, place: str) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[: next((i for i, word in enumerate(words) if word in (">", "|", "&&")), len(words))]
        if words:
            yield Command(f"{place}: {' '.join(words)[:60]}", tuple(words))


def commands() -> list[Command]:
    """Of every bash block, the lines after a $ of other blocks, and whole commands between backquotes."""
    found: list[Command] = []
    for path in DOCUMENTS:
        if path.name in GENERATED:
            continue
        for language, text in fences(path):
            shell = language in ("bash", "sh")
            lines = text if shell else "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
            found += commands_of(lines, path.name)
        for span in spans(path):
            if re.match(r"(python|bash|torchrun) \S+\.(py|sh)\b", span) and path.name not in HISTORY:
                found += commands_of(span, path.name)
    return found


class Parsed(Exception):
    """A program's own parser has taken the words."""

    def __init__(self, parser: argparse.ArgumentParser, values: argparse.Namespace):
        super().__init__()
        self.parser, self.values = parser, values


def parsed_by(script: str, words: list[str], patch: pytest.MonkeyPatch) -> Parsed:
    """`script` of this repository is started with `words` and stopped where its parser has read them."""
    with stopped(patch) as here:
        try:
            start(script, words, here)
        except Parsed as parsed:
            return parsed
    raise AssertionError(f"{script} reads no flags")


@contextmanager
def stopped(patch: pytest.MonkeyPatch, read: bool = True) -> Iterator[pytest.MonkeyPatch]:
    """The first parser that is asked raises Parsed, after it has read its words, or without."""
    known, inner = argparse.ArgumentParser.parse_known_args, False

    def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None, *, all_of_it: bool = False) -> Any:
        nonlocal inner
        if inner:  # of a command, asked by the parser that is being read
            return known(self, args, namespace)
        inner = True
        values, rest = known(self, args, namespace) if read else (argparse.Namespace(), [])
        if rest and all_of_it:
            self.error(f"unrecognized arguments: {rest}")
        raise Parsed(self, values)

    with patch.context() as here:
        here.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        here.setattr(argparse.ArgumentParser, "parse_args", functools.partialmethod(stop, all_of_it=True))
        yield here


def start(script: str, words: list[str], patch: pytest.MonkeyPatch) -> int:
    """`python SCRIPT WORDS` in this process; its exit code."""
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    with patch.context() as here:
        here.setattr(sys, "argv", [script, *words])
        try:
            return int((main(words) if inspect.signature(main).parameters else main()) or 0)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """With those of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*(flags_of(one) for one in action.choices.values()))
    return found
