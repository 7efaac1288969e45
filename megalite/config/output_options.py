"""The options of what a run writes: checkpoints, logs, and what people watch."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.field import free, training


@dataclass(frozen=True)
class CheckpointConfig:
    save: str | None = free(
        None, "directory to save checkpoints in, or a URL; without an interval only when the run ends or stops"
    )
    save_local: str | None = free(None, "fast directory to save in first; from it, --save is filled while training")
    save_interval: int | None = free(None, "steps between checkpoints", flags=("--persistent-save-interval",), above=0)
    save_interval_mins: float | None = free(None, "minutes between checkpoints, also beside --save-interval", above=0)
    asynchronous_save: str = free(
        "auto",
        "write in the background; auto: on cuda",
        choices=("auto", "on", "off"),
        flags=("--async-save=on", "--no-async-save=off"),
    )
    keep_last: int | None = free(None, "checkpoints to keep; default: all, 1 with --save-retain-interval", above=0)
    save_retain_interval: int | None = free(None, "checkpoints of steps divisible by this are never deleted", above=0)
    no_save_optim: bool = free(False, "save weights only; such a checkpoint does not resume a run exactly")
    load: str | None = training(
        None,
        "directory or URL to resume from, or Hugging Face model to begin with; one that is empty starts afresh",
    )
    ckpt_step: int | None = training(
        None,
        "step of the checkpoint to load; default: the newest valid one; the same training, started again, continues",
    )
    no_load_optim: bool = training(False, "load weights, step and data position, not the optimizer's state")
    finetune: bool = training(False, "load weights only, and start at step 0")
    override_opt_param_scheduler: bool = free(
        False,
        "rates and weight decay as here, whatever the checkpoint had",
        flags=("--override-lr-scheduler=true",),
    )
    use_checkpoint_opt_param_scheduler: bool = free(
        False, "rates and weight decay as in the checkpoint", flags=("--use-checkpoint-lr-scheduler=true",)
    )
    pretrained_checkpoint: str | None = free(
        None, "directory, also of Hugging Face, to take weights from when --load holds no checkpoint"
    )
    use_checkpoint_args: bool = free(False, "take the model's options from the checkpoint")
    exit_on_missing_checkpoint: bool = free(False, "stop when --load holds no checkpoint")
    export_hf: str | None = free(None, "new directory that becomes a Hugging Face model after the last step")


@dataclass(frozen=True)
class LogConfig:
    log_interval: int | None = free(
        None, "steps per log line; default: a fiftieth of the run, 1 to 100; 100 in Megatron's style", above=0
    )
    log_style: str = free(
        "auto",
        "form of the log; auto: Megatron-LM's for a command line that only it has, else megalite's",
        choices=("auto", "megalite", "megatron"),
    )
    log_throughput: bool = free(False, "TFLOP/s in Megatron's log line")
    log_params_norm: bool = free(False, "L2 norm of all parameters, after the step")
    log_num_zeros_in_grad: bool = free(False, "number of gradient elements that are exactly zero")
    log_progress: bool = free(False, "progress.txt beside the checkpoints: starts, saves, TFLOP/s, tokens")
    log_memory_interval: int | None = free(None, "steps per memory line; a multiple of --log-interval", above=0)
    log_device_memory_used: bool = free(False, "in the memory line: what all processes hold of the card")
    timing_log_level: int = free(
        0,
        "timers: 0 evaluations and saves; 1 parts of a step; 2 its micro-batches",
        most=(2, "is above 2; use 0, 1 or 2"),
    )
    timing_log_option: str = free("minmax", "timers over ranks", choices=("max", "minmax", "all"))
    barrier_with_level_1_timing: bool = free(True, "ranks wait for each other at the parts that level 1 times")
    run_dir: str | None = free(None, "directory of logs; default: --save, else runs/last")
    tensorboard_dir: str | None = free(None, "directory of TensorBoard events")
    tensorboard_log_interval: int = free(1, "steps per TensorBoard point", above=0)
    tensorboard_queue_size: int = free(1000, "TensorBoard events held in memory", above=0)
    log_timers_to_tensorboard: bool = free(False, "timers in TensorBoard, the slowest rank's, seconds per step")
    log_loss_scale_to_tensorboard: bool = free(True, "the loss scale in TensorBoard")
    log_validation_ppl_to_tensorboard: bool = free(False, "perplexity of validation sets in TensorBoard")
    log_memory_to_tensorboard: bool = free(False, "memory of rank 0 in TensorBoard, bytes")
    log_world_size_to_tensorboard: bool = free(False, "the number of ranks in TensorBoard")
    wandb_project: str | None = free(None, "Weights & Biases project")
    wandb_exp_name: str | None = free(None, "Weights & Biases run name")
    wandb_entity: str | None = free(None, "Weights & Biases user or team")
    wandb_save_dir: str | None = free(None, "directory of Weights & Biases' own files")
    peak_tflops: float | None = free(
        None, "dense peak of one device, TFLOP/s; default: a table, measured on cpu", above=0
    )
    profile_pipeline: int | None = free(None, "step whose pipeline is timed into timeline.json")


@dataclass(frozen=True)
class OperationsConfig:
    """How a run is watched and stopped; nothing here changes what it trains."""

    manual_gc: bool = free(False, "Python's garbage collector runs only when told, at the same step on all ranks")
    manual_gc_interval: int = free(0, "steps between collections with --manual-gc; 0: at evaluations only")
    manual_gc_eval: bool = free(True, "collect before and after evaluations with --manual-gc")
    empty_unused_memory_level: int = free(
        0, "give CUDA memory back: 1 before each update, 2 also after it", most=(2, "is above 2; use 0, 1 or 2")
    )
    profile: bool = free(False, "profile steps: cudaProfilerStart and Stop, for nsys; or --use-pytorch-profiler")
    use_pytorch_profiler: bool = free(False, "with --profile: torch's profiler, into trace/ of the run directory")
    profile_step_start: int = free(10, "steps before the first that is profiled")
    profile_step_end: int = free(12, "the last step that is profiled")
    profile_ranks: tuple[int, ...] = free((), "ranks that are profiled; default: all")
    pytorch_profiler_collect_shapes: bool = free(False, "shapes of tensors in torch's profile")
    pytorch_profiler_collect_callstack: bool = free(False, "call stacks in torch's profile")
    record_memory_history: bool = free(False, "write CUDA's memory history at each log line, for torch's viewer")
    memory_snapshot_path: str = free("snapshot.pickle", "file of --record-memory-history; _RANK is added")
    check_weight_hash_across_dp_replicas_interval: int | None = free(
        None, "steps between checks that all copies of each weight are the same bits", above=0
    )
