"""What the documents say: their commands, and the files, flags and names that they mention."""

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
EXAMPLES = {"style.md"}  # shows names that the code need not have
PLACEHOLDERS = {"run.toml", "FILE.toml", "FILE.py", "train_config.toml"}  # of the reader
PLACEHOLDERS |= {"report.md", "run_config.toml"}  # what a program writes
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STARTS = re.compile(r"([A-Z]+=\S+ )*(python|bash|torchrun|srun|sbatch|kubectl|sky) [^`]*\.(py|sh|yaml)\b")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def documents_of(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


DOCUMENTS = documents_of(ROOT)


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
        while words and re.match(r"[A-Z_]+=", words[0]):  # set for this command
            words.pop(0)
        if words:
            yield Command(f"{place}: {' '.join(words)[:60]}", tuple(words))


def commands() -> list[Command]:
    """Of every bash block, the lines after a $ of other blocks, and whole commands between backquotes."""
    found: list[Command] = []
    for path in DOCUMENTS:
        for language, text in fences(path):
            shell = language in ("bash", "sh")
            lines = text if shell else "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
            found += commands_of(lines, path.name)
        for span in spans(path):
            if STARTS.match(span):
                found += commands_of(span, path.name)
    return found


def installed_commands() -> list[str]:
    """Between backquotes: `megalite COMMAND ...`."""
    found = {span for path in named(ROOT) for span in spans(path) if re.match(r"megalite [a-z]", span)}
    return sorted(span for span in found if not re.search(r"\.\.\.|completion", span))


def is_script(name: str) -> bool:
    """Whether the file exists and, of a shell's, bash can read it."""
    path = ROOT / name
    return path.is_file() and (path.suffix != ".sh" or subprocess.run(["bash", "-n", path], timeout=30).returncode == 0)


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


COLUMNS = 120
WHOLE_LINK = re.compile(r"\s*([-*]\s+)?!?(\[[^]]*\]\([^)]*\)|<?https?://\S+>?)\.?")


def long_lines(root: Path) -> Iterator[str]:
    """Prose wider than 120 columns; tables, fenced blocks and a link alone on its line may be wider."""
    for path in documents_of(root):
        text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            free = line.lstrip().startswith("|") or WHOLE_LINK.fullmatch(line)
            if len(line) > COLUMNS and not free:
                yield f"{path.relative_to(root)}:{number}: {len(line)} columns of prose; at most {COLUMNS}"


# ---- what the documents name; each function yields a line per name that leads nowhere


def named(root: Path) -> Iterator[Path]:
    """The documents that say what is so today, written by hand."""
    yield from (path for path in documents_of(root) if path.name not in EXAMPLES)


def found_at(root: Path, name: str) -> Path | None:
    """The file that a document means by `name`: from the root, or within one of the folders that documents are about."""
    places = (root / folder / name for folder in (".", "megalite", "docs", "examples", "examples/launch", "tools"))
    return next((place for place in places if place.exists()), None)


def lost_files(root: Path) -> Iterator[str]:
    """Links, and files between backquotes, that do not exist."""
    for path in named(root):
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")) if "://" not in link]
        wrong = [link for link in links if not (path.parent / link).exists()]
        yield from (f"{path.name}: links to {link}, which does not exist" for link in wrong)
        words = {word for span in spans(path) for word in re.findall(r"[\w./-]+\.(?:py|sh|toml|md)\b", span)}
        lost = [name for name in sorted(words - PLACEHOLDERS) if found_at(root, name) is None]
        yield from (f"{path.name}: names {name}, which does not exist" for name in lost)


def lost_names(root: Path) -> Iterator[str]:
    """Words with an underscore or a capital in their middle, between backquotes, that are nowhere in the code."""
    sources = [*root.glob("*.py"), root / "pyproject.toml"]
    sources += [p for folder in ("megalite", "tools", "tests", "examples") for p in (root / folder).rglob("*.py")]
    sources += [*(root / "examples").rglob("*.yaml"), *(root / "megalite").rglob("*.toml")]
    texts = [p.read_text(encoding="utf-8") for p in sources if p.is_file() and p.name not in ("test_documents.py",)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    for path in named(root):
        plain = [s for s in spans(path) if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", s)]
        names = {part for s in plain for part in s.partition("(")[0].split(".")}
        names = {n for n in names if re.search(r"[a-z]_[a-z]|[a-z][A-Z]|^[A-Z][a-z]+[A-Z]", n)}
        yield from (f"{path.name}: names {name}, which is nowhere in the code" for name in sorted(names - words))


@dataclass(frozen=True)
class Place:
    """`file: name` in a document; `caller`: the place one indent to the left in a picture of calls."""

    file: str
    name: str
    caller: "Place | None" = None


PLACE = re.compile(r"([\w/]+\.py): ([A-Za-z_][\w.]*)")


def chains(text: str) -> list[list[Place]]:
    """The pictures of calls in a document: the fenced blocks whose lines are `file: name`, indented under their caller."""
    pictures = []
    for _, block in FENCE.findall(text):
        places, open_calls = [], list[tuple[int, Place]]()
        for line in block.splitlines():
            if match := PLACE.match(line.lstrip()):
                indent = len(line) - len(line.lstrip())
                open_calls = [call for call in open_calls if call[0] < indent]
                places.append(Place(*match.groups(), caller=open_calls[-1][1] if open_calls else None))
                open_calls.append((indent, places[-1]))
        if places:
            pictures.append(places)
    return pictures


def source_of(root: Path, place: Place) -> str | None:
    """The text of a class, a function, a method, an attribute or a constant; None where the file does not hold it."""
    path = found_at(root, place.file)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in place.name.split("."):
        inner = [n for n in getattr(node, "body", []) if name in _defines(n)]
        if not inner and isinstance(node, ast.ClassDef):  # set where it is made: self.NAME = ...
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Assign) and f"self.{name}" in _targets(n)]
        if not inner:
            return None
        node = inner[0]
    return ast.get_source_segment(text, node)


def _targets(node: ast.Assign) -> set[str]:
    parts = [part for target in node.targets for part in ast.walk(target)]
    return {ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)}


def _defines(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    named = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set[str]()
    return named | {target.id for target in targets if isinstance(target, ast.Name)}


def lost_places(root: Path) -> Iterator[str]:
    """`file.py: name` where the file lacks the name, and calls in a picture that the caller's code does not hold."""
    for path in named(root):
        text = path.read_text(encoding="utf-8")
        spanned = [Place(*match.groups()) for span in spans(path) for match in PLACE.finditer(span)]
        for place in [*spanned, *(place for picture in chains(text) for place in picture)]:
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
    """The attributes of the caller's class that its code sets to a `cls`: a module is called by its attribute's name."""
    source = source_of(root, Place(caller.file, caller.name.partition(".")[0])) or ""
    return [
        target.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and re.search(rf"\b{cls}\(", ast.unparse(node.value))
        for target in node.targets
        if isinstance(target, ast.Attribute)
    ]


def copy_parts(names: Iterable[str], folder: Path) -> Path:
    """These files and folders of the repository in `folder`, where they can be built, or broken."""
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    return folder
