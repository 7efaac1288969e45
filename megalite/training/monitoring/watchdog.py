"""The watchdog: a thread per rank that notices a hang, and reports which rank causes it and why.

Watchdogs communicate through the rendezvous store, over connections of their own, because main threads may block. A
round has three steps:

    request     by the first rank whose step takes too long, or whose collective is about to time out
    state       by every rank that responds: its stack and its collectives (hang_diagnosis.py); details go to RUN/hang/
    verdict     by the lowest rank that responds: ranks without a response, late ranks, and the likely cause

A step is late in comparison with the median duration of steps, once there are a few. Before the rendezvous, a rank
reports itself when the other ranks are about to give up waiting for it. A report does not end the run; the timeout of
the process group does, with the outcome `hang`. The heartbeat shows in the run directory that the run is alive.
"""

import contextlib
import faulthandler
import json
import os
import re
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

import megalite
from megalite.common.console import print_err
from megalite.common.exit_codes import ExitCode, RunResult
from megalite.common.safe_open import open_in_run_dir, write_atomically
from megalite.common.wording import plural
from megalite.config.options import Config
from megalite.launch.rank_info import HANG_REPORT, LaunchError, read_first_failure
from megalite.parallel.cpu.shared_memory import CollectiveMismatchError
from megalite.parallel.mesh import ABSTRACT, CommRecord, Mesh
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.status import belongs_to_another_run, is_done, write_status
from megalite.training.logging.timers import Timers
from megalite.training.monitoring.hang_diagnosis import (
    AxisCalls,
    CallRecord,
    RankState,
    Verdict,
    Wait,
    diagnose,
    format_ranks,
)
from megalite.training.state import Run

LATE_FACTOR = 10  # a step is late after this multiple of the median duration
MIN_LATE_FACTOR = 3  # but never before this multiple, even if the timeout is short
MIN_PATIENCE_S = 60.0  # and never before this time
MIN_STEPS = 3  # steps that define a median duration
POLL_S = 0.5  # interval of the thread's checks
ANSWER_S = 3.0  # time for the other ranks to respond
STORE_S = 5.0  # timeout of the store
HEARTBEAT_S = 10.0  # interval at which status.json is renewed
CLOSE_S = 5.0  # time for a write that is in progress at the end
EXIT_S = 0.5  # a rank's connections close before its process has ended
MAX_PROCESSES = 64  # ranks whose processes are looked up
RANKS_PER_STORE = 1024  # number of ranks that one store can serve at this pace; with more, polls and waits are slower
ROOT = str(Path(megalite.__file__).parent) + os.sep
# Errors of gloo and NCCL.
_TIMEOUT_ERROR = re.compile(r"Timed out waiting \d+ ?ms|timeout caused pair closure|collective operation timeout")
# The error of torch's comparison of collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL), raised if a rank is late or lost.
BARRIER = re.compile(r"failed to pass monitoredBarrier in (\d+) ms")
_LOST_PEER_ERROR = re.compile(
    r"failed to pass monitoredBarrier|"
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)|remote process exited|ncclRemoteError|"
    r"NCCL communicator was aborted|unhandled system error|failed to recv, got 0 bytes"
)
PROCESS_STATES = dict(
    T="stopped by a signal", t="stopped by a debugger", D="waits for a disk or the network", Z="has ended"
)


@dataclass(frozen=True)
class Activity:
    """An activity of the main thread, for example a step, and when it started (time.monotonic())."""

    name: str
    step: int
    start: float


