"""The configuration: frozen dataclasses with Megatron-LM's names and defaults, and the check that reports every
contradiction at once.

A field is one option: its name in kebab case is the flag, its `help` states the unit. `flags` lists extra spellings;
a bool that is on by default is switched off by --no-NAME or --disable-NAME. Pure: no torch, so that a bad command
line is refused before anything is imported or started.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from megalite.pattern import read_pattern


def opt(default: Any, help: str, *, choices: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> Any:
    """A field of the configuration. `flags`: other spellings; "--x=VALUE" sets the field to VALUE."""
    metadata = {"help": help, "choices": choices, "flags": flags}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = opt(0, "transformer layers")
    hidden_size: int = opt(0, "model width D")
    ffn_hidden_size: int | None = opt(None, "feed-forward width; default 4 D, or 8/3 D in steps of 64 with --swiglu")
    num_attention_heads: int = opt(0, "query heads H")
    kv_channels: int | None = opt(None, "head size K; default D / H")
    group_query_attention: bool = opt(False, "share key/value heads in --num-query-groups groups")
    num_query_groups: int | None = opt(None, "key/value heads G with --group-query-attention; default H")
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
    parallel_residual: bool = opt(False, "attention and feed-forward side by side on the same input, as in GPT-NeoX")
    position_embedding_type: str = opt(
        "learned_absolute",
        "positions",
        choices=("learned_absolute", "rope", "none"),
        flags=("--use-rotary-position-embeddings=rope", "--no-position-embedding=none"),
    )
    rotary_base: float = opt(10000.0, "base of the rotary wavelengths")
    rotary_percent: float = opt(1.0, "part of each head that rotates")
    use_rope_scaling: bool = opt(False, "Llama-3 scaling of rotary wavelengths")
    rope_scaling_factor: float = opt(8.0, "stretch of the longest wavelengths with --use-rope-scaling")
    untie_embeddings_and_output_weights: bool = opt(False, "the head has weights of its own")
    make_vocab_size_divisible_by: int = opt(128, "the vocabulary is padded to a multiple of this (and of tp)")
    hidden_dropout: float = opt(0.1, "dropout after embedding, attention and feed-forward")
    attention_dropout: float = opt(0.1, "dropout of attention weights")
    init_method_std: float = opt(0.02, "standard deviation of initial weights")
    qk_layernorm: bool = opt(False, "norm on each query and key head")
    window_size: tuple[int, ...] | None = opt(
        None, "LEFT,0: a query sees its own key and LEFT before it; default: all before it"
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
        return self.num_query_groups or self.num_attention_heads

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
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer: how many keys a query sees, itself included; None: all before it."""
        if self.window_size is None:
            return (None,) * self.num_layers
        window, pattern = self.window_size[0] + 1, self.window_attn_skip_freq
        bits = (True,) * self.num_layers if pattern is None else read_pattern(pattern, self.num_layers)
        return tuple(window if bit else None for bit in bits)


