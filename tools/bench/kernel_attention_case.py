"""Cases of tools/bench/kernels.py: causal attention, by who computes it."""

import contextlib
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import flash_attention
from megalite.kernels.attention import attention
from tools.bench.kernel_case import Case, Fn, Sizes, Swept, Work, entries

GROUP = 4  # query heads to a key head, as in Llama 3
TILE = {"rows": (64, 128, 256), "columns": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}


def shape(s: Sizes) -> tuple[int, int, int, int]:
    """S, B, H, G: all tokens in samples of S, hidden_size columns of queries."""
    heads = max(1, s.hidden_size // s.head_size)
    return s.sequence, max(1, s.tokens // s.sequence), heads, max(1, heads // GROUP)


def inputs(s: Sizes) -> list[Tensor]:
    S, B, H, G = shape(s)
    return [s.normal(S, B, heads, s.head_size) for heads in (H, G, G)]


def chosen(q: Tensor, k: Tensor, v: Tensor, by: Fn = attention) -> Tensor:
    return by(q, k, v, scale=q.shape[-1] ** -0.5)


own = partial(chosen, by=flash_attention.flash_attention)


def sdpa(name: str | None) -> Fn:
    """torch's, by one backend alone (None: as torch chooses), on the layout that the model has."""

    def run(q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHK, k_SBGK, v_SBGK))
        kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        with contextlib.nullcontext() if name is None else sdpa_kernel(kinds[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def work(formula: str, matmuls: int, sized: int) -> Work:
    """`matmuls` of 2 S S K per head, of which the mask leaves half; so many tensors of queries, and as many of keys."""

    def flops(s: Sizes) -> float:
        S, B, H, _ = shape(s)
        return matmuls * 1.0 * S * S * s.head_size * B * H

    def bytes_of(s: Sizes) -> float:
        S, B, H, G = shape(s)
        return sized * (H + G) * S * B * s.head_size * s.dtype.itemsize

    return Work(formula, bytes_of, flops)


def tiles(s: Sizes, half: str) -> Swept:
    """Backward has two kernels, whose tiles are tried one after the other."""
    head = s.normal(1, 1, 1, s.head_size)
    key, tables = flash_attention.tile_key(head, head), {"": flash_attention.FORWARD_TILES}
    if half == "backward":
        tables = {"q_": flash_attention.BACKWARD_Q_TILES, "kv_": flash_attention.BACKWARD_KV_TILES}
    for prefix, table in tables.items():
        yield from entries(table, key, {prefix + name: values for name, values in TILE.items()})


def attention_cases() -> list[Case]:
    forward = work("2 S S K B H FLOPs (causal); q, k, v, o once", 2, 2)
    backward = work("5 S S K B H FLOPs (causal); q, k, v, o, do, dq, dk, dv once", 5, 4)
    peers = {"triton": own, "cudnn": sdpa("cudnn"), "flash": sdpa("flash")}
    how: dict[str, Any] = dict(axis="sequence", peers=peers, compiles=False, swept="triton")
    return [
        Case("attention", half, amount, inputs, chosen, sdpa(None), partial(tiles, half=half), **how)
        for half, amount in (("forward", forward), ("backward", backward))
    ]
