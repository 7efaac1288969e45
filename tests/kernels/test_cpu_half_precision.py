"""Half precision on a CPU without instructions for it: matmuls are computed in fp32 and rounded once.

Any CPU behaves so if oneDNN may not use newer instructions; here the result of dispatch.py is replaced.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_cases import ROOT, config_from, pretrain, run_from, stage_from

from megalite.generate.generation import KVCache, last_token_logits
from megalite.kernels import blocked_attention, dispatch, matmul
from megalite.kernels.attention import attention, attention_reference
from megalite.kernels.cached_attention import cached_attention
from megalite.kernels.dispatch import FEW_ROWS, upcast_dtypes, upcasts
from megalite.kernels.grouped_matmul import grouped_matmul, grouped_weight_grad_
from megalite.kernels.matmul import mm_
from megalite.kernels.newton_schulz import coefficients, newton_schulz
from megalite.kernels.weight_grad import accumulate_weight_grad_
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.training.train_step import train_step

HALVES = [torch.bfloat16, torch.float16]
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # twice the maximum error of one rounding


@contextmanager
def instructions(is_present: bool) -> Iterator[None]:
    """Pretend that this CPU has instructions for half precision, or that it lacks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "cpu_multiplies", lambda dtype: is_present)
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_rounded_once(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that the error against fp64 is at most one rounding of the result, plus that of the sums in fp32."""
    assert actual.dtype == dtype
    error = (actual.double() - expected).abs()
    assert bool((error <= ULP[dtype] * expected.abs() + 1e-5 * expected.abs().max()).all()), float(error.max())


# ---- selection of the precision
CAPABILITIES = [  # torch's capabilities of the CPU, oneDNN's limit, the dtypes that are multiplied in fp32
    ({"architecture": "x86_64", "avx2": True}, "", HALVES),
    ({"architecture": "x86_64", "avx512_f": True, "avx512_vnni": True}, "", HALVES),
    ({"architecture": "x86_64", "avx512_bf16": True}, "", [torch.float16]),
    ({"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": True, "avx512_fp16": True}, "", []),
    ({"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True}, "AVX2", HALVES),
    ({"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True}, "avx512_core", HALVES),
    ({"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True}, "AVX512_CORE_BF16", [torch.float16]),
    ({"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True}, "ALL", []),
    ({"architecture": "aarch64", "neon": True}, "", HALVES),
    ({"architecture": "aarch64", "neon": True, "bf16": True, "fp16_arith": True}, "", []),
]


@pytest.mark.parametrize(("capabilities", "limit", "upcast"), CAPABILITIES)
def test_cpu_matmul_precision_follows_cpu_and_onednn_limit(
    capabilities: dict[str, Any], limit: str, upcast: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    decide = dispatch.cpu_multiplies.__wrapped__
    monkeypatch.setattr(dispatch, "cpu_multiplies", decide)
    assert upcast_dtypes("cpu") == upcast and upcast_dtypes("cuda") == []
    for dtype in HALVES:
        x = torch.zeros(2, 2, dtype=dtype)
        assert upcasts(x) == (dtype in upcast) and not upcasts(x, FEW_ROWS)
        assert not upcasts(x.to("meta"))
    assert not upcasts(torch.zeros(2)) and not upcasts(torch.zeros(2, dtype=torch.float64))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # torch's own loops
    assert upcast_dtypes("cpu") == HALVES


def test_limited_onednn_multiplies_in_fp32() -> None:
    program = "from megalite.kernels.dispatch import upcast_dtypes; print(*upcast_dtypes('cpu'))"
    variables = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], env=variables, capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout.split() == ["torch.bfloat16", "torch.float16"], result.stderr


# ---- matmuls, each against fp64 and against the CPU's own
@pytest.fixture(params=[False, True], ids=["one block", "many blocks"])
def sizes_of_blocks(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        for module in (matmul, sys.modules["megalite.kernels.weight_grad"]):
            monkeypatch.setattr(module, "LEFT_BYTES", 4 * 48 * 5)  # 5 rows of 48 elements
            monkeypatch.setattr(module, "RIGHT_BYTES", 4 * 48 * 7)
        monkeypatch.setattr(matmul, "BLOCK_K", 20)


Matmul = Callable[[dict[str, Tensor], torch.dtype], Tensor]


def _add(t: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    return mm_(t["y"].clone(), t["x"], t["w"].T, add=True)


def _weight_grad(overwrite: bool, own_dtype: bool) -> Matmul:
    def matmul_fn(t: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        grad = t["g"].to(dtype if own_dtype else torch.promote_types(dtype, torch.float32)).clone()
        accumulate_weight_grad_(grad, t["y"], t["x"], overwrite=overwrite)
        return grad

    return matmul_fn


OFFSETS, ROWS = torch.tensor([0, 3, 3, 20, 30]), (torch.arange(30) * 7) % 33


def _experts(t: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    return grouped_matmul(t["x"], t["e"], OFFSETS, ROWS)


def _experts_grad(t: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    grad = torch.zeros(4, 29, 48, dtype=torch.promote_types(dtype, torch.float32))
    grouped_weight_grad_(grad, t["y"][:30], t["x"], OFFSETS, ROWS, overwrite=True)
    return grad


MATMULS: dict[str, Matmul] = {
    "linear": lambda t, _: matmul.matmul(t["x"].view(3, 11, 48), t["w"].T),
    "input's gradient": lambda t, _: matmul.matmul(t["y"], t["w"]),
    "added": _add,
    "out of a view": lambda t, _: mm_(t["y"].new_empty(33, 58)[:, ::2], t["x"], t["w"].T),
    "a weight's gradient, begun": _weight_grad(True, False),
    "a weight's gradient, added": _weight_grad(False, False),
    "a weight's gradient in its own dtype, begun": _weight_grad(True, True),
    "a weight's gradient in its own dtype, added": _weight_grad(False, True),
    "experts": _experts,
    "experts' gradient": _experts_grad,
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", MATMULS)
def test_matmuls_round_once(name: str, dtype: torch.dtype, sizes_of_blocks: None) -> None:
    shapes = {"x": (33, 48), "w": (29, 48), "y": (33, 29), "g": (29, 48), "e": (4, 29, 48)}
    tensors = {key: draw(*shape, seed=i).to(dtype) for i, (key, shape) in enumerate(shapes.items())}
    exact = MATMULS[name]({key: x.double() for key, x in tensors.items()}, torch.float64)
    with instructions(False):
        actual = MATMULS[name](tensors, dtype)
    with instructions(True):
        native = MATMULS[name](tensors, dtype)
    assert actual.dtype == native.dtype
    if actual.dtype == dtype:
        assert_rounded_once(actual, exact, dtype)
    else:  # a gradient in fp32 is not rounded at all
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.double(), native.double(), rtol=2 * ULP[dtype], atol=2 * ULP[dtype] * 8)


def test_weight_grad_without_tokens_is_zero() -> None:
    grad, empty = torch.full((3, 4), 7.0), torch.zeros(0, 4, dtype=torch.bfloat16)
    with instructions(False):
        accumulate_weight_grad_(grad, empty[:, :3], empty, overwrite=True)
    assert not grad.any()


@pytest.mark.parametrize("shape", [(2, 24, 40), (1, 40, 24)])
def test_newton_schulz_in_bf16_is_as_exact_as_in_hardware(shape: tuple[int, ...]) -> None:
    x, steps = draw(*shape).bfloat16(), coefficients("quintic", 5)
    exact, errors = newton_schulz(x.double(), steps), []
    for is_present in (True, False):
        with instructions(is_present):
            actual = newton_schulz(x, steps)
        assert actual.dtype == torch.bfloat16
        errors.append(float((actual.double() - exact).norm() / exact.norm()))
    assert errors[1] <= 2**-8 and errors[1] <= errors[0] <= 0.05


KINDS = {
    "blocked": dict[str, Any](),
    "in a window": {"window": 5},
    "with sinks": {"sink_H": draw(4, seed=9).float()},
    "capped": {"softcap": 0.5},
    "with dropout": {"drop": blocked_attention.AttentionDropout(0.25, 3, torch.arange(2))},
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "torch", "explicit"])
def test_blocked_attention_and_gradients_equal_fp64(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = KINDS.get("with dropout" if kind == "explicit" else kind, {})
    if kind in ("torch", "explicit"):
        monkeypatch.setattr("megalite.kernels.attention.forced_backend", lambda: "torch")
    q, k, v, do = (draw(24, 2, heads, 16, seed=i).to(dtype) for i, heads in enumerate((4, 2, 2, 4)))

    def run(fn: Callable[..., Tensor], *qkv: Tensor) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in qkv]
        o = fn(*leaves, scale=0.25, **options)
        return [o, *torch.autograd.grad(o, leaves, do.to(o.dtype))]

    exact = run(attention_reference, q.double(), k.double(), v.double())
    with instructions(False):
        actual = run(attention, q, k, v)
    for tensor, expected in zip(actual, exact, strict=True):
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor.double(), expected, rtol=2 * ULP[dtype], atol=2 * ULP[dtype])


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sink", [None, draw(4, seed=9).bfloat16()], ids=["plain", "sinks"])
def test_cached_attention_equals_fp64(sink: Tensor | None, softcap: float | None) -> None:
    q, k, v = (draw(n, 2, heads, 16, seed=n).bfloat16() for n, heads in ((3, 4), (24, 2), (25, 2)))
    v, positions = v[:24], torch.tensor([[7, 20], [8, 21], [9, 22]])
    sink64 = None if sink is None else sink.double()
    options: dict[str, Any] = dict(scale=0.25, softcap=softcap)
    exact = cached_attention(q.double(), k.double(), v.double(), positions, sink_H=sink64, **options)
    with instructions(False):
        assert_rounded_once(cached_attention(q, k, v, positions, sink_H=sink, **options), exact, torch.bfloat16)


# ---- complete models
LINE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 0.01 --lr-decay-style constant --mock-data
 --tokenizer-type NullTokenizer --vocab-size 90 --eval-iters 0 --init-method-std 0.2"""
PLAIN = LINE + " --hidden-dropout 0 --attention-dropout 0"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --disable-bias-linear --swiglu --moe-shared-expert-intermediate-size 16"
)
MODELS = {
    "gpt": LINE,
    "llama": PLAIN + " --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",
    "split backward": PLAIN + " --split-backward",
    "recompute": PLAIN + " --recompute-granularity full --recompute-method uniform",
    "window": PLAIN + " --window-size 5,0",
    "experts": f"{PLAIN} {EXPERTS} --moe-shared-expert-gate",
    "gpt-oss": PLAIN + " --num-experts 4 --moe-ffn-hidden-size 24 --activation clamped_swiglu --softmax-type learnable",
    "muon": PLAIN + " --optimizer muon",
    "torch's attention": PLAIN + " --attention-kernel torch",
    "explicit attention": LINE + " --attention-kernel torch",
}
OPERANDS = {
    name: i for names, i in (("mm bmm", 0), ("addmm baddbmm addmm_", 1)) for name in names.split() for i in (i,)
}
FUSED = "_scaled_dot_product"


