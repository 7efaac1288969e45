"""The contents of the documents: their commands, and the files, flags and names that they mention."""

import argparse
import ast
import functools
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNCHECKED_DOCUMENTS = {"style.md"}  # its examples are names that the code need not have
PLACEHOLDERS = {"run.toml", "FILE.toml", "FILE.py", "train_config.toml"}  # files of the reader
PLACEHOLDERS |= {"report.md", "run_config.toml"}  # files that a program writes
FENCED_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND_START = re.compile(r"([A-Z]+=\S+ )*(python|bash|torchrun|srun|sbatch|kubectl|sky) [^`]*\.(py|sh|yaml)\b")
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def documents_of(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


DOCUMENTS = documents_of(ROOT)


@dataclass(frozen=True)
class Command:
    """A command of a document.

    Attributes:
        location: the document and the beginning of the command.
        argv: the command's arguments, without redirections, pipes and variables that a shell interprets.
    """

    location: str
    argv: tuple[str, ...]


def fenced_blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of each fenced block."""
    yield from FENCED_BLOCK.findall(path.read_text(encoding="utf-8"))


def code_spans(path: Path) -> list[str]:
    """Return the texts between single backquotes, outside of fenced blocks."""
    return CODE_SPAN.findall(FENCED_BLOCK.sub("", path.read_text(encoding="utf-8")))


def commands_of(text: str, location: str) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        argv = shlex.split(line, comments=True)
        argv = argv[: next((i for i, arg in enumerate(argv) if arg in (">", "|", "&&")), len(argv))]
        while argv and re.match(r"[A-Z_]+=", argv[0]):  # a variable of this command
            argv.pop(0)
        if argv:
            yield Command(f"{location}: {' '.join(argv)[:60]}", tuple(argv))


def all_commands() -> list[Command]:
    """Return the commands of all documents.

    They are the lines of bash blocks, the lines after a $ in other blocks, and complete commands between backquotes.
    """
    result: list[Command] = []
    for path in DOCUMENTS:
        for language, text in fenced_blocks(path):
            is_shell = language in ("bash", "sh")
            lines = text if is_shell else "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
            result += commands_of(lines, path.name)
        for span in code_spans(path):
            if COMMAND_START.match(span):
                result += commands_of(span, path.name)
    return result


def megalite_commands() -> list[str]:
    """Return the texts between backquotes that start with `megalite COMMAND`."""
    mentions = {
        span for path in checked_documents(ROOT) for span in code_spans(path) if re.match(r"megalite [a-z]", span)
    }
    return sorted(span for span in mentions if not re.search(r"\.\.\.|completion", span))


def is_script(name: str) -> bool:
    """Return True if the file exists and, if it is a shell script, bash can parse it."""
    path = ROOT / name
    return path.is_file() and (path.suffix != ".sh" or subprocess.run(["bash", "-n", path], timeout=30).returncode == 0)


class ParserStopped(Exception):
    """A program's own parser has accepted its arguments.

    The exception stops the program at this point, and carries the parser and the values.
    """

    def __init__(self, parser: argparse.ArgumentParser, values: argparse.Namespace):
        super().__init__()
        self.parser, self.values = parser, values


def stop_in_parser(script: str, args: list[str], patch: pytest.MonkeyPatch) -> ParserStopped:
    """Run a script of this repository until its parser has read `args`, and return the parser and the values."""
    with parsers_stopped(patch) as inner_patch:
        try:
            run_script(script, args, inner_patch)
        except ParserStopped as stop:
            return stop
    raise AssertionError(f"{script} reads no flags")


@contextmanager
def parsers_stopped(patch: pytest.MonkeyPatch, parse: bool = True) -> Iterator[pytest.MonkeyPatch]:
    """Make the first parser that a program calls raise ParserStopped, after it has parsed the arguments if `parse`."""
    parse_known_args, is_nested = argparse.ArgumentParser.parse_known_args, False

    def stop(
        self: argparse.ArgumentParser, args: Any = None, namespace: Any = None, *, reject_unknown: bool = False
    ) -> Any:
        nonlocal is_nested
        if is_nested:  # the parser of a command, which its main parser calls
            return parse_known_args(self, args, namespace)
        is_nested = True
        values, unknown = parse_known_args(self, args, namespace) if parse else (argparse.Namespace(), [])
        if unknown and reject_unknown:
            self.error(f"unrecognized arguments: {unknown}")
        raise ParserStopped(self, values)

    with patch.context() as inner_patch:
        inner_patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        inner_patch.setattr(argparse.ArgumentParser, "parse_args", functools.partialmethod(stop, reject_unknown=True))
        yield inner_patch


def run_script(script: str, args: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run `python SCRIPT ARGS` in this process, and return its exit code."""
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    with patch.context() as inner_patch:
        inner_patch.setattr(sys, "argv", [script, *args])
        try:
            return int((main(args) if inspect.signature(main).parameters else main()) or 0)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a parser and of its commands."""
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags |= set().union(*(flags_of(command_parser) for command_parser in action.choices.values()))
    return flags


COLUMNS = 120
LINK_LINE = re.compile(r"\s*([-*]\s+)?!?(\[[^]]*\]\([^)]*\)|<?https?://\S+>?)\.?")


def long_lines(root: Path) -> Iterator[str]:
    """Yield lines of prose wider than 120 columns. Tables, fenced blocks and a link alone on its line may be wider."""
    for path in documents_of(root):
        text = FENCED_BLOCK.sub(lambda fence: "\n" * fence[0].count("\n"), path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            may_be_wider = line.lstrip().startswith("|") or LINK_LINE.fullmatch(line)
            if len(line) > COLUMNS and not may_be_wider:
                yield f"{path.relative_to(root)}:{number}: {len(line)} columns of prose; at most {COLUMNS}"


# ---- names in the documents: each rule yields a line per name of something that does not exist


def checked_documents(root: Path) -> Iterator[Path]:
    """Yield the documents whose names must exist."""
    yield from (path for path in documents_of(root) if path.name not in UNCHECKED_DOCUMENTS)


def find_file(root: Path, name: str) -> Path | None:
    """Return the file that a document calls `name`: from the root, or from a directory that the documents often name."""
    candidates = (
        root / directory / name for directory in (".", "megalite", "docs", "examples", "examples/launch", "tools")
    )
    return next((path for path in candidates if path.exists()), None)


def missing_files(root: Path) -> Iterator[str]:
    """Yield links, and files between backquotes, that do not exist."""
    for path in checked_documents(root):
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")) if "://" not in link]
        broken = [link for link in links if not (path.parent / link).exists()]
        yield from (f"{path.name}: links to {link}, which does not exist" for link in broken)
        files = {file for span in code_spans(path) for file in re.findall(r"[\w./-]+\.(?:py|sh|toml|md)\b", span)}
        missing = [name for name in sorted(files - PLACEHOLDERS) if find_file(root, name) is None]
        yield from (f"{path.name}: names {name}, which does not exist" for name in missing)


def undefined_names(root: Path) -> Iterator[str]:
    """Yield names between backquotes, with an underscore or a capital in their middle, that the code does not contain."""
    sources = [*root.glob("*.py"), root / "pyproject.toml"]
    sources += [p for directory in ("megalite", "tools", "tests", "examples") for p in (root / directory).rglob("*.py")]
    sources += [*(root / "examples").rglob("*.yaml")]
    sources += [p for directory in ("megalite", "tools") for p in (root / directory).rglob("*.toml")]
    texts = [p.read_text(encoding="utf-8") for p in sources if p.is_file() and p.name not in ("test_documents.py",)]
    identifiers = {identifier for text in texts for identifier in re.findall(r"\w+", text)}
    for path in checked_documents(root):
        expressions = [s for s in code_spans(path) if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", s)]
        names = {part for s in expressions for part in s.partition("(")[0].split(".")}
        names = {n for n in names if re.search(r"[a-z]_[a-z]|[a-z][A-Z]|^[A-Z][a-z]+[A-Z]", n)}
        yield from (f"{path.name}: names {name}, which is nowhere in the code" for name in sorted(names - identifiers))


@dataclass(frozen=True)
class Place:
    """A `file: name` in a document.

    Attributes:
        caller: the place that this one is indented under, in a call tree.
    """

    file: str
    name: str
    caller: "Place | None" = None


PLACE = re.compile(r"([\w/]+\.py): ([A-Za-z_][\w.]*)")


def call_trees(text: str) -> list[list[Place]]:
    """Return the call trees of a document: fenced blocks whose lines are `file: name`, indented under their caller."""
    trees = []
    for _, block in FENCED_BLOCK.findall(text):
        places, open_calls = [], list[tuple[int, Place]]()
        for line in block.splitlines():
            if match := PLACE.match(line.lstrip()):
                indent = len(line) - len(line.lstrip())
                open_calls = [call for call in open_calls if call[0] < indent]
                places.append(Place(*match.groups(), caller=open_calls[-1][1] if open_calls else None))
                open_calls.append((indent, places[-1]))
        if places:
            trees.append(places)
    return trees


def source_of(root: Path, place: Place) -> str | None:
    """Return the source of a class, function, method, attribute or constant, or None if the file does not define it."""
    path = find_file(root, place.file)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in place.name.split("."):
        inner = [n for n in getattr(node, "body", []) if name in _defined_names(n)]
        if not inner and isinstance(node, ast.ClassDef):  # an attribute that a method sets: self.NAME = ...
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Assign) and f"self.{name}" in _attribute_targets(n)]
        if not inner:
            return None
        node = inner[0]
    return ast.get_source_segment(text, node)


def _attribute_targets(node: ast.Assign) -> set[str]:
    parts = [part for target in node.targets for part in ast.walk(target)]
    return {ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)}


def _defined_names(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set[str]()
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def undefined_places(root: Path) -> Iterator[str]:
    """Yield `file.py: name` without such a name in the file, and calls in a tree that the caller's code does not contain."""
    for path in checked_documents(root):
        text = path.read_text(encoding="utf-8")
        inline = [Place(*match.groups()) for span in code_spans(path) for match in PLACE.finditer(span)]
        for place in [*inline, *(place for tree in call_trees(text) for place in tree)]:
            if source_of(root, place) is None:
                yield f"{path.name}: {place.file} does not hold {place.name}"
            elif place.caller is not None:
                owner, _, called = place.name.rpartition(".")
                called = owner if called == "forward" else called
                caller = source_of(root, place.caller)
                names = "|".join([called, *_attributes_of(root, place.caller, called)])
                if caller is not None and not re.search(rf"\b({names})\b", caller, re.IGNORECASE):
                    yield f"{path.name}: {place.caller.name} in {place.caller.file} does not mention {called}"


def _attributes_of(root: Path, caller: Place, cls: str) -> list[str]:
    """Return the attributes of the caller's class that its code sets to a `cls`.

    A module is called by the name of such an attribute.
    """
    source = source_of(root, Place(caller.file, caller.name.partition(".")[0])) or ""
    return [
        target.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and re.search(rf"\b{cls}\(", ast.unparse(node.value))
        for target in node.targets
        if isinstance(target, ast.Attribute)
    ]


def copy_paths(names: Iterable[str], directory: Path) -> Path:
    """Copy these files and directories of the repository to `directory`, where a test may build or change them."""
    for name in names:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    return directory
