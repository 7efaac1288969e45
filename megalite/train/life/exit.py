"""The end of a run by an error: its exit code, the rank that reports it, and whether the process waits for others.

`failure` says what every error means.
"""

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass

from megalite.checkpoint.storage.location import CheckpointError, ElsewhereError
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


def failure(error: BaseException, at: Moment, dog: Watchdog | None = None) -> tuple[Exit, str]:
    """The outcome and the reason of a run that an error ended; the rank that knows most reports it."""
    if dog is not None and (known := dog.explain(error)) is not None:
        complain_of(at.ranks, *known, f"{at.where}: {known[0].outcome}: {known[1]}")
        return known
    mesh, reason = at.run and at.run.mesh, str(error)
    match error:
        case SetupError() | LaunchError() | DataError() if mesh is None:
            code = Exit.USAGE if isinstance(error, SetupError) else Exit.PREFLIGHT
            teller = getattr(error, "local_rank", 0)
            # on the rank that it is about, else on one rank of each machine, where all have the same error
            if fails_first(at.ranks, code, reason) if teller is None else at.ranks.local_rank == teller:
                for line in reason.splitlines():
                    complain(f"pretrain_gpt.py: {line}")
            return code, reason
        case KeyboardInterrupt():  # one Ctrl-C gives a rank two signals, the terminal's and the launcher's
            since = time.monotonic()
            leave = lambda *_: os._exit(Exit.INTERRUPTED) if time.monotonic() > since + AGAIN_S else None  # noqa: E731
            for number in STOPPING:
                signal.signal(number, leave)  # from now on a later one kills
            return Exit.INTERRUPTED, reason or "SIGINT"
        case ReplicaError() | BadResult() | ScaleExhausted():
            code, tells = Exit.BAD_RESULT, at.ranks.rank == 0
        case CheckpointError():
            code = Exit.CRASH if at.begun else Exit.PREFLIGHT
            # not those that heard of it from another, which reports it first: their exit would end that one
            tells = not isinstance(error, ElsewhereError) or not wait_until_told(at.ranks)
        case DataError():  # one rank of each dp position, whose ranks read the same samples
            code, tells = Exit.PREFLIGHT, mesh is not None and mesh.pp.is_first and mesh.tp.is_first
        case RuntimeError() if lost_another(error):  # the lost rank, or its launcher, reports why
            reason = f"lost another rank ({reason.splitlines()[0]})"
            (complain if at.ranks.rank == 0 else complain_aside)(f"{at.where}: {reason}")
            return Exit.CRASH, told_first(at.ranks) or reason
        case _:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            text = "".join(traceback.format_exception(error)).rstrip()
            complain_of(at.ranks, Exit.CRASH, reason, f"{at.where}:\n{text}")
            return Exit.CRASH, reason
    if tells:
        complain_of(at.ranks, code, reason, f"pretrain_gpt.py: {reason}")
    return code, reason


def leave_at_once(code: Exit, in_group: bool) -> None:
    """Exit after some outcomes. `in_group`: a collective may never end, so ranks do not wait for each other."""
    if in_group and code in AT_ONCE_IN_GROUP:
        sys.stdout.flush()
    if code in (AT_ONCE_IN_GROUP if in_group else AT_ONCE):
        os._exit(int(code))
