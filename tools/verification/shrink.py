"""Shrink a run until it trains twice within seconds, and keep everything that depends on its layout.

    kept       kinds of layers, norms, positions, activations, losses and dropout; ties; window and layer patterns;
               sharding, schedule, chunks, uneven stages, split backward, recomputation, precision, overlap
    smaller    hidden size, heads, groups, feed-forward, layers, experts and experts per token, sequence, vocabulary,
               batch, buckets, and the axes of the layout; an axis above 1 stays above 1 if the ranks suffice
    replaced   the data are generated; the learning rate is constant, and Adam's eps is at least 1e-3. The first update
               is g / (|g| + eps), so a smaller eps turns a gradient that consists of rounding errors into a full step.

If the small layout hides a mistake in choosing the groups of keys and values that tp ranks share (kv_sharing.py),
`kv_group_check` returns a second run that has only tp.

`single_process_config` is the same training in one process with the simplest code: every option that only changes how a
step is computed has its default, kernels are torch's, and the vocabulary has no padding.
"""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from megalite.config.option import EXECUTION, option_spec
from megalite.config.options import (
    SECTIONS,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    OperationsConfig,
    ParallelConfig,
    TrainConfig,
)
from megalite.config.problems import divisors
from tools.verification.kv_sharing import KVSharing
from tools.verification.reference_sharding import Layout
from tools.verification.shrink_model import shrink_model
from tools.verification.shrink_stages import SmallStages, shrink_stages

VOCAB_SIZE = 97  # a prime number, so it is padded
BUCKET_SIZE = 2000  # elements
LEARNING_RATE, MIN_ADAM_EPS = 0.01, 1e-3
MAX_EVAL_ITERS = 2
AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")  # of a Layout


@dataclass(frozen=True)
class ShrunkConfig:
    """A small run.

    Attributes:
        requested: the layout of the command line.
        layout: the layout that is verified.
        notes: what differs from the request.
    """

    config: Config
    requested: Layout
    layout: Layout
    notes: list[str]


def requested_layout(config: Config) -> tuple[Layout, str]:
    """Return the layout of a command line, and a note on it or an empty string.

    Without --nproc and --dp the launcher decides the number of ranks; dp is 2 then if the batch can be split.

    Raises:
        ConfigError: if --nproc does not fit.
    """
    parallel, train = config.parallel, config.train
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    ep, etp = 1, 1
    if config.model.num_experts:
        ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    dp = parallel.data_parallel_size
    note = ""
    if dp is None and parallel.nproc is not None:
        ranks_per_replica = tp * pp * cp
        if parallel.nproc % ranks_per_replica:
            raise ConfigError(
                [
                    f"nproc={parallel.nproc} is not a multiple of tp {tp} x pp {pp} x cp {cp}; give a multiple of "
                    f"{ranks_per_replica}"
                ]
            )
        dp = parallel.nproc // ranks_per_replica
    elif dp is None:
        batch_size = train.global_batch_size or 2 * train.micro_batch_size
        num_microbatches = batch_size // max(1, train.micro_batch_size)
        dp = 2 if num_microbatches % 2 == 0 else 1
        note = f"neither --nproc nor --dp is given: dp {dp}"
    return Layout(tp, pp, dp, parallel.use_tp_pp_dp_mapping, cp, ep, etp), note


def shrink_layout(requested: Layout, max_ranks: int) -> Layout:
    """Return the best layout on at most `max_ranks` ranks.

    The best layout has most of the axes above 1, then more than two pipeline ranks, then most ranks, tp first.

    >>> [str(shrink_layout(Layout(*sizes), 8)) for sizes in ((8, 16, 32), (1, 16, 4), (2, 1, 2))]
    ['tp 2, pp 2, dp 2', 'tp 1, pp 4, dp 2', 'tp 2, pp 1, dp 2']
    """
    if requested.world_size <= max_ranks:
        return requested
    sizes = product(
        range(1, min(requested.pp, max_ranks) + 1),
        range(1, min(requested.dp, max_ranks) + 1),
        divisors(requested.tp),
        divisors(requested.cp),
        divisors(requested.ep),
        divisors(requested.etp),
    )
    candidates = [
        Layout(tp, pp, dp, requested.dp_outermost, cp, ep, etp)
        for pp, dp, tp, cp, ep, etp in sizes
        if tp * pp * dp * cp <= max_ranks and dp * cp * tp % (ep * etp) == 0
    ]

    def preference(layout: Layout) -> tuple[int, ...]:
        num_axes = sum(getattr(layout, axis) > 1 for axis in AXES if getattr(requested, axis) > 1)
        same_edp = layout.edp == requested.edp == 1
        return num_axes, same_edp, layout.pp > 2, layout.world_size, layout.tp, layout.cp, layout.dp, layout.ep

    return max(candidates, key=preference)


