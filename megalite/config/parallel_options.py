"""The options of how a run computes: its ranks, its pipeline, what they share out, whose kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.field import how
from megalite.config.registry import KINDS

KERNELS = ("auto", "triton", "torch")
ATTENTION_KERNELS = ("auto", "cudnn", "flash", "triton", "blocked", "torch")
LONGEST_TIMEOUT = (1_000_000, "is longer than any collective; use at most 1000000")
SHARED_OUT = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # of ZeRO 0, 1, 2, 3
TO_THREE = (3, "is above 3; use 0, 1, 2 or 3")


@dataclass(frozen=True)
class ParallelConfig:
    nproc: int | None = how(None)
    device: str = how("auto", choices=("auto", "cpu", "cuda"))
    tensor_model_parallel_size: int = how(1, above=0)
    pipeline_model_parallel_size: int = how(1, above=0)
    context_parallel_size: int = how(1, above=0)
    expert_model_parallel_size: int = how(1, above=0)
    expert_tensor_parallel_size: int = how(1, above=0)
    data_parallel_size: int | None = how(None)
    num_layers_per_virtual_pipeline_stage: int | None = how(None)
    num_virtual_stages_per_pipeline_rank: int | None = how(None)
    pipeline_model_parallel_layout: str | None = how(None)
    decoder_first_pipeline_num_layers: int | None = how(None)
    decoder_last_pipeline_num_layers: int | None = how(None)
    account_for_embedding_in_pipeline_split: bool = how(False)
    account_for_loss_in_pipeline_split: bool = how(False)
    microbatch_group_size_per_virtual_pipeline_stage: int | None = how(None)
    use_tp_pp_dp_mapping: bool = how(False)
    pipeline_schedule: str = how("1f1b", choices=KINDS["pipeline_schedule"])
    split_backward: bool = how(False)
    zero_bubble_max_pending_backward: int | None = how(None)
    use_distributed_optimizer: bool = how(True)
    zero_stage: int | None = how(None, least=0, most=TO_THREE)
    use_megatron_fsdp: bool = how(False)
    data_parallel_sharding_strategy: str | None = how(None, choices=SHARED_OUT)
    zero_hold: str = how("auto", choices=("auto", "layer", "chunk"))
    param_cpu_offload: bool = how(False)
    num_distributed_optimizer_instances: int = how(1, above=0)
    outer_dp_sharding_strategy: str = how("no_shard", choices=SHARED_OUT[:2])
    overlap_grad_reduce: bool = how(True)
    grad_reduce_in_bf16: bool = how(False)
    overlap_param_gather: bool = how(True)
    ddp_bucket_size: int | None = how(None)
    kernels: str = how("auto", choices=KERNELS)
    attention_kernel: str = how("auto", choices=ATTENTION_KERNELS)
    shared_memory: bool = how(True)
    distributed_backend: str | None = how(None, choices=("nccl", "gloo", "mpi"))
    distributed_timeout_minutes: float = how(10.0, above=0, most=LONGEST_TIMEOUT)
    distributed_timeout_seconds_after_init: float | None = how(None, most=LONGEST_TIMEOUT)

    @property
    def shared_out(self) -> int:
        """The ZeRO stage that these options come to."""
        stage = self.fsdp_stage if self.zero_stage is None else self.zero_stage
        return int(self.use_distributed_optimizer) if stage is None else stage

    @property
    def fsdp_stage(self) -> int | None:
        """That of Megatron-LM's FSDP, where it is asked for."""
        strategy = self.data_parallel_sharding_strategy or SHARED_OUT[3]
        return SHARED_OUT.index(strategy) if self.use_megatron_fsdp else None

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size
