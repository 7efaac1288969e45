"""Plans with experts equal hand counts: FLOPs, dispatched rows, seconds, layouts."""

import dataclasses
from collections import Counter

import pytest
import torch
from test_dry_run_rank import EXPERTS, TP, plan_and_sources
from test_search import buildable_layouts, evaluate_with_bounds, request
from test_step_time import INSTANT, SHAPE, check_sum, fast, make_plan
from train_cases import config_from

from megalite.nn.token_dispatch import balanced_routing
from megalite.planning.cluster import Link, default_profile, make_cluster
from megalite.planning.layer_cost import CommStart
from megalite.planning.layer_kinds import LayerSetting, flops_per_token, layer_kinds, layers_cost
from megalite.planning.stage_time import TimeModel
from megalite.planning.step_time import predict_step
from megalite.training.dry_run import format_rank
from megalite.training.logging.plan_summary import format_plan
from tools.planning.format_plan import run_argv, summary_lines
from tools.planning.search import Layout, PlannedLayout, evaluate, layout_of, search

MIXTRAL, QWEN3 = "--preset mixtral-8x7b", "--preset qwen3-30b-a3b"
E, K, F, D, L, S = 8, 2, 512, 1024, 8, 512
EXPERT_FLAGS = f"--swiglu --disable-bias-linear --num-experts {E} --moe-router-topk {K} --moe-ffn-hidden-size {F}"
SMALL = f"""--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 8000 --hidden-dropout 0
 --attention-dropout 0 --global-batch-size 16 {EXPERT_FLAGS} --moe-layer-freq [0,1,1,1]"""


def test_moe_flops_equal_dense_flops_plus_routers() -> None:
    experts, dense = (
        config_from(f"{SHAPE} {more}").model
        for more in (EXPERT_FLAGS, EXPERT_FLAGS[: EXPERT_FLAGS.index("--num-experts")])
    )
    wide = dataclasses.replace(dense, ffn_hidden_size=K * F)
    assert flops_per_token(experts, 1024) == flops_per_token(wide, 1024) + 6 * D * E * L
    half = dataclasses.replace(experts, moe_layer_freq="[0,1]*4", ffn_hidden_size=K * F)
    assert flops_per_token(half, 1024) == flops_per_token(wide, 1024) + 6 * D * E * L // 2
    assert len(set(layer_kinds(half))) == 2


