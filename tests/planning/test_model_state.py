"""The two computations of the model state: exact, what buffers and optimizer allocate; and a lower bound of that."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from train_cases import config_from

from megalite.config.options import ConfigError
from megalite.config.validation import find_problems
from megalite.models.gpt import Stage
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.planning import run_plan
from megalite.planning.meta_mode import META, MetaMode
from megalite.planning.model_state import ModelStateBytes
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.setup import _build_pipeline, build_update_rules

MODEL = """--mock-data --train-iters 2 --lr 1e-4 --eval-iters 0 --hidden-size 64 --num-attention-heads 4 --device cpu
 --seq-length 32 --micro-batch-size 1 --global-batch-size 64 --hidden-dropout 0 --attention-dropout 0 --vocab-size 130"""
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
CHOICES = {
    "layers": ["--num-layers 4", "--num-layers 5", "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2"],
    "model": ["", LLAMA, "--num-experts 4 --moe-ffn-hidden-size 64", f"{LLAMA} --num-experts 4 --ep 2"],
    "ends": ["", "--untie-embeddings-and-output-weights"],
    "dtype": ["", "--bf16", "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"],
    "buckets": ["", "--ddp-bucket-size 3000", "--ddp-bucket-size 20000"],
    "zero": [
        "--no-use-distributed-optimizer",
        "--zero-stage 1",
        "--zero-stage 2",
        "--zero-stage 3",
        "--zero-stage 3 --num-distributed-optimizer-instances 2",
        "--zero-stage 2 --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
        "--zero-stage 3 --param-cpu-offload --optimizer-cpu-offload",
    ],
    "optimizer": [
        "",
        "--optimizer sgd",
        "--optimizer muon",
        *(f"--optimizer-cpu-offload --optimizer-offload-fraction {fraction}" for fraction in (0.1, 0.3, 0.5, 0.9, 1)),
    ],
    "width": ["", "--use-mup --mup-base-hidden-size 16"],
    "tp": ["", "--tp 2"],
    "pp": ["", "--pp 2", "--pp 4"],
    "cp": ["", "--cp 2"],
}


@st.composite
def plans(draw: st.DrawFn) -> RunPlan:
    flags = " ".join([MODEL, *(draw(st.sampled_from(choices)) for choices in CHOICES.values())])
    dp = draw(st.sampled_from([1, 2, 4]))
    try:
        config = config_from(flags)
    except ConfigError:
        assume(False)
        raise
    world = dp * config.parallel.model_parallel_size
    assume(not find_problems(config, world))
    return make_run_plan(config, world, 130)


def tensors_of(stage: Stage) -> list[torch.Tensor]:
    """Return the tensors of a stage that are not parameters: counts of routers and rotary tables."""
    tensors = [value for m in stage.modules() for value in vars(m).values() if isinstance(value, torch.Tensor)]
    return [*tensors, *stage.buffers(), *(table for pair in stage.rope_tables.values() for table in pair)]


def allocated_bytes(plan: RunPlan, pipeline_rank: int) -> int:
    """Return the bytes of all storages that the buffers and the optimizer of a run have after they are built."""
    mesh = replace(plan.shape.mesh_at(pipeline_rank), device=META)
    optim = plan.config.optim
    with MetaMode() as mode:
        stages = plan.balance.build_stages(mesh, plan.shape.dtype, deferred=True)
        buffer, pipeline = _build_pipeline(plan, stages, mesh, plan.shape.dtype, None)
        optimizer = DistributedOptimizer(
            buffer, *build_update_rules(plan.config), optim.offload_fraction, optim.optimizer_offload_dir
        )
        num_bytes = mode.live - sum(x.nbytes for stage in stages for x in tensors_of(stage))
        del pipeline, optimizer  # alive until here
    return num_bytes


@settings(max_examples=40)
@given(plans())
def test_model_state_is_what_a_run_allocates(plan: RunPlan) -> None:
    for rank, state in enumerate(plan.model_states.by_rank):
        assert state.total + state.host_bytes + state.disk_bytes == allocated_bytes(plan, rank), plan.config


@settings(max_examples=60)
@given(plans())
def test_min_model_state_is_not_above_the_exact_one(plan: RunPlan) -> None:
    split = np.array(plan.balance.layers_per_stage)
    for rank, state in enumerate(plan.model_states.by_rank):
        assert plan.balance.min_model_state.on_rank(split, rank, plan.shape.placement) <= state.total, plan.config


@pytest.mark.parametrize("layout", ["--pp 4", "--tp 2 --pp 2 --zero-stage 2", "--zero-stage 3", "--tp 4"])
def test_min_model_state_of_a_large_model_is_nearly_exact(layout: str) -> None:
    flags = "--preset llama3-8b --global-batch-size 64 --micro-batch-size 1 --bf16 --mock-data --train-iters 2 --lr 1"
    plan = make_run_plan(config_from(f"{flags} {layout}"), 8, 128_256)
    split = np.array(plan.balance.layers_per_stage)
    for rank, state in enumerate(plan.model_states.by_rank):
        assert plan.balance.min_model_state.on_rank(split, rank, plan.shape.placement) == pytest.approx(
            state.total, rel=1e-3
        )


@pytest.mark.parametrize(
    "other",
    [
        "--micro-batch-size 2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules layernorm mlp",
        "--split-backward",
    ],
)
def test_plans_that_differ_in_micro_batches_and_recomputation_share_model_states(other: str) -> None:
    def states_of(flags: str) -> list[ModelStateBytes]:
        plan = make_run_plan(config_from(f"{MODEL} {LLAMA} --num-layers 4 --pp 2 {flags}"), 8, 130)
        return plan.model_states.by_rank

    run_plan._model_state.cache_clear()
    expected = states_of(f"--zero-stage 2 {other}")
    run_plan._model_state.cache_clear()
    first, other_states = states_of("--zero-stage 2"), states_of(f"--zero-stage 2 {other}")
    assert other_states == first == expected
    assert all(x is y for x, y in zip(first, other_states, strict=True))
    assert states_of("--zero-stage 3") != first
