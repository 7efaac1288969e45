"""Predicted steps equal what follows from the schedule by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from train_cases import config_from

from megalite.pipeline.schedule import build_schedule
from megalite.pipeline.simulate import Durations, simulate
from megalite.planning.cluster import Cluster, DeviceProfile, Link, default_profile, make_cluster
from megalite.planning.dp_time import DpTimes
from megalite.planning.layer_cost import CommStart
from megalite.planning.layer_kinds import flops_per_token, layer_kinds
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.planning.stage_time import TOTAL, F, TimeModel, calibration_key
from megalite.planning.step_schedule import SIMULATED_GROUPS
from megalite.planning.step_time import StepTime, predict_step

SHAPE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --vocab-size 1024 --seq-length 512 --bf16 "
    "--micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 --mock-data --train-iters 1 --lr 1"
)
INSTANT = Link(0.0, 1e30)
PP2, PP4 = ("--pp 2 --decoder-first-pipeline-num-layers 4", "--pp 4 --decoder-first-pipeline-num-layers 2")


def make_plan(flags: str, world: int) -> RunPlan:
    return make_run_plan(config_from(f"{SHAPE} {flags}"), world, 1024)


def fast(world: int, **links: Link) -> Cluster:
    return dataclasses.replace(
        make_cluster("h100", world, world), **{"intra_node": INSTANT, "inter_node": INSTANT, **links}
    )


def known(plan: RunPlan, **more: Any) -> DeviceProfile:
    """Return a profile in which a layer takes 1 s forward and 2 s backward, and nothing else takes time."""
    nothing = (0.0, 0.0, 0.0)
    blocks = {"layer": (1.0, 2.0, 0.0), "layer, split": (1.0, 1.0, 1.0), "embedding": nothing, "head": nothing}
    blocks["update"] = nothing
    base = dataclasses.replace(
        default_profile("h100"), shape=calibration_key(plan), blocks=blocks, step_s=0.0, contention=0.0
    )
    return dataclasses.replace(base, **more)


def check_sum(step: StepTime) -> None:
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert min(step.parts.values()) >= -1e-9


@pytest.mark.parametrize(("vpp", "m"), [(1, 2), (1, 8), (2, 8), (4, 4), (2, 64)])
def test_bubble_equals_1f1b(vpp: int, m: int) -> None:
    """A step takes M F and B of a rank's layers, and (pp - 1) / vpp more (arXiv:2104.04473, sec. 2.2)."""
    virtual = f"--num-virtual-stages-per-pipeline-rank {vpp}" if vpp > 1 else ""
    plan = make_plan(f"{PP2} {virtual} --global-batch-size {m}", 2)
    step = predict_step(plan, fast(2), known(plan))
    assert step.seconds == pytest.approx(3 * 4 * (m + 1 / vpp))
    assert step.parts["bubble"] == pytest.approx(3 * 4 / vpp) and step.parts["compute"] == pytest.approx(12 * m)
    check_sum(step)


@pytest.mark.parametrize("flags", ["", "--split-backward", "--num-virtual-stages-per-pipeline-rank 2"])
def test_bubble_equals_the_run_plans(flags: str) -> None:
    plan = make_plan(f"--pp 4 {flags} --global-batch-size 12", 4)
    layers, costs = plan.balance.layers_per_stage, plan.balance.costs_of_stages
    layer = tuple(cost / layers[1] for cost in costs[1])
    head = tuple(cost - layers[-1] * layer_cost for cost, layer_cost in zip(costs[-1], layer, strict=True))
    blocks = {**known(plan).blocks, "layer": layer, "layer, split": layer, "head": head}
    step = predict_step(plan, fast(4), known(plan, blocks=blocks))
    assert (
        step.parts["bubble"] / step.seconds == pytest.approx(plan.balance.bubble, rel=1e-6)
        and plan.balance.bubble > 0.05
    )