def shrink(config: Config, max_ranks: int, steps: int, keep_sizes: bool = False) -> ShrunkConfig:
    """Return a small version of a valid configuration.

    Args:
        keep_sizes: keep the sizes of the model, the data and the layout.

    Raises:
        ConfigError: if --nproc does not fit the layout.
        ValueError: if `max_ranks` do not suffice; the message has the form `name=value breaks rule; remedy`.
    """
    requested, note = requested_layout(config)
    notes = [note] if note else []
    if keep_sizes:
        if requested.world_size > max_ranks:
            raise ValueError(
                f"world={requested.world_size} ({requested}) is above --max-ranks {max_ranks}; raise it, or drop "
                "--full-size"
            )
        return ShrunkConfig(_limit_steps(config, requested, steps), requested, requested, notes)
    layout = shrink_layout(requested, max_ranks)
    if layout.world_size == 1 < requested.world_size:
        raise ValueError(f"max_ranks={max_ranks} leaves nothing of {requested}; give {requested.min_ranks} or more")
    lost_axes = [
        f"{axis} {getattr(requested, axis)}"
        for axis in AXES
        if getattr(requested, axis) > 1 and getattr(layout, axis) == 1
    ]
    if lost_axes:
        notes.append(
            f"not verified, because there are too few ranks: {' and '.join(lost_axes)}; give --max-ranks "
            f"{requested.min_ranks} or more"
        )
    return ShrunkConfig(_shrink_config(config, requested, layout, steps), requested, layout, notes)


def kv_group_check(config: Config, first: ShrunkConfig, max_ranks: int) -> ShrunkConfig | None:
    """Return a run of one step with only tp, in which a rank with a wrong group of keys and values differs.

    Returns None if `first` shows that already. If it needs more than `max_ranks` ranks, returns None too, and adds a
    note to `first`.
    """
    requested = first.requested
    sharing = KVSharing.from_config(config, requested.tp)
    if sharing is None or sharing.groups == 1:
        return None
    if not sharing.mistakes_hidden_in(KVSharing.from_config(first.config, first.layout.tp)):
        return None
    tp = next((tp for tp in divisors(requested.tp) if not sharing.mistakes_hidden_in(sharing.shrink(tp))), requested.tp)
    if tp > max_ranks:
        first.notes.append(
            f"not verified, because there are too few ranks: which of {sharing.groups} groups each of {requested.tp} "
            f"tp ranks takes; give --max-ranks {tp} or more"
        )
        return None
    note = (
        f"this second run checks which of {sharing.groups} groups a rank of tp {requested.tp} takes; the first run "
        "does not show it"
    )
    layout = Layout(tp)
    return ShrunkConfig(_shrink_config(config, requested, layout, 1), requested, layout, [note])


def single_process_config(config: Config) -> Config:
    """Return the configuration of the same training in one process."""
    sections: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        defaults = {
            option.name: option.default for option in fields(section) if option_spec(option).resume == EXECUTION
        }
        sections[name] = replace(section, **defaults)
    sections["parallel"] = replace(
        sections["parallel"], nproc=1, device=config.parallel.device, kernels="torch", attention_kernel="torch"
    )
    sections["model"] = replace(sections["model"].for_any_pipeline(), make_vocab_size_divisible_by=1)
    return Config(**sections)


def _shrink_config(config: Config, requested: Layout, layout: Layout, steps: int) -> Config:
    stages = shrink_stages(config, requested, layout)
    data = DataConfig(
        mock_data=True,
        tokenizer_type="NullTokenizer",
        vocab_size=VOCAB_SIZE,
        eod_mask_loss=config.data.eod_mask_loss,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
    )
    small = replace(
        config,
        model=shrink_model(config, requested, layout, stages),
        parallel=_shrink_parallel(config, requested, layout, stages),
        train=_shrink_batch(config, requested, layout, len(stages.layers)),
        data=data,
    )
    return _limit_steps(small, layout, steps)


