"""Every call in the package's source that waits, and how to remove one of them.

sites()              key -> line of each such call: "nn/linear.py _ColumnParallelLinear.forward: start_all_gather(...).wait()"
without(site)        inside, that call returns without waiting
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
from megalite.optim.zero.sync import BucketSync
from megalite.parallel import comm
from megalite.parallel import streams as parallel_streams
from simulated_gpu.simulator import nccl, streams
from simulated_gpu.simulator.trace import Comm

PACKAGE = Path(comm.__file__).resolve().parents[1]
METHODS = {"wait", "wait_param_sync", "wait_stream", "wait_event", "synchronize"}
FUNCTIONS = {"wait_event", "synchronize"}  # in parallel/streams.py


@dataclass(frozen=True)
class Site:
    """A call that waits; `key` consists of its file, function and expression."""

    key: str
    file: str
    line: int


def sites() -> dict[str, Site]:
    sites_by_key: dict[str, Site] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for names, call in _calls(ast.parse(path.read_text(encoding="utf-8")), ()):
            waits = call.func.id in FUNCTIONS if isinstance(call.func, ast.Name) else False
            if waits or (isinstance(call.func, ast.Attribute) and call.func.attr in METHODS):
                key = f"{path.relative_to(PACKAGE)} {'.'.join(names)}: {ast.unparse(call)}"
                while key in sites_by_key:
                    key += " again"
                sites_by_key[key] = Site(key, str(path), call.lineno)
    return sites_by_key


def _calls(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = (*names, node.name)
    if isinstance(node, ast.Call):
        yield names, node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names)


@dataclass
class RemovedWait:
    """A removed wait: how often it was reached, and the operations that it would have waited for."""

    times: int = 0
    comms: list[Comm] = field(default_factory=list)


def _comms_of_work(work: nccl.SimulatedWork, *_: Any) -> list[Comm]:
    return [work._operation.fact]


def _comms_of_pending(pending: comm.Pending, *_: Any) -> list[Comm]:
    return [] if pending._work is None else _comms_of_work(pending._work)


def _comms_of_gathers(sync: BucketSync, *_: Any) -> list[Comm]:
    pending_gathers = [bucket._pending for bucket in sync._unsharding]
    return [fact for pending in pending_gathers if pending is not None for fact in _comms_of_pending(pending)]


def _no_comms(*_: Any) -> list[Comm]:
    return []


# (owner, function that waits, what it would wait for, its result without waiting)
WAITING: tuple[tuple[Any, str, Callable[..., list[Comm]], Callable[..., Any]], ...] = (
    (nccl.SimulatedWork, "wait", _comms_of_work, lambda *_: True),
    (comm.Pending, "wait", _comms_of_pending, lambda pending: pending._result),
    (BucketSync, "wait_param_sync", _comms_of_gathers, _no_comms),
    (streams.Stream, "wait_stream", _no_comms, _no_comms),
    (streams.Event, "wait", _no_comms, _no_comms),
    (streams.Event, "synchronize", _no_comms, _no_comms),
    (parallel_streams, "wait_event", _no_comms, _no_comms),
    (async_save, "wait_event", _no_comms, _no_comms),
    (optimizer_offload, "wait_event", _no_comms, _no_comms),
    (activation_offload, "wait_event", _no_comms, _no_comms),
    (threading.Event, "wait", _no_comms, lambda *_: True),
)


_removed: dict[tuple[str, int], RemovedWait] = {}  # (file, line) of the calls that do not wait now


@contextlib.contextmanager
def without(site: Site) -> Iterator[RemovedWait]:
    removed = _removed[site.file, site.line] = RemovedWait()
    try:
        yield removed
    finally:
        del _removed[site.file, site.line]


@contextlib.contextmanager
def intercept_waits() -> Iterator[None]:
    def intercepted(
        original: Callable[..., Any], comms_of: Callable[..., list[Comm]], result_of: Callable[..., Any]
    ) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            removed = _removed.get((frame.f_code.co_filename, frame.f_lineno))
            if removed is None:
                return original(*args, **kwargs)
            removed.times += 1
            removed.comms += comms_of(*args)
            return result_of(*args)

        return wait

    with contextlib.ExitStack() as stack:
        for owner, name, comms_of, result_of in WAITING:
            stack.enter_context(mock.patch.object(owner, name, intercepted(getattr(owner, name), comms_of, result_of)))
        yield
