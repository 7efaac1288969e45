"""The mentions of CUDA in the source, and which of them have run.

A mention is an expression in a function: `torch.cuda.NAME`, a comparison with "cuda", `.is_cuda`; and, for an `if` or a
conditional expression that tests one of these, the first statement or expression of its GPU branch. Annotations do not
count, because they do not run. Coverage is measured by byte code, which has columns: a line does not say which half of
`x if y else z` ran.
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
SOURCES = ("megalite", "tools", "examples", "pretrain_gpt.py")


@dataclass(frozen=True, order=True)
class Mention:
    file: str
    begin: tuple[int, int]  # line, column
    end: tuple[int, int]
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.begin[0]}: {self.text}"


def mentions(root: Path = ROOT) -> list[Mention]:
    result: set[Mention] = set()
    for source in SOURCES:
        paths = sorted((root / source).rglob("*.py")) if (root / source).is_dir() else [root / source]
        for path in paths:
            result.update(mentions_in(path.read_text(encoding="utf-8"), str(path.relative_to(root))))
    return sorted(result)


def mentions_in(text: str, file: str) -> Iterator[Mention]:
    tree = ast.parse(text)
    hints = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    skipped = {id(node) for hint in hints if hint is not None for node in ast.walk(hint)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    function_nodes = {id(node): node for function in functions for node in ast.walk(function)}
    for node in function_nodes.values():
        if _mentions_cuda(node) and id(node) not in skipped:
            yield _mention(file, node)
        if isinstance(node, ast.If | ast.IfExp) and (body_is_cpu := list(_cpu_branches(node.test, False))):
            arm = node.orelse if body_is_cpu[0] else node.body
            yield from (_mention(file, statement) for statement in (arm[:1] if isinstance(arm, list) else [arm]))


def _mention(file: str, node: Any) -> Mention:
    begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return Mention(file, begin, end, ast.unparse(node).partition("\n")[0])


def _mentions_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or ast.unparse(node.value) == "torch.cuda"
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Constant) and side.value == "cuda" for side in (node.left, *node.comparators))
    return False


def _cpu_branches(test: ast.expr, negated: bool) -> Iterator[bool]:
    """Yield, for each mention of CUDA in a test, whether the body of the branch is the one without a GPU."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _cpu_branches(test.operand, not negated)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _cpu_branches(value, negated)
    elif _mentions_cuda(test):
        yield negated ^ (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq))


class CoverageTracer:
    """A tracer of the instructions that run in functions with mentions, in all threads that start inside."""

    def __init__(self, places: list[Mention], root: Path = ROOT):
        self._lines: dict[str, set[int]] = {}
        for place in places:
            self._lines.setdefault(str(root / place.file), set()).update(range(place.begin[0], place.end[0] + 1))
        self.places, self._root = places, root
        self._is_watched: dict[CodeType, bool] = {}
        self._executed: set[tuple[CodeType, int]] = set()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
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
        if code not in self._is_watched:
            lines = {line for _, _, line in code.co_lines() if line}
            self._is_watched[code] = not lines.isdisjoint(self._lines.get(code.co_filename, ()))
        if not self._is_watched[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._executed.add((frame.f_code, frame.f_lasti))
        return self._instruction

    def visited(self) -> set[Mention]:
        positions = {code: list(code.co_positions()) for code, _ in self._executed}
        spans = {(code.co_filename, *positions[code][last // 2]) for code, last in self._executed}
        known = [span for span in spans if None not in span]
        return {
            place
            for place in self.places
            for file, line, end_line, column, end_column in known
            if file == str(self._root / place.file)
            and place.begin <= (line, column)  # type: ignore[operator]
            and (end_line, end_column) <= place.end  # type: ignore[operator]
        }