def _shrink_parallel(config: Config, requested: Layout, layout: Layout, stages: SmallStages) -> ParallelConfig:
    parallel, pp = config.parallel, layout.pp
    num_chunks = stages.num_chunks if stages.num_chunks > 1 and pp > 1 else None
    pipeline_layout = None
    if stages.layers_per_stage is not None and pp > 1:
        num_chunks = None
    if stages.layers_per_stage is not None and pp > 1 and stages.pattern is None:
        depths = "m" * config.model.num_mtp_depths
        pipeline_layout = "E" + "|".join("t" * count for count in stages.layers_per_stage) + depths + "L"
    microbatch_group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if microbatch_group is not None:
        microbatch_group = pp + 1 if microbatch_group > requested.pp else pp
    return replace(
        parallel,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        pipeline_model_parallel_layout=pipeline_layout,
        num_virtual_stages_per_pipeline_rank=num_chunks,
        # other options that would set the layers of the stages
        num_layers_per_virtual_pipeline_stage=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        microbatch_group_size_per_virtual_pipeline_stage=microbatch_group,
        ddp_bucket_size=BUCKET_SIZE,
    )


def _shrink_batch(config: Config, requested: Layout, layout: Layout, num_layers: int) -> TrainConfig:
    """Keep the relation of micro-batches to stages: fewer, a multiple, or more but not a multiple."""
    train, pp = config.train, layout.pp

    def shrink_batch(batch_size: int, micro_batch_size: int) -> tuple[int, int]:
        """Return (batch size, micro-batch size)."""
        num_microbatches = batch_size // max(1, micro_batch_size * requested.dp)
        if pp == 1:
            count = min(num_microbatches, 3)
        elif num_microbatches < requested.pp:
            count = pp - 1
        elif num_microbatches % requested.pp == 0:
            count = 2 * pp
        else:
            count = pp + 1
        size = min(micro_batch_size, 2)
        return max(1, count) * size * layout.dp, size

    batch_size, micro_batch_size = shrink_batch(train.batch_size(requested.dp), train.micro_batch_size)
    eval_batch_size, eval_micro_batch_size = shrink_batch(
        train.eval_batch_size(requested.dp), train.eval_micro_batch_size or train.micro_batch_size
    )
    recompute_num_layers = train.recompute_num_layers
    if recompute_num_layers is not None:
        recompute_num_layers = min(recompute_num_layers, max(1, num_layers // pp - 1))
    return replace(
        train,
        micro_batch_size=micro_batch_size,
        global_batch_size=batch_size,
        eval_micro_batch_size=eval_micro_batch_size,
        eval_global_batch_size=eval_batch_size,
        recompute_num_layers=recompute_num_layers,
    )


def _limit_steps(config: Config, layout: Layout, steps: int) -> Config:
    """Return a run of a few plain steps that writes no files, on the CPU unless it is for CUDA."""
    train, optim, parallel = config.train, config.optim, config.parallel
    is_cuda = parallel.device == "cuda"
    train = replace(
        train,
        train_iters=steps,
        global_batch_size=train.global_batch_size or train.batch_size(layout.dp),
        eval_iters=max(0, min(train.eval_iters, MAX_EVAL_ITERS)),
        eval_interval=None,
        train_samples=None,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
        exit_interval=None,
        exit_duration_in_mins=None,
        iterations_to_skip=None,
        spike_action="log",
        check_for_spiky_loss=False,
        check_for_large_grads=False,
        rerun_mode="disabled",
        dry_run=False,
        skip_train=False,
        compile=False,
        cuda_graph_impl=train.cuda_graph_impl if is_cuda else "none",
    )
    rates: dict[str, Any] = {
        option.name: option.default for option in fields(optim) if option.name.startswith(("lr_", "min_lr"))
    }
    rates |= {
        "lr": LEARNING_RATE,
        "lr_decay_style": "constant",
        "decoupled_lr": None if optim.decoupled_lr is None else 3 * LEARNING_RATE,
        "decoupled_min_lr": None,
        "adam_eps": max(optim.adam_eps, MIN_ADAM_EPS),
    }
    device: dict[str, Any] = {}
    if not is_cuda:
        device = {"device": "cpu", "distributed_backend": None}
        if parallel.attention_kernel not in ("blocked", "torch"):
            device["attention_kernel"] = "auto"
    return replace(
        config,
        train=train,
        optim=replace(optim, **rates),
        parallel=replace(
            parallel, **device, nproc=layout.world_size, data_parallel_size=None, context_parallel_size=layout.cp
        ),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
        operations=OperationsConfig(),
    )
