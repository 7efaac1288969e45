"""The results of a benchmark, and the file from which an interrupted benchmark resumes.

A result is one system under one combination of flags. Its status is one of:

    ok               `runs` holds the measurements, one for each repeat
    refused          the flags contradict each other, or the layout does not fit the ranks; no run was started
    out of memory    of the machine, of the GPU, or of --memory-gib
    out of time      of --timeout; measured again if the timeout is longer
    failed           any other error; measured again by the next call
    waiting          not measured yet
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalite.common.text_file import read_small_text
from megalite.config.options import ConfigError
from tools.cli_common import write_json
from tools.sweep import flag_args, parse_sweeps

OK, REFUSED, WAITING = "ok", "refused", "waiting"
NO_MEMORY, NO_TIME, FAILED = "out of memory", "out of time", "failed"
MEMORY_ERRORS = re.compile(r"out of memory|MemoryError|allocate memory|bad_alloc|ENOMEM", re.IGNORECASE)
KILLED = re.compile(r"exit code (-9|137)\b|signal SIGKILL")  # by the kernel, because nothing else here kills a rank
COMPARABLE = ("flags", "steps", "warmup", "memory_gib", "machine", "torch")  # the same for all results of a file

SHORT_NAMES = {  # in tables and pictures
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "micro-batch-size": "micro-batch",
    "global-batch-size": "batch",
    "seq-length": "sequence",
    "recompute-granularity": "recompute",
}


@dataclass
class BenchResult:
    """The measurements of one system under one combination of flags.

    Attributes:
        values: the varied flags, without dashes, and their values.
        contender: the name of the system.
        flags: all flags of the run.
        nproc: the number of ranks.
        environment: additional environment variables.
        status: one of the constants above.
        reason: the error, if the status is not OK.
        seconds: the time limit of the last run that failed.
        runs: what systems.measure returned for each repeat.
    """

    values: dict[str, str]
    contender: str
    flags: list[str]
    nproc: int
    environment: dict[str, str] = field(default_factory=dict)
    status: str = WAITING
    reason: str = ""
    seconds: float = 0.0
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the combination in tables and pictures."""
        pairs = [(name, value.partition(" ")[0]) for name, value in self.values.items()]
        return ", ".join(f"{SHORT_NAMES.get(name, name)} {value}" for name, value in pairs) or "as given"

    @property
    def identity(self) -> tuple[object, ...]:
        """The key by which a resumed benchmark finds this result."""
        return self.contender, tuple(self.flags), self.nproc, tuple(sorted(self.environment.items()))

    def needs_run(self, repeat: int) -> bool:
        """Return True if the run of this repeat, counted from 0, is still to be made."""
        return self.status in (OK, WAITING) and len(self.runs) <= repeat

    def record(self, measurement: dict[str, Any], seconds: float) -> None:
        """Add the measurement, or the error, of a run with a limit of `seconds`."""
        if "error" not in measurement:
            self.runs.append(measurement)
            self.status, self.reason = OK, ""
            return
        self.status = failure_status(measurement)
        self.reason = measurement["error"]
        self.seconds = seconds


def failure_status(measurement: dict[str, Any]) -> str:
    """Return the status of a run that ended with an error.

    >>> failure_status({"error": "", "stderr": "torch.OutOfMemoryError: CUDA out of memory.", "status": "failed"})
    'out of memory'
    """
    if measurement.get("status") == NO_TIME:
        return NO_TIME
    text = f"{measurement['stderr']}\n{measurement.get('status', '')}"
    return NO_MEMORY if MEMORY_ERRORS.search(text) or KILLED.search(text) else FAILED


def combinations_of(sweeps: Sequence[str], nprocs: Sequence[int]) -> Iterator[tuple[dict[str, str], list[str], int]]:
    """Yield every combination of flags and numbers of ranks, in the order of the lists.

    Args:
        sweeps: lists such as "micro-batch-size=1,2"; the name may also be written with underscores.
        nprocs: the numbers of ranks.

    Yields:
        The varied values by name, the flags, and the number of ranks.

    Raises:
        ConfigError: If a list cannot be parsed, or a flag is given twice.
    """
    flags = []
    for sweep in sweeps:
        name, _, values = sweep.partition("=")
        flags.append(f"--{name.replace('_', '-')}={values}")
    lists = parse_sweeps(flags)
    for nproc, values in itertools.product(nprocs, itertools.product(*lists.values())):
        pairs = list(zip(lists, values, strict=True))
        varied = {"ranks": str(nproc)} if len(nprocs) > 1 else {}
        varied |= {flag[2:]: value for flag, value in pairs}
        yield varied, [arg for flag, value in pairs for arg in flag_args(flag, value)], nproc


@dataclass
class ResultsFile:
    """All results of a benchmark, stored in `file` if there is one.

    Attributes:
        facts: what holds for all results; includes COMPARABLE.
    """

    facts: dict[str, Any]
    rows: list[BenchResult]
    file: Path | None = None

    def resume(self, timeout: float) -> int:
        """Take the results that the file already has, and keep those of other combinations.

        Returns:
            The number of results that are complete.

        Raises:
            ConfigError: If the file is damaged, or its results are not comparable with these.
        """
        if self.file is None or not self.file.is_file():
            return 0
        try:
            saved = json.loads(read_small_text(self.file, "another --out"))
            previous = {row.identity: row for row in (BenchResult(**row) for row in saved["rows"])}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError([f"{self.file} is damaged ({error}); give another --out"]) from None
        different = [name for name in COMPARABLE if saved.get(name) != self.facts.get(name)]
        if different:
            text = f"{', '.join(different)} of the figures in {self.file}"
            raise ConfigError([f"another {text}; give another --out, or what was given before"])
        current = {row.identity for row in self.rows}
        for n, row in enumerate(self.rows):
            known = previous.get(row.identity)
            if known is None or row.status == REFUSED or known.status == REFUSED:
                continue
            if known.status == FAILED or (known.status == NO_TIME and timeout > known.seconds):
                known.status = OK if known.runs else WAITING
            self.rows[n] = known
        num_complete = sum(row.status not in (WAITING, REFUSED) for row in self.rows)
        self.rows += [row for identity, row in previous.items() if identity not in current]
        return num_complete

    def save(self, complete: bool) -> None:
        """Write the file, if there is one. `complete` is False while runs are still to be made."""
        if self.file is not None:
            write_json(self.file, self.facts | {"rows": [asdict(row) for row in self.rows], "complete": complete})


def read(file: Path) -> ResultsFile:
    """Read a benchmark's results. Raises ValueError if the file cannot be parsed or is not a benchmark's."""
    try:
        content = json.loads(read_small_text(file, "what tools/benchmark.py had as --out"))
        return ResultsFile(content, [BenchResult(**row) for row in content.pop("rows")], file)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a benchmark ({error}); make one with tools/benchmark.py") from None