def test_messages_delay_the_schedule() -> None:
    """Rank 0's last backward ends after 5 (F + B) and 4 messages with M 4, and after 3 and 2 with M 2.

    Counted by hand for pp 2, one chunk: each two micro-batches wait for two messages.
    """
    for m, ends, messages in ((2, 3, 2), (4, 5, 4)):
        plan = make_plan(f"{PP2} --global-batch-size {m}", 2)
        step = predict_step(plan, fast(2, intra_node=Link(0.25, 1e30)), known(plan))
        assert step.parts["pp"] == pytest.approx(0.25 * messages)
        assert step.parts["compute"] + step.parts["bubble"] == pytest.approx(12 * ends)
        check_sum(step)


def test_messages_of_one_direction_are_serialized() -> None:
    """GPipe sends 3 micro-batches over a link that is slower than the work.

    The third activation arrives 3 messages after the first forward, the last gradient 3 after the first backward.
    """
    schedule = simulate(build_schedule("gpipe", 2, 3), [(1, 2, 0), (1, 2, 0)], delay=lambda source, target: 10.0)
    arrived = 1 + 3 * 10  # then a forward, and the first backward
    assert schedule.end == arrived + 1 + 2 + 3 * 10 + 2


@pytest.mark.parametrize("flags", [PP4, f"{PP4} --num-virtual-stages-per-pipeline-rank 2"])
def test_long_step_is_extrapolated(flags: str) -> None:
    plan = make_plan(f"{flags} --global-batch-size 64", 4)
    costs = [(1.0, 1.1, 0.9)] * plan.shape.placement.num_stages
    durations = [Durations(costs, delay=lambda source, target: 0.2)]
    (extrapolated,) = plan.balance.schedule.simulate(durations, num_groups=SIMULATED_GROUPS)
    (expected,) = plan.balance.schedule.simulate(durations, num_groups=64)
    assert len(extrapolated.simulation.spans) < len(expected.simulation.spans)
    assert extrapolated.seconds == pytest.approx(expected.seconds, rel=0.01)


def test_gradient_reduction_overlaps_the_last_backward() -> None:
    """Overlap changes nothing with dp 2 and one bucket; with many buckets all but the last are hidden."""
    slow = {"intra_node": Link(0.0, 1e9)}
    batch = "--global-batch-size 4"
    profile = known(make_plan(batch, 2))
    single = predict_step(make_plan(f"{batch} --ddp-bucket-size 4000000000", 2), fast(2, **slow), profile)
    small_buckets = f"{batch} --ddp-bucket-size 1000000"
    plan, late_plan = (
        make_plan(f"{small_buckets} {more}", 2) for more in ("", "--no-overlap-grad-reduce --no-overlap-param-gather")
    )
    many, late = (predict_step(run_plan, fast(2, **slow), profile) for run_plan in (plan, late_plan))
    weights, gradients = plan.model_states.by_rank[0].weights, plan.model_states.by_rank[0].gradients
    assert late.parts["dp"] == pytest.approx((weights + gradients) / 2 / 1e9, rel=0.01)  # (N - 1) / N of each
    assert 0 < many.parts["dp"] < 0.1 * late.parts["dp"]
    assert single.parts["dp"] == pytest.approx(late.parts["dp"], rel=0.01)
    for step in (single, many, late):
        check_sum(step)


CHUNKS = "--pp 2 --num-virtual-stages-per-pipeline-rank 4"


