"""Every launch that the tables of megalite/kernels can make: each width, dtype and variant of each kernel."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.rope_spec import RopeSpec
from megalite.kernels import bias_gelu
from megalite.kernels.activations import clamped_swiglu, geglu, swiglu
from megalite.kernels.adamw import adamw_
from megalite.kernels.blocked_attention import AttentionDropout
from megalite.kernels.cross_entropy import stats_and_grad_
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs, delta_rule
from megalite.kernels.dropout import dropout
from megalite.kernels.flash_attention import flash_attention
from megalite.kernels.gated_matmul import down_gradients, up_matmul
from megalite.kernels.gated_norm import FORWARD as GATED_NORM_FORWARD
from megalite.kernels.gated_norm import gated_norm
from megalite.kernels.grad_norm import sum_of_squares
from megalite.kernels.grouped_matmul import grouped_matmul, grouped_weight_grad_
from megalite.kernels.norms import FORWARD, add_norm, norm
from megalite.kernels.permute import unpermute
from megalite.kernels.rope import apply_rope, rope_tables
from megalite.kernels.short_conv import short_conv

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = tuple(width for width, *_ in FORWARD)
GATED_NORM_WIDTHS = tuple(width for width, *_ in GATED_NORM_FORWARD)
ROWS = 64


@dataclass(frozen=True)
class Work:
    """One call, with backward if it has one; `size` is the key of the tile tables: columns, or channels of a head."""

    op: str
    dtype: torch.dtype
    size: int
    run: Callable[[], Any]

    @property
    def kind(self) -> str:
        """The operation, with " wide" if it uses the tiles of wide heads."""
        return self.op + " wide" * (self.op.endswith("attention") and self.size > 128)

    @property
    def name(self) -> str:
        return f"{self.op} {self.size} {str(self.dtype).removeprefix('torch.')}"


def zeros(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])


def norms(width: int, dtype: torch.dtype) -> Iterator[Work]:
    def run(bias: bool) -> None:
        x, a, w, b = zeros(dtype, (ROWS, width), (ROWS, width), (width,), (width,))
        backward(norm(x, w, b if bias else None, 1e-5))
        backward(*add_norm(x, a, w, b if bias else None, 1e-5))

    yield Work("rms_norm", dtype, width, lambda: run(False))
    yield Work("layer_norm", dtype, width, lambda: run(True))


def norm_with_gate(width: int, dtype: torch.dtype) -> Work:
    def run() -> None:
        for gate_first, sigmoid_gate in ((False, False), (False, True), (True, False)):
            o, z, w = zeros(dtype, (ROWS, 2, 4, width), (ROWS, 2, 4, width), (4, width) if gate_first else (width,))
            backward(gated_norm(o, z, w, 1e-5, gate_first=gate_first, sigmoid_gate=sigmoid_gate))

    return Work("gated_norm", dtype, width, run)


def recurrence(kind: str, K: int, V: int, dtype: torch.dtype) -> Work:
    """Return a gated delta net, KDA or Mamba-2 over two chunks, for complete samples and by document."""

    def run() -> None:
        heads = 2 if kind == "kda" else 4
        for has_documents in (False, True):
            q, k, v = zeros(dtype, (128, 2, 2, K), (128, 2, 2, K), (128, 2, heads, V))
            (log_decay,) = zeros(torch.float32, (128, 2, heads, *([K] if kind == "kda" else [])))
            beta = None if kind == "mamba2" else zeros(torch.float32, (128, 2, heads))[0]
            documents_BS = torch.zeros(2, 128, dtype=torch.int64) if has_documents else None
            options = Recurrence(0.1, normalize_qk=kind != "mamba2", documents_BS=documents_BS)
            backward(*delta_rule(RecurrenceInputs(q, k, v, log_decay, beta), options))

    return Work(f"recurrence {kind}", dtype, V, run)


def convolution(channels: int, dtype: torch.dtype) -> Work:
    """Return the convolution of 4 tokens, also with a bias, with documents, and after earlier tokens."""

    def run() -> None:
        for has_documents, has_earlier, has_bias in (
            (False, False, False),
            (False, False, True),
            (True, False, False),
            (True, True, True),
        ):
            x, w, earlier, bias = zeros(dtype, (256, 2, channels), (channels, 4), (3, 2, channels), (channels,))
            documents_BS = torch.zeros(2, 259 if has_earlier else 256, dtype=torch.int64) if has_documents else None
            y = short_conv(x, w, documents_BS, earlier if has_earlier else None, bias if has_bias else None)
            backward(y)

    return Work("short_conv", dtype, channels, run)


def activations(width: int, dtype: torch.dtype) -> Iterator[Work]:
    def gated() -> None:
        u, da = zeros(dtype, (ROWS, 2 * width), (ROWS, width))
        for clamped in (False, True):
            swiglu.forward(u, clamped=clamped)
            swiglu.backward(u, da, clamped=clamped)

    def gelu_gated() -> None:
        u, da = zeros(dtype, (ROWS, 2 * width), (ROWS, width))
        geglu.forward(u)
        geglu.backward(u, da)

    def gelu() -> None:
        u, da, b = zeros(dtype, (ROWS, width), (ROWS, width), (width,))
        for tanh, bias in itertools.product((True, False), ((), (b,))):
            bias_gelu.forward(u, *bias, tanh=tanh)
            bias_gelu.backward(u, da, *bias, tanh=tanh)

    def dropout_run() -> None:
        x, a = zeros(dtype, (ROWS, 2, width), (ROWS, 2, width))
        ids = torch.arange(2)
        backward(dropout(x, 0.1, 7, ids, torch.arange(ROWS)))
        backward(dropout(x, 0.1, 7, ids, 0, a))

    yield Work("swiglu", dtype, width, gated)
    yield Work("geglu", dtype, width, gelu_gated)
    yield Work("bias_gelu", dtype, width, gelu)
    yield Work("dropout", dtype, width, dropout_run)


def rope(head_size: int, dtype: torch.dtype) -> Work:
    def run() -> None:
        for rotary in (head_size, head_size // 4):
            (x,) = zeros(dtype, (ROWS, 2, 8, head_size))
            backward(apply_rope(x, *rope_tables(ROWS, RopeSpec(rotary, 1e4))))

    return Work("rope", dtype, head_size, run)


def attention(head_size: int, dtype: torch.dtype, value: int | None = None, pe: int = 0) -> Work:
    """Return attention over complete tiles, with each of dropout, documents, a sink and a cap on and off.

    Values have `value` channels, or as many as keys. All heads share keys of `pe` channels.
    """

    def run() -> None:
        for p, documents, has_sink, softcap in (
            (0.0, False, False, None),
            (0.0, False, True, None),
            (0.0, True, False, None),
            (0.1, True, True, None),
            (0.0, False, False, 50.0),
            (0.1, True, True, 50.0),
        ):
            q, k, v = zeros(dtype, *((256, 2, *x) for x in ((4, head_size), (2, head_size), (2, value or head_size))))
            document_start_BS, ids_B = torch.zeros(2, 256, dtype=torch.int64), torch.arange(2)
            drop = AttentionDropout(p, 0, ids_B) if p else None
            sink_H = torch.zeros(4, dtype=dtype) if has_sink else None
            document_start_BS = document_start_BS if documents else None
            options: dict[str, Any] = dict(drop=drop, sink_H=sink_H, softcap=softcap)
            if pe:
                options["q_pe_SBHR"], options["k_pe_TBR"] = zeros(dtype, (256, 2, 4, pe), (256, 2, pe))
            backward(flash_attention(q, k, v, scale=0.1, document_start_BS=document_start_BS, **options))

    return Work("latent attention" if pe else "attention", dtype, head_size, run)


def experts(width: int, dtype: torch.dtype) -> Work:
    """Return grouped matmuls: rows by index and in place, weights transposed or not, gradients written and added."""

    def run() -> None:
        E, M, D = 8, 256, 2048
        offsets, rows = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(M, dtype=torch.int64)
        x, w = torch.zeros(ROWS, D, dtype=dtype), torch.zeros(E, width, D, dtype=dtype)
        dy = grouped_matmul(x, w, offsets, rows)
        grouped_matmul(dy, w.transpose(1, 2), offsets)
        for overwrite in (True, False):
            grouped_weight_grad_(torch.zeros(E, width, D), dy, x, offsets, rows, overwrite=overwrite)

    return Work("grouped_matmul", dtype, width, run)


def gated(width: int, dtype: torch.dtype) -> Work:
    """Return experts' matmuls with SwiGLU in the epilogue, without and with limits and a bias."""

    def run() -> None:
        E, M, D = 8, 256, 2048
        offsets, rows, p = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(M, dtype=torch.int64), torch.zeros(M)
        for activation, *bias in ((swiglu.ACTIVATION,), (clamped_swiglu.ACTIVATION, (E, 2 * width))):
            x, w, down, *b = zeros(dtype, (ROWS, D), (E, 2 * width, D), (E, D, width), *bias)
            u, _ = up_matmul(x, w, offsets, rows, p, activation, *b)
            down_gradients(x, down, offsets, rows, u, p, activation)

    return Work("gated_matmul", dtype, width, run)


