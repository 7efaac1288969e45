"""Exit codes of `pretrain_gpt.py` and of the programs in `tools`."""

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a run; its name in lower case is `outcome` in status.json.

    The programs in `tools` use DONE, CRASH, USAGE, PREFLIGHT and INTERRUPTED with the same meaning.
    """

    DONE = 0
    CRASH = 1
    USAGE = 2  # an argument or option is wrong
    PREFLIGHT = 3  # a file, a package or a device that the run needs is missing
    RERUN = 16  # a rerun on another node is needed; the checkpoint is complete
    BAD_RESULT = 17  # the same wrong result twice
    HANG = 70
    REQUEUE = 75  # a stop was requested; the checkpoint is complete
    INTERRUPTED = 130  # 128 + SIGINT

    @property
    def outcome(self) -> str:
        """The outcome in status.json."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class RunResult:
    """The end of a run, as one rank knows it."""

    exit_code: ExitCode
    reason: str = ""
