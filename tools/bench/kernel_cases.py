"""All cases of tools/bench/kernels.py, and those of kernels over [N, D] that are limited by memory."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.rope_spec import RopeSpec
from megalite.kernels import bias_gelu, dropout, norms, rope
from megalite.kernels.activations import swiglu
from megalite.kernels.dispatch import tile_for
from tools.bench.kernel_attention_case import attention_cases
from tools.bench.kernel_case import (
    Candidates,
    Fn,
    KernelCase,
    MakeInputs,
    ProblemSizes,
    liger,
    streams,
    tile_candidates,
)
from tools.bench.kernel_expert_cases import expert_cases
from tools.bench.kernel_loss_cases import loss_cases, update_cases

EPS = 1e-5
DROPOUT_P, DROPOUT_KEY = 0.1, 0xC0FFEE01


# --- the same work in plain torch

TORCH_FNS: dict[str, Fn] = {
    "rms_norm": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b, EPS),
    "swiglu": lambda u: F.silu(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1],
    "bias_gelu": lambda u, b: F.gelu(u + b, approximate="tanh"),
    "bias_gelu_erf": lambda u, b: F.gelu(u + b, approximate="none"),
}


def add_then_norm(norm: Fn) -> Fn:
    """Return a function that returns the sum of its first two inputs, and the norm of the sum."""

    def run(x: Tensor, a: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        h = x + a
        return h, norm(h, *weights)

    return run


def output_and_grads(fn: Fn) -> Fn:
    """Return a function that computes an activation and its gradients from da and the inputs.

    This is what the backward of nn/linear.py needs.
    """

    def run(da: Tensor, *inputs: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            a = fn(*leaves)
            return a, *torch.autograd.grad(a, leaves, da)

    return run


# --- the cases


def norm_cases(op: str, has_bias: bool, peers: Mapping[str, Fn], add_norm_peers: Mapping[str, Fn]) -> list[KernelCase]:
    """Return the cases of a norm, and of an addition with a norm of the sum."""
    torch_norm = TORCH_FNS[op]
    num_weights = 2 if has_bias else 1

    def inputs(num_rows: int) -> MakeInputs:
        def make(s: ProblemSizes) -> list[Tensor]:
            return [s.rows() for _ in range(num_rows)] + [s.normal(s.hidden_size) for _ in range(num_weights)]

        return make

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return norms.norm(x, weight, bias, EPS)

    def add_norm(x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return norms.add_norm(x, a, weight, bias, EPS)

    def candidates(s: ProblemSizes, table: Any, loops: bool) -> Candidates:
        """Replace the look-up of a tile by the tile itself."""
        current = tile_for(table, s.hidden_size)
        return tile_candidates(
            norms.__dict__, "tile_for", current, s.hidden_size, loops, lambda tile: lambda table, columns: tile
        )

    backward_table = norms.BACKWARD_CENTERED if has_bias else norms.BACKWARD
    forward_tiles = functools.partial(candidates, table=norms.FORWARD, loops=False)
    backward_tiles = functools.partial(candidates, table=backward_table, loops=True)
    torch_add_norm, add_op = add_then_norm(torch_norm), f"add_{op}"
    return [
        KernelCase(op, "forward", streams(2), inputs(1), norm, torch_norm, forward_tiles, peers=peers),
        KernelCase(op, "backward", streams(3), inputs(1), norm, torch_norm, backward_tiles, peers=peers),
        KernelCase(
            add_op, "forward", streams(4), inputs(2), add_norm, torch_add_norm, forward_tiles, peers=add_norm_peers
        ),
        KernelCase(
            add_op, "backward", streams(4), inputs(2), add_norm, torch_add_norm, backward_tiles, peers=add_norm_peers
        ),
    ]


def activation_cases(
    op: str,
    width: int,
    module: Any,
    extra_args: list[Any],
    peers: Mapping[str, Fn],
    peer_inputs: Mapping[str, MakeInputs],
) -> list[KernelCase]:
    """Return the cases of an activation.

    The backward is a function of its own, which returns the activation and the gradients.

    Args:
        op: the name of the activation.
        width: columns of its input, as a multiple of D.
        module: the kernel's module.
        extra_args: arguments of the launchers between the tensors and the tile; if there are any, the last tensor is a
            bias.
        peers: other functions by name.
        peer_inputs: the inputs of peers that take others, by name.
    """

    def inputs(s: ProblemSizes) -> list[Tensor]:
        bias = [s.normal(s.hidden_size)] if extra_args else []
        return [s.rows(width), *bias]

    def with_output_grad(make_inputs: MakeInputs) -> MakeInputs:
        return lambda s: [s.rows(), *make_inputs(s)]

    def forward(u: Tensor, *bias: Tensor) -> Any:
        return module.forward(u, *bias, *extra_args, module.FORWARD_TILE)

    def backward(da: Tensor, u: Tensor, *bias: Tensor) -> Any:
        return module.backward(u, da, *bias, *extra_args, module.BACKWARD_TILE)

    def candidates(s: ProblemSizes, name: str) -> Candidates:
        current = vars(module)[name]
        return tile_candidates(vars(module), name, current, s.hidden_size, current.programs_per_sm > 1)

    return [
        KernelCase(
            op,
            "forward",
            streams(1 + width),
            inputs,
            forward,
            TORCH_FNS[op],
            functools.partial(candidates, name="FORWARD_TILE"),
            peers=peers,
            peer_inputs=peer_inputs,
        ),
        KernelCase(
            op,
            "backward",
            streams(2 + 2 * width),
            with_output_grad(inputs),
            backward,
            TORCH_FNS[op],
            functools.partial(candidates, name="BACKWARD_TILE"),
            explicit_backward="all",
            wrap=output_and_grads,
            peers=peers,
            peer_inputs={name: with_output_grad(make_inputs) for name, make_inputs in peer_inputs.items()},
        ),
    ]


def rope_cases() -> list[KernelCase]:
    """Return the cases of the rotary embedding. The backward is the same pass with the other sign."""

    def inputs(s: ProblemSizes) -> list[Tensor]:
        cos, sin = rope.rope_tables(s.tokens, RopeSpec(s.head_size, 1e4), s.device)
        return [s.normal(s.tokens, 1, s.hidden_size // s.head_size, s.head_size), cos, sin]

    def liger_inputs(s: ProblemSizes) -> list[Tensor]:
        """Make q and k [B, H, S, K], and tables of a full head. Liger always rotates both, so k has only one head."""
        q = s.normal(1, s.hidden_size // s.head_size, s.tokens, s.head_size)
        k = s.normal(1, 1, s.tokens, s.head_size)
        _, *tables = inputs(s)
        return [q, k, *(torch.cat([table, table], -1)[None] for table in tables)]

    def candidates(s: ProblemSizes) -> Candidates:
        return tile_candidates(rope.__dict__, "TILE", rope.TILE, s.hidden_size, False)

    def case(direction: str, sign: float) -> KernelCase:
        def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rope.rotate_triton(x, cos, sin, sign, rope.TILE)

        return KernelCase(
            "rope",
            direction,
            streams(2),
            inputs,
            rotate,
            functools.partial(rope.rotate_reference, sign=sign),
            candidates,
            explicit_backward="all",
            peers={"liger": liger("LigerRopeFunction")} if direction == "forward" else {},
            peer_inputs={"liger": liger_inputs},
        )

    return [case("forward", 1.0), case("backward", -1.0)]


def dropout_cases() -> list[KernelCase]:
    """Return the cases of dropout with an addition. The backward is a pass over the gradient, without an addition."""

    def inputs(s: ProblemSizes) -> list[Tensor]:
        return [s.normal(s.tokens, 1, s.hidden_size) for _ in range(2)]

    def candidates(s: ProblemSizes) -> Candidates:
        return tile_candidates(dropout.__dict__, "TILE", dropout.TILE, s.hidden_size, False)

    def torch_fn(x: Tensor, a: Tensor) -> Tensor:
        return F.dropout(x, DROPOUT_P) + a

    def forward(x: Tensor, a: Tensor) -> Tensor:
        sample_ids = torch.zeros(1, dtype=torch.int64, device=x.device)
        return dropout.dropout_triton(x, a, DROPOUT_P, DROPOUT_KEY, sample_ids, 0, dropout.TILE)

    def backward(x: Tensor, a: Tensor) -> Tensor:
        sample_ids = torch.zeros(1, dtype=torch.int64, device=x.device)
        return dropout.dropout_triton(x, None, DROPOUT_P, DROPOUT_KEY, sample_ids, 0, dropout.TILE)

    def case(direction: str, num_tensors: int, fn: Fn) -> KernelCase:
        work = streams(num_tensors)
        return KernelCase(
            "dropout_add", direction, work, inputs, fn, torch_fn, candidates, explicit_backward="megalite"
        )

    return [case("forward", 3, forward), case("backward", 2, backward)]


LIGER_RMS_NORM = {"liger": liger("LigerRMSNormFunction", EPS, 0.0, "llama", False)}
LIGER_ADD_RMS_NORM = {"liger": liger("LigerFusedAddRMSNormFunction", EPS, 0.0, "llama", False)}
LIGER_LAYER_NORM = {"liger": liger("LigerLayerNormFunction", EPS)}
LIGER_SWIGLU = {"liger": liger("LigerSiLUMulFunction")}
CASES: list[KernelCase] = [
    *norm_cases("rms_norm", False, LIGER_RMS_NORM, LIGER_ADD_RMS_NORM),
    *norm_cases("layer_norm", True, LIGER_LAYER_NORM, {}),
    *rope_cases(),
    *activation_cases("swiglu", 2, swiglu, [], LIGER_SWIGLU, {"liger": lambda s: [s.rows(), s.rows()]}),
    *activation_cases("bias_gelu", 1, bias_gelu, [True], {}, {}),
    *activation_cases("bias_gelu_erf", 1, bias_gelu, [False], {}, {}),
    *dropout_cases(),
    *loss_cases(),
    *attention_cases(),
    *expert_cases(),
    *update_cases(),
]
# by the field of ProblemSizes: on a GPU, and in Triton's interpreter for the tests
GPU_SIZES = {
    "tokens": [16384],
    "hidden_size": [4096, 8192],
    "vocab_size": [128256],
    "sequence": [4096, 32768],
    "numel": [1 << 30],
    "expert_count": [1, 8, 16],
}
TINY_SIZES = {
    "tokens": [24],
    "hidden_size": [128],
    "vocab_size": [300],
    "sequence": [24],
    "numel": [3000],
    "expert_count": [1, 3],
}


def list_cases(
    sizes: Mapping[str, list[int]],
    dtype: torch.dtype,
    device: torch.device,
    ops: Sequence[str] = (),
    direction: str | None = None,
) -> list[tuple[KernelCase, ProblemSizes]]:
    """Return every case with every size of its axis, and with the first size of the other fields.

    Args:
        sizes: the values of each field of ProblemSizes.
        dtype: the dtype of the inputs.
        device: the device of the inputs.
        ops: operations to select, by default all.
        direction: a direction to select, by default all.
    """
    first_sizes = {name: values[0] for name, values in sizes.items()}
    base = ProblemSizes(dtype=dtype, device=device, **first_sizes)
    return [
        (case, replace(base, **{case.axis: size}))
        for case in CASES
        if (not ops or case.op in ops) and direction in (None, case.direction)
        for size in sizes[case.axis]
    ]
