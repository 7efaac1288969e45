"""What keeps the house in order, measured from the source: `python tests/taste.py` prints every place that breaks a rule.

Nothing is imported: the files are read as text and syntax trees, which takes a second. tests/test_taste.py runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megalite"

FUNCTION_LINES, FILE_LINES, PARAMETERS = 60, 400, 8
OPTIONS = 330  # fields of the option sections: a new one displaces an old one, or this line says why not
READERS = {"megalite/config/environment.py", "megalite/parallel/launch.py"}  # of os.environ
KERNEL_PAIRS = ({"kernels", "nn"}, {"kernels", "optim"})  # kernels/x.py computes what the layer or optimizer x.py does
FLOORS = (
    ("generate",),
    ("train",),
    ("interop",),
    ("pipeline", "optim", "data", "checkpoint"),
    ("models",),
    ("nn",),
    ("parallel", "kernels"),
    ("config",),
)


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """(path from the root, syntax tree) of every Python file below `folders`."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")) if (ROOT / folder).is_dir() else [ROOT / folder]:
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def long_functions() -> Iterator[str]:
    for path, tree in sources("megalite", "tools", "pretrain_gpt.py"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines; at most {FUNCTION_LINES}"


def long_files() -> Iterator[str]:
    for path, _ in sources("megalite", "tools", "pretrain_gpt.py"):
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES:
            yield f"{path}: {lines} lines; at most {FILE_LINES}"


def many_parameters() -> Iterator[str]:
    """But of an autograd function (ctx): `apply` takes positions alone, and gives each one a gradient."""
    for path, tree in sources("megalite", "tools", "pretrain_gpt.py"):
        if path.startswith(("megalite/kernels/", "tools/bench/kernel")):
            continue  # a Triton kernel takes its pointers and strides one by one
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                names = [
                    a.arg
                    for a in given.posonlyargs + given.args + given.kwonlyargs
                    if a.arg not in ("self", "cls", "ctx")
                ]
                if len(names) > PARAMETERS and not (given.args and given.args[0].arg == "ctx"):
                    yield f"{path}:{node.lineno}: {node.name} takes {len(names)} parameters; at most {PARAMETERS}"


def graph() -> dict[str, set[str]]:
    """module -> the modules of the package that it imports anywhere, also inside functions."""
    names = {".".join(Path(path).with_suffix("").parts): path for path, _ in sources("megalite")}
    edges: dict[str, set[str]] = {}
    for path, tree in sources("megalite"):
        name = ".".join(Path(path).with_suffix("").parts)
        edges[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                edges[name] |= {w if w in names else node.module for w in whole if w in names or node.module in names}
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names if alias.name in names}
    return edges


def circles() -> Iterator[str]:
    """Strongly connected modules (Tarjan), and imports that do not point down the floors."""
    edges, index, low, stack, found = graph(), {}, {}, [], []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            ring = [stack.pop()]
            while ring[-1] != node:
                ring.append(stack.pop())
            if len(ring) > 1:
                found.append(" <-> ".join(sorted(ring)))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    yield from (f"import circle: {ring}" for ring in found)
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    for name, others in edges.items():
        mine = name.split(".")[1]
        for other in sorted(others):
            theirs = other.split(".")[1]
            if mine != theirs and floor.get(mine, -1) >= floor.get(theirs, 99):
                yield f"{name} imports {other}, which is not below it"


def twins() -> Iterator[str]:
    """File names and public class names that stand twice."""
    files: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for path, tree in sources("megalite"):
        if not path.endswith("__init__.py"):
            files.setdefault(Path(path).name, []).append(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(path)
    for kind, places in (("file name", files), ("class", classes)):
        for name, where in sorted(places.items()):
            pair = kind == "file name" and {path.split("/")[1] for path in where} in KERNEL_PAIRS
            if len(where) > 1 and not pair:
                yield f"{kind} {name} stands in {', '.join(where)}"


def environment_readers() -> Iterator[str]:
    for path, tree in sources("megalite", "pretrain_gpt.py"):
        reads = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        if reads and path not in READERS:
            yield f"{path}:{reads[0]}: reads the environment; only {', '.join(sorted(READERS))} do"


# Ends and beginnings of a parameter's name: what a parameter is, its ParamSpec says.
BY_NAME = re.compile(
    r"""(endswith|startswith|removesuffix|removeprefix)\(\s*\(?\s*f?["'][^"']*(weight|bias|norm|embed|attention|mlp|layers\.|head)"""
)


def facts_by_name() -> Iterator[str]:
    for path, _ in sources("megalite"):
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            if BY_NAME.search(line):
                yield f"{path}:{number}: decides by a parameter's name: {line.strip()[:100]}"


def options() -> Iterator[str]:
    count = 0
    for _, tree in sources("megalite/config"):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name != "Config":
                count += sum(isinstance(line, ast.AnnAssign) for line in node.body)
    if count > OPTIONS:
        yield f"{count} options; the budget is {OPTIONS}"


RULES = (long_functions, long_files, many_parameters, circles, twins, environment_readers, facts_by_name, options)


def main() -> int:
    found = [(rule.__name__, line) for rule in RULES for line in rule()]
    for name, line in found:
        print(f"{name}: {line}")
    print(f"{len(found)} places")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
