"""Signals that ask a run to stop, from launchers, schedulers and terminals.

Signals are blocked (`block_signals`) until the handler is installed, so that none is lost while torch is imported. This
module does not import torch.
"""

import signal
import time
from collections.abc import Sequence

from megalite.launch.local_launcher import BLOCKED_SIGNALS, FORWARDED_SIGNALS, KILL_SIGNALS, print_stopping

# In this order: schedulers and systemd, Ctrl-C, SLURM before its time limit, a closed terminal, a limit of CPU time.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
# One Ctrl-C gives a rank two signals, from the terminal and from the launcher; a second Ctrl-C comes later than this.
DOUBLE_SIGNAL_S = 1.0


class StopImmediately(KeyboardInterrupt):
    """A signal that ends the run without another step; `args[0]` is its name."""


def block_signals() -> None:
    """Block signals until `StopSignalHandler.install`, in child processes too.

    SIGINT is not blocked; it raises KeyboardInterrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [n for n in FORWARDED_SIGNALS if n != signal.SIGINT])


class StopSignalHandler:
    """The handler of signals that ask the run to stop.

    If the run saves checkpoints, the first signal asks it to stop after the current step. A SIGINT stops it immediately
    if it is repeated or comes before the first step, and so does any SIGQUIT. Without checkpoints every signal stops it
    immediately. The handler then raises StopImmediately.

    Attributes:
        saves: The run saves checkpoints.
        extra_signals: Names of further stop signals.
        prints: This process reports signals, because it has no launcher that does.
        received: Names of the received signals; ranks agree on them between steps and during evaluations.
        training_started: The first step has started.
        is_final: The run has stopped although no rank had a signal, so the launcher must not restart it.
    """

    def __init__(self, saves: bool = True, extra_signals: Sequence[str] = (), prints: bool = False):
        self.saves = saves
        self.extra_signals = extra_signals
        self.prints = prints
        self.received: list[str] = []
        self.training_started = False
        self.is_final = False
        self._first_received = 0.0  # time of the first signal

    def install(self) -> None:
        """Install the handler and unblock the signals; only possible in the main thread.

        A signal that the parent process ignores, as under nohup, remains ignored.
        """
        for number in {*STOP_SIGNALS, *KILL_SIGNALS, *(signal.Signals[name] for name in self.extra_signals)}:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)

    def _on_signal(self, number: int, _frame: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        is_repeated = name in self.received and now > self._first_received + DOUBLE_SIGNAL_S
        if not self.received:
            self._first_received = now
        self.received.append(name)
        if self.prints:
            print_stopping(number)
        stops_on_sigint = number == signal.SIGINT and (is_repeated or not self.training_started)
        if not self.saves or number in KILL_SIGNALS or stops_on_sigint:
            raise StopImmediately(name)
