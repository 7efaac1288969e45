"""The diagnosis of a hang: from each rank's view of itself to the late ranks and the likely cause, in words.

Pure; hang.py collects the views and reports the verdict.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CallRecord = tuple[str, int, int, int]  # a collective or message: its name, the peer's rank or -1, number, bytes


@dataclass(frozen=True)
class RankState:
    """A rank's view of itself, in JSON's types."""

    rank: int
    step: int
    activity: str  # step, evaluate, ...
    phase: str  # the timer's name within it, or ""
    seconds: float  # since it does so
    stack: list[str]  # its main thread's lines in megalite, the innermost first
    waiting_on: tuple[str, CallRecord, float] | None  # axis, collective and seconds, if it is blocked in one
    axes: dict[str, tuple[list[int], list[CallRecord]]]  # axis -> its ranks and the last collectives begun

    @property
    def place(self) -> str:
        return self.stack[0] if self.stack else "outside megalite"

    @property
    def likely_cause(self) -> str | None:
        rooms = {place.partition("/")[0] for place in self.stack} | {self.phase}
        if rooms & {"data", "batch-generator"}:
            return "a data stall: slow storage, or a slow preparation of samples"
        return "a slow checkpoint" if rooms & {"checkpoint", "save-checkpoint"} else None

    def __str__(self) -> str:
        at = f"{f'step {self.step}, ' if self.step else ''}{self.phase or self.activity}, {self.place}"
        if self.waiting_on is None:
            return at
        axis, call, seconds = self.waiting_on
        return f"{at}: waits {seconds:.0f} s for {format_call(call)} over {axis}, {call[3]:,} bytes"


def format_call(call: CallRecord) -> str:
    op, peer, number, _ = call
    return f"{op} {number}" if peer < 0 else f"message {number} ({op} rank {peer})"


def format_ranks(numbers: Iterable[int]) -> str:
    """
    >>> ranks([0, 1, 2, 5]), ranks([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {text}"


def diagnose(views: Mapping[int, RankState], silent: Mapping[int, str]) -> tuple[str, list[int]]:
    """(the likely cause in one line, the late ranks). `silent`: facts about the ranks that do not answer."""
    waiting = sorted((view for view in views.values() if view.waiting_on), key=lambda view: view.rank)
    others = f"; {format_ranks([waiting[0].rank])} in {waiting[0]}" if waiting else ""
    if silent:
        known = "; ".join(sorted({text for text in silent.values() if text}))
        answers = "answers" if len(silent) == 1 else "answer"
        return f"{format_ranks(silent)} no longer {answers}{f' ({known})' if known else ''}{others}", sorted(silent)
    if difference := _difference(views):
        return difference
    if not (busy := [view for view in views.values() if not view.waiting_on]):
        behind = min(waiting, key=lambda view: (view.step, view.waiting_on and view.waiting_on[1][2], view.rank))
        return f"every rank waits for another: {format_ranks([behind.rank])} in {behind}{others}", [behind.rank]
    first = min(busy, key=lambda view: (view.likely_cause is None, view.step, view.rank))
    late = sorted(v.rank for v in busy if (v.place, v.likely_cause) == (first.place, first.likely_cause))
    return f"{format_ranks(late)} in {first}{f' ({first.likely_cause})' if first.likely_cause else ''}{others}", late


def _difference(views: Mapping[int, RankState]) -> tuple[str, list[int]] | None:
    """Ranks of a group whose collectives of the same number differ, or the two ends of a message that do."""
    seen: dict[tuple[object, ...], dict[int, CallRecord]] = defaultdict(dict)
    for view in views.values():
        for name, (members, calls) in view.axes.items():
            for call in calls:
                op, peer, number, _ = call
                ends = (view.rank, peer) if op.startswith("send") else (peer, view.rank)
                seen[name, tuple(members), *(ends if peer >= 0 else ()), number][view.rank] = call
    for (name, *_), calls in sorted(seen.items(), key=lambda item: item[0][-1]):  # type: ignore[arg-type, return-value]
        kinds = defaultdict(list)
        for rank, (op, peer, _, size) in calls.items():
            kinds["message" if peer >= 0 else op, size].append(rank)
        if len(kinds) > 1:
            what = "sizes differ" if len({op for op, _ in kinds}) == 1 else "the order differs"
            texts = [
                f"{format_ranks(who)} {format_call(calls[who[0]])} of {size:,} bytes"
                for (_, size), who in kinds.items()
            ]
            fewest = min(kinds.values(), key=len)
            return f"on {name} {what}: {'; '.join(texts)}: the program must be the same on all ranks", fewest
    return None
