"""Contradictions in the options of checkpoints."""

from collections.abc import Iterator

from megalite.config.options import Config
from megalite.config.problems import Problem, exclusive, options_set


def checkpoint_problems(config: Config) -> Iterator[Problem]:
    checkpoint, model = config.checkpoint, config.model
    save_local = checkpoint.save_local
    if save_local and save_local == checkpoint.save:
        yield Problem(
            f"save_local={save_local!r} is --save; give another directory, or remove it", options=("save_local", "save")
        )
    if save_local and "://" in save_local:
        yield Problem(f"save_local={save_local!r} is a URL; give a directory on a fast disk", options=("save_local",))
    if save_local and not checkpoint.save:
        yield Problem(f"save_local={save_local} keeps nothing without --save; add it", options=("save_local", "save"))
    if checkpoint.ckpt_step is not None and not checkpoint.load:
        yield Problem(
            f"ckpt_step={checkpoint.ckpt_step} selects a checkpoint of --load; add --load",
            options=("ckpt_step", "load"),
        )
    if not checkpoint.load and not checkpoint.pretrained_checkpoint:
        if checkpoint.exit_on_missing_checkpoint:
            yield Problem(
                "exit_on_missing_checkpoint needs a checkpoint to load; add --load",
                options=("exit_on_missing_checkpoint", "load", "pretrained_checkpoint"),
            )
        for name in options_set(config, "use_checkpoint_args", "moe_use_upcycling"):
            yield Problem(
                f"{name} needs --load or --pretrained-checkpoint", options=(name, "load", "pretrained_checkpoint")
            )
    shared = model.moe_shared_expert_intermediate_size
    if checkpoint.moe_use_upcycling and shared is not None and model.num_experts:
        yield Problem(
            "moe_use_upcycling, but no dense model has the block of "
            f"moe_shared_expert_intermediate_size={shared}; drop one",
            options=("moe_use_upcycling", "moe_shared_expert_intermediate_size", "num_experts"),
        )
    if checkpoint.override_opt_param_scheduler and checkpoint.use_checkpoint_opt_param_scheduler:
        yield exclusive("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
