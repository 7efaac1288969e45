"""The diagnosis of a hang: find the late ranks and the likely cause from the states of all ranks.

Pure functions; watchdog.py collects the states and reports the verdict.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallRecord:
    """A collective, or one end of a message; the fields are those of `parallel.mesh.CommRecord`."""

    op: str
    peer: int
    seq_id: int
    num_bytes: int

    def __str__(self) -> str:
        if self.peer < 0:
            return f"{self.op} {self.seq_id}"
        return f"message {self.seq_id} ({self.op} rank {self.peer})"


@dataclass(frozen=True)
class Wait:
    """A wait of the main thread for a collective or message over `axis`."""

    axis: str
    call: CallRecord
    seconds: float


@dataclass(frozen=True)
class AxisCalls:
    """The global ranks of an axis, and the collectives and messages that one of them has started last."""

    ranks: list[int]
    calls: list[CallRecord]


@dataclass(frozen=True)
class Verdict:
    """The likely cause of a hang, in one line, and the ranks that are late."""

    reason: str
    late_ranks: list[int]


@dataclass(frozen=True)
class RankState:
    """A rank's state during a hang; `asdict` turns it into JSON types, and `from_json` is the inverse."""

    rank: int
    step: int
    activity: str  # step, evaluate, ...
    phase: str  # name of the timer that runs within the activity, or ""
    seconds: float  # since the activity started
    stack: list[str]  # lines of the main thread in megalite, the innermost first
    wait: Wait | None  # None if the rank is not blocked in a call
    axes: dict[str, AxisCalls]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankState":
        """Return the state whose `asdict` gave `values`."""
        wait = values["wait"]
        axes = {
            name: AxisCalls(axis["ranks"], [CallRecord(**call) for call in axis["calls"]])
            for name, axis in values["axes"].items()
        }
        return cls(
            rank=values["rank"],
            step=values["step"],
            activity=values["activity"],
            phase=values["phase"],
            seconds=values["seconds"],
            stack=values["stack"],
            wait=None if wait is None else Wait(wait["axis"], CallRecord(**wait["call"]), wait["seconds"]),
            axes=axes,
        )

    @property
    def location(self) -> str:
        """The innermost line in megalite."""
        return self.stack[0] if self.stack else "outside megalite"

    @property
    def likely_cause(self) -> str | None:
        """The likely cause if the rank loads data or writes a checkpoint, else None."""
        packages = {line.partition("/")[0] for line in self.stack} | {self.phase}
        if packages & {"data", "batch-generator"}:
            return "a data stall: slow storage, or a slow preparation of samples"
        return "a slow checkpoint" if packages & {"checkpoint", "save-checkpoint"} else None

    def __str__(self) -> str:
        position = f"{f'step {self.step}, ' if self.step else ''}{self.phase or self.activity}, {self.location}"
        if self.wait is None:
            return position
        call = self.wait.call
        return f"{position}: waits {self.wait.seconds:.0f} s for {call} over {self.wait.axis}, {call.num_bytes:,} bytes"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ranges.

    >>> format_ranks([0, 1, 2, 5]), format_ranks([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    ranges: list[list[int]] = []  # first and last
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    is_single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"{'rank' if is_single else 'ranks'} {text}"


def diagnose(states: Mapping[int, RankState], silent: Mapping[int, str]) -> Verdict:
    """Find the likely cause of a hang and the late ranks.

    Args:
        states: The states of the ranks that responded.
        silent: Descriptions of the processes of the other ranks.
    """
    waiting = sorted((state for state in states.values() if state.wait), key=lambda state: state.rank)
    example = f"; {format_ranks([waiting[0].rank])} in {waiting[0]}" if waiting else ""
    if silent:
        processes = "; ".join(sorted({text for text in silent.values() if text}))
        answers = "answers" if len(silent) == 1 else "answer"
        details = f" ({processes})" if processes else ""
        return Verdict(f"{format_ranks(silent)} no longer {answers}{details}{example}", sorted(silent))
    if mismatch := _find_mismatch(states):
        return mismatch
    busy = [state for state in states.values() if not state.wait]
    if not busy:
        last = min(waiting, key=lambda state: (state.step, state.wait and state.wait.call.seq_id, state.rank))
        return Verdict(f"every rank waits for another: {format_ranks([last.rank])} in {last}{example}", [last.rank])
    first = min(busy, key=lambda state: (state.likely_cause is None, state.step, state.rank))
    late = sorted(
        state.rank for state in busy if (state.location, state.likely_cause) == (first.location, first.likely_cause)
    )
    cause = f" ({first.likely_cause})" if first.likely_cause else ""
    return Verdict(f"{format_ranks(late)} in {first}{cause}{example}", late)


def _find_mismatch(states: Mapping[int, RankState]) -> Verdict | None:
    """Find collectives with the same number that differ within a group, or a message whose two ends differ.

    The late ranks are the smallest set of ranks that agree. Returns None if nothing differs.
    """
    # (axis, ranks, both ends of a message, number) -> rank -> call
    calls_by_key: dict[tuple[object, ...], dict[int, CallRecord]] = defaultdict(dict)
    for state in states.values():
        for axis_name, axis in state.axes.items():
            for call in axis.calls:
                ends: tuple[int, ...] = ()
                if call.peer >= 0:
                    ends = (state.rank, call.peer) if call.op.startswith("send") else (call.peer, state.rank)
                calls_by_key[axis_name, tuple(axis.ranks), *ends, call.seq_id][state.rank] = call
    by_number = sorted(calls_by_key.items(), key=lambda item: item[0][-1])  # type: ignore[arg-type, return-value]
    for (axis_name, *_), calls_by_rank in by_number:
        ranks_by_kind = defaultdict(list)
        for rank, call in calls_by_rank.items():
            ranks_by_kind["message" if call.peer >= 0 else call.op, call.num_bytes].append(rank)
        if len(ranks_by_kind) > 1:
            problem = "sizes differ" if len({op for op, _ in ranks_by_kind}) == 1 else "the order differs"
            kinds = "; ".join(
                f"{format_ranks(ranks)} {calls_by_rank[ranks[0]]} of {size:,} bytes"
                for (_, size), ranks in ranks_by_kind.items()
            )
            minority = min(ranks_by_kind.values(), key=len)
            return Verdict(f"on {axis_name} {problem}: {kinds}: all ranks must run the same program", minority)
    return None
