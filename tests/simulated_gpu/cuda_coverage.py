"""Where the source speaks of cards, and which of these places have run.

A place is an expression within a function: `torch.cuda.NAME`, a comparison with "cuda", `.is_cuda`; and of an `if` or a
conditional expression that asks one of these the first of what is done on a card. Annotations are none: they do not
run. Seen is the byte code that ran, whose columns Python keeps: a line would not tell which half of `x if y else z`.
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


@dataclass(frozen=True, order=True)
class Mention:
    file: str
    begin: tuple[int, int]  # line, column
    end: tuple[int, int]
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.begin[0]}: {self.text}"


def mentions(root: Path = ROOT) -> list[Mention]:
    found: set[Mention] = set()
    for folder in FOLDERS:
        paths = sorted((root / folder).rglob("*.py")) if (root / folder).is_dir() else [root / folder]
        for path in paths:
            found.update(of_text(path.read_text(encoding="utf-8"), str(path.relative_to(root))))
    return sorted(found)


def of_text(text: str, file: str) -> Iterator[Mention]:
    tree = ast.parse(text)
    hints = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    skipped = {id(node) for hint in hints if hint is not None for node in ast.walk(hint)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    inside = {id(node): node for function in functions for node in ast.walk(function)}
    for node in inside.values():
        if _speaks(node) and id(node) not in skipped:
            yield _mention(file, node)
        if isinstance(node, ast.If | ast.IfExp) and (asked := list(_questions(node.test, False))):
            arm = node.orelse if asked[0] else node.body
            yield from (_mention(file, first) for first in (arm[:1] if isinstance(arm, list) else [arm]))


def _mention(file: str, node: Any) -> Mention:
    begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return Mention(file, begin, end, ast.unparse(node).partition("\n")[0])


def _speaks(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or ast.unparse(node.value) == "torch.cuda"
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Constant) and side.value == "cuda" for side in (node.left, *node.comparators))
    return False


def _questions(test: ast.expr, turned: bool) -> Iterator[bool]:
    """Of each that a test asks about cards: whether its body is what is done without one."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _questions(test.operand, not turned)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _questions(value, turned)
    elif _speaks(test):
        yield turned ^ (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq))


class Watch:
    """Notes every instruction that runs in the functions of places, in all threads that begin inside."""

    def __init__(self, places: list[Mention], root: Path = ROOT):
        self._lines: dict[str, set[int]] = {}
        for place in places:
            self._lines.setdefault(str(root / place.file), set()).update(range(place.begin[0], place.end[0] + 1))
        self.places, self._root = places, root
        self._held: dict[CodeType, bool] = {}
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
        if code not in self._held:
            lines = {line for _, _, line in code.co_lines() if line}
            self._held[code] = not lines.isdisjoint(self._lines.get(code.co_filename, ()))
        if not self._held[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._ran.add((frame.f_code, frame.f_lasti))
        return self._instruction

    def visited(self) -> set[Mention]:
        positions = {code: list(code.co_positions()) for code, _ in self._ran}
        spans = {(code.co_filename, *positions[code][last // 2]) for code, last in self._ran}
        known = [span for span in spans if None not in span]
        return {
            place
            for place in self.places
            for file, line, end_line, column, end_column in known
            if file == str(self._root / place.file)
            and place.begin <= (line, column)  # type: ignore[operator]
            and (end_line, end_column) <= place.end  # type: ignore[operator]
        }
