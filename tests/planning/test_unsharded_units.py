"""The planner unshards weights and gradients (ZeRO-2 and 3) in the order of a run, and never plans fewer bytes.

The run takes its step on the meta device, with its own buffers, schedule and pipeline.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from train_cases import config_from

from megalite.config.options import ConfigError
from megalite.config.validation import find_problems
from megalite.models.gpt import Block, LMHead
from megalite.models.mtp import MTPLayer
from megalite.nn.embedding import Embedding
from megalite.nn.storage_identity import storage_id
from megalite.optim.zero.grad_bucket import ParamMainGrad
from megalite.pipeline.schedule import Op, add_sharding_actions
from megalite.planning.memory import _ActionSimulator
from megalite.planning.meta_mode import MetaMode
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.planning.unsharded_units import UnshardedUnits
from megalite.training.datasets import DatasetBundle, build_datasets
from megalite.training.dry_run import dry_run_rank

MODEL = """--mock-data --train-iters 2 --lr 1e-4 --eval-iters 0 --hidden-size 64 --num-attention-heads 4 --device cpu
 --seq-length 32 --micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --vocab-size 130"""
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
# without gradients that several depths add in turn (learned positions), or that autograd adds (biases of experts)
ROPE = "--position-embedding-type rope"
REPEATED = f"--mtp-num-layers 2 --mtp-use-repeated-layer {ROPE} --disable-bias-linear"
LATENT = f"""{LLAMA} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
 --qk-pos-emb-head-dim 8 --v-head-dim 16"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 4"
CHOICES = {
    "layers": ["--num-layers 4", "--num-layers 5", "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2"],
    "model": ["", LLAMA, LATENT, EXPERTS, f"{EXPERTS} --ep 2"],
    "ends": ["", "--untie-embeddings-and-output-weights"],
    "zero": ["--zero-stage 2", "--zero-stage 3", "--zero-stage 3 --reshard-after-forward chunk"],
    "overlap": ["", "--no-overlap-grad-reduce", "--no-overlap-param-gather --no-overlap-grad-reduce"],
    "pp": ["", "--pp 2"],
    "backward": ["", "--split-backward"],
    "depths": ["", "--mtp-num-layers 1", f"--mtp-num-layers 3 {ROPE}", REPEATED],
    "recompute": ["", *(f"--recompute-granularity full --recompute-method {name}" for name in ("uniform", "block"))],
}
# "F" with the unit whose forward starts, or "G" with a unit and the parameter of a gradient; and the unsharded bytes
Event = tuple[tuple[str, ...], int]


@st.composite
def cases(draw: st.DrawFn) -> tuple[RunPlan, DatasetBundle]:
    flags = " ".join([MODEL, *(draw(st.sampled_from(choices)) for choices in CHOICES.values())])
    try:
        config = config_from(flags)
    except ConfigError:
        assume(False)
        raise
    world = draw(st.sampled_from([2, 4])) * config.parallel.model_parallel_size
    assume(not find_problems(config, world))
    sources = build_datasets(config.data, config.model.seq_length, config.train.seed, 0)
    return make_run_plan(config, world, sources.vocab_size), sources


def distinct(events: list[Event]) -> list[Event]:
    """Return the first of consecutive equal events: a parameter may have several gradients."""
    return [next(group) for _, group in itertools.groupby(events, lambda event: event[0])]


def events_of_run(plan: RunPlan, sources: DatasetBundle, pipeline_rank: int) -> list[Event]:
    """Return the events of a dry run's step."""
    events: list[Event] = []
    unsharded: dict[int, int] = {}  # storage -> bytes
    layers_of_depths: set[nn.Module] = set()

    def on_forward(module: nn.Module, _: Any) -> None:
        if isinstance(module, MTPLayer):
            layers_of_depths.update(module.blocks)
        is_unit = isinstance(module, Embedding | MTPLayer | Block | LMHead) and module not in layers_of_depths
        if is_unit and torch._C._current_graph_task_id() == -1:  # not in a backward, which recomputes
            p: Any = module.weight if isinstance(module, LMHead) else next(module.parameters())
            events.append((("F", p.unit), sum(unsharded.values())))

    def on_gradient(main_grad: ParamMainGrad) -> None:
        bucket, unit = main_grad.bucket, main_grad.bucket.layout.key.unit
        if not bucket.is_resident:
            name = main_grad.name.removeprefix(f"{unit}.")
            events.append((("G", unit, name), sum(unsharded.values())))

    patches = (
        after(MetaMode, "on_allocate", lambda _, flat: unsharded.update({storage_id(flat): flat.nbytes})),
        after(MetaMode, "on_free", lambda _, flat: unsharded.pop(storage_id(flat), None)),
        after(ParamMainGrad, "accumulator", on_gradient),
    )
    handle = register_module_forward_pre_hook(on_forward)
    with ExitStack() as stack:
        stack.callback(handle.remove)
        for patch in patches:
            stack.enter_context(patch)
        dry_run_rank(plan, sources, plan.shape.mesh_at(pipeline_rank).world.rank)
    return distinct(events)


def events_of_plan(plan: RunPlan, pipeline_rank: int) -> list[Event]:
    """Return the events that the planner counts for the same step."""
    events: list[Event] = []
    simulator = _ActionSimulator(plan, pipeline_rank)
    op = Op.F

    def on_unshard(units: UnshardedUnits, names: tuple[str, ...], prefetch: tuple[str, ...] = ()) -> None:
        if op is Op.F:
            events.append((("F", names[0]), units.bytes))

    def on_gradient(units: UnshardedUnits, unit: str, param: str) -> None:
        if (unit, param) in units.bucket_of_param:
            events.append((("G", unit, param), units.bytes))

    _, actions_by_rank = plan.balance.schedule.actions(plan.shape.num_microbatches)
    actions = add_sharding_actions(actions_by_rank[pipeline_rank], plan.shape.sharding_policy)
    reduced = {(action.stage, action.microbatch) for action in actions if action.op is Op.REDUCE_GRAD}
    state = simulator.unsharded.state
    with after(UnshardedUnits, "unshard", on_unshard), after(UnshardedUnits, "first_grad", on_gradient):
        for op, stage, microbatch in actions:
            if op in (Op.F, Op.B, Op.W, Op.UNSHARD, Op.RESHARD):
                state = simulator.run(op, stage, (stage, microbatch) in reduced, state).unsharded
    return distinct(events)


@contextmanager
def after(owner: type, name: str, observer: Any) -> Iterator[None]:
    """Call `observer` after each call of a method, with its arguments."""
    method = getattr(owner, name)

    def observed(*args: Any) -> Any:
        result = method(*args)
        observer(*args)
        return result

    with mock.patch.object(owner, name, observed):
        yield


@settings(max_examples=12)
@given(cases())
def test_planned_unsharded_units_are_those_of_a_run(case: tuple[RunPlan, DatasetBundle]) -> None:
    plan, sources = case
    for rank in range(plan.shape.pp):
        of_run, of_plan = events_of_run(plan, sources, rank), events_of_plan(plan, rank)
        assert [name for name, _ in of_plan] == [name for name, _ in of_run]
        for (name, planned), (_, actual) in zip(of_plan, of_run, strict=True):
            assert planned >= actual, name
