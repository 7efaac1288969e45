"""The shared harness of the Triton kernels: one table of operations, and how far each is from its definition.

A row has the operation as callers know it (the dispatcher takes Triton), its torch twin, and inputs in fp64. `measure`
runs the operation and the twin in one dtype and the twin in fp64, forward and backward, and returns errors; the tests
(test_triton.py) do so in Triton's interpreter on CPU, and on a card where there is one. Every tensor that the
operation allocates is filled with NaN and lies between guards, so an element that no program wrote and a write beyond
the end are seen; inputs lie between NaNs, so a read beyond the end is seen too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

Make = Callable[[], list[Tensor]]
LAYOUTS = ("contiguous", "gapped", "transposed")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Op:
    """`run` and `twin` take the tensors of a case and return one tensor or several. Of the inputs, those in floating
    point are cast and get gradients; the others (labels, sample numbers) are passed as they are."""

    run: Callable[..., Any]
    twin: Callable[..., Any]
    cases: tuple[Make, ...]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(*shapes: tuple[int, ...]) -> Make:
    """One case: normal inputs of these shapes."""
    return lambda: [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


WIDTHS = ((1, 1), (3, 8), (2, 5, 7), (37, 100), (5, 1, 1025))  # odd, ragged, several rows per program, several programs

OPS: dict[str, Op] = {
    "rms_norm": Op(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: rms_norm_reference(x, w, 1e-5),
        tuple(normals(s, s[-1:]) for s in WIDTHS),
    ),
    "add_rms_norm": Op(
        lambda x, a, w: add_rms_norm(x, a, w, 1e-5),
        lambda x, a, w: add_rms_norm_reference(x, a, w, 1e-5),
        tuple(normals(s, s, s[-1:]) for s in WIDTHS),
    ),
}


@dataclass(frozen=True)
class Result:
    """Of one tensor: the largest error of the operation and of its twin against fp64, and the largest true value."""

    name: str
    error: float
    twin_error: float
    scale: float
    dtype: str

    @property
    def bound(self) -> float:
        """Twice the twin's own error, or twice one rounding of the result where the twin happens to be exact."""
        eps = torch.finfo(DTYPES[self.dtype]).eps
        if self.dtype == "float64":
            return 1e-10 * max(self.scale, 1.0)
        return 2 * max(self.twin_error, eps / 2 * self.scale)


class Guarded(TorchDispatchMode):
    """Tensors made by `empty` are full of NaN (-77 for integers) and lie between guards that `check` looks at."""

    WIDTH = 64

    def __init__(self) -> None:
        super().__init__()
        self.flats: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        if not name.startswith(("empty", "new_empty")) or out.numel() == 0:
            return out
        flat = torch.full((out.numel() + 2 * self.WIDTH,), poison(out.dtype), dtype=out.dtype, device=out.device)
        self.flats.append((flat, out.numel()))
        return flat[self.WIDTH : -self.WIDTH].as_strided(out.shape, out.stride(), self.WIDTH)

    def check(self) -> None:
        for flat, n in self.flats:
            for guard in (flat[: self.WIDTH], flat[self.WIDTH + n :]):
                same = guard.isnan().all() if guard.is_floating_point() else (guard == poison(guard.dtype)).all()
                assert bool(same), f"a kernel wrote outside of a tensor of {n} elements"


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else -77


def laid_out(x: Tensor, layout: str) -> Tensor:
    """`x` with other strides, its values between NaNs."""
    if layout == "transposed" and x.dim() > 2:  # [b, a, ...] in memory
        base = laid_out(x.transpose(0, 1), "contiguous")
        return base.transpose(0, 1)
    gap = 3 if layout == "gapped" and x.dim() > 1 else 0
    width = x.shape[-1] + gap
    flat = torch.full((x.numel() // x.shape[-1] * width + 128,), float("nan"), dtype=x.dtype, device=x.device)
    view = flat[64:-64].view(*x.shape[:-1], width)[..., : x.shape[-1]]
    view.copy_(x)
    return view


def results(fn: Callable[..., Any], inputs: list[Tensor], layout: str | None) -> dict[str, Tensor]:
    """Outputs and gradients of `fn` with a fixed gradient from above, laid out as the inputs are."""
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    given = [x if layout is None or not x.is_floating_point() else laid_out_leaf(x, layout) for x in leaves]
    made = fn(*given)
    outputs = list(made) if isinstance(made, tuple) else [made]
    above = [normal(*y.shape, seed=90 + i).to(y.device, y.dtype) for i, y in enumerate(outputs)]
    if layout is not None:
        above = [laid_out(dy, layout) for dy in above]
    wanted = [x for x in leaves if x.is_floating_point()]
    grads = torch.autograd.grad(outputs, wanted, above)
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"gradient {i}": g for i, g in enumerate(grads)}


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: str) -> Tensor:
        return laid_out(x, layout)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


def laid_out_leaf(x: Tensor, layout: str) -> Tensor:
    return _LaidOut.apply(x, layout)  # type: ignore[return-value]


@contextmanager
def guarded() -> Iterator[None]:
    with Guarded() as mode:
        yield
    mode.check()


def measure(name: str, case: int, dtype: str, layout: str, device: str = "cpu") -> list[Result]:
    """Run one case here, in this process; Triton must be what the dispatcher takes on `device`."""
    from megalite.kernels.dispatch import runs_triton

    assert runs_triton(device), "the dispatcher does not take Triton here, so this would compare torch with torch"
    op = OPS[name]
    exact = [x.to(device) for x in op.cases[case]()]
    inputs = [x.to(DTYPES[dtype]) if x.is_floating_point() else x for x in exact]
    same = [x.double() if x.is_floating_point() else x for x in inputs]  # the true result is that of rounded inputs
    with guarded():
        got = results(op.run, inputs, layout)
    twin, want = results(op.twin, inputs, None), results(op.twin, same, None)
    rows = []
    for key, true in want.items():
        assert got[key].dtype == twin[key].dtype and got[key].shape == true.shape, key
        error, twin_error = ((x[key].double() - true).abs().nan_to_num(float("inf")).max().item() for x in (got, twin))
        rows.append(Result(key, error, twin_error, true.abs().max().item(), dtype))
    return rows


def in_interpreter(pipe: Any) -> None:
    """The loop of a process whose Triton is the interpreter: (function, arguments) in, (whether it ran, result) out."""
    import traceback

    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    while True:
        fn, args = pipe.recv()
        try:
            pipe.send((True, fn(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
