"""Where the source speaks of cards, and which of these places have run.

A place is an expression: `torch.cuda.NAME` (with what follows it), a comparison with "cuda", `.is_cuda`; and of an `if`
or a conditional expression that asks one of these, what is done on a card. Annotations are none: they do not run.
Found in the syntax tree; seen by the byte code that ran, whose columns Python keeps. So of
`x if device.type == "cuda" else y` it is known which of the two was computed, which the line alone would not tell.
What stands outside of functions runs with every import, and is no place.
"""

import ast
import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megalite", "tools", "examples", "pretrain_gpt.py")
Point = tuple[int, int]  # line, column in bytes


@dataclass(frozen=True, order=True)
class Mention:
    file: str
    begin: Point
    end: Point
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.begin[0]}: {self.text}"


def mentions(root: Path = ROOT) -> list[Mention]:
    found: set[Mention] = set()
    for folder in FOLDERS:
        paths = sorted((root / folder).rglob("*.py")) if (root / folder).is_dir() else [root / folder]
        for path in paths:
            text = path.read_text(encoding="utf-8")
            if "cuda" in text:
                found.update(of_text(text, str(path.relative_to(root))))
    return sorted(found)


def of_text(text: str, file: str) -> Iterator[Mention]:
    tree = ast.parse(text)
    skipped = {id(node) for hint in _hints(tree) for node in ast.walk(hint)}
    inside: dict[int, ast.AST] = {}
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and id(node) not in inside:
            inside |= {id(inner): inner for inner in ast.walk(node)}
    inner = {
        id(node.value) for node in inside.values() if isinstance(node, ast.Attribute)
    }  # a longer one is taken of it
    for node in inside.values():
        if id(node) in skipped:
            continue
        if _speaks(node) and id(node) not in inner:
            yield _mention(file, node, node)
        if isinstance(node, ast.If | ast.IfExp) and (on_card := _arm(node)) is not None:
            yield _mention(file, on_card[0], on_card[-1])


def _hints(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if (hint := getattr(node, name, None)) is not None:
                yield hint


def _speaks(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or _dotted(node).startswith("torch.cuda.")
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Constant) and side.value == "cuda" for side in (node.left, *node.comparators))
    return False


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _arm(node: ast.If | ast.IfExp) -> list[Any] | None:
    """What is done on a card; None where the question is no other's, or nothing is done."""
    asked = [(inner, turned) for inner, turned in _questions(node.test, False) if _speaks(inner)]
    if not asked:
        return None
    inner, turned = asked[0]
    turned ^= isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.NotEq)
    arm = node.orelse if turned else node.body
    return (arm if isinstance(arm, list) else [arm]) or None


def _questions(test: ast.expr, turned: bool) -> Iterator[tuple[ast.AST, bool]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _questions(test.operand, not turned)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _questions(value, turned)
    else:
        yield test, turned


def _mention(file: str, first: Any, last: Any) -> Mention:
    begin, end = (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)
    return Mention(file, begin, end, ast.unparse(first).partition("\n")[0])


class Watch:
    """Notes every instruction that runs in functions that hold a place, in all threads that begin inside."""

    def __init__(self, places: list[Mention], root: Path = ROOT):
        self.places = places
        self._files: dict[str, list[Mention]] = {}
        for place in places:
            self._files.setdefault(str(root / place.file), []).append(place)
        self._codes: dict[CodeType, bool] = {}
        self._ran: set[tuple[CodeType, int]] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        threading.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if self._codes.get(code) is None:
            lines = {line for _, _, line in code.co_lines() if line}
            held = self._files.get(code.co_filename, ())
            self._codes[code] = any(any(p.begin[0] <= n <= p.end[0] for n in lines) for p in held)
        if not self._codes[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._ran.add((frame.f_code, frame.f_lasti))
        return self._instruction

    def visited(self) -> set[Mention]:
        found: set[Mention] = set()
        positions = {code: list(code.co_positions()) for code, _ in self._ran}
        for code, last in self._ran:
            line, end_line, column, end_column = positions[code][last // 2]
            if line is None or end_line is None or column is None or end_column is None:
                continue
            for place in self._files[code.co_filename]:
                if place.begin <= (line, column) and (end_line, end_column) <= place.end:
                    found.add(place)
        return found
