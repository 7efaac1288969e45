"""What several keys of another trainer's configuration give together: batch sizes, rates, the layout over devices.

A key whose meaning depends on others gives a part, as `total` or `decay_ratio`; the rules here make options of parts.
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
SUPPORTED, BUILT_IN, NO_EQUIVALENT = "acts", "always so here", "no equivalent"
BESIDE, DEFAULT, GIVEN, OVERRIDES = range(4)  # how much a value weighs

MAX_WHOLE = 10**15  # of a size, a count or a number of steps
COUNTS = {"total", "accumulation", "local", "pipeline_micro", "gpus", "devices", "nodes", "replicate", "group", "dp"}
COUNTS |= {"shared_size", "profile_freq", "profiler_active", "profiler_warmup", "top_k"}
WHOLE = {"shard", "rank", "port", "decay_start", "decay_steps", "total_steps", "warmup_steps", "constant_steps"}
WHOLE |= {"offload_layers", "validation_length"}
SHARES = {"decay_ratio", "min_lr_factor", "warmup_ratio"}
NUMBERS = {"scale_power", "momentum", "z_loss_coefficient"}
TEXTS = {"address", "strategy", "reshard", "tb_folder", "initial_path", "nemo_strategy", "monitor", "family", "flavor"}
FSDP_STAGES = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2}


class Saying(NamedTuple):
    value: Any
    key: str
    weight: int


class Sayings:
    """Name -> value, with the key that says so. Two keys that say different values are a conflict, unless one weighs
    more: a key that overrides others in its trainer, or any key beside a default. For the names in `either` one key
    that says true is enough."""

    def __init__(self, either: Collection[str] = ()) -> None:
        self.said: dict[str, Saying] = {}
        self.conflicts: list[str] = []
        self._either = either

    def __contains__(self, name: str) -> bool:
        return name in self.said

    def get(self, name: str, default: Any = None) -> Any:
        return self.said[name].value if name in self.said else default

    def key(self, name: str) -> str:
        return self.said[name].key

    def say(self, name: str, value: Any, key: str, weight: int = GIVEN) -> None:
        other = self.said.get(name)
        if other is None or weight > other.weight:
            self.said[name] = Saying(value, key, weight)
        elif value == other.value or weight < other.weight:
            return
        elif name in self._either:
            self.said[name] = self.said[name]._replace(value=True)
        else:
            both = f"{other.key} gives {name} = {shown(other.value)}, and {key} gives {shown(value)}"
            self.conflicts.append(f"{both}; keep one")


@dataclass
class Translation:
    """`told`: part -> (verdict, text), where it is another than that the part acts."""

    trainer: str
    options: Sayings
    parts: Sayings = field(default_factory=Sayings)
    told: dict[str, tuple[str, str]] = field(default_factory=dict)

    def derive(self, name: str, value: Any, *parts: str) -> None:
        """Set an option from parts, with the weight of the one that weighs most. An option that no part asks for has
        the weight of a default."""
        given = [self.parts.said[part] for part in parts if part in self.parts]
        key = " with ".join(dict.fromkeys(saying.key for saying in given))
        self.options.say(name, value, key, max((saying.weight for saying in given), default=DEFAULT))

    def tell(self, part: str, verdict: str, text: str) -> None:
        if part in self.parts:
            self.told[part] = verdict, text


def shown(value: Any) -> str:
    return json.dumps(value, default=str)


def number(value: Any) -> int | float:
    """YAML reads 1e-4 as a text, JSON 5e8 as a float. Raises ValueError."""
    try:
        result = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{shown(value)[:100]} is no number; write one") from None
    if isinstance(value, bool) or not math.isfinite(result):
        raise ValueError(f"{shown(value)} is no finite number; write one")
    return int(result) if isinstance(result, int) or result.is_integer() else result


def whole_number(value: Any) -> int:
    """Raises ValueError."""
    whole = number(value)
    if not isinstance(whole, int) or abs(whole) > MAX_WHOLE:
        raise ValueError(f"{shown(value)[:100]} is no whole number of at most {MAX_WHOLE:.0e}; write one")
    return whole


def typed(option: str, value: Any) -> Any:
    """The value as the option's type. Raises ValueError."""
    kind = type_name(FIELDS[option])
    if kind == "bool":
        value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    if kind == "int":
        value = whole_number(value)
    elif kind == "float":
        value = number(value)
    return convert_value(FIELDS[option], value)


