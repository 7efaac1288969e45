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
    nproc: int | None = how(None, "local processes to start where no launcher does; default: tp x pp x --dp, else 1")
    device: str = how("auto", "where to compute; auto: cuda where there is a card", choices=("auto", "cpu", "cuda"))
    tensor_model_parallel_size: int = how(1, "tp: ranks that share each layer", above=0)
    pipeline_model_parallel_size: int = how(1, "pp: ranks that share the depth", above=0)
    context_parallel_size: int = how(1, "cp: ranks that share the tokens of each sequence", above=0)
    expert_model_parallel_size: int = how(1, "ep: ranks of dp x cp x tp that share the experts", above=0)
    expert_tensor_parallel_size: int = how(1, "ranks of dp x cp x tp that share each expert", above=0)
    data_parallel_size: int | None = how(None, "dp: ranks that share the batch; default: all left")
    num_layers_per_virtual_pipeline_stage: int | None = how(None, "layers per chunk of the interleaved schedule")
    num_virtual_stages_per_pipeline_rank: int | None = how(None, "chunks per pipeline rank of the interleaved schedule")
    pipeline_model_parallel_layout: str | None = how(None, "layers of each stage, as in 'Et|(tt|)*2tL'")
    decoder_first_pipeline_num_layers: int | None = how(None, "layers of pipeline rank 0; others share the rest")
    decoder_last_pipeline_num_layers: int | None = how(None, "layers of the last pipeline rank; others share the rest")
    account_for_embedding_in_pipeline_split: bool = how(False, "the embedding takes the place of a layer")
    account_for_loss_in_pipeline_split: bool = how(False, "the head and the loss take the place of a layer")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = how(
        None,
        "micro-batches that a chunk runs before the next chunk; default pp, with the remainder spread over the groups",
    )
    use_tp_pp_dp_mapping: bool = how(False, "number the ranks in the order tp, pp, dp; default: tp, dp, pp")
    pipeline_schedule: str = how("1f1b", "order of micro-batches in the pipeline", choices=KINDS["pipeline_schedule"])
    split_backward: bool = how(
        False, "compute weight gradients separately, where the pipeline would idle (zero bubble)"
    )
    zero_bubble_max_pending_backward: int | None = how(
        None, "forwards that may wait for their weight gradients; default: as the unsplit schedule's memory allows"
    )
    use_distributed_optimizer: bool = how(True, "shard optimizer state over dp (ZeRO-1); off: ZeRO-0")
    zero_stage: int | None = how(
        None,
        "what dp shares out: 1 the optimizer, 2 gradients too, 3 weights too, 0 nothing; default 1",
        least=0,
        most=TO_THREE,
    )
    use_megatron_fsdp: bool = how(False, "ZeRO-3, or as the next option says")
    data_parallel_sharding_strategy: str | None = how(None, "the stages 0 to 3 by name", choices=SHARED_OUT)
    zero_hold: str = how(
        "auto",
        "ZeRO-3: weights are whole for a layer, or for a run of a pipeline chunk; auto: chunk if a rank has 4 or more",
        choices=("auto", "layer", "chunk"),
    )
    param_cpu_offload: bool = how(False, "ZeRO-3: a rank's share of the weights lies in host memory")
    num_distributed_optimizer_instances: int = how(1, "sets of dp ranks that each hold all that is shared", above=0)
    outer_dp_sharding_strategy: str = how(
        "no_shard", "optim: these sets share out among them what the optimizer keeps", choices=SHARED_OUT[:2]
    )
    overlap_grad_reduce: bool = how(True, "reduce gradients during the last backward")
    grad_reduce_in_bf16: bool = how(False, "round gradients to bf16 for their sum over dp; each rank adds in fp32")
    overlap_param_gather: bool = how(True, "gather weights during the next forward")
    ddp_bucket_size: int | None = how(None, "elements per gradient bucket; default 40 million")
    kernels: str = how("auto", "kernels to run; auto: Triton's on cuda where it is installed", choices=KERNELS)
    attention_kernel: str = how("auto", "where it fits the shape; auto: by a table", choices=ATTENTION_KERNELS)
    shared_memory: bool = how(True, "cpu: ranks of one machine communicate through shared memory; off: through gloo")
    distributed_backend: str | None = how(None, "default: nccl on cuda, gloo on cpu", choices=("nccl", "gloo", "mpi"))
    distributed_timeout_minutes: float = how(10.0, "time limit of the start-up, minutes", above=0, most=LONGEST_TIMEOUT)
    distributed_timeout_seconds_after_init: float | None = how(
        None, "time limit of a collective in training, seconds; default: that of the start-up", most=LONGEST_TIMEOUT
    )

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
