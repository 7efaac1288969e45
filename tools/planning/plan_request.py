"""Read the model, batch and cluster to plan from a command line. ConfigError lists all problems.

Whatever is no flag of the planner is one of pretrain_gpt.py; what a plan does not depend on (data, rates) may be left
out, and stands in the ready command line as in PLACEHOLDERS.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megalite.checkpoint.storage.location import CheckpointError
from megalite.config import cli
from megalite.config.config_file import read_config_file
from megalite.config.option import flag_name, flags_of, to_argv
from megalite.config.options import Config, ConfigError, DataConfig, build, iter_options
from megalite.config.pipeline_layout import STAGE_OPTIONS
from megalite.config.plugins import load_plugins
from megalite.config.text_file import TextFileError
from megalite.config.validation import find_problems
from megalite.data.errors import DataError
from megalite.interop.huggingface.config_json import read_config
from megalite.interop.huggingface.model_files import read_json
from megalite.models.families import PRESETS
from megalite.planning.cluster import Cluster, make_cluster, read_cluster
from megalite.training.datasets import open_tokenizer, true_vocab_size

SHARING = {"use_distributed_optimizer", "zero_stage", "use_megatron_fsdp", "data_parallel_sharding_strategy"}
WHOLE = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}  # one of these, and only that layout is planned
OF_ONE = (
    {*STAGE_OPTIONS} - WHOLE - {"num_layers", "num_virtual_stages_per_pipeline_rank"}
)  # kept by no search over others
STEP = {"split_backward", *SHARING, "micro_batch_size", "recompute_granularity", "optimizer_cpu_offload"}
MORE = {"context_parallel_size", "expert_model_parallel_size", "num_virtual_stages_per_pipeline_rank"}
LAYOUT = WHOLE | OF_ONE | STEP | MORE  # searched over
HOW = ("recompute_method", "recompute_num_layers", "recompute_modules")  # that go with recompute_granularity
PLACEHOLDERS = {"lr": "1e-4", "train_iters": "1000", "micro_batch_size": "1"}


class Request(NamedTuple):
    """words: the flags of pretrain_gpt.py for the model and all that the planner does not choose. fixed: the options of
    LAYOUT that the command line has. left_out: of PLACEHOLDERS those that it has not."""

    config: Config
    vocab_size: int
    cluster: Cluster
    words: tuple[str, ...]
    fixed: frozenset[str]
    left_out: frozenset[str]

    @property
    def is_layout(self) -> bool:
        return not self.fixed.isdisjoint(WHOLE)


def read(args: argparse.Namespace, words: Sequence[str]) -> Request:
    problems: list[str] = []
    where = _cluster(args, problems)
    try:
        if args.hf is not None and "preset" in (named := cli.parse_args(words).values):
            raise ConfigError([f"hf={args.hf} and preset={named['preset']} are two models; give one"])
        load_plugins(cli.parse_args(words).values.get("plugin", ()))  # a family may be a plugin's
        words = list(words)
        if args.hf is not None:
            words = [*of_hugging_face(args.hf, words), *words]
        problems += _unlike(args, words, where)
        given = cli.parse_args(words).values
        in_file = dict(read_config_file(str(given["config"]))) if given.get("config") else {}
        if {**in_file, **given}.get("use_checkpoint_args"):
            why = "takes the model from a checkpoint, which a plan does not read"
            raise ConfigError([f"use_checkpoint_args {why}; give its flags, --config FILE or --hf DIR"])
        said = {*given, *in_file, *PRESETS.get(str((in_file | given).get("preset")), ())}
        fixed = frozenset(said & LAYOUT)
        if (of_one := fixed & OF_ONE) and not fixed & WHOLE:
            names = ", ".join(sorted(of_one))
            raise ConfigError([f"{names}: of one layout alone; name tp and pp, too, or leave it to the search"])
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    precision = args.precision or ("" if said & {"bf16", "fp16"} else "bf16")
    words += [f"--{precision}"] if precision in ("bf16", "fp16") else []
    stand_ins = {name: text for name, text in PLACEHOLDERS.items() if name not in said}
    if said & {"train_samples"}:
        stand_ins.pop("train_iters", None)
    sources = {"mock_data", "data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "dataset"}
    completed = [*words, *(w for name, text in stand_ins.items() for w in (flag_name(name), text))]
    completed += [] if said & sources else ["--mock-data"]
    try:
        config, _ = cli.read(completed, PRESETS)
    except ConfigError as error:
        problems += error.problems
        config = None
    vocab_size = _vocabulary(config.data, problems) if config is not None else 0
    if problems or config is None or where is None:
        raise ConfigError(problems)
    dropped = ["nproc"]
    if not fixed & WHOLE:
        dropped += [*LAYOUT, *HOW]
    kept = tuple(without(completed, dropped))
    config = replace(config, parallel=replace(config.parallel, nproc=None))
    return Request(config, vocab_size, where, kept, fixed, frozenset(stand_ins))


def _vocabulary(data: DataConfig, problems: list[str]) -> int:
    """As the run has it. A tokenizer's file may be on the cluster alone: then the size has to be given."""
    tokenizer, why = None, ""
    try:
        tokenizer = open_tokenizer(data)
    except DataError as error:
        why = f", and its tokenizer cannot be opened here ({error})"
    try:
        if size := true_vocab_size(data, tokenizer):
            return size
        problems.append(f"vocab_size is not set{why}; give --vocab-size, --preset or --hf")
    except DataError as error:
        problems.append(str(error))
    return 0


