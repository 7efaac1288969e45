"""Options that follow from several keys of another trainer's configuration: batch sizes, learning rates, layout.

A key whose meaning depends on other keys sets a part, such as `total` or `decay_ratio`. The rules of this module derive
options from the parts.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalite.config.option import convert_value, flag_name, type_name
from megalite.config.options import ConfigError, iter_options

FIELDS = {f.name: f for _, f in iter_options()}
SUPPORTED, BUILT_IN, NO_EQUIVALENT = "supported", "built in", "no equivalent"
FALLBACK, DEFAULT, GIVEN, OVERRIDES = range(4)  # precedence of a value, lowest first

MAX_INTEGER = 10**15  # maximum of a size, a count or a number of steps
# the parts by type of their value: integers above 0, integers, fractions from 0 to 1, numbers and texts
COUNTS = {"total", "accumulation", "local", "pipeline_micro", "gpus", "devices", "nodes", "replicate", "group", "dp"}
COUNTS |= {"shared_size", "profile_freq", "profiler_active", "profiler_warmup", "top_k"}
INTEGERS = {"shard", "rank", "port", "decay_start", "decay_steps", "total_steps", "warmup_steps", "constant_steps"}
INTEGERS |= {"offload_layers", "validation_length"}
FRACTIONS = {"decay_ratio", "min_lr_factor", "warmup_ratio"}
NUMBERS = {"scale_power", "momentum", "z_loss_coefficient"}
TEXTS = {"address", "strategy", "reshard", "tb_folder", "initial_path", "nemo_strategy", "monitor", "family", "flavor"}
FSDP_STAGES = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2}


class SourcedValue(NamedTuple):
    """The value of an option or a part, with the key that sets it."""

    value: Any
    key: str
    weight: int  # FALLBACK, DEFAULT, GIVEN or OVERRIDES


class ValueStore:
    """The values of options or parts by name, with the keys that set them.

    Two keys that set different values are a conflict, unless their weights differ; the higher one then wins.

    Args:
        enabled_by_any: names that are true if any key sets them to true.
    """

    def __init__(self, enabled_by_any: Collection[str] = ()) -> None:
        self.entries: dict[str, SourcedValue] = {}
        self.conflicts: list[str] = []
        self._enabled_by_any = enabled_by_any

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def get(self, name: str, default: Any = None) -> Any:
        return self.entries[name].value if name in self.entries else default

    def key(self, name: str) -> str:
        """Return the key that set a name."""
        return self.entries[name].key

    def set(self, name: str, value: Any, key: str, weight: int = GIVEN) -> None:
        """Set a name to the value of a key, unless a key with a higher weight has set it."""
        other = self.entries.get(name)
        if other is None or weight > other.weight:
            self.entries[name] = SourcedValue(value, key, weight)
        elif value == other.value or weight < other.weight:
            return
        elif name in self._enabled_by_any:
            self.entries[name] = self.entries[name]._replace(value=True)
        else:
            both = f"{other.key} gives {name} = {shown(other.value)}, and {key} gives {shown(value)}"
            self.conflicts.append(f"{both}; keep one")


@dataclass
class Translation:
    """The options and parts that the keys of a configuration set."""

    trainer: str
    options: ValueStore
    parts: ValueStore = field(default_factory=ValueStore)
    verdicts: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # part -> (verdict, text), unless it is SUPPORTED

    def derive(self, name: str, value: Any, *parts: str) -> None:
        """Set an option that follows from parts.

        Its weight is the highest of the parts that are set, or that of a default if none is.
        """
        sources = [self.parts.entries[part] for part in parts if part in self.parts]
        key = " with ".join(dict.fromkeys(entry.key for entry in sources))
        self.options.set(name, value, key, max((entry.weight for entry in sources), default=DEFAULT))

    def set_verdict(self, part: str, verdict: str, text: str) -> None:
        """Set the verdict on the key that set a part, if there is one."""
        if part in self.parts:
            self.verdicts[part] = verdict, text


def shown(value: Any) -> str:
    return json.dumps(value, default=str)


def number(value: Any) -> int | float:
    """Return a finite number, as int if it is an integer.

    Texts are converted, because YAML parses 1e-4 as a text; floats may be integers, because JSON parses 5e8 as a float.

    Raises:
        ValueError: if the value is not a finite number.
    """
    try:
        result = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{shown(value)[:100]} is not a number; write one") from None
    if isinstance(value, bool) or not math.isfinite(result):
        raise ValueError(f"{shown(value)} is not a finite number; write one")
    return int(result) if isinstance(result, int) or result.is_integer() else result


def whole_number(value: Any) -> int:
    """Return an integer of at most MAX_INTEGER. Raises ValueError for any other value."""
    result = number(value)
    if not isinstance(result, int) or abs(result) > MAX_INTEGER:
        raise ValueError(f"{shown(value)[:100]} is not a whole number of at most {MAX_INTEGER:.0e}; write one")
    return result


def convert_option(option: str, value: Any) -> Any:
    """Return the value as the option's type. Raises ValueError."""
    kind = type_name(FIELDS[option])
    if kind == "bool":
        value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    if kind == "int":
        value = whole_number(value)
    elif kind == "float":
        value = number(value)
    return convert_value(FIELDS[option], value)