@dataclass(frozen=True)
class ParallelConfig:
    nproc: int = opt(1, "local processes to start when no launcher (torchrun, srun) did")
    device: str = opt("auto", "where to compute; auto: cuda where there is a card", choices=("auto", "cpu", "cuda"))
    tensor_model_parallel_size: int = opt(1, "tp: ranks that share each layer")
    pipeline_model_parallel_size: int = opt(1, "pp: ranks that share the depth")
    context_parallel_size: int = opt(1, "cp: ranks that share a sequence; only 1 so far")
    num_layers_per_virtual_pipeline_stage: int | None = opt(None, "layers per chunk of the interleaved schedule")
    num_virtual_stages_per_pipeline_rank: int | None = opt(None, "chunks per pipeline rank of the interleaved schedule")
    pipeline_model_parallel_layout: str | None = opt(None, "layers of each stage, as in 'Et|(tt|)*2tL'")
    pipeline_schedule: str = opt("1f1b", "order of micro-batches in the pipeline", choices=("1f1b", "gpipe"))
    use_distributed_optimizer: bool = opt(True, "shard optimizer state over dp (ZeRO-1)")
    overlap_grad_reduce: bool = opt(True, "reduce gradients during the last backward")
    overlap_param_gather: bool = opt(True, "gather weights during the next forward")
    ddp_bucket_size: int | None = opt(None, "elements per gradient bucket; default 40 million")
    distributed_backend: str | None = opt(None, "default: nccl on cuda, gloo on cpu", choices=("nccl", "gloo"))
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
    train_iters: int | None = opt(None, "steps")
    train_samples: int | None = opt(None, "samples, instead of --train-iters")
    seed: int = opt(1234, "of weights, dropout and data order")
    eval_iters: int = opt(100, "steps per evaluation")
    eval_interval: int | None = opt(None, "steps between evaluations; default: only at the end")
    exit_interval: int | None = opt(None, "save and stop at a step divisible by this")
    exit_duration_in_mins: float | None = opt(None, "save and stop after this many minutes")
    exit_signal_handler: bool = opt(False, "save and stop on SIGTERM")
    recompute_granularity: str | None = opt(
        None,
        "activations to recompute in backward; selective: attention core",
        choices=("selective", "full"),
        flags=("--recompute-activations=selective",),
    )
    recompute_method: str | None = opt(
        None, "with full: every group of layers, or the first", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = opt(None, "uniform: layers per group; block: layers per stage")
    z_loss_coeff: float = opt(0.0, "z-loss: this times log^2 of the softmax's sum is added to the loss; PaLM: 1e-4")
    check_for_nan_in_loss_and_grad: bool = opt(True, "stop at a loss or gradient that is not finite")
    compile: bool = opt(False, "torch.compile between a block's matmuls; not with MEGALITE_KERNELS=triton")
    cuda_graph_impl: str = opt(
        "none", "local: record a micro-batch once and replay it, for small models", choices=("none", "local")
    )
    dry_run: bool = opt(False, "print the plan and stop")


@dataclass(frozen=True)
class OptimConfig:
    optimizer: str = opt("adam", "adam is AdamW", choices=("adam", "sgd"))
    optimizer_impl: str = opt("auto", "whose AdamW; apex needs its CUDA extension", choices=("auto", "torch", "apex"))
    lr: float | None = opt(None, "peak learning rate")
    min_lr: float = opt(0.0, "learning rate at the end of decay")
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
    fim_cut_tokens: bool = opt(False, "cut documents between tokens instead of characters: faster, a little worse")
    tokenizer_type: str | None = opt(
        None,
        "kind of tokenizer",
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
    )
    tokenizer_model: str | None = opt(None, "tokenizer file")
    tiktoken_pattern: str | None = opt(None, "how TikTokenizer splits text: v1, v2, gpt2, cl100k, o200k")
    vocab_file: str | None = opt(None, "GPT-2 vocab.json")
    merge_file: str | None = opt(None, "GPT-2 merges.txt")
    vocab_size: int | None = opt(None, "true vocabulary, at least the tokenizer's; default: the tokenizer's")


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
    pretrained_checkpoint: str | None = opt(
        None, "directory, also of Hugging Face, to take weights from when --load holds no checkpoint"
    )
    use_checkpoint_args: bool = opt(False, "take the model's options from the checkpoint")
    exit_on_missing_checkpoint: bool = opt(False, "stop when --load holds no checkpoint")
    export_hf: str | None = opt(None, "new directory that becomes a Hugging Face model after the last step")


@dataclass(frozen=True)
class LogConfig:
    log_interval: int = opt(100, "steps per log line")
    log_style: str = opt("megalite", "form of the log line", choices=("megalite", "megatron"))
    log_throughput: bool = opt(False, "TFLOP/s in Megatron's log line")
    run_dir: str | None = opt(None, "directory of logs; default: --save, else runs/last")
    tensorboard_dir: str | None = opt(None, "directory of TensorBoard events")
    wandb_project: str | None = opt(None, "Weights & Biases project")
    wandb_exp_name: str | None = opt(None, "Weights & Biases run name")
    peak_tflops: float | None = opt(None, "dense peak of one device, TFLOP/s; default: a table, measured on cpu")
    profile_pipeline: int | None = opt(None, "step whose pipeline is timed into timeline.json")


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


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
}


