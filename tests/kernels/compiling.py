"""Compile every kernel for a card that is not here: launches are recorded, and each becomes machine code for any card.
What the interpreter accepts may still not build, or need more registers or shared memory than a card has. No driver is
needed, only what comes with Triton, whose own cache keeps what was compiled."""

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from megalite.kernels import dispatch

BARGAIN = 32  # bytes that the assembler spills by its own choice, so that one more block is resident


@dataclass(frozen=True)
class Card:
    """What one block may have on a compute capability (CUDA C++ programming guide, technical specifications)."""

    capability: int  # 90 is 9.0
    shared: int  # bytes of shared memory, opted in
    registers: int = 65536  # of the register file, in which all threads of a block must fit
    threads: int = 1024

    @property
    def name(self) -> str:
        return f"{self.capability // 10}.{self.capability % 10}"


# 8.6 and 8.9 (RTX 3090, RTX 4090, L40) have the code of 8.0 and the shared memory of 12.0
CARDS = {c.capability: c for c in (Card(80, 163 << 10), Card(89, 99 << 10), Card(90, 227 << 10), Card(100, 227 << 10),
                                   Card(120, 99 << 10))}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch as Triton's launcher sees it: the function, the types of its arguments, its constants, its options,
    and the arguments themselves with the grid."""

    jitted: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: dict[tuple[int, ...], Any]
    options: dict[str, int]
    args: tuple[Any, ...]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.jitted.__module__.rsplit('.', 1)[-1]}.{self.jitted.__name__.lstrip('_')}"

    @property
    def key(self) -> str:
        """Of its machine code."""
        return f"{self.name} {self.types} {self.constants} {sorted(self.aligned)} {self.options}"

    @property
    def block_n(self) -> int:
        """The columns of its tile; 0 if it has none."""
        return self.constants.get("BLOCK_N", 0)


@dataclass(frozen=True)
class Built:
    """One kernel's machine code for one card, and what a block of it takes."""

    launch: Launch
    card: Card
    registers: int  # per thread
    stack: int  # bytes per thread: the kernels have no local arrays, so it is what registers were spilled to
    shared: int  # bytes per block
    warps: int  # per block, with those that Triton adds for itself
    ptx: str
    cubin: bytes

    def problems(self) -> list[str]:
        """Why a card of this kind would refuse the launch, or run it slowly. Registers are given out in units of 8."""
        threads, each = 32 * self.warps, -(-self.registers // 8) * 8
        found = []
        if self.shared > self.card.shared:
            found.append(f"{self.shared} bytes of shared memory, the card has {self.card.shared}")
        if threads > self.card.threads or threads * each > self.card.registers:
            found.append(f"{threads} threads of {each} registers do not fit")
        if self.stack > (0 if self.full else BARGAIN):
            found.append(f"{self.stack} bytes per thread spilled at {self.registers} registers")
        return [f"{self.launch.name} {tile_of(self.launch)} on {self.card.name}: {text}" for text in found]

    @property
    def full(self) -> bool:
        """Whether a thread has all the registers that it can have."""
        most = min(255, self.card.registers // (32 * self.warps) // 8 * 8)
        return self.registers > most - 8


def tile_of(launch: Launch) -> str:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_SIZE", "BLOCK_D", "BLOCK_DV")
    names += ("HAS_RESIDUAL", "THRESHOLD", "HAS_DOCUMENTS", "HAS_SINK")
    first = next((t.lstrip("*") for t in launch.types.values() if t.startswith("*")), "")
    tile = ", ".join(f"{k.lower()} {launch.constants[k]}" for k in names if k in launch.constants)
    return f"[{first}, {tile}, {', '.join(f'{k[4:]} {v}' for k, v in launch.options.items())}]"


def signature(
    jitted: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict]:
    """Types, constants and alignment of one launch, as Triton's own launcher takes them from the arguments."""
    from triton.runtime.jit import mangle_type

    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    named = dict(zip((p.name for p in jitted.params), args, strict=False)) | {
        k: v for k, v in options.items() if k in {p.name for p in jitted.params}
    }
    for i, param in enumerate(jitted.params):
        value = named[param.name]
        if param.is_constexpr or value is None:
            types[param.name], constants[param.name] = "constexpr", value
        elif not param.do_not_specialize and isinstance(value, int) and value == 1:
            types[param.name], constants[param.name] = "constexpr", 1
        else:
            types[param.name] = mangle_type(value)
            sixteen = isinstance(value, Tensor) or (
                not param.do_not_specialize and isinstance(value, int) and value % 16 == 0
            )
            if sixteen:
                aligned[(i,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def recorded(run: Callable[[], Any], capability: int = 90) -> list[Launch]:
    """Run `run` as on a card of this capability with every launch recorded in place of executed (nothing is written):
    each kind of machine code once."""
    made: dict[str, Launch] = {}

    def note(jitted: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            chosen = {k: v for k, v in options.items() if k in ("num_warps", "num_stages")}
            new = Launch(jitted, *signature(jitted, args, options), chosen, args, tuple(grid))
            made.setdefault(new.key, new)

        return launch

    with (
        mock.patch.object(dispatch, "sm_major", lambda device: capability // 10),
        mock.patch.object(dispatch.Kernel, "__getitem__", lambda self, grid: note(self.compiled(), grid)),
        mock.patch.object(dispatch, "runs_triton", lambda device_type: True),
    ):
        run()
    return list(made.values())


def build(launch: Launch, capability: int) -> Built:
    """Machine code for a card of this compute capability. Raises what Triton's compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made = triton.compile(
        ASTSource(launch.jitted, launch.types, launch.constants, launch.aligned),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    cubin = made.asm["cubin"]
    told = disassembled("cuobjdump", cubin, "-res-usage")
    used = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert used, told
    meta = made.metadata
    return Built(
        *(launch, CARDS[capability], int(used[1]), int(used[2]), meta.shared), *(meta.num_warps, made.asm["ptx"], cubin)
    )


def disassembled(tool: str, cubin: bytes, *options: str) -> str:
    """What a tool of Triton's own says of machine code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        words = [str(tools() / tool), *options, str(file)]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


@functools.cache
def tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def cache_folder() -> Path:
    """Where compiled kernels are kept from one run to the next, of this user alone."""
    return Path(tempfile.gettempdir()) / f"megalite-kernels-{os.getuid()}"
