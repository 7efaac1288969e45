"""Every place in the package where something is waited for, found in its source, and how to leave one of them out.

sites()              key -> line of every call that waits: "nn/linear.py _ColumnParallelLinear.forward: start_all_gather(...).wait()"
without(site)        while it lasts, that call does not wait: what comes after it goes on as if it had
"""

import ast
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from megalite.checkpoint.manager import async_save
from megalite.nn import activation_offload
from megalite.optim import optimizer_offload
from megalite.optim.param_gather import ParamGatherer
from megalite.parallel import comm
from megalite.parallel import streams as order
from simulated_gpu.simulator import nccl, streams
from simulated_gpu.simulator.trace import Comm

PACKAGE = Path(comm.__file__).resolve().parents[1]
METHODS = {"wait", "wait_param_sync", "wait_stream", "wait_event", "synchronize"}
FUNCTIONS = {"wait_event", "synchronize"}  # of parallel/streams.py


@dataclass(frozen=True)
class Site:
    """`key`: file, function and expression; `number`, where the same stands there again."""

    key: str
    file: str
    line: int


def sites() -> dict[str, Site]:
    found: dict[str, Site] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for names, call in _calls(ast.parse(path.read_text(encoding="utf-8")), ()):
            waits = call.func.id in FUNCTIONS if isinstance(call.func, ast.Name) else False
            if waits or (isinstance(call.func, ast.Attribute) and call.func.attr in METHODS):
                key = f"{path.relative_to(PACKAGE)} {'.'.join(names)}: {ast.unparse(call)}"
                while key in found:
                    key += " again"
                found[key] = Site(key, str(path), call.lineno)
    return found


def _calls(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = (*names, node.name)
    if isinstance(node, ast.Call):
        yield names, node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names)


@dataclass
class Left:
    """What a call that did not wait would have waited for; empty: nobody came by."""

    times: int = 0
    comms: list[Comm] = field(default_factory=list)


def _of_work(work: nccl.SimulatedWork, *_: Any) -> list[Comm]:
    return [work._operation.fact]


def _of_pending(pending: comm.Pending, *_: Any) -> list[Comm]:
    return [] if pending._work is None else _of_work(pending._work)


def _of_gather(gather: ParamGatherer, *_: Any) -> list[Comm]:
    return [fact for pending in gather._in_flight.values() for fact in _of_pending(pending)]


def _nothing(*_: Any) -> list[Comm]:
    return []


# what is called -> what it would wait for, and what it returns when it does not
WAITING: tuple[tuple[Any, str, Callable[..., list[Comm]], Callable[..., Any]], ...] = (
    (nccl.SimulatedWork, "wait", _of_work, lambda *_: True),
    (comm.Pending, "wait", _of_pending, lambda pending: pending._result),
    (ParamGatherer, "wait_param_sync", _of_gather, _nothing),
    (streams.Stream, "wait_stream", _nothing, _nothing),
    (streams.Event, "wait", _nothing, _nothing),
    (streams.Event, "synchronize", _nothing, _nothing),
    (order, "wait_event", _nothing, _nothing),
    (async_save, "wait_event", _nothing, _nothing),
    (optimizer_offload, "wait_event", _nothing, _nothing),
    (activation_offload, "wait_event", _nothing, _nothing),
    (threading.Event, "wait", _nothing, lambda *_: True),
)


_out: dict[tuple[str, int], Left] = {}  # file and line of the calls that do not wait now


@contextlib.contextmanager
def without(site: Site) -> Iterator[Left]:
    left = _out[site.file, site.line] = Left()
    try:
        yield left
    finally:
        del _out[site.file, site.line]


@contextlib.contextmanager
def heard() -> Iterator[None]:
    def heard_of(original: Callable[..., Any], of: Callable[..., list[Comm]], instead: Callable[..., Any]) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            left = _out.get((frame.f_code.co_filename, frame.f_lineno))
            if left is None:
                return original(*args, **kwargs)
            left.times += 1
            left.comms += of(*args)
            return instead(*args)

        return wait

    with contextlib.ExitStack() as stack:
        for owner, name, of, instead in WAITING:
            stack.enter_context(mock.patch.object(owner, name, heard_of(getattr(owner, name), of, instead)))
        yield
