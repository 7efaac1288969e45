"""The options of a run: how it computes, training, data, checkpoints, logs and operation."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.field import free, how, training
from megalite.config.registry import KINDS

KERNELS = ("auto", "triton", "torch")
ATTENTION_KERNELS = ("auto", "cudnn", "flash", "triton", "blocked", "torch")
LONGEST_TIMEOUT = (1_000_000, "is longer than any collective; use at most 1000000")
SHARED_OUT = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # of ZeRO 0, 1, 2, 3
TO_THREE = (3, "is above 3; use 0, 1, 2 or 3")
# the launcher passes these on to its ranks
EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
NO_SHARE, TO_TWO = (1, "is not a share; use at most 1"), (2, "is above 2; use 0, 1 or 2")


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


@dataclass(frozen=True)
class TrainConfig:
    micro_batch_size: int = training(0, required=True, stand_in=1, same_as="batch_unit")
    global_batch_size: int | None = training(None)
    rampup_batch_size: tuple[int, ...] | None = training(None)
    step_batch_size_schedule: str | None = training(None)
    train_iters: int | None = training(None)
    train_samples: int | None = training(None)
    iterations_to_skip: tuple[int, ...] | None = training(None)
    skip_train: bool = training(False)
    seed: int = training(1234)
    eval_iters: int = free(100, least=-1)
    eval_global_batch_size: int | None = free(None)
    eval_micro_batch_size: int | None = free(None)
    eval_interval: int | None = free(None)
    exit_interval: int | None = free(None)
    exit_duration_in_mins: float | None = free(None, least=0)
    exit_signal_handler: bool = free(False)
    exit_signal: str | None = free(None, choices=EXIT_SIGNALS)
    recompute_granularity: str | None = how(None, choices=("selective", "full"))
    recompute_modules: tuple[str, ...] = how(("core_attn",))
    recompute_method: str | None = how(None, choices=("uniform", "block"))
    recompute_num_layers: int | None = how(None)
    cpu_offloading_num_layers: int = how(0)
    min_offloaded_tensor_size: int = how(1 << 20)
    z_loss_coeff: float = training(0.0)
    check_for_nan_in_loss_and_grad: bool = free(True)
    max_skipped_steps: int = free(100, above=0)
    rerun_mode: str = free("validate_results", choices=("disabled", "validate_results", "report_stats"))
    check_for_spiky_loss: bool = training(False)
    check_for_large_grads: bool = training(False)
    spike_action: str = training("log", choices=("log", "skip", "rollback"))
    spike_threshold: float = training(10.0, above=0)
    spike_window: int = training(100, above=0)
    deterministic_mode: bool = how(False)
    compile: bool = how(False)
    cuda_graph_impl: str = how("none", choices=("none", "local"))
    dry_run: bool = free(False)
    as_rank: int | None = free(None, least=0)

    @property
    def batch_unit(self) -> int | None:
        """The micro-batch size where it decides the global one, which is not given; else None."""
        return self.micro_batch_size if self.global_batch_size is None else None

    def batch_size(self, dp: int) -> int:
        """Samples of an iteration in rates and evaluations, as in Megatron-LM, also with a schedule of sizes."""
        return self.global_batch_size or self.micro_batch_size * dp

    def eval_batch_size(self, dp: int) -> int:
        return self.eval_global_batch_size or self.batch_size(dp)


@dataclass(frozen=True)
class OptimConfig:
    optimizer: str = training("adam", choices=KINDS["optimizer"])
    optimizer_impl: str = how("auto", choices=("auto", "torch", "apex"))
    lr: float | None = training(None, stand_in=1.0, least=0)
    min_lr: float = training(0.0)
    decoupled_lr: float | None = training(None, least=0)
    decoupled_min_lr: float | None = training(None, least=0)
    lr_base_batch_size: int | None = training(None)
    lr_decay_style: str = training("linear", choices=KINDS["lr_decay_style"])
    lr_decay_iters: int | None = training(None)
    lr_decay_samples: int | None = training(None)
    lr_warmup_iters: int = training(0)
    lr_warmup_samples: int = training(0)
    lr_warmup_fraction: float | None = training(None, least=0)
    lr_warmup_init: float = training(0.0)
    lr_wsd_decay_style: str = training("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    lr_wsd_decay_iters: int | None = training(None, least=0)
    lr_wsd_decay_samples: int | None = training(None, least=0)
    weight_decay: float = training(0.01)
    start_weight_decay: float | None = training(None, least=0)
    end_weight_decay: float | None = training(None, least=0)
    weight_decay_incr_style: str = training("constant", choices=("constant", "linear", "cosine"))
    clip_grad: float = training(1.0)
    adam_beta1: float = training(0.9, below=(1, "is not below 1; use 0.9 to 0.999"))
    adam_beta2: float = training(0.999, below=(1, "is not below 1; use 0.9 to 0.999"))
    adam_eps: float = training(1e-8)
    exp_avg_dtype: str = training("fp32", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = training("fp32", choices=("fp32", "bf16"))
    sgd_momentum: float = training(0.9)
    muon_momentum: float = training(0.95, below=(1, "is not below 1; use 0.9 to 0.95"))
    muon_nesterov: bool = training(False)
    muon_num_ns_steps: int = training(5, above=0)
    muon_coefficient_type: str = training("quintic", choices=("simple", "quintic", "polar_express"))
    muon_scale_mode: str = training("spectral", choices=("spectral", "shape_scaling", "unit_rms_norm"))
    muon_extra_scale_factor: float = training(1.0, above=0)
    muon_fp32_matmul_prec: str = training("medium", choices=("medium", "high"))
    lars_trust_coefficient: float = training(0.001, above=0)
    optimizer_cpu_offload: bool = how(False)
    optimizer_offload_fraction: float = how(1.0, most=NO_SHARE)
    optimizer_offload_folder: str | None = how(None)

    @property
    def offloaded(self) -> float:
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def is_muon(self) -> bool:
        return self.optimizer in ("muon", "dist_muon")

    @property
    def apart(self) -> dict[str, bool]:
        """What lies in buckets of its own (optim/layout.py: lay_out)."""
        return {"decoupled": self.decoupled_lr is not None, "matrices": self.is_muon}

    @property
    def sees_whole_tensors(self) -> bool:
        """Ranks of a stage exchange for the update."""
        return self.is_muon or self.optimizer in ("lamb", "lars")


@dataclass(frozen=True)
class PrecisionConfig:
    bf16: bool = training(False)
    fp16: bool = training(False)
    loss_scale: float | None = training(None)
    initial_loss_scale: float = training(2.0**32)
    min_loss_scale: float = training(1.0, above=0)
    loss_scale_window: int = training(1000, above=0)
    hysteresis: int = training(2, above=0)


@dataclass(frozen=True)
class DataConfig:
    data_path: tuple[str, ...] | None = training(None)
    train_data_path: tuple[str, ...] | None = training(None)
    valid_data_path: tuple[str, ...] | None = free(None)
    test_data_path: tuple[str, ...] | None = free(None)
    data_args_path: str | None = training(None)
    per_split_data_args_path: str | None = training(None)
    multiple_validation_sets: bool = free(False)
    validation_set_names: tuple[str, ...] | None = free(None)
    split: str | None = training(None)
    dataloader_type: str = training("single", choices=("single", "cyclic"))
    data_cache_path: str | None = how(None)
    mmap_bin_files: bool = how(True)
    mock_data: bool = training(False)
    dataset: str | None = training(None, choices=KINDS["dataset"])
    eod_mask_loss: bool = training(False)
    reset_position_ids: bool = training(False)
    reset_attention_mask: bool = training(False)
    document_packing: str = training("concatenate", choices=("concatenate", "best-fit"))
    fim_data: bool = training(False)
    fim_rate: float = training(0.5, most=NO_SHARE)
    fim_spm_rate: float = training(0.5, most=NO_SHARE)
    fim_split_sample: str | None = training(None)
    fim_fragment_rate: float | None = training(None, most=NO_SHARE, least=0)
    fim_no_prefix: str | None = training(None)
    fim_prefix_token: str = training("<fim_prefix>")
    fim_middle_token: str = training("<fim_middle>")
    fim_suffix_token: str = training("<fim_suffix>")
    fim_pad_token: str = training("<fim_pad>")
    fim_eod_token: str | None = training(None)
    fim_cut_tokens: bool = training(False)
    tokenizer_type: str | None = training(None, choices=KINDS["tokenizer_type"])
    tokenizer_model: str | None = training(None)
    tiktoken_pattern: str | None = training(None)
    vocab_file: str | None = training(None)
    merge_file: str | None = training(None)
    vocab_size: int | None = training(None)
    padded_vocab_size: int | None = training(None)


@dataclass(frozen=True)
class CheckpointConfig:
    save: str | None = free(None)
    save_local: str | None = free(None)
    save_interval: int | None = free(None)
    save_interval_mins: float | None = free(None)
    asynchronous_save: str = free("auto", choices=("auto", "on", "off"))
    keep_last: int | None = free(None)
    save_retain_interval: int | None = free(None)
    no_save_optim: bool = free(False)
    load: str | None = training(None)
    ckpt_step: int | None = training(None, least=0)
    no_load_optim: bool = training(False)
    finetune: bool = training(False)
    override_opt_param_scheduler: bool = free(False)
    use_checkpoint_opt_param_scheduler: bool = free(False)
    pretrained_checkpoint: str | None = free(None)
    use_checkpoint_args: bool = free(False)
    moe_use_upcycling: bool = free(False)
    exit_on_missing_checkpoint: bool = free(False)
    export_hf: str | None = free(None)


@dataclass(frozen=True)
class LogConfig:
    log_interval: int | None = free(None)
    log_style: str = free("auto", choices=("auto", "megalite", "megatron"))
    log_throughput: bool = free(False)
    log_params_norm: bool = free(False)
    log_num_zeros_in_grad: bool = free(False)
    log_progress: bool = free(False)
    log_memory_interval: int | None = free(None)
    log_device_memory_used: bool = free(False)
    timing_log_level: int = free(0, most=TO_TWO)
    timing_log_option: str = free("minmax", choices=("max", "minmax", "all"))
    barrier_with_level_1_timing: bool = free(True)
    run_dir: str | None = free(None)
    name: str | None = free(None)
    tensorboard_dir: str | None = free(None)
    tensorboard_log_interval: int = free(1, above=0)
    tensorboard_queue_size: int = free(1000, above=0)
    log_timers_to_tensorboard: bool = free(False)
    log_loss_scale_to_tensorboard: bool = free(True)
    log_validation_ppl_to_tensorboard: bool = free(False)
    log_memory_to_tensorboard: bool = free(False)
    moe_per_layer_logging: bool = free(False)
    log_world_size_to_tensorboard: bool = free(False)
    wandb_project: str | None = free(None)
    wandb_exp_name: str | None = free(None)
    wandb_entity: str | None = free(None)
    wandb_save_dir: str | None = free(None)
    peak_tflops: float | None = free(None)
    profile_pipeline: int | None = free(None, least=0)


@dataclass(frozen=True)
class OperationsConfig:
    """How a run is watched and stopped; none of these changes the training, unless a plugin's part is chosen."""

    plugin: tuple[str, ...] = free((), adds_up=True)
    manual_gc: bool = free(False)
    manual_gc_interval: int = free(0)
    manual_gc_eval: bool = free(True)
    empty_unused_memory_level: int = free(0, most=TO_TWO)
    profile: bool = free(False)
    use_pytorch_profiler: bool = free(False)
    profile_step_start: int = free(10)
    profile_step_end: int = free(12)
    profile_ranks: tuple[int, ...] = free(())
    pytorch_profiler_collect_shapes: bool = free(False)
    pytorch_profiler_collect_callstack: bool = free(False)
    price_per_gpu_hour: float | None = free(None, least=0)
    log_straggler: bool = free(False)
    straggler_minmax_count: int = free(1, least=1)
    health_action: str = free("warn", choices=("warn", "checkpoint", "exit"))
    max_gpu_temperature: int | None = free(None)
    max_step_time_s: float | None = free(None)
    record_memory_history: bool = free(False)
    memory_snapshot_path: str = free("snapshot.pickle")
    max_restarts: int = free(0)
    check_weight_hash_across_dp_replicas_interval: int | None = free(None)
    check_replicas_action: str = free("stop", choices=("warn", "stop", "heal"))
