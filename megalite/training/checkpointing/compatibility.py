"""Differences between a checkpoint's configuration and a run's, and options that a checkpoint supplies."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.storage import storage
from megalite.checkpoint.storage.location import CheckpointError, Location, parse_location
from megalite.common.console import print_err
from megalite.config.config_file import parse_config_text
from megalite.config.option import EXECUTION, MODEL, option_spec
from megalite.config.options import Config, ConfigError, ModelConfig, build, is_explicit
from megalite.config.plugins import missing_plugins_message
from megalite.config.validation import find_problems
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.interop.tensor_mapping import PLACEHOLDER_OPTIONS
from megalite.training.checkpointing.named_tokenizer import PrintLine, print_external_paths
from megalite.training.checkpointing.upcycling import EXPERT_OPTIONS, upcycles, upcycling_hint
from megalite.training.datasets import TOKENIZER_OPTIONS
from megalite.training.setup import SetupError

MAX_NAMED = 3  # options that an error message names


def checkpoint_config(manifest: Manifest, directory: Location) -> Config:
    """Return the configuration of the run that wrote the checkpoint; raises CheckpointError if it cannot be read."""
    try:
        config = build(parse_config_text(str(manifest.state["config"]), str(directory)))
        config = replace(config, model=config.model.for_any_pipeline())
        if problems := find_problems(replace(build(PLACEHOLDER_OPTIONS), model=config.model)):
            raise ConfigError(problems)
        data, rows = config.data, manifest.state.get("vocab_size")
        # Old checkpoints do not count the end-of-document token.
        if data.tokenizer_type == "NullTokenizer" and data.vocab_size is not None and rows == data.vocab_size + 1:
            config = replace(config, data=replace(data, vocab_size=rows))
        return config
    except (KeyError, ValueError, OverflowError) as error:  # a ConfigError is a ValueError
        if missing_plugins := missing_plugins_message(manifest.state.get("plugins")):
            raise CheckpointError(f"{directory} {missing_plugins}") from None
        reason = f"its configuration cannot be read ({error}); use another checkpoint"
        raise CheckpointError(f"{directory}: {reason}") from None


def model_differences(model: ModelConfig, saved: ModelConfig, source: str) -> list[str]:
    """Return a line for each option that changes what weights mean and whose effective values differ.

    Args:
        source: The name of `saved` in the lines.
    """
    lines = []
    for field in fields(ModelConfig):
        spec = option_spec(field)
        if spec.resume != MODEL or spec.acts_through is not None:
            continue
        local_value, saved_value = (getattr(m, spec.effective_property or field.name) for m in (model, saved))
        if local_value != saved_value and isinstance(local_value, tuple):  # one value per layer is too long to show
            local_value, saved_value = getattr(model, field.name), getattr(saved, field.name)
        if local_value != saved_value:
            lines.append(f"{field.name}: {local_value!r} here, {saved_value!r} in {source}")
    return lines


def tokenizer_identity(tokenizer: Tokenizer | None) -> dict[str, str] | None:
    if tokenizer is None or tokenizer.is_null:
        return None
    return {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}


def tokenizer_differences(tokenizer: Tokenizer | None, manifest: Manifest) -> list[str]:
    """Return a line if the checkpoint was trained with another tokenizer, whose ids mean different text, else []."""
    local, saved = tokenizer_identity(tokenizer), manifest.state.get("tokenizer")
    if local is None or not isinstance(saved, dict) or saved.get("fingerprint") == local["fingerprint"]:
        return []
    saved_tokenizer = f"{saved.get('name')} {str(saved.get('fingerprint'))[:12]}"
    return [f"tokenizer: {local['name']} {local['fingerprint'][:12]} here, {saved_tokenizer} in the checkpoint"]


def apply_checkpoint_args(config: Config, print_line: PrintLine = print_err) -> Config:
    """Return `config` with the model's options from the newest readable checkpoint, under --use-checkpoint-args.

    The tokenizer's options are taken over too if none is given. `print_line` is called with lines for the user.

    Raises:
        SetupError: if a given option contradicts the checkpoint, or if no checkpoint can be read.
    """
    checkpoint = config.checkpoint
    if not checkpoint.use_checkpoint_args:
        return config
    source = checkpoint.pretrained_checkpoint
    if checkpoint.load is not None and storage.steps_in(checkpoint.load):
        source = checkpoint.load
    steps = [] if source is None else storage.steps_in(source)
    if checkpoint.ckpt_step is not None and source is not None and source == checkpoint.load:
        steps = [checkpoint.ckpt_step]
    errors: list[str] = []
    for step in reversed(steps):
        directory = storage.checkpoint_dir(source or "", step)
        try:
            saved = checkpoint_config(manifests.load_manifest(directory), directory)
            break
        except CheckpointError as error:
            errors.append(str(error))
    else:
        reason = f": none in it can be read: {'; '.join(errors)}" if errors else " holds no checkpoint"
        raise SetupError(
            f"use_checkpoint_args: load={source or checkpoint.load!r}{reason}; give the model's options instead"
        )
    if config.train.dry_run:  # a run reports unreadable checkpoints when it loads
        for error in errors:
            print_err(f"skipping {error}")
    data = config.data
    config = apply_model(config, saved.model, "the checkpoint")
    if data.tokenizer_type is None and data.vocab_size is None:
        tokenizer = {name: getattr(saved.data, name) for name in TOKENIZER_OPTIONS if name not in config.explicit}
        print_external_paths(tokenizer, parse_location(source or ""), print_line)
        data = replace(data, **tokenizer)
    return replace(config, data=data)


def apply_model(config: Config, saved: ModelConfig, source: str) -> Config:
    """Return `config` with the model `saved`, except for given options and options that only affect execution.

    Args:
        source: The name of `saved` in an error message.

    Raises:
        SetupError: if a given option contradicts what the weights mean.
    """
    starts_dense = upcycles(config) and not saved.num_experts  # then this run's options of experts apply
    local_names = {
        field.name
        for field in fields(ModelConfig)
        if option_spec(field).resume == EXECUTION or is_explicit(config, field.name)
    }
    if "hybrid_layer_pattern" not in local_names and config.model.num_layers == saved.num_layer_values:
        local_names.discard("num_layers")  # the letters of the pattern, as Megatron-LM counts its layers
    if starts_dense:
        local_names.update(EXPERT_OPTIONS)
    values = {name: getattr(config.model, name) for name in sorted(local_names)}
    local_model = config.model.for_any_pipeline()
    if saved.hybrid_layer_pattern is None and values.get("hybrid_layer_pattern") is not None:
        saved = saved.with_pattern()  # whose lists fit the letters
    if starts_dense and local_model.hybrid_layer_pattern is not None:
        local_model = replace(local_model, hybrid_layer_pattern=local_model.hybrid_layer_pattern.replace("E", "-"))
    compared = {
        name: getattr(local_model, name)
        for name in values
        if getattr(local_model, name) != getattr(saved, name) and not (starts_dense and name in EXPERT_OPTIONS)
    }
    contradictions = [name for name, value in compared.items() if _contradicts({name: value}, config, saved)]
    # Some options contradict only together, such as a number of groups and its switch.
    if not contradictions and _contradicts(compared, config, saved):
        contradictions = [*compared]
    if contradictions:
        lines = [
            f"{name}={values[name]!r}, but {getattr(saved, name)!r} in {source}; drop the option"
            for name in contradictions
        ]
        if not upcycles(config):
            lines += upcycling_hint(config.model, saved)
        raise SetupError("\n".join(lines))
    return replace(config, model=replace(saved, **values))


def _contradicts(values: Mapping[str, Any], config: Config, saved: ModelConfig) -> bool:
    """Return True if the weights of `saved` mean something else with these values of options of `config`."""
    if not is_explicit(config, "activation") and _requests_other_gelu(values, config.model.openai_gelu, saved):
        return True
    try:
        return bool(model_differences(replace(saved, **values), saved, ""))
    except ValueError:  # a layer pattern for another number of layers
        return True


def _requests_other_gelu(values: Mapping[str, Any], openai_gelu: bool, saved: ModelConfig) -> bool:
    """Return True if Megatron-LM's flags for the variant of gelu request another one than `saved` has.

    This applies if no flag names an activation.
    """
    if saved.activation not in ("gelu", "gelu_erf"):
        return False
    if values.get("openai_gelu"):
        return saved.activation != "gelu"
    fused = values.get("bias_gelu_fusion")
    if fused is None or openai_gelu:
        return False
    if fused:
        return saved.activation == "gelu_erf" and saved.add_bias_linear
    return saved.activation == "gelu"