@pytest.mark.parametrize("experts,topk,ep", [(8, 2, 4), (16, 3, 2), (64, 8, 8)])
def test_even_routing_equals_random_routing_in_the_mean(experts: int, topk: int, ep: int) -> None:
    chosen = torch.rand(20_000, experts, generator=torch.Generator().manual_seed(1)).topk(topk).indices
    local_choices = (chosen // (experts // ep) == 0).sum(1)
    rows, choices = balanced_routing(20_000, experts, topk, ep)
    assert (int((local_choices > 0).sum()), int(local_choices.sum())) == pytest.approx((rows, choices), rel=0.05)


@pytest.mark.parametrize("ep,etp", [(4, 1), (2, 2)])
def test_moe_layer_dispatches_even_rows(ep: int, etp: int) -> None:
    (kind, *_), peers = layer_kinds(config_from(f"{SHAPE} {EXPERT_FLAGS}").model), ep * etp
    alone, split = (
        layers_cost((kind,), LayerSetting(1, 1, torch.bfloat16, ep=n, etp=m)) for n, m in ((1, 1), (ep, etp))
    )
    assert split.flops == alone.flops
    rows, _ = balanced_routing(S, E, K, ep)
    # an fp32 number takes two bf16 elements
    there, back, gradients = (2 * peers * rows * (D + more) for more in (4 * K, 0, 2 * K))
    calls = Counter((e.phase, f"{e.axis} {e.op}", e.num_bytes) for e in split.trace if isinstance(e, CommStart))
    expected = [("F", there), ("F", back), ("B", back), ("B", there), ("B", gradients)]
    expected_calls = Counter(
        (phase, "ep_etp all-to-all", size) for phase, size in expected if (phase, size) != ("B", there)
    )
    assert calls == expected_calls | Counter({("F", "ep_etp all-gather", 16 * peers * peers): 1})


def test_dispatch_uses_the_links_between_experts() -> None:
    """Nothing hides the dispatch: on one node of four devices, or on four nodes of one."""
    plan, link = make_plan(f"{EXPERT_FLAGS} --ep 4 --global-batch-size 8", 4), Link(0.0, 1e9)
    profile = dataclasses.replace(default_profile("h100"), contention=0.0)
    rows, _ = balanced_routing(S, E, K, 4)
    moved = 2 * 4 * rows * (4 * D + 6 * K) + 16 * 4 * 4
    expected = 2 * L * moved * 3 / 4 / 1e9
    inside = predict_step(plan, fast(4, intra_node=link), profile)
    separate_nodes = dataclasses.replace(fast(4, inter_node=link), devices_per_node=1, num_nodes=4)
    for step in (inside, predict_step(plan, separate_nodes, profile)):
        assert step.parts["tp"] == pytest.approx(expected, rel=1e-6)
        check_sum(step)
    assert (
        predict_step(plan, dataclasses.replace(separate_nodes, inter_node=INSTANT, intra_node=link), profile).parts[
            "tp"
        ]
        < 0.01 * expected
    )


def test_expert_gradients_and_weights_use_the_expert_mesh() -> None:
    late = "--no-overlap-grad-reduce --no-overlap-param-gather"
    plan = make_plan(f"{EXPERT_FLAGS} --ep 2 --global-batch-size 8 {late}", 4)
    profile = dataclasses.replace(default_profile("h100"), contention=0.0)
    (model_state,) = plan.model_states.by_rank
    assert model_state.padded_numel["expert"] == L * E * 3 * F * D // 2
    moved = 6 * (model_state.padded_numel["dense"] * 3 / 4 + model_state.padded_numel["expert"] / 2)
    step = predict_step(plan, fast(4, intra_node=Link(0.0, 1e9)), profile)
    assert step.parts["dp"] == pytest.approx(moved / 1e9, rel=0.01)
    assert model_state.owned_numel == model_state.padded_numel["dense"] // 4 + model_state.padded_numel["expert"] // 2


def test_small_expert_groups_are_bandwidth_bound() -> None:
    costs = TimeModel(
        make_plan(f"{EXPERT_FLAGS} --global-batch-size 8", 1), make_cluster("h100", 1), default_profile("h100")
    )
    fixed = costs.profile.kernel_s
    few, many = (costs.matmul_s(rows, 2048, 2048, 64, 2) for rows in (64, 1 << 20))
    assert few - fixed == pytest.approx(costs.memory_s(64 * 2048 * 2048 * 2))
    assert many == pytest.approx(costs.matmul_s(1 << 20, 2048, 2048, 1, 2), rel=0.01)
    wide = costs.matmul_s(4096, 2048, 2048, 1, 4) - fixed
    assert wide == pytest.approx((costs.matmul_s(4096, 2048, 2048, 1, 2) - fixed) * 989.4 / 66.9)


def test_stages_of_mixed_layers_are_balanced() -> None:
    narrow = "--num-layers 16 --moe-layer-freq [0]*8+[1]*8 --ffn-hidden-size 512 --moe-ffn-hidden-size 2048"
    plan = make_plan(f"{EXPERT_FLAGS} {narrow} --pp 4 --global-batch-size 64", 4)
    slowest = [
        max(map(sum, plan.balance.stage_costs.flops_of_stages(split)))
        for split in (plan.balance.layers_per_stage, (4, 4, 4, 4))
    ]
    assert (
        plan.balance.layers_per_stage[0] > 4 > plan.balance.layers_per_stage[-1]
        and sum(plan.balance.layers_per_stage) == 16
        and slowest[0] < 0.8 * slowest[1]
    )


def test_startup_and_dry_run_print_expert_placement() -> None:
    plan, sources = plan_and_sources(f"{TP} --ep 2 {EXPERTS} --global-batch-size 16 --dry-run --dry-run-rank 3", 4)
    assert "ep 1 of 2" in " ".join(format_rank(plan, sources, 4).split())
    text = " ".join(format_plan(plan, sources, 4).split())
    assert "experts 4 in 4 of 4 layers, 4 per token; ep 2 x etp 1 x edp 2" in text
    assert (
        f"parameters {plan.model_states.num_parameters:,}, {plan.model_states.num_parameters:,} active per token ("
        in text
    )


def test_expert_search_equals_exhaustive_simulation() -> None:
    plan_request = request(SMALL, 4)
    result, layouts = search(plan_request, min_rows=3, max_simulated=1000), buildable_layouts(plan_request)
    assert {candidate.ep for candidate in layouts} == {1, 2, 4} and result.num_simulated < len(layouts) / 4
    for layout in layouts[:: max(1, len(layouts) // 40)]:
        plan, *_ = evaluate_with_bounds(layout, plan_request)
        assert plan.time.seconds >= result.plans[0].time.seconds, layout
        assert result.order(plan) >= result.order(result.choices()[0].best), layout
        argv = run_argv(plan_request, layout, 5)
        assert layout_of(config_from(argv)) == layout
    assert {candidate.ep for candidate in buildable_layouts(request(f"{SMALL} --ep 2", 4))} == {2}
    assert "cp, ep and ZeRO stage" in " ".join(" ".join(summary_lines(result, 3)).split())


@pytest.mark.parametrize("layout", [Layout(ep=4, zero=3), Layout(ep=8, zero=2), Layout(2, ep=2, zero=3)], ids=str)
def test_expert_sharding_bounds_are_below_the_plan(layout: Layout) -> None:
    plan_request = request(f"{MIXTRAL} --num-layers 4 --global-batch-size 64", 16)
    assert evaluate_with_bounds(layout, plan_request)[2] > 0.7


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags,devices", [(MIXTRAL, 64), (QWEN3, 8), (QWEN3, 64)])
def test_moe_models_are_planned(flags: str, devices: int) -> None:
    """No layout with ep alone is faster than the result."""
    plan_request = request(f"{flags} --global-batch-size 512 --micro-batch-size 1", devices)
    result = search(plan_request)
    best = result.plans[0]
    assert best.peak <= result.limit and len({plan.layout.ep for plan in result.plans}) > 1
    for ep in (1, 2, 4, 8):
        plan = evaluate(Layout(ep=ep, zero=3), plan_request, None)
        assert isinstance(plan, PlannedLayout) and (
            plan.peak > result.limit or plan.time.seconds >= best.time.seconds
        ), ep
