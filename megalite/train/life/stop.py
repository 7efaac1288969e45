"""Signals that ask a run to stop, as launchers, schedulers and terminals send them.

Until `install` signals are held (`hold`), so that none is lost while torch is imported. Imports no torch.
"""

import signal
import time
from collections.abc import Sequence

from megalite.launch.local_ranks import AT_ONCE, FORWARDED, HELD, tell_stopping

# from schedulers and systemd, Ctrl-C, SLURM before its time limit, a closed terminal, a limit of processor time
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
AGAIN_S = 1.0  # one Ctrl-C gives a rank two signals, the terminal's and the launcher's; a second Ctrl-C comes later


class Stopped(KeyboardInterrupt):
    """The run ends here and now; `args[0]` is the signal's name."""


def hold() -> None:
    """Hold signals until `StopSignal.install`, in child processes too, but SIGINT, which raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [n for n in FORWARDED if n != signal.SIGINT])


class StopSignal:
    """Signals that ask to stop. `saves`: the run writes checkpoints, so the first only asks; a later SIGINT, and any
    SIGQUIT, stops at once. Without checkpoints every signal does. `more`: names of further signals. `tells`: this
    process reports a signal, as no launcher does."""

    def __init__(self, saves: bool = True, more: Sequence[str] = (), tells: bool = False):
        self.saves, self.more, self.tells, self._first = saves, more, tells, 0.0
        self.seen: list[str] = []  # ranks agree on them between steps and during evaluations
        self.begun = False  # the first step has begun: before, SIGINT stops at once, by raising `Stopped`
        self.final = False  # it has stopped though no rank had a signal: no launcher is to start it again at once

    def install(self) -> None:
        """Only in the main thread. A signal that the parent process ignores, as nohup does, stays ignored."""
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
