"""Causal attention with grouped key/value heads: softmax(scale * q k^T + causal) v.

Inputs and output are sequence first: q_SBHK, k_TBGK, v_TBGK -> o_SBHK, with H a multiple of G. Queries start at
position `q_start` and keys at position `k_start`, and both may be parts of the sequence; o is 0 for a query that sees
no key. Attention may be computed for one range of queries at a time, each with all keys that it sees; the mask is
bitwise the same. A fused kernel runs (`select_backend` chooses it). Saved for backward are q, k, v, and for some
kernels also o and one log-sum-exp per row, never the S x S scores. The dropout mask depends on coordinates (sample,
head, query, key) and not on a generator's state, so torch's kernels cannot draw it and megalite's kernels do.

Soft-capping bounds the scores before the mask: s = cap tanh(scale q k^T / cap) (kernels/softcap.py).

Scores may have a second summand, q_pe_SBHR times keys k_pe_TBR that all heads share: the rotary part of latent
attention (nn/latent_attention.py). The keys are not copied to the heads, and their gradient is summed over them.

A sink is a logit per head that takes part in the softmax and has no value (GPT-OSS; a sink of 0 is "softmax off by
one"): p = exp(s - lse), lse = log(sum exp(s) + exp(sink)). It is not capped.

If several documents share a sequence, queries attend only within their document: variable-length attention, whose work
is the sum of the squared lengths and which never allocates an S x S mask. In a sliding window of W keys the work is S
W, also without such a mask. A window as long as the sequence (or a document) has no effect: the same kernel runs, with
bitwise the same results.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.config.env_overrides import setting_name
from megalite.kernels.blocked_attention import AttentionParams, blocked_attention, fp16_to_fp32, join_shared_keys
from megalite.kernels.blocked_attention import is_fastest as blocked_supports
from megalite.kernels.dispatch import device_type, kernel_option, runs_triton, upcasts, use_triton
from megalite.kernels.dropout import keep_mask
from megalite.kernels.flash_attention import flash_attention, is_supported
from megalite.kernels.softcap import soft_cap


class Documents(NamedTuple):
    """The documents in the samples of a micro-batch.

    spans              (sample, first position, end), sorted by sample and position; they tile every sample, also if the
                       queries and keys are only a part of it
    document_start_BS  the first position of the document of every query
    """

    spans: tuple[tuple[int, int, int], ...]
    document_start_BS: Tensor


def attention_reference(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, q_pe_SBHR: Tensor | None = None, k_pe_TBR: Tensor | None = None,
    documents: Documents | None = None, sink_H: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Compute attention by its definition, with all scores in memory; the arguments are the same as in `attention`."""
    params = AttentionParams(**kwargs)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHK, k_TBGK, v_TBGK))
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    rows = torch.arange(params.q_start, params.q_start + q.shape[2], device=q.device).view(-1, 1)
    columns = torch.arange(params.k_start, params.k_start + k.shape[2], device=q.device)
    q, k = fp16_to_fp32(q, k)
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(score_dtype)
    if q_pe_SBHR is not None and k_pe_TBR is not None:
        q_pe, k_pe = fp16_to_fp32(q_pe_SBHR.permute(1, 2, 0, 3), k_pe_TBR.transpose(0, 1).unsqueeze(1))
        scores = scores + (q_pe @ k_pe.mT).to(score_dtype)
    scores = scores * params.scale
    scores = soft_cap(scores, params.softcap)
    masked_out = columns > rows
    if params.window is not None:
        masked_out = masked_out | (columns <= rows - params.window)
    if documents is not None:
        masked_out = masked_out | (columns < documents.document_start_BS.unsqueeze(-1)).unsqueeze(1)
    sees_no_key = masked_out.all(-1, keepdim=True)  # these rows keep finite scores, so that softmax gives no NaN
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
    """Return the value of --attention-kernel.

    It is "auto" (see the table of `select_backend`) or a backend's name, which is used for all shapes that it supports.
    """
    return kernel_option("attention_kernel")


