"""--cuda-graph-impl: replayed micro-batches train bit by bit as eager ones.

On a CPU a tape (simulated_gpu/simulator/tape.py) stands in for a CUDA graph and enforces its rules.
"""

import pytest
import torch
from ranks import run_ranks
from simulated_gpu.simulator.tape import Tape
from toml_tables import MESSAGES
from torch import Tensor
from train_cases import config_from, run_from

from megalite.config import cli
from megalite.config.validation import find_problems
from megalite.launch.rank_info import RankInfo
from megalite.pipeline.cuda_graph import CudaGraphPipeline
from megalite.planning.run_plan import make_run_plan
from megalite.training.evaluation import evaluate
from megalite.training.job.preflight import check_machine
from megalite.training.setup import SetupError
from megalite.training.state import Run
from megalite.training.train_step import train_step

STEPS = 3
COMMON = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 8 --train-iters 9 --lr 0.01 --seed 7 --mock-data --tokenizer-type NullTokenizer --vocab-size 94
 --make-vocab-size-divisible-by 8 --eval-iters 1 --hidden-dropout 0 --attention-dropout 0"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --ffn-hidden-size 48"""
LATENT = """--swiglu --ffn-hidden-size 48 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
 --multi-latent-attention --q-lora-rank 10 --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5
 --qk-layernorm"""
BORDERS = "--reset-position-ids --eod-mask-loss"
SELECTIVE = "--recompute-granularity selective"
FULL = "--recompute-granularity full --recompute-method uniform"
GRAPHED = "--cuda-graph-impl local"


def build(flags: str, dtype: torch.dtype, tapes: list[Tape]) -> Run:
    def tape() -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    return run_from(f"{COMMON} {flags}", dtype=dtype, graphs=tape if "--cuda-graph-impl" in flags else None)


def train(flags: str, dtype: torch.dtype = torch.float32) -> tuple[list[tuple[float, ...]], Tensor, list[int]]:
    """Return the gradient norm and all losses of each step, the weights, and the number of replays of each tape."""
    tapes: list[Tape] = []
    run = build(flags, dtype, tapes)
    results = [train_step(run) for _ in range(STEPS)]
    run.sync.wait_param_sync()
    weights = torch.cat([bucket.full for bucket in run.sync.param_buckets])
    losses = [(r.grad_norm, *r.losses.values()) for r in results]
    return losses, weights, [tape.replays for tape in tapes]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("", torch.float32),
        (f"{LLAMA} --bf16", torch.bfloat16),
        (f"{LLAMA} {BORDERS} {SELECTIVE} --z-loss-coeff 1e-3", torch.float32),
        (f"{LATENT} {BORDERS} --mtp-num-layers 2", torch.float32),
        (f"{LATENT} --mtp-num-layers 1 {SELECTIVE} --recompute-modules mla_up_proj --bf16", torch.bfloat16),
        (f"{LATENT} {FULL} --mtp-num-layers 2 --mtp-use-repeated-layer --z-loss-coeff 1e-3", torch.float32),
        # a new loss scale at each step
        (f"{FULL} --fp16 --initial-loss-scale 256 --loss-scale-window 1", torch.float16),
    ],
)
def test_replays_equal_eager_micro_batches(flags: str, dtype: torch.dtype) -> None:
    losses, weights, eager_replays = train(flags, dtype)
    assert eager_replays == [] and losses[0] != losses[1]
    graphed_losses, graphed_weights, replays = train(f"{flags} {GRAPHED}", dtype)
    assert graphed_losses == losses and torch.equal(graphed_weights, weights)
    assert sum(replays) == STEPS * 4 - len(replays)  # the first micro-batch of each shape ran eagerly


def test_growing_batch_records_no_new_graph() -> None:
    flags = f"{LLAMA} --rampup-batch-size 2 2 6"
    losses, weights, _ = train(flags)
    graphed_losses, graphed_weights, replays = train(f"{flags} {GRAPHED}")
    assert graphed_losses == losses and torch.equal(graphed_weights, weights) and replays == [1 + 2 + 4 - 1]


def test_data_parallel_ranks_replay_the_middle_micro_batches() -> None:
    """Compare with one process. The first micro-batch gathers weights and the last one reduces gradients: both are eager."""
    flags = f"{LLAMA} --global-batch-size 16 --ddp-bucket-size 2000"
    (losses, weights, _), *_ = run_ranks(2, train, flags, torch.float64)
    single_losses, _, _ = train(f"{flags} {GRAPHED}", torch.float64)
    for graphed_losses, graphed_weights, replays in run_ranks(2, train, f"{flags} {GRAPHED}", torch.float64):
        assert graphed_losses == losses and torch.equal(graphed_weights, weights)
        assert replays == [STEPS * 2 - 1]
        for actual, expected in zip(graphed_losses, single_losses, strict=True):
            assert actual == pytest.approx(expected, rel=1e-10)


def test_evaluation_and_a_timeline_are_eager() -> None:
    tapes: list[Tape] = []
    run = build(GRAPHED, torch.float32, tapes)
    pipeline = run.pipeline
    assert isinstance(pipeline, CudaGraphPipeline)
    pipeline.timeline = []
    train_step(run)
    assert [str(timed.action)[0] for timed in pipeline.timeline] == ["F", "B"] * 4 and not tapes
    pipeline.timeline, pipeline.enabled = None, False
    train_step(run)
    assert not tapes
    pipeline.enabled = True
    train_step(run)
    replays, grads = [tape.replays for tape in tapes], torch.cat([bucket.full for bucket in run.sync.grad_buckets])
    assert sum(replays) == 3
    for _ in range(2):
        assert evaluate(run, run.valid_loaders[0].data, 1) > 0
    assert [tape.replays for tape in tapes] == replays and torch.equal(
        torch.cat([bucket.full for bucket in run.sync.grad_buckets]), grads
    )


REFUSED = MESSAGES["graphs"]


@pytest.mark.parametrize("flags", REFUSED)
def test_unrepeatable_options_are_refused(flags: str) -> None:
    world, text = REFUSED[flags]
    argv = f"{COMMON} {GRAPHED} {flags}".split()
    try:
        config = config_from(argv)
        problems = find_problems(config, world)
    except cli.ConfigError as error:
        problems = error.problems
    assert len(problems) == 1 and problems[0].startswith("cuda_graph_impl=local ") and text in problems[0]
    assert "drop" in problems[0]


def test_cuda_graphs_without_a_gpu_are_refused() -> None:
    config = config_from(f"{COMMON} {GRAPHED}")
    with pytest.raises(SetupError, match="cuda_graph_impl=local needs a CUDA device, and none is available; drop it"):
        check_machine(make_run_plan(config, 1, 93), "cpu", RankInfo(0, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("flags", ["", f"{LLAMA} {SELECTIVE} --bf16"])
def test_replays_equal_eager_micro_batches_on_a_gpu(flags: str) -> None:
    device, results = torch.device("cuda"), []
    for graph_flags in ("", GRAPHED):
        run = run_from(f"{COMMON} {flags} {graph_flags}", device=device)
        results.append([x for r in (train_step(run) for _ in range(STEPS)) for x in (r.loss, r.grad_norm)])
        if graph_flags:
            assert isinstance(run.pipeline, CudaGraphPipeline) and len(run.pipeline._captured) == 1
    assert results[1] == pytest.approx(results[0], rel=1e-2 if "--bf16" in flags else 1e-4)
