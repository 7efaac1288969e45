"""The model, batch and cluster to plan, read from a command line.

Flags that are not the planner's are those of pretrain_gpt.py. Options that a plan does not depend on, such as the data
and the learning rate, may be left out; the printed command line then has PLACEHOLDERS for them.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.location import CheckpointError
from megalite.common.text_file import TextFileError
from megalite.config import cli
from megalite.config.config_file import read_config_file
from megalite.config.hybrid_pattern import BORDER
from megalite.config.option import flag_name, flags_of, to_argv
from megalite.config.options import Config, ConfigError, DataConfig, build, iter_options
from megalite.config.pipeline_layout import STAGE_OPTIONS
from megalite.config.plugins import load_plugins
from megalite.config.validation import find_problems
from megalite.data.errors import DataError
from megalite.interop.huggingface.config_json import read_config
from megalite.interop.huggingface.model_files import read_json
from megalite.models.families import PRESETS
from megalite.planning.cluster import Cluster, make_cluster
from megalite.planning.cluster_file import read_cluster
from megalite.training.datasets import open_tokenizer, true_vocab_size

# if one of these is set, only that layout is planned
SINGLE_LAYOUT_OPTIONS = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
# describe the stages of one layout, so a search cannot keep them
ONE_LAYOUT_ONLY = {*STAGE_OPTIONS} - {
    *SINGLE_LAYOUT_OPTIONS,
    "num_layers",
    "hybrid_layer_pattern",
    "num_virtual_stages_per_pipeline_rank",
}
ZERO_OPTIONS = {"use_distributed_optimizer", "zero_stage", "use_megatron_fsdp", "data_parallel_sharding_strategy"}
# the search chooses these unless the command line sets them
LAYOUT_OPTIONS = {
    *SINGLE_LAYOUT_OPTIONS,
    *ONE_LAYOUT_ONLY,
    *ZERO_OPTIONS,
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "micro_batch_size",
    "recompute_granularity",
    "split_backward",
    "optimizer_cpu_offload",
}
RECOMPUTE_DETAILS = ("recompute_method", "recompute_num_layers", "recompute_modules")  # follow recompute_granularity
PLACEHOLDERS = {"lr": "1e-4", "train_iters": "1000", "micro_batch_size": "1"}
DATA_SOURCES = {"mock_data", "data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "dataset"}


@dataclass(frozen=True)
class Request:
    """A model, a batch and a cluster to plan.

    Attributes:
        argv: The flags of pretrain_gpt.py for the model and everything else that the planner does not choose.
        fixed: The options of LAYOUT_OPTIONS that the command line sets.
        placeholders: The options of PLACEHOLDERS that the command line leaves out.
    """

    config: Config
    vocab_size: int
    cluster: Cluster
    argv: tuple[str, ...]
    fixed: frozenset[str]
    placeholders: frozenset[str]

    @property
    def is_single_layout(self) -> bool:
        """True if the command line names a layout, so that no others are searched."""
        return not self.fixed.isdisjoint(SINGLE_LAYOUT_OPTIONS)


def read_request(args: argparse.Namespace, argv: Sequence[str]) -> Request:
    """Return what to plan.

    Args:
        args: The planner's own flags.
        argv: The remaining flags, which are those of pretrain_gpt.py.

    Raises:
        ConfigError: with all problems.
    """
    problems: list[str] = []
    cluster = _read_cluster(args, problems)
    try:
        argv = _add_hf_flags(args, argv)
        problems += _conflicting_flags(args, argv, cluster)
        option_names = _set_options(argv)
        fixed = frozenset(option_names & LAYOUT_OPTIONS)
        stage_options = fixed & ONE_LAYOUT_ONLY
        if _has_pipeline_borders(argv):
            stage_options |= {"hybrid_layer_pattern with |"}
        if stage_options and not fixed & SINGLE_LAYOUT_OPTIONS:
            names = ", ".join(sorted(stage_options))
            raise ConfigError([f"{names}: only valid for one layout; name tp and pp, too, or leave it to the search"])
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    placeholders = {name: text for name, text in PLACEHOLDERS.items() if name not in option_names}
    if "train_samples" in option_names:
        placeholders.pop("train_iters", None)
    complete_argv = [*argv, *_precision_flags(args, option_names)]
    for name, text in placeholders.items():
        complete_argv += [flag_name(name), text]
    if not option_names & DATA_SOURCES:
        complete_argv.append("--mock-data")
    try:
        config, _ = cli.read(complete_argv, PRESETS)
    except ConfigError as error:
        problems += error.problems
        config = None
    vocab_size = _vocab_size(config.data, problems) if config is not None else 0
    if problems or config is None or cluster is None:
        raise ConfigError(problems)
    searched = ["nproc"]
    if not fixed & SINGLE_LAYOUT_OPTIONS:
        searched += [*LAYOUT_OPTIONS, *RECOMPUTE_DETAILS]
    config = replace(config, parallel=replace(config.parallel, nproc=None))
    remaining_argv = tuple(drop_flags(complete_argv, searched))
    return Request(config, vocab_size, cluster, remaining_argv, fixed, frozenset(placeholders))


def _add_hf_flags(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """Load the plugins of a command line and return it with the flags for the model of --hf."""
    values = cli.parse_args(argv).values
    if args.hf is not None and "preset" in values:
        raise ConfigError([f"hf={args.hf} and preset={values['preset']} are two models; give one"])
    load_plugins(values.get("plugin", ()))  # the model family may be a plugin's
    if args.hf is None:
        return list(argv)
    return [*flags_from_hf(args.hf, argv), *argv]


def _set_options(argv: Sequence[str]) -> set[str]:
    """Return the names of the options that the command line, its --config file or its preset sets."""
    on_command_line = cli.parse_args(argv).values
    in_file: dict[str, Any] = {}
    if on_command_line.get("config"):
        in_file = dict(read_config_file(str(on_command_line["config"])))
    values = {**in_file, **on_command_line}
    if values.get("use_checkpoint_args"):
        rule = "takes the model from a checkpoint, which a plan does not read"
        raise ConfigError([f"use_checkpoint_args {rule}; give its flags, --config FILE or --hf DIR"])
    return {*values, *PRESETS.get(str(values.get("preset")), ())}


def _has_pipeline_borders(argv: Sequence[str]) -> bool:
    """Return True if the layer pattern of the command line, or of its --config file, has pipeline borders."""
    values = cli.parse_args(argv).values
    if values.get("config"):
        values = {**read_config_file(str(values["config"])), **values}
    return BORDER in str(values.get("hybrid_layer_pattern", ""))


def _precision_flags(args: argparse.Namespace, option_names: set[str]) -> list[str]:
    """Return the flag of --precision, by default of bf16 if the options have none."""
    precision = args.precision
    if precision is None and not option_names & {"bf16", "fp16"}:
        precision = "bf16"
    return [f"--{precision}"] if precision in ("bf16", "fp16") else []


def _vocab_size(data: DataConfig, problems: list[str]) -> int:
    """Return the vocabulary size that the run has; 0 with a problem if it is unknown.

    The tokenizer's file may exist on the cluster only; the options must set the size then.
    """
    tokenizer, tokenizer_error = None, ""
    try:
        tokenizer = open_tokenizer(data)
    except DataError as error:
        tokenizer_error = f", and its tokenizer cannot be opened here ({error})"
    try:
        if size := true_vocab_size(data, tokenizer):
            return size
        problems.append(f"vocab_size is not set{tokenizer_error}; give --vocab-size, --preset or --hf")
    except DataError as error:
        problems.append(str(error))
    return 0


def _read_cluster(args: argparse.Namespace, problems: list[str]) -> Cluster | None:
    try:
        if args.cluster is not None:
            return read_cluster(args.cluster)
        num_gpus = args.num_gpus if args.num_gpus is not None else args.gpus_per_node or 8
        return make_cluster(args.device or "h100", num_gpus, args.gpus_per_node)
    except TextFileError as error:
        problems.append(f"cluster={args.cluster} {error.reason}; give a TOML file, or --device")
    except ValueError as error:
        message = str(error)
        if args.cluster is None:
            message = message.replace("num_devices", "num_gpus").replace("per_node", "gpus_per_node")
        problems += message.splitlines()
    return None


def flags_from_hf(path: Path, argv: Sequence[str]) -> list[str]:
    """Return the model of a config.json as flags, without the options that `argv` or its --config file sets."""
    file = path / "config.json" if path.is_dir() else path
    values = cli.parse_args(argv).values
    if values.get("config"):
        values = {**read_config_file(str(values["config"])), **values}
    text = str(values.get("seq_length", ""))
    seq_length = int(text) if text.isdigit() else None
    try:
        _, model_options = read_config(read_json(file), seq_length, str(file))
    except CheckpointError as error:
        raise ConfigError([f"hf={path}: {line}" for line in str(error).splitlines()]) from None
    return to_flags(build(model_options), model_options.keys() - values.keys())


def to_flags(config: Config, names: Iterable[str]) -> list[str]:
    """Return the options with these names as flags, if they differ from their defaults."""
    names = set(names)
    values = {}
    for section, option in iter_options():
        value = getattr(getattr(config, section), option.name)
        if option.name in names and value != option.default:
            values[option.name] = value
    return to_argv(values)


def _conflicting_flags(args: argparse.Namespace, argv: Sequence[str], cluster: Cluster | None) -> list[str]:
    """Return problems with options that are set twice with different values."""
    values, problems = cli.parse_args(argv).values, []
    for name in {"bf16", "fp16"} & set(values):
        if args.precision not in (None, name):
            problems.append(f"precision={args.precision} and --{name} exclude each other; give one")
    if cluster is not None and str(values.get("nproc", cluster.world)) != str(cluster.world):
        problems.append(f"nproc={values['nproc']} is not the cluster's {cluster.world} devices; give --num-gpus alone")
    if args.cluster is not None and (args.device, args.num_gpus, args.gpus_per_node) != (None, None, None):
        remedy = "leave --device, --num-gpus and --gpus-per-node out"
        problems.append(f"cluster={args.cluster} has its device and their number; {remedy}")
    return problems


def drop_flags(argv: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return `argv` without the flags of these options and their values."""
    names = set(names)
    dropped = {flag for _, option in iter_options() if option.name in names for flag, _ in flags_of(option)}
    remaining, drop = [], False
    for arg in argv:
        if arg.startswith("--"):
            drop = arg.partition("=")[0].replace("_", "-") in dropped
        if not drop:
            remaining.append(arg)
    return remaining


def plan_problems(config: Config, world: int) -> list[str]:
    """Return the problems that a run of `config` on `world` ranks would report, worded for the planner's flags."""
    return [str(problem).replace("--nproc", "--num-gpus") for problem in find_problems(config, world)]
