"""Starts ranks on this machine without any other launcher.

They come from a fork server that has imported torch once (0.2 s for 8 ranks; 8 interpreters take 11 s on 2 cores), and
meet through a file and gloo's loopback device, so no port is opened that another machine could reach.

When a rank dies, the launcher ends the others, and restarts all of them if its caller wants that. When the launcher is
killed, its ranks end themselves: PR_SET_PDEATHSIG would watch the fork server, which lives as long as a rank does.
"""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing import connection, forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config import plugins
from megalite.config.console import discard_unwritable_output, print_err
from megalite.config.environment import threads_of
from megalite.config.exits import exit_code, is_success
from megalite.config.options import ConfigError
from megalite.config.run_options import EXIT_SIGNALS
from megalite.launch.children import safe_start
from megalite.launch.rank_info import (
    FAILURE_PRINTED,
    FIRST_FAILURE,
    HANG_REPORT,
    WAITS,
    LaunchError,
    RankInfo,
    die_with_parent,
    read_first_failure,
)

INTERRUPTED = 128 + signal.SIGINT
FORWARDED_SIGNALS = tuple(signal.Signals[name] for name in EXIT_SIGNALS)
KILL_SIGNALS = (signal.SIGQUIT,)  # Ctrl-\\: kills the ranks without a wait
BLOCKED_SIGNALS = (*FORWARDED_SIGNALS, *KILL_SIGNALS)
ORDERLY = (16, 75)  # exit codes of a run that stopped on purpose, its checkpoint complete (training/logging/run_dir.py)
WORK_DONE = 254  # of a rank whose target has returned, for `_watch` alone: any other end with 0 came too early
FORKSERVER_DIED = 255  # the exit code that multiprocessing reports when the fork server is gone
ORDERLY_S = 600.0
# what the fork server imports for all ranks; the first backward needs the third, with sympy (1 s for each rank)
PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "megalite.training.job.job"]
SCRATCH, YOUNG_S = "megalite-ranks-", 60.0  # a younger folder may not have its lock yet
MAX_SOCKET_ROOT = 47  # bytes: the path of the fork server's socket has 103 at most (Linux 107), names below take 56


class LaunchResult(NamedTuple):
    """How the ranks that were started together ended. `code`: the exit code of the first that failed, 0 if none did.
    `cause`: what happened to it, in words. `asked`: the signals that came for all ranks, also after this was made."""

    code: int
    cause: str
    signals: Sequence[int]