class MatmulRecorder(TorchDispatchMode):
    """A recorder of torch's matmuls as (name, dtype, minimum of rows and columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[tuple[str, torch.dtype, int]]()
        self.largest = 0  # maximum number of elements of an fp32 result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in OPERANDS:
            a, b = args[OPERANDS[name] : OPERANDS[name] + 2]
            self.calls.append((name, a.dtype, min(a.shape[-2], b.shape[-1])))
        elif name.startswith(FUSED):
            self.calls.append((name, args[0].dtype if "backward" not in name else args[1].dtype, args[0].shape[-2]))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.largest = max(self.largest, result.numel())
        return result


def test_conversions_are_at_most_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is much larger than a block."""
    monkeypatch.setattr(matmul, "LEFT_BYTES", 4 * 5000)
    monkeypatch.setattr(matmul, "RIGHT_BYTES", 4 * 48 * 70)
    for depth in (48, 20):
        monkeypatch.setattr(matmul, "BLOCK_K", depth)
        with instructions(False), MatmulRecorder() as recorder:
            matmul.matmul(draw(64, 48).bfloat16(), draw(48, 500).bfloat16())
        assert 0 < recorder.largest <= 5000


@pytest.mark.parametrize(
    ("model", "precision"),
    [(model, "--bf16") for model in MODELS] + [(model, "--fp16 --loss-scale 16") for model in ("llama", "gpt-oss")],
)
def test_step_has_no_half_precision_matmul(model: str, precision: str) -> None:
    """Only products with few rows are in half precision; losses equal those of a CPU with the instructions."""
    losses = []
    for is_present in (False, True):
        with instructions(is_present):
            run = run_from(f"{MODELS[model]} {precision}")
            with MatmulRecorder() as recorder:
                losses.append((train_step(run).loss, train_step(run).loss))
        in_half = {call for call in recorder.calls if call[1] in HALVES and call[2] > FEW_ROWS}
        assert is_present or not in_half, in_half
        assert not is_present or in_half and len(recorder.calls) > 10
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_generation_has_no_half_precision_matmul(model: str) -> None:
    stage, zero = stage_from(MODELS[model] + " --bf16", torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    cache, positions = KVCache(16), torch.arange(6)[:, None].expand(-1, 3)
    with torch.no_grad(), instructions(False), MatmulRecorder() as recorder:
        for step_positions in (positions, positions[:1] + 6):
            cache.set_positions(step_positions, step_positions.device)
            tokens_SB = torch.ones_like(step_positions)
            x = stage.forward_hidden(
                None, Batch(tokens_SB, None, None, zero, step_positions), ForwardContext(cache=cache)
            )
            assert stage.head is not None and stage.final_norm is not None
            assert last_token_logits(stage.head, stage.final_norm(x), zero).dtype == torch.bfloat16
    assert len(recorder.calls) > 10
    assert not {call for call in recorder.calls if call[1] in HALVES and call[2] > FEW_ROWS}


@pytest.mark.parametrize("model", ["gpt", "llama", "experts", "gpt-oss", "torch's attention"])
def test_backward_saves_as_much_as_with_hardware_bf16(model: str) -> None:
    saved_bytes = []
    for is_present in (False, True):
        with instructions(is_present):
            stage, saved = stage_from(MODELS[model] + " --bf16", torch.bfloat16), dict[int, Tensor]()
            tokens = torch.randint(0, 90, (16, 2), generator=torch.Generator().manual_seed(1))

            def save(x: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
                saved[x.untyped_storage().data_ptr()] = x
                return x

            with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
                stage(None, Batch(tokens, tokens, None, torch.arange(2)), ForwardContext(step=1))
            saved_bytes.append(sum(x.untyped_storage().nbytes() for x in saved.values()))
    assert 0 < saved_bytes[0] <= saved_bytes[1]


def test_run_reports_fp32_matmuls(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    message = "computed in fp32: this CPU has no instructions for it"
    for is_present in (False, True):
        flags = f"--bf16 --peak-tflops 1e-9 --log-interval 1 --run-dir {tmp_path / str(is_present)}"
        with instructions(is_present):
            assert pretrain(config_from(f"{PLAIN} {flags}")) == 0
        output = capsys.readouterr().out
        assert output.count(f"bf16, {message}") == (not is_present)
        assert "is above the peak of 1e-09: --peak-tflops is too low for this device" in output
