"""A dry run of one rank: the collectives and bytes that it reports equal those of the same rank in a real run."""

import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import programs
import pytest
import torch
import torch.distributed as dist
from pairwise import expand_abbreviations
from ranks import run_ranks
from train_cases import config_from, run_from

from megalite.models.gpt import Stage
from megalite.nn import mlp
from megalite.nn.activation_offload import _SavedStorage
from megalite.nn.storage_identity import storage_id
from megalite.parallel.mesh import Axis
from megalite.pipeline import runtime
from megalite.planning.layer_cost import CommStart
from megalite.planning.memory import rank_memory
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.datasets import DatasetBundle, build_datasets
from megalite.training.dry_run import CollectiveCall, dry_run_rank, record_collectives
from megalite.training.logging.plan_summary import format_plan
from megalite.training.setup import SetupError
from megalite.training.train_step import train_step

S, B, D, L, M = 16, 2, 32, 4, 4
MODEL = f"""--num-layers {L} --hidden-size {D} --num-attention-heads 4 --seq-length {S} --max-position-embeddings {S}
 --micro-batch-size {B} --train-iters 3 --lr 0.01 --mock-data --vocab-size 64 --eval-iters 0 --hidden-dropout 0
 --attention-dropout 0 --ddp-bucket-size 9000 --device cpu"""
TABLES = tomllib.loads(Path(__file__).with_name("rank_memory.toml").read_text("utf-8"))
FLAGS = expand_abbreviations(TABLES["abbreviations"])
TP, PP, ZERO, EXPERTS = (FLAGS[name] for name in ("TP", "PP", "ZERO", "EXPERTS"))
MeasuredStep = tuple[Counter[CollectiveCall], dict[str, int]]


def plan_and_sources(flags: str, world: int, model: str = MODEL) -> tuple[RunPlan, DatasetBundle]:
    config = config_from(f"{model} {flags}")
    sources = build_datasets(config.data, config.model.seq_length, config.train.seed, 0)
    return make_run_plan(config, world, sources.vocab_size), sources


