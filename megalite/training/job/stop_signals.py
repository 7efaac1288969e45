"""Signals that ask a run to stop, as launchers, schedulers and terminals send them.

Until `install` signals are held (`hold`), so that none is lost while torch is imported. Imports no torch.
"""

import signal
import time
from collections.abc import Sequence

from megalite.launch.local_launcher import BLOCKED_SIGNALS, FORWARDED_SIGNALS, KILL_SIGNALS, print_stopping

# from schedulers and systemd, Ctrl-C, SLURM before its time limit, a closed terminal, a limit of processor time
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
DOUBLE_SIGNAL_S = (
    1.0  # one Ctrl-C gives a rank two signals, the terminal's and the launcher's; a second Ctrl-C comes later
)


class StopImmediately(KeyboardInterrupt):
    """The run ends here and now; `args[0]` is the signal's name."""


def block_signals() -> None:
    """Hold signals until `StopSignal.install`, in child processes too, but SIGINT, which raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [n for n in FORWARDED_SIGNALS if n != signal.SIGINT])


class StopSignalHandler:
    """Signals that ask to stop. `saves`: the run writes checkpoints, so the first only asks; a later SIGINT, and any
    SIGQUIT, stops at once. Without checkpoints every signal does. `more`: names of further signals. `tells`: this
    process reports a signal, as no launcher does."""

    def __init__(self, saves: bool = True, more: Sequence[str] = (), prints: bool = False):
        self.saves, self.more, self.prints, self._first = saves, more, prints, 0.0
        self.received: list[str] = []  # ranks agree on them between steps and during evaluations
        self.training_started = False  # the first step has begun: before, SIGINT stops at once, by raising `Stopped`
        self.is_final = False  # it has stopped though no rank had a signal: no launcher is to start it again at once

    def install(self) -> None:
        """Only in the main thread. A signal that the parent process ignores, as nohup does, stays ignored."""
        for number in {*STOP_SIGNALS, *KILL_SIGNALS, *(signal.Signals[name] for name in self.more)}:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)

    def _on_signal(self, number: int, _frame: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        again = name in self.received and now > self._first + DOUBLE_SIGNAL_S
        if not self.received:
            self._first = now
        self.received.append(name)
        if self.prints:
            print_stopping(number)
        if (
            not self.saves
            or number in KILL_SIGNALS
            or (number == signal.SIGINT and (again or not self.training_started))
        ):
            raise StopImmediately(name)
