"""The cases of tools/bench/kernels.py: kernels over [N, D] that are limited by memory, each with its peers."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import bias_gelu, dropout, norms, rope
from megalite.kernels.activations import swiglu
from megalite.kernels.dispatch import tile_for
from tools.bench.kernel_attention_case import attention_cases
from tools.bench.kernel_case import Case, Fn, Make, Sizes, Swept, blocks, liger, streams
from tools.bench.kernel_expert_cases import expert_cases
from tools.bench.kernel_loss_cases import flat_cases, loss_cases

EPS, P, KEY = 1e-5, 0.1, 0xC0FFEE01


# --- peers in plain torch, the same work as ours

PLAIN: dict[str, Fn] = {
    "rms_norm": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b, EPS),
    "swiglu": lambda u: F.silu(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1],
    "bias_gelu": lambda u, b: F.gelu(u + b, approximate="tanh"),
    "bias_gelu_erf": lambda u, b: F.gelu(u + b, approximate="none"),
}


def add_then(norm: Fn) -> Fn:
    def run(x: Tensor, a: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        h = x + a
        return h, norm(h, *weights)

    return run


def both(plain: Fn) -> Fn:
    """The activation and its gradient from the input, which is what the backward of nn/linear.py needs."""

    def run(da: Tensor, *inputs: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            a = plain(*leaves)
            return a, *torch.autograd.grad(a, leaves, da)

    return run


# --- the rows of the table


def norm_cases(op: str, bias: bool, peers: Mapping[str, Fn], fused: Mapping[str, Fn]) -> list[Case]:
    plain, no_bias = PLAIN[op], [] if bias else [None]

    def inputs(added: bool) -> Make:
        return lambda s: [s.rows() for _ in range(1 + added)] + [s.normal(s.hidden_size) for _ in range(1 + bias)]

    def tiles(s: Sizes, table: Any, walks: bool) -> Swept:
        own = tile_for(table, s.hidden_size)
        return blocks(norms.__dict__, "tile_for", own, s.hidden_size, walks, lambda tile: lambda table, columns: tile)

    def case(name: str, added: bool, backward: bool, factor: int, plain: Fn, others: Mapping[str, Fn]) -> Case:
        public: Fn = norms.add_norm if added else norms.norm
        table = (norms.BACKWARD_CENTERED if bias else norms.BACKWARD) if backward else norms.FORWARD
        half = "backward" if backward else "forward"

        def ours(*x: Any) -> Any:
            return public(*x, *no_bias, EPS)

        swept = functools.partial(tiles, table=table, walks=backward)
        return Case(name, half, streams(factor), inputs(added), ours, plain, swept, peers=others)

    return [
        case(op, False, False, 2, plain, peers),
        case(op, False, True, 3, plain, peers),
        case(f"add_{op}", True, False, 4, add_then(plain), fused),
        case(f"add_{op}", True, True, 4, add_then(plain), fused),
    ]


def activation_cases(
    op: str, width: int, module: Any, more: list[Any], peers: Mapping[str, Fn], own: Mapping[str, Make]
) -> list[Case]:
    """`more`: arguments of the launchers between the tensors and the tile; with any, a bias is the last tensor.
    Backward is a pass of its own, which returns the activation and the gradient."""

    def inputs(s: Sizes) -> list[Tensor]:
        return [s.rows(width)] + ([s.normal(s.hidden_size)] if more else [])

    def with_da(make: Make) -> Make:
        return lambda s: [s.rows(), *make(s)]

    def ours(u: Tensor, *b: Tensor) -> Any:
        return module.forward(u, *b, *more, module.FORWARD_TILE)

    def ours_backward(da: Tensor, u: Tensor, *b: Tensor) -> Any:
        return module.backward(u, da, *b, *more, module.BACKWARD_TILE)

    def tiles(s: Sizes, name: str) -> Swept:
        own = vars(module)[name]
        return blocks(vars(module), name, own, s.hidden_size, own.programs > 1)

    first, second = (functools.partial(tiles, name=name) for name in ("FORWARD_TILE", "BACKWARD_TILE"))
    how: dict[str, Any] = dict(direct="all", wrap=both, own_inputs={name: with_da(own[name]) for name in own})
    after = (streams(2 + 2 * width), with_da(inputs), ours_backward, PLAIN[op], second)
    return [
        Case(op, "forward", streams(1 + width), inputs, ours, PLAIN[op], first, peers=peers, own_inputs=own),
        Case(op, "backward", *after, peers=peers, **how),
    ]


def rope_cases() -> list[Case]:
    def inputs(s: Sizes) -> list[Tensor]:
        cos, sin = rope.rope_tables(s.tokens, s.head_size, 1e4, device=s.device)
        return [s.normal(s.tokens, 1, s.hidden_size // s.head_size, s.head_size), cos, sin]

    def ligers(s: Sizes) -> list[Tensor]:
        """q and k [B, H, S, K], of which k has one head here, since it always takes both; tables of a whole head."""
        q, k = (s.normal(1, heads, s.tokens, s.head_size) for heads in (s.hidden_size // s.head_size, 1))
        return [q, k, *(torch.cat([t, t], -1)[None] for t in inputs(s)[1:])]

    def tiles(s: Sizes) -> Swept:
        return blocks(rope.__dict__, "BLOCK", rope.BLOCK, s.hidden_size, False)

    def case(half: str, sign: float) -> Case:
        """Backward is the same pass with the other sign."""

        def ours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rope.rotate_triton(x, cos, sin, sign, rope.BLOCK)

        peers = {"liger": liger("LigerRopeFunction")} if half == "forward" else {}
        plain = functools.partial(rope.rotate_reference, sign=sign)
        what = ("rope", half, streams(2), inputs, ours, plain, tiles)
        return Case(*what, direct="all", peers=peers, own_inputs={"liger": ligers})

    return [case("forward", 1.0), case("backward", -1.0)]


def dropout_cases() -> list[Case]:
    def inputs(s: Sizes) -> list[Tensor]:
        return [s.normal(s.tokens, 1, s.hidden_size) for _ in range(2)]

    def tiles(s: Sizes) -> Swept:
        return blocks(dropout.__dict__, "BLOCK", dropout.BLOCK, s.hidden_size, False)

    def case(half: str, factor: int) -> Case:
        def ours(x: Tensor, a: Tensor) -> Tensor:
            """Backward is the same pass over the gradient, and adds nothing."""
            ids, added = torch.zeros(1, dtype=torch.int64, device=x.device), a if half == "forward" else None
            return dropout.dropout_triton(x, added, P, KEY, ids, 0, dropout.BLOCK)

        plain: Fn = lambda x, a: F.dropout(x, P) + a  # noqa: E731
        return Case("dropout_add", half, streams(factor), inputs, ours, plain, tiles, direct="ours")

    return [case("forward", 3), case("backward", 2)]


RMS = {"liger": liger("LigerRMSNormFunction", EPS, 0.0, "llama", False)}
ADD_RMS = {"liger": liger("LigerFusedAddRMSNormFunction", EPS, 0.0, "llama", False)}
LAYER = {"liger": liger("LigerLayerNormFunction", EPS)}
SILU_MUL = {"liger": liger("LigerSiLUMulFunction")}
CASES: list[Case] = [
    *norm_cases("rms_norm", False, RMS, ADD_RMS),
    *norm_cases("layer_norm", True, LAYER, {}),
    *rope_cases(),
    *activation_cases("swiglu", 2, swiglu, [], SILU_MUL, {"liger": lambda s: [s.rows(), s.rows()]}),
    *activation_cases("bias_gelu", 1, bias_gelu, [True], {}, {}),
    *activation_cases("bias_gelu_erf", 1, bias_gelu, [False], {}, {}),
    *dropout_cases(),
    *loss_cases(),
    *attention_cases(),
    *expert_cases(),
    *flat_cases(),
]