def options() -> Iterator[tuple[str, Field[Any]]]:
    """Every option, as (section, field)."""
    for section, cls in SECTIONS.items():
        for f in fields(cls):
            yield section, f


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of both; the same for every tp that divides `divisible_by`.

    >>> padded_vocab_size(50257, 128, 1), padded_vocab_size(50257, 128, 8)
    (50304, 50304)
    """
    multiple = math.lcm(divisible_by, tp)
    return -(-vocab_size // multiple) * multiple


def build(values: Mapping[str, Any]) -> Config:
    """A Config from option names to values; unknown names raise KeyError, wrong types ConfigError."""
    problems, sections = [], {name: {} for name in SECTIONS}
    where = {f.name: (section, f) for section, f in options()}
    for name, value in values.items():
        section, f = where[name]
        try:
            sections[section][name] = convert(f, value)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return Config(**{name: cls(**sections[name]) for name, cls in SECTIONS.items()})


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
        choices = f.metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{f.name}={value!r} is not one of {', '.join(choices)}; use one of them")
        return value
    raise bad


def read_toml(path: str) -> dict[str, Any]:
    """Option names to values from a TOML file. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError([f"config={path!r} cannot be read ({error.strerror}); give a TOML file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"config={path!r} is not UTF-8 text ({error}); give a TOML file"]) from None
    return parse_toml(text, path)


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Option names to values from a TOML text, with or without [section] tables; `path` names it in errors."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([f"config={path!r} is not TOML ({error}); mend that line"]) from None
    known = {f.name: section for section, f in options()}
    values: dict[str, Any] = {}
    problems = []

    def take(name: str, value: Any, section: str | None) -> None:
        name = name.replace("-", "_")
        if name != "preset" and (name not in known or (section is not None and known[name] != section)):
            hint = f"it belongs in [{known[name]}]" if name in known else "see --help for the options"
            problems.append(f"config={path!r}: unknown key {name} in [{section or 'top level'}]; {hint}")
        elif name in values:
            problems.append(f"config={path!r}: {name} is given twice; keep one")
        else:
            values[name] = value

    for key, value in data.items():
        if isinstance(value, dict):
            if key not in SECTIONS:
                problems.append(f"config={path!r}: unknown section [{key}]; sections are {', '.join(SECTIONS)}")
                continue
            for name, inner in value.items():
                take(name, inner, key)
        else:
            take(key, value, None)
    if problems:
        raise ConfigError(problems)
    return values


def differences(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> option -> value, for what differs from the defaults."""
    result: dict[str, dict[str, Any]] = {}
    for section, f in options():
        value = getattr(getattr(config, section), f.name)
        if value != f.default:
            result.setdefault(section, {})[f.name] = value
    return result


def to_toml(config: Config) -> str:
    """A TOML text that makes the same run again with --config."""

    def literal(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, tuple):
            return "[" + ", ".join(literal(v) for v in value) + "]"
        if isinstance(value, str):
            escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' or ord(c) == 127 else c for c in value)
            return f'"{escaped}"'
        return repr(value)

    lines = []
    for section, values in differences(config).items():
        lines += [f"[{section}]", *(f"{name} = {literal(value)}" for name, value in values.items()), ""]
    return "\n".join(lines)


def without_effect(config: Config) -> list[str]:
    """Options that do nothing, or less than expected, beside the others; Megatron-LM takes them in silence, so they are
    no error."""
    c, t = config.checkpoint, config.train
    notes, window = [], config.model.window_size
    if window is not None and len(window) == 2 and 0 < config.model.seq_length <= window[0] + 1:
        notes.append(f"window_size={_numbers(window)} has no effect on sequences of {config.model.seq_length} tokens")
    if c.save_interval is not None and c.save is None:
        notes.append(f"save_interval={c.save_interval} has no effect without --save")
    if c.save is not None and c.save_interval is None and c.save_interval_mins is None:
        notes.append(f"save={c.save} without --save-interval saves only when the run ends or stops; a crash loses all")
    if t.recompute_num_layers is not None and t.recompute_granularity != "full":
        notes.append(
            f"recompute_num_layers={t.recompute_num_layers} has no effect without --recompute-granularity full"
        )
    return notes


def check(config: Config, world_size: int | None = None, *, complete: bool = False) -> list[str]:
    """Every contradiction, each as `name=value breaks rule; remedy`. `world_size` adds what depends on it; `complete`:
    also what --load could still have brought, a vocabulary."""
    m, p, t, o, d, c = config.model, config.parallel, config.train, config.optim, config.data, config.checkpoint
    problems: list[str] = []
    say, incomplete = problems.append, False
    for section, f in options():
        value = getattr(getattr(config, section), f.name)
        if isinstance(value, float) and not math.isfinite(value):
            say(f"{f.name}={value} is not finite; give a number")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
            say(f"{f.name}={value} is negative; give 0 or more")
        elif value == 0 and f.name in REQUIRED and section == "model" and c.use_checkpoint_args:
            incomplete = True  # the checkpoint will say; checked again then
        elif value == 0 and f.name in REQUIRED:
            say(f"{f.name}=0 is not set; give {'--' + f.name.replace('_', '-')} or a --preset")
        elif value == 0 and f.name in _POSITIVE:
            say(f"{f.name}=0 is too small; give 1 or more")
    if o.lr is None:
        say("lr is not set; give --lr")
    if problems or incomplete:
        return problems
    assert o.lr is not None
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(o, name) == "bf16" and (o.optimizer != "adam" or o.optimizer_impl == "apex"):
            say(f"{name}=bf16 is for the AdamW that is built in; use --optimizer adam, --optimizer-impl auto")
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    heads = m.num_attention_heads
    if m.kv_channels is None and m.hidden_size % heads:
        say(f"hidden_size={m.hidden_size} is not a multiple of num_attention_heads={heads}; or set --kv-channels")
    elif m.position_embedding_type == "rope" and int(m.head_size * m.rotary_percent) % 2:
        say(f"rotary_percent={m.rotary_percent} rotates an odd number of {m.head_size} channels; make it even")
    if heads % tp:
        say(f"tensor_model_parallel_size={tp} does not divide num_attention_heads={heads}: use {_divisors(heads)}")
    if m.num_query_groups is not None and not m.group_query_attention:
        say(f"num_query_groups={m.num_query_groups} has no effect; add --group-query-attention")
    if heads % m.groups:
        say(f"num_query_groups={m.groups} does not divide num_attention_heads={heads}: use {_divisors(heads)}")
    elif m.groups % tp and tp % m.groups:
        say(f"tensor_model_parallel_size={tp} and num_query_groups={m.groups}: neither divides the other; change one")
    if m.ffn_size < 1:
        say(f"hidden_size={m.hidden_size} is too small for the default width of swiglu; give --ffn-hidden-size")
    if m.ffn_size % tp:
        say(f"tensor_model_parallel_size={tp} does not divide ffn_hidden_size={m.ffn_size}; change one")
    if m.seq_length % tp:
        say(f"tensor_model_parallel_size={tp} does not divide seq_length={m.seq_length}; change one")
    if m.positions < m.seq_length:
        say(f"max_position_embeddings={m.positions} is below seq_length={m.seq_length}; make it at least that")
    problems += _window_problems(m)
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(m, name) >= 1:
            say(f"{name}={getattr(m, name)} drops everything; use less than 1")
    if not 0 < m.rotary_percent <= 1:
        say(f"rotary_percent={m.rotary_percent} is not in (0, 1]; use 1.0")
    if p.context_parallel_size != 1:
        say(f"context_parallel_size={p.context_parallel_size} is not supported yet; use 1")
    vpp = 1
    chunk, chunks = p.num_layers_per_virtual_pipeline_stage, p.num_virtual_stages_per_pipeline_rank
    if chunk is not None and chunks is not None:
        say(
            f"num_layers_per_virtual_pipeline_stage={chunk} and num_virtual_stages_per_pipeline_rank={chunks}: give one"
        )
    if p.pipeline_model_parallel_layout is not None:
        if chunk is not None or chunks is not None:
            say("pipeline_model_parallel_layout already says the virtual stages; leave the other flag away")
    elif chunk is not None:
        if m.num_layers % (pp * chunk):
            say(
                f"num_layers_per_virtual_pipeline_stage={chunk} x pp {pp} does not divide num_layers={m.num_layers}"
                "; change one"
            )
        else:
            vpp = m.num_layers // (pp * chunk)
    elif chunks is not None:
        vpp = chunks
    if pp == 1 and (chunk is not None or (chunks or 1) > 1):
        say("virtual pipeline stages need pipeline_model_parallel_size above 1; drop them or raise it")
    if p.pipeline_model_parallel_layout is None and pp * vpp > m.num_layers:
        say(f"pipeline_model_parallel_size={pp} x {vpp} chunks is above num_layers={m.num_layers}: use fewer")
    if t.train_iters is not None and t.train_samples is not None:
        say("train_iters and train_samples exclude each other; give one")
    if t.train_iters is None and t.train_samples is None:
        say("train_iters is not set; give --train-iters or --train-samples")
    by_samples = t.train_samples is not None
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        wrong = f"{name}_iters" if by_samples else f"{name}_samples"
        if getattr(o, wrong):
            right = f"{name}_samples" if by_samples else f"{name}_iters"
            say(f"{wrong}={getattr(o, wrong)} with {'train_samples' if by_samples else 'train_iters'}; use {right}")
    if o.lr_warmup_fraction is not None and (o.lr_warmup_iters or o.lr_warmup_samples):
        say(f"lr_warmup_fraction={o.lr_warmup_fraction} and a warm-up count; give one")
    if o.lr_warmup_fraction is not None and not 0 <= o.lr_warmup_fraction <= 1:
        say(f"lr_warmup_fraction={o.lr_warmup_fraction} is not in [0, 1]; give a fraction of the decay")
    if o.lr_warmup_init > o.lr:
        say(f"lr_warmup_init={o.lr_warmup_init} is above lr={o.lr}; lower it")
    unit = "samples" if by_samples else "iters"
    decay = getattr(o, f"lr_decay_{unit}") or getattr(t, f"train_{unit}")
    warm_up = getattr(o, f"lr_warmup_{unit}")
    if o.lr_warmup_fraction is not None and decay:
        warm_up = o.lr_warmup_fraction * decay
    if decay and warm_up >= decay and o.lr_warmup_fraction is None:
        say(f"lr_warmup_{unit}={warm_up} is not below lr_decay_{unit}={decay}; shorten the warm-up")
    if o.min_lr > o.lr:
        say(f"min_lr={o.min_lr} is above lr={o.lr}; lower it")
    if o.lr_decay_style == "WSD" and not (o.lr_wsd_decay_samples if by_samples else o.lr_wsd_decay_iters):
        say(f"lr_decay_style=WSD needs --lr-wsd-decay-{'samples' if by_samples else 'iters'}")
    wsd = getattr(o, f"lr_wsd_decay_{unit}") or 0
    if o.lr_decay_style == "WSD" and decay and wsd > decay - warm_up:
        say(f"lr_wsd_decay_{unit}={wsd} is longer than what the warm-up leaves, {decay - warm_up:g}; shorten it")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(o, name) >= 1:
            say(f"{name}={getattr(o, name)} is not below 1; use 0.9 to 0.999")
    scale = config.precision
    if scale.min_loss_scale > scale.initial_loss_scale:
        say(f"min_loss_scale={scale.min_loss_scale} is above initial_loss_scale={scale.initial_loss_scale}; lower it")
    if config.precision.bf16 and config.precision.fp16:
        say("bf16 and fp16 exclude each other; give one")
    if t.recompute_granularity == "full" and t.recompute_method is None:
        say("recompute_granularity=full needs --recompute-method uniform or block")
    if t.recompute_granularity != "full" and t.recompute_method is not None:
        say(f"recompute_method={t.recompute_method} has no effect; add --recompute-granularity full")
    if t.rampup_batch_size is not None and len(t.rampup_batch_size) != 3:
        say(f"rampup_batch_size={t.rampup_batch_size} is not three numbers; give START INCREMENT SAMPLES")
    elif t.rampup_batch_size is not None and t.global_batch_size is not None:
        first, increment, _ = t.rampup_batch_size
        if first > t.global_batch_size or increment < 1 or (t.global_batch_size - first) % increment:
            say(
                f"rampup_batch_size={first} {increment}: global_batch_size={t.global_batch_size} is not reached from "
                f"{first} in steps of {increment}; choose a divisor of {t.global_batch_size - first}"
            )
    if c.save is not None and c.save_local == c.save:
        say(f"save_local={c.save_local!r} is --save; give another directory, or leave it away")
    if c.save_local is not None and "://" in c.save_local:
        say(f"save_local={c.save_local!r} is a URL; give a directory on a fast disk")
    for name in ("keep_last", "save_retain_interval", "no_save_optim", "save_local"):
        if c.save is None and getattr(c, name):
            say(f"{name}={getattr(c, name)} has no effect; add --save")
    for name in ("ckpt_step", "no_load_optim", "finetune"):
        if c.load is None and getattr(c, name):
            say(f"{name}={getattr(c, name)} has no effect; add --load")
    if c.use_checkpoint_args and c.load is None and c.pretrained_checkpoint is None:
        say("use_checkpoint_args needs --load or --pretrained-checkpoint")
    if c.finetune and c.no_load_optim:
        say("no_load_optim has no effect with --finetune, which loads weights only; leave it away")
    if c.exit_on_missing_checkpoint and c.load is None:
        say("exit_on_missing_checkpoint has no effect; add --load")
    if t.cuda_graph_impl != "none":
        problems += _graph_problems(config)
    if p.distributed_backend == "nccl" and p.device == "cpu":
        say("distributed_backend=nccl does not run on device=cpu; use gloo")
    for name in ("distributed_timeout_minutes", "distributed_timeout_seconds_after_init"):
        if (getattr(p, name) or 0) > LONGEST_TIMEOUT:
            say(f"{name}={getattr(p, name):g} is longer than any collective; use at most {LONGEST_TIMEOUT}")
    if d.mock_data and d.data_path:
        say("mock_data and data_path exclude each other; give one")
    per_split = ("train_data_path", "valid_data_path", "test_data_path")
    ways = [n for n in ("data_path", "data_args_path", "per_split_data_args_path", "mock_data") if getattr(d, n)]
    ways += [" ".join(n for n in per_split if getattr(d, n))] if any(getattr(d, n) for n in per_split) else []
    if not ways:
        say("data_path is not set; give --data-path PREFIX, or --mock-data")
    elif len(ways) > 1 and not (d.mock_data and d.data_path):
        say(f"{' and '.join(ways)} exclude each other; give the data in one way")
    elif ways[0] in per_split[1:]:
        say(f"train_data_path is not set beside {ways[0]}; give it")
    if d.multiple_validation_sets and not (d.valid_data_path or d.per_split_data_args_path):
        say("multiple_validation_sets needs --valid-data-path")
    if d.validation_set_names and not d.multiple_validation_sets:
        say(f"validation_set_names={' '.join(d.validation_set_names)} has no effect; add --multiple-validation-sets")
    if d.fim_data and d.document_packing != "concatenate":
        say("fim_data and document_packing=best-fit exclude each other; leave one out")
    if d.fim_data and d.mock_data:
        say("fim_data has no effect on mock_data; give --data-path")
    if d.document_packing != "concatenate" and d.mock_data:
        say("document_packing=best-fit has no effect on mock_data; give --data-path")
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        if (getattr(d, name) or 0) > 1:
            say(f"{name}={getattr(d, name)} is no share; use at most 1")
    open_end = not complete and (c.load is not None or c.pretrained_checkpoint is not None)
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data"):
        if getattr(d, name) and d.tokenizer_type is None and not open_end:
            say(f"{name} needs a tokenizer that knows the end of a document; give --tokenizer-type")
    if d.tokenizer_type is None and d.vocab_size is None and not open_end:
        say("vocab_size is not set; give a tokenizer (--tokenizer-type, --tokenizer-model) or --vocab-size")
    if d.tokenizer_type == "NullTokenizer" and d.vocab_size is None:
        say("tokenizer_type=NullTokenizer needs --vocab-size")
    if d.tokenizer_type == "GPT2BPETokenizer" and not (d.vocab_file and d.merge_file):
        say("tokenizer_type=GPT2BPETokenizer needs --vocab-file and --merge-file")
    no_file = (None, "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer")
    if d.tokenizer_type not in no_file and not d.tokenizer_model:
        say(f"tokenizer_type={d.tokenizer_type} needs --tokenizer-model")
    if world_size is not None:
        if world_size % (tp * pp):
            say(f"world size {world_size} is not a multiple of tp {tp} x pp {pp} = {tp * pp}; start a multiple of it")
        else:
            dp = world_size // (tp * pp)
            unit = t.micro_batch_size * dp
            sizes = [("global_batch_size", t.global_batch_size)]
            if t.rampup_batch_size is not None and len(t.rampup_batch_size) == 3:
                sizes += [("rampup_batch_size start", t.rampup_batch_size[0]), ("increment", t.rampup_batch_size[1])]
            if (t.global_batch_size or 0) > MOST_MICROBATCHES * unit:
                say(
                    f"global_batch_size={t.global_batch_size} is more than {MOST_MICROBATCHES} micro-batches of {unit}"
                    "; raise micro_batch_size or lower it"
                )
            for name, size in sizes:
                if size is not None and size % unit:
                    low, high = size // unit * unit, -(-size // unit) * unit
                    say(
                        f"{name}={size} is not a multiple of micro_batch_size {t.micro_batch_size} x data parallel "
                        f"{dp} = {unit}: use {f'{low} or ' if low else ''}{high}"
                    )
            if t.cuda_graph_impl != "none" and dp > 1 and (t.global_batch_size or 0) < 3 * unit:
                say(
                    f"cuda_graph_impl={t.cuda_graph_impl} replays what is between a step's first and last micro-batch; "
                    f"with data parallel {dp} give --global-batch-size {3 * unit} or more, or leave it away"
                )
    return problems


def _graph_problems(config: Config) -> list[str]:
    """Why micro-batches cannot be repeated as they were recorded."""
    m, p, t, d = config.model, config.parallel, config.train, config.data
    reasons = {
        "needs a CUDA device": p.device == "cpu",
        "needs tensor_model_parallel_size 1": p.tensor_model_parallel_size > 1,
        "needs pipeline_model_parallel_size 1": p.pipeline_model_parallel_size > 1,
        "would repeat one dropout mask; give --hidden-dropout 0 --attention-dropout 0": bool(
            m.hidden_dropout or m.attention_dropout
        ),
        "would repeat one micro-batch's documents; leave --reset-attention-mask away": d.reset_attention_mask,
        "and --compile exclude each other; give one": t.compile,
    }
    rest = " (or leave --cuda-graph-impl away)"
    return [f"cuda_graph_impl={t.cuda_graph_impl} {why}{rest}" for why, holds in reasons.items() if holds]


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _window_problems(m: ModelConfig) -> Iterator[str]:
    size, pattern = m.window_size, m.window_attn_skip_freq
    if size is None:
        if pattern is not None:
            yield f"window_attn_skip_freq={pattern} has no effect; add --window-size"
        return
    given = f"window_size={_numbers(size)}"
    if len(size) != 2:
        yield f"{given} is not two numbers; give LEFT,RIGHT, as 4095,0"
        return
    if size[1] != 0:
        yield f"{given} has {size[1]} on the right, where a causal model sees nothing; use {size[0]},0"
    if size[0] < 1:
        why = "leaves a token itself alone" if size[0] == 0 else "is no window"
        yield f"{given} {why}; give at least 1,0, or leave it away"
    if pattern is None:
        return
    try:
        if not any(read_pattern(pattern, m.num_layers)):
            yield f"window_attn_skip_freq={pattern} leaves no layer with the window; leave --window-size away"
    except ValueError as error:
        yield f"window_attn_skip_freq={pattern} {error}"


LONGEST_TIMEOUT = 1_000_000
MOST_MICROBATCHES = 100_000  # of one rank and step
REQUIRED = frozenset({"num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"})
_POSITIVE = frozenset(
    [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "num_query_groups",
        "seq_length",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
        "nproc",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "ddp_bucket_size",
        "distributed_timeout_minutes",
        "distributed_timeout_seconds_after_init",
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "train_samples",
        "eval_interval",
        "exit_interval",
        "recompute_num_layers",
        "save_interval",
        "save_interval_mins",
        "save_retain_interval",
        "keep_last",
        "log_interval",
        "vocab_size",
        "loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "rotary_base",
        "rope_scaling_factor",
        "peak_tflops",
    ]
)


def _divisors(n: int) -> str:
    found = [str(i) for i in range(1, n + 1) if n % i == 0]
    return ", ".join(found[:-1]) + " or " + found[-1] if len(found) > 1 else found[0]
