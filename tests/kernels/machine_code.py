"""Counts of a kernel's machine code per thread: bytes of global memory by width, and instructions.

An instruction in a loop counts once for each iteration, whose number the caller knows. Predicated instructions count in
full.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiling import Built, Launch, disassemble

# SASS: LDG (load), STG (store), LDGSTS (load to shared memory, cp.async), each with .128, .64, .U16, .U8 or 4 bytes
ACCESS = re.compile(r"^(LDG|STG|LDGSTS)\.")
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Code:
    """The bytes that a thread reads and writes, and its number of accesses of each width below 16 bytes."""

    num_bytes: float
    narrow: Counter[int]


def instructions(sass: str) -> list[tuple[int, str]]:
    """Return (loop depth, instruction without its predicate) in order."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(lines)
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*.*?);", line)
        if instruction:
            lines.append(instruction[1].strip())
    loops = []
    for index, text in enumerate(lines):
        target = re.search(r"`\((\.L_\w+)\)", text) if text.startswith("BRA") else None
        if target and labels.get(target[1], index + 1) < index:  # a branch to itself ends the code
            loops.append((labels[target[1]], index))
    return [(sum(first <= index <= last for first, last in loops), text) for index, text in enumerate(lines)]


def width_of(instruction: str) -> int:
    return next((WIDTHS[part] for part in instruction.split()[0].split(".") if part in WIDTHS), 4)


def count(sass: str, trips: Sequence[float] = ()) -> Code:
    """Count accesses, given the iterations of a loop at each depth; a deeper loop raises ValueError."""
    num_bytes, narrow = 0.0, Counter[int]()
    for depth, text in instructions(sass):
        if depth > len(trips):
            raise ValueError(f"a loop at depth {depth} whose iterations are not known: {text}")
        if ACCESS.match(text):
            width = width_of(text)
            num_bytes += width * math.prod(trips[:depth])
            narrow[width] += width < 16
    return Code(num_bytes, +narrow)


def argument(launch: Launch, name: str) -> Any:
    return dict(zip((p.name for p in launch.jitted.params), launch.args, strict=False))[name]


def trip_counts(launch: Launch) -> Sequence[float]:
    """Return the number of iterations of the kernel's loops in this launch."""
    constants, name = launch.constants, launch.name
    if name == "row_sum.sum_rows_kernel":
        return (-(-argument(launch, "M") // constants["BLOCK_M"]),)
    if name in ("norms.backward", "bias_gelu.backward"):
        return (argument(launch, "M") / (launch.grid[0] * constants["BLOCK_M"]),)
    if name.startswith("cross_entropy"):
        return (-(-argument(launch, "num_valid") // constants["BLOCK_N"]),)
    if name == "grad_norm.sum_of_squares_kernel":
        return (argument(launch, "N") / (launch.grid[0] * constants["BLOCK_SIZE"]),)
    if name.startswith(("grouped_matmul", "gated_matmul")):
        return (1, 1)  # it depends on the offsets, which are not known
    return ()


def instructions_per_element(built: Built) -> float:
    """Return the instructions of a thread per element of its part of the tile.

    They are counted in the innermost loop, or in all of the code without a loop.
    """
    code = instructions(disassemble("nvdisasm", built.cubin, "-c"))
    deepest, tile = max(depth for depth, _ in code), built.launch.constants
    elements = tile.get("BLOCK_M", 1) * tile["BLOCK_N"] / (32 * built.warps)
    return sum(depth == deepest and text != "NOP" for depth, text in code) / elements


def code_of(built: Built) -> Code:
    return count(disassemble("nvdisasm", built.cubin, "-c"), trip_counts(built.launch))
