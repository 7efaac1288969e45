"""Cases of tools/bench/kernels.py: causal attention, by who computes it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import flash_attention
from megalite.kernels.attention import attention
from tools.bench.kernel_case import Case, Fn, Sizes, Tile, Work, call, entries

GROUP = 4  # query heads to a key head, as in Llama 3
TILE = {"rows": (64, 128, 256), "columns": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}


def shape(s: Sizes) -> tuple[int, int, int, int]:
    """S, B, H, G: all tokens in samples of S, hidden_size columns of queries."""
    heads = max(1, s.hidden_size // s.head_size)
    return s.sequence, max(1, s.tokens // s.sequence), heads, max(1, heads // GROUP)


def inputs(s: Sizes) -> list[Tensor]:
    S, B, H, G = shape(s)
    return [s.normal(S, B, heads, s.head_size) for heads in (H, G, G)]


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, scale=q.shape[-1] ** -0.5)


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention.flash_attention(q, k, v, scale=q.shape[-1] ** -0.5)


def sdpa(name: str | None) -> Fn:
    """torch's, by one backend alone (None: as torch chooses), on the layout that the model has."""

    def run(q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHK, k_SBGK, v_SBGK))
        kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        with contextlib.nullcontext() if name is None else sdpa_kernel(kinds[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def flops(matmuls: int) -> Any:
    """`matmuls` of 2 S S K per head, of which the mask leaves half."""

    def count(s: Sizes) -> float:
        S, B, H, _ = shape(s)
        return matmuls * 1.0 * S * S * s.head_size * B * H

    return count


def bytes_of(query_sized: int, key_sized: int) -> Any:
    def count(s: Sizes) -> float:
        S, B, H, G = shape(s)
        return (query_sized * H + key_sized * G) * S * B * s.head_size * s.dtype.itemsize

    return count


def tiles(half: str) -> Any:
    """Of backward: those of its two kernels, one after the other."""
    tables = {"": flash_attention.FORWARD}
    if half == "backward":
        tables = {"q_": flash_attention.BACKWARD_Q, "kv_": flash_attention.BACKWARD_KV}

    def make(s: Sizes) -> Iterator[tuple[Tile, Any]]:
        given = inputs(s)
        launch, key = call(own, given, half), flash_attention.unit(given[0])
        return itertools.chain(*(
            entries(table, key, {prefix + name: values for name, values in TILE.items()}, launch)
            for prefix, table in tables.items()
        ))  # fmt: skip

    return make


def attention_cases() -> list[Case]:
    forward = Work("2 S S K B H FLOPs (causal); q, k, v, o once", bytes_of(2, 2), flops(2))
    backward = Work("5 S S K B H FLOPs (causal); q, k, v, o, do, dq, dk, dv once", bytes_of(4, 4), flops(5))
    peers = {"triton": own, "cudnn": sdpa("cudnn"), "flash": sdpa("flash")}
    return [
        Case(
            *("attention", half, work, inputs, chosen, sdpa(None), tiles(half)),
            axis="sequence",
            peers=peers,
            compiles=False,
        )
        for half, work in (("forward", forward), ("backward", backward))
    ]
