"""The configuration: frozen dataclasses with Megatron-LM's names and defaults.

A field is one option (option.py): its name in kebab case is the flag. Its help, its other flags and its OptionSpec are
declared with it, in model_options.py and run_options.py. The package `validation` finds contradictions; config_file.py
reads and writes files. Nothing here imports torch, so that a bad command line is rejected before anything is started.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from megalite.config.hybrid_pattern import num_parts, num_pattern_layers
from megalite.config.model_options import ModelConfig
from megalite.config.option import EXECUTION, MODEL, TRAINING, convert_value, mask_url_secrets, option_spec
from megalite.config.run_options import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OperationsConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class Config:
    """The sections of options.

    `explicit` names the options that a command line, a file or a preset has set, even if to their defaults.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


SECTIONS: Mapping[str, type] = {f.name: type(getattr(Config(), f.name)) for f in fields(Config) if f.name != "explicit"}


def num_local_ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks that megalite starts itself if no launcher does."""
    if parallel.nproc is not None:
        return parallel.nproc
    if parallel.data_parallel_size is not None:
        return parallel.model_parallel_size * parallel.data_parallel_size
    return 1


def is_explicit(config: Config, name: str) -> bool:
    """Return True if a model option was set: it is in `config.explicit`, or its value is not the default."""
    return name in config.explicit or getattr(config.model, name) != getattr(ModelConfig, name)


def left_to_checkpoint(config: Config) -> set[str]:
    """Return the model options that --use-checkpoint-args takes from the checkpoint.

    These are all that are not explicit, except execution options, which do not change the results.
    """
    if not config.checkpoint.use_checkpoint_args:
        return set()
    return {
        f.name for f in fields(ModelConfig) if option_spec(f).resume != EXECUTION and not is_explicit(config, f.name)
    }


OPTIONS: Sequence[tuple[str, Field[Any]]] = [(section, f) for section, cls in SECTIONS.items() for f in fields(cls)]
SECTION_OF: Mapping[str, str] = {f.name: section for section, f in OPTIONS}


def iter_options() -> Iterator[tuple[str, Field[Any]]]:
    """Yield every option, as (section, field)."""
    return iter(OPTIONS)


def replace_options(config: Config, **values: Any) -> Config:
    """Return `config` with other values for some options; raises TypeError for a name that is not an option."""
    if unknown := values.keys() - SECTION_OF.keys():
        raise TypeError(f"{', '.join(sorted(unknown))}: no option has this name")
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(SECTION_OF[name], {})[name] = value
    sections = {name: replace(getattr(config, name), **changed) for name, changed in by_section.items()}
    return replace(config, **sections)


def training_options(config: Config) -> dict[str, Any]:
    """Return option -> effective value, for the options that must be equal in two runs of the same training."""
    values = {}
    for section, f in iter_options():
        spec = option_spec(f)
        if spec.resume in (MODEL, TRAINING) and spec.acts_through is None:
            values[f.name] = getattr(getattr(config, section), spec.effective_property or f.name)
    return values


# options that request lines in Megatron-LM's log or values in its TensorBoard
MEGATRON_LOG = (
    "log_throughput",
    "log_params_norm",
    "log_num_zeros_in_grad",
    "log_progress",
    "log_timers_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_world_size_to_tensorboard",
)


def effective_log_style(config: Config, megatron_spelling: bool = False) -> str:
    """Return "megalite" or "megatron": `log_style`, or if that is auto, the style of the command line.

    Args:
        megatron_spelling: the command line has a flag that only Megatron-LM has, such as --use-mcore-models.
    """
    if config.log.log_style != "auto":
        return config.log.log_style
    is_megatron = megatron_spelling or any(getattr(config.log, name) for name in MEGATRON_LOG)
    return "megatron" if is_megatron else "megalite"


def effective_log_interval(config: Config, steps: int) -> int:
    """Return the steps per log line in a run of `steps`: by default 1 for 20 steps, 20 for 1,000, at most 100."""
    if config.log.log_interval is not None:
        return config.log.log_interval
    return 100 if effective_log_style(config) == "megatron" else max(1, min(100, steps // 50))


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Return the vocabulary size rounded up to a multiple of both; equal for every tp that divides `divisible_by`."""
    multiple = math.lcm(divisible_by, tp)
    return -(-vocab_size // multiple) * multiple


def convert_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (option -> value of its type, option -> problem). Raises KeyError for unknown names."""
    option_fields = {f.name: f for _, f in iter_options()}
    converted: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, value in values.items():
        try:
            converted[name] = convert_value(option_fields[name], value)
        except ValueError as error:
            wrong[name] = str(error)
    return converted, wrong


# Megatron-LM's flags for the activation clamped_swiglu, which go together
QUICK_GEGLU_OPTIONS = ("quick_geglu", "glu_linear_offset", "activation_func_clamp_value")
# the positions that --enable-gpt-oss of Megatron-LM sets
GPT_OSS_POSITIONS: Mapping[str, Any] = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 131072,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


def apply_preset(preset: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return option -> value: `values`, and those of the preset for all other options.

    The vocabulary of a preset is only for runs without a tokenizer.

    >>> apply_preset({"num_layers": 8, "vocab_size": 8192}, {"tokenizer_type": "ByteTokenizer"})
    {'num_layers': 8, 'tokenizer_type': 'ByteTokenizer'}
    """
    tokenizer_type = {**values, **_implied_options(values)}.get("tokenizer_type")
    has_tokenizer = tokenizer_type not in (None, "NullTokenizer")
    merged = {name: value for name, value in preset.items() if name != "vocab_size" or not has_tokenizer}
    if values.get("enable_gpt_oss"):
        merged = {name: value for name, value in merged.items() if name not in GPT_OSS_POSITIONS}
    return override_options(merged, values)


def override_options(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return option -> value of `base` and `values`, which come first.

    Options of `base` that set the same in another way are dropped: the number of layers if `values` has a pattern, and
    Megatron-LM's flags of an activation if it names one.

    >>> override_options({"num_layers": 8, "quick_geglu": True}, {"activation": "swiglu"})
    {'num_layers': 8, 'activation': 'swiglu'}
    """
    dropped: set[str] = set()
    if values.get("hybrid_layer_pattern"):
        dropped.update(("num_layers", "mtp_num_layers"))
    if values.get("quick_geglu"):
        dropped.add("activation")
    if "activation" in values or values.get("quick_geglu") is False:
        dropped.update(QUICK_GEGLU_OPTIONS)
    return {**{name: value for name, value in base.items() if name not in dropped}, **values}


def _implied_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that follow from others.

    GPT-2's vocabulary and merge files imply its tokenizer, and `padded_vocab_size` the multiple to round up to.
    """
    implied: dict[str, Any] = {}
    if values.get("tokenizer_type") is None and values.get("vocab_file") and values.get("merge_file"):
        implied["tokenizer_type"] = "GPT2BPETokenizer"
    if values.get("padded_vocab_size"):
        implied["make_vocab_size_divisible_by"] = values["padded_vocab_size"]
    return implied


def build(values: Mapping[str, Any]) -> Config:
    """Return the Config with these values.

    Raises:
        KeyError: if a name is not an option.
        ConfigError: if a value has the wrong type.
    """
    typed, wrong = convert_values({**values, **_implied_options(values)})
    if wrong:
        raise ConfigError(list(wrong.values()))
    sections = {
        section: cls(**{f.name: typed[f.name] for f in fields(cls) if f.name in typed})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections, explicit=frozenset(typed))


def gelu_variant(*, add_bias_linear: bool = True, bias_gelu_fusion: bool = True, openai_gelu: bool = False) -> str:
    """Return Megatron-LM's gelu: the tanh form if its fused bias and gelu kernel is used, otherwise the exact one."""
    return "gelu" if openai_gelu or (add_bias_linear and bias_gelu_fusion) else "gelu_erf"


def apply_megatron_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command line or file, with Megatron-LM's rules for missing ones.

    These are the form of gelu, the activation and positions of GPT-OSS's flags, one query group with
    --group-query-attention, yarn positions with --multi-latent-attention, and the number of layers of a pattern, whose
    parts Megatron-LM counts as layers. With --use-checkpoint-args nothing else is added, because the options of a
    checkpoint are complete.
    """
    values = dict(values)
    pattern = values.get("hybrid_layer_pattern")
    if isinstance(pattern, str):
        with contextlib.suppress(ValueError):  # the validation reports an invalid pattern
            num_layers = num_pattern_layers(pattern)
            if values.get("num_layers") in (None, 0, num_parts(pattern)):
                values["num_layers"] = num_layers
    if values.get("use_checkpoint_args"):
        return values
    if values.get("enable_gpt_oss"):
        values = {**GPT_OSS_POSITIONS, **values}
    if values.get("quick_geglu"):
        values.setdefault("activation", "clamped_swiglu")
    if "activation" not in values:
        names = ("add_bias_linear", "bias_gelu_fusion", "openai_gelu")
        values["activation"] = gelu_variant(**{name: values[name] for name in names if name in values})
    if values.get("group_query_attention"):
        values.setdefault("num_query_groups", 1)
    if values.get("multi_latent_attention") and values.get("position_embedding_type") == "rope":
        is_stretched = values.get("rotary_scaling_factor", 1.0) != 1.0
        if values.get("rope_type", "yarn" if is_stretched else "rope") == "yarn":
            values["position_embedding_type"] = "yarn"
    return values


class ConfigError(ValueError):
    """One or more problems of a configuration; `problems` has a line for each, without secrets of URLs."""

    def __init__(self, problems: Sequence[str]):
        self.problems = [mask_url_secrets(problem) for problem in problems]
        super().__init__("\n".join(self.problems))