@pytest.mark.parametrize(
    "flags,reduced,unsharded",
    [  # number of collectives of a stage in a step of 8 micro-batches: REDUCE_GRAD, and gathers of the layers' weights
        ("--zero-stage 2", 8, 1),
        ("--zero-stage 3", 8, 16),
        ("--zero-stage 3 --reshard-after-forward chunk", 8, 1),
        (f"{CHUNKS} --zero-stage 2", 4, 1),  # passes of pp micro-batches
        (f"{CHUNKS} --zero-stage 3", 4, 7),  # the last forwards and the first backwards are one pass
        (f"{CHUNKS} --zero-stage 3 --reshard-after-forward layer", 4, 16),
        (f"{CHUNKS} --zero-stage 3 --pipeline-schedule breadth-first", 1, 2),
    ],
)
def test_sharded_weights_are_gathered_for_each_pass(flags: str, reduced: int, unsharded: int) -> None:
    """The collectives move f(d) P (4 R + 2 A) bytes. test_param_sync_time.py has exact times of each of them.

    Without overlap all of their time is exposed, and with a pipeline some of it twice. With overlap only the time
    beyond the work that hides it is exposed.
    """
    pp = 2 if "--pp" in flags else 1
    late = "--no-overlap-grad-reduce --no-overlap-param-gather"
    plan, hidden = (make_plan(f"{flags} --global-batch-size 16 {more}", 2 * pp) for more in (late, ""))
    layers = sum(map(sum, plan.model_states.numel_by_layer)) / pp
    moved = (4 * reduced + 2 * unsharded) * layers / 2
    slow, profile = fast(2 * pp, intra_node=Link(0.0, 1e9)), known(plan)
    step = predict_step(plan, slow, profile)
    check_sum(step)
    exposed, still_exposed = (
        step.parts["dp"] / (moved / 1e9),
        predict_step(hidden, slow, profile).parts["dp"] / (moved / 1e9),
    )
    if plan.shape.sharding_policy.unshard_by_chunk:
        assert 0.6 < exposed < 1.1  # UNSHARD overlaps with the action before the pass in any case
    else:
        assert 0.97 < exposed < 1.3
    if pp > 1 and "layer" in flags:
        assert 0.9 < still_exposed < exposed  # each stage has one layer, so there is no next one to gather
    else:
        assert still_exposed < 0.3
    contended = predict_step(hidden, slow, known(plan, contention=1.0)).parts["dp"]
    assert contended == pytest.approx(moved / 1e9, rel=0.06)  # layers alone are counted here
    waits = predict_step(hidden, fast(2 * pp, intra_node=Link(0.0, 1e5)), profile)
    assert 0.7 < (waits.seconds - waits.parts["pp"]) / (moved / 1e5) < 1.25  # some of the messages hide, too


RECURRENT = """ --experimental-attention-variant gated_delta_net --linear-attention-freq [1,1,1,1,1,1,1,1]
 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64"""


@pytest.mark.parametrize("exchange", ["allgather", "a2a", f"allgather {RECURRENT}", f"a2a {RECURRENT}"])
def test_cp_and_tp_waits_are_separate(exchange: str) -> None:
    """The ranks of tp are on one node and those of cp on two; half of a layer's cp bytes go over the slow link."""
    plan, alone = (make_plan(f"--tp 2 --cp {cp} --cp-comm-type {exchange} --global-batch-size 6", 4) for cp in (2, 1))
    profile = dataclasses.replace(default_profile("h100"), contention=0.0)
    slow = dataclasses.replace(fast(4, inter_node=Link(0.0, 1e9)), devices_per_node=2, num_nodes=2)
    trace = plan.balance.stage_costs.layer_costs(range(1))[0][0].trace
    moved = sum(event.num_bytes for event in trace if isinstance(event, CommStart) and event.axis == "cp")
    both, tp = predict_step(plan, slow, profile), predict_step(alone, fast(4, intra_node=Link(0.0, 1e9)), profile)
    assert both.parts["cp"] == pytest.approx(6 * 8 * moved / 2 / 1e9) and both.parts["tp"] == pytest.approx(0, abs=1e-9)
    assert tp.parts["tp"] > 0.01 and tp.parts["cp"] == 0
    check_sum(both)


def test_replicated_optimizer_all_reduces_gradients() -> None:
    plan = make_plan("--global-batch-size 4 --no-overlap-grad-reduce --no-use-distributed-optimizer", 2)
    assert plan.config.parallel.use_distributed_optimizer is False
    step = predict_step(plan, fast(2, intra_node=Link(0.0, 1e9)), known(plan))
    assert step.parts["dp"] == pytest.approx(plan.model_states.by_rank[0].gradients / 1e9, rel=0.01)  # 2 (N - 1) / N


