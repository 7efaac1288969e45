"""Contradictions in the options of the optimizer: learning rate, weight decay, offloading."""

from collections.abc import Iterator

from megalite.config.options import Config
from megalite.config.problems import Problem, exclusive, is_above, options_set, requires, shown, value_of
from megalite.config.width_scaling import LR_POWERS


def learning_rate_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the learning rate; none with --skip-train, which only evaluates."""
    if config.train.skip_train:
        return
    optim = config.optim
    yield from _unit_problems(config)
    if optim.lr_warmup_fraction is not None:
        if optim.lr_warmup_iters or optim.lr_warmup_samples:
            yield Problem(
                f"lr_warmup_fraction={optim.lr_warmup_fraction} and a warmup count; give one",
                options=("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "skip_train"),
            )
        if not 0 <= optim.lr_warmup_fraction <= 1:
            yield Problem(
                f"lr_warmup_fraction={optim.lr_warmup_fraction} is not in [0, 1]; give a fraction of the decay",
                options=("lr_warmup_fraction", "skip_train"),
            )
    for name in ("lr_warmup_init", "min_lr"):
        value = value_of(config, name)
        if optim.lr is not None and value > optim.lr:
            yield is_above(name, value, "lr", optim.lr, also=("skip_train",))
    for name, is_minimum in (("min_lr", optim.decoupled_min_lr is None), ("decoupled_min_lr", True)):
        value = value_of(config, name)
        if is_minimum and value is not None and optim.decoupled_lr is not None and value > optim.decoupled_lr:
            yield Problem(
                f"{name}={value} is above decoupled_lr={optim.decoupled_lr}; give a lower --decoupled-min-lr",
                options=(name, "decoupled_lr", "decoupled_min_lr", "skip_train"),
            )


def _unit_problems(config: Config) -> Iterator[Problem]:
    """Yield problems of options that count samples in a run whose length is in steps, or the reverse."""
    unit, other = ("iters", "samples") if config.train.train_samples is None else ("samples", "iters")
    also = ("train_samples", "skip_train")
    for prefix in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        name = f"{prefix}_{other}"
        value = value_of(config, name)
        if value:
            yield Problem(
                f"{name}={value} with train_{unit}; use {prefix}_{unit}",
                options=(name, f"train_{unit}", f"{prefix}_{unit}", *also),
            )
    if config.optim.lr_decay_style == "WSD" and not value_of(config, f"lr_wsd_decay_{unit}"):
        yield requires("lr_decay_style=WSD", f"lr_wsd_decay_{unit}", also=also)


def weight_decay_problems(config: Config) -> Iterator[Problem]:
    optim = config.optim
    start, end = optim.start_weight_decay, optim.end_weight_decay
    if optim.weight_decay_incr_style == "constant":
        for name in options_set(config, "start_weight_decay", "end_weight_decay"):
            yield Problem(
                f"{name}={value_of(config, name)} has no effect on a constant weight decay; add "
                "--weight-decay-incr-style linear",
                options=(name, "weight_decay_incr_style"),
            )
    elif start is None or end is None:
        yield Problem(
            f"weight_decay_incr_style={optim.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay",
            options=("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
        )
    if start is not None and end is not None and end < start:
        yield Problem(
            f"end_weight_decay={end} is below start_weight_decay={start}; weight decay only grows",
            options=("end_weight_decay", "start_weight_decay"),
        )


def optimizer_problems(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.optimizer != "adam" or optim.optimizer_impl == "apex":
        for name in options_set(config, "exp_avg_dtype", "exp_avg_sq_dtype"):
            yield Problem(
                f"{name}={value_of(config, name)} is for the AdamW that is built in; use --optimizer adam, "
                "--optimizer-impl auto",
                options=(name, "optimizer", "optimizer_impl"),
            )
    if optim.optimizer_impl == "apex" and optim.optimizer != "adam" and not optim.is_muon:
        yield Problem(
            f"optimizer_impl=apex is an AdamW, and optimizer={optim.optimizer} is not; use auto",
            options=("optimizer_impl", "optimizer"),
        )
    yield from _optimizer_offload_problems(config)
    yield from _activation_offload_problems(config)
    if optim.is_muon and optim.muon_coefficient_type == "quintic" and optim.muon_num_ns_steps % 5:
        yield Problem(
            f"muon_num_ns_steps={optim.muon_num_ns_steps} is not a multiple of quintic's 5; use 5, or "
            "--muon-coefficient-type simple",
            options=("muon_num_ns_steps", "muon_coefficient_type", "optimizer"),
        )


def mup_problems(config: Config) -> Iterator[Problem]:
    """Yield the problem of an optimizer whose rates muP has no rule for: LAMB, LARS and those of plugins."""
    if config.model.use_mup and config.optim.optimizer not in LR_POWERS:
        yield Problem(
            f"use_mup=True with optimizer={config.optim.optimizer}, for which there is no rule of rates by width; use "
            "adam, sgd or muon",
            options=("use_mup", "optimizer"),
        )


def _optimizer_offload_problems(config: Config) -> Iterator[Problem]:
    optim, parallel = config.optim, config.parallel
    if optim.optimizer_cpu_offload and optim.needs_full_tensors:
        yield Problem(
            f"optimizer_cpu_offload with optimizer={optim.optimizer}: updates of full tensors are not offloaded; use "
            "adam or sgd",
            options=("optimizer_cpu_offload", "optimizer"),
        )
    if optim.optimizer_cpu_offload and optim.optimizer_impl == "apex":
        yield Problem(
            "optimizer_impl=apex updates on a GPU, and optimizer_cpu_offload on the host; use auto",
            options=("optimizer_impl", "optimizer_cpu_offload"),
        )
    is_sharded_once = parallel.effective_zero_stage == 3 and parallel.outer_dp_sharding_strategy != "optim"
    if parallel.param_cpu_offload and not (is_sharded_once and optim.offload_fraction == 1):
        yield Problem(
            "param_cpu_offload needs --zero-stage 3, sharded once, and --optimizer-cpu-offload of all states",
            options=(
                "param_cpu_offload",
                "outer_dp_sharding_strategy",
                "optimizer_offload_fraction",
                "zero_stage",
                "optimizer_cpu_offload",
            ),
        )


def _activation_offload_problems(config: Config) -> Iterator[Problem]:
    train = config.train
    if not train.cpu_offloading_num_layers:
        return
    for name, is_in_conflict in (
        ("recompute_granularity", train.recompute_granularity == "full"),
        ("compile", train.compile),
        ("cuda_graph_impl", train.cuda_graph_impl != "none"),
    ):
        if is_in_conflict:
            yield exclusive(f"cpu_offloading_num_layers={train.cpu_offloading_num_layers}", shown(config, name))


def schedule_length_problems(config: Config) -> Iterator[Problem]:
    """Yield the problem of a warmup or a final decay that is longer than the schedule."""
    if config.train.skip_train:
        return
    optim = config.optim
    unit = "iters" if config.train.train_samples is None else "samples"
    decay_name, warmup_name, wsd_name = f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}"
    total_name = f"train_{unit}"
    decay = value_of(config, decay_name) or value_of(config, total_name)
    warmup = value_of(config, warmup_name)
    wsd = value_of(config, wsd_name)
    if not decay:
        return
    if optim.lr_warmup_fraction is not None:
        warmup = optim.lr_warmup_fraction * decay
    elif warmup >= decay:
        yield Problem(
            f"{warmup_name}={warmup} is not below {decay_name}={decay}; shorten the warmup",
            options=(warmup_name, decay_name, total_name),
        )
    if optim.lr_decay_style == "WSD" and wsd and wsd > decay - warmup:
        yield Problem(
            f"{wsd_name}={wsd} is longer than what the warmup leaves, {decay - warmup:g}; shorten it",
            options=(wsd_name, decay_name, total_name, warmup_name),
        )
