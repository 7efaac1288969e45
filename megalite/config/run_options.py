"""The options of a run: training, data, checkpoints, logs and operation."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.field import free, how, training
from megalite.config.registry import KINDS

# the launcher passes these on to its ranks
EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
NO_SHARE, TO_TWO = (1, "is not a share; use at most 1"), (2, "is above 2; use 0, 1 or 2")


@dataclass(frozen=True)
class TrainConfig:
    micro_batch_size: int = training(0, "samples per micro-batch", required=True, stand_in=1, same_as="batch_unit")
    global_batch_size: int | None = training(None, "samples per step; default micro_batch_size x dp")
    rampup_batch_size: tuple[int, ...] | None = training(None, "START INCREMENT SAMPLES: ramp-up of the batch size")
    step_batch_size_schedule: str | None = training(
        None, "TOKENS:SIZE ...: global batch size from that many tokens on, as '0:768 250B:1536' (K, M, B, T)"
    )
    train_iters: int | None = training(None, "steps")
    train_samples: int | None = training(None, "samples, instead of --train-iters")
    iterations_to_skip: tuple[int, ...] | None = training(None, "steps to skip, counted from 1")
    skip_train: bool = training(False, "evaluate the loaded weights on the validation and test sets, and stop")
    seed: int = training(1234, "seed of weights, dropout and data order")
    eval_iters: int = free(100, "steps per evaluation; 0 or -1: no evaluation", least=-1)
    eval_global_batch_size: int | None = free(None, "samples per step of evaluation; default: as --global-batch-size")
    eval_micro_batch_size: int | None = free(None, "the same per micro-batch; default: as --micro-batch-size")
    eval_interval: int | None = free(None, "steps between evaluations; default: only at the end")
    exit_interval: int | None = free(None, "save and stop at a step divisible by this")
    exit_duration_in_mins: float | None = free(None, "save and stop after this many minutes", least=0)
    exit_signal_handler: bool = free(False, "save and stop on SIGTERM, SIGINT and --exit-signal")
    exit_signal: str | None = free(None, "save and stop on this signal", choices=EXIT_SIGNALS)
    recompute_granularity: str | None = how(
        None, "activations to recompute in backward; selective: see --recompute-modules", choices=("selective", "full")
    )
    recompute_modules: tuple[str, ...] = how(("core_attn",), "selective: core_attn (softmax), layernorm, mlp, moe")
    recompute_method: str | None = how(None, "full: groups of layers, or single layers", choices=("uniform", "block"))
    recompute_num_layers: int | None = how(None, "uniform: layers per group; block: layers per stage")
    cpu_offloading_num_layers: int = how(0, "first layers of a stage whose activations lie in host memory")
    min_offloaded_tensor_size: int = how(1 << 20, "elements; what is smaller stays on the device")
    z_loss_coeff: float = training(0.0, "z-loss: this times log^2 of the softmax's sum, added to the loss; PaLM: 1e-4")
    check_for_nan_in_loss_and_grad: bool = free(True, "stop at a loss or gradient that is not finite; off: skip it")
    max_skipped_steps: int = free(100, "stop after this many steps in a row without an update", above=0)
    rerun_mode: str = free(
        "validate_results",
        "compute a suspicious step twice, to tell bad data from bad hardware; report_stats: every step",
        choices=("disabled", "validate_results", "report_stats"),
    )
    check_for_spiky_loss: bool = training(False, "suspect a step whose loss is out of line with the steps before it")
    check_for_large_grads: bool = training(False, "suspect a step whose gradient norm is out of line")
    spike_action: str = training(
        "log", "at a spike; skip: no update; rollback: to the last checkpoint", choices=("log", "skip", "rollback")
    )
    spike_threshold: float = training(10.0, "deviations above the median (by MAD) that make a spike", above=0)
    spike_window: int = training(100, "steps that the median is taken over", above=0)
    deterministic_mode: bool = how(False, "refuse operations whose results may differ from run to run")
    compile: bool = how(False, "torch.compile between a block's matmuls; not with --kernels triton")
    cuda_graph_impl: str = how("none", "local: replay a recorded micro-batch", choices=("none", "local"))
    dry_run: bool = free(False, "print the plan and stop")
    as_rank: int | None = free(None, "--dry-run: a step as this rank, without memory", least=0)

    @property
    def batch_unit(self) -> int | None:
        """The micro-batch size where it decides the global one, which is not given; else None."""
        return self.micro_batch_size if self.global_batch_size is None else None

    def batch_size(self, dp: int) -> int:
        """Samples that an iteration counts as, for rates and evaluations, as in Megatron-LM; also with
        --step-batch-size-schedule."""
        return self.global_batch_size or self.micro_batch_size * dp

    def eval_batch_size(self, dp: int) -> int:
        return self.eval_global_batch_size or self.batch_size(dp)


@dataclass(frozen=True)
class OptimConfig:
    optimizer: str = training(
        "adam",
        "adam is AdamW; muon updates matrices, and AdamW the rest; dist_muon is muon",
        choices=KINDS["optimizer"],
    )
    optimizer_impl: str = how("auto", "kind of AdamW; apex needs its CUDA extension", choices=("auto", "torch", "apex"))
    lr: float | None = training(None, "peak learning rate", stand_in=1.0, least=0)
    min_lr: float = training(0.0, "learning rate at the end of decay")
    decoupled_lr: float | None = training(None, "peak learning rate of the word embedding and the head", least=0)
    decoupled_min_lr: float | None = training(None, "their rate at the end of decay; default: --min-lr", least=0)
    lr_base_batch_size: int | None = training(
        None, "global batch size that the rates are given for; they are scaled in proportion to the actual one"
    )
    lr_decay_style: str = training("linear", "shape of the decay", choices=KINDS["lr_decay_style"])
    lr_decay_iters: int | None = training(None, "steps of decay; default train_iters")
    lr_decay_samples: int | None = training(None, "samples of decay; default train_samples")
    lr_warmup_iters: int = training(0, "steps of linear warm-up")
    lr_warmup_samples: int = training(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = training(None, "warm-up as a part of the decay", least=0)
    lr_warmup_init: float = training(0.0, "learning rate at step 0 of the warm-up")
    lr_wsd_decay_style: str = training(
        "exponential", "shape of WSD's last phase", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = training(None, "steps of WSD's last phase", least=0)
    lr_wsd_decay_samples: int | None = training(None, "samples of WSD's last phase", least=0)
    weight_decay: float = training(0.01, "decoupled weight decay; not on norms and biases")
    start_weight_decay: float | None = training(None, "weight decay at first, with --weight-decay-incr-style", least=0)
    end_weight_decay: float | None = training(None, "weight decay at the end of training, likewise", least=0)
    weight_decay_incr_style: str = training("constant", "how it grows", choices=("constant", "linear", "cosine"))
    clip_grad: float = training(1.0, "largest gradient norm; 0: no clipping")
    adam_beta1: float = training(0.9, "decay of the first moment", below=(1, "is not below 1; use 0.9 to 0.999"))
    adam_beta2: float = training(0.999, "decay of the second moment", below=(1, "is not below 1; use 0.9 to 0.999"))
    adam_eps: float = training(1e-8, "added to the root of the second moment")
    exp_avg_dtype: str = training("fp32", "first moment; bf16: rounded stochastically", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = training("fp32", "second moment; bf16: rounded stochastically", choices=("fp32", "bf16"))
    sgd_momentum: float = training(0.9, "momentum of sgd and of lars")
    muon_momentum: float = training(0.95, "of muon", below=(1, "is not below 1; use 0.9 to 0.95"))
    muon_nesterov: bool = training(False, "muon orthogonalises the gradient and its momentum, Nesterov's look ahead")
    muon_num_ns_steps: int = training(5, "Newton-Schulz steps of muon", above=0)
    muon_coefficient_type: str = training("quintic", "of these steps", choices=("simple", "quintic", "polar_express"))
    muon_scale_mode: str = training(
        "spectral", "size of muon's update of [m, n]", choices=("spectral", "shape_scaling", "unit_rms_norm")
    )
    muon_extra_scale_factor: float = training(1.0, "times this; 0.2 with spectral: as large as AdamW's", above=0)
    muon_fp32_matmul_prec: str = training(
        "medium", "of Newton-Schulz and what travels for it; medium: bf16, high: fp32", choices=("medium", "high")
    )
    lars_trust_coefficient: float = training(0.001, "of lars, eta: update per weight at a rate of 1", above=0)
    optimizer_cpu_offload: bool = how(False, "keep main weights and states in host memory, and update them there")
    optimizer_offload_fraction: float = how(1.0, "share of the weights whose states are offloaded", most=NO_SHARE)
    optimizer_offload_folder: str | None = how(None, "a folder of a fast local disk to hold these, not host memory")

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
    bf16: bool = training(False, "bfloat16 weights and activations; gradients and main weights in fp32")
    fp16: bool = training(False, "float16 with loss scaling; gradients and main weights in fp32")
    loss_scale: float | None = training(None, "constant loss scale for fp16; default: dynamic")
    initial_loss_scale: float = training(2.0**32, "where dynamic scaling starts")
    min_loss_scale: float = training(1.0, "lowest dynamic scale", above=0)
    loss_scale_window: int = training(1000, "clean steps before the scale doubles", above=0)
    hysteresis: int = training(2, "overflows before the scale halves", above=0)


@dataclass(frozen=True)
class DataConfig:
    data_path: tuple[str, ...] | None = training(None, "PREFIX or WEIGHT PREFIX pairs of .bin/.idx files; see --split")
    train_data_path: tuple[str, ...] | None = training(None, "the same for training only; no split")
    valid_data_path: tuple[str, ...] | None = free(None, "the same for validation only; NAME=PREFIX for several sets")
    test_data_path: tuple[str, ...] | None = free(None, "the same for the test only")
    data_args_path: str | None = training(None, "file that holds what --data-path would, for long blends")
    per_split_data_args_path: str | None = training(None, "JSON file with train, valid, test: the three lists above")
    multiple_validation_sets: bool = free(False, "each prefix of --valid-data-path is a set with its own loss")
    validation_set_names: tuple[str, ...] | None = free(None, "their names; default: the last part of each prefix")
    split: str | None = training(None, "parts of the documents for training, validation, test; default 969, 30, 1")
    dataloader_type: str = training(
        "single", "order of samples: each epoch is shuffled separately, also with cyclic", choices=("single", "cyclic")
    )
    data_cache_path: str | None = how(None, "directory of index caches")
    mmap_bin_files: bool = how(True, "map token files; off: read them, where maps are slow or files may shrink")
    mock_data: bool = training(False, "generated tokens instead of files")
    dataset: str | None = training(None, "a plugin's dataset instead of files", choices=KINDS["dataset"])
    eod_mask_loss: bool = training(False, "no loss after an end-of-document token")
    reset_position_ids: bool = training(False, "count positions from the start of each document")
    reset_attention_mask: bool = training(False, "attend within the document only (variable-length attention)")
    document_packing: str = training(
        "concatenate", "end to end, or with as few cuts as possible (padded)", choices=("concatenate", "best-fit")
    )
    fim_data: bool = training(False, "fill-in-the-middle: rearrange documents of the training data")
    fim_rate: float = training(0.5, "share of documents that are rearranged", most=NO_SHARE)
    fim_spm_rate: float = training(0.5, "share of these that get the order suffix, prefix, middle", most=NO_SHARE)
    fim_split_sample: str | None = training(None, "token that splits a document into fragments, rearranged separately")
    fim_fragment_rate: float | None = training(None, "share of fragments that are rearranged", most=NO_SHARE, least=0)
    fim_no_prefix: str | None = training(None, "documents that begin with this text stay unchanged")
    fim_prefix_token: str = training("<fim_prefix>", "special token of the tokenizer")
    fim_middle_token: str = training("<fim_middle>", "special token of the tokenizer")
    fim_suffix_token: str = training("<fim_suffix>", "special token of the tokenizer")
    fim_pad_token: str = training("<fim_pad>", "special token of the tokenizer, pads samples that became shorter")
    fim_eod_token: str | None = training(None, "token at the end of a document; default: the tokenizer's own")
    fim_cut_tokens: bool = training(False, "cut documents between tokens instead of characters: faster, a little worse")
    tokenizer_type: str | None = training(
        None, "kind of tokenizer; with --vocab-file and --merge-file GPT2BPETokenizer", choices=KINDS["tokenizer_type"]
    )
    tokenizer_model: str | None = training(None, "tokenizer file")
    tiktoken_pattern: str | None = training(None, "how TikTokenizer splits text: v1, v2, gpt2, cl100k, o200k")
    vocab_file: str | None = training(None, "GPT-2 vocab.json")
    merge_file: str | None = training(None, "GPT-2 merges.txt")
    vocab_size: int | None = training(None, "true vocabulary, at least the tokenizer's; default: the tokenizer's")
    padded_vocab_size: int | None = training(None, "rows of the embedding; default: by --make-vocab-size-divisible-by")


@dataclass(frozen=True)
class CheckpointConfig:
    save: str | None = free(None, "directory or URL of checkpoints; without an interval, one at the end of the run")
    save_local: str | None = free(None, "fast directory to save in first; copied to --save during training")
    save_interval: int | None = free(None, "steps between checkpoints")
    save_interval_mins: float | None = free(None, "minutes between checkpoints, also together with --save-interval")
    asynchronous_save: str = free("auto", "write in the background; auto: on cuda", choices=("auto", "on", "off"))
    keep_last: int | None = free(None, "checkpoints to keep; default: all, 1 with --save-retain-interval")
    save_retain_interval: int | None = free(None, "checkpoints of steps divisible by this are never deleted")
    no_save_optim: bool = free(False, "save weights only; such a checkpoint does not resume a run exactly")
    load: str | None = training(None, "directory or URL to resume from (empty: start afresh), or a Hugging Face model")
    ckpt_step: int | None = training(
        None, "step of the checkpoint to load; default: the newest valid one; a restarted run continues", least=0
    )
    no_load_optim: bool = training(False, "load weights, step and data position, not the optimizer's state")
    finetune: bool = training(False, "load weights only, and start at step 0")
    override_opt_param_scheduler: bool = free(False, "learning rates and weight decay from the flags")
    use_checkpoint_opt_param_scheduler: bool = free(False, "learning rates and weight decay from the checkpoint")
    pretrained_checkpoint: str | None = free(None, "initial weights, also Hugging Face's, if --load has no checkpoint")
    use_checkpoint_args: bool = free(False, "take the model's options from the checkpoint")
    moe_use_upcycling: bool = free(False, "start experts as copies of a dense model's feed-forward block")
    exit_on_missing_checkpoint: bool = free(False, "stop when --load holds no checkpoint")
    export_hf: str | None = free(None, "new directory; write a Hugging Face model there after the last step")


@dataclass(frozen=True)
class LogConfig:
    log_interval: int | None = free(None, "steps per log line; default 1 to 100, a fiftieth of the run; Megatron: 100")
    log_style: str = free(
        "auto", "form of the log; auto: Megatron-LM's if its flags are given", choices=("auto", "megalite", "megatron")
    )
    log_throughput: bool = free(False, "TFLOP/s in Megatron's log line")
    log_params_norm: bool = free(False, "L2 norm of all parameters, after the step")
    log_num_zeros_in_grad: bool = free(False, "number of gradient elements that are exactly zero")
    log_progress: bool = free(False, "progress.txt beside the checkpoints: starts, saves, TFLOP/s, tokens")
    log_memory_interval: int | None = free(None, "steps per memory line; a multiple of --log-interval")
    log_device_memory_used: bool = free(False, "in the memory line: memory of the card used by all processes")
    timing_log_level: int = free(0, "timers: 0 evaluations, saves; 1 parts of a step; 2 micro-batches", most=TO_TWO)
    timing_log_option: str = free("minmax", "timers over ranks: what is shown", choices=("max", "minmax", "all"))
    barrier_with_level_1_timing: bool = free(True, "ranks wait for each other at the timers of level 1")
    run_dir: str | None = free(None, "directory of logs; default: --save, else runs/last")
    name: str | None = free(None, "name of the run: its logs go to runs/NAME, which no other run may use")
    tensorboard_dir: str | None = free(None, "directory of TensorBoard events")
    tensorboard_log_interval: int = free(1, "steps per TensorBoard point", above=0)
    tensorboard_queue_size: int = free(1000, "TensorBoard events held in memory", above=0)
    log_timers_to_tensorboard: bool = free(False, "timers in TensorBoard: the slowest rank's seconds per step")
    log_loss_scale_to_tensorboard: bool = free(True, "the loss scale in TensorBoard")
    log_validation_ppl_to_tensorboard: bool = free(False, "perplexity of validation sets in TensorBoard")
    log_memory_to_tensorboard: bool = free(False, "memory of rank 0 in TensorBoard, bytes")
    moe_per_layer_logging: bool = free(False, "the losses that balance experts, of each layer, in TensorBoard")
    log_world_size_to_tensorboard: bool = free(False, "the number of ranks in TensorBoard")
    wandb_project: str | None = free(None, "Weights & Biases project")
    wandb_exp_name: str | None = free(None, "Weights & Biases run name")
    wandb_entity: str | None = free(None, "Weights & Biases user or team")
    wandb_save_dir: str | None = free(None, "directory of Weights & Biases' own files")
    peak_tflops: float | None = free(None, "dense peak of one device, TFLOP/s; default: a table, measured on cpu")
    profile_pipeline: int | None = free(None, "step whose pipeline is recorded in timeline.json", least=0)


@dataclass(frozen=True)
class OperationsConfig:
    """How a run is watched and stopped; none of these changes the training, unless a plugin's part is chosen."""

    plugin: tuple[str, ...] = free(
        (), "Python of your own that registers parts: FILE.py or a module; may be given again", adds_up=True
    )
    manual_gc: bool = free(False, "run Python's garbage collector only at fixed steps, the same on all ranks")
    manual_gc_interval: int = free(0, "steps between collections with --manual-gc; 0: at evaluations only")
    manual_gc_eval: bool = free(True, "collect before and after evaluations with --manual-gc")
    empty_unused_memory_level: int = free(0, "free cached CUDA memory: 1 before each update, 2 also after", most=TO_TWO)
    profile: bool = free(False, "profile steps: cudaProfilerStart and Stop, for nsys; or --use-pytorch-profiler")
    use_pytorch_profiler: bool = free(False, "with --profile: torch's profiler, into trace/ of the run directory")
    profile_step_start: int = free(10, "steps before the first profiled one")
    profile_step_end: int = free(12, "the last step that is profiled")
    profile_ranks: tuple[int, ...] = free((), "ranks to profile; default: all")
    pytorch_profiler_collect_shapes: bool = free(False, "shapes of tensors in torch's profile")
    pytorch_profiler_collect_callstack: bool = free(False, "call stacks in torch's profile")
    price_per_gpu_hour: float | None = free(None, "price of one device, for the cost in the final report", least=0)
    log_straggler: bool = free(False, "log at each line the ranks with the least and the most time of their own")
    straggler_minmax_count: int = free(1, "ranks at each end with --log-straggler", least=1)
    health_action: str = free(
        "warn",
        "when a rank is slow or its card is unhealthy: also save, or save and exit with 16, for another node",
        choices=("warn", "checkpoint", "exit"),
    )
    max_gpu_temperature: int | None = free(None, "temperature of a healthy card, degrees Celsius")
    max_step_time_s: float | None = free(None, "step time of a healthy run, mean over a log line, seconds")
    record_memory_history: bool = free(False, "write CUDA's memory history at each log line, for torch's viewer")
    memory_snapshot_path: str = free("snapshot.pickle", "file of --record-memory-history; _RANK is added")
    max_restarts: int = free(0, "restarts per hour by the launcher of --nproc, when a rank has died")
    check_weight_hash_across_dp_replicas_interval: int | None = free(None, "steps between checks that replicas agree")
    check_replicas_action: str = free(
        "stop", "where replicas differ; heal: from main weights, or the majority", choices=("warn", "stop", "heal")
    )