def convert_part(part: str, value: Any) -> Any:
    """Return the value as the part's type. Raises ValueError."""
    if part in COUNTS | INTEGERS:
        count = whole_number(value)
        if part in COUNTS and count < 1:
            raise ValueError(f"{count} is not above 0; write a number that is")
        return count
    if part in FRACTIONS:
        fraction = number(value)
        if not 0 <= fraction <= 1:
            raise ValueError(f"{shown(value)} is not a fraction; write a number from 0 to 1")
        return fraction
    if part in NUMBERS:
        return number(value)
    if part in TEXTS and isinstance(value, dict | list):
        raise ValueError(f"{shown(value)[:100]} is not a text; write one")
    return value


def set_batch_sizes(translation: Translation, dp: int | None) -> int | None:
    """Set the batch sizes by DeepSpeed's rule: train batch = micro-batch x accumulation x dp.

    Two of the three sizes determine the third. nanotron and torchtitan have the same rule without a train batch; other
    trainers name both batch sizes.

    Args:
        dp: data-parallel size; None if it is not known.

    Returns:
        The data-parallel size, also if it follows from the batch sizes; None if it is not known.

    Raises:
        ConfigError: if the sizes contradict each other.
    """
    if translation.trainer not in ("deepspeed", "nanotron", "torchtitan"):
        return dp
    _pipeline_batch(translation)
    total = translation.parts.get("total", translation.options.get("global_batch_size"))
    steps = translation.parts.get("accumulation")
    micro = translation.options.get("micro_batch_size")
    local = translation.parts.get("local")
    if local is not None and micro and local != micro:
        steps = local // micro
    if any(size is not None and size < 1 for size in (total, micro, steps)):
        raise ConfigError([f"batch sizes {total}, {micro}, {steps} are not all above 0; correct them"])
    if local is not None and total and dp and total % (local * dp):
        raise ConfigError([f"the global batch size {total} is not a multiple of {local} x {dp} (dp); correct one"])
    if total and micro and steps and local is None:
        dp = total // (micro * steps) if dp is None and total % (micro * steps) == 0 else dp
        if total != micro * steps * (dp or 1):
            product = f"{micro} x {steps} x {dp or 'dp'}{f' = {micro * steps * dp}' if dp else ''}"
            rule = f"the train batch size {total} is not micro-batch x accumulation x data-parallel size, {product}"
            raise ConfigError([f"{rule}; correct one of them, or give --gpus N"])
    elif dp is None:
        if (total and not micro) or (micro and not total and steps):
            raise ConfigError(["the batch of a step depends on the number of devices; give --gpus N"])
    elif micro and not total:
        translation.derive("global_batch_size", micro * (steps or 1) * dp, "accumulation", "local")
    elif total and not micro:
        micro, rest = divmod(total, (steps or 1) * dp)
        if rest:
            raise ConfigError([f"the train batch {total} is not a multiple of {steps or 1} x {dp} (dp); correct one"])
        translation.derive("micro_batch_size", micro, "total")
    if "total" in translation.parts:
        translation.derive("global_batch_size", total, "total")
    elif steps and not micro:
        flags = "--micro-batch-size and --global-batch-size, that is micro x this x dp"
        translation.set_verdict("accumulation", NO_EQUIVALENT, f"the file has no batch size; give {flags}")
    return dp


