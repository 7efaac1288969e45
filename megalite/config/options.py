"""The configuration: frozen dataclasses with Megatron-LM's names and defaults.

A field is one option: its name in kebab case is the flag, its `help` states the unit. `flags` lists extra spellings;
a bool that is on by default is switched off by --no-NAME or --disable-NAME. Pure: no torch, so that a bad command
line is refused before anything is imported or started. What may not go together: check.py; as a file:
toml.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from megalite.config.pattern import read_pattern

_NONE: Mapping[str, str] = MappingProxyType({})
EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")  # those that the launcher passes on to its ranks


def opt(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    refused: Mapping[str, str] = _NONE,
) -> Any:
    """A field of the configuration. `flags`: other spellings; "--x=VALUE" sets the field to VALUE. `refused`: values of
    Megatron-LM's that are none of the choices, and why."""
    metadata = {"help": help, "choices": choices, "flags": flags, "refused": refused}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = opt(0, "transformer layers", flags=("--encoder-num-layers",))
    hidden_size: int = opt(0, "model width D")
    ffn_hidden_size: int | None = opt(None, "feed-forward width; default 4 D, or 8/3 D in steps of 64 with --swiglu")
    num_attention_heads: int = opt(0, "query heads H")
    kv_channels: int | None = opt(None, "head size K; default D / H")
    group_query_attention: bool = opt(False, "share key/value heads in --num-query-groups groups")
    num_query_groups: int | None = opt(None, "key/value heads G with --group-query-attention; default 1")
    seq_length: int = opt(0, "tokens per sequence", flags=("--encoder-seq-length",))
    max_position_embeddings: int | None = opt(None, "longest sequence that positions are made for; default seq_length")
    normalization: str = opt("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = opt(1e-5, "added to the variance in norms", flags=("--layernorm-epsilon",))
    apply_layernorm_1p: bool = opt(False, "store norm weights as their difference from 1")
    add_bias_linear: bool = opt(True, "biases in all linear layers", flags=("--disable-bias-linear=false",))
    add_qkv_bias: bool = opt(False, "biases in the query, key, value projections only")
    activation: str = opt(
        "gelu",
        "feed-forward activation; gelu is the tanh form, gelu_erf the exact one",
        choices=("gelu", "gelu_erf", "swiglu", "squared_relu"),
        flags=("--swiglu=swiglu", "--squared-relu=squared_relu"),
    )
    bias_gelu_fusion: bool = opt(True, "Megatron-LM's fused gelu, the tanh form; off: the exact one, if none is named")
    openai_gelu: bool = opt(
        False, "the tanh form of gelu, where no activation is named", flags=("--use-te-activation-func=true",)
    )
    parallel_residual: bool = opt(False, "attention and feed-forward side by side on the same input, as in GPT-NeoX")
    position_embedding_type: str = opt(
        "learned_absolute",
        "positions",
        choices=("learned_absolute", "rope", "yarn", "none"),
        flags=("--use-rotary-position-embeddings=rope",),
    )
    add_position_embedding: bool = opt(
        True, "off: no learned positions, beside rotary ones", flags=("--no-position-embedding=false",)
    )
    rotary_base: float = opt(10000.0, "base of the rotary wavelengths")
    rotary_percent: float = opt(1.0, "part of each head that rotates")
    rotary_interleaved: bool = opt(False, "channels 2i and 2i + 1 turn as a pair, instead of i and i + half")
    rotary_seq_len_interpolation_factor: float = opt(1.0, "rope: positions are divided by this")
    no_rope_freq: str | None = opt(
        None, "N: every N-th layer has no rotary positions; or a list of a number per layer, 1 without, as [0,0,0,1]*8"
    )
    rotary_scaling_factor: float = opt(1.0, "yarn: stretch of the context")
    yarn_original_max_position_embeddings: int = opt(4096, "yarn: tokens that the model was trained on before")
    yarn_beta_fast: float = opt(32.0, "yarn: channels with more turns in that length keep their wavelength")
    yarn_beta_slow: float = opt(1.0, "yarn: channels with fewer are stretched by the whole factor")
    yarn_correction_range_round_to_int: bool = opt(True, "yarn: the border between them is of whole channels")
    mscale: float = opt(1.0, "yarn: queries and keys grow by the quotient of 1 + 0.1 log(factor) times this")
    mscale_all_dim: float = opt(0.0, "yarn: and 1 + 0.1 log(factor) times this")
    use_rope_scaling: bool = opt(False, "Llama-3 scaling of rotary wavelengths")
    rope_scaling_factor: float = opt(8.0, "stretch of the longest wavelengths with --use-rope-scaling")
    untie_embeddings_and_output_weights: bool = opt(False, "the head has weights of its own")
    make_vocab_size_divisible_by: int = opt(128, "the vocabulary is padded to a multiple of this (and of tp)")
    hidden_dropout: float = opt(0.1, "dropout after embedding, attention and feed-forward")
    attention_dropout: float = opt(0.1, "dropout of attention weights")
    init_method_std: float = opt(0.02, "standard deviation of initial weights")
    embedding_init_method_std: float | None = opt(None, "that of embeddings; default init_method_std")
    qk_layernorm: bool = opt(False, "norm on each query and key head")
    no_weight_decay_cond_type: str | None = opt(
        None,
        "apply_wd_to_qk_layernorm: weight decay on the norms of query and key heads too",
        choices=("apply_wd_to_qk_layernorm",),
        flags=("--apply-wd-to-qk-layernorm=apply_wd_to_qk_layernorm",),
    )
    window_size: tuple[int, ...] | None = opt(
        None, "LEFT,0: a query sees its own key and LEFT before it; default, and -1: all before it"
    )
    window_attn_skip_freq: str | None = opt(
        None, "N: every N-th layer has no window; or a list of a number per layer, 1 with and 0 without, as [1,1,0]*8"
    )

    @property
    def head_size(self) -> int:
        assert self.hidden_size and self.num_attention_heads
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def groups(self) -> int:
        assert self.num_attention_heads
        if not self.group_query_attention:
            return self.num_attention_heads
        return self.num_query_groups or self.num_attention_heads  # not given: stored before `completed`

    @property
    def ffn_size(self) -> int:
        assert self.hidden_size
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.activation == "swiglu" else 4 * self.hidden_size

    @property
    def positions(self) -> int:
        assert self.seq_length
        return self.max_position_embeddings or self.seq_length

    @property
    def rotary(self) -> tuple[bool, ...]:
        """Of each layer: whether it has rotary positions."""
        some, pattern = self.position_embedding_type in ("rope", "yarn"), self.no_rope_freq
        if pattern is None or not some:
            return (some,) * self.num_layers
        bits = read_pattern(pattern, self.num_layers)
        return bits if pattern.strip().isdigit() else tuple(not bit for bit in bits)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer: how many keys a query sees, itself included; None: all before it."""
        if self.window_size is None or self.window_size[0] == -1:
            return (None,) * self.num_layers
        window, pattern = self.window_size[0] + 1, self.window_attn_skip_freq
        bits = (True,) * self.num_layers if pattern is None else read_pattern(pattern, self.num_layers)
        return tuple(window if bit else None for bit in bits)


@dataclass(frozen=True)
class ParallelConfig:
    nproc: int | None = opt(
        None,
        "local processes to start when no launcher (torchrun, srun, mpirun) did; default: tp x pp x --dp, else 1",
    )
    device: str = opt("auto", "where to compute; auto: cuda where there is a card", choices=("auto", "cpu", "cuda"))
    tensor_model_parallel_size: int = opt(1, "tp: ranks that share each layer", flags=("--tp",))
    pipeline_model_parallel_size: int = opt(1, "pp: ranks that share the depth", flags=("--pp",))
    context_parallel_size: int = opt(1, "cp: ranks that share a sequence; only 1 so far", flags=("--cp",))
    data_parallel_size: int | None = opt(
        None, "dp: ranks that share the batch; follows from the number of ranks, which it checks", flags=("--dp",)
    )
    num_layers_per_virtual_pipeline_stage: int | None = opt(None, "layers per chunk of the interleaved schedule")
    num_virtual_stages_per_pipeline_rank: int | None = opt(None, "chunks per pipeline rank of the interleaved schedule")
    pipeline_model_parallel_layout: str | None = opt(None, "layers of each stage, as in 'Et|(tt|)*2tL'")
    decoder_first_pipeline_num_layers: int | None = opt(None, "layers of pipeline rank 0; the others share the rest")
    decoder_last_pipeline_num_layers: int | None = opt(
        None, "layers of the last pipeline rank; the others share the rest"
    )
    account_for_embedding_in_pipeline_split: bool = opt(False, "the embedding takes the place of a layer")
    account_for_loss_in_pipeline_split: bool = opt(False, "the head and the loss take the place of a layer")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = opt(
        None, "micro-batches that run through a chunk before the next chunk; default pp, the remainder spread over them"
    )
    use_tp_pp_dp_mapping: bool = opt(False, "number the ranks in the order tp, pp, dp; default: tp, dp, pp")
    pipeline_schedule: str = opt("1f1b", "order of micro-batches in the pipeline", choices=("1f1b", "gpipe"))
    use_distributed_optimizer: bool = opt(True, "shard optimizer state over dp (ZeRO-1)")
    overlap_grad_reduce: bool = opt(True, "reduce gradients during the last backward")
    grad_reduce_in_bf16: bool = opt(False, "round gradients to bf16 for their sum over dp; each rank adds up in fp32")
    overlap_param_gather: bool = opt(True, "gather weights during the next forward")
    ddp_bucket_size: int | None = opt(None, "elements per gradient bucket; default 40 million")
    distributed_backend: str | None = opt(None, "default: nccl on cuda, gloo on cpu", choices=("nccl", "gloo", "mpi"))
    distributed_timeout_minutes: float = opt(10.0, "how long start-up may take, minutes")
    distributed_timeout_seconds_after_init: float | None = opt(
        None, "how long a collective may take in training, seconds; default: as at start-up"
    )


@dataclass(frozen=True)
class TrainConfig:
    micro_batch_size: int = opt(0, "samples per micro-batch and dp rank")
    global_batch_size: int | None = opt(None, "samples per step; default micro_batch_size x dp")
    rampup_batch_size: tuple[int, ...] | None = opt(
        None, "START INCREMENT SAMPLES: grow the batch over SAMPLES samples"
    )
    step_batch_size_schedule: str | None = opt(
        None, "TOKENS:SIZE ...: the global batch from so many tokens on, as '0:768 250B:1536' (K, M, B, T)"
    )
    train_iters: int | None = opt(None, "steps")
    train_samples: int | None = opt(None, "samples, instead of --train-iters")
    iterations_to_skip: tuple[int, ...] | None = opt(None, "steps, from 1, whose samples are not trained on")
    skip_train: bool = opt(False, "evaluate what --load brings on the validation and the test set, and stop")
    seed: int = opt(1234, "of weights, dropout and data order")
    eval_iters: int = opt(100, "steps per evaluation; 0 or -1: no evaluation")
    eval_global_batch_size: int | None = opt(None, "samples per step of an evaluation; default: as --global-batch-size")
    eval_micro_batch_size: int | None = opt(None, "samples per micro-batch there; default: as --micro-batch-size")
    eval_interval: int | None = opt(None, "steps between evaluations; default: only at the end")
    exit_interval: int | None = opt(None, "save and stop at a step divisible by this")
    exit_duration_in_mins: float | None = opt(None, "save and stop after this many minutes")
    exit_signal_handler: bool = opt(False, "save and stop on SIGTERM, SIGINT and --exit-signal")
    exit_signal: str | None = opt(None, "save and stop on this signal", choices=EXIT_SIGNALS)
    recompute_granularity: str | None = opt(
        None,
        "activations to recompute in backward; selective: see --recompute-modules",
        choices=("selective", "full"),
        flags=("--recompute-activations=selective",),
    )
    recompute_modules: tuple[str, ...] = opt(
        ("core_attn",), "with selective: core_attn (scores and softmax), layernorm, mlp; one or more"
    )
    recompute_method: str | None = opt(
        None, "with full: every group of layers, or the first", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = opt(None, "uniform: layers per group; block: layers per stage")
    z_loss_coeff: float = opt(0.0, "z-loss: this times log^2 of the softmax's sum is added to the loss; PaLM: 1e-4")
    check_for_nan_in_loss_and_grad: bool = opt(True, "stop at a loss or gradient that is not finite")
    deterministic_mode: bool = opt(False, "refuse operations that may give other bits in another run")
    compile: bool = opt(False, "torch.compile between a block's matmuls; not with MEGALITE_KERNELS=triton")
    cuda_graph_impl: str = opt(
        "none",
        "local: record a micro-batch once and replay it, for small models",
        choices=("none", "local"),
        flags=("--enable-cuda-graph=local",),
    )
    dry_run: bool = opt(False, "print the plan and stop")


@dataclass(frozen=True)
class OptimConfig:
    optimizer: str = opt("adam", "adam is AdamW", choices=("adam", "sgd"))
    optimizer_impl: str = opt("auto", "whose AdamW; apex needs its CUDA extension", choices=("auto", "torch", "apex"))
    lr: float | None = opt(None, "peak learning rate")
    min_lr: float = opt(0.0, "learning rate at the end of decay")
    decoupled_lr: float | None = opt(None, "peak learning rate of the word embedding and the head")
    decoupled_min_lr: float | None = opt(None, "theirs at the end of decay; default: --min-lr")
    lr_decay_style: str = opt(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = opt(None, "steps of decay; default train_iters")
    lr_decay_samples: int | None = opt(None, "samples of decay; default train_samples")
    lr_warmup_iters: int = opt(0, "steps of linear warm-up")
    lr_warmup_samples: int = opt(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = opt(None, "warm-up as a part of the decay")
    lr_warmup_init: float = opt(0.0, "learning rate at step 0 of the warm-up")
    lr_wsd_decay_style: str = opt(
        "exponential", "shape of WSD's last phase", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = opt(None, "steps of WSD's last phase")
    lr_wsd_decay_samples: int | None = opt(None, "samples of WSD's last phase")
    weight_decay: float = opt(0.01, "decoupled decay; not on norms and biases")
    start_weight_decay: float | None = opt(None, "weight decay at the begin, with --weight-decay-incr-style")
    end_weight_decay: float | None = opt(None, "weight decay at the end of training, with the same")
    weight_decay_incr_style: str = opt(
        "constant", "how weight decay grows from its start to its end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = opt(1.0, "largest gradient norm; 0: no clipping")
    adam_beta1: float = opt(0.9, "decay of the first moment")
    adam_beta2: float = opt(0.999, "decay of the second moment")
    adam_eps: float = opt(1e-8, "added to the root of the second moment")
    exp_avg_dtype: str = opt("fp32", "of the first moment; bf16 is rounded at random", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = opt("fp32", "of the second moment; bf16 is rounded at random", choices=("fp32", "bf16"))
    sgd_momentum: float = opt(0.9, "momentum of sgd")


@dataclass(frozen=True)
class PrecisionConfig:
    bf16: bool = opt(False, "bfloat16 weights and activations; gradients and main weights in fp32")
    fp16: bool = opt(False, "float16 with loss scaling; gradients and main weights in fp32")
    loss_scale: float | None = opt(None, "constant loss scale for fp16; default: dynamic")
    initial_loss_scale: float = opt(2.0**32, "where dynamic scaling starts")
    min_loss_scale: float = opt(1.0, "lowest dynamic scale")
    loss_scale_window: int = opt(1000, "clean steps before the scale doubles")
    hysteresis: int = opt(2, "overflows before the scale halves")


@dataclass(frozen=True)
class DataConfig:
    data_path: tuple[str, ...] | None = opt(None, "PREFIX, or WEIGHT PREFIX pairs, of .bin/.idx files; see --split")
    train_data_path: tuple[str, ...] | None = opt(None, "the same for training only; no split")
    valid_data_path: tuple[str, ...] | None = opt(None, "the same for validation only; NAME=PREFIX for several sets")
    test_data_path: tuple[str, ...] | None = opt(None, "the same for the test only")
    data_args_path: str | None = opt(None, "file that holds what --data-path would, for long blends")
    per_split_data_args_path: str | None = opt(None, "JSON file with train, valid, test: the three lists above")
    multiple_validation_sets: bool = opt(False, "each prefix of --valid-data-path is a set with a loss of its own")
    validation_set_names: tuple[str, ...] | None = opt(None, "their names; default: the last part of each prefix")
    split: str | None = opt(None, "parts of the documents for training, validation, test; default 969, 30, 1")
    dataloader_type: str = opt(
        "single",
        "order of samples: each epoch is shuffled by itself, also with cyclic",
        choices=("single", "cyclic"),
        refused={"external": "it takes a loader of your own; give --data-path"},
    )
    data_cache_path: str | None = opt(None, "directory of index caches")
    mmap_bin_files: bool = opt(True, "map token files; off: read them, where maps are slow or files may shrink")
    mock_data: bool = opt(False, "generated tokens instead of files")
    eod_mask_loss: bool = opt(False, "no loss after an end-of-document token")
    reset_position_ids: bool = opt(False, "count positions from the begin of each document")
    reset_attention_mask: bool = opt(False, "attend within the document only (variable-length attention)")
    document_packing: str = opt(
        "concatenate",
        "documents end to end, or as few as possible cut (best-fit packing; what is left of a sample is padding)",
        choices=("concatenate", "best-fit"),
    )
    fim_data: bool = opt(False, "fill-in-the-middle: rearrange documents of the training data")
    fim_rate: float = opt(0.5, "share of documents that are rearranged")
    fim_spm_rate: float = opt(0.5, "share of these as suffix, prefix, middle; the others as prefix, suffix, middle")
    fim_split_sample: str | None = opt(None, "token that parts a document into fragments, each cut by itself")
    fim_fragment_rate: float | None = opt(None, "share of fragments that are rearranged")
    fim_no_prefix: str | None = opt(None, "text: what begins with it stays as it is")
    fim_prefix_token: str = opt("<fim_prefix>", "special token of the tokenizer")
    fim_middle_token: str = opt("<fim_middle>", "special token of the tokenizer")
    fim_suffix_token: str = opt("<fim_suffix>", "special token of the tokenizer")
    fim_pad_token: str = opt("<fim_pad>", "special token of the tokenizer, for samples that became shorter")
    fim_eod_token: str | None = opt(None, "token that ends a document; default: the tokenizer's own")
    fim_cut_tokens: bool = opt(False, "cut documents between tokens instead of characters: faster, a little worse")
    tokenizer_type: str | None = opt(
        None,
        "kind of tokenizer; with --vocab-file and --merge-file GPT2BPETokenizer",
        choices=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
        ),
        refused={
            **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), "BERT's; use HuggingFaceTokenizer"),
            "MultimodalTokenizer": "images are not supported; use the tokenizer of its text",
            "NullMultimodalTokenizer": "images are not supported; use NullTokenizer",
            "SFTTokenizer": "conversations are not supported; use HuggingFaceTokenizer on plain text",
        },
    )
    tokenizer_model: str | None = opt(None, "tokenizer file")
    tiktoken_pattern: str | None = opt(None, "how TikTokenizer splits text: v1, v2, gpt2, cl100k, o200k")
    vocab_file: str | None = opt(None, "GPT-2 vocab.json")
    merge_file: str | None = opt(None, "GPT-2 merges.txt")
    vocab_size: int | None = opt(None, "true vocabulary, at least the tokenizer's; default: the tokenizer's")
    padded_vocab_size: int | None = opt(
        None, "rows of the embedding, instead of the vocabulary rounded up by --make-vocab-size-divisible-by"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    save: str | None = opt(
        None, "directory to save checkpoints in, or a URL; without an interval only when the run ends or stops"
    )
    save_local: str | None = opt(None, "fast directory to save in first; from it, --save is filled while training")
    save_interval: int | None = opt(None, "steps between checkpoints", flags=("--persistent-save-interval",))
    save_interval_mins: float | None = opt(None, "minutes between checkpoints, also beside --save-interval")
    asynchronous_save: str = opt(
        "auto",
        "write in the background; auto: on cuda",
        choices=("auto", "on", "off"),
        flags=("--async-save=on", "--no-async-save=off"),
    )
    keep_last: int | None = opt(None, "checkpoints to keep; default: all, 1 with --save-retain-interval")
    save_retain_interval: int | None = opt(None, "checkpoints of steps divisible by this are never deleted")
    no_save_optim: bool = opt(False, "save weights only; such a checkpoint does not resume a run exactly")
    load: str | None = opt(
        None,
        "directory or URL to resume from, or Hugging Face model to begin with; one that has nothing starts afresh",
    )
    ckpt_step: int | None = opt(
        None, "step of the checkpoint to load; default: the newest valid one; the same training started again goes on"
    )
    no_load_optim: bool = opt(False, "load weights, step and data position, not the optimizer's state")
    finetune: bool = opt(False, "load weights only, and start at step 0")
    override_opt_param_scheduler: bool = opt(
        False,
        "rates and weight decay as here, whatever the checkpoint had",
        flags=("--override-lr-scheduler=true",),
    )
    use_checkpoint_opt_param_scheduler: bool = opt(
        False, "rates and weight decay as in the checkpoint", flags=("--use-checkpoint-lr-scheduler=true",)
    )
    pretrained_checkpoint: str | None = opt(
        None, "directory, also of Hugging Face, to take weights from when --load holds no checkpoint"
    )
    use_checkpoint_args: bool = opt(False, "take the model's options from the checkpoint")
    exit_on_missing_checkpoint: bool = opt(False, "stop when --load holds no checkpoint")
    export_hf: str | None = opt(None, "new directory that becomes a Hugging Face model after the last step")


@dataclass(frozen=True)
class LogConfig:
    log_interval: int | None = opt(
        None, "steps per log line; default: a fiftieth of the run, 1 to 100; 100 in Megatron's style"
    )
    log_style: str = opt(
        "auto",
        "form of the log; auto: Megatron-LM's for a command line that only it has, else megalite's",
        choices=("auto", "megalite", "megatron"),
    )
    log_throughput: bool = opt(False, "TFLOP/s in Megatron's log line")
    log_params_norm: bool = opt(False, "L2 norm of all parameters, after the step")
    log_num_zeros_in_grad: bool = opt(False, "number of gradient elements that are exactly zero")
    log_progress: bool = opt(False, "progress.txt beside the checkpoints: starts, saves, TFLOP/s, tokens")
    log_memory_interval: int | None = opt(None, "steps per memory line; a multiple of --log-interval")
    log_device_memory_used: bool = opt(False, "in the memory line: what all processes hold of the card")
    timing_log_level: int = opt(0, "timers: 0 evaluations and saves; 1 parts of a step; 2 its micro-batches")
    timing_log_option: str = opt("minmax", "timers over ranks", choices=("max", "minmax", "all"))
    barrier_with_level_1_timing: bool = opt(True, "ranks wait for each other at the parts that level 1 times")
    run_dir: str | None = opt(None, "directory of logs; default: --save, else runs/last")
    tensorboard_dir: str | None = opt(None, "directory of TensorBoard events")
    tensorboard_log_interval: int = opt(1, "steps per TensorBoard point")
    tensorboard_queue_size: int = opt(1000, "TensorBoard events held in memory")
    log_timers_to_tensorboard: bool = opt(False, "timers in TensorBoard, the slowest rank's, seconds per step")
    log_loss_scale_to_tensorboard: bool = opt(True, "the loss scale in TensorBoard")
    log_validation_ppl_to_tensorboard: bool = opt(False, "perplexity of validation sets in TensorBoard")
    log_memory_to_tensorboard: bool = opt(False, "memory of rank 0 in TensorBoard, bytes")
    log_world_size_to_tensorboard: bool = opt(False, "the number of ranks in TensorBoard")
    wandb_project: str | None = opt(None, "Weights & Biases project")
    wandb_exp_name: str | None = opt(None, "Weights & Biases run name")
    wandb_entity: str | None = opt(None, "Weights & Biases user or team")
    wandb_save_dir: str | None = opt(None, "directory of Weights & Biases' own files")
    peak_tflops: float | None = opt(None, "dense peak of one device, TFLOP/s; default: a table, measured on cpu")
    profile_pipeline: int | None = opt(None, "step whose pipeline is timed into timeline.json")


@dataclass(frozen=True)
class OperationsConfig:
    """How a run is watched and stopped; nothing here changes what it trains."""

    manual_gc: bool = opt(False, "Python's garbage collector runs only when told, at the same step on all ranks")
    manual_gc_interval: int = opt(0, "steps between collections with --manual-gc; 0: at evaluations only")
    manual_gc_eval: bool = opt(True, "collect before and after evaluations with --manual-gc")
    empty_unused_memory_level: int = opt(0, "give CUDA memory back: 1 before each update, 2 also after it")
    profile: bool = opt(False, "profile steps: cudaProfilerStart and Stop, for nsys; or --use-pytorch-profiler")
    use_pytorch_profiler: bool = opt(False, "with --profile: torch's profiler, into trace/ of the run directory")
    profile_step_start: int = opt(10, "steps before the first that is profiled")
    profile_step_end: int = opt(12, "the last step that is profiled")
    profile_ranks: tuple[int, ...] = opt((), "ranks that are profiled; default: all")
    pytorch_profiler_collect_shapes: bool = opt(False, "shapes of tensors in torch's profile")
    pytorch_profiler_collect_callstack: bool = opt(False, "call stacks in torch's profile")
    record_memory_history: bool = opt(False, "write CUDA's memory history at each log line, for torch's viewer")
    memory_snapshot_path: str = opt("snapshot.pickle", "file of --record-memory-history; _RANK is added")
    check_weight_hash_across_dp_replicas_interval: int | None = opt(
        None, "steps between checks that all copies of each weight are the same bits"
    )


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "operations": OperationsConfig,
}


def local_processes(p: ParallelConfig) -> int:
    """How many ranks a run has that no launcher starts."""
    if p.nproc is not None:
        return p.nproc
    if p.data_parallel_size is None:
        return 1
    return p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.data_parallel_size


REQUIRED = frozenset({"num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"})


def options() -> Iterator[tuple[str, Field[Any]]]:
    """Every option, as (section, field)."""
    for section, cls in SECTIONS.items():
        for f in fields(cls):
            yield section, f


MEGATRON_LOG = (  # what asks for something in Megatron's log or TensorBoard by its name
    "log_throughput",
    "log_params_norm",
    "log_num_zeros_in_grad",
    "log_progress",
    "log_timers_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_world_size_to_tensorboard",
)


def resolved_style(config: Config, megatron_spelling: bool = False) -> str:
    """megalite or megatron: what `log_style` says, or, where it is auto, what suits who wrote the command line.
    `megatron_spelling`: it holds a flag that only Megatron-LM has, as --use-mcore-models."""
    if config.log.log_style != "auto":
        return config.log.log_style
    asked = megatron_spelling or any(getattr(config.log, name) for name in MEGATRON_LOG)
    return "megatron" if asked else "megalite"


def log_steps(config: Config, steps: int) -> int:
    """Steps per log line of a run of `steps`.

    >>> [log_steps(Config(), n) for n in (20, 1000, 500_000)]
    [1, 20, 100]
    """
    if config.log.log_interval is not None:
        return config.log.log_interval
    return 100 if resolved_style(config) == "megatron" else max(1, min(100, steps // 50))


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of both; the same for every tp that divides `divisible_by`.

    >>> padded_vocab_size(50257, 128, 1), padded_vocab_size(50257, 128, 8)
    (50304, 50304)
    """
    multiple = math.lcm(divisible_by, tp)
    return -(-vocab_size // multiple) * multiple


def convert_all(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Option names to values as (values of the right type, name -> problem). Unknown names raise KeyError."""
    fields_, made, wrong = {f.name: f for _, f in options()}, {}, {}
    for name, value in values.items():
        try:
            made[name] = convert(fields_[name], value)
        except ValueError as error:
            wrong[name] = str(error)
    return made, wrong


def over_preset(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Option names to values: `given`, and of `preset` what is not given. A preset's vocabulary is for runs without a
    tokenizer.

    >>> over_preset({"num_layers": 8, "vocab_size": 8192}, {"tokenizer_type": "ByteTokenizer"})
    {'num_layers': 8, 'tokenizer_type': 'ByteTokenizer'}
    """
    own = {**given, **_implied(given)}.get("tokenizer_type") not in (None, "NullTokenizer")
    return {name: value for name, value in preset.items() if name != "vocab_size" or not own} | dict(given)


def _implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """What options say of others: GPT-2's two files are its tokenizer, as in Megatron-LM, and rows that are given are
    the multiple to round up to."""
    more: dict[str, Any] = {}
    if values.get("tokenizer_type") is None and values.get("vocab_file") and values.get("merge_file"):
        more["tokenizer_type"] = "GPT2BPETokenizer"
    if values.get("padded_vocab_size"):
        more["make_vocab_size_divisible_by"] = values["padded_vocab_size"]
    return more


def build(values: Mapping[str, Any]) -> Config:
    """A Config from option names to values; unknown names raise KeyError, wrong types ConfigError."""
    made, wrong = convert_all({**values, **_implied(values)})
    if wrong:
        raise ConfigError(list(wrong.values()))
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for section, f in options():
        if f.name in made:
            sections[section][f.name] = made[f.name]
    return Config(**{name: cls(**sections[name]) for name, cls in SECTIONS.items()})


def gelu_form(*, add_bias_linear: bool = True, bias_gelu_fusion: bool = True, openai_gelu: bool = False) -> str:
    """What gelu means in Megatron-LM: its kernel for bias and gelu has the tanh form, without it gelu is exact.

    >>> gelu_form(), gelu_form(add_bias_linear=False), gelu_form(bias_gelu_fusion=False)
    ('gelu', 'gelu_erf', 'gelu_erf')
    """
    return "gelu" if openai_gelu or (add_bias_linear and bias_gelu_fusion) else "gelu_erf"


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a command line or file gives them, with what Megatron-LM makes of those that are left out: the form of
    gelu, and one group with --group-query-attention. What a checkpoint stores is complete and does not come here."""
    values = dict(values)
    if values.get("use_checkpoint_args"):
        return values
    if "activation" not in values:
        names = ("add_bias_linear", "bias_gelu_fusion", "openai_gelu")
        values["activation"] = gelu_form(**{name: values[name] for name in names if name in values})
    if values.get("group_query_attention"):
        values.setdefault("num_query_groups", 1)
    return values


class ConfigError(ValueError):
    """`problems`: one line each."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def base_type(f: Field[Any]) -> str:
    """int, float, bool, str, ints or strs."""
    name = str(f.type).replace(" | None", "")
    return {"tuple[int, ...]": "ints", "tuple[str, ...]": "strs"}.get(name, name)


def convert(f: Field[Any], value: Any) -> Any:
    """`value`, of a TOML file or preset, as the field's type. No text becomes a number."""
    kind = base_type(f)
    bad = ValueError(f"{f.name}={value!r} is not {'an' if kind[0] == 'i' else 'a'} {kind}; write it as one")
    if kind in ("ints", "strs"):
        item = int if kind == "ints" else str
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, bool) or not isinstance(v, item) for v in values):
            raise bad
        return tuple(values)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind == "str" and isinstance(value, str):
        choices, refused = f.metadata["choices"], f.metadata["refused"]
        if value in refused:
            raise ValueError(f"{f.name}={value} is not supported: {refused[value]}")
        if choices and value not in choices:
            raise ValueError(f"{f.name}={value!r} is not one of {', '.join(choices)}; use one of them")
        return value
    raise bad
