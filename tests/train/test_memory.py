"""What the plan says of a run is what its ranks take."""

import re
import resource
import subprocess
import sys
from collections.abc import Iterable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from formulas import head_flops, layer_flops
from ranks import run_ranks
from train_cases import SMALL
from work import calls

from megalite.config import cli
from megalite.config.options import Config
from megalite.models.families import PRESETS
from megalite.nn.later import Later
from megalite.nn.parameter import GradientSink
from megalite.parallel.launch import LaunchError, Ranks
from megalite.parallel.mesh import Axis
from megalite.pipeline.schedule import in_flight, plan
from megalite.pipeline.simulate import simulate
from megalite.plan.arrangement import arrange
from megalite.train.life.preflight import check_machine
from megalite.train.setup import build_run
from megalite.train.step import train_step

TP, PP, VPP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
)
GROUPS = "--group-query-attention --num-query-groups 1 --swiglu --untie-embeddings-and-output-weights"
SPLIT = "--split-backward"
Part = tuple[GradientSink, torch.Tensor]


def config_of(flags: str) -> Config:
    return cli.parse([*SMALL, "--train-iters", "1", *flags.split()], PRESETS)


def _taken(flags: str) -> tuple[int, int, int, int]:
    """Of this rank: its pipeline rank; bytes of weights, gradients, optimizer."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks()
    run = build_run(config_of(flags), ranks, torch.device("cpu"))
    held = [*(t for state in run.optimizer.state for t in state.values())]
    held += [] if run.optimizer.same else run.optimizer.main
    sizes = [
        sum(t.untyped_storage().nbytes() for t in ts) for ts in (run.buffer.weights.flats, run.buffer.grads.flats, held)
    ]
    run.close()
    return run.mesh.pp.rank, *sizes


@pytest.mark.parametrize(
    "world,flags",
    [
        (1, ""),
        (1, "--bf16"),
        (1, "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
        (1, "--bf16 --optimizer sgd"),
        (1, "--optimizer sgd"),
        (2, "--bf16"),
        (2, "--bf16 --no-use-distributed-optimizer"),
        (2, f"{TP} 2 --ddp-bucket-size 1000"),
        (2, f"{PP} 2 --bf16"),
        (4, f"{TP} 2 {GROUPS}"),
        (4, f"{TP} 2 {PP} 2 {VPP} 2 --bf16"),
        (4, f"{PP} 4 --account-for-embedding-in-pipeline-split --num-layers 7"),
        (6, f"{PP} 3 --bf16 --ddp-bucket-size 2000 --global-batch-size 12"),
    ],
)
def test_the_plans_bytes_are_those_of_the_run(world: int, flags: str) -> None:
    found = arrange(config_of(flags), world, 93)
    for rank, *sizes in run_ranks(world, _taken, flags) if world > 1 else [_taken(flags)]:
        held = found.holdings[rank]
        assert sizes == [held.weights, held.gradients, held.optimizer], rank


def preset(flags: str) -> Config:
    return cli.parse(
        f"--mock-data --lr 1 --train-iters 1 --micro-batch-size 1 --bf16 --preset {flags}".split(), PRESETS
    )


def test_the_first_rank_holds_the_embedding_and_fewer_layers_for_it() -> None:
    """llama3-8b over 8 stages, with micro-batches enough that the split matters: of one alone all are equally fast."""
    found = arrange(preset(f"llama3-8b {PP} 8 --global-batch-size 32"), 8, 128256)
    layer, embedding = 218_112_000, 128_256 * 4096
    assert found.parameters == 8_030_261_248
    assert [len(layers) for layers in found.stages] == [2, 4, 4, 5, 5, 5, 5, 2]
    held = found.holdings[0]
    assert found.worst in range(3, 7) and held.local == 2 * layer + embedding
    assert held.state == pytest.approx(18 * held.local, rel=1e-4)
    with pytest.raises(
        LaunchError, match=r"weights and optimizer alone take 4\d\d\.\d GiB per rank on pipeline rank \d+"
    ):
        check_machine(arrange(preset(f"llama3-405b {PP} 16"), 16, 128256), "cpu", Ranks(0, 16, 0, 16))


def _peak(flags: str) -> tuple[int, int]:
    """Of this rank in one step: its pipeline rank, and the most bytes that waited for their backward, or for W."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    run = build_run(config_of(flags), ranks, torch.device("cpu"))
    held = {p.untyped_storage().data_ptr() for stage in run.pipeline.stages for p in stage.parameters()}
    alive: dict[int, list[int]] = {}  # storage -> uses, bytes
    now = most = 0

    class Kept:
        def __init__(self, t: torch.Tensor):
            nonlocal now, most
            self.t, self.key = t, t.untyped_storage().data_ptr()
            entry = alive.setdefault(self.key, [0, 0 if self.key in held else t.untyped_storage().nbytes()])
            now += 0 if entry[0] else entry[1]
            entry[0] += 1
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            entry = alive[self.key]
            entry[0] -= 1
            if not entry[0]:
                now -= alive.pop(self.key)[1]

    leave, work, kept = Later.leave, Later.run, dict[int, list[Kept]]()

    def counted(later: Later, x: torch.Tensor, over: Axis | None, parts: Iterable[Part]) -> None:
        leave(later, x, over, parts := list(parts))
        kept.setdefault(id(later), []).extend(Kept(t.detach()) for t in (x, *(dy for _, dy in parts)))

    def ran(later: Later) -> None:
        work(later)
        del kept[id(later)]

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.t):
        with patch.object(Later, "leave", counted), patch.object(Later, "run", ran):
            train_step(run)
    assert not kept
    run.close()
    return run.mesh.pp.rank, most


