"""What a kernel's machine code does, counted per thread: bytes of global memory by width. An
instruction inside of a loop counts as often as the loop turns, which the caller knows; those under a predicate count in
full."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# SASS: LDG (load), STG (store), LDGSTS (load to shared memory, cp.async), each with .128, .64, .U16, .U8 or 4 bytes
ACCESS = re.compile(r"^(LDG|STG|LDGSTS)\.")
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Code:
    """Of one thread: bytes read and written, and how many accesses there are of each width."""

    loaded: float
    stored: float
    widths: Counter[int] = field(default_factory=Counter)

    def times(self, threads: int) -> "Code":
        """Of so many threads."""
        return Code(self.loaded * threads, self.stored * threads, self.widths)

    def narrow(self) -> Counter[int]:
        """Accesses of less than 16 bytes."""
        return Counter({width: n for width, n in self.widths.items() if width < 16})


def instructions(sass: str) -> list[tuple[int, str]]:
    """(loop depth, instruction without its predicate) in order."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(lines)
        found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*.*?);", line)
        if found:
            lines.append(found[1].strip())
    loops = []
    for at, text in enumerate(lines):
        target = re.search(r"`\((\.L_\w+)\)", text) if text.startswith("BRA") else None
        if target and labels.get(target[1], at + 1) < at:  # a branch to itself ends the code
            loops.append((labels[target[1]], at))
    return [(sum(first <= at <= last for first, last in loops), text) for at, text in enumerate(lines)]


def width_of(instruction: str) -> int:
    return next((WIDTHS[part] for part in instruction.split()[0].split(".") if part in WIDTHS), 4)


def count(sass: str, trips: Sequence[float] = ()) -> Code:
    """`trips`: how often a loop at each depth turns, from the outermost; a loop more than are known raises ValueError."""
    loaded = stored = 0.0
    widths: Counter[int] = Counter()
    for depth, text in instructions(sass):
        if depth > len(trips):
            raise ValueError(f"a loop at depth {depth} whose turns are not known: {text}")
        times = 1.0
        for n in trips[:depth]:
            times *= n
        name = text.split()[0].split(".")[0]
        if ACCESS.match(text):
            width = width_of(text)
            widths[width] += 1
            if name == "STG":
                stored += width * times
            else:
                loaded += width * times
    return Code(loaded, stored, widths)
