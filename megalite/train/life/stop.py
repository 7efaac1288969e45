"""What asks a run to stop: signals as launchers, schedulers and terminals send them, from the first moment on.

Until `install`, which the program calls as soon as it knows its options, signals wait (`hold`): one that comes while
torch is imported is not lost. Imports no torch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from megalite.config.options import Config
from megalite.parallel.local_ranks import AT_ONCE, FORWARDED, HELD, tell_stopping

# what ends a job: schedulers and systemd, Ctrl-C, SLURM's warning before the time limit, a terminal that is closed,
# the warning before a limit of processor time
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
AGAIN_S = 1.0  # of one Ctrl-C a rank gets two, the terminal's and the launcher's; a second one that means it is later


class Stopped(KeyboardInterrupt):
    """The run ends here and now; `args[0]` is the signal's name."""


def hold() -> None:
    """Signals but SIGINT, which is KeyboardInterrupt now, wait until `StopSignal.install`; what this process starts
    inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [n for n in FORWARDED if n != signal.SIGINT])


class StopSignal:
    """`seen`: signals that asked to stop, read at step boundaries and during evaluations, where all ranks agree on it.

    final  the run has stopped, and no rank had a signal: nobody is to start it again at once
    begun  there is something to save: before, SIGINT stops at once, by `Stopped`
    saves  there is a checkpoint to write, so the first signal only asks; a later SIGINT stops at once, and SIGQUIT
           always does. Without one there is nothing to wait for: every signal stops at once.
    tells  no launcher does
    """

    def __init__(self, saves: bool = True, more: Sequence[str] = (), tells: bool = False):
        """`more`: names of signals that count, too."""
        self.saves, self.more, self.tells, self.begun = saves, more, tells, False
        self.seen: list[str] = []
        self.final = False
        self._first = 0.0

    def install(self) -> None:
        """Only in the main thread. A signal that whoever started this ignores, as nohup does, stays ignored."""
        for number in {*STOPPING, *AT_ONCE, *(signal.Signals[name] for name in self.more)}:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)

    def _note(self, number: int, _frame: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        again = name in self.seen and now > self._first + AGAIN_S
        if not self.seen:
            self._first = now
        self.seen.append(name)
        if self.tells:
            tell_stopping(number)
        if not self.saves or number in AT_ONCE or (number == signal.SIGINT and (again or not self.begun)):
            raise Stopped(name)


def stop_signal(config: Config, tells: bool = False) -> StopSignal:
    """Of a run with these options."""
    t = config.train
    saves = config.checkpoint.save is not None or t.exit_signal_handler or t.exit_signal is not None
    return StopSignal(saves, [t.exit_signal] if t.exit_signal else [], tells)