def part_of(part: str, value: Any) -> Any:
    """The value of a part, of its type. Raises ValueError."""
    if part in COUNTS | WHOLE:
        whole = whole_number(value)
        if part in COUNTS and whole < 1:
            raise ValueError(f"{whole} is not above 0; write a number that is")
        return whole
    if part in SHARES:
        share = number(value)
        if not 0 <= share <= 1:
            raise ValueError(f"{shown(value)} is no share; write a number from 0 to 1")
        return share
    if part in NUMBERS:
        return number(value)
    if part in TEXTS and isinstance(value, dict | list):
        raise ValueError(f"{shown(value)[:100]} is no text; write one")
    return value


def batch(t: Translation, dp: int | None) -> int | None:
    """Set the batch sizes by DeepSpeed's rule, train batch = micro-batch x accumulation x dp, of which two give the
    third. nanotron and torchtitan have the same without a train batch, the others name both sizes. Return dp, where it
    follows. Raises ConfigError."""
    if t.trainer not in ("deepspeed", "nanotron", "torchtitan"):
        return dp
    _pipeline_batch(t)
    total, steps = t.parts.get("total", t.options.get("global_batch_size")), t.parts.get("accumulation")
    micro, local = t.options.get("micro_batch_size"), t.parts.get("local")
    steps = local // micro if local is not None and micro and local != micro else steps
    if any(size is not None and size < 1 for size in (total, micro, steps)):
        raise ConfigError([f"batch sizes {total}, {micro}, {steps} are not all above 0; correct them"])
    if local is not None and total and dp and total % (local * dp):
        raise ConfigError([f"the global batch size {total} is no multiple of {local} x {dp} (dp); correct one"])
    if total and micro and steps and local is None:
        dp = total // (micro * steps) if dp is None and total % (micro * steps) == 0 else dp
        if total != micro * steps * (dp or 1):
            product = f"{micro} x {steps} x {dp or 'dp'}{f' = {micro * steps * dp}' if dp else ''}"
            why = f"the train batch size {total} is not micro-batch x accumulation x data-parallel size, {product}"
            raise ConfigError([f"{why}; correct one of them, or give --gpus N"])
    elif dp is None:
        if (total and not micro) or (micro and not total and steps):
            raise ConfigError(["the batch of a step depends on the number of devices; give --gpus N"])
    elif micro and not total:
        t.derive("global_batch_size", micro * (steps or 1) * dp, "accumulation", "local")
    elif total and not micro:
        micro, rest = divmod(total, (steps or 1) * dp)
        if rest:
            raise ConfigError([f"the train batch size {total} is no multiple of {steps or 1} x {dp} (dp); correct one"])
        t.derive("micro_batch_size", micro, "total")
    if "total" in t.parts:
        t.derive("global_batch_size", total, "total")
    elif steps and not micro:
        flags = "--micro-batch-size and --global-batch-size, that is micro x this x dp"
        t.tell("accumulation", NO_EQUIVALENT, f"the file has no batch size; give {flags}")
    return dp


def _pipeline_batch(t: Translation) -> None:
    """torchtitan's local batch is one micro-batch, but with a pipeline, which cuts it. Raises ConfigError."""
    local = t.parts.get("local")
    if local is None:
        return
    if t.options.get("pipeline_model_parallel_size", 1) == 1:
        t.derive("micro_batch_size", local, "local")
        t.tell("pipeline_micro", BUILT_IN, "there is no pipeline that would cut a batch")
        return
    micro = t.parts.get("pipeline_micro", 1)
    if local % micro:
        raise ConfigError([f"the local batch size {local} is no multiple of the pipeline's {micro}; correct one"])
    t.derive("micro_batch_size", micro, "pipeline_micro")