def select_backend(
    q_SBHK: Tensor, v_TBGK: Tensor, *, has_documents: bool, window: bool = False, dropout: bool = False, pe_dim: int = 0
) -> str:
    """Return the name of the implementation for this shape.

    "triton" is kernels/flash_attention.py, "blocked" is blocked_attention.py, "explicit" is attention_reference, and
    "cudnn", "flash" and "torch" are torch's SDPA with that backend or with the one that torch selects.

        documents, window or part, on a GPU   triton if it supports the shape: one launch, which skips masked blocks
        window, part, sink, value width, cap,  triton on a GPU, otherwise blocked
        shared keys
        half precision, compute capability 9  cudnn: 1.4 times the speed of triton's forward at S 4096, 1.2 at 32k
        half precision, older GPU             flash
        half precision on a CPU               blocked: faster than torch's (docs/experiments.md); like all others, it
                                              computes in fp32 if the CPU has no instructions for half precision
                                              (dispatch.py: upcasts)
        dropout                               triton, otherwise blocked; explicit if --attention-kernel is torch
        everything else                       torch
        planned on the meta device            triton: every fused kernel saves q, k, v, o and lse, as it does

    Args:
        q_SBHK: the queries.
        v_TBGK: the values.
        has_documents: if several documents share a sequence.
        window: if there is a feature that SDPA does not support, or only with a mask of S x S: a window shorter than
            the sequence, a part of the sequence, a sink, capped scores, values of another width than the keys, or
            shared keys.
        dropout: if there is dropout, whose mask SDPA cannot draw.
        pe_dim: the channels of the shared keys, or 0.
    """
    if device_type(q_SBHK.device) != q_SBHK.device.type:
        return "explicit" if dropout and forced_backend() == "torch" else "triton"
    triton = use_triton(q_SBHK) and is_supported(q_SBHK, v_TBGK, pe_dim)
    if dropout:
        if forced_backend() == "torch":
            return "explicit"
        return "triton" if triton and forced_backend() in ("auto", "triton") else "blocked"
    if forced_backend() != "auto":
        supported = {"triton": triton, "blocked": window or blocked_supports(q_SBHK)}
        if supported.get(forced_backend(), not window):
            return forced_backend()
        return "blocked" if window else "torch"
    if triton and (has_documents or window or kernel_option("kernels") == "triton" or not q_SBHK.is_cuda):
        return "triton"
    if window or (blocked_supports(q_SBHK) and not has_documents):
        return "blocked"
    if has_documents or not q_SBHK.is_cuda or q_SBHK.dtype not in (torch.bfloat16, torch.float16):
        return "torch"
    return "cudnn" if torch.cuda.get_device_capability(q_SBHK.device)[0] >= 9 else "flash"


def describe_backend(
    device_type: str, dropout: bool = False, half: bool = True, window: bool = False, needs_own_kernel: bool = False
) -> str:
    """Return one line for the plan summary: the choices of `select_backend` on devices of this type.

    Args:
        device_type: "cuda" or "cpu".
        dropout: if training has attention dropout.
        half: if the run computes in half precision.
        window: if some layers have a window.
        needs_own_kernel: if scores are capped or keys are shared, which SDPA does not support.
    """
    uses_triton = runs_triton(device_type) and forced_backend() in ("auto", "triton")
    own_kernel = "triton" if uses_triton else "blocked"
    if dropout:
        training = "explicit scores" if forced_backend() == "torch" else own_kernel
        evaluation = describe_backend(device_type, half=half, window=window, needs_own_kernel=needs_own_kernel)
        return training if evaluation == training else f"{training}, for dropout; in evaluation {evaluation}"
    if needs_own_kernel:
        return own_kernel
    if forced_backend() != "auto":
        line = f"{forced_backend()} ({setting_name('attention_kernel')})"
        supports_windows = forced_backend() in ("triton", "blocked")
        return line if supports_windows else line + "; in a window: blocked"
    if device_type != "cuda":
        if runs_triton(device_type):
            return "triton"
        if half:
            return "blocked"
        return "torch; in a window blocked" if window else "torch"
    if not runs_triton(device_type):
        return "cudnn or flash; by document: torch; in a window: blocked"
    return "triton" if kernel_option("kernels") == "triton" else "cudnn or flash; by document or in a window: triton"