def _pipeline_batch(translation: Translation) -> None:
    """Set the micro-batch size from torchtitan's local batch size, which a pipeline splits into micro-batches."""
    local = translation.parts.get("local")
    if local is None:
        return
    if translation.options.get("pipeline_model_parallel_size", 1) == 1:
        translation.derive("micro_batch_size", local, "local")
        translation.set_verdict("pipeline_micro", BUILT_IN, "there is no pipeline that would split a batch")
        return
    micro = translation.parts.get("pipeline_micro", 1)
    if local % micro:
        raise ConfigError([f"the local batch size {local} is not a multiple of the pipeline's {micro}; correct one"])
    translation.derive("micro_batch_size", micro, "pipeline_micro")


def set_learning_rates(translation: Translation) -> None:
    """Set the learning-rate schedule and the loss scale. A decay that starts after the end of the warmup is WSD's."""
    _warm_up(translation)
    lr = translation.options.get("lr")
    for part, option in (("min_lr_factor", "min_lr"), ("warmup_ratio", "lr_warmup_init")):
        if part in translation.parts and lr is None and translation.parts.get(part) != 0:
            translation.set_verdict(
                part,
                NO_EQUIVALENT,
                f"it is a fraction of the learning rate, which the file does not have; give {flag_name(option)}",
            )
        elif part in translation.parts:
            translation.derive(option, _rounded((lr or 0.0) * translation.parts.get(part)), part)
    if (power := translation.parts.get("scale_power")) is not None:
        if 0 <= power <= 64:
            translation.derive("initial_loss_scale", 2.0**power, "scale_power")
        else:
            translation.set_verdict(
                "scale_power", NO_EQUIVALENT, "2 to this power is not a loss scale; give --initial-loss-scale"
            )
    style = translation.parts.get("decay_style")
    if (
        translation.trainer == "nanotron"
        and style is not None
        and lr is not None
        and "min_lr" not in translation.options
    ):
        translation.derive("min_lr", lr)  # without a final rate, nanotron's rate is constant
    end = translation.parts.get("total_steps", translation.options.get("train_iters"))
    if style == "constant":
        translation.derive("lr_decay_style", "constant", "decay_style")
        translation.set_verdict("total_steps", BUILT_IN, "the learning rate is constant")
    elif style is not None:
        _decay(translation, style, end)
    elif "total_steps" in translation.parts:
        translation.derive("lr_decay_iters", end, "total_steps")


def _rounded(rate: float) -> float:
    return float(f"{rate:.12g}")


def _warm_up(translation: Translation) -> None:
    """Set NeMo's warmup.

    Step n has (n + 1) / (steps + 1) of the learning rate, or n / steps if `constant_steps` follow the decay.
    """
    steps, lr = translation.parts.get("warmup_steps"), translation.options.get("lr")
    if steps is None:
        return
    translation.derive("lr_warmup_iters", steps, "warmup_steps")
    if steps and lr is not None and not translation.parts.get("constant_steps"):
        translation.derive("lr_warmup_init", _rounded(lr / (steps + 1)), "warmup_steps")


