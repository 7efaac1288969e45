"""The launcher of --nproc: it starts ranks on this machine.

Ranks are forked from a server that has imported torch once (0.2 s for 8 ranks; 8 interpreters take 11 s on 2 cores).
Their rendezvous uses a file and gloo's loopback device, so no port is opened that another machine could reach.

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

from megalite.common.console import discard_unwritable_output, print_err
from megalite.common.environment import threads_of
from megalite.common.exit_codes import ExitCode
from megalite.common.exits import exit_code, is_success
from megalite.config import plugins
from megalite.config.options import ConfigError
from megalite.config.run_options import EXIT_SIGNALS
from megalite.launch.children import safe_start
from megalite.launch.process_group import die_with_parent
from megalite.launch.rank_info import (
    FAILURE_PRINTED,
    FIRST_FAILURE,
    HANG_REPORT,
    WAITS,
    Failure,
    LaunchError,
    RankInfo,
    read_first_failure,
)

FORWARDED_SIGNALS = tuple(signal.Signals[name] for name in EXIT_SIGNALS)
KILL_SIGNALS = (signal.SIGQUIT,)  # Ctrl-\\: kills the ranks without a wait
BLOCKED_SIGNALS = (*FORWARDED_SIGNALS, *KILL_SIGNALS)
ORDERLY_STOPS = (ExitCode.RERUN, ExitCode.REQUEUE)  # on purpose, with a complete checkpoint
# Ranks that end so have printed the reason.
EXPLAINED_EXITS = (ExitCode.USAGE, ExitCode.PREFLIGHT, *ORDERLY_STOPS, ExitCode.INTERRUPTED)
TIMEOUT_EXIT_CODE = 124  # as of the program `timeout`
WORK_DONE = 254  # exit code of a rank whose target has returned: a rank that exits with 0 has exited too early
FORKSERVER_DIED = 255  # the exit code that multiprocessing reports when the fork server is gone
ORDERLY_STOP_S = 600.0
# imported by the fork server for all ranks; the first backward needs the third, with sympy (1 s for each rank)
PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "megalite.training.job.job"]
DIR_PREFIX, MIN_AGE_S = "megalite-ranks-", 60.0  # a younger directory may not be locked yet
MAX_SOCKET_ROOT = 47  # bytes: the path of the fork server's socket is limited to 103 (107 on Linux), 56 below here


class LaunchResult(NamedTuple):
    """The end of ranks that were started together.

    code     exit code of the rank that failed first; 0 if none failed
    cause    description of that failure
    signals  signals received for all ranks; later ones are appended
    """

    code: int
    cause: str
    signals: Sequence[int]


def cpu_count() -> int:
    """Return the number of processors that this process may use; a container's quota is rounded down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, int(_quota())))


