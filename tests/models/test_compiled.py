"""--compile: compiled blocks train like eager ones, under every layout, and need no more memory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import pytest
import torch
from layout_cases import DROP, GPT, LLAMA
from ranks import run_ranks
from train_cases import DOCUMENT_FLAGS, config_from, read_metric, run_from

from megalite.config.options import Config
from megalite.kernels import dispatch
from megalite.launch.rank_info import RankInfo
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.wgrad_store import WeightGradStore
from megalite.planning.run_plan import make_run_plan
from megalite.training.job.preflight import check_compile, check_machine
from megalite.training.job.startup import compile_warmup
from megalite.training.setup import SetupError
from megalite.training.state import Run
from megalite.training.train_step import train_step

STEPS = 2
COMMON = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 8 --train-iters 9 --lr 0.01 --seed 7 --mock-data --tokenizer-type NullTokenizer --vocab-size 94
 --make-vocab-size-divisible-by 8 --eval-iters 0 --init-method-std 0.2"""
QWEN = LLAMA + " --add-qkv-bias --qk-layernorm"
NEOX = f"{GPT} --position-embedding-type rope --rotary-percent 0.25 --activation gelu_erf --parallel-residual"
SELECTIVE = " --recompute-granularity selective"
GEMMA = f"""{LLAMA} --activation geglu --sandwich-norm --apply-layernorm-1p --embedding-multiplier 5.65
 --window-size 4,0 --window-attn-skip-freq 2 --rotary-local-base 100"""
FULL = " --recompute-granularity full --recompute-method uniform"
MODULES = f"{SELECTIVE} --recompute-modules core_attn layernorm mlp"
INTERLEAVED = f"{NEOX} --rotary-interleaved --no-rope-freq 3"
MODELS = (DROP + DOCUMENT_FLAGS + FULL, LLAMA + SELECTIVE)


