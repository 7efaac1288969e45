"""The watchdog: a thread per rank that notices a hang, and reports which rank causes it and why.

Watchdogs talk through the store by which ranks met, by connections of their own: main threads may block. A round:

    asked       by the first rank whose step takes too long, or whose collective is about to time out
    answered    by every rank that lives: where it is, what it has begun (diagnosis.py); stacks go to RUN/hang/
    said        by the lowest rank that answers, once: who does not answer, who is behind, and the likely cause

A step is late compared with the usual length of steps, once a few are known. Before ranks have met, each is late by
itself when the others are about to give up waiting for it. A report ends nothing: the group's time-out does, with the
outcome `hang`. The heartbeat tells those who look at the run's directory.
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
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

import megalite
from megalite.common.safe_open import open_in_run_dir
from megalite.config.console import print_err
from megalite.config.options import Config
from megalite.launch.rank_info import HANG_REPORT, LaunchError, read_first_failure
from megalite.parallel.cpu.shared_memory import CollectiveMismatchError
from megalite.parallel.mesh import ABSTRACT, Mesh
from megalite.training.logging.run_dir import (
    EventLog,
    ExitCode,
    belongs_to_another_run,
    is_done,
    write_atomically,
    write_status,
)
from megalite.training.logging.timers import Timers
from megalite.training.monitoring.hang_diagnosis import RankState, diagnose, format_call, format_ranks
from megalite.training.state import Run

LATE_FACTOR, LEAST_FACTOR = 10, 3  # times the usual length of a step: late, and never late before
MIN_PATIENCE_S, ENOUGH = 60.0, 3  # never late before; steps that make a usual length
POLL_S, ANSWER_S, STORE_S = 0.5, 3.0, 5.0
HEARTBEAT_S, CLOSE_S = 10.0, 5.0  # of the heartbeat; what a write that has begun may take at the end
ENDS_S, MOST_LOOKED_AT = 0.5, 64  # a rank's connections close before it has ended; ranks whose processes are looked at
RANKS_PER_STORE = 1024  # that one store can serve at this pace; more ranks ask, and wait, more slowly
ROOT = str(Path(megalite.__file__).parent) + os.sep
_TIMEOUT_ERROR = re.compile(
    r"Timed out waiting \d+ ?ms|timeout caused pair closure|collective operation timeout"
)  # gloo, nccl
# of torch's comparison of collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL), which says so where a rank is late, and is gone
BARRIER = re.compile(r"failed to pass monitoredBarrier in (\d+) ms")
_LOST_PEER_ERROR = re.compile(
    r"failed to pass monitoredBarrier|"
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)|remote process exited|ncclRemoteError|"
    r"NCCL communicator was aborted|unhandled system error|failed to recv, got 0 bytes"
)
STATES = dict(T="stopped by a signal", t="stopped by a debugger", D="waits for a disk or the network", Z="has ended")


class Watchdog:
    """A rank's watchdog. `mesh`: before there are groups its world is planned, and `join` comes later. `timeout_s`: of
    the groups. `folder`: the run directory. `shared`: of `Ranks`."""

    def __init__(self, mesh: Mesh, folder: Path, timers: Timers, timeout_s: float, shared: str | None = None):
        self.mesh, self.rank, self.timeout_s = mesh, mesh.world.rank, timeout_s
        self.folder, self.timers, self.events = folder / "hang", timers, EventLog(folder, mesh.world.rank)
        self.reason, self.late_ranks = "", list[int]()  # verdict of the last round
        self._report_file = None if shared is None else Path(shared, HANG_REPORT)  # the verdict, for the launcher
        self.started = time.perf_counter()
        self._at, self._took = ("start", 0, time.monotonic()), deque[float](maxlen=50)
        self._reported_activity: object = None  # where this rank was in the last round
        self._rounds, self._is_reporter, self._met = 0, False, False
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._main, self.pace = threading.get_ident(), max(1.0, mesh.world.size / RANKS_PER_STORE)
        self._store: Any = None
        self.attach(mesh, timeout_s)
        self._thread = threading.Thread(target=self._watch, name="megalite-watchdog", daemon=True)
        self._thread.start()

    def attach(self, mesh: Mesh, timeout_s: float) -> None:
        """Watch the axes that are made by now, and the time limit of their collectives."""
        with self._lock:
            self.mesh, self.timeout_s = mesh, timeout_s
            if self._met or mesh.world.size == 1 or mesh.world.backend == ABSTRACT:
                return
            self._store, self._met, self._rounds = _own_connection(), True, 0
            self._store_set(f"who/{self.rank}", f"{socket.gethostname()} {os.getpid()}")

    @property
    def hang_reported(self) -> bool:
        """Whether a hang was reported, and there was no progress since."""
        return self._reported_activity is self._at

    def set_activity(self, doing: str, step: int) -> None:
        """Called when the main thread begins something else."""
        before, self._at = self._at, (doing, step, time.monotonic())
        took = self._at[2] - before[2]
        if before[0] == "step":
            self._took.append(took)
        if self._is_reporter and before is self._reported_activity:
            if self._report_file is not None:
                with contextlib.suppress(OSError):
                    self._report_file.unlink()
            print_err(f"{f'step {before[1]}' if before[1] else 'the start'} resumed after {took:.0f} s")

    def explain_error(self, error: BaseException) -> tuple[ExitCode, str] | None:
        """Outcome and reason where a hang or another rank caused the error; None: the error is this rank's own."""
        if isinstance(error, LaunchError):  # another rank of this machine may have reported why it is late
            first = None if self._report_file is None else read_first_failure(self._report_file.parent, HANG_REPORT)
            return first and (ExitCode.HANG, first[1].partition(": ")[2])
        if isinstance(error, CollectiveMismatchError):
            self._start_round(again=True)
            return ExitCode.CRASH, f"{error}: {self.reason}"
        if isinstance(error, RuntimeError) and (_TIMEOUT_ERROR.search(str(error)) or self._late_in_barrier(str(error))):
            self._start_round()
            self._store_set("over", json.dumps([self.reason, self.late_ranks]))
            return ExitCode.HANG, self.reason
        if (isinstance(error, KeyboardInterrupt) or is_lost_peer_error(error)) and self._store_has("over"):
            self.reason, self.late_ranks = json.loads(self._get("over"))
            return ExitCode.HANG, self.reason
        return None

    def lost(self, error: BaseException) -> str:
        """Which rank is gone, as far as is known here, and where this one missed it, after `error` said that one is."""
        said, view = _LOST_PEER_ERROR.search(str(error)), self._view()
        others, group, call = [r for r in range(self.mesh.world.size) if r != self.rank], "", ""
        if view.waiting_on is not None:
            axis, told, _ = view.waiting_on
            others = [told[1]] if told[1] >= 0 else [r for r in view.axes[axis][0] if r != self.rank]
            group, call = f" of {axis}", f": {format_call(told)} over {axis}"
        gone = self._ended(others)
        if gone:
            processes = f"process{'es' * (len(gone) > 1)} {', '.join(gone.values())}"
            who = f"{format_ranks(gone)}{group} {'has' if len(gone) == 1 else 'have'} ended ({processes})"
        else:
            who = f"{'one of ' * (len(others) > 1)}{format_ranks(others)}{group}"
        # the frames in which the error came; this thread has left them
        frames = reversed([(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)])
        place = next(self._lines(frames), view.place)
        return f"lost another rank ({said[0] if said else 'error'}): {who}; in {view.phase or view.activity}, {place}{call}"

    def _ended(self, others: Sequence[int]) -> dict[int, str]:
        """The processes of these ranks that are on this machine and have ended, or do so soon."""
        known = {rank: self._get(f"who/{rank}").partition(" ") for rank in others[:MOST_LOOKED_AT]}
        here = {rank: pid for rank, (host, _, pid) in known.items() if host == socket.gethostname()}
        end = time.monotonic() + ENDS_S
        while not (gone := {r: pid for r, pid in here.items() if _letter(pid) == "Z"}) and time.monotonic() < end:
            time.sleep(0.05)
        return gone

    def _late_in_barrier(self, text: str) -> bool:
        waited = (w[1] for axis in self.mesh.active_axes if (w := axis.comm_log.blocked_on) is not None)
        limit, now = BARRIER.search(text), time.monotonic()
        return limit is not None and now - min(waited, default=now) > 0.9 * int(limit[1]) / 1000

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self.pace * (POLL_S + ANSWER_S))

    # ---- the thread

    def _watch(self) -> None:
        while not self._closing.wait(self.pace * POLL_S):
            if (asked := self._store_has(f"{self._rounds + 1}/asked")) or (
                self._reported_activity is not self._at and self._is_late()
            ):
                self._start_round(again=asked)

    def _is_late(self) -> bool:
        doing, _, since = self._at
        now = time.monotonic()
        waited = (w[1] for axis in self.mesh.active_axes if (w := axis.comm_log.blocked_on) is not None)
        if not self._met and self.mesh.world.size > 1 and doing == "start":
            return now - since > 0.8 * self.timeout_s
        if now - min(waited, default=now) > 0.8 * self.timeout_s:
            return True
        return doing == "step" and len(self._took) >= ENOUGH and now - since > self.patience_s

    @property
    def patience_s(self) -> float:
        """How long a step may take: more than half the time-out only if steps are usually long."""
        usual, half = statistics.median(self._took), self.timeout_s / 2
        return max(min(LATE_FACTOR * usual, half), LEAST_FACTOR * usual, min(MIN_PATIENCE_S, half))

    def _start_round(self, again: bool = False) -> None:
        """`again`: also if this rank has made no progress since the last round."""
        with self._lock:
            if again or self._reported_activity is not self._at:
                self._run_round()

    def _run_round(self) -> None:
        self._rounds, self._reported_activity, self._is_reporter = self._rounds + 1, self._at, False
        n, world = self._rounds, self.mesh.world.size
        self._store_set(f"{n}/asked", "")
        mine = self._view()
        self._store_set(f"{n}/{self.rank}", json.dumps(asdict(mine)))
        dump = threading.Thread(target=self._dump, args=(mine,), daemon=True)  # the disk may be what hangs
        dump.start()
        dump.join(self.pace * ANSWER_S)
        others = [f"{n}/{r}" for r in range(world) if r != self.rank]
        end = time.monotonic() + self.pace * ANSWER_S
        while (
            self._store
            and time.monotonic() < end
            and not self._store_has(*(others if self.rank == 0 else [f"{n}/said"]))
        ):
            time.sleep(0.1 * self.pace)
        if any(self._store_has(f"{n}/{r}") for r in range(self.rank)):
            while time.monotonic() < end + self.pace * ANSWER_S and not self._store_has(f"{n}/said"):
                time.sleep(0.1 * self.pace)
        if self._store_has(f"{n}/said"):
            self.reason, self.late_ranks = json.loads(self._get(f"{n}/said"))
            return
        views = {r: RankState(**json.loads(self._get(f"{n}/{r}"))) for r in range(world) if self._store_has(f"{n}/{r}")}
        views[self.rank] = mine
        silent = {r: self._state(r) for r in range(world) if r not in views} if self._store else {}
        self.reason, self.late_ranks = diagnose(views, silent)
        if not self._met and world > 1:
            self.reason += "; the others wait for it"
        elif self._store is None and world > 1:
            who = f"this {format_ranks([self.rank])}: {mine}"
            self.reason = f"the store by which ranks met (MASTER_ADDR) does not answer; {who}"
        self._store_set(f"{n}/said", json.dumps([self.reason, self.late_ranks]))
        self._tell(views, silent)

    def _tell(self, views: dict[int, RankState], silent: dict[int, str]) -> None:
        if (
            not self._met and self._report_file is not None and self._report_file.exists()
        ):  # one report per machine is enough
            return
        self._is_reporter = True
        doing, step, since = self._at
        usual = f", usually {statistics.median(self._took):.1f} s" if doing == "step" and self._took else ""
        lines = [f"NO PROGRESS for {time.monotonic() - since:.0f} s{usual}: {self.reason}"]
        alike: dict[str, list[int]] = {}
        for rank, view in views.items():
            alike.setdefault(str(view), []).append(rank)
        lines += [f"  {format_ranks(who)}: {text}" for text, who in alike.items()]
        lines += [
            f"  {format_ranks([rank])}: no answer{f', {state}' if state else ''}" for rank, state in silent.items()
        ]
        if self._report_file is not None:
            with contextlib.suppress(OSError):
                word = {"rank": self.rank, "code": int(ExitCode.HANG), "reason": self.reason}
                write_atomically(self._report_file, json.dumps(word))
        print_err("\n".join([*lines, f"  stacks and collectives of each rank: {self.folder}"]))
        self.events.add("hang", step, reason=self.reason, late_ranks=self.late_ranks)

    def _view(self) -> RankState:
        doing, step, since = self._at
        now, waits, axes = time.monotonic(), None, {}
        for axis in self.mesh.active_axes:
            if (waiting := axis.comm_log.blocked_on) is not None:
                waits = axis.name, waiting[0].signature, now - waiting[1]
            axes[axis.name] = list(axis.ranks), [call.signature for call in list(axis.comm_log.recent)]
        return RankState(self.rank, step, doing, self.timers.phase, now - since, list(self._places()), waits, axes)

    def _places(self) -> Iterator[str]:
        """Lines of the main thread in megalite, without floors that only wait or pass something on."""
        frame = sys._current_frames().get(self._main)
        return self._lines(traceback.walk_stack(frame) if frame is not None else ())

    @staticmethod
    def _lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
        for frame, line in frames:
            path = frame.f_code.co_filename
            file = path.removeprefix(ROOT)
            if file != path and not file.startswith(("common/", "parallel/", "config/", "training/monitoring/")):
                yield f"{file}:{line} {frame.f_code.co_name}"

    def _dump(self, mine: RankState) -> None:
        path = self.folder / f"rank-{self.rank:03d}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=open_in_run_dir) as file:
                file.write(f"--- {time.strftime('%F %T')} {mine}\n")
                for axis, (members, calls) in mine.axes.items():
                    file.writelines(f"{axis} {members}: {op} {peer} {n}, {size} bytes\n" for op, peer, n, size in calls)
                file.flush()
                faulthandler.dump_traceback(file)
            if recorder := getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None):
                with open(path.with_suffix(".json"), "wb", opener=open_in_run_dir) as records:
                    records.write(recorder())
        except (OSError, RuntimeError, ValueError) as error:
            print_err(f"WARNING: {path}: {error}; this rank's stack is lost")

    def _state(self, rank: int) -> str:
        """The state of a process that does not answer, by the kernel, if it is on this machine."""
        host, _, pid = self._get(f"who/{rank}").partition(" ")
        if host != socket.gethostname():
            return f"process {pid} on {host}" if host else ""
        return f"process {pid}: {STATES.get(_letter(pid), 'neither stopped nor ended')}"

    # ---- the store; after an error it is not asked again

    def _store_set(self, key: str, text: str) -> None:
        self._try("set", key, text)

    def _store_has(self, *keys: str) -> bool:
        return bool(self._try("check", list(keys)))

    def _get(self, key: str) -> str:
        return (self._try("get", key) or b"").decode() if self._store_has(key) else ""

    def _try(self, what: str, *args: Any) -> Any:
        if self._store is None:
            return None
        try:
            return getattr(self._store, what)(*args)
        except RuntimeError:
            self._store = None
            return None


