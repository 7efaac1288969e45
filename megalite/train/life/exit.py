"""The end of a run by an error: its exit code, the rank that reports it, and whether the process waits for others.

The first row of TABLE that fits decides, unless the watchdog knows of a hang.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from megalite.checkpoint.format.manifest import CheckpointError, ElsewhereError
from megalite.config.console import complain
from megalite.data.errors import DataError
from megalite.launch.ranks import LaunchError, Ranks
from megalite.optim.loss_scale import ScaleExhausted
from megalite.train.life.stop import AGAIN_S, STOPPING
from megalite.train.replicas import ReplicaError
from megalite.train.setup import SetupError
from megalite.train.state import BadResult, Run
from megalite.train.tell.rank_log import complain_aside, complain_of, fails_first, told_first, wait_until_told
from megalite.train.tell.run_dir import Exit
from megalite.train.watch.hang import Watchdog, lost_another

AT_ONCE = (Exit.INTERRUPTED, Exit.HANG)  # outcomes after which a process exits without waiting for others
AT_ONCE_IN_GROUP = (*AT_ONCE, Exit.CRASH, Exit.PREFLIGHT)


@dataclass(frozen=True)
class Moment:
    """When an error came. `run`: None before its parts are built. `begun`: the first step has begun; before it, the
    next start would meet the same error of a checkpoint."""

    ranks: Ranks
    run: Run | None = None
    begun: bool = False

    @property
    def where(self) -> str:
        if self.run is None:
            return f"rank {self.ranks.rank} of {self.ranks.world}"
        return f"{self.run.mesh.describe()}, step {self.run.state.step + 1}"


Tell = Callable[[Moment, Exit, BaseException], str]  # reports the error if this rank should, and returns the reason


def failure(error: BaseException, at: Moment, dog: Watchdog | None = None) -> tuple[Exit, str]:
    """The outcome and the reason of a run that an error ended; the rank that knows most reports it."""
    if dog is not None and (known := dog.explain(error)) is not None:
        complain_of(at.ranks, *known, f"{at.where}: {known[0].outcome}: {known[1]}")
        return known
    code, tell = next(
        (code, tell) for errors, when, code, tell in TABLE if isinstance(error, errors) and when(at, error)
    )
    return code, tell(at, code, error)


def leave_at_once(code: Exit, in_group: bool) -> None:
    """Exit after some outcomes. `in_group`: a collective may never end, so ranks do not wait for each other."""
    if in_group and code in AT_ONCE_IN_GROUP:
        sys.stdout.flush()
    if code in (AT_ONCE_IN_GROUP if in_group else AT_ONCE):
        os._exit(int(code))


def _each_line(at: Moment, code: Exit, error: BaseException) -> str:
    """Reported by the rank that it is about, else by one rank of each machine, where all have the same error."""
    teller = getattr(error, "local_rank", 0)
    if fails_first(at.ranks, code, str(error)) if teller is None else at.ranks.local_rank == teller:
        for line in str(error).splitlines():
            complain(f"pretrain_gpt.py: {line}")
    return str(error)


def _told_at_the_end(at: Moment, code: Exit, error: BaseException) -> str:
    """One Ctrl-C gives a rank two signals, the terminal's and the launcher's; from now on a later one kills."""
    since = time.monotonic()
    leave = lambda *_: os._exit(int(code)) if time.monotonic() > since + AGAIN_S else None  # noqa: E731
    for number in STOPPING:
        signal.signal(number, leave)
    return str(error) or "SIGINT"


def _by(knows: Callable[[Moment, BaseException], bool]) -> Tell:
    def tell(at: Moment, code: Exit, error: BaseException) -> str:
        if knows(at, error):
            complain_of(at.ranks, code, str(error), f"pretrain_gpt.py: {error}")
        return str(error)

    return tell


def _says_why(at: Moment, error: BaseException) -> bool:
    """All ranks but those that heard of it from another, which reports it first: their exit would end that one."""
    return not isinstance(error, ElsewhereError) or not wait_until_told(at.ranks)


def _reads(at: Moment, _: BaseException) -> bool:
    """One rank of each dp position, whose ranks read the same samples."""
    return at.run is not None and at.run.mesh.pp.is_first and at.run.mesh.tp.is_first


def _by_who_was_lost(at: Moment, code: Exit, error: BaseException) -> str:
    """The lost rank, or its launcher, reports why."""
    reason = f"lost another rank ({str(error).splitlines()[0]})"
    (complain if at.ranks.rank == 0 else complain_aside)(f"{at.where}: {reason}")
    return told_first(at.ranks) or reason


def _with_traceback(at: Moment, code: Exit, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    text = "".join(traceback.format_exception(error)).rstrip()
    complain_of(at.ranks, code, reason, f"{at.where}:\n{text}")
    return reason


Errors = type[BaseException] | tuple[type[BaseException], ...]
When = Callable[[Moment, BaseException], bool]
_always: When = lambda at, error: True  # noqa: E731
_no_parts: When = lambda at, error: at.run is None  # noqa: E731

TABLE: tuple[tuple[Errors, When, Exit, Tell], ...] = (
    (SetupError, _no_parts, Exit.USAGE, _each_line),
    ((LaunchError, DataError), _no_parts, Exit.PREFLIGHT, _each_line),
    (KeyboardInterrupt, _always, Exit.INTERRUPTED, _told_at_the_end),
    ((ReplicaError, BadResult, ScaleExhausted), _always, Exit.BAD_RESULT, _by(lambda at, _: at.ranks.rank == 0)),
    (CheckpointError, lambda at, _: not at.begun, Exit.PREFLIGHT, _by(_says_why)),
    (CheckpointError, _always, Exit.CRASH, _by(_says_why)),
    (DataError, _always, Exit.PREFLIGHT, _by(_reads)),
    (RuntimeError, lambda _, error: lost_another(error), Exit.CRASH, _by_who_was_lost),
    (BaseException, _always, Exit.CRASH, _with_traceback),
)
