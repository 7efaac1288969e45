"""--compile: the same training with compiled functions in the blocks, under every layout, with no more memory."""

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
from train_cases import BORDERS, config_from, logged, run_from

from megalite.config.options import Config
from megalite.kernels import dispatch
from megalite.launch.rank_info import RankInfo
from megalite.models.torch_compile import CompileError, check_compile
from megalite.nn.micro_batch import Batch
from megalite.nn.wgrad_store import WeightGradStore
from megalite.planning.run_plan import make_run_plan
from megalite.training.job.preflight import check_machine
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
FULL = " --recompute-granularity full --recompute-method uniform"
PARTS = f"{SELECTIVE} --recompute-modules core_attn layernorm mlp"
PAIRS = f"{NEOX} --rotary-interleaved --no-rope-freq 3"
MODELS = (DROP + BORDERS + FULL, LLAMA + SELECTIVE)


class Counting:
    """A backend that runs what it is given as it is, and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def build(flags: str, dtype: torch.dtype = torch.float64, backend: Any = "eager") -> tuple[Run, Config]:
    config = config_from(f"{COMMON} {flags}")
    torch.compiler.reset()  # what another test compiled
    return run_from(config, dtype=dtype, compile_backend=backend), config


def figures(run: Run) -> list[float]:
    """Loss and gradient norm of each step."""
    return [x for r in (train_step(run) for _ in range(STEPS)) for x in (r.loss, r.grad_norm)]


def trained(flags: str, dtype: torch.dtype = torch.float64, backend: Any = "eager") -> list[float]:
    return figures(build(flags, dtype, backend)[0])


RARELY = pytest.mark.nightly(guards=("megalite/models/torch_compile.py", "megalite/models/gpt.py"))
OFTEN = [LLAMA + BORDERS + SELECTIVE]
SELDOM = [DROP + FULL, DROP + BORDERS, QWEN, NEOX, DROP + SELECTIVE, PAIRS + PARTS]


@pytest.mark.parametrize("flags", [*OFTEN, *(pytest.param(flags, marks=RARELY) for flags in SELDOM)])
def test_compiled_functions_equal_eager_and_are_few(flags: str) -> None:
    """Layers and steps, whose numbers are coordinates of dropout, share what is compiled; warm-up has compiled it."""
    count = Counting()
    run, config = build(flags + " --compile", backend=count)
    compile_warmup(run, config)
    graphs = count.graphs
    assert 3 <= graphs <= 7
    got = figures(run)
    assert count.graphs == graphs
    without = Counting()
    assert got == pytest.approx(trained(flags, backend=without), rel=1e-12, abs=0) and without.graphs == 0


def _both(layouts: tuple[str, ...]) -> list[list[float]]:
    return [trained(f"{model} --num-layers 2 {layout}") for model, layout in zip(MODELS, layouts, strict=True)]


@pytest.mark.parametrize("axes", [("tensor-model", "pipeline-model"), ("context",) * 2], ids=["tp and pp", "cp"])
def test_compiled_layout_equals_one_process(axes: tuple[str, str]) -> None:
    want = _both(("", ""))
    layouts = tuple(f"--compile --{axis}-parallel-size 2" for axis in axes)
    for got in run_ranks(2, _both, layouts):
        for one, model in zip(got, want, strict=True):
            assert one == pytest.approx(model, rel=1e-10, abs=0)


def _warmed(flags: str) -> list[float]:
    """Loss and gradient norm of each step behind a warm-up; a checkpoint may come between."""
    run, config = build(flags)
    compile_warmup(run, config)
    for main in run.optimizer.main:
        main.mul_(1.01)
    run.optimizer.sync_after_load()
    return figures(run)


@pytest.mark.parametrize("stage", [2, 3])
def test_compile_warmup_leaves_no_unsharded_weights(stage: int) -> None:
    want = run_ranks(2, _warmed, f"{LLAMA} --num-layers 2")
    for hold in ("layer", "chunk")[: stage - 1]:
        got = run_ranks(
            2, _warmed, f"{LLAMA} --num-layers 2 --compile --zero-stage {stage} --reshard-after-forward {hold}"
        )
        for one, other in zip(got, want, strict=True):
            assert one == pytest.approx(other, rel=1e-12, abs=0)


def _waiting(flags: str) -> tuple[list[float], list[int], list[int]]:
    """Of a pipeline rank: loss and gradient norm of each step; graphs after warm-up, and after the steps; how many
    weight gradients each W computes."""
    count, waited, compute = Counting(), list[int](), WeightGradStore.compute_all

    def counted(later: WeightGradStore) -> None:
        waited.append(len(list(later.main_grads)))
        compute(later)

    run, config = build(flags, backend=count)
    compile_warmup(run, config)
    graphs = count.graphs
    with mock.patch.object(WeightGradStore, "compute_all", counted):
        return figures(run), [graphs, count.graphs], waited


@pytest.mark.parametrize(
    "flags",
    [
        MODELS[0],
        *(pytest.param(m, marks=RARELY) for m in (MODELS[1], f"{QWEN} --num-virtual-stages-per-pipeline-rank 2")),
    ],
)
def test_compiled_blocks_defer_weight_gradients(flags: str) -> None:
    """No step compiles anything, and a W has all to do that it has without."""
    whole = f"{flags} --pipeline-model-parallel-size 2"
    want = run_ranks(2, _waiting, whole)
    eager, compiled = (run_ranks(2, _waiting, f"{whole} --split-backward{also}") for also in ("", " --compile"))
    chunks = 2 if "virtual" in flags else 1
    # five matrices of each of the two layers of a rank, in its chunks, for each of the four micro-batches of a step
    each = [5 * 2 // chunks] * (STEPS * 4 * chunks)
    for (loss, _, none), (_, _, waited), (got, graphs, also) in zip(want, eager, compiled, strict=True):
        assert none == [] and waited == also == each
        assert 3 <= graphs[0] == graphs[1]
        assert got == pytest.approx(loss, rel=1e-10, abs=0)


@RARELY
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_run_equals_eager_and_compiles_before_its_first_step(tmp_path: Path) -> None:
    told, losses = "", list[list[float]]()
    for number, also in enumerate(("", "--compile --split-backward")):
        line = f"{COMMON} {DROP} --nproc 2 --pipeline-model-parallel-size 2 --train-iters 4 --log-interval 1 {also}"
        folder, env = tmp_path / str(number), os.environ | {"TORCH_LOGS": "recompiles,graph_breaks"}
        how: dict[str, Any] = dict(capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280)
        words = [*line.split(), "--run-dir", str(folder)]
        told = programs.python("pretrain_gpt.py", *words, env=env, ok=True, **how).stdout
        losses.append([x for of in ("train/loss", "train/grad_norm") for x in logged(folder, of)])
    assert len(losses[0]) == 2 * 4 and losses[1] == pytest.approx(losses[0], rel=1e-5, abs=0)
    before, _, after = told.partition("compiled in ")
    # forward and backward of the activation are two functions that have one wrapper of torch's
    assert after and "Recompiling function" in before and "ecompil" not in after and "raph break" not in told


def saved_bytes(flags: str, dtype: torch.dtype) -> int:
    """Of what a stage keeps for backward, weights aside."""
    run, _ = build(flags, dtype, "aot_eager_decomp_partition")  # splits forward from backward as inductor does
    stage = run.pipeline.stages[0]
    ids_SB = torch.zeros(16, 2, dtype=torch.int64)
    batch = Batch(ids_SB, ids_SB, None, torch.arange(2), step=1)
    stage(None, batch)  # hooks must not be there while it is traced
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        stage(None, batch)
    return sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)


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

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [])  # to find them takes 8 s; scalar code will do
    monkeypatch.setattr(config, "pattern_matcher", False)  # 1 s
    flags = GPT + " --num-layers 1"
    want = trained(flags, torch.float32)
    assert trained(flags + " --compile", torch.float32, "inductor") == pytest.approx(want, rel=1e-5)


def test_compile_failure_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_compile("cpu")
    config = config_from(f"{COMMON} {GPT} --compile")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        SetupError, match=r"^compile=True needs a C\+\+ compiler, and .*g\+\+ is not installed; install"
    ):
        check_machine(make_run_plan(config, 1, 93), "cpu", RankInfo(0, 1))
    if sys.platform == "linux":  # where inductor does not look for it
        (tmp_path / "clang++").symlink_to(sys.executable)
        with pytest.raises(CompileError, match=r"g\+\+ is not installed; install"):
            check_compile("cpu")
    # one that does not start, and one that tells its version, but has lost its headers
    lost = '[ "$1" = --version ] && exit 0\necho "fatal error: cmath: no such file" >&2\nexit 1'
    for name, script in (("broken", "exit 3"), ("halved", lost)):
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
        with pytest.raises(CompileError, match=text):
            check_compile("cpu")
    monkeypatch.delenv("CXX")
    check_machine(make_run_plan(config_from(f"{COMMON} {GPT}"), 1, 93), "cpu", RankInfo(0, 1))  # not asked for
    dispatch.set_kernel_options("triton", "auto")
    try:
        with pytest.raises(CompileError, match="^compile=True .*, but kernels=triton; use auto or torch$"):
            check_compile("cpu")
    finally:
        dispatch.set_kernel_options("auto", "auto")
