"""Where the host waited for its card, read from a trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from card.simulator.trace import Fact, HostRead, HostWait, Mark


@dataclass(frozen=True)
class WaitAt:
    """`kind`: of the HostRead, or "synchronize" where the program asked for nothing but the wait. `within`: the marks."""

    kind: str
    where: str
    phase: str
    within: tuple[str, ...]

    def __str__(self) -> str:
        """Without the line: what a table of them is compared with stays true when a line moves."""
        return f"{self.kind} {self.where.rpartition(':')[0]}"


def waits_of(trace: Sequence[Fact]) -> list[WaitAt]:
    found: list[WaitAt] = []
    marks: list[str] = []
    for fact in trace:
        match fact:
            case Mark(name=""):
                marks.pop()
            case Mark(name=name):
                marks.append(name)
            case HostWait(where=where):
                found.append(WaitAt("synchronize", where, "", tuple(marks)))
            case HostRead(kind=kind, where=where, phase=phase):
                last = max(i for i, wait in enumerate(found) if wait.where == where)  # other threads wait, too
                found[last] = WaitAt(kind, where, phase, found[last].within)
            case _:
                pass
    return found


def times(trace: Sequence[Fact], name: str) -> int:
    """How often the program was in `name`."""
    return sum(isinstance(fact, Mark) and fact.name == name for fact in trace)
