"""Compile every kernel for a card that is not here: launches are recorded, and each becomes machine code for sm_90.

What the interpreter accepts is a larger language than what the compiler does, so a kernel that passes on CPU may still
not build. No driver is needed for that, only the assembler that comes with Triton.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.kernels import dispatch


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


class Recorder:
    """Takes the place of a kernel: a launch compiles it once per signature and writes nothing."""

    def __init__(self) -> None:
        self.built: dict[str, str] = {}

    def launch(self, jitted: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types, constants, aligned = signature(jitted, args, options)
        key = f"{jitted.__module__}.{jitted.__name__} {types} {constants} {sorted(aligned)}"
        if key in self.built:
            return
        launch = {k: v for k, v in options.items() if k in ("num_warps", "num_stages")}
        made = triton.compile(
            ASTSource(jitted, types, constants, aligned), target=GPUTarget("cuda", 90, 32), options=launch
        )
        assert len(made.asm["cubin"]) > 0
        self.built[key] = made.asm["ptx"]


def compile_ops(run: Callable[[], Any]) -> dict[str, str]:
    """Run `run` with every launch compiled in place of executed; the PTX of each kernel by its signature."""
    from triton.runtime.jit import JITFunction

    recorder = Recorder()
    before, kind, launch = dispatch.Kernel.__getitem__, dispatch.runs_triton, JITFunction.__getitem__
    record = lambda jitted: lambda *args, **options: recorder.launch(jitted, args, options)  # noqa: E731
    dispatch.Kernel.__getitem__ = lambda self, grid: record(self.compiled())  # type: ignore
    JITFunction.__getitem__ = lambda self, grid: record(self)  # type: ignore
    dispatch.runs_triton = lambda device_type: True  # type: ignore[assignment]
    try:
        run()
    finally:
        dispatch.Kernel.__getitem__, dispatch.runs_triton = before, kind  # type: ignore[method-assign]
        JITFunction.__getitem__ = launch  # type: ignore[method-assign]
    return recorder.built


def spilled(ptx: str) -> tuple[int, int]:
    """Registers per thread and bytes spilled, by the assembler that comes with Triton."""
    import re

    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(90).path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        told = subprocess.run(
            [tool, "-v", "--gpu-name=sm_90a", str(file), "-o", str(file.with_suffix(".cubin"))],
            capture_output=True, text=True, check=True, timeout=60,
        ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.search(r"(\d+) bytes spill stores", told)
    assert registers and spills, told
    return int(registers[1]), int(spills[1])
