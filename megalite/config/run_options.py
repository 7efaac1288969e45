"""The options of a run: parallelism and kernels, training, data, checkpoints, logs and operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalite.config.option import execution, operational, training
from megalite.config.registry import REGISTRIES
from megalite.config.width_scaling import lr_multipliers

KERNELS = ("auto", "triton", "torch")
ATTENTION_KERNELS = ("auto", "cudnn", "flash", "triton", "blocked", "torch")
LINEAR_ATTENTION_KERNELS = ("auto", "fla")
DETERMINISM_REPORTS = ("report_determinism_stats", "report_stats")  # two names of the same --rerun-mode in Megatron-LM
MAX_TIMEOUT = (1_000_000, "is longer than any collective; use at most 1000000")
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # ZeRO stages 0, 1, 2, 3
MAX_ZERO_STAGE = (3, "is above 3; use 0, 1, 2 or 3")
# the launcher forwards these to its ranks
EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
MAX_FRACTION = (1, "is not a fraction; use at most 1")
MAX_LEVEL = (2, "is above 2; use 0, 1 or 2")


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks and their layout, pipeline schedule, sharding, overlap, kernels and communication."""

    nproc: int | None = execution(
        None,
        help=(
            "number of local processes to start if no launcher does; default: tp x cp x pp x --dp if that is given, "
            "else 1"
        ),
    )
    device: str = execution("auto", choices=("auto", "cpu", "cuda"), help="device type; auto: cuda if available")
    tensor_model_parallel_size: int = execution(
        1, exclusive_min=0, aliases=("--tp",), help="tensor-parallel size (tp): number of ranks that split each layer"
    )
    pipeline_model_parallel_size: int = execution(
        1,
        exclusive_min=0,
        aliases=("--pp",),
        help="pipeline-parallel size (pp): number of ranks that split the layers into stages",
    )
    context_parallel_size: int = execution(
        1,
        exclusive_min=0,
        aliases=("--cp",),
        help="context-parallel size (cp): number of ranks that split the tokens of each sequence",
    )
    expert_model_parallel_size: int = execution(
        1,
        exclusive_min=0,
        aliases=("--ep",),
        help="expert-parallel size (ep): number of the dp x cp x tp ranks that split the experts",
    )
    expert_tensor_parallel_size: int = execution(
        1, exclusive_min=0, help="number of the dp x cp x tp ranks that split each expert"
    )
    data_parallel_size: int | None = execution(
        None,
        aliases=("--dp",),
        help="data-parallel size (dp): number of ranks that split the batch; default: all remaining ranks",
    )
    num_layers_per_virtual_pipeline_stage: int | None = execution(None, help="interleaved schedule: layers per chunk")
    num_virtual_stages_per_pipeline_rank: int | None = execution(
        None, help="interleaved schedule: chunks per pipeline rank"
    )
    pipeline_model_parallel_layout: str | None = execution(
        None, help="layers of each pipeline stage, as in 'Et|(tt|)*2tL', or where stages begin: 'layers.4,layers.8'"
    )
    decoder_first_pipeline_num_layers: int | None = execution(
        None, help="layers of the first pipeline rank; the others have equal numbers of the remaining layers"
    )
    decoder_last_pipeline_num_layers: int | None = execution(
        None, help="layers of the last pipeline rank; the others have equal numbers of the remaining layers"
    )
    account_for_embedding_in_pipeline_split: bool = execution(
        False, help="count the embedding as a layer when layers are split over pipeline ranks"
    )
    account_for_loss_in_pipeline_split: bool = execution(
        False, help="count the output layer and the loss as a layer when layers are split over pipeline ranks"
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = execution(
        None,
        help=(
            "interleaved schedule: micro-batches that a chunk processes before the next chunk; default: pp, with the "
            "remainder spread over the groups"
        ),
    )
    use_tp_pp_dp_mapping: bool = execution(False, help="number the ranks in the order tp, pp, dp; default: tp, dp, pp")
    pipeline_schedule: str = execution(
        "1f1b", choices=REGISTRIES["pipeline_schedule"], help="order of micro-batches in the pipeline"
    )
    split_backward: bool = execution(
        False,
        aliases=("--enable-zero-bubble=true", "--enable-zbh1-pipeline=true", "--delay-wgrad-compute=true"),
        help="compute weight gradients separately, when the pipeline would be idle (zero bubble)",
    )
    zero_bubble_max_pending_backward: int | None = execution(
        None,
        help=(
            "with --split-backward: maximum number of forward passes whose weight gradients are pending; default: as "
            "many as the memory of the unsplit schedule allows"
        ),
    )
    use_distributed_optimizer: bool = execution(
        True, help="shard the optimizer state over data-parallel ranks (ZeRO-1); off: ZeRO-0"
    )
    zero_stage: int | None = execution(
        None,
        minimum=0,
        maximum=MAX_ZERO_STAGE,
        help="ZeRO stage: 0 none, 1 optimizer state, 2 and gradients, 3 and weights; default: 1",
    )
    use_megatron_fsdp: bool = execution(
        False,
        aliases=("--use-torch-fsdp2=true", "--use-custom-fsdp=true"),
        help="ZeRO-3, or the ZeRO stage of --data-parallel-sharding-strategy",
    )
    data_parallel_sharding_strategy: str | None = execution(
        None, choices=SHARDING_STRATEGIES, help="ZeRO stage with --use-megatron-fsdp: the names stand for stages 0 to 3"
    )
    reshard_after_forward: str = execution(
        "auto",
        choices=("auto", "layer", "chunk"),
        aliases=("--torch-fsdp2-no-reshard-after-forward=chunk",),
        help=(
            "ZeRO-3: unshard weights for a layer at a time, or for a pass of a pipeline chunk; auto: chunk if a rank "
            "has 4 or more chunks"
        ),
    )
    param_cpu_offload: bool = execution(False, help="ZeRO-3: keep each rank's shard of the weights in host memory")
    num_distributed_optimizer_instances: int = execution(
        1,
        exclusive_min=0,
        help="number of groups of data-parallel ranks that each hold a complete copy of the sharded state",
    )
    outer_dp_sharding_strategy: str = execution(
        "no_shard",
        choices=SHARDING_STRATEGIES[:2],
        aliases=("--enable-full-sharding-in-hsdp=optim",),
        help="optim: also shard the optimizer state over the groups of --num-distributed-optimizer-instances",
    )
    overlap_grad_reduce: bool = execution(True, help="reduce gradients during the last backward pass")
    grad_reduce_in_bf16: bool = execution(
        False, help="round gradients to bf16 for the data-parallel reduction; each rank sums them in fp32"
    )
    grad_reduce_in_fp16: bool = execution(
        False, help="round scaled gradients to fp16 for the data-parallel reduction; each rank sums them in fp32"
    )
    overlap_param_gather: bool = execution(True, help="all-gather weights during the next forward pass")
    ddp_bucket_size: int | None = execution(None, help="elements per gradient bucket; default: 40 million")
    kernels: str = execution(
        "auto", choices=KERNELS, help="kernel implementation; auto: Triton's on cuda if it is installed"
    )
    attention_kernel: str = execution("auto", choices=ATTENTION_KERNELS, help="attention kernel; auto chooses by shape")
    linear_attention_kernel: str = execution(
        "auto",
        choices=LINEAR_ATTENTION_KERNELS,
        help=(
            "kernels of gated delta nets and Kimi delta attention; auto: those of --kernels; fla: those of the package "
            "flash-linear-attention, on cuda"
        ),
    )
    shared_memory: bool = execution(
        True, help="cpu: ranks of one machine communicate through shared memory; off: through gloo"
    )
    distributed_backend: str | None = execution(
        None, choices=("nccl", "gloo", "mpi"), help="communication backend; default: nccl on cuda, gloo on cpu"
    )
    distributed_timeout_minutes: float = execution(
        10.0, exclusive_min=0, maximum=MAX_TIMEOUT, help="time limit of the start-up, minutes"
    )
    distributed_timeout_seconds_after_init: float | None = execution(
        None,
        maximum=MAX_TIMEOUT,
        help="time limit of a collective during training, seconds; default: that of the start-up",
    )

    @property
    def effective_zero_stage(self) -> int:
        """The ZeRO stage that results from all options that affect it."""
        stage = self.fsdp_stage if self.zero_stage is None else self.zero_stage
        return int(self.use_distributed_optimizer) if stage is None else stage

    @property
    def fsdp_stage(self) -> int | None:
        """The ZeRO stage that --use-megatron-fsdp selects; None without it."""
        if not self.use_megatron_fsdp:
            return None
        strategy = self.data_parallel_sharding_strategy or SHARDING_STRATEGIES[3]
        return SHARDING_STRATEGIES.index(strategy)

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that hold one copy of the model: tp x cp x pp."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size


@dataclass(frozen=True)
class TrainConfig:
    """The length of training, batch sizes, evaluation, recomputation, spikes and dry runs."""

    micro_batch_size: int = training(
        0, required=True, placeholder=1, effective_property="batch_size_basis", help="samples per micro-batch"
    )
    global_batch_size: int | None = training(None, help="samples per step; default: --micro-batch-size x dp")
    rampup_batch_size: tuple[int, ...] | None = training(
        None, help="ramp-up of the batch size: START INCREMENT SAMPLES"
    )
    step_batch_size_schedule: str | None = training(
        None, help="TOKENS:SIZE ...: global batch size from that number of tokens on, as '0:768 250B:1536' (K, M, B, T)"
    )
    train_iters: int | None = training(None, help="number of training steps")
    train_samples: int | None = training(None, help="number of training samples, instead of --train-iters")
    iterations_to_skip: tuple[int, ...] | None = training(None, help="steps to skip, counted from 1")
    skip_train: bool = training(False, help="evaluate the loaded weights on the validation and test sets, and stop")
    seed: int = training(1234, help="random seed for weights, dropout and data order")
    eval_iters: int = operational(100, minimum=-1, help="steps per evaluation; 0 or -1: no evaluation")
    eval_global_batch_size: int | None = operational(
        None, help="samples per step of evaluations; default: --global-batch-size"
    )
    eval_micro_batch_size: int | None = operational(
        None, help="micro-batch size of evaluations; default: --micro-batch-size"
    )
    eval_interval: int | None = operational(None, help="steps between evaluations; default: only at the end")
    exit_interval: int | None = operational(None, help="save and stop at a step divisible by this number")
    exit_duration_in_mins: float | None = operational(None, minimum=0, help="save and stop after this many minutes")
    exit_signal_handler: bool = operational(False, help="save and stop on SIGTERM, SIGINT and --exit-signal")
    exit_signal: str | None = operational(None, choices=EXIT_SIGNALS, help="save and stop on this signal")
    recompute_granularity: str | None = execution(
        None,
        choices=("selective", "full"),
        aliases=("--recompute-activations=selective",),
        help="activations to recompute in the backward pass; full: whole layers; selective: --recompute-modules",
    )
    recompute_modules: tuple[str, ...] = execution(
        ("core_attn",),
        help=(
            "modules of selective recomputation: core_attn (softmax), layernorm, mlp, moe, mla_up_proj (up-projections "
            "of multi-latent attention), gdn (convolution and recurrence of gated delta nets), kda and mamba (those of "
            "Kimi delta attention and of Mamba-2)"
        ),
    )
    recompute_method: str | None = execution(
        None,
        choices=("uniform", "block"),
        help="units of full recomputation; uniform: groups of layers; block: single layers",
    )
    recompute_num_layers: int | None = execution(
        None, help="full recomputation; uniform: layers per group; block: layers per stage"
    )
    cpu_offloading_num_layers: int = execution(
        0, help="number of layers, the first of each stage, whose activations are offloaded to host memory"
    )
    min_offloaded_tensor_size: int = execution(
        1 << 20, help="minimum size of an offloaded activation, elements; smaller ones stay on the device"
    )
    z_loss_coeff: float = training(
        0.0, help="coefficient of the z-loss, log^2 of the sum in the softmax, added to the loss; PaLM: 1e-4"
    )
    check_for_nan_in_loss_and_grad: bool = operational(
        True, help="stop at a loss or gradient that is not finite; off: skip the update"
    )
    max_skipped_steps: int = operational(
        100, exclusive_min=0, help="stop after this many consecutive steps without an update"
    )
    rerun_mode: str = operational(
        "validate_results",
        choices=("disabled", "validate_results", *DETERMINISM_REPORTS),
        help=(
            "compute a suspicious step twice, to distinguish bad data from faulty hardware; "
            "report_determinism_stats (or report_stats): every step"
        ),
    )
    check_for_spiky_loss: bool = training(
        False, help="treat a step as suspicious if its loss is far above that of the steps before"
    )
    check_for_large_grads: bool = training(
        False, help="treat a step as suspicious if its gradient norm is far above that of the steps before"
    )
    spike_action: str = training(
        "log",
        choices=("log", "skip", "rollback"),
        help="action at a spike; skip: no update; rollback: return to the last checkpoint",
    )
    spike_threshold: float = training(
        10.0, exclusive_min=0, help="number of deviations (MAD) above the median that count as a spike"
    )
    spike_window: int = training(
        100, exclusive_min=0, help="number of steps in the median with which spikes are detected"
    )
    deterministic_mode: bool = execution(False, help="refuse operations whose results may differ from run to run")
    compile: bool = execution(
        False, help="compile the operations between a block's matmuls with torch.compile; not with --kernels triton"
    )
    cuda_graph_impl: str = execution(
        "none",
        choices=("none", "local"),
        aliases=("--enable-cuda-graph=local",),
        help="local: record a micro-batch as a CUDA graph and replay it",
    )
    dry_run: bool = operational(False, help="print the plan and stop")
    dry_run_rank: int | None = operational(
        None, minimum=0, help="with --dry-run: run a step as this rank, without allocating memory"
    )

    @property
    def batch_size_basis(self) -> int | None:
        """The micro-batch size if it determines the global batch size, which is then not set; otherwise None."""
        return self.micro_batch_size if self.global_batch_size is None else None

    def batch_size(self, dp: int) -> int:
        """Return the samples of one iteration.

        Learning-rate schedules and evaluations use it, as in Megatron-LM, even with a schedule of batch sizes.
        """
        return self.global_batch_size or self.micro_batch_size * dp

    def eval_batch_size(self, dp: int) -> int:
        """Return the samples of one iteration of an evaluation."""
        return self.eval_global_batch_size or self.batch_size(dp)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, learning rate, weight decay and offloading."""

    optimizer: str = training(
        "adam",
        choices=REGISTRIES["optimizer"],
        help="optimizer; adam is AdamW; muon updates matrices, and AdamW the rest; dist_muon is muon",
    )
    optimizer_impl: str = execution(
        "auto", choices=("auto", "torch", "apex"), help="implementation of AdamW; apex needs its CUDA extension"
    )
    lr: float | None = training(None, placeholder=1.0, minimum=0, help="peak learning rate")
    min_lr: float = training(0.0, help="learning rate at the end of the decay")
    decoupled_lr: float | None = training(
        None, minimum=0, help="peak learning rate of the word embedding and the output layer"
    )
    decoupled_min_lr: float | None = training(
        None, minimum=0, help="final learning rate of the word embedding and the output layer; default: --min-lr"
    )
    lr_base_batch_size: int | None = training(
        None,
        help=(
            "global batch size for which the learning rates are given; they are scaled in proportion to the actual one"
        ),
    )
    lr_decay_style: str = training(
        "linear", choices=REGISTRIES["lr_decay_style"], help="shape of the learning-rate decay"
    )
    lr_decay_iters: int | None = training(None, help="steps of learning-rate decay; default: --train-iters")
    lr_decay_samples: int | None = training(None, help="samples of learning-rate decay; default: --train-samples")
    lr_warmup_iters: int = training(0, help="steps of linear learning-rate warmup")
    lr_warmup_samples: int = training(0, help="samples of linear learning-rate warmup")
    lr_warmup_fraction: float | None = training(None, minimum=0, help="learning-rate warmup as a fraction of the decay")
    lr_warmup_init: float = training(0.0, help="learning rate at the start of the warmup")
    lr_wsd_decay_style: str = training(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        help="WSD: shape of the last phase of the learning rate",
    )
    lr_wsd_decay_iters: int | None = training(None, minimum=0, help="WSD: steps of the last phase of the learning rate")
    lr_wsd_decay_samples: int | None = training(
        None, minimum=0, help="WSD: samples of the last phase of the learning rate"
    )
    weight_decay: float = training(0.01, help="decoupled weight decay; not applied to norms and biases")
    start_weight_decay: float | None = training(
        None, minimum=0, help="weight decay at the start of training, with --weight-decay-incr-style"
    )
    end_weight_decay: float | None = training(
        None, minimum=0, help="weight decay at the end of training, with --weight-decay-incr-style"
    )
    weight_decay_incr_style: str = training(
        "constant", choices=("constant", "linear", "cosine"), help="schedule from the start to the end weight decay"
    )
    clip_grad: float = training(1.0, help="maximum gradient norm; 0: no clipping")
    adam_beta1: float = training(
        0.9, exclusive_max=(1, "is not below 1; use 0.9 to 0.999"), help="Adam: decay rate of the first moment"
    )
    adam_beta2: float = training(
        0.999, exclusive_max=(1, "is not below 1; use 0.9 to 0.999"), help="Adam: decay rate of the second moment"
    )
    adam_eps: float = training(1e-8, help="Adam: epsilon added to the root of the second moment")
    exp_avg_dtype: str = training(
        "fp32", choices=("fp32", "bf16"), help="dtype of Adam's first moment; bf16: rounded stochastically"
    )
    exp_avg_sq_dtype: str = training(
        "fp32", choices=("fp32", "bf16"), help="dtype of Adam's second moment; bf16: rounded stochastically"
    )
    sgd_momentum: float = training(0.9, help="momentum of SGD and LARS")
    muon_momentum: float = training(0.95, exclusive_max=(1, "is not below 1; use 0.9 to 0.95"), help="Muon momentum")
    muon_nesterov: bool = training(False, help="Muon: use Nesterov momentum")
    muon_num_ns_steps: int = training(5, exclusive_min=0, help="Muon: number of Newton-Schulz steps")
    muon_coefficient_type: str = training(
        "quintic", choices=("simple", "quintic", "polar_express"), help="Muon: Newton-Schulz coefficients"
    )
    muon_scale_mode: str = training(
        "spectral",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
        help="Muon: scale of the update of an [m, n] matrix",
    )
    muon_extra_scale_factor: float = training(
        1.0, exclusive_min=0, help="Muon: additional factor of the update; 0.2 with spectral: as large as AdamW's"
    )
    muon_fp32_matmul_prec: str = training(
        "medium",
        choices=("medium", "high"),
        help="Muon: precision of Newton-Schulz and its communication; medium is bf16, high fp32",
    )
    lars_trust_coefficient: float = training(0.001, exclusive_min=0, help="LARS trust coefficient (eta)")
    optimizer_cpu_offload: bool = execution(
        False, help="keep main weights and optimizer states in host memory, and update them there"
    )
    optimizer_offload_fraction: float = execution(
        1.0, maximum=MAX_FRACTION, help="fraction of the weights whose optimizer states are offloaded"
    )
    optimizer_offload_dir: str | None = execution(
        None, help="directory on a fast local disk for offloaded optimizer states, instead of host memory"
    )

    @property
    def offload_fraction(self) -> float:
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def is_muon(self) -> bool:
        return self.optimizer in ("muon", "dist_muon")

    def separate_buckets(self, width_mult: float) -> dict[str, Any]:
        """Return the reasons for separate buckets (optim/zero/layout.py: build_layout).

        Args:
            width_mult: the width of the model over that of muP's base model.
        """
        return {
            "decoupled_lr": self.decoupled_lr is not None,
            "matrices": self.is_muon,
            "lr_multipliers": lr_multipliers(self.optimizer, width_mult),
        }

    @property
    def needs_full_tensors(self) -> bool:
        """True if the optimizer's update needs full tensors, so that data-parallel ranks communicate for it."""
        return self.is_muon or self.optimizer in ("lamb", "lars")


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtype of weights and activations, and loss scaling."""

    bf16: bool = training(False, help="bfloat16 weights and activations; gradients and main weights in fp32")
    fp16: bool = training(False, help="float16 with loss scaling; gradients and main weights in fp32")
    loss_scale: float | None = training(None, help="constant loss scale for fp16; default: dynamic")
    initial_loss_scale: float = training(2.0**32, help="initial dynamic loss scale")
    min_loss_scale: float = training(1.0, exclusive_min=0, help="minimum dynamic loss scale")
    loss_scale_window: int = training(
        1000, exclusive_min=0, help="steps without overflow before the dynamic loss scale doubles"
    )
    hysteresis: int = training(2, exclusive_min=0, help="overflows before the dynamic loss scale halves")


@dataclass(frozen=True)
class DataConfig:
    """Token files, blends, splits, documents, fill-in-the-middle and the tokenizer."""

    data_path: tuple[str, ...] | None = training(
        None, help="PREFIX or WEIGHT PREFIX pairs of .bin/.idx files; see --split"
    )
    train_data_path: tuple[str, ...] | None = training(None, help="training data prefixes, as --data-path, not split")
    valid_data_path: tuple[str, ...] | None = operational(
        None, help="validation data prefixes, as --data-path, not split; NAME=PREFIX for several sets"
    )
    test_data_path: tuple[str, ...] | None = operational(None, help="test data prefixes, as --data-path, not split")
    eval_requests: str | None = operational(
        None, help="JSONL file of questions whose answers each evaluation scores by likelihood (megalite eval)"
    )
    data_args_path: str | None = training(None, help="file with the arguments of --data-path, for long blends")
    per_split_data_args_path: str | None = training(
        None,
        help=(
            "JSON file with the lists train, valid and test, as for --train-data-path, --valid-data-path and "
            "--test-data-path"
        ),
    )
    multiple_validation_sets: bool = operational(
        False, help="evaluate each prefix of --valid-data-path as a set with its own loss"
    )
    validation_set_names: tuple[str, ...] | None = operational(
        None, help="names of the validation sets; default: last part of each prefix"
    )
    split: str | None = training(
        None, help="proportions of documents for training, validation and test; default: 969,30,1"
    )
    dataloader_type: str = training(
        "single", choices=("single", "cyclic"), help="order of samples; both shuffle each epoch separately"
    )
    data_cache_path: str | None = execution(None, help="directory of index caches")
    mmap_bin_files: bool = execution(
        True, help="map token files into memory; off: read them, where maps are slow or files may shrink"
    )
    mock_data: bool = training(False, help="generated tokens instead of files")
    dataset: str | None = training(None, choices=REGISTRIES["dataset"], help="dataset of a plugin instead of files")
    eod_mask_loss: bool = training(False, help="no loss after an end-of-document token")
    reset_position_ids: bool = training(False, help="count positions from the start of each document")
    reset_attention_mask: bool = training(False, help="attend within the document only (variable-length attention)")
    document_packing: str = training(
        "concatenate",
        choices=("concatenate", "best-fit"),
        help=(
            "packing of documents into samples; concatenate: end to end; best-fit: with as few cuts as possible, padded"
        ),
    )
    fim_data: bool = training(False, help="fill-in-the-middle: rearrange documents of the training data")
    fim_rate: float = training(
        0.5, maximum=MAX_FRACTION, help="fill-in-the-middle: fraction of documents that are rearranged"
    )
    fim_spm_rate: float = training(
        0.5,
        maximum=MAX_FRACTION,
        help="fill-in-the-middle: fraction of rearranged documents with the order suffix, prefix, middle",
    )
    fim_split_sample: str | None = training(
        None, help="fill-in-the-middle: token that splits a document into fragments, which are rearranged separately"
    )
    fim_fragment_rate: float | None = training(
        None, maximum=MAX_FRACTION, minimum=0, help="fill-in-the-middle: fraction of fragments that are rearranged"
    )
    fim_no_prefix: str | None = training(
        None, help="fill-in-the-middle: documents that start with this text stay unchanged"
    )
    fim_prefix_token: str = training("<fim_prefix>", help="fill-in-the-middle: special token for the prefix")
    fim_middle_token: str = training("<fim_middle>", help="fill-in-the-middle: special token for the middle")
    fim_suffix_token: str = training("<fim_suffix>", help="fill-in-the-middle: special token for the suffix")
    fim_pad_token: str = training("<fim_pad>", help="fill-in-the-middle: special token that pads shortened samples")
    fim_eod_token: str | None = training(
        None, help="fill-in-the-middle: token at the end of a document; default: the tokenizer's own"
    )
    fim_split_on_tokens: bool = training(
        False, help="fill-in-the-middle: cut documents between tokens instead of characters: faster, a little worse"
    )
    tokenizer_type: str | None = training(
        None,
        choices=REGISTRIES["tokenizer_type"],
        help="type of tokenizer; default with --vocab-file and --merge-file: GPT2BPETokenizer",
    )
    tokenizer_model: str | None = training(None, help="tokenizer file")
    tiktoken_pattern: str | None = training(
        None, help="pattern by which TikTokenizer splits text: v1, v2, gpt2, cl100k, o200k"
    )
    vocab_file: str | None = training(None, help="GPT-2 vocab.json")
    merge_file: str | None = training(None, help="GPT-2 merges.txt")
    vocab_size: int | None = training(
        None, help="vocabulary size before padding, at least the tokenizer's; default: the tokenizer's"
    )
    padded_vocab_size: int | None = training(
        None,
        help="vocabulary size after padding, the rows of the embedding; default: by --make-vocab-size-divisible-by",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints that a run saves, keeps and loads, and the export of the model."""

    save: str | None = operational(
        None, help="directory or URL of checkpoints; without --save-interval, one is saved at the end of the run"
    )
    save_local: str | None = operational(
        None, help="fast directory to save in first; checkpoints are copied to --save during training"
    )
    save_interval: int | None = operational(
        None, aliases=("--persistent-save-interval",), help="steps between checkpoints"
    )
    save_interval_mins: float | None = operational(
        None, help="minutes between checkpoints, also together with --save-interval"
    )
    async_save: str = operational(
        "auto",
        choices=("auto", "on", "off"),
        aliases=("--no-async-save=off",),
        bare_value="on",
        help="write checkpoints in the background; auto: on cuda",
    )
    keep_last: int | None = operational(
        None, help="number of checkpoints to keep; default: all, or 1 with --save-retain-interval"
    )
    save_retain_interval: int | None = operational(
        None, help="never delete checkpoints of steps divisible by this number"
    )
    no_save_optim: bool = operational(False, help="save weights only; such a checkpoint does not resume a run exactly")
    load: str | None = training(
        None, help="directory or URL to resume from (empty: start from scratch), or a Hugging Face model"
    )
    ckpt_step: int | None = training(
        None, minimum=0, help="step of the checkpoint to load; default: the newest valid one; a restarted run continues"
    )
    no_load_optim: bool = training(False, help="load weights, step and data position, but not the optimizer's state")
    finetune: bool = training(False, help="load weights only, and start at step 0")
    override_opt_param_scheduler: bool = operational(
        False,
        aliases=("--override-lr-scheduler=true",),
        help="take learning rates and weight decay from the flags, not the checkpoint",
    )
    use_checkpoint_opt_param_scheduler: bool = operational(
        False,
        aliases=("--use-checkpoint-lr-scheduler=true",),
        help="take learning rates and weight decay from the checkpoint, not the flags",
    )
    pretrained_checkpoint: str | None = operational(
        None, help="checkpoint or Hugging Face model with the initial weights, if --load has no checkpoint"
    )
    use_checkpoint_args: bool = operational(False, help="take the model's options from the checkpoint")
    moe_use_upcycling: bool = operational(False, help="start experts as copies of a dense model's feed-forward block")
    exit_on_missing_checkpoint: bool = operational(False, help="stop if --load has no checkpoint")
    export_hf: str | None = operational(
        None, help="new directory; a Hugging Face model is written there after the last step"
    )


@dataclass(frozen=True)
class LogConfig:
    """Log lines, timers and trackers (TensorBoard, Weights & Biases, MLflow, trackio)."""

    log_interval: int | None = operational(
        None, help="steps per log line; default: a fiftieth of the run, 1 to 100; Megatron-LM's style: 100"
    )
    log_style: str = operational(
        "auto",
        choices=("auto", "megalite", "megatron"),
        help="style of the log; auto: Megatron-LM's if its flags are given",
    )
    log_throughput: bool = operational(False, help="log TFLOP/s in Megatron-LM's log line")
    log_params_norm: bool = operational(False, help="log the L2 norm of all parameters, after the step")
    log_num_zeros_in_grad: bool = operational(False, help="log the number of gradient elements that are exactly zero")
    log_noise_scale: bool = operational(
        False, help="log the gradient noise scale, the batch size whose noise equals the gradient"
    )
    log_progress: bool = operational(
        False, help="write progress.txt next to the checkpoints: starts, saves, TFLOP/s, tokens"
    )
    log_memory_interval: int | None = operational(None, help="steps per memory line; a multiple of --log-interval")
    log_device_memory_used: bool = operational(
        False, help="log in the memory line the GPU memory that all processes use"
    )
    timing_log_level: int = operational(
        0,
        maximum=MAX_LEVEL,
        help="timers to record: 0 evaluations and saves, 1 also parts of a step, 2 also micro-batches",
    )
    timing_log_option: str = operational(
        "minmax", choices=("max", "minmax", "all"), help="summary of timers over ranks"
    )
    barrier_with_level_1_timing: bool = operational(True, help="synchronize ranks at the timers of level 1")
    run_dir: str | None = operational(None, help="directory of logs; default: --save, else runs/last")
    name: str | None = operational(
        None, help="name of the run: its logs are written to runs/NAME, which no other run may use"
    )
    tensorboard_dir: str | None = operational(None, help="directory of TensorBoard events")
    tensorboard_log_interval: int = operational(1, exclusive_min=0, help="steps per TensorBoard point")
    tensorboard_queue_size: int = operational(
        1000, exclusive_min=0, help="maximum number of TensorBoard events in memory"
    )
    log_timers_to_tensorboard: bool = operational(
        False, help="write timers to TensorBoard: the slowest rank's seconds per step"
    )
    log_loss_scale_to_tensorboard: bool = operational(True, help="write the loss scale to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = operational(
        False, help="write the perplexity of validation sets to TensorBoard"
    )
    log_memory_to_tensorboard: bool = operational(False, help="write the memory of rank 0 to TensorBoard, bytes")
    moe_per_layer_logging: bool = operational(
        False, help="write the losses of routers and mixers to TensorBoard, for each layer"
    )
    log_world_size_to_tensorboard: bool = operational(False, help="write the number of ranks to TensorBoard")
    wandb_project: str | None = operational(None, help="Weights & Biases project")
    wandb_exp_name: str | None = operational(None, help="Weights & Biases run name")
    wandb_entity: str | None = operational(None, help="Weights & Biases user or team")
    wandb_save_dir: str | None = operational(None, help="directory of Weights & Biases' own files")
    mlflow_experiment: str | None = operational(None, help="MLflow experiment; MLFLOW_TRACKING_URI is its server")
    trackio_project: str | None = operational(None, help="trackio project; without a Space, on this machine")
    peak_tflops: float | None = operational(
        None, help="peak of one device for dense matrices, TFLOP/s; default: from a table, measured on cpu"
    )
    profile_pipeline: int | None = operational(None, minimum=0, help="step whose pipeline is recorded in timeline.json")


@dataclass(frozen=True)
class OperationsConfig:
    """Plugins, profiling, health checks and restarts; only a plugin whose component is used changes the training."""

    plugin: tuple[str, ...] = operational(
        (), accumulates=True, help="your own Python module, or FILE.py, that registers components; may be repeated"
    )
    manual_gc: bool = operational(
        False, help="run Python's garbage collector only at fixed steps, the same on all ranks"
    )
    manual_gc_interval: int = operational(0, help="steps between collections with --manual-gc; 0: at evaluations only")
    manual_gc_eval: bool = operational(True, help="collect before and after evaluations with --manual-gc")
    empty_unused_memory_level: int = operational(
        0, maximum=MAX_LEVEL, help="free cached CUDA memory: 1 before each update, 2 also after it"
    )
    profile: bool = operational(
        False, help="profile steps: cudaProfilerStart and cudaProfilerStop, for nsys; or --use-pytorch-profiler"
    )
    use_pytorch_profiler: bool = operational(
        False, help="with --profile: write profiles of torch's profiler to trace/ of the run directory"
    )
    profile_step_start: int = operational(10, help="steps before the first profiled one")
    profile_step_end: int = operational(12, help="last profiled step")
    profile_ranks: tuple[int, ...] = operational((), help="ranks to profile; default: all")
    pytorch_profiler_collect_shapes: bool = operational(False, help="record shapes of tensors in torch's profile")
    pytorch_profiler_collect_callstack: bool = operational(False, help="record call stacks in torch's profile")
    price_per_gpu_hour: float | None = operational(
        None, minimum=0, help="price of one device per hour, for the cost in the final report"
    )
    log_straggler: bool = operational(
        False, help="log the slowest and fastest ranks at each log line, by their time without waiting for others"
    )
    straggler_minmax_count: int = operational(
        1, minimum=1, help="number of slowest and of fastest ranks that --log-straggler logs"
    )
    health_action: str = operational(
        "warn",
        choices=("warn", "checkpoint", "exit"),
        help="action when a rank is slow or its GPU unhealthy: warn, also save, or save and exit with code 16",
    )
    max_gpu_temperature: int | None = operational(None, help="maximum temperature of a healthy GPU, degrees Celsius")
    max_step_time_s: float | None = operational(
        None, help="maximum step time of a healthy run, mean over a log line, seconds"
    )
    record_memory_history: bool = operational(
        False, help="write CUDA's memory history at each log line, for torch's viewer"
    )
    memory_snapshot_path: str = operational(
        "snapshot.pickle", help="file of --record-memory-history; _RANK is appended"
    )
    max_restarts: int = operational(
        0, help="maximum number of restarts per hour by the launcher of --nproc, when a rank has died"
    )
    check_weight_hash_across_dp_replicas_interval: int | None = operational(
        None, help="steps between checks that replicas have equal weights"
    )
    check_replicas_action: str = operational(
        "stop",
        choices=("warn", "stop", "repair"),
        help="action when replicas differ; repair: copy from the main weights or the majority",
    )