class Watchdog:
    """A rank's watchdog.

    Args:
        mesh: The mesh; before there are process groups only its world, without a group. `attach` replaces it.
        directory: The run directory.
        timeout_s: The timeout of the process groups.
        shared_dir: `RankInfo.shared_dir`.

    Attributes:
        verdict: The verdict of the last round.
        pace: The factor by which polls and waits are slower with many ranks.
    """

    def __init__(self, mesh: Mesh, directory: Path, timers: Timers, timeout_s: float, shared_dir: str | None = None):
        self.mesh = mesh
        self.rank = mesh.world.rank
        self.timeout_s = timeout_s
        self.directory = directory / "hang"
        self.timers = timers
        self.events = EventLog(directory, mesh.world.rank)
        self.verdict = Verdict("", [])
        self.started = time.perf_counter()
        self.pace = max(1.0, mesh.world.size / RANKS_PER_STORE)
        self._report_file = None if shared_dir is None else Path(shared_dir, HANG_REPORT)  # for the launcher
        self._activity = Activity("start", 0, time.monotonic())
        self._step_times = deque[float](maxlen=50)
        self._reported_activity: Activity | None = None  # this rank's activity in the last round
        self._is_reporter = False  # this rank has written the last verdict
        self._has_joined = False  # the rendezvous is over, so there is a store
        self._rounds = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._main_thread = threading.get_ident()
        self._store: Any = None
        self.attach(mesh, timeout_s)
        self._thread = threading.Thread(target=self._watch, name="megalite-watchdog", daemon=True)
        self._thread.start()

    def attach(self, mesh: Mesh, timeout_s: float) -> None:
        """Watch the axes of this mesh, and the timeout of their collectives; connects to the store the first time."""
        with self._lock:
            self.mesh, self.timeout_s = mesh, timeout_s
            if self._has_joined or mesh.world.size == 1 or mesh.world.backend == ABSTRACT:
                return
            self._store, self._has_joined, self._rounds = _own_connection(), True, 0
            self._store_set(f"host/{self.rank}", f"{socket.gethostname()} {os.getpid()}")

    @property
    def hang_reported(self) -> bool:
        """True if a hang was reported and the main thread has made no progress since."""
        return self._reported_activity is self._activity

    def set_activity(self, activity: str, step: int) -> None:
        """Record that the main thread starts an activity; reports that it has resumed if it was late."""
        previous = self._activity
        self._activity = Activity(activity, step, time.monotonic())
        duration_s = self._activity.start - previous.start
        if previous.name == "step":
            self._step_times.append(duration_s)
        if self._is_reporter and previous is self._reported_activity:
            if self._report_file is not None:
                with contextlib.suppress(OSError):
                    self._report_file.unlink()
            print_err(f"{f'step {previous.step}' if previous.step else 'the start'} resumed after {duration_s:.0f} s")

    def explain_error(self, error: BaseException) -> RunResult | None:
        """Return the result of the run if a hang or another rank caused the error; None if it is this rank's own."""
        if isinstance(error, LaunchError):  # another rank of this machine may have reported why it is late
            if self._report_file is None:
                return None
            failure = read_first_failure(self._report_file.parent, HANG_REPORT)
            return failure and RunResult(ExitCode.HANG, failure.cause.partition(": ")[2])
        if isinstance(error, CollectiveMismatchError):
            self._start_round(force=True)
            return RunResult(ExitCode.CRASH, f"{error}: {self.verdict.reason}")
        if isinstance(error, RuntimeError) and (_TIMEOUT_ERROR.search(str(error)) or self._late_in_barrier(str(error))):
            self._start_round()
            self._store_set("timeout", json.dumps(asdict(self.verdict)))
            return RunResult(ExitCode.HANG, self.verdict.reason)
        if (isinstance(error, KeyboardInterrupt) or is_lost_peer_error(error)) and self._store_has("timeout"):
            self.verdict = Verdict(**json.loads(self._store_get("timeout")))
            return RunResult(ExitCode.HANG, self.verdict.reason)
        return None

    def describe_lost_rank(self, error: BaseException) -> str:
        """Describe an error about a lost rank: which rank it may be, and in which call this rank noticed it."""
        match, state = _LOST_PEER_ERROR.search(str(error)), self._rank_state()
        candidates = [rank for rank in range(self.mesh.world.size) if rank != self.rank]
        group = call_text = ""
        if state.wait is not None:
            axis, call = state.wait.axis, state.wait.call
            candidates = [call.peer]
            if call.peer < 0:
                candidates = [rank for rank in state.axes[axis].ranks if rank != self.rank]
            group, call_text = f" of {axis}", f": {call} over {axis}"
        ended = self._ended_processes(candidates)
        if ended:
            processes = f"{plural('process', len(ended))} {', '.join(ended.values())}"
            lost_rank = f"{format_ranks(ended)}{group} {'has' if len(ended) == 1 else 'have'} ended ({processes})"
        elif len(candidates) > 1:
            lost_rank = f"one of {format_ranks(candidates)}{group}"
        else:
            lost_rank = f"{format_ranks(candidates)}{group}"
        # The frames of the error, innermost first, since the main thread has left them.
        frames = reversed([(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)])
        location = next(self._megalite_lines(frames), state.location)
        return (
            f"lost another rank ({match[0] if match else 'error'}): {lost_rank}; "
            f"in {state.phase or state.activity}, {location}{call_text}"
        )

    def _ended_processes(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the process ids, by rank, of ranks on this machine that have ended; waits up to EXIT_S for one."""
        processes = {rank: self._store_get(f"host/{rank}").partition(" ") for rank in ranks[:MAX_PROCESSES]}
        local_pids = {rank: pid for rank, (host, _, pid) in processes.items() if host == socket.gethostname()}
        deadline = time.monotonic() + EXIT_S
        while True:
            ended = {rank: pid for rank, pid in local_pids.items() if _process_state(pid) == "Z"}
            if ended or time.monotonic() >= deadline:
                return ended
            time.sleep(0.05)

    def _longest_wait_s(self) -> float:
        """Return how long the main thread has been blocked in a collective, 0 if it is not."""
        now = time.monotonic()
        blocked = (axis.comm_log.blocked_on for axis in self.mesh.active_axes)
        return now - min((call.start for call in blocked if call is not None), default=now)

    def _late_in_barrier(self, error: str) -> bool:
        """Return True if the error is about a barrier in which this rank has waited for (nearly) its whole timeout."""
        match = BARRIER.search(error)
        return match is not None and self._longest_wait_s() > 0.9 * int(match[1]) / 1000

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._thread.join(self.pace * (POLL_S + ANSWER_S))

    # ---- the thread

    def _watch(self) -> None:
        """Run in the watchdog's thread: start a round if one was requested, or if this rank is late."""
        while not self._closing.wait(self.pace * POLL_S):
            requested = self._store_has(f"{self._rounds + 1}/request")
            if requested or (not self.hang_reported and self._is_late()):
                self._start_round(force=requested)

    def _is_late(self) -> bool:
        """Return True if the start-up, a collective or a step takes too long."""
        activity = self._activity
        elapsed_s = time.monotonic() - activity.start
        if not self._has_joined and self.mesh.world.size > 1 and activity.name == "start":
            return elapsed_s > 0.8 * self.timeout_s
        if self._longest_wait_s() > 0.8 * self.timeout_s:
            return True
        return activity.name == "step" and len(self._step_times) >= MIN_STEPS and elapsed_s > self.patience_s

    @property
    def patience_s(self) -> float:
        """The time that a step may take: more than half the timeout only if steps usually take long."""
        median, half = statistics.median(self._step_times), self.timeout_s / 2
        return max(min(LATE_FACTOR * median, half), MIN_LATE_FACTOR * median, min(MIN_PATIENCE_S, half))

    def _start_round(self, force: bool = False) -> None:
        """Run a round; without `force` only if this rank has made progress since the last one."""
        with self._lock:
            if force or not self.hang_reported:
                self._run_round()

    def _run_round(self) -> None:
        """Publish this rank's state, and take over the verdict of another rank or write it."""
        self._rounds += 1
        self._reported_activity, self._is_reporter = self._activity, False
        n, world = self._rounds, self.mesh.world.size
        self._store_set(f"{n}/request", "")
        state = self._rank_state()
        self._store_set(f"{n}/{self.rank}", json.dumps(asdict(state)))
        dump = threading.Thread(target=self._dump, args=(state,), daemon=True)  # the disk may be what hangs
        dump.start()
        dump.join(self.pace * ANSWER_S)
        # Rank 0 waits for the states of the others, which wait for its verdict.
        awaited_keys = [f"{n}/{rank}" for rank in range(world) if rank != self.rank]
        if self.rank != 0:
            awaited_keys = [f"{n}/verdict"]
        deadline = time.monotonic() + self.pace * ANSWER_S
        while self._store and time.monotonic() < deadline and not self._store_has(*awaited_keys):
            time.sleep(0.1 * self.pace)
        if any(self._store_has(f"{n}/{rank}") for rank in range(self.rank)):  # a lower rank will write the verdict
            while time.monotonic() < deadline + self.pace * ANSWER_S and not self._store_has(f"{n}/verdict"):
                time.sleep(0.1 * self.pace)
        if self._store_has(f"{n}/verdict"):
            self.verdict = Verdict(**json.loads(self._store_get(f"{n}/verdict")))
            return
        states = {
            rank: RankState.from_json(json.loads(self._store_get(f"{n}/{rank}")))
            for rank in range(world)
            if self._store_has(f"{n}/{rank}")
        }
        states[self.rank] = state
        silent: dict[int, str] = {}
        if self._store:
            silent = {rank: self._describe_process(rank) for rank in range(world) if rank not in states}
        verdict = diagnose(states, silent)
        if not self._has_joined and world > 1:
            verdict = replace(verdict, reason=f"{verdict.reason}; the others wait for it")
        elif self._store is None and world > 1:
            this_rank = f"this {format_ranks([self.rank])}: {state}"
            reason = f"the rendezvous store (MASTER_ADDR) does not respond; {this_rank}"
            verdict = replace(verdict, reason=reason)
        self.verdict = verdict
        self._store_set(f"{n}/verdict", json.dumps(asdict(verdict)))
        self._report(states, silent)

    def _report(self, states: dict[int, RankState], silent: dict[int, str]) -> None:
        """Print the verdict and the states of all ranks, and write it for the launcher and into events.jsonl."""
        # Before the rendezvous one report per machine is enough.
        if not self._has_joined and self._report_file is not None and self._report_file.exists():
            return
        self._is_reporter = True
        activity, verdict = self._activity, self.verdict
        median = ""
        if activity.name == "step" and self._step_times:
            median = f", usually {statistics.median(self._step_times):.1f} s"
        lines = [f"NO PROGRESS for {time.monotonic() - activity.start:.0f} s{median}: {verdict.reason}"]
        ranks_by_state: dict[str, list[int]] = {}
        for rank, state in states.items():
            ranks_by_state.setdefault(str(state), []).append(rank)
        lines += [f"  {format_ranks(ranks)}: {text}" for text, ranks in ranks_by_state.items()]
        lines += [
            f"  {format_ranks([rank])}: no answer{f', {process}' if process else ''}"
            for rank, process in silent.items()
        ]
        if self._report_file is not None:
            with contextlib.suppress(OSError):
                failure = {"rank": self.rank, "code": int(ExitCode.HANG), "reason": verdict.reason}
                write_atomically(self._report_file, json.dumps(failure))
        print_err("\n".join([*lines, f"  stacks and collectives of each rank: {self.directory}"]))
        self.events.add("hang", activity.step, reason=verdict.reason, late_ranks=verdict.late_ranks)

    def _rank_state(self) -> RankState:
        activity, now = self._activity, time.monotonic()
        wait: Wait | None = None
        axes: dict[str, AxisCalls] = {}
        for axis in self.mesh.active_axes:
            if (blocked_on := axis.comm_log.blocked_on) is not None:
                wait = Wait(axis.name, _call_record(blocked_on), now - blocked_on.start)
            axes[axis.name] = AxisCalls(list(axis.ranks), [_call_record(call) for call in list(axis.comm_log.recent)])
        frame = sys._current_frames().get(self._main_thread)
        stack = list(self._megalite_lines(traceback.walk_stack(frame) if frame is not None else ()))
        return RankState(
            rank=self.rank,
            step=activity.step,
            activity=activity.name,
            phase=self.timers.phase,
            seconds=now - activity.start,
            stack=stack,
            wait=wait,
            axes=axes,
        )

    @staticmethod
    def _megalite_lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
        """Yield the lines in megalite, without packages that only wait or forward calls."""
        for frame, line in frames:
            path = frame.f_code.co_filename
            file = path.removeprefix(ROOT)
            if file != path and not file.startswith(("common/", "parallel/", "config/", "training/monitoring/")):
                yield f"{file}:{line} {frame.f_code.co_name}"

    def _dump(self, state: RankState) -> None:
        """Write this rank's state, stacks and NCCL's flight recorder into RUN/hang/."""
        path = self.directory / f"rank-{self.rank:03d}.txt"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=open_in_run_dir) as file:
                file.write(f"--- {time.strftime('%F %T')} {state}\n")
                for name, axis in state.axes.items():
                    file.writelines(
                        f"{name} {axis.ranks}: {call.op} {call.peer} {call.seq_id}, {call.num_bytes} bytes\n"
                        for call in axis.calls
                    )
                file.flush()
                faulthandler.dump_traceback(file)
            if recorder := getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None):
                with open(path.with_suffix(".json"), "wb", opener=open_in_run_dir) as records:
                    records.write(recorder())
        except (OSError, RuntimeError, ValueError) as error:
            print_err(f"WARNING: {path}: {error}; this rank's stack is lost")

    def _describe_process(self, rank: int) -> str:
        """Describe the process of a rank that does not respond, with the kernel's state if it is on this machine."""
        host, _, pid = self._store_get(f"host/{rank}").partition(" ")
        if host != socket.gethostname():
            return f"process {pid} on {host}" if host else ""
        return f"process {pid}: {PROCESS_STATES.get(_process_state(pid), 'neither stopped nor ended')}"

    # ---- the store; after an error it is not used again

    def _store_set(self, key: str, text: str) -> None:
        self._try("set", key, text)

    def _store_has(self, *keys: str) -> bool:
        return bool(self._try("check", list(keys)))

    def _store_get(self, key: str) -> str:
        return (self._try("get", key) or b"").decode() if self._store_has(key) else ""

    def _try(self, method: str, *args: Any) -> Any:
        if self._store is None:
            return None
        try:
            return getattr(self._store, method)(*args)
        except RuntimeError:
            self._store = None
            return None