def permute(width: int, dtype: torch.dtype) -> Work:
    y, slots = torch.zeros(8 * ROWS, width, dtype=dtype), torch.zeros(ROWS, 8, dtype=torch.int64)
    return Work("permute", dtype, width, lambda: unpermute(y, slots))


def loss(columns: int, dtype: torch.dtype) -> Work:
    def run() -> None:
        labels, grad = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS)
        for softcap in (None, 30.0):
            logits = torch.zeros(ROWS, columns, dtype=dtype)
            stats_and_grad_(logits, labels, grad, columns - 16, softcap=softcap)

    return Work("cross_entropy", dtype, columns, run)


def updates(moments: torch.dtype) -> Work:
    def run() -> None:
        w, g = torch.zeros(2, 1 << 16)
        m, v = torch.zeros(2, 1 << 16, dtype=moments)
        for copy in (None, w.bfloat16()):
            adamw_(w, g, m, v, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, model_param=copy)
        sum_of_squares(g)

    return Work("adamw", moments, 1 << 16, run)


def all_work() -> Iterator[Work]:
    for dtype in DTYPES:
        for width in WIDTHS:
            yield from norms(width, dtype)
        for kind, K, V in (("gdn", 128, 128), ("gdn", 64, 256), ("kda", 128, 128), ("mamba2", 128, 64)):
            yield recurrence(kind, K, V, dtype)
        for width in GATED_NORM_WIDTHS:
            yield norm_with_gate(width, dtype)
        yield convolution(4096, dtype)
        for width in (96, 4096):  # several rows in a tile, and several tiles in a row
            yield from activations(width, dtype)
            yield permute(width, dtype)
        for width in (768, 1408):  # a multiple of the tile width, and not one
            yield experts(width, dtype)
            yield gated(width, dtype)
        for head_size in (64, 128):
            yield rope(head_size, dtype)
            yield attention(head_size, dtype)
        if dtype != torch.float32:
            yield attention(256, dtype)  # Gemma's
            yield attention(192, dtype, 128)  # DeepSeek-V3's, with a key of each head
        yield attention(128, dtype, 128, 64)  # DeepSeek-V3's
        yield loss(128256, dtype)
    yield updates(torch.float32)
    yield updates(torch.bfloat16)