def rates(t: Translation) -> None:
    """Set the schedule. A decay that begins after the warm-up is WSD's."""
    _warm_up(t)
    lr = t.options.get("lr")
    for part, option in (("min_lr_factor", "min_lr"), ("warmup_ratio", "lr_warmup_init")):
        if part in t.parts and lr is None and t.parts.get(part) != 0:
            t.tell(
                part,
                NO_EQUIVALENT,
                f"it is a share of the rate, which the file does not have; give {flag_name(option)}",
            )
        elif part in t.parts:
            t.derive(option, _rounded((lr or 0.0) * t.parts.get(part)), part)
    if (power := t.parts.get("scale_power")) is not None:
        if 0 <= power <= 64:
            t.derive("initial_loss_scale", 2.0**power, "scale_power")
        else:
            t.tell("scale_power", NO_EQUIVALENT, "2 to this power is no loss scale; give --initial-loss-scale")
    style = t.parts.get("decay_style")
    if t.trainer == "nanotron" and style is not None and lr is not None and "min_lr" not in t.options:
        t.derive("min_lr", lr)  # nanotron's rate stays what it is where no end of it is given
    end = t.parts.get("total_steps", t.options.get("train_iters"))
    if style == "constant":
        t.derive("lr_decay_style", "constant", "decay_style")
        t.tell("total_steps", BUILT_IN, "the rate stays what it is")
    elif style is not None:
        _decay(t, style, end)
    elif "total_steps" in t.parts:
        t.derive("lr_decay_iters", end, "total_steps")


def _rounded(rate: float) -> float:
    return float(f"{rate:.12g}")


def _warm_up(t: Translation) -> None:
    """NeMo's: step n has (n + 1) / (steps + 1) of the rate, but n / steps where `constant_steps` follow the decay."""
    steps, lr = t.parts.get("warmup_steps"), t.options.get("lr")
    if steps is None:
        return
    t.derive("lr_warmup_iters", steps, "warmup_steps")
    if steps and lr is not None and not t.parts.get("constant_steps"):
        t.derive("lr_warmup_init", _rounded(lr / (steps + 1)), "warmup_steps")


def _decay(t: Translation, style: str, end: int | None) -> None:
    warmup = t.options.get("lr_warmup_iters", 0)
    start = t.parts.get("decay_start", warmup)
    if end is None:
        needs = "the file does not say how many steps the training has; give --lr-decay-iters"
        for part in ("decay_ratio", "decay_start", "decay_steps", "constant_steps"):
            t.tell(part, NO_EQUIVALENT, f"{needs}, and --lr-wsd-decay-iters" if part != "constant_steps" else needs)
        if style != "minus_sqrt":
            t.derive("lr_decay_style", style, "decay_style")
        else:
            t.tell("decay_style", NO_EQUIVALENT, f"{needs}, --lr-decay-style WSD and --lr-wsd-decay-iters")
        return
    asked = ("decay_style", "total_steps", "decay_ratio", "decay_start", "decay_steps", "constant_steps")
    if "decay_ratio" in t.parts:
        start = max(warmup, end - round(end * t.parts.get("decay_ratio")))
    elif "decay_steps" in t.parts:
        end = start + t.parts.get("decay_steps")
    elif "decay_start" in t.parts:  # nanotron's decay is then as long as if it had begun after the warm-up
        end = start + end - warmup
    end -= t.parts.get("constant_steps", 0)
    t.derive("lr_decay_iters", end, *asked)
    if start > warmup or style == "minus_sqrt":
        t.derive("lr_decay_style", "WSD", *asked)
        t.derive("lr_wsd_decay_style", style, *asked)
        t.derive("lr_wsd_decay_iters", end - start, *asked)
    else:
        t.derive("lr_decay_style", style, *asked)