def cpu_count() -> int:
    """The number of processors that this process may use; a container's quota of processor time is rounded down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, int(_quota())))


def _quota(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """The smallest quota of this control group and the groups around it, in processors; a large number if none."""
    least, texts = 1e6, list[str]()
    with contextlib.suppress(OSError, ValueError):
        group = Path(own.read_text("utf-8").rpartition("::")[2].strip())
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):
                texts.append((mounted / folder.relative_to("/") / "cpu.max").read_text("utf-8"))
    with contextlib.suppress(OSError):  # cgroup version 1
        texts.append(" ".join((mounted / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period")))
    for text in texts:
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max 100000" is none
            quota, period = map(int, text.split())
            least = min(least, quota / period) if quota > 0 else least
    return least


def launch_local(
    nproc: int,
    target: Callable[..., int | None],
    args: tuple[Any, ...] = (),
    *,
    threads: int | None = None,
    grace_s: float = 1.5,
    timeout_s: float | None = None,
    keep_signals_blocked: bool = False,
    on_exit: Callable[[LaunchResult], bool | None] = lambda end: None,
) -> int:
    """Run `target(ranks, *args)` in `nproc` local processes. Returns 0, or its first failing exit code or SystemExit.

    `target` must be importable (a module-level function). FORWARDED signals are passed on to every rank, AT_ONCE kills
    the ranks; the fork server never gets a signal, because ranks die with it. With `holds_signals` they stay blocked
    until `target` unblocks them. When one rank fails the others get `grace_s` seconds to notice, then SIGKILL; after an
    orderly stop (ORDERLY) they get ORDERLY_S, because rank 0 may still be closing its logs.
    `ended` is called when all have ended, and returns the `Ranks.resumes` of the next start, or None for no restart.
    `threads`: CPU threads per rank; default: the cores divided by the ranks, unless OMP_NUM_THREADS is set.
    """
    requested = threads_of(os.environ.get("OMP_NUM_THREADS", ""))
    os.environ["OMP_NUM_THREADS"] = str(requested or threads or max(1, cpu_count() // nproc))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes: list[Any] = []
    with _scratch_folder() as scratch, _forward_signals(processes) as seen:
        with safe_start():
            resource_tracker.ensure_running()  # its start unblocks signals, so it must not happen below
        resumes: bool | None = False
        while resumes is not None:
            processes.clear()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
            with safe_start():
                forkserver.ensure_running()  # it and the ranks that it forks inherit the mask
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            folder = tempfile.mkdtemp(dir=scratch)  # each start needs a rendezvous file of its own
            for rank in range(nproc):
                ranks = RankInfo(rank, nproc, rank, nproc, f"file://{folder}/rendezvous", resumes, folder)
                rank_args = (ranks, target, args, keep_signals_blocked, plugins.plugin_sources())
                process = context.Process(target=_local_rank, args=rank_args, name=f"rank {rank}")
                discard_unwritable_output()  # `start` flushes it, which fails if its disk is full
                with safe_start():  # if the fork server has died, this starts another
                    process.start()  # the first waits until torch is imported
                processes.append(process)
                for number in seen:
                    _signal(process, number)
            code, cause = _watch(processes, grace_s, timeout_s, Path(folder))
            for number in set(seen).intersection(KILL_SIGNALS):
                code, cause = INTERRUPTED, signal.Signals(number).name
            resumes = on_exit(LaunchResult(code, cause, seen))
        return code


def _watch(processes: list[Any], grace_s: float, timeout_s: float | None, folder: Path) -> tuple[int, str]:
    """Wait until all have ended. Returns the first failing exit code, or 0, and what happened to that rank."""
    failed, cause, early, alive = 0, "", "", list(processes)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while alive:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not (on_exit := connection.wait([p.sentinel for p in alive], wait)):
            for process in alive:
                process.kill()
            failed = failed or 124
        dead = [p for p in alive if p.sentinel in on_exit]
        for process in dead:
            process.join()
        for process in sorted(dead, key=lambda p: (p.exitcode >= 0, p.exitcode)):  # killed ones first
            code = process.exitcode
            if code == WORK_DONE and not early:
                early = f", after {process.name} had ended with exit code 0"
            if code != WORK_DONE and not failed:
                failed = code if code > 0 else 128 - code if code else 1
                died = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                died = "with exit code 0 before its work was done" if code == 0 else died
                died = "with the fork server, which was killed" if code == FORKSERVER_DIED else died
                failed, cause = _first_failure(folder, failed, f"{process.name} ended {died}{early}")
                if code not in (2, 3, *ORDERLY, INTERRUPTED):  # those ranks have explained themselves
                    print_err(f"{process.name} ended {died}; ending the others")
                deadline = time.monotonic() + (ORDERLY_S if code in ORDERLY else grace_s)
        alive = [p for p in alive if p.is_alive()]
    return failed, cause


def _first_failure(folder: Path, code: int, cause: str) -> tuple[int, str]:
    """The report of the rank that failed first, which need not be the first that ended. A killed rank is the first that
    failed; an abort may be NCCL's answer to another rank's death or to a hang."""
    if code > 128 and code != 128 + signal.SIGABRT:
        return code, cause
    hang = read_first_failure(folder, HANG_REPORT) if code > 128 else None
    return read_first_failure(folder) or (hang and (hang[0], f"{hang[1]}; {cause}")) or (code, cause)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """A locked folder of this launcher; those of killed ones have no lock and are removed. Raises LaunchError."""
    try:
        own = tempfile.gettempdir()
        root = own if len(os.fsencode(own)) <= MAX_SOCKET_ROOT else "/tmp"
        for path in (path for folder in {own, root} for path in Path(folder).glob(f"{SCRATCH}????????")):
            with contextlib.suppress(OSError):
                _remove_stale_scratch(path)
        _place_forkserver_socket(root)
        scratch = tempfile.TemporaryDirectory(prefix=SCRATCH)
    except OSError as error:
        text = f"no folder for temporary files: {error}; set TMPDIR to a short path that can be written"
        raise LaunchError(text) from None
    with scratch as folder:
        number = _lock_dir(folder)
        try:
            yield folder
        finally:
            os.close(number)


def _lock_dir(folder: str) -> int:
    """Lock `folder`; the lock lasts as long as the returned file descriptor is open."""
    number = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return number


@cache
def _place_forkserver_socket(root: str) -> None:
    """Put the fork server's socket into a folder with our prefix, so that a later launcher can remove it if this one is
    killed; multiprocessing's own prefix, pymp-, is used by every program. Raises OSError."""
    folder = tempfile.mkdtemp(prefix=SCRATCH, dir=root)
    _lock_dir(folder)  # until this process ends, as the server does
    util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)  # after its own, -100
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        util.get_temp_dir()  # remembers the folder for this process
    finally:
        tempfile.tempdir = before


