"""Causal attention with grouped key/value heads: softmax(scale * q k^T + causal) v.

Layout in and out is sequence first: q_SBHK, k_TBGK, v_TBGK -> o_SBHK, H a multiple of G. Queries are at the positions
from `q_first`, keys at those from `k_first`, and both may be parts of the sequence; o of a query that sees no key is 0.
Parts of the queries, each with all keys that these see, are the whole, bit for bit the same mask. A fused kernel runs
(`backend` says which): saved are q, k, v, and for some o and one log-sum-exp per row, never the S x S scores. The mask
of dropout depends on coordinates (sample, head, query, key) and not on a generator's state, so torch's kernels cannot
draw it and our own do.

A sink is a logit per head that takes part in the softmax and has no value (GPT-OSS; of 0: "softmax off by one"):
p = exp(s - lse), lse = log(sum exp(s) + exp(sink)).

Where several documents share a sequence, attention stays within each: variable-length attention, whose work is the
sum of the squared lengths and which never makes a mask of S x S. In a sliding window of W keys work is S W, and there
is no such mask either. A window as long as the sequence (or a document) has no effect: the same kernel, the same bits.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.config import environment
from megalite.kernels.blocked_attention import AttentionParams, blocked_attention, fp16_to_fp32
from megalite.kernels.blocked_attention import is_fastest as blocked_supports
from megalite.kernels.dispatch import device_type, kernel_option, runs_triton, upcasts, use_triton
from megalite.kernels.dropout import keep_mask
from megalite.kernels.flash_attention import flash_attention, is_supported


class Documents(NamedTuple):
    """The documents in the samples of a micro-batch.

    spans     (sample, first position, end), by sample and position; they tile every sample, of which queries and keys
              may be parts
    first_BS  for every query the first position of its document
    """

    spans: tuple[tuple[int, int, int], ...]
    document_start_BS: Tensor


def attention_reference(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, documents: Documents | None = None, sink_H: Tensor | None = None,
    **given: Any,
) -> Tensor:  # fmt: skip
    """The definition, with the scores in memory; arguments as of `attention`."""
    params = AttentionParams(**given)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHK, k_TBGK, v_TBGK))
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    rows = torch.arange(params.q_start, params.q_start + q.shape[2], device=q.device).view(-1, 1)
    columns = torch.arange(params.k_start, params.k_start + k.shape[2], device=q.device)
    q, k = fp16_to_fp32(q, k)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * params.scale
    masked_out = columns > rows
    if params.window is not None:
        masked_out = masked_out | (columns <= rows - params.window)
    if documents is not None:
        masked_out = masked_out | (columns < documents.document_start_BS.unsqueeze(-1)).unsqueeze(1)
    sees_no_key = masked_out.all(-1, keepdim=True)  # softmax of these rows is of anything finite
    scores = scores.masked_fill(masked_out & ~sees_no_key, float("-inf"))
    if sink_H is not None:
        sink = sink_H.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(columns)]
    if (drop := params.drop) is not None:
        heads = torch.arange(drop.head_offset, drop.head_offset + q.shape[1], device=q.device).view(-1, 1, 1)
        keep = keep_mask(drop.key, drop.p, drop.sample_ids_B.view(-1, 1, 1, 1), heads, rows, columns)
        weights = weights * keep / (1 - drop.p)
    return (weights.to(v.dtype) @ v).masked_fill(sees_no_key, 0.0).permute(2, 0, 1, 3)


def forced_backend() -> str:
    """--attention-kernel: auto (the table of `backend`), or the name of one for every shape that it supports."""
    return kernel_option("attention_kernel")


def select_backend(
    q_SBHK: Tensor, v_TBGK: Tensor, *, has_documents: bool, window: bool = False, dropout: bool = False
) -> str:
    """The implementation for this shape: "triton" (kernels/flash_attention.py), "blocked" (blocked_attention.py),
    or torch's SDPA with "cudnn", "flash" or what it picks itself ("torch"). `masked`: there are documents; `window`:
    there is one, shorter than the sequence, or a part of the sequence, which SDPA would need as a mask of S x S, or a
    sink, or a width of the values' own, so SDPA is never used. With `dropout`, whose mask SDPA cannot draw, "triton" or
    "blocked"; "explicit" (attention_reference) if it is forced.

        a card, documents, a window, a part   triton where it can: one launch, work only where the mask is not
        a window, a part, a sink, a width     triton on a card, else blocked
        half precision, compute capability 9  cudnn: 1.4 times the speed of triton's forward at S 4096, 1.2 at 32k
        half precision on an older card       flash
        half precision on a CPU               blocked: faster than torch's (docs/experiments.md); in fp32 where the
                                              CPU has no instructions for it (dispatch.py: upcasts), as all others
        all else                              torch
        planned on the meta device            triton: q, k, v, o and lse are what any fused kernel keeps
    """
    if device_type(q_SBHK.device) != q_SBHK.device.type:
        return "explicit" if dropout and forced_backend() == "torch" else "triton"
    triton = use_triton(q_SBHK) and is_supported(q_SBHK, v_TBGK)
    if dropout:
        needs_own_kernel = "triton" if triton and forced_backend() in ("auto", "triton") else "blocked"
        return "explicit" if forced_backend() == "torch" else needs_own_kernel
    if forced_backend() != "auto":
        able = {"triton": triton, "blocked": window or blocked_supports(q_SBHK)}
        return forced_backend() if able.get(forced_backend(), not window) else "blocked" if window else "torch"
    if triton and (has_documents or window or kernel_option("kernels") == "triton" or not q_SBHK.is_cuda):
        return "triton"
    if window or (blocked_supports(q_SBHK) and not has_documents):
        return "blocked"
    if has_documents or not q_SBHK.is_cuda or q_SBHK.dtype not in (torch.bfloat16, torch.float16):
        return "torch"
    return "cudnn" if torch.cuda.get_device_capability(q_SBHK.device)[0] >= 9 else "flash"


def describe_backend(device_type: str, dropout: bool = False, half: bool = True, window: bool = False) -> str:
    """One line for the plan: the choice of `backend` on such a device; `half`: in half precision, `window`: some layers
    have one."""
    if dropout:
        needs_own_kernel = (
            "triton" if runs_triton(device_type) and forced_backend() in ("auto", "triton") else "blocked"
        )
        training = "explicit scores" if forced_backend() == "torch" else needs_own_kernel
        plain = describe_backend(device_type, half=half, window=window)
        return training if plain == training else f"{training}, for dropout; in evaluation {plain}"
    if forced_backend() != "auto":
        needs_own_kernel = forced_backend() in ("triton", "blocked")
        return f"{forced_backend()} ({environment.setting_name('attention_kernel')})" + (
            "" if needs_own_kernel else "; in a window: blocked"
        )
    if device_type != "cuda":
        rest = "blocked" if half else "torch; in a window blocked" if window else "torch"
        return "triton" if runs_triton(device_type) else rest
    if not runs_triton(device_type):
        return "cudnn or flash; by document: torch; in a window: blocked"
    return "triton" if kernel_option("kernels") == "triton" else "cudnn or flash; by document or in a window: triton"


def is_16_byte_aligned(x: Tensor) -> bool:
    """Whether its rows begin at multiples of 16 bytes: a card's fused kernels read 16 bytes at a time, and with other
    rows they fail, fault or read wrong elements (cuDNN 9.19), without a check."""
    steps = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    return x.stride(-1) == 1 and not any(step % 16 for step in steps)


def aligned_for_kernel(x: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """x as a card's fused kernel can read it, with `strides` where they are given (along one element they say nothing);
    a copy, unless it is so already."""
    same = strides is None or all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))
    if same and is_16_byte_aligned(x):
        return x
    if strides is None:
        return x.clone(memory_format=torch.contiguous_format)
    return x.new_empty_strided(x.shape, strides).copy_(x)


@contextlib.contextmanager
def _sdpa_backends(name: str) -> Iterator[None]:
    """Torch's fused attention by `name` first; by others where it cannot do the shape, unless it is forced."""
    if name not in ("cudnn", "flash"):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION]
    if forced_backend() == "auto":
        order += [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(list(dict.fromkeys(order)), set_priority=True):
        yield


def attention(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, documents: Documents | None = None, sink_H: Tensor | None = None,
    **given: Any,
) -> Tensor:  # fmt: skip
    """o_SBHK of one or more queries and keys. `documents` None: one per sample. sink_H: of each head a logit without a
    value; None: there is none. `given`: the fields of Scoring. Values may have another width than queries and keys, and
    o has it, too."""
    params = AttentionParams(**given)
    if params.window is not None and params.window >= params.q_start + q_SBHK.shape[0] - params.k_start:
        params = params._replace(window=None)
    is_partial = params.q_start != params.k_start or q_SBHK.shape[0] != k_TBGK.shape[0]
    needs_own_kernel = (
        is_partial or params.window is not None or sink_H is not None or v_TBGK.shape[-1] != q_SBHK.shape[-1]
    )
    name = select_backend(
        q_SBHK, v_TBGK, has_documents=documents is not None, window=needs_own_kernel, dropout=params.drop is not None
    )
    qkv, given = (q_SBHK, k_TBGK, v_TBGK), {"sink_H": sink_H, **params._asdict()}
    if name == "explicit":
        explicit = partial(attention_reference, documents=documents, **params._asdict())
        return _in_fp32(lambda q, k, v, sink: explicit(q, k, v, sink_H=sink), *qkv, sink_H)
    if name == "triton":
        return flash_attention(*qkv, first_BS=None if documents is None else documents.document_start_BS, **given)
    if documents is not None:
        return _attend_per_document(*qkv, documents, sink_H, params)
    if name == "blocked":
        return blocked_attention(*qkv, **given)
    q, k, v = ((aligned_for_kernel(x) if x.is_cuda else x).permute(1, 2, 0, 3) for x in qkv)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # no fused kernel there takes groups in fp32
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, scale=params.scale, enable_gqa=grouped)
    with _sdpa_backends(name):
        o = _in_fp32(sdpa, q, k, v)
    if o.is_cuda and o.requires_grad:
        # cuDNN 9.19 (torch 2.11): with groups and other strides than o's, dq was wrong. Flash attention takes any.
        strides = o.stride() if name == "cudnn" else None
        o.register_hook(lambda do: aligned_for_kernel(do, strides))
    return o.permute(2, 0, 1, 3)


