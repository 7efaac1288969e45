"""The cases of tools/bench/kernels.py for causal attention: the dispatcher, the Triton kernel and torch's backends."""

import contextlib
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import flash_attention
from megalite.kernels.attention import attention
from tools.bench.kernel_case import Candidates, Fn, KernelCase, ProblemSizes, WorkModel, table_candidates

SOFTCAP = 50.0  # of Gemma 2
QUERY_GROUP = 4  # query heads per key head, as in Llama 3
TILE_VALUES = {"block_m": (64, 128, 256), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}


def shape(s: ProblemSizes) -> tuple[int, int, int, int]:
    """Return S, B, H, G: the tokens are samples of S positions, and the queries have hidden_size columns."""
    heads = max(1, s.hidden_size // s.head_size)
    return s.sequence, max(1, s.tokens // s.sequence), heads, max(1, heads // QUERY_GROUP)


def make_inputs(s: ProblemSizes) -> list[Tensor]:
    """Return q, k and v."""
    S, B, H, G = shape(s)
    return [s.normal(S, B, heads, s.head_size) for heads in (H, G, G)]


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, fn: Fn = attention, softcap: float | None = None) -> Tensor:
    """Return the attention of `fn`, by default the dispatcher's choice, with the usual scale."""
    return fn(q, k, v, scale=q.shape[-1] ** -0.5, softcap=softcap)


triton_attention = partial(scaled_attention, fn=flash_attention.flash_attention)


def sdpa(backend: str | None) -> Fn:
    """Return torch's attention by one backend, or with torch's choice, on the layout of the model."""

    def run(q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHK, k_SBGK, v_SBGK))
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backends[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def attention_work(formula: str, num_matmuls: int, num_tensors: int) -> WorkModel:
    """Return the work of attention.

    Args:
        formula: how it is counted.
        num_matmuls: matmuls of 2 S S K FLOPs per head; the causal mask halves them.
        num_tensors: tensors of the queries' size, and as many of the keys' size, that are read or written.
    """

    def flops(s: ProblemSizes) -> float:
        S, B, H, _ = shape(s)
        return num_matmuls * 1.0 * S * S * s.head_size * B * H

    def bytes_moved(s: ProblemSizes) -> float:
        S, B, H, G = shape(s)
        return num_tensors * (H + G) * S * B * s.head_size * s.dtype.itemsize

    return WorkModel(formula, bytes_moved, flops)


def candidates(s: ProblemSizes, direction: str) -> Candidates:
    """Yield the tiles to try. The backward has two kernels, whose tiles are tried one after the other."""
    head = s.normal(1, 1, 1, s.head_size)
    key = flash_attention.tile_key(head, head)
    if direction == "forward":
        tables = {"": flash_attention.FORWARD_TILES}
    else:
        tables = {"q_": flash_attention.BACKWARD_Q_TILES, "kv_": flash_attention.BACKWARD_KV_TILES}
    for prefix, table in tables.items():
        yield from table_candidates(table, key, {prefix + name: values for name, values in TILE_VALUES.items()})


def attention_cases() -> list[KernelCase]:
    """Return the cases of attention, without and with capped scores, for which torch has no fused kernel."""
    forward = attention_work("2 S S K B H FLOPs (causal); q, k, v, o once", 2, 2)
    backward = attention_work("5 S S K B H FLOPs (causal); q, k, v, o, do, dq, dk, dv once", 5, 4)
    cases = []
    for direction, work in (("forward", forward), ("backward", backward)):
        plain = KernelCase(
            "attention",
            direction,
            work,
            make_inputs,
            scaled_attention,
            sdpa(None),
            partial(candidates, direction=direction),
            axis="sequence",
            peers={"triton": triton_attention, "cudnn": sdpa("cudnn"), "flash": sdpa("flash")},
            compiles=False,
            sweep_peer="triton",
        )
        capped = replace(
            plain,
            op="attention capped",
            megalite_fn=partial(scaled_attention, softcap=SOFTCAP),
            torch_fn=None,
            peers={},
            sweep_peer="megalite",
        )
        cases += [plain, capped]
    return cases