def bytes_of(*tensors: torch.Tensor) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum({storage_id(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _measure_step(flags: str) -> MeasuredStep:
    """Measure a second step, at the final batch size, including the all-gathers that the first step left."""
    plan, sources = plan_and_sources(flags, dist.get_world_size())
    run = run_from(plan.config, sources=sources, plan=plan)
    run.progress.consumed_samples = run.batch_sizes.milestones[-1][0]
    train_step(run)
    run.sync.wait_param_sync()
    with record_collectives(run.mesh) as calls:
        train_step(run)
        run.sync.wait_param_sync()
    flats = [x for bucket in run.optimizer.buckets for x in (bucket.main, *bucket.state.values())]
    weights, gradients = (
        [x for bucket in buckets for x in (bucket.full, bucket.shard)]
        for buckets in (run.sync.param_buckets, run.sync.grad_buckets)
    )
    host_updater = run.optimizer.host_updater
    offloaded_state = [x for main, state in host_updater.allocations for x in (main, *state.values())]
    on_host = [*([] if host_updater.disk_bytes else offloaded_state), *host_updater.grads]
    shared = {storage_id(flat) for flat in (*weights, *offloaded_state)}
    if plan.config.parallel.param_cpu_offload:
        offloaded_weights = [bucket.shard for bucket in run.sync.param_buckets if not bucket.is_resident]
        on_host = on_host + offloaded_weights
        weights = [x for x in weights if all(x is not other for other in offloaded_weights)]
    stages = [stage for stage in run.pipeline.stages if isinstance(stage, Stage)]
    sizes = {
        "weights": bytes_of(*weights),
        "gradients": bytes_of(*gradients),
        "optimizer": bytes_of(*(x for x in flats if storage_id(x) not in shared)),
        "host": bytes_of(*on_host),
        "rotary tables": sum(bytes_of(*pair) for stage in stages for pair in stage.rope_tables.values()),
    }
    return calls, {name: size for name, size in sizes.items() if size}


def rows_of(table: str) -> list[Any]:
    """Return a table's rows: "often" runs with each commit, "seldom" with changes of the guarded files."""
    mark = pytest.mark.nightly(guards=("megalite/planning", "megalite/training/dry_run.py", "megalite/optim"))
    rows = [(row, marks) for name, marks in (("often", ()), ("seldom", mark)) for row in TABLES[table][name]]
    return [pytest.param(world, flags.format_map(FLAGS), marks=marks) for (world, flags), marks in rows]


@pytest.mark.parametrize(
    "exchange,seq_length,expected",
    [
        ("auto", 32, "maps of states in 0 layers, heads in 2"),
        ("auto", 512, "maps of states in 2 layers, heads in 0"),
        ("allgather", 32, "maps of states in 2 layers, heads in 0"),
        ("a2a", 512, "maps of states in 0 layers, heads in 2"),
        ("a2a a2a allgather a2a allgather a2a", 32, "maps of states in 1 layer, heads in 1"),
    ],
)
def test_plan_prints_what_recurrent_layers_exchange(exchange: str, seq_length: int, expected: str) -> None:
    flags = (
        f"{FLAGS['LLAMA']} {FLAGS['DELTA']} --num-layers 3 --hybrid-layer-pattern G-G-*- --global-batch-size 8 --cp 2"
    )
    lengths = f"--seq-length {seq_length} --max-position-embeddings {seq_length}"
    plan, sources = plan_and_sources(f"{flags} {lengths} --cp-comm-type {exchange}", 2)
    assert f"cp ranks exchange {expected}" in " ".join(format_plan(plan, sources, 2).split())


@pytest.mark.parametrize("exchange,collective", [("allgather", "all-gather"), ("a2a", "all-to-all")])
def test_dry_run_has_the_collectives_of_recurrent_layers(exchange: str, collective: str) -> None:
    """A layer takes part twice, in forward and backward, besides the borders of its convolution."""
    mamba = "--mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8"
    flags = f"{FLAGS['LLAMA']} {FLAGS['DELTA']} {mamba} --linear-num-key-heads 4 --num-layers 3 --global-batch-size 8"
    plan, sources = plan_and_sources(f"{flags} --hybrid-layer-pattern G-K-M- --cp 2 --cp-comm-type {exchange}", 2)
    assert totals(dry_run_rank(plan, sources, 1).calls, "cp", collective)[0] >= 3 * 2


@pytest.mark.parametrize("world,flags", rows_of("as_rank"))
def test_dry_run_equals_collectives_and_memory_of_every_rank(world: int, flags: str) -> None:
    size = M * B * world
    flags += f" --global-batch-size {size if 'rampup' not in flags else 8}"
    real: list[MeasuredStep] = run_ranks(world, _measure_step, flags)
    plan, sources = plan_and_sources(flags, world)
    for rank, (calls, sizes) in enumerate(real):
        predicted = dry_run_rank(plan, sources, rank)
        assert predicted.calls == calls, f"rank {rank}: {predicted.calls - calls} and {calls - predicted.calls}"
        assert {
            name: num_bytes for name, num_bytes in (predicted.parts | {"host": predicted.host}).items() if num_bytes
        } == sizes, f"rank {rank}"
        assert predicted.in_flight > 0 and predicted.peak > predicted.state + predicted.in_flight
        model_state = plan.model_states.by_rank[predicted.mesh.pp.rank]
        assert [predicted.parts[name] for name in ("weights", "gradients")] == [
            model_state.weights,
            model_state.gradients,
        ]
        assert predicted.parts["optimizer"] == model_state.optimizer
        assert (predicted.host, predicted.parameters) == (model_state.host_bytes, model_state.local_numel)


def totals(calls: Counter[CollectiveCall], axis: str, op: str) -> tuple[int, int]:
    """Return (number of calls, bytes) of one collective over one axis."""
    matches = [(call.num_bytes, times) for call, times in calls.items() if (call.axis, call.op) == (axis, op)]
    return sum(times for _, times in matches), sum(size * times for size, times in matches)


def test_dry_run_collectives_equal_the_algorithms() -> None:
    """The first and the last stage are counted by hand for tp 2 x pp 2 x dp 2, fp32, one chunk of logits."""
    plan, sources = plan_and_sources(f"{TP} {PP} --global-batch-size {M * B * 2}", 8)
    for rank, head in ((0, False), (7, True)):
        calls, layers = dry_run_rank(plan, sources, rank).calls, len(plan.balance.layer_ranges[int(head)])
        activation, stats = S // 2 * B * D * 4, M * head
        # per layer two gathers forward; backward two of the outputs' gradients and two of the inputs; the head gathers
        # its input and two statistics of each token, the embedding the gradient of its output
        gathers, scatters = M * (layers * 6 + 1), M * (layers * 4 + 1)
        assert totals(calls, "tp", "all-gather") == (gathers + stats, gathers * activation + stats * S * B * 2 * 4)
        assert totals(calls, "tp", "reduce-scatter") == (scatters, scatters * 2 * activation)
        forward, backward = ("receive from", "send to") if head else ("send to", "receive from")
        assert totals(calls, "pp", forward) == totals(calls, "pp_grad", backward) == (M, M * activation)
        assert {call.peer for call in calls if call.peer >= 0} == {(rank + 4) % 8}
        assert totals(calls, "tied_embedding", "all-reduce")[0] == 1  # the tied embedding
        assert totals(calls, "world", "all-reduce") == (1, 5 * 8)
        gradients = plan.model_states.by_rank[int(head)].gradients
        assert totals(calls, "dp", "reduce-scatter")[1] == gradients
        assert totals(calls, "dp", "all-gather")[1] == gradients // 2  # a rank's shard of as many bytes of weights


LIKE_8B = """--preset llama3-8b --bf16 --micro-batch-size 1 --global-batch-size 5 --lr 0.01 --mock-data --eval-iters 0
 --train-iters 2"""


OFFLOAD = "--cpu-offloading-num-layers"


@pytest.mark.parametrize("world,flags", rows_of("of_8b"))
def test_planned_memory_equals_live_memory(world: int, flags: str) -> None:
    """The plan equals the first and last stage of Llama 3 8B, including buffers and messages.

    It was within 0.2 % when this was written, within 0.7 % for weights that are resharded, and 2.5 % by the chunk.
    """
    plan, sources = plan_and_sources(
        flags, world, LIKE_8B if ZERO not in flags else LIKE_8B.replace("size 5", "size 20")
    )
    copied: list[int] = []
    for rank in {0, world - 1}:
        copied.clear()
        with mock.patch.object(_SavedStorage, "copy_to_host", lambda storage: copied.append(storage.size)):
            dry_run = dry_run_rank(plan, sources, rank)
        position = dry_run.mesh.pp.rank
        costs = (
            cost
            for n in plan.shape.placement.stages_of_rank(position)
            for cost, _ in plan.balance.stage_costs.layer_costs(plan.balance.layer_ranges[n])
        )
        assert sum(copied) == plan.shape.num_microbatches * sum(cost.host_bytes for cost in costs)
        assert bool(copied) == (OFFLOAD in flags)
        error = (
            0.025
            if plan.shape.sharding_policy.unshard_by_chunk
            else 0.007
            if plan.shape.sharding_policy.reduce_every_pass
            else 0.003
        )
        assert rank_memory(plan)[position].peak == pytest.approx(dry_run.peak, rel=error)
        plain = (
            plan.balance.split_backward is None and "recompute" not in flags
        )  # else a backward allocates a part of it
        if plain and not plan.shape.sharding_policy.reduce_every_pass:  # else some units are unsharded, too
            assert dry_run.in_flight == pytest.approx(plan.balance.activation_bytes[position], rel=0.03)


@pytest.mark.parametrize("world,flags", rows_of("whole_matrices"))
def test_memory_of_full_tensor_updates_is_planned(world: int, flags: str) -> None:
    """Muon's update is the peak for four layers of Llama 3 8B on few tokens.

    The plan was within 0.3 % when this was written, and 0.8 % with copies.
    """
    small_run = f"{LIKE_8B.replace('size 5', 'size 4')} --num-layers 4 --seq-length 64 {flags}"
    plan, sources = plan_and_sources("--optimizer muon", world, small_run)
    (planned,) = rank_memory(plan)
    measured = max(dry_run_rank(plan, sources, rank).peak for rank in range(world))
    assert planned.peak == pytest.approx(measured, rel=0.01)
    adam = make_run_plan(config_from(small_run), world, sources.vocab_size)
    assert planned.transient > 3 * rank_memory(adam)[0].transient


def test_cp_rank_with_most_memory_is_planned() -> None:
    """Layers with and without a window are cut in the same zigzag: the first rank needs one chunk."""
    flags = "--num-layers 4 --cp 4 --window-size 1024,0 --window-attn-skip-freq 2"
    plan, sources = plan_and_sources(flags, 4, LIKE_8B.replace("size 5", "size 4"))
    moved = [totals(dry_run_rank(plan, sources, rank).calls, "cp", "all-to-all")[1] for rank in range(4)]
    events = [
        event
        for cost, _ in plan.balance.stage_costs.layer_costs(plan.balance.layer_ranges[0])
        for event in cost.trace
        if isinstance(event, CommStart)
    ]
    assert (
        max(moved) == plan.shape.num_microbatches * sum(e.num_bytes for e in events if e.op == "all-to-all") > moved[0]
    )


def test_dry_runs_of_all_ranks_match() -> None:
    """Every send has its receive, and the ranks of a group issue the same collectives."""
    plan, sources = plan_and_sources(
        f"{TP} {PP} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size {M * B * 2}", 8
    )
    ranks = [dry_run_rank(plan, sources, rank) for rank in range(8)]
    mirrored = {"send to": "receive from", "receive from": "send to"}
    for rank, dry_run in enumerate(ranks):
        for call, times in dry_run.calls.items():
            if call.peer >= 0:
                assert ranks[call.peer].calls[replace(call, op=mirrored[call.op], peer=rank)] == times, (rank, call)
            else:
                counts = [ranks[peer].calls[call] for peer in dry_run.mesh.axis(call.axis).ranks]
                assert counts == [times] * call.ranks, (rank, call)


def test_missing_collective_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mlp.column_parallel_linear
    monkeypatch.setattr(
        mlp, "column_parallel_linear", lambda x, weights, tp, later: original(x, weights, Axis("tp"), later)
    )
    plan, sources = plan_and_sources(f"{TP} --global-batch-size 8", 4)
    message = r"^rank 3 \(dp 1, tp 1\) cannot take a step .*RuntimeError.*megalite/models/gpt"
    with pytest.raises(SetupError, match=message):
        dry_run_rank(plan, sources, 3)


def test_message_of_another_shape_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation is received unsplit although it is split over tp: the rank with the labels detects it."""
    empty = torch.empty

    def unsplit(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        return empty((2 * shape[0], *shape[1:]), **options)

    plan, sources = plan_and_sources(f"{TP} {PP} --global-batch-size 8", 4)
    assert dry_run_rank(plan, sources, 2).calls
    refused = pytest.raises(SetupError, match="^rank 2 .*cannot take a step.*kernels/cross_entropy")
    with monkeypatch.context() as patched, refused:
        patched.setattr(runtime, "torch", SimpleNamespace(**{**vars(torch), "empty": unsplit}))
        dry_run_rank(plan, sources, 2)


def run_program(*flags: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr; its last line is the peak KiB of the process beyond torch's own."""
    code = """import resource, runpy, sys, torch
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = most()  # CUDA's libraries are larger
try:
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
finally:
    print(most() - before, file=sys.stderr)"""
    result = programs.run_python("-c", code, *flags, timeout=240)
    return result.returncode, result.stdout, result.stderr


ELSEWHERE = "--data-path /nowhere/tokens --tokenizer-type GPT2BPETokenizer"
ELSEWHERE += " --vocab-file /nowhere/v --merge-file /nowhere/m"


def test_dry_run_without_the_files_of_the_command_line() -> None:
    flags = f"""{MODEL} {TP} --nproc 4 --dry-run --dry-run-rank 3 {ELSEWHERE} --global-batch-size 8
     --compile""".replace("--mock-data", "")
    code, _, error = run_program(*flags.replace("--vocab-size 64", "").split())
    assert code == 3 and "/nowhere/v" in error and "or --vocab-size" in error and "tokens" not in error
    code, out, error = run_program(*flags.split())
    assert code == 0, error
    shown = [line.strip() for line in out.splitlines()]
    assert any(line.startswith("rank 3") and "dp 1 of 2, tp 1 of 2; node 0, its rank 3 of 4" in line for line in shown)
    assert any(line.startswith("stages") and "0 (layers 0 to 3)" in line for line in shown)
    assert any(line.startswith("tp: all-gather") for line in shown)
    assert "on a CPU" in out and "without --compile" in out


def test_dry_run_refuses_invalid_ranks() -> None:
    flags = f"{MODEL} {TP} --nproc 4".split()
    assert run_program(*flags, "--dry-run-rank", "1")[:2] == (2, "")
    code, out, error = run_program(*flags, "--dry-run-rank", "4", "--dry-run")
    assert (code, out) == (2, "") and "dry_run_rank=4 is not among 4 ranks; give 0 to 3" in error


@pytest.mark.nightly
def test_dry_run_of_16384_ranks_is_cheap() -> None:
    """Llama 3 405B as trained, tp 8, pp 16, dp 128: a real rank has 18 GiB of model state."""
    flags = """--preset llama3-405b --bf16 --tp 8 --pp 16 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1
     --global-batch-size 2048 --lr 8e-5 --train-iters 2 --mock-data --eval-iters 0 --nproc 16384 --dry-run --dry-run-rank 1234"""
    code, out, error = run_program(*flags.split())
    assert code == 0, error
    assert int(error.split()[-1]) < 1 << 19, "above 512 MiB"
    # rank = (pp * 128 + dp) * 8 + tp; 16 micro-batches, two chunks: one message each way for each, 8192 / 8 x 16384 bf16
    assert "pp 1 of 16, dp 26 of 128, tp 2 of 8; node 154, its rank 2 of 8" in " ".join(out.split())
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "pp: receive from 210 16 bfloat16 33,554,432 32 1.000" in rows
    assert "pp: send to 2,258 16 bfloat16 33,554,432 32 1.000" in rows
    assert "tp: reduce-scatter 8 bfloat16 268,435,456 512 128.000" in rows  # 16 x 8 layers x 4 of the full sequence
    assert "world: all-reduce 16,384 float64 40 1 0.000" in rows
