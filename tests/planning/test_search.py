"""The search over layouts: bounds are below what is simulated, and its best is the best of all; and
the budgets and sizes that are told with it."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from train_cases import config_from

from megalite.config.validation import find_problems
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
    asked = {"hf": None, "cluster": None, "device": "h100", "num_gpus": devices, "gpus_per_node": None}
    return read_request(argparse.Namespace(**{**asked, "precision": None, **more}), flags.split())


def every(asked: Request) -> Sequence[Layout]:
    """All layouts that can be built."""
    wheres = (
        one for one in candidate_grid(asked) if not find_problems(apply_layout(one, asked.config), asked.cluster.world)
    )
    return [one for where in wheres for one in variants(where, asked)]


def bounded(layout: Layout, asked: Request) -> tuple[PlannedLayout, RunPlan, float]:
    """Its plan, which no bound is above; what bounds are of; and what its memory is bounded by as a share of it."""
    plan, made = evaluate(layout, asked, None), plan_for(layout, asked)
    assert isinstance(plan, PlannedLayout)
    costs, least = TimeModel(made, asked.cluster, default_profile("h100")), min_memory(made, made.module_state_bytes)
    moves = min_dp_time(made, costs, made.params_by_view) if layout.zero > 1 else 0.0
    assert max(min_step_time(made, costs), moves) <= plan.time.seconds * (1 + 1e-9) and least <= plan.peak, layout
    return plan, made, least / plan.peak


def test_search_finds_the_fastest_layout() -> None:
    """Of a small model on 8 devices everything is simulated, which the search does not do."""
    asked = request(SMALL, 8)
    found = search(asked, min_rows=3, max_simulated=1000)
    layouts = every(asked)
    assert len(layouts) > 100 and found.num_simulated < len(layouts) / 4
    some = layouts[:: max(1, len(layouts) // 60)]
    for layout in some:
        plan = evaluate(layout, asked, None)
        assert isinstance(plan, PlannedLayout)
        if plan.peak <= found.limit:
            assert plan.time.seconds >= found.plans[0].time.seconds, layout
            assert found.order(plan) >= found.order(found.simplest), layout
    assert len(found.choices()) >= 3


@pytest.mark.parametrize(
    "flags,devices", [("--preset llama3-8b --global-batch-size 64 --zero-stage 1", 16), (SMALL, 8)]
)
def test_search_prefers_the_simplest_of_equal_layouts(flags: str, devices: int) -> None:
    """Each row is of its own tp, pp and sharding; stages in unlike chunks are no default."""
    asked = request(flags, devices)
    found = search(asked, min_rows=6)
    choices = found.choices()
    assert len({one.best.layout.row for one in choices}) == len(choices) >= 6
    best, fastest = choices[0].best, found.plans[0]
    assert best.time.seconds <= 1.15 * fastest.time.seconds and best.complexity < fastest.complexity
    equal = [one for one in found.plans if one.time.seconds <= 1.15 * fastest.time.seconds]
    assert best.complexity == min(one.complexity for one in equal) and best.peak <= 0.95 * found.limit
    slow = [one.best.time.seconds for one in choices if one.best not in equal]
    assert slow == sorted(slow) and all(one.best in equal for one in choices[: len(choices) - len(slow)])
    told = " ".join(format_plan.summary_lines(found, 4))
    assert f"here 4 of {len(choices)}" in told and f"{found.num_simulated} of the others were simulated" in told
    rest = found.num_candidates - found.num_impossible - found.num_too_large
    assert 0 < found.num_simulated <= rest


TIGHT = {
    "--preset llama3-8b --seq-length 4096 --global-batch-size 1024": (8, Layout()),
    "--preset llama2-13b --global-batch-size 1024": (16, Layout(pp=2)),
}


@pytest.mark.parametrize("flags", [[*TIGHT][0], pytest.param([*TIGHT][1], marks=pytest.mark.nightly)])
def test_search_prefers_layouts_with_free_memory(flags: str) -> None:
    """The plainest layout takes 95 % and more of what is planned with; another takes no longer and has room."""
    devices, plainest = TIGHT[flags]
    asked = request(flags, devices)
    found = search(asked, min_rows=4)
    assert found.simplest.layout == plainest and found.simplest.peak > 0.95 * found.limit
    best, *others = [one.best for one in found.choices()]
    assert best.peak < 0.93 * found.limit and best.time.seconds <= 1.02 * found.simplest.time.seconds
    roomy = [one for one in found.plans if one.peak <= 0.95 * found.limit]
    as_fast = [one for one in roomy if one.time.seconds <= 1.02 * found.simplest.time.seconds]
    assert best.complexity == min(one.complexity for one in as_fast)
    assert [found.order(one) for one in others] == sorted(found.order(one) for one in others)
    only = search(
        replace(asked, config=apply_layout(plainest, asked.config), fixed=frozenset({"tensor_model_parallel_size"}))
    )
    assert only.choices()[0].best.layout == plainest  # what is asked for is planned as it is


def test_search_takes_a_tight_fit_if_it_is_faster() -> None:
    def plan(seconds: float, share: float, parts: int) -> PlannedLayout:
        layout = Layout(tp=2 if parts > 0 else 1, pp=2 if parts > 1 else 1, micro_batch=round(1000 * seconds))
        held = RankMemory(round(share * 10**9), 0, 0, 0, 0)
        return PlannedLayout(layout, made, [held], StepTime(seconds, {}, mfu=0.5, tokens_per_s=1.0, fixed_s=0.0))

    made = plan_for(Layout(), request(SMALL, 8))
    plain, roomy, slower = plan(1.0, 0.97, 0), plan(1.01, 0.9, 2), plan(1.1, 0.5, 1)
    for plans, first in (
        ([plain, roomy, slower], roomy),
        ([plain, slower], plain),
        ([plain, plan(1.0, 0.96, 1), slower], plain),
        ([plan(1.0, 0.94, 0), roomy], plan(1.0, 0.94, 0)),
    ):
        found = SearchResult(1e9, sorted(plans, key=lambda one: one.time.seconds))
        assert found.choices()[0].best == first


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
    asked = request(flags, 8)
    layouts = every(asked)
    for layout in layouts[:: max(1, len(layouts) // 40)]:
        _, made, share = bounded(layout, asked)
        assert not made.fixed_split or layout.split or share > 0.85, layout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_search_handles_a_heavy_head() -> None:
    """Its rank has few layers then, which no even division has. Everything that fits is simulated."""
    asked = request(f"{BROAD} --zero-stage 1", 8)
    found = search(asked)
    best = found.plans[0]  # the fastest
    assert best.layout == Layout(1, 8, split=True) and best.plan.layers_per_stage[-1] < 32 // 8
    for layout in every(asked):
        plan = evaluate(layout, asked, None, found.limit)
        assert isinstance(plan, int) or plan.time.seconds >= best.time.seconds, layout


@pytest.mark.nightly
def test_search_405b_is_as_good_as_the_published_layout() -> None:
    """TP 8, PP 16 (arXiv:2407.21783, table 4), in as many chunks as there can be, with embedding and head in the place of
    a layer and without."""
    asked = request("--preset llama3-405b --seq-length 8192 --global-batch-size 2048", 16384)
    found = search(asked)
    best = found.plans[0]
    assert best.peak <= found.limit and found.num_unexplored == 0
    assert found.simplest.layout == Layout(8, 16, 8, ends=True)  # which leaves 3 % of the memory free
    assert found.choices()[0].best.layout == Layout(8, 8, 16, ends=True, zero=2)
    theirs = [Layout(8, 16, vpp, ends=True) for vpp in (1, 2, 4, 8)] + [Layout(8, 16, vpp) for vpp in range(1, 8)]
    for layout in theirs:
        plan = evaluate(layout, asked, None)
        assert isinstance(plan, PlannedLayout) and best.time.seconds <= plan.time.seconds, layout


WIDE = "--num-layers 12 --seq-length 512 --vocab-size 32000 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 26"


@pytest.mark.parametrize("hidden,stage", [(10240, 2), (14336, 3)])
def test_search_raises_the_zero_stage_if_memory_is_short(hidden: int, stage: int) -> None:
    """13 nodes of one device have no tp, and 12 layers no 13 stages: dp alone is left."""
    flags, one = f"{WIDE} --hidden-size {hidden} --num-attention-heads 64", {"device": "a100", "gpus_per_node": 1}
    found = search(request(flags, 13, **one))
    assert {plan.layout.zero for plan in found.plans} == {stage} and found.num_too_large
    assert not search(request(f"{flags} --zero-stage 1", 13, **one)).plans


def test_search_raises_the_zero_stage_if_faster() -> None:
    words = "--preset llama3-8b --global-batch-size 64 --micro-batch-size 1"
    asked = request(words, 8, device="a100")
    faster = search(asked).choices()[0].best
    stage_1 = search(request(f"{words} --zero-stage 1", 8, device="a100"), min_rows=2)
    assert faster.layout == Layout(zero=2) and {plan.layout.zero for plan in stage_1.plans} == {1}
    assert faster.time.seconds < stage_1.choices()[0].best.time.seconds
    command = format_plan.run_argv(asked, faster.layout, 5)
    assert command[command.index("--zero-stage") + 1] == "2" and layout_of(config_from(command)) == faster.layout
    fixed = request(f"{words} --use-megatron-fsdp", 8, device="a100")
    assert {plan.layout.zero for plan in search(fixed, min_rows=2).plans} == {3}


@pytest.mark.parametrize("flags", ["--global-batch-size 64", "--global-batch-size 64 --reshard-after-forward chunk"])
def test_zero_bounds_are_below_the_plan(flags: str) -> None:
    asked = request(f"--preset llama3-8b {flags}", 16)
    for layout in (Layout(2, 2, vpp, zero=stage) for vpp in (1, 2, 4) for stage in (2, 3)):
        (_, made, share), link = bounded(layout, asked), Link(0.0, 1e8)
        slow = TimeModel(made, replace(asked.cluster, intra_node=link, inter_node=link), default_profile("h100"))
        waits = predict_step(made, slow.cluster).seconds
        assert 0.4 * waits < min_dp_time(made, slow, made.params_by_view) < waits, layout
        assert share > 0.7, layout


@pytest.mark.parametrize("flags,devices", [(SMALL, 8), ("--preset llama3-8b --global-batch-size 64", 16)])
def test_printed_command_gives_the_planned_layout(flags: str, devices: int) -> None:
    """It parses, holds on as many ranks, and is the same configuration."""
    asked = request(flags, devices)
    layouts = every(asked)
    for layout in layouts[:: max(1, len(layouts) // 25)]:
        words = format_plan.run_argv(asked, layout, 77)
        config = config_from(words)
        assert not find_problems(config, devices)
        assert config.train.train_iters == 77 and layout_of(config) == layout
        assert replace(config, train=replace(config.train, train_iters=1000)) == apply_layout(layout, asked.config)


def test_given_options_are_not_searched() -> None:
    asked = request(f"{SMALL} --micro-batch-size 2 --recompute-granularity full --recompute-method uniform", 8)
    layouts = every(asked)
    assert {one.micro_batch for one in layouts} == {2} and {one.recompute for one in layouts} == {"full"}
    assert len({one.pp for one in layouts}) > 1 and not asked.is_single_layout
    given = request(f"{SMALL} --tp 2 --pp 2 --micro-batch-size 4", 8)
    assert given.is_single_layout and [plan.layout for plan in search(given).plans] == [Layout(2, 2, 1, 4)]
    words = format_plan.run_argv(given, layout_of(given.config), 5)
    assert layout_of(config_from(words)) == Layout(2, 2, 1, 4)


def test_search_uses_cp_for_long_sequences() -> None:
    long = "--seq-length 131072 --max-position-embeddings 131072 --global-batch-size 8 --micro-batch-size 1"
    asked = request(f"--preset llama3-8b {long}", 8)
    found = search(asked)
    best, shared = found.plans[0], [plan for plan in found.plans if plan.layout.cp > 1]
    assert best in shared and best.peak <= found.limit and best.plan.dp * best.layout.cp * best.layout.tp == 8
    alone = search(request(" ".join((*asked.argv, "--context-parallel-size 1")), 8))
    assert not any(plan.layout.cp > 1 for plan in alone.plans) and best.time.seconds < alone.plans[0].time.seconds
    usual = [*candidate_grid(request("--preset llama3-405b --seq-length 8192 --global-batch-size 2048", 16384))]
    assert len(usual) == 1008 and {one.cp for one in usual} == {1}  # as many as before there was cp
    assert {one.cp for one in candidate_grid(request(f"{SMALL} --cp 2", 8))} == {2}


def test_printed_flags_parse_to_the_same_options() -> None:
    usual = "--lr 1 --train-iters 1 --micro-batch-size 1 --mock-data".split()
    for preset in ("gpt2", "llama3-8b", "qwen3-8b"):
        config = config_from(["--preset", preset, *usual])
        names = {name for section in ("model", "data") for name in getattr(config, section).__dataclass_fields__}
        again = config_from([*to_flags(config, names - {"mock_data"}), *usual])
        assert again.model == config.model and again.data == config.data
    parts = config.parallel, config.train, config.optim
    assert {*LAYOUT_OPTIONS, *RECOMPUTE_DETAILS} <= {name for part in parts for name in part.__dataclass_fields__}


def test_impossible_layouts_are_counted_with_their_reason() -> None:
    asked = request(SMALL.replace("--num-attention-heads 8", "--num-attention-heads 4"), 8)
    found = search(asked, min_rows=2)
    told = "\n".join(format_plan.refusal_lines(found))
    assert "tensor_model_parallel_size=8 does not divide num_attention_heads=4" in told
    counts = [int(line.split(" x ")[0]) for line in told.splitlines() if " x " in line[:9]]
    assert counts == sorted(counts, reverse=True)
    small = search(request("--preset llama3-70b --global-batch-size 8", 8, device="v100"))
    assert not small.plans and small.num_too_large and small.smallest_too_large is not None
    assert "times the memory" in recommend.what_would_fit(small)[0]


def test_advice_follows_the_planned_values() -> None:
    """Of a plan with two micro-batches over 8 stages, on tp 16 over nodes of 8."""
    asked = request("--preset llama3-70b --global-batch-size 2 --seq-length 512", 128)
    plan = evaluate(Layout(8, 8), asked, None)
    assert isinstance(plan, PlannedLayout)
    across = replace(plan, layout=replace(plan.layout, tp=16))
    budget = TokenBudget(70 * 10**9, 5 * 10**12, 4e11)
    told = "\n".join(recommend.warnings(asked, across, across.peak + 1, budget, 10**12))
    assert "it fits by 0.00 GiB, and activations of some layouts were 3% off" in told
    assert "it fits by" not in "\n".join(recommend.warnings(asked, across, 2 * across.peak, budget, 10**12))
    assert "tp 16 crosses nodes of 8" in told and "1 micro-batches are few for 8 stages" in told
    assert "a micro-batch of 512 tokens" in told and "5.0 epochs" in told and "critical" not in told
    what, helps = recommend.bottleneck(plan, 8)
    assert what.startswith("bound by bubble") and "micro-batches" in helps
    large = request("--preset llama3-8b --global-batch-size 4096", 64)
    one = evaluate(Layout(2, 1), large, None)
    assert isinstance(one, PlannedLayout)
    told = "\n".join(recommend.warnings(large, one, 2 * one.peak, replace(budget, active=8 * 10**9), None))
    assert "beyond the critical" in told


def test_decision_path_ends_where_the_model_fits() -> None:
    def asked_of(flags: str, devices: int) -> str:
        asked = request(flags, devices)
        return "\n".join(recommend.decision_path(asked, SearchResult(asked.cluster.device.memory_bytes)))

    small = asked_of(SMALL, 8)
    assert "tp 1 pp 1 would suffice" in small and "pipeline stages" not in small
    middle = asked_of("--preset llama3-8b --global-batch-size 64", 64)
    assert "weights on one device: 15.0 GiB -> they fit" in middle and "dp alone would suffice" in middle
    large = asked_of("--preset llama3-405b --global-batch-size 256", 2048)
    state = 405_853_388_800 / 8 * (6 + 12 / 256) / 2**30  # bytes of a rank of tp 8, dp 256
    assert (
        "shard the model" in large
        and f"sharded within a node, tp 8: {state:,.1f} GiB -> pipeline stages across nodes" in large
    )


# ---- budgets and tables of sizes: published figures, exactly
@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_bf16_state_bytes_per_parameter(dp: int) -> None:
    """What the layout of llama3-8b holds, to its padding, is the rule."""
    asked = request("--preset llama3-8b --global-batch-size 64", dp, gpus_per_node=min(dp, 8))
    made = make_run_plan(apply_layout(Layout(), asked.config), dp, asked.vocab_size)
    (held,) = made.model_states
    n = held.local_numel
    assert n == made.num_parameters == 8_030_261_248
    assert state_bytes_per_device(n, dp, 1, torch.bfloat16) == n * (6 + 12 / dp)
    assert held.total == pytest.approx(n * (6 + 12 / dp), rel=1e-5)
    assert held.total >= n * (6 + 12 / dp)


def test_token_budget() -> None:
    """GPT-3 175B on 300 B tokens: 3.14e23 FLOPs (arXiv:2005.14165, table D.1). Llama 3 405B: 3.8e25 on 15.6 T."""
    for preset, tokens, published in (("gpt3-175b", "300B", 3.14e23), ("llama3-405b", "15.6T", 3.8e25)):
        asked = request(f"--preset {preset} --global-batch-size 1024", 1024)
        one, m = plan_for(Layout(), asked), asked.config.model
        budget = TokenBudget(one.num_parameters, parse_quantity(tokens), flops_per_token(m, one.padded_vocab))
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
