"""What each kernel moves, from its machine code for compute capability 9.0 and from the interpreter: two counts that know
nothing of each other. The interpreter sees each element that is loaded and stored (traffic.py); the machine code says
how many bytes each instruction takes (machine_code.py), times the turns of its loop, the threads and the programs. The
formula is that of tools/bench/kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiling import Launch, build, disassembled, recorded
from machine_code import Code, count
from traffic import Traffic, prepared

SECOND_STAGE = ("PARTIAL", "P")  # sums per program of a weight's gradient: by the number of programs, not of rows
FLAT = {"tokens": 64, "hidden_size": 512, "vocab_size": 8192, "sequence": 64, "numel": 1 << 16}
ATTENTION = FLAT | {"tokens": 256, "sequence": 256, "hidden_size": 512}
LOSS = FLAT | {"tokens": 16}
ROPE = FLAT | {"tokens": 16, "hidden_size": 4096}  # a token's angles serve its 32 heads
# which inputs are small and shared, so that every program may ask for them: from the cache, after the first
SHARED = ("W", "B", "COS", "SIN", "IDS")
CASES = [f"{op} {half}" for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rope", "swiglu",
         "bias_gelu", "bias_gelu_erf", "dropout_add", "cross_entropy") for half in ("forward", "backward")]  # fmt: skip
CASES += ["adamw forward", "adamw bf16 moments forward", "grad_norm forward"]
MATMULS = [f"{op} {half}" for op in ("attention", "grouped_matmul") for half in ("forward", "backward")]


def size_of(name: str) -> dict[str, int]:
    sizes = {"attention": ATTENTION, "cross_entropy": LOSS, "rope": ROPE}
    return sizes.get(name.split()[0], FLAT)


def argument(launch: Launch, name: str) -> Any:
    return dict(zip((p.name for p in launch.jitted.params), launch.args, strict=False))[name]


def turns(launch: Launch) -> Sequence[float]:
    """How often the loop of a kernel turns in this launch."""
    constants, name = launch.constants, launch.name
    if name == "columns.sum":
        return (-(-argument(launch, "rows") // constants["ROWS"]),)
    if name in ("norms.backward", "bias_gelu.backward"):
        return (argument(launch, "rows") / (launch.grid[0] * constants["ROWS"]),)
    if name.startswith("cross_entropy"):
        return (-(-argument(launch, "valid") // constants["COLUMNS"]),)
    if name == "grad_norm.squares":
        return (argument(launch, "n") / (launch.grid[0] * constants["ELEMENTS"]),)
    if name.startswith("grouped_matmul"):
        return (1, 1)  # by the offsets, which are not known
    return ()


@dataclass(frozen=True)
class Line:
    """One case at the sizes here: bytes asked for by the interpreter, and by the machine code."""

    asked: int
    static: float


def main_stage(seen: list[list[Traffic]]) -> list[Traffic]:
    return [t for launch in seen for t in launch if t.kernel != "columns_sum" and t.tensor not in SECOND_STAGE]


def twice(seen: list[list[Traffic]]) -> list[Traffic]:
    """Tensors of which a kernel asks for bytes more often than once, and that are not small and shared. One byte in a
    hundred does not count: cross entropy reads a row's label once more."""
    stage = main_stage(seen)
    much = 0.01 * sum(t.once for t in stage)
    return [t for t in stage if t.asked - t.once > 0.01 * t.once and t.once > much and t.tensor not in SHARED]


def machine_code(launches: list[Launch]) -> list[Code]:
    made = []
    for launch in launches:
        built = build(launch, 90)
        code = count(disassembled("nvdisasm", built.cubin, "-c"), turns(launch))
        made.append(code.times(math.prod(launch.grid) * 32 * built.warps))
    return made


def launches_of(name: str) -> list[Launch]:
    run: list[Any] = []
    recorded(lambda: run.append(prepared(name, size_of(name))[1]()))
    return recorded(run[0])


def line_of(name: str, seen: list[list[Traffic]]) -> Line:
    """Of a kernel whose loops turn equally often: not of attention."""
    asked = sum(t.asked for launch in seen for t in launch)
    return Line(asked, sum(code.loaded + code.stored for code in machine_code(launches_of(name))))
