"""The search over layouts: its bounds are below the simulated times, its best layout is the best of all.

Token budgets and tables of sizes, which are printed with it, are tested here too.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_cases import config_from

from megalite.config.validation import find_problems
from megalite.planning import run_shape, step_schedule
from megalite.planning.batch_size import BatchSizeSchedule
from megalite.planning.cluster import Link, default_profile
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.memory import RankMemory
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.planning.stage_time import TimeModel
from megalite.planning.step_time import StepTime, predict_step
from tools.planning import format_plan, recommend
from tools.planning.lower_bounds import min_dp_time, min_memory, min_step_time
from tools.planning.plan_request import LAYOUT_OPTIONS, RECOMPUTE_DETAILS, Request, read_request, to_flags
from tools.planning.search import (
    Layout,
    PlannedLayout,
    SearchResult,
    apply_layout,
    candidate_grid,
    evaluate,
    layout_of,
    plan_for,
    search,
    variants,
)
from tools.planning.token_budget import TokenBudget, chinchilla_tokens, parse_quantity, state_bytes_per_device

SMALL = (
    "--num-layers 6 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 --hidden-dropout 0 "
    "--attention-dropout 0 --global-batch-size 32"
)

BROAD = (
    "--num-layers 32 --hidden-size 6272 --num-attention-heads 49 --seq-length 4096 --vocab-size 256000 --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 64"
)


def request(flags: str, devices: int, **more: object) -> Request:
    cluster_args = {"hf": None, "cluster": None, "device": "h100", "num_gpus": devices, "gpus_per_node": None}
    return read_request(argparse.Namespace(**{**cluster_args, "precision": None, **more}), flags.split())


def buildable_layouts(plan_request: Request) -> Sequence[Layout]:
    """Return all layouts that can be built."""
    grid_layouts = (
        candidate
        for candidate in candidate_grid(plan_request)
        if not find_problems(apply_layout(candidate, plan_request.config), plan_request.cluster.world)
    )
    return [candidate for grid_layout in grid_layouts for candidate in variants(grid_layout, plan_request)]


def evaluate_with_bounds(layout: Layout, plan_request: Request) -> tuple[PlannedLayout, RunPlan, float]:
    """Return a layout's plan, which no bound exceeds, its RunPlan, and the memory bound as a share of its peak."""
    plan, run_plan = evaluate(layout, plan_request, None), plan_for(layout, plan_request)
    assert isinstance(plan, PlannedLayout)
    costs = TimeModel(run_plan, plan_request.cluster, default_profile("h100"))
    min_bytes = min_memory(run_plan, run_plan.balance.min_model_state)
    dp_s = min_dp_time(run_plan, costs, run_plan.model_states.params_by_view) if layout.zero > 1 else 0.0
    assert max(min_step_time(run_plan, costs), dp_s) <= plan.time.seconds * (1 + 1e-9) and min_bytes <= plan.peak, (
        layout
    )
    return plan, run_plan, min_bytes / plan.peak