def _decay(translation: Translation, style: str, end: int | None) -> None:
    """Set the decay of the learning rate.

    Args:
        style: shape of the decay.
        end: last step of the schedule; None if the file does not have it.
    """
    warmup = translation.options.get("lr_warmup_iters", 0)
    start = translation.parts.get("decay_start", warmup)
    if end is None:
        problem = "the file does not contain the number of steps; give --lr-decay-iters"
        for part in ("decay_ratio", "decay_start", "decay_steps"):
            translation.set_verdict(part, NO_EQUIVALENT, f"{problem}, and --lr-wsd-decay-iters")
        translation.set_verdict("constant_steps", NO_EQUIVALENT, problem)
        if style != "minus_sqrt":
            translation.derive("lr_decay_style", style, "decay_style")
        else:
            translation.set_verdict(
                "decay_style", NO_EQUIVALENT, f"{problem}, --lr-decay-style WSD and --lr-wsd-decay-iters"
            )
        return
    parts = ("decay_style", "total_steps", "decay_ratio", "decay_start", "decay_steps", "constant_steps")
    if "decay_ratio" in translation.parts:
        start = max(warmup, end - round(end * translation.parts.get("decay_ratio")))
    elif "decay_steps" in translation.parts:
        end = start + translation.parts.get("decay_steps")
    elif (
        "decay_start" in translation.parts
    ):  # nanotron's decay then has the same length as if it started after the warmup
        end = start + end - warmup
    end -= translation.parts.get("constant_steps", 0)
    translation.derive("lr_decay_iters", end, *parts)
    if start > warmup or style == "minus_sqrt":
        translation.derive("lr_decay_style", "WSD", *parts)
        translation.derive("lr_wsd_decay_style", style, *parts)
        translation.derive("lr_wsd_decay_iters", end - start, *parts)
    else:
        translation.derive("lr_decay_style", style, *parts)


def set_layout(translation: Translation, gpus: int | None) -> int | None:
    """Set the batch sizes and the sharding, which depend on the number of devices.

    Args:
        gpus: the number of devices; None: that of the file, if it has one.

    Returns:
        The number of devices; None if it is not known.

    Raises:
        ConfigError: if sizes contradict each other.
    """
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {name: translation.options.get(name, 1) for name in names}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError([f"{translation.options.key(name)} = {size} is not a size; give 1 or more"])
    model = math.prod(sizes.values())
    stated = translation.parts.get("gpus")
    if "devices" in translation.parts:
        stated = translation.parts.get("devices") * translation.parts.get("nodes", 1)
    world = gpus or stated
    if world is not None and world % model:
        raise ConfigError(
            [f"{world} devices are not a multiple of tp x pp x cp = {model}; correct one, or give --gpus N"]
        )
    dp = _data_parallel(translation, world, model)
    known = world // model if world else dp
    dp = set_batch_sizes(translation, known)
    if known is None and dp is not None:
        world = dp * model
    _sharding(translation, dp, sizes["context_parallel_size"])
    world = world or (dp * model if dp else None)
    if world is not None and world % translation.parts.get("nodes", 1):
        raise ConfigError(
            [f"{world} devices are not a multiple of {translation.parts.get('nodes')} machines; correct one"]
        )
    return world


