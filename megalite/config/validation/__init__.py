"""Checks of a configuration.

`find_problems` returns all contradictions at once, `find_ineffective` the notes about options that do nothing. There is
a module for each group of options. All checks are pure functions of the configuration and do not import torch.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from megalite.config.option import flag_name, option_spec
from megalite.config.options import Config, iter_options, left_to_checkpoint
from megalite.config.problems import Problem
from megalite.config.validation import checkpoint, data, effects, experts, launch, model, optimizer, parallel, training
from megalite.config.validation.world import world_problems


def find_problems(
    config: Config, world_size: int | None = None, *, is_complete: bool = False, unreadable: Iterable[str] = ()
) -> list[Problem]:
    """Return all contradictions of a configuration.

    Args:
        world_size: the number of ranks; None skips the checks that depend on it.
        is_complete: `config` contains everything that --load could add. Otherwise it may lack the vocabulary size, and
            the options that --use-checkpoint-args takes from the checkpoint.
        unreadable: options whose value could not be read. Problems that mention one of them are not reported.
    """
    unreadable = set(unreadable)
    out_of_range = {name: problem for name, problem in _range_problems(config) if name not in unreadable}
    if not is_complete:
        unreadable |= left_to_checkpoint(config)
    unreadable |= out_of_range.keys()
    is_complete = is_complete or (config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None)
    config = _with_placeholders(config, unreadable)
    problems = [
        *launch.launch_problems(config),
        *data.data_problems(config, is_complete),
        *data.tokenizer_problems(config, is_complete),
        *checkpoint.checkpoint_problems(config),
        *model.position_problems(config),
        *parallel.micro_batch_group_problems(config),
        *model.window_length_problems(config),
        *parallel.context_parallel_problems(config),
        *parallel.linear_attention_kernel_problems(config),
        *parallel.pipeline_problems(config),
        *parallel.sharding_problems(config),
        *parallel.noise_scale_problems(config),
        *training.training_problems(config),
        *optimizer.learning_rate_problems(config),
        *optimizer.weight_decay_problems(config),
        *optimizer.optimizer_problems(config),
        *optimizer.mup_problems(config),
        *training.cuda_graph_problems(config),
        *experts.expert_problems(config),
        *model.attention_problems(config),
        *model.tensor_parallel_size_problems(config),
        *parallel.fsdp_problems(config),
        *model.model_problems(config),
        *parallel.layout_problems(config),
        *optimizer.schedule_length_problems(config),
        *training.batch_size_problems(config),
        *launch.run_name_problems(config),
        *data.split_problems(config),
    ]
    if world_size is not None:
        problems += world_problems(config, world_size)
    readable = [problem for problem in problems if not problem.mentions(unreadable)]
    return [*dict.fromkeys(out_of_range.values()), *readable]


def find_ineffective(config: Config, *, is_complete: bool = False) -> list[Problem]:
    """Return notes about options that do nothing, or less than expected.

    Args:
        is_complete: see `find_problems`.
    """
    unreadable = set() if is_complete else left_to_checkpoint(config)
    config = _with_placeholders(config, unreadable)
    notes = [
        *effects.position_notes(config),
        *effects.mtp_notes(config),
        *effects.context_parallel_notes(config),
        *effects.expert_notes(config),
        *effects.parallel_notes(config),
        *effects.optimizer_notes(config),
        *effects.mup_notes(config),
        *effects.training_notes(config),
        *effects.data_notes(config),
        *effects.checkpoint_notes(config),
        *effects.log_notes(config),
        *effects.window_notes(config),
    ]
    return [note for note in notes if not note.mentions(unreadable)]


def _with_placeholders(config: Config, unreadable: Collection[str]) -> Config:
    """Return `config` with valid values for the unreadable options, so that all others can be checked."""
    for section, f in iter_options():
        if f.name in unreadable:
            placeholder = option_spec(f).placeholder
            value = f.default if placeholder is None else placeholder
            config = replace(config, **{section: replace(getattr(config, section), **{f.name: value})})
    return config


def _range_problems(config: Config) -> Iterator[tuple[str, Problem]]:
    """Yield (option, problem) for every value that is missing or outside the option's range."""
    for section, f in iter_options():
        value = getattr(getattr(config, section), f.name)
        spec = option_spec(f)
        if value == 0 and spec.required:
            if f.name not in left_to_checkpoint(config):
                or_preset = " or a --preset" if section == "model" else ""
                yield f.name, Problem(f"{f.name}=0 is not set; give {flag_name(f.name)}{or_preset}", [f.name])
        elif reason := spec.range_error(value):
            yield f.name, Problem(f"{f.name}={value or 0} {reason}", [f.name])
    if problem := model.hybrid_pattern_error(config):  # then the number of layers is unknown, too
        yield from (("hybrid_layer_pattern", problem), ("num_layers", problem))
    if config.optim.lr is None and not config.train.skip_train:
        yield "lr", Problem("lr is not set; give --lr", ["lr"])