def _cluster(args: argparse.Namespace, problems: list[str]) -> Cluster | None:
    try:
        if args.cluster is not None:
            return read_cluster(args.cluster)
        number = args.num_gpus if args.num_gpus is not None else args.gpus_per_node or 8
        return make_cluster(args.device or "h100", number, args.gpus_per_node)
    except TextFileError as error:
        problems.append(f"cluster={args.cluster} {error.reason}; give a TOML file, or --device")
    except ValueError as error:
        text = str(error)
        if args.cluster is None:
            text = text.replace("num_devices", "num_gpus").replace("per_node", "gpus_per_node")
        problems += text.splitlines()
    return None


def of_hugging_face(path: Path, words: Sequence[str]) -> list[str]:
    """The model of a config.json as flags, but for the options that the command line or its --config has."""
    file = path / "config.json" if path.is_dir() else path
    given = cli.parse_args(words).values
    if given.get("config"):
        given = {**read_config_file(str(given["config"])), **given}
    length = str(given.get("seq_length", ""))
    try:
        _, found = read_config(read_json(file), int(length) if length.isdigit() else None, str(file))
    except CheckpointError as error:
        raise ConfigError([f"hf={path}: {line}" for line in str(error).splitlines()]) from None
    return as_flags(build(found), found.keys() - given.keys())


def as_flags(config: Config, names: Iterable[str]) -> list[str]:
    """The options called so as words of a command line, where they are not the defaults."""
    wanted = set(names)
    chosen = {f.name: (getattr(getattr(config, section), f.name), f.default) for section, f in iter_options()}
    return to_argv({name: value for name, (value, usual) in chosen.items() if name in wanted and value != usual})


def _unlike(args: argparse.Namespace, words: Sequence[str], where: Cluster | None) -> list[str]:
    """Problems with options that are given twice with different values."""
    given, problems = cli.parse_args(words).values, []
    for name in {"bf16", "fp16"} & set(given):
        if args.precision not in (None, name):
            problems.append(f"precision={args.precision} and --{name} exclude each other; give one")
    if where is not None and str(given.get("nproc", where.world)) != str(where.world):
        problems.append(f"nproc={given['nproc']} is not the cluster's {where.world} devices; give --num-gpus alone")
    if args.cluster is not None and (args.device, args.num_gpus, args.gpus_per_node) != (None, None, None):
        more = "leave --device, --num-gpus and --gpus-per-node out"
        problems.append(f"cluster={args.cluster} has its device and their number; {more}")
    return problems


def without(words: Sequence[str], names: Iterable[str]) -> list[str]:
    """`words` but for the flags of these options, and what stands behind them."""
    dropped = {flag for _, f in iter_options() if f.name in set(names) for flag, _ in flags_of(f)}
    kept, drop = [], False
    for word in words:
        if word.startswith("--"):
            drop = word.partition("=")[0].replace("_", "-") in dropped
        if not drop:
            kept.append(word)
    return kept


def with_options(config: Config, **values: Any) -> Config:
    """`config` with other values of some options."""
    parts: dict[str, dict[str, Any]] = {}
    for section, f in iter_options():
        if f.name in values:
            parts.setdefault(section, {})[f.name] = values[f.name]
    return replace(config, **{name: replace(getattr(config, name), **some) for name, some in parts.items()})


def problems_of(config: Config, world: int) -> list[str]:
    """Why it cannot be built on so many ranks, as a run would be told; a plan calls them by --num-gpus."""
    return [str(problem).replace("--nproc", "--num-gpus") for problem in find_problems(config, world)]
