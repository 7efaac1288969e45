"""The shape of a run: the sizes of its mesh, its batches and its steps, all from the configuration alone."""

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megalite.config.option_parsers import parse_batch_schedule
from megalite.config.options import Config, padded_vocab_size
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.models.gpt import RecomputeConfig
from megalite.parallel.mesh import Mesh, MeshSizes, abstract_mesh, rank_order
from megalite.pipeline.schedule import ShardingPolicy, StagePlacement, microbatch_groups
from megalite.planning.batch_size import BatchSizeSchedule
from megalite.planning.model_state import bytes_per_element, sharding_policy, state_dtypes_of


@dataclass(frozen=True)
class RunShape:
    """The sizes of a run.

    Attributes:
        config: The configuration.
        world: The number of ranks, a multiple of tp x cp x pp.
        vocab_size: The vocabulary without padding.
    """

    config: Config
    world: int
    vocab_size: int

    # ---- mesh

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        return self.config.parallel.context_parallel_size

    @property
    def pp(self) -> int:
        return self.config.parallel.pipeline_model_parallel_size

    @cached_property
    def has_experts(self) -> bool:
        return self.config.model.has_experts

    @property
    def ep(self) -> int:
        return self.config.parallel.expert_model_parallel_size if self.has_experts else 1

    @property
    def etp(self) -> int:
        return self.config.parallel.expert_tensor_parallel_size if self.has_experts else 1

    @property
    def dp(self) -> int:
        return self.world // self.config.parallel.model_parallel_size

    @cached_property
    def given_split(self) -> list[int] | None:
        """The number of layers of every stage if the options name it; otherwise None."""
        return explicit_stage_layers(self.config.model, self.config.parallel)

    @property
    def vpp(self) -> int:
        """The number of stages of each pipeline rank."""
        if self.given_split is not None:
            return len(self.given_split) // self.pp
        return self.config.parallel.num_virtual_stages_per_pipeline_rank or 1

    @property
    def placement(self) -> StagePlacement:
        return StagePlacement(self.pp, self.vpp)

    @property
    def mesh_sizes(self) -> MeshSizes:
        parallel = self.config.parallel
        has_optimizer_instances = parallel.effective_zero_stage > 0
        sizes = MeshSizes(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            num_optimizer_instances=parallel.num_distributed_optimizer_instances if has_optimizer_instances else None,
            dp_outermost=parallel.use_tp_pp_dp_mapping,
            dp_cp_tp=self.config.optim.needs_full_tensors,
        )
        if self.has_experts:
            sizes["ep"] = self.ep
            sizes["etp"] = self.etp
        return sizes

    def mesh_at(self, pp_rank: int) -> Mesh:
        """Return the mesh, without groups, of the first rank of a pipeline rank. Runs of equal sizes share it."""
        return _abstract_mesh_at(self.world, pp_rank, tuple(self.mesh_sizes.items()))

    @property
    def rank0_groups(self) -> dict[str, tuple[int, ...]]:
        """The groups of rank 0, by axis."""
        mesh = self.mesh_at(0)
        return {name: mesh.axis(name).ranks for name in ("tp", "cp", "dp", "pp")}

    # ---- model

    @property
    def padded_vocab(self) -> int:
        return padded_vocab_size(self.vocab_size, self.config.model.make_vocab_size_divisible_by, self.tp)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        if self.config.precision.bf16:
            return torch.bfloat16
        return torch.float16 if self.config.precision.fp16 else torch.float32

    def bytes_per_element(self, matrix: bool = True, dtype: torch.dtype | None = None) -> tuple[int, int, int]:
        """Return the bytes of the weight, gradient and optimizer state of an element, in a matrix or elsewhere.

        `dtype` is the dtype of the weight; None: that of the model.
        """
        return bytes_per_element(dtype or self.dtype, state_dtypes_of(self.config.optim, matrix))

    @cached_property
    def recompute(self) -> RecomputeConfig:
        train = self.config.train
        return RecomputeConfig(
            train.recompute_granularity,
            train.recompute_method or "uniform",
            train.recompute_num_layers or 1,
            train.recompute_modules,
        )

    @property
    def sharding_policy(self) -> ShardingPolicy:
        return sharding_policy(self.config.parallel, self.vpp)

    # ---- batches and steps

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size(self.dp)

    @property
    def eval_batch_size(self) -> int:
        return self.config.train.eval_batch_size(self.dp)

    @cached_property
    def batch_sizes(self) -> BatchSizeSchedule:
        """The batch size of every step. Raises ValueError if a ramp does not lead to the global batch size."""
        train = self.config.train
        if train.step_batch_size_schedule is not None:
            milestones = parse_batch_schedule(train.step_batch_size_schedule, self.config.model.seq_length)
            return BatchSizeSchedule(milestones, keep_last_batch=True)
        if train.rampup_batch_size is None:
            return BatchSizeSchedule.constant(self.batch_size)
        start, increment, samples = train.rampup_batch_size
        return BatchSizeSchedule.ramp(self.batch_size, start, increment, samples)

    @cached_property
    def num_steps(self) -> int:
        """The number of steps. Raises ValueError if it is 0, and in the same cases as `batch_sizes`."""
        train = self.config.train
        num_steps = train.train_iters or self.batch_sizes.num_steps_for(train.train_samples or 0)
        if not num_steps:
            first_batch = self.batch_sizes.at(0)
            raise ValueError(f"train_samples={train.train_samples} is below one batch of {first_batch}; give more")
        return num_steps

    @cached_property
    def total_samples(self) -> int:
        return self.batch_sizes.samples_after(self.num_steps)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step whose batch has the final size."""
        return self.batch_sizes.final // (self.config.train.micro_batch_size * self.dp)

    @property
    def group_size(self) -> int:
        """The number of micro-batches of the first group."""
        size = self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        return microbatch_groups(self.num_microbatches, self.pp, size)[0]

    @property
    def splits_backward(self) -> bool:
        return self.config.parallel.split_backward and self.pp > 1

    @property
    def tokens_per_microbatch(self) -> int:
        """The tokens of a micro-batch on a cp rank."""
        return self.config.model.seq_length // self.cp * self.config.train.micro_batch_size

    @property
    def p2p_bytes(self) -> int:
        """The bytes of a message between stages, and of x_sBD."""
        return self.tokens_per_microbatch * self.config.model.hidden_size * self.dtype.itemsize // self.tp


@functools.lru_cache(maxsize=1024)  # the thousands of plans of a search have few distinct meshes
def _abstract_mesh_at(world: int, pp_rank: int, sizes: tuple[tuple[str, Any], ...]) -> Mesh:
    mesh_sizes = MeshSizes(**dict(sizes))
    first_rank = rank_order(world, mesh_sizes).ranks(pp_rank, 0)
    return abstract_mesh(world, first_rank, **mesh_sizes)
