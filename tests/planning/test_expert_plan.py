"""What a plan says of experts beside what follows by hand: FLOPs, rows that travel, seconds, layouts."""

import dataclasses
from collections import Counter

import pytest
import torch
from test_dry_run_rank import EXPERTS, TP, arranged
from test_search import bounded, every, request
from test_step_time import INSTANT, SHAPE, check_sum, fast, made
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
SOME = f"--swiglu --disable-bias-linear --num-experts {E} --moe-router-topk {K} --moe-ffn-hidden-size {F}"
SMALL = f"""--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 8000 --hidden-dropout 0
 --attention-dropout 0 --global-batch-size 16 {SOME} --moe-layer-freq [0,1,1,1]"""


def test_moe_flops_equal_dense_flops_plus_routers() -> None:
    some, dense = (config_from(f"{SHAPE} {more}").model for more in (SOME, SOME[: SOME.index("--num-experts")]))
    wide = dataclasses.replace(dense, ffn_hidden_size=K * F)
    assert flops_per_token(some, 1024) == flops_per_token(wide, 1024) + 6 * D * E * L
    half = dataclasses.replace(some, moe_layer_freq="[0,1]*4", ffn_hidden_size=K * F)
    assert flops_per_token(half, 1024) == flops_per_token(wide, 1024) + 6 * D * E * L // 2
    assert len(set(layer_kinds(half))) == 2


