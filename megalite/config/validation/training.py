"""Contradictions in the options of training: its length, batch sizes, precision, recomputation, CUDA graphs."""

from collections.abc import Iterator

from megalite.config.option_parsers import parse_batch_schedule
from megalite.config.options import Config
from megalite.config.problems import Problem, comma_separated, exclusive, is_above, requires, shown
from megalite.config.registry import REGISTRIES

DROP_GRAPHS = "(or drop --cuda-graph-impl)"


def training_problems(config: Config) -> Iterator[Problem]:
    train, checkpoint = config.train, config.checkpoint
    if train.train_iters is not None and train.train_samples is not None:
        yield exclusive("train_iters", "train_samples")
    if train.train_iters is None and train.train_samples is None:
        yield Problem(
            "train_iters is not set; give --train-iters or --train-samples", options=("train_iters", "train_samples")
        )
    yield from _precision_problems(config)
    if train.spike_action == "rollback" and (not checkpoint.save or checkpoint.no_save_optim):
        yield Problem(
            "spike_action=rollback needs complete checkpoints; add --save, without --no-save-optim",
            options=("spike_action", "save", "no_save_optim"),
        )
    if train.rampup_batch_size is not None and len(train.rampup_batch_size) != 3:
        yield Problem(
            f"{shown(config, 'rampup_batch_size')} is not three numbers; give START INCREMENT SAMPLES",
            options=("rampup_batch_size",),
        )
    if train.step_batch_size_schedule and train.rampup_batch_size:
        yield exclusive(f"step_batch_size_schedule={train.step_batch_size_schedule!r}", "rampup_batch_size")
    if train.recompute_granularity == "full" and train.recompute_method is None:
        yield requires("recompute_granularity=full", "recompute_method", value="uniform or block")


def _precision_problems(config: Config) -> Iterator[Problem]:
    precision = config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield is_above("min_loss_scale", precision.min_loss_scale, "initial_loss_scale", precision.initial_loss_scale)
    if precision.bf16 and precision.fp16:
        yield exclusive("bf16", "fp16")


def cuda_graph_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of CUDA graphs and torch.compile, except with ZeRO stages (sharding_problems)."""
    train, parallel, model = config.train, config.parallel, config.model
    graphs = f"cuda_graph_impl={train.cuda_graph_impl}"
    has_graphs = train.cuda_graph_impl != "none"
    layer_metric = next(
        (name for name, subject in REGISTRIES["metric"].plugin_components.items() if subject == "layer"), None
    )
    if has_graphs and parallel.device == "cpu":
        yield Problem(f"{graphs} needs a CUDA device {DROP_GRAPHS}", options=("cuda_graph_impl", "device"))
    if has_graphs:
        for name, size in (
            ("tensor_model_parallel_size", parallel.tensor_model_parallel_size),
            ("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size),
            ("context_parallel_size", parallel.context_parallel_size),
        ):
            if size > 1:
                yield Problem(f"{graphs} needs {name} 1 {DROP_GRAPHS}", options=("cuda_graph_impl", name))
    if has_graphs and (model.hidden_dropout > 0 or model.attention_dropout > 0):
        yield Problem(
            f"{graphs} would repeat one dropout mask; give --hidden-dropout 0 --attention-dropout 0 {DROP_GRAPHS}",
            options=("cuda_graph_impl", "hidden_dropout", "attention_dropout"),
        )
    if has_graphs and config.data.reset_attention_mask:
        yield Problem(
            f"{graphs} would repeat one micro-batch's documents; drop --reset-attention-mask {DROP_GRAPHS}",
            options=("cuda_graph_impl", "reset_attention_mask"),
        )
    if train.compile and layer_metric is not None:
        yield Problem(
            f"compile=True with metric={layer_metric}: a layer's number would be compiled in; drop one",
            options=("compile",),
        )
    if has_graphs and train.compile:
        yield exclusive(graphs, "--compile", remedy=f"give one {DROP_GRAPHS}")
    if has_graphs and model.num_experts:
        yield Problem(
            f"{graphs} with num_experts={model.num_experts}: the host reads how many tokens go where "
            "(drop --cuda-graph-impl)",
            options=("cuda_graph_impl", "num_experts"),
        )


def batch_size_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of batch sizes that do not depend on the number of ranks."""
    train, seq_length = config.train, config.model.seq_length
    skipped, schedule = train.iterations_to_skip, train.step_batch_size_schedule
    batch_size = train.global_batch_size
    if skipped is not None and min(skipped, default=1) < 1:
        yield Problem(
            f"iterations_to_skip={comma_separated(skipped)}: steps count from 1; remove those below 1",
            options=("iterations_to_skip",),
        )
    if schedule is not None:
        try:
            last = parse_batch_schedule(schedule, seq_length)[-1][1]
        except ValueError as error:
            yield Problem(
                f"step_batch_size_schedule={schedule!r} {error}", options=("step_batch_size_schedule", "seq_length")
            )
        else:
            if batch_size not in (None, last):  # Megatron-LM's own GPT-3 script gives both
                yield Problem(
                    f"step_batch_size_schedule={schedule!r} does not end with global_batch_size={batch_size}; give "
                    f"{last}, or one of both",
                    options=("step_batch_size_schedule", "global_batch_size"),
                )
    if train.rampup_batch_size is not None and len(train.rampup_batch_size) == 3 and batch_size is not None:
        first, increment, _ = train.rampup_batch_size
        growth = batch_size - first
        if growth < 0 or increment < 1 or growth % increment:
            yield Problem(
                f"rampup_batch_size={first} {increment}: global_batch_size={batch_size} is not reached in such steps; "
                f"choose a divisor of {growth}",
                options=("rampup_batch_size", "global_batch_size"),
            )