class CountingBackend:
    """A backend that runs graphs eagerly and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def build(flags: str, dtype: torch.dtype = torch.float64, backend: Any = "eager") -> tuple[Run, Config]:
    config = config_from(f"{COMMON} {flags}")
    torch.compiler.reset()  # forget the code that other tests compiled
    return run_from(config, dtype=dtype, compile_backend=backend), config


def losses_and_norms(run: Run) -> list[float]:
    """Return loss and gradient norm of each step."""
    return [x for r in (train_step(run) for _ in range(STEPS)) for x in (r.loss, r.grad_norm)]


def train(flags: str, dtype: torch.dtype = torch.float64, backend: Any = "eager") -> list[float]:
    return losses_and_norms(build(flags, dtype, backend)[0])


RARELY = pytest.mark.nightly(guards=("megalite/models/torch_compile.py", "megalite/models/gpt.py"))
OFTEN = [LLAMA + DOCUMENT_FLAGS + SELECTIVE]
SELDOM = [DROP + FULL, DROP + DOCUMENT_FLAGS, QWEN, NEOX, DROP + SELECTIVE, INTERLEAVED + MODULES]
SELDOM += [GEMMA, GEMMA + MODULES]


@pytest.mark.parametrize("flags", [*OFTEN, *(pytest.param(flags, marks=RARELY) for flags in SELDOM)])
def test_compiled_functions_equal_eager_and_are_few(flags: str) -> None:
    """Share the compiled code between layers and steps, whose numbers key dropout. The warmup compiles all of it."""
    backend = CountingBackend()
    run, config = build(flags + " --compile", backend=backend)
    compile_warmup(run, config)
    graphs = backend.graphs
    assert 3 <= graphs <= 7
    actual = losses_and_norms(run)
    assert backend.graphs == graphs
    eager_backend = CountingBackend()
    assert actual == pytest.approx(train(flags, backend=eager_backend), rel=1e-12, abs=0)
    assert eager_backend.graphs == 0


def _train_models(layouts: tuple[str, ...]) -> list[list[float]]:
    return [train(f"{model} --num-layers 2 {layout}") for model, layout in zip(MODELS, layouts, strict=True)]


@pytest.mark.parametrize("axes", [("tensor-model", "pipeline-model"), ("context",) * 2], ids=["tp and pp", "cp"])
def test_compiled_layout_equals_one_process(axes: tuple[str, str]) -> None:
    expected = _train_models(("", ""))
    layouts = tuple(f"--compile --{axis}-parallel-size 2" for axis in axes)
    for actual in run_ranks(2, _train_models, layouts):
        for values, expected_values in zip(actual, expected, strict=True):
            assert values == pytest.approx(expected_values, rel=1e-10, abs=0)


def _train_after_warmup(flags: str) -> list[float]:
    """Return loss and gradient norm of each step after a warmup and a load of a checkpoint."""
    run, config = build(flags)
    compile_warmup(run, config)
    for bucket in run.optimizer.buckets:
        bucket.main.mul_(1.01)
    run.optimizer.sync_after_load()
    return losses_and_norms(run)


@pytest.mark.parametrize("stage", [2, 3])
def test_compile_warmup_leaves_no_unsharded_weights(stage: int) -> None:
    expected = run_ranks(2, _train_after_warmup, f"{LLAMA} --num-layers 2")
    for unit in ("layer", "chunk")[: stage - 1]:
        flags = f"{LLAMA} --num-layers 2 --compile --zero-stage {stage} --reshard-after-forward {unit}"
        actual = run_ranks(2, _train_after_warmup, flags)
        for values, expected_values in zip(actual, expected, strict=True):
            assert values == pytest.approx(expected_values, rel=1e-12, abs=0)


def _train_deferred(flags: str) -> tuple[list[float], list[int], list[int]]:
    """Train on a pipeline rank after a warmup.

    Returns: loss and gradient norm of each step; the number of graphs after the warmup and after the steps; the number
        of weight gradients that each W computes.
    """
    backend, deferred, compute_all = CountingBackend(), list[int](), WeightGradStore.compute_all

    def count_and_compute(store: WeightGradStore) -> None:
        deferred.append(len(list(store.main_grads)))
        compute_all(store)

    run, config = build(flags, backend=backend)
    compile_warmup(run, config)
    graphs = backend.graphs
    with mock.patch.object(WeightGradStore, "compute_all", count_and_compute):
        return losses_and_norms(run), [graphs, backend.graphs], deferred


@pytest.mark.parametrize(
    "flags",
    [
        MODELS[0],
        *(pytest.param(m, marks=RARELY) for m in (MODELS[1], f"{QWEN} --num-virtual-stages-per-pipeline-rank 2")),
    ],
)
def test_compiled_blocks_defer_weight_gradients(flags: str) -> None:
    """Compile nothing in the steps, and defer the same weight gradients as eager blocks."""
    pipeline_flags = f"{flags} --pipeline-model-parallel-size 2"
    expected = run_ranks(2, _train_deferred, pipeline_flags)
    eager = run_ranks(2, _train_deferred, f"{pipeline_flags} --split-backward")
    compiled = run_ranks(2, _train_deferred, f"{pipeline_flags} --split-backward --compile")
    chunks = 2 if "virtual" in flags else 1
    # a rank has two layers of five matrices, split over its chunks; a step has four micro-batches
    expected_deferred = [5 * 2 // chunks] * (STEPS * 4 * chunks)
    for (values, _, none), (_, _, deferred), (actual, graphs, also_deferred) in zip(
        expected, eager, compiled, strict=True
    ):
        assert none == [] and deferred == also_deferred == expected_deferred
        assert 3 <= graphs[0] == graphs[1]
        assert actual == pytest.approx(values, rel=1e-10, abs=0)


@RARELY
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_run_equals_eager_and_compiles_before_its_first_step(tmp_path: Path) -> None:
    output, losses = "", list[list[float]]()
    for number, extra in enumerate(("", "--compile --split-backward")):
        flags = f"{COMMON} {DROP} --nproc 2 --pipeline-model-parallel-size 2 --train-iters 4 --log-interval 1 {extra}"
        run_dir, env = tmp_path / str(number), os.environ | {"TORCH_LOGS": "recompiles,graph_breaks"}
        options: dict[str, Any] = dict(
            capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280
        )
        argv = [*flags.split(), "--run-dir", str(run_dir)]
        output = programs.run_python("pretrain_gpt.py", *argv, env=env, check=True, **options).stdout
        losses.append([x for metric in ("train/loss", "train/grad_norm") for x in read_metric(run_dir, metric)])
    assert len(losses[0]) == 2 * 4 and losses[1] == pytest.approx(losses[0], rel=1e-5, abs=0)
    before, _, after = output.partition("compiled in ")
    # forward and backward of the activation share one wrapper of torch
    assert after and "Recompiling function" in before and "ecompil" not in after and "raph break" not in output


def saved_bytes(flags: str, dtype: torch.dtype) -> int:
    """Return the bytes that a stage saves for backward, without its weights."""
    run, _ = build(flags, dtype, "aot_eager_decomp_partition")  # partitions forward and backward as inductor does
    stage = run.pipeline.stages[0]
    ids_SB = torch.zeros(16, 2, dtype=torch.int64)
    batch = Batch(ids_SB, ids_SB, None, torch.arange(2))
    ctx = ForwardContext(step=1)
    stage(None, batch, ctx)  # trace without the hooks
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        stage(None, batch, ctx)
    return sum(x.untyped_storage().nbytes() for pointer, x in saved.items() if pointer not in weights)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=RARELY), torch.bfloat16])
@pytest.mark.parametrize(
    "flags", [pytest.param(LLAMA, marks=RARELY), pytest.param(DROP, marks=RARELY), DROP + SELECTIVE]
)
def test_compiled_blocks_save_no_more_for_backward(flags: str, dtype: torch.dtype) -> None:
    flags += " --num-layers 1"
    eager = saved_bytes(flags, dtype)
    assert 0 < saved_bytes(flags + " --compile", dtype) <= eager


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpu_vec_isa

    # finding them takes 8 s, and scalar code is enough
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [])
    monkeypatch.setattr(config, "pattern_matcher", False)  # 1 s
    flags = GPT + " --num-layers 1"
    expected = train(flags, torch.float32)
    assert train(flags + " --compile", torch.float32, "inductor") == pytest.approx(expected, rel=1e-5)


def test_compile_failure_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_compile("cpu")
    config = config_from(f"{COMMON} {GPT} --compile")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        SetupError, match=r"^compile=True needs a C\+\+ compiler, and .*g\+\+ is not installed; install"
    ):
        check_machine(make_run_plan(config, 1, 93), "cpu", RankInfo(0, 1))
    if sys.platform == "linux":  # inductor does not look for clang++
        (tmp_path / "clang++").symlink_to(sys.executable)
        with pytest.raises(SetupError, match=r"g\+\+ is not installed; install"):
            check_compile("cpu")
    # one compiler does not start, another one prints its version but has no headers
    headerless = '[ "$1" = --version ] && exit 0\necho "fatal error: cmath: no such file" >&2\nexit 1'
    for name, script in (("broken", "exit 3"), ("halved", headerless)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for name, text in (
        ("no-such-compiler -O1", "no-such-compiler -O1 is not installed"),
        ("broken", "broken does not work .*exit status 3"),
        ("halved", r"halved does not work \(fatal error: cmath: no such file\)"),
        (" ", "  is not installed; install"),
        ("", "CXX is empty"),
    ):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(SetupError, match=text):
            check_compile("cpu")
    monkeypatch.delenv("CXX")
    check_machine(make_run_plan(config_from(f"{COMMON} {GPT}"), 1, 93), "cpu", RankInfo(0, 1))  # not asked for
    dispatch.set_kernel_options("triton", "auto")
    try:
        with pytest.raises(SetupError, match="^compile=True .*, but kernels=triton; use auto or torch$"):
            check_compile("cpu")
    finally:
        dispatch.set_kernel_options("auto", "auto")