def layout(t: Translation, gpus: int | None) -> int | None:
    """Set what the number of devices gives; return that, where it is known. Raises ConfigError."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {name: t.options.get(name, 1) for name in names}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError([f"{t.options.key(name)} = {size} is no size; give 1 or more"])
    model = math.prod(sizes.values())
    stated = t.parts.get("gpus")
    if "devices" in t.parts:
        stated = t.parts.get("devices") * t.parts.get("nodes", 1)
    world = gpus or stated
    if world is not None and world % model:
        raise ConfigError([f"{world} devices are no multiple of tp x pp x cp = {model}; correct one, or give --gpus N"])
    dp = _data_parallel(t, world, model)
    known = world // model if world else dp
    dp = batch(t, known)
    if known is None and dp is not None:
        world = dp * model
    _sharding(t, dp, sizes["context_parallel_size"])
    world = world or (dp * model if dp else None)
    if world is not None and world % t.parts.get("nodes", 1):
        raise ConfigError([f"{world} devices are no multiple of {t.parts.get('nodes')} machines; correct one"])
    return world


def _data_parallel(t: Translation, world: int | None, model: int) -> int | None:
    """dp as the parts give it. Raises ConfigError where it is another than that of the devices."""
    shard, copies, dp = t.parts.get("shard"), t.parts.get("replicate", 1), t.parts.get("dp")
    takes_rest = t.trainer == "torchtitan"
    if shard is not None and shard < 1 and not (shard == -1 and takes_rest):
        rest = ", or -1 for all that are left" if takes_rest else ""
        raise ConfigError([f"{t.parts.key('shard')} = {shard} is no size; give 1 or more{rest}"])
    if shard == -1:
        if world is not None and (world // model) % copies:
            raise ConfigError([f"{world // model} data-parallel devices are no multiple of {copies}; correct one"])
        return world // model if world is not None else None
    if shard is not None or ("replicate" in t.parts and copies > 1):
        dp = copies * (shard or 1)
        if t.trainer == "accelerate" and dp * model == 1:  # it then spreads over all
            return None
        product = f"replicate {copies} x shard {shard or 1}"
    else:
        product = f"dp {dp}"
    if dp is not None and world is not None and dp * model != world:
        why = f"{product} x tp x pp x cp {model} = {dp * model} is not the {world} devices"
        raise ConfigError([f"{why}; correct one of them, or give --gpus {dp * model}"])
    return dp


def _sharding(t: Translation, dp: int | None, cp: int) -> None:
    """Set the ZeRO stage and the number of replicas. Frameworks shard over dp_shard x cp. Raises ConfigError."""
    copies = t.parts.get("replicate", 1)
    if "group" in t.parts:
        copies = _groups(t, dp)
    elif t.trainer == "accelerate":
        copies = _accelerate(t, dp, cp, copies)
    elif "shard" in t.parts:
        stage = 3 if _shard_size(t, dp, copies) * cp > 1 else 0
        t.derive("zero_stage", stage, "shard", "replicate")
    elif t.trainer == "nemo":
        _nemo(t)
    stage = t.options.get("zero_stage")
    if copies > 1 and stage != 0:
        t.derive("num_distributed_optimizer_instances", copies, "replicate", "group", "strategy", "reshard")
    if stage and t.options.get("use_distributed_optimizer") is False:  # FSDP is without it there, and with it here
        t.options.said.pop("use_distributed_optimizer")


def _shard_size(t: Translation, dp: int | None, copies: int) -> float:
    shard = t.parts.get("shard", 1)
    if shard != -1:
        return shard
    return math.inf if dp is None else dp // copies


def _groups(t: Translation, dp: int | None) -> int:
    """MiCS of DeepSpeed: sets of ranks that share out everything at stage 3."""
    group = t.parts.get("group")
    if t.options.get("zero_stage") != 3:
        t.tell("group", BUILT_IN, "DeepSpeed reads it at stage 3 alone")
        return 1
    if dp is None:
        raise ConfigError([f"{t.parts.key('group')} = {group}: sets depend on the number of devices; give --gpus N"])
    if dp % group:
        raise ConfigError([f"{t.parts.key('group')} = {group} does not divide data parallel {dp}; correct one"])
    return dp // group


def _nemo(t: Translation) -> None:
    """NeMo's FSDP, which its distributed optimizers exclude; without both, data parallelism shares out nothing."""
    strategy = str(t.parts.get("nemo_strategy", "full")).lower()
    if t.parts.get("nemo_fsdp") != "on":
        for part in ("nemo_strategy", "nemo_reduce"):
            t.tell(part, BUILT_IN, "asks for nothing without fsdp")
        if "zero_stage" not in t.options:
            t.derive("zero_stage", 0)
        return
    if (stage := {"full": 3, "grad": 2}.get(strategy)) is None:
        for part in ("nemo_fsdp", "nemo_strategy"):
            t.tell(part, NO_EQUIVALENT, "NeMo runs full and grad alone; give --zero-stage 3 or 2")
        return
    t.derive("zero_stage", stage, "nemo_fsdp", "nemo_strategy")
    if "nemo_reduce" in t.parts:
        t.derive("grad_reduce_in_bf16", True, "nemo_reduce")