def test_exposed_tp_communication_is_counted() -> None:
    """A layer exposes 4 collectives in forward and the 2 gathers of dy in backward; matmuls hide the others.

    If the link is so slow that nothing is hidden, it exposes all 10. The embedding has 2; the head has 2, one of them
    hidden by its last matmul.
    """
    plan = make_plan("--tp 2 --global-batch-size 4", 2)
    n = 512 * 1024 * 2 / 2  # half of a micro-batch's hidden states in bf16
    base = dataclasses.replace(default_profile("h100"), contention=0.0)
    for rate, per_layer, ends in ((2e12, 6, 3), (1e6, 10, 4)):
        step = predict_step(plan, fast(2, intra_node=Link(0.0, rate)), base)
        assert step.parts["tp"] == pytest.approx(4 * (8 * per_layer + ends) * n / rate, rel=0.01)
        check_sum(step)


def test_overlap_slows_down_compute() -> None:
    plan = make_plan("--global-batch-size 4 --ddp-bucket-size 1000000", 2)
    free, contended = (
        predict_step(plan, fast(2, intra_node=Link(0.0, 1e9)), known(plan, contention=share)) for share in (0.0, 0.5)
    )
    total = (plan.model_states.by_rank[0].weights + plan.model_states.by_rank[0].gradients) / 2 / 1e9
    assert contended.parts["dp"] - free.parts["dp"] == pytest.approx(0.5 * (total - free.parts["dp"]), rel=0.01)


def test_tied_embedding_gradient_is_reduced() -> None:
    tied = make_plan(f"{PP2} --global-batch-size 4", 2)
    own = make_plan(f"{PP2} --global-batch-size 4 --untie-embeddings-and-output-weights", 2)
    a, b = (predict_step(plan, fast(2, intra_node=Link(0.0, 1e9)), known(plan)).parts["dp"] for plan in (tied, own))
    assert a - b == pytest.approx(1024 * 1024 * 4 / 1e9)  # fp32, 2 (N - 1) / N = 1


def test_full_recompute_adds_a_forward() -> None:
    args = "--global-batch-size 4"
    plain, full = make_plan(args, 1), make_plan(f"{args} --recompute-granularity full --recompute-method uniform", 1)
    profile, cluster = default_profile("h100"), make_cluster("h100", 1)
    a, b = (TimeModel(plan, cluster, profile) for plan in (plain, full))
    recompute = b.stage_times[0][0, 1] - a.stage_times[0][0, 1]
    forward = 8 * a.layer_time(layer_kinds(plain.config.model)[0])[0, 0]
    assert 0.8 * forward < recompute < forward  # without the last operations, whose results backward does not need


def test_block_recompute_costs_only_its_layers() -> None:
    full = "--recompute-granularity full --recompute-method"
    profile, cluster = default_profile("h100"), make_cluster("h100", 1)
    plain, block, uniform = (
        TimeModel(make_plan(f"--global-batch-size 4 {flags}", 1), cluster, profile).stage_times[0][0, 1]
        for flags in ("", f"{full} block --recompute-num-layers 3", f"{full} uniform")
    )
    assert block - plain == pytest.approx(3 / 8 * (uniform - plain)) and uniform > plain


def test_slower_links_are_never_faster() -> None:
    plan = make_plan("--tp 2 --pp 2 --global-batch-size 8", 8)
    times = []
    for scale in (1.0, 0.5, 0.1, 0.01):
        base = make_cluster("h100", 8, 4)
        links = {
            side: dataclasses.replace(getattr(base, side), bytes_per_s=scale * getattr(base, side).bytes_per_s)
            for side in ("intra_node", "inter_node")
        }
        step = predict_step(plan, dataclasses.replace(base, **links))
        check_sum(step)
        times.append(step.seconds)
    assert times == sorted(times) and times[0] < times[-1]


def test_mfu_and_tokens_are_cluster_totals() -> None:
    plan = make_plan("--global-batch-size 8", 4)
    step = predict_step(plan, make_cluster("h100", 4))
    flops = flops_per_token(plan.config.model, plan.shape.padded_vocab) * 8 * 512
    assert step.mfu == pytest.approx(flops / step.seconds / 4 / 989.4e12)
    assert step.tokens_per_s == pytest.approx(8 * 512 / step.seconds)
    with pytest.raises(ValueError, match="8 devices, the plan 4 ranks"):
        predict_step(plan, make_cluster("h100", 8))