def _quota(cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")) -> float:
    """Return the smallest quota of this control group and its parents in processors; a large number if none is set."""
    min_quota = 1e6
    texts: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        group = Path(own_cgroup.read_text("utf-8").rpartition("::")[2].strip())
        for directory in (group, *group.parents):
            with contextlib.suppress(OSError):
                texts.append((cgroup_root / directory.relative_to("/") / "cpu.max").read_text("utf-8"))
    with contextlib.suppress(OSError):  # cgroup version 1
        texts.append(" ".join((cgroup_root / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period")))
    for text in texts:
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max 100000": no quota
            quota, period = map(int, text.split())
            if quota > 0:
                min_quota = min(min_quota, quota / period)
    return min_quota


def launch_local(
    nproc: int,
    target: Callable[..., int | None],
    args: tuple[Any, ...] = (),
    *,
    threads: int | None = None,
    grace_s: float = 1.5,
    timeout_s: float | None = None,
    keep_signals_blocked: bool = False,
    on_exit: Callable[[LaunchResult], bool | None] = lambda result: None,
) -> int:
    """Run `target(ranks, *args)` in `nproc` local processes.

    FORWARDED_SIGNALS are passed on to every rank; KILL_SIGNALS kill the ranks. The fork server never gets a signal,
    because ranks die with it.

    Args:
        nproc: number of ranks.
        target: an importable (module-level) function.
        args: its further arguments.
        threads: CPU threads per rank; default: cores divided by ranks, unless OMP_NUM_THREADS is set.
        grace_s: when a rank fails, seconds until the others get SIGKILL. After an orderly stop they have
            ORDERLY_STOP_S, because rank 0 may still be closing its logs.
        timeout_s: limit after which all ranks are killed.
        keep_signals_blocked: signals stay blocked until `target` unblocks them.
        on_exit: called when all ranks have ended; returns the `RankInfo.is_restart` of the next start, or None for no
            restart.

    Returns:
        0, or the exit code of the rank that failed first.
    """
    requested = threads_of(os.environ.get("OMP_NUM_THREADS", ""))
    os.environ["OMP_NUM_THREADS"] = str(requested or threads or max(1, cpu_count() // nproc))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes: list[Any] = []
    with _scratch_dir() as scratch, _forward_signals(processes) as received:
        with safe_start():
            resource_tracker.ensure_running()  # its start unblocks signals, so it must not happen below
        is_restart: bool | None = False
        while is_restart is not None:
            processes.clear()
            _start_forkserver()
            shared_dir = tempfile.mkdtemp(dir=scratch)  # each start needs a rendezvous file of its own
            for rank in range(nproc):
                ranks = RankInfo(rank, nproc, rank, nproc, f"file://{shared_dir}/rendezvous", is_restart, shared_dir)
                rank_args = (ranks, target, args, keep_signals_blocked, plugins.plugin_sources())
                process = context.Process(target=_local_rank, args=rank_args, name=f"rank {rank}")
                discard_unwritable_output()  # `start` flushes it, which fails if its disk is full
                with safe_start():  # if the fork server has died, this starts another
                    process.start()  # the first one waits until torch is imported
                processes.append(process)
                for number in received:
                    _send_signal(process, number)
            failure = _watch(processes, grace_s, timeout_s, Path(shared_dir)) or Failure(0, "")
            for number in set(received).intersection(KILL_SIGNALS):
                failure = Failure(ExitCode.INTERRUPTED, signal.Signals(number).name)
            is_restart = on_exit(LaunchResult(failure.code, failure.cause, received))
        return failure.code


def _start_forkserver() -> None:
    """Start the fork server unless it runs; it and the ranks that it forks inherit BLOCKED_SIGNALS as blocked."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    with safe_start():
        forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _watch(processes: list[Any], grace_s: float, timeout_s: float | None, shared_dir: Path) -> Failure | None:
    """Wait until all have ended. Return the first failure, or None."""
    failure: Failure | None = None
    early = ""
    alive = list(processes)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while alive:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not (exited := connection.wait([p.sentinel for p in alive], wait)):
            for process in alive:
                process.kill()
            failure = failure or Failure(TIMEOUT_EXIT_CODE, "")
        dead = [p for p in alive if p.sentinel in exited]
        for process in dead:
            process.join()
        for process in sorted(dead, key=lambda p: (p.exitcode >= 0, p.exitcode)):  # killed ones first
            code = process.exitcode
            if code == WORK_DONE and not early:
                early = f", after {process.name} had ended with exit code 0"
            if code != WORK_DONE and failure is None:
                end = _describe_end(process.name, code)
                failure = _first_failure(shared_dir, Failure(end.code, f"{end.cause}{early}"))
                if code not in EXPLAINED_EXITS:
                    print_err(f"{end.cause}; ending the others")
                deadline = time.monotonic() + (ORDERLY_STOP_S if code in ORDERLY_STOPS else grace_s)
        alive = [p for p in alive if p not in dead]  # one that died since then is still to be examined
    return failure


def _describe_end(name: str, code: int) -> Failure:
    """Return the exit code of a rank that failed as a shell reports it, with a text.

    Args:
        name: name of the rank's process.
        code: its exit code; negative if a signal ended it.
    """
    if code < 0:
        return Failure(128 - code, f"{name} ended by signal {signal.Signals(-code).name}")
    if code == 0:
        return Failure(1, f"{name} ended with exit code 0 before its work was done")
    if code == FORKSERVER_DIED:
        return Failure(code, f"{name} ended with the fork server, which was killed")
    return Failure(code, f"{name} ended with exit code {code}")


def _first_failure(shared_dir: Path, first_end: Failure) -> Failure:
    """Return the failure of the rank that failed first, which need not be the first that ended.

    A killed rank is the first that failed. An abort may be NCCL's reaction to another rank's death or to a hang.
    """
    was_killed = first_end.code > 128
    was_aborted = first_end.code == 128 + signal.SIGABRT
    if was_killed and not was_aborted:
        return first_end
    if failure := read_first_failure(shared_dir):
        return failure
    if was_aborted and (hang := read_first_failure(shared_dir, HANG_REPORT)):
        return Failure(hang.code, f"{hang.cause}; {first_end.cause}")
    return first_end


@contextlib.contextmanager
def _scratch_dir() -> Iterator[str]:
    """Provide a locked temporary directory for this launcher. Raises LaunchError.

    Directories of killed launchers are not locked, and are removed.
    """
    try:
        temp_dir = tempfile.gettempdir()
        root = temp_dir if len(os.fsencode(temp_dir)) <= MAX_SOCKET_ROOT else "/tmp"
        for path in (path for parent in {temp_dir, root} for path in Path(parent).glob(f"{DIR_PREFIX}????????")):
            with contextlib.suppress(OSError):
                _remove_stale_scratch(path)
        _place_forkserver_socket(root)
        scratch = tempfile.TemporaryDirectory(prefix=DIR_PREFIX)
    except OSError as error:
        text = f"no directory for temporary files: {error}; set TMPDIR to a short path that can be written"
        raise LaunchError(text) from None
    with scratch as path:
        fd = _lock_dir(path)
        try:
            yield path
        finally:
            os.close(fd)


def _lock_dir(path: str) -> int:
    """Lock a directory; the lock lasts as long as the returned file descriptor is open."""
    fd = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


@cache
def _place_forkserver_socket(root: str) -> None:
    """Put the fork server's socket into a directory with megalite's prefix. Raises OSError.

    A later launcher can then remove it if this one is killed; multiprocessing's prefix, pymp-, is used by every
    program.
    """
    socket_dir = tempfile.mkdtemp(prefix=DIR_PREFIX, dir=root)
    _lock_dir(socket_dir)  # until this process, and with it the server, ends
    util.Finalize(None, shutil.rmtree, (socket_dir,), {"ignore_errors": True}, exitpriority=-200)  # after its own, -100
    before, tempfile.tempdir = tempfile.tempdir, socket_dir
    try:
        util.get_temp_dir()  # which remembers the directory for this process
    finally:
        tempfile.tempdir = before


def _remove_stale_scratch(directory: Path) -> None:
    """Remove the directory of a killed launcher of this user, with only the files that launchers create.

    Raises OSError if it contains anything else, or if its launcher is alive.
    """
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or time.time() < info.st_mtime + MIN_AGE_S:
        return
    fd = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for attempt in directory.glob("tmp????????"):
            for name in ("rendezvous", FIRST_FAILURE, FAILURE_PRINTED, HANG_REPORT, WAITS):
                (attempt / name).unlink(missing_ok=True)
            attempt.rmdir()
        for server in directory.glob("pymp-????????"):
            for listener in server.glob("listener-????????"):
                listener.unlink()
            server.rmdir()
        directory.rmdir()
    finally:
        os.close(fd)


def _send_signal(process: Any, number: int) -> None:
    """Send a signal to a process if it is alive."""
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL if number in KILL_SIGNALS else number)


def print_stopping(number: int) -> None:
    """Print that the run is stopping, which may take a while; safe in a signal handler that interrupts a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"stopping: {signal.Signals(number).name}\n".encode())


@contextlib.contextmanager
def _forward_signals(processes: list[Any]) -> Iterator[list[int]]:
    """Forward signals to the living `processes` inside the block.

    Yields the signals received so far, for processes that start later. Ctrl-C and KILL_SIGNALS raise KeyboardInterrupt
    while there is no process yet.
    """
    received: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        if number in (signal.SIGINT, *KILL_SIGNALS) and not processes:
            # otherwise the fork server would continue to import torch and keep the launcher's stdout open
            server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
            if server._forkserver_pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(server._forkserver_pid, signal.SIGKILL)
            raise KeyboardInterrupt(signal.Signals(number).name)
        print_stopping(number)
        received.append(number)
        for process in processes:
            _send_signal(process, number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield received
        return
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    old_handlers = {n: signal.signal(n, forward) for n in BLOCKED_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    try:
        yield received
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _local_rank(
    ranks: RankInfo,
    target: Callable[..., int | None],
    args: tuple[Any, ...],
    keep_signals_blocked: bool,
    plugin_sources: plugins.PluginSources,
) -> None:
    """Run `target` as a rank, and exit."""
    die_with_parent()  # the parent is the fork server

    def end_with_launcher() -> None:
        if (launcher := multiprocessing.parent_process()) is not None:
            launcher.join()  # through a pipe that only the launcher keeps open
            os.kill(os.getpid(), signal.SIGKILL)

    if not keep_signals_blocked:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    threading.Thread(target=end_with_launcher, name="megalite-launcher", daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        plugins.load_plugins([*plugin_sources], plugin_sources)
    except ConfigError as error:  # a plugin that fails on some ranks only, or a module that has changed
        print_err(f"rank {ranks.rank}: {error}")
        sys.exit(ExitCode.USAGE)
    try:
        try:
            code: Any = target(ranks, *args)
        except SystemExit as error:
            code = exit_code(error)
        sys.exit(WORK_DONE if is_success(code) else code)
    except KeyboardInterrupt:  # during start-up; later the run itself handles it
        os._exit(ExitCode.INTERRUPTED)
    finally:
        discard_unwritable_output()