@pytest.mark.parametrize("experts,topk,ep", [(8, 2, 4), (16, 3, 2), (64, 8, 8)])
def test_even_routing_equals_random_routing_in_the_mean(experts: int, topk: int, ep: int) -> None:
    chosen = torch.rand(20_000, experts, generator=torch.Generator().manual_seed(1)).topk(topk).indices
    mine = (chosen // (experts // ep) == 0).sum(1)
    rows, choices = balanced_routing(20_000, experts, topk, ep)
    assert (int((mine > 0).sum()), int(mine.sum())) == pytest.approx((rows, choices), rel=0.05)


@pytest.mark.parametrize("ep,etp", [(4, 1), (2, 2)])
def test_moe_layer_dispatches_even_rows(ep: int, etp: int) -> None:
    (kind, *_), peers = layer_kinds(config_from(f"{SHAPE} {SOME}").model), ep * etp
    alone, split = (
        layers_cost((kind,), LayerSetting(1, 1, torch.bfloat16, ep=n, etp=m)) for n, m in ((1, 1), (ep, etp))
    )
    assert split.flops == alone.flops
    rows, _ = balanced_routing(S, E, K, ep)
    there, back, gradients = (2 * peers * rows * (D + more) for more in (4 * K, 0, 2 * K))  # fp32 in bf16 is two
    begun = Counter((e.phase, f"{e.axis} {e.op}", e.num_bytes) for e in split.trace if isinstance(e, CommStart))
    want = [("F", there), ("F", back), ("B", back), ("B", there), ("B", gradients)]
    known = Counter((phase, "ep_etp all-to-all", size) for phase, size in want if (phase, size) != ("B", there))
    assert begun == known | Counter({("F", "ep_etp all-gather", 16 * peers * peers): 1})


def test_dispatch_uses_the_links_between_experts() -> None:
    """Nothing hides them: on a node of four, or on four nodes of one."""
    of, link = made(f"{SOME} --ep 4 --global-batch-size 8", 4), Link(0.0, 1e9)
    profile = dataclasses.replace(default_profile("h100"), contention=0.0)
    rows, _ = balanced_routing(S, E, K, 4)
    moved = 2 * 4 * rows * (4 * D + 6 * K) + 16 * 4 * 4
    wanted = 2 * L * moved * 3 / 4 / 1e9
    inside = predict_step(of, fast(4, intra_node=link), profile)
    apart = dataclasses.replace(fast(4, inter_node=link), devices_per_node=1, num_nodes=4)
    for found in (inside, predict_step(of, apart, profile)):
        assert found.parts["tp"] == pytest.approx(wanted, rel=1e-6)
        check_sum(found)
    assert (
        predict_step(of, dataclasses.replace(apart, inter_node=INSTANT, intra_node=link), profile).parts["tp"]
        < 0.01 * wanted
    )


def test_expert_gradients_and_weights_use_the_expert_mesh() -> None:
    late = "--no-overlap-grad-reduce --no-overlap-param-gather"
    of = made(f"{SOME} --ep 2 --global-batch-size 8 {late}", 4)
    profile = dataclasses.replace(default_profile("h100"), contention=0.0)
    (held,) = of.model_states
    assert held.padded_numel["expert"] == L * E * 3 * F * D // 2
    moved = 6 * (held.padded_numel["dense"] * 3 / 4 + held.padded_numel["expert"] / 2)
    found = predict_step(of, fast(4, intra_node=Link(0.0, 1e9)), profile)
    assert found.parts["dp"] == pytest.approx(moved / 1e9, rel=0.01)
    assert held.owned_numel == held.padded_numel["dense"] // 4 + held.padded_numel["expert"] // 2


def test_small_expert_groups_are_bandwidth_bound() -> None:
    costs = TimeModel(made(f"{SOME} --global-batch-size 8", 1), make_cluster("h100", 1), default_profile("h100"))
    fixed = costs.profile.kernel_s
    few, many = (costs.matmul_s(rows, 2048, 2048, 64, 2) for rows in (64, 1 << 20))
    assert few - fixed == pytest.approx(costs.memory_s(64 * 2048 * 2048 * 2))
    assert many == pytest.approx(costs.matmul_s(1 << 20, 2048, 2048, 1, 2), rel=0.01)
    wide = costs.matmul_s(4096, 2048, 2048, 1, 4) - fixed
    assert wide == pytest.approx((costs.matmul_s(4096, 2048, 2048, 1, 2) - fixed) * 989.4 / 66.9)


def test_stages_of_mixed_layers_are_balanced() -> None:
    narrow = "--num-layers 16 --moe-layer-freq [0]*8+[1]*8 --ffn-hidden-size 512 --moe-ffn-hidden-size 2048"
    of = made(f"{SOME} {narrow} --pp 4 --global-batch-size 64", 4)
    slowest = [max(map(sum, of.stage_costs.flops_of_stages(split))) for split in (of.layers_per_stage, (4, 4, 4, 4))]
    assert (
        of.layers_per_stage[0] > 4 > of.layers_per_stage[-1]
        and sum(of.layers_per_stage) == 16
        and slowest[0] < 0.8 * slowest[1]
    )


def test_startup_and_dry_run_print_expert_placement() -> None:
    plan, sources = arranged(f"{TP} --ep 2 {EXPERTS} --global-batch-size 16 --dry-run --dry-run-rank 3", 4)
    assert "ep 1 of 2" in " ".join(format_rank(plan, sources, 4).split())
    told = " ".join(format_plan(plan, sources, 4).split())
    assert "experts 4 in 4 of 4 layers, 4 per token; ep 2 x etp 1 x edp 2" in told
    assert f"parameters {plan.num_parameters:,}, {plan.num_parameters:,} active per token (" in told


def test_expert_search_equals_exhaustive_simulation() -> None:
    asked = request(SMALL, 4)
    found, layouts = search(asked, min_rows=3, max_simulated=1000), every(asked)
    assert {one.ep for one in layouts} == {1, 2, 4} and found.num_simulated < len(layouts) / 4
    for layout in layouts[:: max(1, len(layouts) // 40)]:
        plan, *_ = bounded(layout, asked)
        assert plan.time.seconds >= found.plans[0].time.seconds, layout
        assert found.order(plan) >= found.order(found.choices()[0].best), layout
        words = run_argv(asked, layout, 5)
        assert layout_of(config_from(words)) == layout
    assert {one.ep for one in every(request(f"{SMALL} --ep 2", 4))} == {2}
    assert "cp, ep and ZeRO stage" in " ".join(" ".join(summary_lines(found, 3)).split())


@pytest.mark.parametrize("layout", [Layout(ep=4, zero=3), Layout(ep=8, zero=2), Layout(2, ep=2, zero=3)], ids=str)
def test_expert_sharding_bounds_are_below_the_plan(layout: Layout) -> None:
    asked = request(f"{MIXTRAL} --num-layers 4 --global-batch-size 64", 16)
    assert bounded(layout, asked)[2] > 0.7


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words,devices", [(MIXTRAL, 64), (QWEN3, 8), (QWEN3, 64)])
def test_moe_models_are_planned(words: str, devices: int) -> None:
    """No row of ep alone is faster than what is found."""
    asked = request(f"{words} --global-batch-size 512 --micro-batch-size 1", devices)
    found = search(asked)
    best = found.plans[0]
    assert best.peak <= found.limit and len({plan.layout.ep for plan in found.plans}) > 1
    for ep in (1, 2, 4, 8):
        plan = evaluate(Layout(ep=ep, zero=3), asked, None)
        assert isinstance(plan, PlannedLayout) and (
            plan.peak > found.limit or plan.time.seconds >= best.time.seconds
        ), ep
