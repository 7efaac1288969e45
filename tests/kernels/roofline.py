#!/usr/bin/env python
"""What each kernel moves and computes, from its machine code for compute capability 9.0 and from the interpreter.

python tests/kernels/roofline.py        a table in Markdown; nothing is measured, no card is needed

Two counts that know nothing of each other: the interpreter sees each element that is loaded and stored (traffic.py), and
the machine code says how many bytes each instruction takes (machine_code.py), times the turns of its loop, the threads
and the programs. The formula is that of tools/bench/kernels.py.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from compiling import Launch, build, disassembled, recorded
from machine_code import Code, count
from traffic import Traffic, of_case, prepared

COPY_RATE = 3.35e12  # bytes/s of an H100 SXM's memory; fp32 and special-function operations/s of all of it
FP32_RATE, SPECIAL_RATE = 67e12, 132 * 16 * 1.83e9
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
WITH_ATTENTION = [*CASES, "attention forward", "attention backward"]


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
    if name.endswith("norm.backward") or name == "bias_gelu.backward":
        return (argument(launch, "rows") / (launch.grid[0] * constants["ROWS"]),)
    if name.startswith("cross_entropy"):
        return (-(-argument(launch, "valid") // constants["COLUMNS"]),)
    if name == "grad_norm.squares":
        return (argument(launch, "n") / (launch.grid[0] * constants["ELEMENTS"]),)
    return ()


@dataclass(frozen=True)
class Line:
    """One case at the sizes here. Bytes by the formula, different ones and asked for by the interpreter, and by the
    machine code; operations and special functions by the machine code. None: it has loops of which turns differ."""

    name: str
    formula: float
    once: int
    asked: int
    static: float | None = None
    operations: float = 0.0
    special: float = 0.0

    @property
    def ratio(self) -> float:
        return self.once / self.formula

    @property
    def limit(self) -> str:
        """By what the main loop does per byte."""
        if self.static is None:
            return "matmuls"
        times = {"memory": self.once / COPY_RATE, "fp32": self.operations / FP32_RATE}
        times["special functions"] = self.special / SPECIAL_RATE
        return max(times, key=lambda one: times[one])


def main_stage(seen: list[list[Traffic]]) -> list[Traffic]:
    return [t for launch in seen for t in launch if t.kernel != "columns_sum" and t.tensor not in SECOND_STAGE]


def twice(seen: list[list[Traffic]]) -> list[Traffic]:
    """Tensors of which a kernel asks for bytes more often than once, and that are not small and shared. One byte in a
    hundred does not count: cross entropy reads a row's label once more."""
    stage = main_stage(seen)
    much = 0.01 * sum(t.once for t in stage)
    return [t for t in stage if t.asked - t.once > 0.01 * t.once and t.once > much and t.tensor not in SHARED]


def machine_code(launches: list[Launch]) -> list[Code | None]:
    made = []
    for launch in launches:
        if launch.name.startswith("flash"):
            made.append(None)
            continue
        built = build(launch, 90)
        code = count(disassembled("nvdisasm", built.cubin, "-c"), turns(launch))
        programs = 1
        for n in launch.grid:
            programs *= n
        made.append(code.times(programs * 32 * built.warps))
    return made


def launches_of(name: str) -> list[Launch]:
    run: list[Any] = []
    recorded(lambda: run.append(prepared(name, size_of(name))[1]()))
    return recorded(run[0])


def line_of(name: str, seen: list[list[Traffic]]) -> Line:
    (case, sizes), _ = prepared(name, size_of(name))
    stage = main_stage(seen)
    asked = sum(t.asked for launch in seen for t in launch)
    codes = machine_code(launches_of(name))
    formula, once = case.work.bytes(sizes), sum(t.once for t in stage)
    if None in codes:
        return Line(name, formula, once, asked)
    known = [code for code in codes if code is not None]
    return Line(
        *(name, formula, once, asked, sum(c.loaded + c.stored for c in known)),
        *(sum(c.operations for c in known), sum(c.special for c in known)),
    )


def table(seen: Callable[[str], list[list[Traffic]]]) -> Iterator[str]:
    yield "| kernel | counted / formula | asked for / counted | machine code / asked for | operations per byte | limit |"
    yield "|---|---|---|---|---|---|"
    for name in WITH_ATTENTION:
        one = line_of(name, seen(name))
        static = "" if one.static is None else f"{one.static / one.asked:.2f}"
        dense = "" if one.static is None else f"{(one.operations + one.special) / one.once:.1f}"
        ratio = f"{one.ratio:.2f} | {one.asked / one.once:.2f} | {static} | {dense}"
        yield f"| {name} | {ratio} | {one.limit} |"


def main() -> int:
    import multiprocessing

    from cases import in_interpreter
    from compiling import cache_folder

    os.environ.update(TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=in_interpreter, args=(there,), daemon=True)
    process.start()
    del os.environ["TRITON_INTERPRET"], os.environ["MEGALITE_KERNELS"]
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder()))

    def seen(name: str) -> list[list[Traffic]]:
        here.send((of_case, (name, size_of(name))))
        ran, result = here.recv()
        if not ran:
            raise RuntimeError(result)
        return result

    for row in table(seen):
        print(row, flush=True)
    process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
