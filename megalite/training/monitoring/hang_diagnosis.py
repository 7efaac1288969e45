"""The diagnosis of a hang: find the late ranks and the likely cause from the states of all ranks.

Pure functions; watchdog.py collects the states and reports the verdict.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CallRecord = tuple[str, int, int, int]  # a collective or message: name, rank of the peer or -1, number, bytes


@dataclass(frozen=True)
class RankState:
    """A rank's state during a hang; all values are JSON types."""

    rank: int
    step: int
    activity: str  # step, evaluate, ...
    phase: str  # name of the timer that runs within the activity, or ""
    seconds: float  # since the activity started
    stack: list[str]  # lines of the main thread in megalite, the innermost first
    waiting_on: tuple[str, CallRecord, float] | None  # axis, collective and seconds, if the rank is blocked in one
    axes: dict[str, tuple[list[int], list[CallRecord]]]  # axis -> its ranks and the collectives that were started last

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
        if self.waiting_on is None:
            return position
        axis, call, seconds = self.waiting_on
        return f"{position}: waits {seconds:.0f} s for {format_call(call)} over {axis}, {call[3]:,} bytes"


def format_call(call: CallRecord) -> str:
    """Format a collective or message with its number."""
    op, peer, number, _ = call
    return f"{op} {number}" if peer < 0 else f"message {number} ({op} rank {peer})"


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


def diagnose(states: Mapping[int, RankState], silent: Mapping[int, str]) -> tuple[str, list[int]]:
    """Return (the likely cause in one line, the late ranks).

    Args:
        states: The states of the ranks that responded.
        silent: Descriptions of the processes of the other ranks.
    """
    waiting = sorted((state for state in states.values() if state.waiting_on), key=lambda state: state.rank)
    example = f"; {format_ranks([waiting[0].rank])} in {waiting[0]}" if waiting else ""
    if silent:
        processes = "; ".join(sorted({text for text in silent.values() if text}))
        answers = "answers" if len(silent) == 1 else "answer"
        details = f" ({processes})" if processes else ""
        return f"{format_ranks(silent)} no longer {answers}{details}{example}", sorted(silent)
    if mismatch := _find_mismatch(states):
        return mismatch
    busy = [state for state in states.values() if not state.waiting_on]
    if not busy:
        last = min(waiting, key=lambda state: (state.step, state.waiting_on and state.waiting_on[1][2], state.rank))
        return f"every rank waits for another: {format_ranks([last.rank])} in {last}{example}", [last.rank]
    first = min(busy, key=lambda state: (state.likely_cause is None, state.step, state.rank))
    late = sorted(
        state.rank for state in busy if (state.location, state.likely_cause) == (first.location, first.likely_cause)
    )
    cause = f" ({first.likely_cause})" if first.likely_cause else ""
    return f"{format_ranks(late)} in {first}{cause}{example}", late


def _find_mismatch(states: Mapping[int, RankState]) -> tuple[str, list[int]] | None:
    """Find collectives with the same number that differ within a group, or a message whose two ends differ.

    Returns (description, the smallest set of ranks that agree), or None.
    """
    # (axis, ranks, both ends of a message, number) -> rank -> call
    calls_by_key: dict[tuple[object, ...], dict[int, CallRecord]] = defaultdict(dict)
    for state in states.values():
        for axis, (ranks, calls) in state.axes.items():
            for call in calls:
                op, peer, number, _ = call
                ends: tuple[int, ...] = ()
                if peer >= 0:
                    ends = (state.rank, peer) if op.startswith("send") else (peer, state.rank)
                calls_by_key[axis, tuple(ranks), *ends, number][state.rank] = call
    by_number = sorted(calls_by_key.items(), key=lambda item: item[0][-1])  # type: ignore[arg-type, return-value]
    for (axis_name, *_), calls_by_rank in by_number:
        ranks_by_kind = defaultdict(list)
        for rank, (op, peer, _, size) in calls_by_rank.items():
            ranks_by_kind["message" if peer >= 0 else op, size].append(rank)
        if len(ranks_by_kind) > 1:
            problem = "sizes differ" if len({op for op, _ in ranks_by_kind}) == 1 else "the order differs"
            kinds = "; ".join(
                f"{format_ranks(ranks)} {format_call(calls_by_rank[ranks[0]])} of {size:,} bytes"
                for (_, size), ranks in ranks_by_kind.items()
            )
            minority = min(ranks_by_kind.values(), key=len)
            return f"on {axis_name} {problem}: {kinds}: all ranks must run the same program", minority
    return None
