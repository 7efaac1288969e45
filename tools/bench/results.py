"""The rows of a benchmark: what each is, how its runs ended, and the file from which an interrupted one goes on.

A row is a contender under one combination of flags. How it stands:

    ok               `runs` has what was measured, once per turn
    refused          the flags contradict each other, or the layout does not fit the ranks; nothing was started
    out of memory    of the machine, of the card, or of --memory-gib
    out of time      of --timeout; measured again with more of it
    failed           anything else; measured again by the next call
    waiting          not yet
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.options import ConfigError
from megalite.config.text_file import read_small_text
from tools.cli_common import write_json
from tools.sweep import lists_of, words_of

OK, REFUSED, WAITING = "ok", "refused", "waiting"
NO_MEMORY, NO_TIME, FAILED = "out of memory", "out of time", "failed"
MEMORY_WORDS = re.compile(r"out of memory|MemoryError|allocate memory|bad_alloc|ENOMEM", re.IGNORECASE)
KILLED = re.compile(r"exit code (-9|137)\b|signal SIGKILL")  # by the kernel: nobody else kills a rank here
SAME = ("flags", "steps", "warmup", "memory_gib", "machine", "torch")  # or figures cannot stand in one table

SHORT = {  # in tables and pictures
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
class Row:
    """`values`: what varies, by flag without dashes. `environment`: beside the usual one. `reason`: why it is not ok.
    `seconds`: what the run had that was out of time."""

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
        words = {name: value.partition(" ")[0] for name, value in self.values.items()}
        return ", ".join(f"{SHORT.get(name, name)} {value}" for name, value in words.items()) or "as given"

    @property
    def identity(self) -> tuple[object, ...]:
        return self.contender, tuple(self.flags), self.nproc, tuple(sorted(self.environment.items()))

    def wants(self, turn: int) -> bool:
        """Whether the run of this turn, from 0 on, is to be made."""
        return self.status in (OK, WAITING) and len(self.runs) <= turn

    def take(self, result: dict[str, Any], seconds: float) -> None:
        """Record the result of a run that had `seconds` at most."""
        if "error" not in result:
            self.runs.append(result)
            self.status, self.reason = OK, ""
            return
        self.status, self.reason, self.seconds = kind_of(result), result["error"], seconds


def kind_of(result: dict[str, Any]) -> str:
    """The status of a run that has an "error".

    >>> kind_of({"error": "", "stderr": "torch.OutOfMemoryError: CUDA out of memory.", "status": "failed"})
    'out of memory'
    """
    if result.get("status") == NO_TIME:
        return NO_TIME
    text = f"{result['stderr']}\n{result.get('status', '')}"
    return NO_MEMORY if MEMORY_WORDS.search(text) or KILLED.search(text) else FAILED


def combinations_of(sweeps: Sequence[str], nprocs: Sequence[int]) -> Iterator[tuple[dict[str, str], list[str], int]]:
    """(what varies, flags of it, ranks) of each combination, in the order of the lists. `sweeps`: as
    "micro-batch-size=1,2", - or _ between words. Raises ConfigError."""
    lists = lists_of([f"--{name.replace('_', '-')}={values}" for name, _, values in (s.partition("=") for s in sweeps)])
    for nproc, values in itertools.product(nprocs, itertools.product(*lists.values())):
        pairs = list(zip(lists, values, strict=True))
        varied = {"ranks": str(nproc)} if len(nprocs) > 1 else {}
        varied |= {flag[2:]: value for flag, value in pairs}
        yield varied, [word for flag, value in pairs for word in words_of(flag, value)], nproc


@dataclass
class Table:
    """All rows of a benchmark, in `file` if there is one. `facts`: of the whole, SAME among them."""

    facts: dict[str, Any]
    rows: list[Row]
    file: Path | None = None

    def resume(self, timeout: float) -> int:
        """Take over what the file has of these rows, and keep its other rows; how many rows are done already. Raises
        ConfigError where its figures cannot stand beside these."""
        if self.file is None or not self.file.is_file():
            return 0
        try:
            saved = json.loads(read_small_text(self.file, "another --out"))
            before = {row.identity: row for row in (Row(**row) for row in saved["rows"])}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError([f"{self.file} is damaged ({error}); give another --out"]) from None
        other = [name for name in SAME if saved.get(name) != self.facts.get(name)]
        if other:
            text = f"{', '.join(other)} of the figures in {self.file}"
            raise ConfigError([f"another {text}; give another --out, or what was given before"])
        mine = {row.identity for row in self.rows}
        for n, row in enumerate(self.rows):
            known = before.get(row.identity)
            if known is None or row.status == REFUSED or known.status == REFUSED:
                continue
            if known.status == FAILED or (known.status == NO_TIME and timeout > known.seconds):
                known.status = OK if known.runs else WAITING
            self.rows[n] = known
        done = sum(row.status not in (WAITING, REFUSED) for row in self.rows)
        self.rows += [row for identity, row in before.items() if identity not in mine]
        return done

    def save(self, complete: bool) -> None:
        if self.file is not None:
            write_json(self.file, self.facts | {"rows": [asdict(row) for row in self.rows], "complete": complete})


def read(file: Path) -> Table:
    """Read a benchmark's results. Raises ValueError where it cannot be read, or is not of a benchmark."""
    try:
        content = json.loads(read_small_text(file, "what tools/benchmark.py had as --out"))
        return Table(content, [Row(**row) for row in content.pop("rows")], file)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a benchmark ({error}); make one with tools/benchmark.py") from None