def test_kernel_launches_bound_a_small_model_without_cuda_graphs() -> None:
    eager, graph = make_plan("--global-batch-size 8", 1), make_plan("--global-batch-size 8 --cuda-graph-impl local", 1)
    cluster = make_cluster("h100", 1)
    assert predict_step(graph, cluster).seconds < 0.5 * predict_step(eager, cluster).seconds


ROPE = "--position-embedding-type rope"


@pytest.mark.parametrize(
    "more", ["--qk-layernorm", "--disable-bias-linear", "--parallel-residual", "--window-size 63,0", "--no-rope-freq 4"]
)
def test_uncalibrated_layer_kind_is_priced_by_its_cost(more: str) -> None:
    plain, other = (make_plan(f"{ROPE} {flags} --global-batch-size 8", 1) for flags in ("", more))
    times, times_of_other = (
        TimeModel(plan, fast(1), known(plain)).layer_times.per_layer[:, TOTAL, F] for plan in (plain, other)
    )
    # every fourth layer has no positions
    calibrated = [n % 4 != 3 for n in range(8)] if "freq" in more else [False] * 8
    assert (times == 1.0).all() and [s == 1.0 for s in times_of_other] == calibrated and times_of_other[3] < 0.1


def test_step_of_mixed_layer_kinds_is_additive() -> None:
    """Only matmuls and attention take time, at half of the peak: a window in two of three layers, a narrow MLP."""
    flags = f"{ROPE} --num-layers 6 --ffn-hidden-size 1536 --window-size 63,0 --window-attn-skip-freq 3"
    plan, S, D, F = make_plan(f"{flags} --global-batch-size 8", 1), 512, 1024, 1536
    free = dict(head=1e30, memory=1e30, sums=0.0, kernel_s=0.0, dispatch_s=0.0, contention=0.0, step_s=0.0, tiles=0)
    half = dict(matmul=0.5, attention=(0.5, 0.5), attention_half=(0.0, 0.0))
    step = predict_step(plan, fast(1), dataclasses.replace(default_profile("h100"), **free, **half))
    scores = [4 * D * (window * S - window**2 / 2) for window in (64, 64, S)]
    layers = sum(3 * 2 * S * (4 * D * D + 2 * D * F) + (1 + 2 * 1.25) * layer_scores for layer_scores in scores)
    assert step.parts["compute"] == pytest.approx(8 * 2 * layers / (0.5 * 989.4e12), rel=1e-6)
    check_sum(step)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("depths", [0, 2])
@pytest.mark.parametrize("more", ["", "--untie-embeddings-and-output-weights", "--mtp-use-repeated-layer"])
@pytest.mark.parametrize("pp", [1, 2])
def test_units_of_a_stage_have_its_time_and_weights(pp: int, more: str, depths: int, stage: int) -> None:
    """Every use of a resharded weight is gathered, also of an embedding that depths and head share."""
    flags = f"--pp {pp} {more} --mtp-num-layers {depths} --zero-stage {stage} --position-embedding-type rope"
    plan = make_plan(f"{flags} --global-batch-size 16", 2 * pp)
    times = TimeModel(plan, fast(2 * pp, intra_node=Link(0.0, 1.0)), default_profile("h100"))
    syncs = DpTimes(times).stage_syncs
    assert syncs is not None
    for sync, expected in zip(syncs, times.stage_times, strict=True):
        assert np.sum([unit.costs for unit in sync.units], axis=0) == pytest.approx(expected[TOTAL])
    embedding, layer, projection = 1024 * 1024, 12 * 1024 * 1024, 2 * 1024 * 1024
    layers = 8 * layer + depths * (layer + projection)
    num_embeddings = 2 + (depths > 0)  # of the model, of the depths, and the head's
    if stage == 2:  # every weight is gathered once
        num_embeddings = 1 if pp == 1 else 2
        if more == "--untie-embeddings-and-output-weights":
            num_embeddings = 2 + (depths > 0 and pp > 1)
        if more == "--mtp-use-repeated-layer" and depths:
            layers = 8 * layer + layer + projection
    num_bytes = 2 * (num_embeddings * embedding + layers)
    gathered = sum(unit.gather_s for sync in syncs for unit in sync.units)
    assert gathered == pytest.approx(num_bytes / 2)  # each of two ranks has half of it