def test_search_finds_the_fastest_layout() -> None:
    """The test simulates all layouts of a small model on 8 devices; the search does not."""
    plan_request = request(SMALL, 8)
    result = search(plan_request, min_rows=3, max_simulated=1000)
    layouts = buildable_layouts(plan_request)
    assert len(layouts) > 100 and result.num_simulated < len(layouts) / 4
    sample = layouts[:: max(1, len(layouts) // 60)]
    for layout in sample:
        plan = evaluate(layout, plan_request, None)
        assert isinstance(plan, PlannedLayout)
        if plan.peak <= result.limit:
            assert plan.time.seconds >= result.plans[0].time.seconds, layout
            assert result.order(plan) >= result.order(result.simplest), layout
    assert len(result.choices()) >= 3


@settings(max_examples=6)
@given(
    st.integers(1, 7),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([512, 2048]),
    st.sampled_from(["", "--num-experts 4 --moe-router-topk 2", "--split-backward"]),
)
def test_bounded_search_equals_exhaustive_search(layers: int, devices: int, hidden: int, more: str) -> None:
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 8 --seq-length 256 --vocab-size 64000 "
        f"--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --micro-batch-size 1 --zero-stage 1 {more}"
    )
    plan_request = request(flags, devices)
    result = search(plan_request, max_simulated=1000)
    plans = [evaluate(layout, plan_request, None, result.limit) for layout in buildable_layouts(plan_request)]
    everything = SearchResult(result.limit, [plan for plan in plans if isinstance(plan, PlannedLayout)])
    everything.plans.sort(key=lambda plan: (plan.time.seconds, plan.peak))
    assert result.plans[0].time == everything.plans[0].time
    assert result.order(result.pick(result.plans)) == everything.order(everything.pick(everything.plans))


def test_search_shares_what_candidates_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of the same sizes is built once, and the layers of the same costs are timed once.

    Each simulated plan finds the waits of its schedule at most twice: to balance its stages, and for its own time.
    """
    calls = Counter[str]()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: [calls.update([name]), function(*args, **more)][1])

    run_shape._abstract_mesh_at.cache_clear()
    for owner, name in ((run_shape, "abstract_mesh"), (step_schedule, "simulate_all"), (TimeModel, "layer_time")):
        count(owner, name)
    plan_request = request(SMALL, 8)
    result = search(plan_request)
    meshes = {(layout.tp, layout.pp) for layout in candidate_grid(plan_request)}
    assert result.num_candidates > 400 and calls["abstract_mesh"] <= 3 * len(meshes)
    assert calls["simulate_all"] <= 2 * result.num_simulated
    assert calls["layer_time"] <= 4 * 4 * 3 * 2 + result.num_simulated  # tp, micro-batch size, recompute, split


@pytest.mark.parametrize(
    "flags,devices", [("--preset llama3-8b --global-batch-size 64 --zero-stage 1", 16), (SMALL, 8)]
)
def test_search_prefers_the_simplest_of_equal_layouts(flags: str, devices: int) -> None:
    """Each row has its own tp, pp and sharding; stages with uneven chunks are not proposed by default."""
    plan_request = request(flags, devices)
    result = search(plan_request, min_rows=6)
    choices = result.choices()
    assert len({choice.best.layout.row for choice in choices}) == len(choices) >= 6
    best, fastest = choices[0].best, result.plans[0]
    assert best.time.seconds <= 1.15 * fastest.time.seconds and best.complexity < fastest.complexity
    equal = [plan for plan in result.plans if plan.time.seconds <= 1.15 * fastest.time.seconds]
    assert best.complexity == min(plan.complexity for plan in equal) and best.peak <= 0.95 * result.limit
    slow = [choice.best.time.seconds for choice in choices if choice.best not in equal]
    assert slow == sorted(slow) and all(choice.best in equal for choice in choices[: len(choices) - len(slow)])
    summary = " ".join(format_plan.summary_lines(result, 4))
    assert f"here 4 of {len(choices)}" in summary and f"{result.num_simulated} of the others were simulated" in summary
    rest = result.num_candidates - result.num_impossible - result.num_too_large
    assert 0 < result.num_simulated <= rest


TIGHT = {
    "--preset llama3-8b --seq-length 4096 --global-batch-size 1024": (8, Layout()),
    "--preset llama2-13b --global-batch-size 1024": (16, Layout(pp=2)),
}


@pytest.mark.parametrize("flags", [[*TIGHT][0], pytest.param([*TIGHT][1], marks=pytest.mark.nightly)])
def test_search_prefers_layouts_with_free_memory(flags: str) -> None:
    """The simplest layout needs at least 95 % of the usable memory; another is as fast and leaves memory free."""
    devices, plainest = TIGHT[flags]
    plan_request = request(flags, devices)
    result = search(plan_request, min_rows=4)
    assert result.simplest.layout == plainest and result.simplest.peak > 0.95 * result.limit
    best, *others = [planned.best for planned in result.choices()]
    assert best.peak < 0.93 * result.limit and best.time.seconds <= 1.02 * result.simplest.time.seconds
    roomy = [planned for planned in result.plans if planned.peak <= 0.95 * result.limit]
    as_fast = [planned for planned in roomy if planned.time.seconds <= 1.02 * result.simplest.time.seconds]
    assert best.complexity == min(planned.complexity for planned in as_fast)
    assert [result.order(planned) for planned in others] == sorted(result.order(planned) for planned in others)
    single = search(
        replace(
            plan_request,
            config=apply_layout(plainest, plan_request.config),
            fixed=frozenset({"tensor_model_parallel_size"}),
        )
    )
    assert single.choices()[0].best.layout == plainest  # an explicit layout is planned as it is


def test_variants_of_a_named_layout_keep_its_borders() -> None:
    sizes = SMALL.replace("--num-layers 6 ", "--hybrid-layer-pattern *|-*-*-|*-|*- ")
    plan_request = request(f"{sizes} --tp 1 --pp 2 --micro-batch-size 1", 2)
    layout = layout_of(plan_request.config)
    assert (layout.pp, layout.vpp) == (2, 2)
    for variant in variants(layout, plan_request):
        config = apply_layout(variant, plan_request.config)
        assert config.model.hybrid_layer_pattern == "*|-*-*-|*-|*-" and find_problems(config, 2) == []
        assert plan_for(variant, plan_request).balance.layers_per_stage == [1, 3, 1, 1] and layout_of(config) == variant
    for other in (replace(layout, vpp=1), replace(layout, pp=1, vpp=1)):
        assert apply_layout(other, plan_request.config).model.hybrid_layer_pattern == "*-*-*-*-*-"


def test_search_takes_a_tight_fit_if_it_is_faster() -> None:
    def plan(seconds: float, share: float, parts: int) -> PlannedLayout:
        layout = Layout(tp=2 if parts > 0 else 1, pp=2 if parts > 1 else 1, micro_batch=round(1000 * seconds))
        memory = RankMemory(round(share * 10**9), 0, 0, 0, 0)
        return PlannedLayout(layout, run_plan, [memory], StepTime(seconds, {}, mfu=0.5, tokens_per_s=1.0, fixed_s=0.0))

    run_plan = plan_for(Layout(), request(SMALL, 8))
    plain, roomy, slower = plan(1.0, 0.97, 0), plan(1.01, 0.9, 2), plan(1.1, 0.5, 1)
    for plans, first in (
        ([plain, roomy, slower], roomy),
        ([plain, slower], plain),
        ([plain, plan(1.0, 0.96, 1), slower], plain),
        ([plan(1.0, 0.94, 0), roomy], plan(1.0, 0.94, 0)),
    ):
        result = SearchResult(1e9, sorted(plans, key=lambda planned: planned.time.seconds))
        assert result.choices()[0].best == first


def test_uneven_chunks_count_as_complexity() -> None:
    assert [Layout(4, 4, vpp).complexity(80) for vpp in (1, 5, 7)] == [2, 3, 4]
    assert Layout(8, 16, 8).complexity(126) == Layout(8, 16, 8, ends=True).complexity(126) == 4
    assert Layout().complexity(7) == 0 and Layout(recompute="full", zero=0).complexity(7) == 2


LATE = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --vocab-size 1000000 --hidden-dropout 0 "
    "--attention-dropout 0 --global-batch-size 32 --pipeline-schedule breadth-first"
)

LONG = SMALL.replace("--seq-length 1024", "--seq-length 32768 --max-position-embeddings 32768")


@pytest.mark.parametrize("flags", [SMALL, BROAD, LATE, LONG], ids=["small", "broad", "breadth-first", "long"])
def test_search_bounds_are_below_simulation(flags: str) -> None:
    plan_request = request(flags, 8)
    layouts = buildable_layouts(plan_request)
    for layout in layouts[:: max(1, len(layouts) // 40)]:
        _, run_plan, share = evaluate_with_bounds(layout, plan_request)
        assert not run_plan.balance.fixed_split or layout.split or share > 0.85, layout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_search_handles_a_heavy_head() -> None:
    """The rank with the head then has few layers, as in no even split. The test simulates everything that fits."""
    plan_request = request(f"{BROAD} --zero-stage 1", 8)
    result = search(plan_request)
    best = result.plans[0]  # the fastest
    assert best.layout == Layout(1, 8, split=True) and best.plan.balance.layers_per_stage[-1] < 32 // 8
    for layout in buildable_layouts(plan_request):
        plan = evaluate(layout, plan_request, None, result.limit)
        assert isinstance(plan, int) or plan.time.seconds >= best.time.seconds, layout


@pytest.mark.nightly
def test_search_405b_is_as_good_as_the_published_layout() -> None:
    """The published layout is TP 8, PP 16 (arXiv:2407.21783, table 4).

    It is compared with any number of chunks, with embedding and head in the place of a layer and without.
    """
    plan_request = request("--preset llama3-405b --seq-length 8192 --global-batch-size 2048", 16384)
    result = search(plan_request)
    best = result.plans[0]
    assert best.peak <= result.limit and result.num_unexplored == 0
    assert result.simplest.layout == Layout(8, 16, 8, ends=True)  # it leaves 3 % of the memory free
    assert result.choices()[0].best.layout == Layout(8, 8, 16, ends=True, zero=2)
    published_layouts = [Layout(8, 16, vpp, ends=True) for vpp in (1, 2, 4, 8)] + [
        Layout(8, 16, vpp) for vpp in range(1, 8)
    ]
    for layout in published_layouts:
        plan = evaluate(layout, plan_request, None)
        assert isinstance(plan, PlannedLayout) and best.time.seconds <= plan.time.seconds, layout


WIDE = "--num-layers 12 --seq-length 512 --vocab-size 32000 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 26"


@pytest.mark.parametrize("hidden,stage", [(10240, 2), (14336, 3)])
def test_search_raises_the_zero_stage_if_memory_is_short(hidden: int, stage: int) -> None:
    """13 nodes of one device rule out tp, and 12 layers rule out 13 stages: only dp is left."""
    flags = f"{WIDE} --hidden-size {hidden} --num-attention-heads 64"
    cluster_args = {"device": "a100", "gpus_per_node": 1}
    result = search(request(flags, 13, **cluster_args))
    assert {plan.layout.zero for plan in result.plans} == {stage} and result.num_too_large
    assert not search(request(f"{flags} --zero-stage 1", 13, **cluster_args)).plans


def test_search_raises_the_zero_stage_if_faster() -> None:
    flags = "--preset llama3-8b --global-batch-size 64 --micro-batch-size 1"
    plan_request = request(flags, 8, device="a100")
    faster = search(plan_request).choices()[0].best
    stage_1 = search(request(f"{flags} --zero-stage 1", 8, device="a100"), min_rows=2)
    assert faster.layout == Layout(zero=2) and {plan.layout.zero for plan in stage_1.plans} == {1}
    assert faster.time.seconds < stage_1.choices()[0].best.time.seconds
    command = format_plan.run_argv(plan_request, faster.layout, 5)
    assert command[command.index("--zero-stage") + 1] == "2" and layout_of(config_from(command)) == faster.layout
    fixed = request(f"{flags} --use-megatron-fsdp", 8, device="a100")
    assert {plan.layout.zero for plan in search(fixed, min_rows=2).plans} == {3}


@pytest.mark.parametrize("flags", ["--global-batch-size 64", "--global-batch-size 64 --reshard-after-forward chunk"])
def test_zero_bounds_are_below_the_plan(flags: str) -> None:
    plan_request = request(f"--preset llama3-8b {flags}", 16)
    for layout in (Layout(2, 2, vpp, zero=stage) for vpp in (1, 2, 4) for stage in (2, 3)):
        (_, run_plan, share), link = evaluate_with_bounds(layout, plan_request), Link(0.0, 1e8)
        slow = TimeModel(
            run_plan, replace(plan_request.cluster, intra_node=link, inter_node=link), default_profile("h100")
        )
        seconds = predict_step(run_plan, slow.cluster).seconds
        assert 0.4 * seconds < min_dp_time(run_plan, slow, run_plan.model_states.params_by_view) < seconds, layout
        assert share > 0.7, layout


@pytest.mark.parametrize("flags,devices", [(SMALL, 8), ("--preset llama3-8b --global-batch-size 64", 16)])
def test_printed_command_gives_the_planned_layout(flags: str, devices: int) -> None:
    """The command parses, is valid for the number of ranks, and gives the same configuration."""
    plan_request = request(flags, devices)
    layouts = buildable_layouts(plan_request)
    for layout in layouts[:: max(1, len(layouts) // 25)]:
        argv = format_plan.run_argv(plan_request, layout, 77)
        config = config_from(argv)
        assert not find_problems(config, devices)
        assert config.train.train_iters == 77 and layout_of(config) == layout
        assert replace(config, train=replace(config.train, train_iters=1000)) == apply_layout(
            layout, plan_request.config
        )


def test_given_options_are_not_searched() -> None:
    plan_request = request(f"{SMALL} --micro-batch-size 2 --recompute-granularity full --recompute-method uniform", 8)
    layouts = buildable_layouts(plan_request)
    assert {layout.micro_batch for layout in layouts} == {2} and {layout.recompute for layout in layouts} == {"full"}
    assert len({layout.pp for layout in layouts}) > 1 and not plan_request.is_single_layout
    single = request(f"{SMALL} --tp 2 --pp 2 --micro-batch-size 4", 8)
    assert single.is_single_layout and [plan.layout for plan in search(single).plans] == [Layout(2, 2, 1, 4)]
    argv = format_plan.run_argv(single, layout_of(single.config), 5)
    assert layout_of(config_from(argv)) == Layout(2, 2, 1, 4)


def test_search_uses_cp_for_long_sequences() -> None:
    long = "--seq-length 131072 --max-position-embeddings 131072 --global-batch-size 8 --micro-batch-size 1"
    plan_request = request(f"--preset llama3-8b {long}", 8)
    result = search(plan_request)
    best, with_cp = result.plans[0], [plan for plan in result.plans if plan.layout.cp > 1]
    assert best in with_cp and best.peak <= result.limit and best.plan.shape.dp * best.layout.cp * best.layout.tp == 8
    without_cp = search(request(" ".join((*plan_request.argv, "--context-parallel-size 1")), 8))
    assert (
        not any(plan.layout.cp > 1 for plan in without_cp.plans)
        and best.time.seconds < without_cp.plans[0].time.seconds
    )
    layouts_405b = [*candidate_grid(request("--preset llama3-405b --seq-length 8192 --global-batch-size 2048", 16384))]
    assert len(layouts_405b) == 1008 and {layout.cp for layout in layouts_405b} == {1}  # as many as before there was cp
    assert {layout.cp for layout in candidate_grid(request(f"{SMALL} --cp 2", 8))} == {2}


def test_printed_flags_parse_to_the_same_options() -> None:
    run_flags = "--lr 1 --train-iters 1 --micro-batch-size 1 --mock-data".split()
    for preset in ("gpt2", "llama3-8b", "qwen3-8b"):
        config = config_from(["--preset", preset, *run_flags])
        names = {name for section in ("model", "data") for name in getattr(config, section).__dataclass_fields__}
        parsed = config_from([*to_flags(config, names - {"mock_data"}), *run_flags])
        assert parsed.model == config.model and parsed.data == config.data
    parts = config.parallel, config.train, config.optim
    assert {*LAYOUT_OPTIONS, *RECOMPUTE_DETAILS} <= {name for part in parts for name in part.__dataclass_fields__}


def test_impossible_layouts_are_counted_with_their_reason() -> None:
    plan_request = request(SMALL.replace("--num-attention-heads 8", "--num-attention-heads 4"), 8)
    result = search(plan_request, min_rows=2)
    refusals = "\n".join(format_plan.refusal_lines(result))
    assert "tensor_model_parallel_size=8 does not divide num_attention_heads=4" in refusals
    counts = [int(line.split(" x ")[0]) for line in refusals.splitlines() if " x " in line[:9]]
    assert counts == sorted(counts, reverse=True)
    small = search(request("--preset llama3-70b --global-batch-size 8", 8, device="v100"))
    assert not small.plans and small.num_too_large and small.smallest_too_large is not None
    assert "times the memory" in recommend.what_would_fit(small)[0]


def test_advice_follows_the_planned_values() -> None:
    """The plan has two micro-batches for 8 stages; then tp 16 on nodes of 8."""
    plan_request = request("--preset llama3-70b --global-batch-size 2 --seq-length 512", 128)
    plan = evaluate(Layout(8, 8), plan_request, None)
    assert isinstance(plan, PlannedLayout)
    across = replace(plan, layout=replace(plan.layout, tp=16))
    budget = TokenBudget(70 * 10**9, 5 * 10**12, 4e11)
    advice = "\n".join(recommend.warnings(plan_request, across, across.peak + 1, budget, 10**12))
    assert "it fits by 0.00 GiB, and activations of some layouts were 3% off" in advice
    assert "it fits by" not in "\n".join(recommend.warnings(plan_request, across, 2 * across.peak, budget, 10**12))
    assert "tp 16 crosses nodes of 8" in advice and "1 micro-batches are few for 8 stages" in advice
    assert "a micro-batch of 512 tokens" in advice and "5.0 epochs" in advice and "critical" not in advice
    bottleneck, remedy = recommend.bottleneck(plan, 8)
    assert bottleneck.startswith("bound by bubble") and "micro-batches" in remedy
    large = request("--preset llama3-8b --global-batch-size 4096", 64)
    large_plan = evaluate(Layout(2, 1), large, None)
    assert isinstance(large_plan, PlannedLayout)
    advice = "\n".join(
        recommend.warnings(large, large_plan, 2 * large_plan.peak, replace(budget, active=8 * 10**9), None)
    )
    assert "beyond the critical" in advice


def test_decision_path_ends_where_the_model_fits() -> None:
    def path_of(flags: str, devices: int) -> str:
        plan_request = request(flags, devices)
        return "\n".join(recommend.decision_path(plan_request, SearchResult(plan_request.cluster.device.memory_bytes)))

    small = path_of(SMALL, 8)
    assert "tp 1 pp 1 would suffice" in small and "pipeline stages" not in small
    middle = path_of("--preset llama3-8b --global-batch-size 64", 64)
    assert "weights on one device: 15.0 GiB -> they fit" in middle and "dp alone would suffice" in middle
    large = path_of("--preset llama3-405b --global-batch-size 256", 2048)
    state = 405_853_388_800 / 8 * (6 + 12 / 256) / 2**30  # bytes of a rank of tp 8, dp 256
    assert (
        "shard the model" in large
        and f"sharded within a node, tp 8: {state:,.1f} GiB -> pipeline stages across nodes" in large
    )


# ---- budgets and tables of sizes: published figures, exactly
@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_bf16_state_bytes_per_parameter(dp: int) -> None:
    """The model state of llama3-8b equals the rule, apart from its padding."""
    plan_request = request("--preset llama3-8b --global-batch-size 64", dp, gpus_per_node=min(dp, 8))
    run_plan = make_run_plan(apply_layout(Layout(), plan_request.config), dp, plan_request.vocab_size)
    (model_state,) = run_plan.model_states.by_rank
    n = model_state.local_numel
    assert n == run_plan.model_states.num_parameters == 8_030_261_248
    assert state_bytes_per_device(n, dp, 1, torch.bfloat16) == n * (6 + 12 / dp)
    assert model_state.total == pytest.approx(n * (6 + 12 / dp), rel=1e-5)
    assert model_state.total >= n * (6 + 12 / dp)


def test_token_budget() -> None:
    """GPT-3 175B on 300 B tokens: 3.14e23 FLOPs (arXiv:2005.14165, table D.1). Llama 3 405B: 3.8e25 on 15.6 T."""
    for preset, tokens, published in (("gpt3-175b", "300B", 3.14e23), ("llama3-405b", "15.6T", 3.8e25)):
        plan_request = request(f"--preset {preset} --global-batch-size 1024", 1024)
        run_plan, model = plan_for(Layout(), plan_request), plan_request.config.model
        budget = TokenBudget(
            run_plan.model_states.num_parameters,
            parse_quantity(tokens),
            flops_per_token(model, run_plan.shape.padded_vocab),
        )
        assert budget.flops_6nd == pytest.approx(published, rel=0.02)
        assert 1 < budget.exact_flops / budget.flops_6nd < 1.1
    assert budget.steps(BatchSizeSchedule.constant(2048), 8192) == -(-15_600_000_000_000 // 2**24)
    grows = BatchSizeSchedule(((0, 1024), (1_000_000, 2048)))  # 977 steps to grow
    assert budget.steps(grows, 8192) == 977 + -(-(-(-15_600_000_000_000 // 8192) - 977 * 1024) // 2048)
    speed = 16384 * 400e12 / (budget.exact_flops / budget.tokens)
    assert budget.days(speed) == pytest.approx(budget.exact_flops / (16384 * 400e12) / 86400)
    assert budget.device_hours(speed, 16384) == pytest.approx(budget.days(speed) * 24 * 16384)
    assert budget.epochs(10**12) == pytest.approx(15.6)
    assert chinchilla_tokens(67 * 10**9) == pytest.approx(1.5e12, rel=0.12)  # arXiv:2203.15556, table 3


@pytest.mark.parametrize("text", ["", "B", "-3B", "0", "nan", "inf", "1e400T", "3 apples"])
def test_invalid_token_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens"):
        parse_quantity(text)