@pytest.mark.parametrize(
    "flags",
    [
        f"{PP} 2 --global-batch-size 8",
        f"{PP} 2 {VPP} 2 --global-batch-size 12",
        f"{PP} 2 --pipeline-schedule gpipe --global-batch-size 8",
        f"{PP} 2 {SPLIT} --global-batch-size 8",
        f"{PP} 2 {VPP} 2 {SPLIT} --global-batch-size 12 --swiglu",
        f"{PP} 2 {SPLIT} --global-batch-size 8 --zero-bubble-max-pending-backward 4",
        f"{TP} 2 --global-batch-size 4",
        f"{TP} 2 --global-batch-size 4 {GROUPS} --position-embedding-type rope",
    ],
)
def test_activations_in_flight_are_those_of_the_schedule(flags: str) -> None:
    """Of a wide layer, so that statistics and tokens count little."""
    flags += " --bf16 --hidden-size 128 --seq-length 32 --max-position-embeddings 32 --hidden-dropout 0"
    flags += " --attention-dropout 0 --untie-embeddings-and-output-weights --vocab-size 16"
    found = arrange(config_of(flags), 2, 16)
    for rank, most in run_ranks(2, _peak, flags):
        expected = found.activations[rank]
        assert 0.9 * most <= expected <= 1.1 * most, (rank, most / expected)


def dry_run(*flags: str) -> tuple[str, float]:
    """What it prints, and the seconds it took of the processor."""
    words = [sys.executable, "pretrain_gpt.py", *flags, "--dry-run", "--mock-data", "--tokenizer-type", "NullTokenizer"]
    words += "--train-iters 1 --lr 1 --eval-iters 0 --bf16".split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return done.stdout, after.ru_utime - before.ru_utime


def test_a_plan_of_16384_ranks_needs_no_machine() -> None:
    flags = f"--preset llama3-405b --vocab-size 128255 --micro-batch-size 1 --global-batch-size 8192 {PP} 16 {VPP} 7"
    text, seconds = dry_run(*flags.split(), TP, "8", "--nproc", "16384")
    assert "pp 16 x dp 128 x cp 1 x tp 8 = 16384 ranks" in text and "warning" not in text
    assert "tp 0 1 .. 7 (node 0), dp 0 8 .. 1016 (128 nodes), pp 0 1024 .. 15360 (16 nodes)" in text
    assert len(re.findall(r"^pipeline rank", text, re.M)) == 16 and seconds < 10


@pytest.mark.parametrize("nproc", [64, 1024])
def test_tensor_parallel_ranks_on_two_nodes_are_warned_of(nproc: int) -> None:
    flags = f"--preset llama3-8b --vocab-size 128255 --micro-batch-size 1 {PP} 4 {TP} 16 --nproc {nproc}"
    text, _ = dry_run(*flags.split())
    assert "tensor_model_parallel_size=16 crosses nodes of 8 ranks" in text and "use 8, or start 16" in text
    assert "1 micro-batch; bubble 75.0%" in text


def test_long_steps_are_extrapolated() -> None:
    """A plan of many micro-batches takes no longer, and is what the schedule simulated in full gives."""
    for schedule, m, vpp in (("1f1b", 50, 2), ("gpipe", 50, 2), ("1f1b", 43, 1), ("breadth-first", 50, 2)):
        flags = f"{PP} 4 {VPP} {vpp} --num-layers 8 --pipeline-schedule {schedule} --global-batch-size {2 * m}"
        for option in ("", f" {SPLIT}", f" {SPLIT} --zero-bubble-max-pending-backward 3"):
            found = arrange(config := config_of(flags + option), 4, 93)
            assert (found.split is not None) == bool(option)
            rows = plan(schedule, 4, m, vpp, split=found.split)
            assert found.in_flight == [in_flight(row) for row in rows]
            assert found.bubble == pytest.approx(simulate(rows, found.costs).bubble, abs=0.01)
            layer = layer_flops(config.model, config.model.seq_length)
            whole = 3 * (8 * layer + head_flops(config.model, found.padded_vocab)) * found.tokens
            assert sum(map(sum, found.costs)) == pytest.approx(whole, rel=1e-6)
    _, many, more = (  # the first fills what is kept for the next
        calls(lambda size=size: arrange(config_of(f"{PP} 4 --num-layers 8 --global-batch-size {size}"), 4, 93).bubble)
        for size in (10_000, 100_000, 1_000_000)
    )
    assert more < 1.1 * many


def test_ranks_that_are_to_run_here_are_limited() -> None:
    words = [sys.executable, "pretrain_gpt.py", *SMALL, "--train-iters", "1", "--nproc", "80000"]
    done = subprocess.run([*words, "--global-batch-size", "160000"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "nproc=80000 is more than 8 x" in done.stderr
