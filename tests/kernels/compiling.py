"""A compiler of kernels for GPUs that are not present: launches are recorded, and compiled for any GPU.

A kernel that the interpreter accepts may not compile, or may need more registers or shared memory than a GPU has. This
needs no driver, only Triton, whose own cache stores the compiled kernels.
"""

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

MAX_VOLUNTARY_SPILL = 32  # bytes that the assembler may spill by choice, so that another block is resident


@dataclass(frozen=True)
class GpuLimits:
    """The limits of a block on a compute capability (CUDA C++ programming guide, technical specifications)."""

    capability: int  # 90 is 9.0
    shared: int  # bytes of shared memory, opted in
    registers: int = 65536  # in the register file, which all threads of a block share
    threads: int = 1024

    @property
    def name(self) -> str:
        return f"{self.capability // 10}.{self.capability % 10}"


# 8.6 and 8.9 (RTX 3090, RTX 4090, L40) have the code of 8.0 and the shared memory of 12.0
GPUS = {
    capability: GpuLimits(capability, shared_kib << 10)
    for capability, shared_kib in ((80, 163), (89, 99), (90, 227), (100, 227), (120, 99))
}


@dataclass(frozen=True)
class Launch:
    """One launch as Triton's launcher sees it: the function, types, constants, options, arguments and grid."""

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
        """The key of its machine code."""
        return f"{self.name} {self.types} {self.constants} {sorted(self.aligned)} {self.options}"

    @property
    def block_n(self) -> int:
        """The columns of its tile, or 0 without a tile."""
        return self.constants.get("BLOCK_N", 0)


@dataclass(frozen=True)
class Built:
    """One kernel's machine code for one GPU, and the resources of a block."""

    launch: Launch
    gpu: GpuLimits
    registers: int  # per thread
    stack: int  # bytes per thread; all of it is spilled registers, because the kernels have no local arrays
    shared: int  # bytes per block
    warps: int  # per block, including those that Triton adds
    ptx: str
    cubin: bytes

    def problems(self) -> list[str]:
        """Return why such a GPU would refuse the launch or run it slowly. Registers are allocated in units of 8."""
        threads, rounded_registers = 32 * self.warps, -(-self.registers // 8) * 8
        texts = []
        if self.shared > self.gpu.shared:
            texts.append(f"{self.shared} bytes of shared memory, the GPU has {self.gpu.shared}")
        if threads > self.gpu.threads or threads * rounded_registers > self.gpu.registers:
            texts.append(f"{threads} threads of {rounded_registers} registers do not fit")
        if self.stack > (0 if self.uses_all_registers else MAX_VOLUNTARY_SPILL):
            texts.append(f"{self.stack} bytes per thread spilled at {self.registers} registers")
        return [f"{self.launch.name} {tile_of(self.launch)} on {self.gpu.name}: {text}" for text in texts]

    @property
    def uses_all_registers(self) -> bool:
        """True if a thread uses all registers available to it."""
        max_registers = min(255, self.gpu.registers // (32 * self.warps) // 8 * 8)
        return self.registers > max_registers - 8


def tile_of(launch: Launch) -> str:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_SIZE", "BLOCK_D", "BLOCK_DV")
    names += ("HAS_RESIDUAL", "THRESHOLD", "HAS_DOCUMENTS", "HAS_SINK")
    dtype = next((t.lstrip("*") for t in launch.types.values() if t.startswith("*")), "")
    tile = ", ".join(f"{k.lower()} {launch.constants[k]}" for k in names if k in launch.constants)
    return f"[{dtype}, {tile}, {', '.join(f'{k[4:]} {v}' for k, v in launch.options.items())}]"


def signature(
    jitted: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict]:
    """Return types, constants and alignment of one launch, as Triton's launcher derives them from the arguments."""
    from triton.runtime.jit import mangle_type

    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    values = dict(zip((p.name for p in jitted.params), args, strict=False)) | {
        k: v for k, v in options.items() if k in {p.name for p in jitted.params}
    }
    for i, param in enumerate(jitted.params):
        value = values[param.name]
        if param.is_constexpr or value is None:
            types[param.name], constants[param.name] = "constexpr", value
        elif not param.do_not_specialize and isinstance(value, int) and value == 1:
            types[param.name], constants[param.name] = "constexpr", 1
        else:
            types[param.name] = mangle_type(value)
            is_aligned = isinstance(value, Tensor) or (
                not param.do_not_specialize and isinstance(value, int) and value % 16 == 0
            )
            if is_aligned:
                aligned[(i,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def record_launches(run: Callable[[], Any], capability: int = 90) -> list[Launch]:
    """Call `run` as if on a GPU of this capability, and return its launches, which are not executed.

    Launches with the same machine code are returned once.
    """
    launches: dict[str, Launch] = {}

    def record(jitted: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            launch_options = {k: v for k, v in options.items() if k in ("num_warps", "num_stages")}
            new = Launch(jitted, *signature(jitted, args, options), launch_options, args, tuple(grid))
            launches.setdefault(new.key, new)

        return launch

    with (
        mock.patch.object(dispatch, "sm_major", lambda device: capability // 10),
        mock.patch.object(dispatch.Kernel, "__getitem__", lambda self, grid: record(self.compiled(), grid)),
        mock.patch.object(dispatch, "runs_triton", lambda device_type: True),
    ):
        run()
    return list(launches.values())


def build(launch: Launch, capability: int) -> Built:
    """Compile a launch for a GPU of this compute capability; errors of Triton's compiler propagate."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled = triton.compile(
        ASTSource(launch.jitted, launch.types, launch.constants, launch.aligned),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    cubin = compiled.asm["cubin"]
    output = disassemble("cuobjdump", cubin, "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert usage, output
    metadata = compiled.metadata
    return Built(
        *(launch, GPUS[capability], int(usage[1]), int(usage[2]), metadata.shared),
        *(metadata.num_warps, compiled.asm["ptx"], cubin),
    )


def disassemble(tool: str, cubin: bytes, *options: str) -> str:
    """Return the output of one of Triton's tools for machine code."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        argv = [str(tools_dir() / tool), *options, str(file)]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


@functools.cache
def tools_dir() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def cache_dir() -> Path:
    """Return the directory that stores this user's compiled kernels between runs."""
    return Path(tempfile.gettempdir()) / f"megalite-kernels-{os.getuid()}"