def _accelerate(t: Translation, dp: int | None, cp: int, copies: int) -> int:
    """Accelerate's: FSDP 1 has a strategy; FSDP 2 shards over dp_shard x cp, or over all ranks without such sizes.
    Return the number of replicas. Raises ConfigError."""
    kind = t.parts.get("distributed", "")
    sized = t.parts.get("shard", 1) * copies * cp > 1 or t.options.get("tensor_model_parallel_size", 1) > 1
    fsdp = kind == "fsdp" or (kind == "" and any(part in t.parts for part in ("version", "strategy", "reshard")))
    if kind in ("deepspeed", "megatron_lm"):
        t.tell("distributed", BUILT_IN, f"{kind}_config says how")
        return 1
    if not fsdp and not (sized and "shard" in t.parts):
        if kind:
            t.derive("zero_stage", 0, "distributed")
        for part in ("version", "strategy", "reshard"):
            t.tell(part, BUILT_IN, "Accelerate reads it where distributed_type is FSDP")
        return 1
    reshard, strategy = str(t.parts.get("reshard", "")).lower(), str(t.parts.get("strategy", "")).lower()
    version = str(t.parts.get("version", 2 if sized or reshard in ("true", "false") else 1))
    if version == "2":
        t.tell("strategy", BUILT_IN, "FSDP 2 does not read it, but fsdp_reshard_after_forward")
        if sized:
            stage = 3 if t.parts.get("shard", 1) * cp > 1 else 0
            t.derive("zero_stage", stage, "shard", "replicate", "version")
        else:
            stage = 3
            t.derive("zero_stage", 3, "version", "reshard", "distributed")
        if reshard in FSDP_STAGES:
            t.tell("reshard", NO_EQUIVALENT, "FSDP 2 takes true or false; write one")
        elif stage and reshard:
            t.derive("reshard_after_forward", "layer" if reshard == "true" else "chunk", "reshard")
        return copies
    if sized:
        raise ConfigError([f"{t.parts.key('version')} = {version}: FSDP 1 takes no parallelism_config; give version 2"])
    strategies = dict(enumerate(FSDP_STAGES, start=1))
    part = "strategy" if strategy else "reshard"
    name = strategy or reshard or "full_shard"
    name = strategies.get(int(name), name) if re.fullmatch(r"\d", name) else name
    if name not in FSDP_STAGES:
        t.tell(part, NO_EQUIVALENT, f"there is no such strategy; give {', '.join(FSDP_STAGES)}")
        return 1
    if strategy:
        t.tell("reshard", BUILT_IN, "FSDP 1 does not read it beside fsdp_sharding_strategy")
    t.derive("zero_stage", FSDP_STAGES[name], part, "distributed")
    return t.parts.get("nodes", 1) if name.startswith("hybrid") else 1


def switches(t: Translation) -> None:
    """Set what two keys of one section say together: whether, and where or how."""
    _momentum(t)
    _compile(t)
    _profile(t)
    _checkpoints(t)
    if t.parts.get("shared") == "on":
        t.derive("moe_shared_expert_intermediate_size", t.parts.get("shared_size"), "shared", "shared_size")
        t.derive("moe_shared_expert_gate", True, "shared")
    else:
        t.tell("shared_size", BUILT_IN, "asks for nothing without enable_shared_expert")
    if t.parts.get("z_loss") == "on":
        t.derive("z_loss_coeff", t.parts.get("z_loss_coefficient", 1e-4), "z_loss", "z_loss_coefficient")
    else:
        t.tell("z_loss_coefficient", BUILT_IN, "asks for nothing without z_loss_enabled")
    if t.parts.get("offloading") == "on" and "offload_layers" in t.parts:
        t.derive("cpu_offloading_num_layers", t.parts.get("offload_layers"), "offloading", "offload_layers")
    else:
        t.tell("offloading", NO_EQUIVALENT, "give --cpu-offloading-num-layers N")
        t.tell("offload_layers", BUILT_IN, "asks for nothing without cpu_offloading")
    if t.parts.get("tensorboard") == "on":
        t.derive("tensorboard_dir", t.parts.get("tb_folder", "tb"), "tensorboard", "tb_folder")
    else:
        t.tell("tb_folder", BUILT_IN, "asks for nothing without enable_tensorboard")
    if t.parts.get("validation_length") == t.options.get("seq_length"):
        t.tell("validation_length", BUILT_IN, "evaluation has the length of the training")
    else:
        t.tell("validation_length", NO_EQUIVALENT, "evaluation has the length of --seq-length")


