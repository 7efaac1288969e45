"""`run_ranks`: run a function on N gloo ranks inside a test, and get the results.

Ranks come from a fork server that has imported torch (0.1 s for 4). A rank that raises fails the test with its
traceback. A rank that hangs is killed.
"""

import datetime
import multiprocessing
import os
import pickle  # between a test and its own processes; it sends tensors by value, not in shared memory
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import train_cases

from megalite.launch import local_launcher as local_ranks
from megalite.launch.local_launcher import launch_local
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import RankInfo

# importable only from the root of the repository; elsewhere, each rank imports its modules itself
local_ranks.PRELOAD += ["tests.support.forkserver_imports"]


def _run(
    ranks: RankInfo,
    senders: list[Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    backend: Callable[[], str] | None,
) -> None:
    try:
        limit = datetime.timedelta(seconds=timeout_s)
        with process_group(ranks, device="cpu", backend=backend and backend(), startup_timeout=limit):
            if backend is not None:
                _wait_for_all_ranks(ranks)
            result = fn(*args)
            train_cases.close_runs()
        senders[ranks.rank].send_bytes(pickle.dumps((True, result)))
    except BaseException:
        senders[ranks.rank].send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None


def wait_for_file(path: Path) -> None:
    """Wait until another rank has created the file, since a rank that ends early is noticed at once."""
    while not path.exists():
        time.sleep(0.01)


def _wait_for_all_ranks(ranks: RankInfo) -> None:
    """Wait until all ranks are connected, so that no rank ends before the others connect.

    Groups of gloo do this themselves.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected {ranks.rank}", "")
    store.wait([f"connected {rank}" for rank in range(ranks.world_size)])


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, backend: Callable[[], str] | None = None
) -> list[Any]:
    """Call `fn(*args)` on `world` ranks, and return the results in rank order.

    Args:
        fn: A module-level function.
        backend: A module-level function that registers a backend other than gloo on each rank, and returns its name.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    results: dict[int, tuple[bool, Any]] = {}

    def drain() -> None:  # results may be larger than a pipe's buffer
        open_ends = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        while open_ends:
            for end in connection.wait(list(open_ends)):
                try:
                    results[open_ends[end]] = pickle.loads(end.recv_bytes())  # type: ignore[attr-defined, index]
                except EOFError:
                    del open_ends[end]  # type: ignore[arg-type]

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    senders = [sender for _, sender in pipes]
    code = launch_local(world, _run, (senders, fn, args, timeout, backend), threads=1, grace_s=3.0, timeout_s=timeout)
    for sender in senders:
        sender.close()
    thread.join(5.0)
    errors = [f"--- rank {rank}\n{text}" for rank, (ok, text) in sorted(results.items()) if not ok]
    if errors or code or len(results) < world:
        missing = sorted(set(range(world)) - set(results))
        raise AssertionError(f"exit code {code}; no result from ranks {missing}\n" + "\n".join(errors))
    return [results[rank][1] for rank in range(world)]