def _remove_stale_scratch(folder: Path) -> None:
    """Remove the folder of a killed launcher of this user, with only the files that launchers make. Raises OSError if
    it holds anything else, or if its launcher lives."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or time.time() < facts.st_mtime + YOUNG_S:
        return
    number = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for attempt in folder.glob("tmp????????"):
            for name in ("rendezvous", FIRST_FAILURE, FAILURE_PRINTED, HANG_REPORT, WAITS):
                (attempt / name).unlink(missing_ok=True)
            attempt.rmdir()
        for server in folder.glob("pymp-????????"):
            for listener in server.glob("listener-????????"):
                listener.unlink()
            server.rmdir()
        folder.rmdir()
    finally:
        os.close(number)


def _signal(process: Any, number: int) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL if number in KILL_SIGNALS else number)


def print_stopping(number: int) -> None:
    """Print at once that the run is stopping, which may take a while; safe in a signal handler amid a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"stopping: {signal.Signals(number).name}\n".encode())


@contextlib.contextmanager
def _forward_signals(processes: list[Any]) -> Iterator[list[int]]:
    """Forward signals to the living `processes`. Yields the signals so far, for processes that start later. Ctrl-C and
    AT_ONCE raise KeyboardInterrupt while there is no process yet."""
    seen: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        if number in (signal.SIGINT, *KILL_SIGNALS) and not processes:
            # else the fork server would continue to import torch and keep the launcher's stdout open
            server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
            if server._forkserver_pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(server._forkserver_pid, signal.SIGKILL)
            raise KeyboardInterrupt(signal.Signals(number).name)
        print_stopping(number)
        seen.append(number)
        for process in processes:
            _signal(process, number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield seen
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = {n: signal.signal(n, forward) for n in BLOCKED_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    try:
        yield seen
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for number, handler in before.items():
            signal.signal(number, handler)


def _local_rank(
    ranks: RankInfo,
    target: Callable[..., int | None],
    args: tuple[Any, ...],
    keep_signals_blocked: bool,
    parts: plugins.PluginSources,
) -> None:
    die_with_parent()  # its parent is the fork server

    def end_with_launcher() -> None:
        if (launcher := multiprocessing.parent_process()) is not None:
            launcher.join()  # by a pipe that only the launcher holds open
            os.kill(os.getpid(), signal.SIGKILL)

    if not keep_signals_blocked:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    threading.Thread(target=end_with_launcher, name="megalite-launcher", daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        plugins.load_plugins([*parts], parts)
    except ConfigError as error:  # one that fails on some ranks alone, or a module that has changed
        print_err(f"rank {ranks.rank}: {error}")
        sys.exit(2)
    try:
        try:
            code: Any = target(ranks, *args)
        except SystemExit as error:
            code = exit_code(error)
        sys.exit(WORK_DONE if is_success(code) else code)
    except KeyboardInterrupt:  # during start-up; later the run itself handles it
        os._exit(INTERRUPTED)
    finally:
        discard_unwritable_output()