def _letter(pid: str) -> str:
    """The state of a process of this machine, as the kernel abbreviates it (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z" if sys.platform == "linux" else ""


def is_lost_peer_error(error: BaseException) -> bool:
    """Whether gloo or NCCL has raised this because another rank is gone. (Errors of stores and files are OSErrors.)"""
    return isinstance(error, RuntimeError) and _LOST_PEER_ERROR.search(str(error)) is not None


def _own_connection() -> Any:
    store: Any = distributed_c10d.PrefixStore("hang", distributed_c10d._get_default_store())
    store = store.clone()
    store.set_timeout(timedelta(seconds=STORE_S))
    return store


class Heartbeat:
    """Renews status.json every BEAT_S while a run lives, so that an old one means it is gone or hangs. A thread of rank
    0 writes it, as one batch or file may take longer, and a disk that hangs must not block the run. It pauses while the
    watchdog sees a hang. `resumes`: of `Ranks`. The status of another run, and of one that is done, stays until
    this one begins, which may be refused."""

    def __init__(self, folder: Path, run: Run, config: Config, dog: Watchdog, resumes: bool):
        self._folder, self._run, self._config, self._dog = folder, run, config, dog
        self._closing, self._writing = threading.Event(), threading.Lock()  # writers share a temporary file
        self._thread = threading.Thread(target=self._beat, name="megalite-heartbeat", daemon=True)
        if not belongs_to_another_run(folder, config, resumes) and not is_done(folder):
            self.begin()

    def begin(self) -> None:
        if self._run.mesh.world.is_first:
            self._say()
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """End the thread; the run then writes the last status."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            if not self._dog.hang_reported:
                self._say()

    def _say(self) -> None:
        state = self._run.state
        with self._writing:
            write_status(self._folder, "running", self._config, step=state.step, tokens=state.consumed_tokens)