def _data_parallel(translation: Translation, world: int | None, model: int) -> int | None:
    """Return the data-parallel size of the file; None if it has none.

    Args:
        world: the number of devices; None if it is not known.
        model: devices that hold one copy of the model.

    Raises:
        ConfigError: if a size is invalid or contradicts the number of devices.
    """
    shard = translation.parts.get("shard")
    copies = translation.parts.get("replicate", 1)
    dp = translation.parts.get("dp")
    accepts_rest = translation.trainer == "torchtitan"
    if shard is not None and shard < 1 and not (shard == -1 and accepts_rest):
        or_rest = ", or -1 for all remaining ones" if accepts_rest else ""
        raise ConfigError([f"{translation.parts.key('shard')} = {shard} is not a size; give 1 or more{or_rest}"])
    if shard == -1:
        if world is not None and (world // model) % copies:
            raise ConfigError([f"{world // model} data-parallel devices are not a multiple of {copies}; correct one"])
        return world // model if world is not None else None
    if shard is not None or ("replicate" in translation.parts and copies > 1):
        dp = copies * (shard or 1)
        if translation.trainer == "accelerate" and dp * model == 1:  # Accelerate then uses all devices
            return None
        product = f"replicate {copies} x shard {shard or 1}"
    else:
        product = f"dp {dp}"
    if dp is not None and world is not None and dp * model != world:
        rule = f"{product} x tp x pp x cp {model} = {dp * model} is not the {world} devices"
        raise ConfigError([f"{rule}; correct one of them, or give --gpus {dp * model}"])
    return dp


def _sharding(translation: Translation, dp: int | None, cp: int) -> None:
    """Set the ZeRO stage and the number of replicas. The trainers shard over dp_shard x cp. Raises ConfigError."""
    copies = translation.parts.get("replicate", 1)
    if "group" in translation.parts:
        copies = _groups(translation, dp)
    elif translation.trainer == "accelerate":
        copies = _accelerate(translation, dp, cp, copies)
    elif "shard" in translation.parts:
        stage = 3 if _shard_size(translation, dp, copies) * cp > 1 else 0
        translation.derive("zero_stage", stage, "shard", "replicate")
    elif translation.trainer == "nemo":
        _nemo(translation)
    stage = translation.options.get("zero_stage")
    if copies > 1 and stage != 0:
        translation.derive("num_distributed_optimizer_instances", copies, "replicate", "group", "strategy", "reshard")
    # the other trainer's FSDP excludes its distributed optimizer; megalite's includes it
    if stage and translation.options.get("use_distributed_optimizer") is False:
        translation.options.entries.pop("use_distributed_optimizer")


def _shard_size(translation: Translation, dp: int | None, copies: int) -> float:
    """Return the number of ranks that shard a replica; infinity if it is not known."""
    shard = translation.parts.get("shard", 1)
    if shard != -1:
        return shard
    return math.inf if dp is None else dp // copies


def _groups(translation: Translation, dp: int | None) -> int:
    """Return the number of groups that shard everything at ZeRO stage 3 (DeepSpeed's MiCS)."""
    group = translation.parts.get("group")
    if translation.options.get("zero_stage") != 3:
        translation.set_verdict("group", BUILT_IN, "DeepSpeed reads it only at stage 3")
        return 1
    if dp is None:
        raise ConfigError(
            [f"{translation.parts.key('group')} = {group}: sets depend on the number of devices; give --gpus N"]
        )
    if dp % group:
        raise ConfigError(
            [f"{translation.parts.key('group')} = {group} does not divide data parallel {dp}; correct one"]
        )
    return dp // group


def _nemo(translation: Translation) -> None:
    """Set the ZeRO stage of NeMo's FSDP.

    FSDP and NeMo's distributed optimizers exclude each other. Without both, nothing is sharded over dp.
    """
    strategy = str(translation.parts.get("nemo_strategy", "full")).lower()
    if translation.parts.get("nemo_fsdp") != "on":
        for part in ("nemo_strategy", "nemo_reduce"):
            translation.set_verdict(part, BUILT_IN, "has no effect without fsdp")
        if "zero_stage" not in translation.options:
            translation.derive("zero_stage", 0)
        return
    if (stage := {"full": 3, "grad": 2}.get(strategy)) is None:
        for part in ("nemo_fsdp", "nemo_strategy"):
            translation.set_verdict(part, NO_EQUIVALENT, "NeMo supports only full and grad; give --zero-stage 3 or 2")
        return
    translation.derive("zero_stage", stage, "nemo_fsdp", "nemo_strategy")
    if "nemo_reduce" in translation.parts:
        translation.derive("grad_reduce_in_bf16", True, "nemo_reduce")


def _accelerate(translation: Translation, dp: int | None, cp: int, copies: int) -> int:
    """Set Accelerate's sharding, and return the number of replicas.

    FSDP 1 has a strategy. FSDP 2 shards over dp_shard x cp, or over all ranks if these sizes are missing.

    Raises:
        ConfigError: if FSDP 1 has a parallelism_config.
    """
    kind = translation.parts.get("distributed", "")
    sized = (
        translation.parts.get("shard", 1) * copies * cp > 1
        or translation.options.get("tensor_model_parallel_size", 1) > 1
    )
    fsdp = kind == "fsdp" or (
        kind == "" and any(part in translation.parts for part in ("version", "strategy", "reshard"))
    )
    if kind in ("deepspeed", "megatron_lm"):
        translation.set_verdict("distributed", BUILT_IN, f"{kind}_config has the details")
        return 1
    if not fsdp and not (sized and "shard" in translation.parts):
        if kind:
            translation.derive("zero_stage", 0, "distributed")
        for part in ("version", "strategy", "reshard"):
            translation.set_verdict(part, BUILT_IN, "Accelerate reads it where distributed_type is FSDP")
        return 1
    reshard = str(translation.parts.get("reshard", "")).lower()
    strategy = str(translation.parts.get("strategy", "")).lower()
    version = str(translation.parts.get("version", 2 if sized or reshard in ("true", "false") else 1))
    if version == "2":
        translation.set_verdict("strategy", BUILT_IN, "FSDP 2 reads fsdp_reshard_after_forward instead")
        if sized:
            stage = 3 if translation.parts.get("shard", 1) * cp > 1 else 0
            translation.derive("zero_stage", stage, "shard", "replicate", "version")
        else:
            stage = 3
            translation.derive("zero_stage", 3, "version", "reshard", "distributed")
        if reshard in FSDP_STAGES:
            translation.set_verdict("reshard", NO_EQUIVALENT, "FSDP 2 takes true or false; write one")
        elif stage and reshard:
            translation.derive("reshard_after_forward", "layer" if reshard == "true" else "chunk", "reshard")
        return copies
    if sized:
        raise ConfigError(
            [f"{translation.parts.key('version')} = {version}: FSDP 1 takes no parallelism_config; give version 2"]
        )
    strategies = dict(enumerate(FSDP_STAGES, start=1))
    part = "strategy" if strategy else "reshard"
    name = strategy or reshard or "full_shard"
    name = strategies.get(int(name), name) if re.fullmatch(r"\d", name) else name
    if name not in FSDP_STAGES:
        translation.set_verdict(part, NO_EQUIVALENT, f"this is not a strategy; give {', '.join(FSDP_STAGES)}")
        return 1
    if strategy:
        translation.set_verdict("reshard", BUILT_IN, "FSDP 1 ignores it if fsdp_sharding_strategy is given")
    translation.derive("zero_stage", FSDP_STAGES[name], part, "distributed")
    return translation.parts.get("nodes", 1) if name.startswith("hybrid") else 1


def set_features(translation: Translation) -> None:
    """Set the options of features that one key switches on and another key of its section configures."""
    _momentum(translation)
    _compile(translation)
    _profile(translation)
    _checkpoints(translation)
    if translation.parts.get("shared") == "on":
        translation.derive(
            "moe_shared_expert_intermediate_size", translation.parts.get("shared_size"), "shared", "shared_size"
        )
        translation.derive("moe_shared_expert_gate", True, "shared")
    else:
        translation.set_verdict("shared_size", BUILT_IN, "has no effect without enable_shared_expert")
    if translation.parts.get("z_loss") == "on":
        translation.derive(
            "z_loss_coeff", translation.parts.get("z_loss_coefficient", 1e-4), "z_loss", "z_loss_coefficient"
        )
    else:
        translation.set_verdict("z_loss_coefficient", BUILT_IN, "has no effect without z_loss_enabled")
    if translation.parts.get("offloading") == "on" and "offload_layers" in translation.parts:
        translation.derive(
            "cpu_offloading_num_layers", translation.parts.get("offload_layers"), "offloading", "offload_layers"
        )
    else:
        translation.set_verdict("offloading", NO_EQUIVALENT, "give --cpu-offloading-num-layers N")
        translation.set_verdict("offload_layers", BUILT_IN, "has no effect without cpu_offloading")
    if translation.parts.get("tensorboard") == "on":
        translation.derive("tensorboard_dir", translation.parts.get("tb_folder", "tb"), "tensorboard", "tb_folder")
    else:
        translation.set_verdict("tb_folder", BUILT_IN, "has no effect without enable_tensorboard")
    if translation.parts.get("validation_length") == translation.options.get("seq_length"):
        translation.set_verdict("validation_length", BUILT_IN, "evaluation has the length of the training")
    else:
        translation.set_verdict("validation_length", NO_EQUIVALENT, "evaluation has the length of --seq-length")


def _momentum(translation: Translation) -> None:
    if "momentum" in translation.parts and translation.options.get("optimizer") in ("sgd", "muon"):
        option = "sgd_momentum" if translation.options.get("optimizer") == "sgd" else "muon_momentum"
        translation.derive(option, float(translation.parts.get("momentum")), "momentum")
    else:
        translation.set_verdict(
            "momentum", NO_EQUIVALENT, "SGD and Muon have a momentum; give --sgd-momentum with --optimizer sgd"
        )


def _compile(translation: Translation) -> None:
    """Set torch.compile. torchtitan compiles the model, the loss or both; megalite has a kernel for the loss."""
    components = translation.parts.get("components", ["model", "loss"])
    if translation.parts.get("compile") != "on":
        translation.set_verdict("components", BUILT_IN, "has no effect without enable")
    elif "model" in (components.split(",") if isinstance(components, str) else components or []):
        translation.derive("compile", True, "compile", "components")
    else:
        for part in ("compile", "components"):
            translation.set_verdict(
                part, BUILT_IN, "only the model's blocks are compiled here; the loss has its own kernel"
            )


def _profile(translation: Translation) -> None:
    """Set the profiled steps: the first of the ranges that torchtitan profiles, one every `profile_freq` steps."""
    if translation.parts.get("profiling") != "on":
        for part in ("profile_freq", "profiler_active", "profiler_warmup"):
            translation.set_verdict(part, BUILT_IN, "has no effect without enable_profiling")
        return
    last = translation.parts.get("profile_freq", 10)
    translation.derive("profile", True, "profiling")
    translation.derive("use_pytorch_profiler", True, "profiling")
    translation.derive(
        "profile_step_start",
        max(0, last - translation.parts.get("profiler_active", 1)),
        "profile_freq",
        "profiler_active",
    )
    translation.derive("profile_step_end", last, "profile_freq", "profiler_active")
    translation.set_verdict("profiler_warmup", BUILT_IN, "the steps before the first that is profiled are its warmup")


def _checkpoints(translation: Translation) -> None:
    """Set the initial weights, the checkpoint to resume from, and the number of checkpoints to keep."""
    path = translation.parts.get("initial_path", translation.options.get("tokenizer_model"))
    if translation.parts.get("initial_in_hf") == "on" and path is not None:
        translation.derive("pretrained_checkpoint", path, "initial_path", "initial_in_hf")
    else:
        export = "export it to Hugging Face's format there, and give --pretrained-checkpoint DIR"
        translation.set_verdict("initial_path", NO_EQUIVALENT, f"a checkpoint of torchtitan is not read: {export}")
        translation.set_verdict("initial_in_hf", NO_EQUIVALENT, "give --pretrained-checkpoint DIR")
    if "save" in translation.options:
        if "resume" in translation.parts:
            translation.derive("load", translation.options.get("save"), "resume")
    else:
        translation.set_verdict("resume", NO_EQUIVALENT, "give --save DIR, and the same as --load")
    if "top_k" in translation.parts and str(translation.parts.get("monitor", "val_loss")) in (
        "step",
        "global_step",
        "consumed_samples",
    ):
        translation.derive("keep_last", translation.parts.get("top_k"), "top_k", "monitor")
    else:
        translation.set_verdict(
            "top_k",
            NO_EQUIVALENT,
            "the newest checkpoints are kept, not those with the lowest loss; give --keep-last N",
        )
        translation.set_verdict("monitor", BUILT_IN, "it belongs to save_top_k")


def checked_values(translation: Translation) -> Mapping[str, Any]:
    """Return option -> value. Raises ConfigError with the conflicts."""
    if conflicts := translation.parts.conflicts + translation.options.conflicts:
        raise ConfigError(list(dict.fromkeys(conflicts))[:40])
    return {name: entry.value for name, entry in translation.options.entries.items()}