def _momentum(t: Translation) -> None:
    if "momentum" in t.parts and t.options.get("optimizer") in ("sgd", "muon"):
        option = "sgd_momentum" if t.options.get("optimizer") == "sgd" else "muon_momentum"
        t.derive(option, float(t.parts.get("momentum")), "momentum")
    else:
        t.tell("momentum", NO_EQUIVALENT, "SGD and Muon have a momentum; give --sgd-momentum with --optimizer sgd")


def _compile(t: Translation) -> None:
    """torchtitan compiles the model, the loss or both; the loss has a kernel here."""
    parts = t.parts.get("components", ["model", "loss"])
    if t.parts.get("compile") != "on":
        t.tell("components", BUILT_IN, "asks for nothing without enable")
    elif "model" in (parts.split(",") if isinstance(parts, str) else parts or []):
        t.derive("compile", True, "compile", "components")
    else:
        for part in ("compile", "components"):
            t.tell(part, BUILT_IN, "only the model's blocks are compiled here; the loss has a kernel of its own")


def _profile(t: Translation) -> None:
    """torchtitan profiles some steps of every `profile_freq`; here one range of steps is profiled, its first."""
    if t.parts.get("profiling") != "on":
        for part in ("profile_freq", "profiler_active", "profiler_warmup"):
            t.tell(part, BUILT_IN, "asks for nothing without enable_profiling")
        return
    last = t.parts.get("profile_freq", 10)
    t.derive("profile", True, "profiling")
    t.derive("use_pytorch_profiler", True, "profiling")
    t.derive("profile_step_start", max(0, last - t.parts.get("profiler_active", 1)), "profile_freq", "profiler_active")
    t.derive("profile_step_end", last, "profile_freq", "profiler_active")
    t.tell("profiler_warmup", BUILT_IN, "the steps before the first that is profiled are its warm-up")


def _checkpoints(t: Translation) -> None:
    """Weights to start with, the directory to go on from, and how many checkpoints are kept."""
    path = t.parts.get("initial_path", t.options.get("tokenizer_model"))
    if t.parts.get("initial_in_hf") == "on" and path is not None:
        t.derive("pretrained_checkpoint", path, "initial_path", "initial_in_hf")
    else:
        export = "export it to Hugging Face's format there, and give --pretrained-checkpoint DIR"
        t.tell("initial_path", NO_EQUIVALENT, f"a checkpoint of torchtitan is not read: {export}")
        t.tell("initial_in_hf", NO_EQUIVALENT, "give --pretrained-checkpoint DIR")
    if "save" in t.options:
        t.derive("load", t.options.get("save"), "resume") if "resume" in t.parts else None
    else:
        t.tell("resume", NO_EQUIVALENT, "give --save DIR, and the same as --load")
    if "top_k" in t.parts and str(t.parts.get("monitor", "val_loss")) in ("step", "global_step", "consumed_samples"):
        t.derive("keep_last", t.parts.get("top_k"), "top_k", "monitor")
    else:
        t.tell(
            "top_k", NO_EQUIVALENT, "the newest checkpoints are kept, not those with the least loss; give --keep-last N"
        )
        t.tell("monitor", BUILT_IN, "it belongs to save_top_k")


def checked(t: Translation) -> Mapping[str, Any]:
    """Option -> value. Raises ConfigError with each conflict."""
    if conflicts := t.parts.conflicts + t.options.conflicts:
        raise ConfigError(list(dict.fromkeys(conflicts))[:40])
    return {name: saying.value for name, saying in t.options.said.items()}
