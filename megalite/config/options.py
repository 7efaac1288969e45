"""The configuration: frozen dataclasses with Megatron-LM's names and defaults.

A field is one option (field.py): its name in kebab case is the flag. Its help, its other flags and all its facts are
declared with it, in model_options.py and run_options.py. The package validation finds contradictions; toml.py reads and
writes files. Nothing here imports torch, so that a bad command line is refused before anything is started.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

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
    """The sections. `given`: the options that a command line, a file or a preset has set, to whatever value."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


SECTIONS: Mapping[str, type] = {f.name: type(getattr(Config(), f.name)) for f in fields(Config) if f.name != "given"}


def num_local_ranks(p: ParallelConfig) -> int:
    """The number of ranks where no launcher starts them."""
    if p.nproc is not None:
        return p.nproc
    return 1 if p.data_parallel_size is None else p.model_parallel_size * p.data_parallel_size


def is_given(config: Config, name: str) -> bool:
    """Whether an option of the model was set: it is in `given`, or it has another value than the default."""
    return name in config.given or getattr(config.model, name) != getattr(ModelConfig, name)


def left_to_checkpoint(config: Config) -> set[str]:
    """The options of the model whose values --use-checkpoint-args takes from the checkpoint: those that are not given,
    but for those that only say how to compute."""
    if not config.checkpoint.use_checkpoint_args:
        return set()
    return {f.name for f in fields(ModelConfig) if option_spec(f).resume != EXECUTION and not is_given(config, f.name)}


def iter_options() -> Iterator[tuple[str, Field[Any]]]:
    """Every option, as (section, field)."""
    for section, cls in SECTIONS.items():
        for f in fields(cls):
            yield section, f


def training_options(config: Config) -> dict[str, Any]:
    """Option -> effective value, of those that are equal in two runs of the same training."""
    values = {}
    for section, f in iter_options():
        facts, part = option_spec(f), getattr(config, section)
        if facts.resume in (MODEL, TRAINING) and facts.acts_through is None:
            values[f.name] = getattr(part, facts.effective_property or f.name)
    return values


# options that ask for something in Megatron-LM's log or TensorBoard
MEGATRON_LOG = ("log_throughput", "log_params_norm", "log_num_zeros_in_grad", "log_progress")
MEGATRON_LOG += tuple(f"log_{what}_to_tensorboard" for what in ("timers", "validation_ppl", "memory", "world_size"))


def effective_log_style(config: Config, megatron_spelling: bool = False) -> str:
    """megalite or megatron: `log_style`, or, where it is auto, the style of the command line. `megatron_spelling`: that
    has a flag that only Megatron-LM has, as --use-mcore-models."""
    if config.log.log_style != "auto":
        return config.log.log_style
    asked = megatron_spelling or any(getattr(config.log, name) for name in MEGATRON_LOG)
    return "megatron" if asked else "megalite"


def effective_log_interval(config: Config, steps: int) -> int:
    """Steps per log line of a run of `steps`: 1 of 20, 20 of 1,000, at most 100."""
    if config.log.log_interval is not None:
        return config.log.log_interval
    return 100 if effective_log_style(config) == "megatron" else max(1, min(100, steps // 50))


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of both; the same for every tp that divides `divisible_by`."""
    multiple = math.lcm(divisible_by, tp)
    return -(-vocab_size // multiple) * multiple


def convert_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(option -> value of its type, option -> problem). Unknown names raise KeyError."""
    fields_, converted, wrong = {f.name: f for _, f in iter_options()}, {}, {}
    for name, value in values.items():
        try:
            converted[name] = convert_value(fields_[name], value)
        except ValueError as error:
            wrong[name] = str(error)
    return converted, wrong


def apply_preset(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Option -> value: `given`, and the preset's for the others. A preset's vocabulary is for runs without a tokenizer.

    >>> over_preset({"num_layers": 8, "vocab_size": 8192}, {"tokenizer_type": "ByteTokenizer"})
    {'num_layers': 8, 'tokenizer_type': 'ByteTokenizer'}
    """
    own = {**given, **_implied_options(given)}.get("tokenizer_type") not in (None, "NullTokenizer")
    return {name: value for name, value in preset.items() if name != "vocab_size" or not own} | dict(given)


def _implied_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options that follow from others: GPT-2's two files are its tokenizer; given rows, the multiple to round up to."""
    implied: dict[str, Any] = {}
    if values.get("tokenizer_type") is None and values.get("vocab_file") and values.get("merge_file"):
        implied["tokenizer_type"] = "GPT2BPETokenizer"
    if values.get("padded_vocab_size"):
        implied["make_vocab_size_divisible_by"] = values["padded_vocab_size"]
    return implied


def build(values: Mapping[str, Any]) -> Config:
    """A Config from option names to values; unknown names raise KeyError, wrong types ConfigError."""
    typed, wrong = convert_values({**values, **_implied_options(values)})
    if wrong:
        raise ConfigError(list(wrong.values()))
    given = {name: {f.name: typed[f.name] for f in fields(cls) if f.name in typed} for name, cls in SECTIONS.items()}
    return Config(**{name: cls(**given[name]) for name, cls in SECTIONS.items()}, given=frozenset(typed))


def gelu_variant(*, add_bias_linear: bool = True, bias_gelu_fusion: bool = True, openai_gelu: bool = False) -> str:
    """The gelu of Megatron-LM: its kernel for bias and gelu computes the tanh form; without that gelu is exact."""
    return "gelu" if openai_gelu or (add_bias_linear and bias_gelu_fusion) else "gelu_erf"


def apply_megatron_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a command line or file, with Megatron-LM's rules for those that are left out: the form of gelu, and
    one group with --group-query-attention. A checkpoint's options are complete already."""
    values = dict(values)
    if values.get("use_checkpoint_args"):
        return values
    if "activation" not in values:
        names = ("add_bias_linear", "bias_gelu_fusion", "openai_gelu")
        values["activation"] = gelu_variant(**{name: values[name] for name in names if name in values})
    if values.get("group_query_attention"):
        values.setdefault("num_query_groups", 1)
    return values


class ConfigError(ValueError):
    """`problems`: one line each."""

    def __init__(self, problems: Sequence[str]):
        self.problems = [mask_url_secrets(problem) for problem in problems]
        super().__init__("\n".join(self.problems))