class _InFp32(Function):
    """`fn` of tensors in fp32, its result in the dtype of the first. The tensors are saved in their own dtypes, and
    backward calls `fn` again."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        return fn(*(None if x is None else x.float() for x in tensors)).to(tensors[0].dtype)  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wide = [None if x is None else x.detach().float().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            o = ctx.fn(*wide)
        grads = iter(torch.autograd.grad(o, [x for x in wide if x is not None], do.float()))
        return None, *(None if x is None else next(grads).to(x.dtype) for x in ctx.saved_tensors)


def _in_fp32(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """`fn(*tensors)`, in fp32 where a CPU multiplies them in it."""
    if tensors[0] is None or not upcasts(tensors[0]):
        return fn(*tensors)
    return _InFp32.apply(fn, *tensors)  # type: ignore[return-value]


def _attend_per_document(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, documents: Documents, sink_H: Tensor | None, params: AttentionParams
) -> Tensor:
    """Each document's queries with its keys, where the parts have such."""
    rows: list[list[Tensor]] = [[] for _ in range(q_SBHK.shape[1])]
    for row, start, end in documents.spans:
        first, last = max(start, params.q_start), min(end, params.q_start + q_SBHK.shape[0])
        if first >= last:
            continue
        q = q_SBHK[first - params.q_start : last - params.q_start, row : row + 1]
        low = max(start, params.k_start)
        k, v = (
            x[low - params.k_start : max(low, last) - params.k_start, row : row + 1] for x in (k_TBGK, v_TBGK)
        )  # or none
        drop = params.drop and params.drop._replace(sample_ids_B=params.drop.sample_ids_B[row : row + 1])
        here = params._replace(drop=drop, q_start=first, k_start=low)
        rows[row].append(attention(q, k, v, sink_H=sink_H, **here._asdict()))
    return torch.cat([torch.cat(row) for row in rows], dim=1)