def _call_record(record: CommRecord) -> CallRecord:
    return CallRecord(record.op, record.peer, record.seq_id, record.num_bytes)


def _process_state(pid: str) -> str:
    """Return the state of a process of this machine, as the kernel abbreviates it (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z" if sys.platform == "linux" else ""


def is_lost_peer_error(error: BaseException) -> bool:
    """Return True if gloo or NCCL has raised this because another rank is lost (errors of stores are OSErrors)."""
    return isinstance(error, RuntimeError) and _LOST_PEER_ERROR.search(str(error)) is not None


def _own_connection() -> Any:
    store: Any = distributed_c10d.PrefixStore("hang", distributed_c10d._get_default_store())
    store = store.clone()
    store.set_timeout(timedelta(seconds=STORE_S))
    return store


class Heartbeat:
    """A thread of rank 0 that renews status.json every HEARTBEAT_S, so that an old one means a dead or hanging run.

    It is a thread because a batch or a save may take longer, and because a disk that hangs must not block the run. It
    pauses while the watchdog reports a hang. The status of another run, or of a finished one, remains until `start` is
    called, since this run may still fail to start.

    Args:
        is_restart: `RankInfo.is_restart`.
    """

    def __init__(self, directory: Path, run: Run, config: Config, watchdog: Watchdog, is_restart: bool):
        self._directory = directory
        self._run = run
        self._config = config
        self._watchdog = watchdog
        self._closing = threading.Event()
        self._write_lock = threading.Lock()  # concurrent writers would use the same temporary file
        self._thread = threading.Thread(target=self._renew, name="megalite-heartbeat", daemon=True)
        if not belongs_to_another_run(directory, config, is_restart) and not is_done(directory):
            self.start()

    def start(self) -> None:
        """Write the status, and start the thread unless it runs."""
        if self._run.mesh.world.is_first:
            self._write()
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """End the thread; the run then writes the last status."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _renew(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            if not self._watchdog.hang_reported:
                self._write()

    def _write(self) -> None:
        progress = self._run.progress
        with self._write_lock:
            write_status(self._directory, "running", self._config, step=progress.step, tokens=progress.consumed_tokens)