def is_16_byte_aligned(x: Tensor) -> bool:
    """Return whether all rows of `x` are contiguous and start at multiples of 16 bytes.

    Fused CUDA kernels read 16 bytes at a time and do not check alignment: with other rows they fail, fault or read
    wrong elements (cuDNN 9.19).
    """
    addresses = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    return x.stride(-1) == 1 and not any(address % 16 for address in addresses)


def aligned_for_kernel(x: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """Return `x` in a layout that fused CUDA kernels can read; it is copied only if its layout is another one.

    Args:
        x: a tensor of queries, keys, values or their gradients.
        strides: the required strides (ignored in dimensions of size 1); None: any strides whose rows are aligned.
    """
    strides_match = strides is None or all(
        n == 1 or actual == required for n, actual, required in zip(x.shape, x.stride(), strides, strict=True)
    )
    if strides_match and is_16_byte_aligned(x):
        return x
    if strides is None:
        return x.clone(memory_format=torch.contiguous_format)
    return x.new_empty_strided(x.shape, strides).copy_(x)


@contextlib.contextmanager
def _sdpa_backends(name: str) -> Iterator[None]:
    """Prefer this backend of SDPA; if --attention-kernel is auto, others serve shapes that it does not support."""
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
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, q_pe_SBHR: Tensor | None = None, k_pe_TBR: Tensor | None = None,
    documents: Documents | None = None, sink_H: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return o_SBHK, causal attention of the queries to the keys and values.

    Args:
        q_SBHK: the queries, at least one.
        k_TBGK: the keys.
        v_TBGK: the values. Their width may differ from the keys'; o has the width of the values.
        q_pe_SBHR: the channels of the queries that meet the keys in `k_pe_TBR`; None: none.
        k_pe_TBR: the keys that all heads share: scores are the sum of both products.
        documents: the documents that share a sequence; None: one document per sample.
        sink_H: a logit without a value per head; None: no sink.
        **kwargs: the fields of AttentionParams.
    """
    params = AttentionParams(**kwargs)
    if params.window is not None and params.window >= params.q_start + q_SBHK.shape[0] - params.k_start:
        params = params._replace(window=None)
    is_partial = params.q_start != params.k_start or q_SBHK.shape[0] != k_TBGK.shape[0]
    if q_pe_SBHR is not None and use_triton(q_SBHK) and not is_supported(q_SBHK, v_TBGK, q_pe_SBHR.shape[-1]):
        joined_q, joined_k = join_shared_keys(q_SBHK, k_TBGK, q_pe_SBHR, k_pe_TBR)
        if is_supported(joined_q, v_TBGK):  # for example 192 + 64 channels, which fill a tile of 256
            q_SBHK, k_TBGK, q_pe_SBHR, k_pe_TBR = joined_q, joined_k, None, None
    needs_own_kernel = (
        is_partial
        or params.window is not None
        or params.softcap is not None
        or sink_H is not None
        or q_pe_SBHR is not None
        or v_TBGK.shape[-1] != q_SBHK.shape[-1]
    )
    name = select_backend(
        q_SBHK,
        v_TBGK,
        has_documents=documents is not None,
        window=needs_own_kernel,
        dropout=params.drop is not None,
        pe_dim=0 if q_pe_SBHR is None else q_pe_SBHR.shape[-1],
    )
    qkv = (q_SBHK, k_TBGK, v_TBGK)
    kernel_kwargs = {"q_pe_SBHR": q_pe_SBHR, "k_pe_TBR": k_pe_TBR, "sink_H": sink_H, **params._asdict()}
    if name == "explicit":
        explicit = partial(attention_reference, documents=documents, **params._asdict())

        def run(
            q: Tensor, k: Tensor, v: Tensor, q_pe: Tensor | None, k_pe: Tensor | None, sink: Tensor | None
        ) -> Tensor:
            return explicit(q, k, v, q_pe_SBHR=q_pe, k_pe_TBR=k_pe, sink_H=sink)

        return _in_fp32(run, *qkv, q_pe_SBHR, k_pe_TBR, sink_H)
    if name == "triton":
        document_start_BS = None if documents is None else documents.document_start_BS
        return flash_attention(*qkv, document_start_BS=document_start_BS, **kernel_kwargs)
    if documents is not None:
        return _attend_per_document(*qkv, q_pe_SBHR, k_pe_TBR, documents, sink_H, params)
    if name == "blocked":
        return blocked_attention(*qkv, **kernel_kwargs)
    q, k, v = ((aligned_for_kernel(x) if x.is_cuda else x).permute(1, 2, 0, 3) for x in qkv)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # no fused CUDA kernel supports groups in fp32
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, scale=params.scale, enable_gqa=grouped)
    with _sdpa_backends(name):
        o = _in_fp32(sdpa, q, k, v)
    if o.is_cuda and o.requires_grad:
        # With cuDNN 9.19 (torch 2.11) dq was wrong for groups if do had other strides than o. Flash attention supports
        # all strides.
        strides = o.stride() if name == "cudnn" else None
        o.register_hook(lambda do: aligned_for_kernel(do, strides))
    return o.permute(2, 0, 1, 3)


class _InFp32(Function):
    """The result of `fn` for tensors converted to fp32, rounded to the dtype of the first tensor.

    The tensors are saved in their original dtypes, and backward recomputes `fn`.
    """

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        return fn(*(None if x is None else x.float() for x in tensors)).to(tensors[0].dtype)  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs_fp32 = [None if x is None else x.detach().float().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            o = ctx.fn(*inputs_fp32)
        grads = iter(torch.autograd.grad(o, [x for x in inputs_fp32 if x is not None], do.float()))
        return None, *(None if x is None else next(grads).to(x.dtype) for x in ctx.saved_tensors)


def _in_fp32(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return `fn(*tensors)`, computed in fp32 if this CPU has no instructions for the dtype of the first tensor."""
    if tensors[0] is None or not upcasts(tensors[0]):
        return fn(*tensors)
    return _InFp32.apply(fn, *tensors)  # type: ignore[return-value]


def _attend_per_document(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, q_pe_SBHR: Tensor | None, k_pe_TBR: Tensor | None,
    documents: Documents, sink_H: Tensor | None, params: AttentionParams,
) -> Tensor:  # fmt: skip
    """Compute attention for one document at a time, for all documents that overlap the queries."""
    outputs_by_sample: list[list[Tensor]] = [[] for _ in range(q_SBHK.shape[1])]
    for sample, start, end in documents.spans:
        q_start = max(start, params.q_start)
        q_end = min(end, params.q_start + q_SBHK.shape[0])
        if q_start >= q_end:
            continue
        k_start = max(start, params.k_start)
        k_end = max(k_start, q_end)  # the range may be empty
        queries = slice(q_start - params.q_start, q_end - params.q_start), slice(sample, sample + 1)
        keys = slice(k_start - params.k_start, k_end - params.k_start), slice(sample, sample + 1)
        q, q_pe = (None if x is None else x[queries] for x in (q_SBHK, q_pe_SBHR))
        k, v, k_pe = (None if x is None else x[keys] for x in (k_TBGK, v_TBGK, k_pe_TBR))
        assert q is not None and k is not None and v is not None
        drop = params.drop and params.drop._replace(sample_ids_B=params.drop.sample_ids_B[sample : sample + 1])
        document_params = params._replace(drop=drop, q_start=q_start, k_start=k_start)
        kwargs: dict[str, Any] = dict(q_pe_SBHR=q_pe, k_pe_TBR=k_pe, sink_H=sink_H, **document_params._asdict())
        outputs_by_sample[sample].append(attention(q, k, v, **kwargs))
    return torch.cat([torch.cat(outputs) for outputs in outputs_by_sample], dim=1)
