"""Contradictions in the options of the parallel layout: context parallelism, the pipeline, sharding."""

from collections.abc import Iterator

from megalite.config.hybrid_pattern import shown_pattern
from megalite.config.layer_spec import RECURRENT_MIXERS
from megalite.config.options import Config
from megalite.config.pipeline_layout import STAGE_OPTIONS, explicit_stage_layers
from megalite.config.problems import Problem, nearest_multiples, options_set, requires, shown

MAX_FLA_KEY_DIM = 256  # flash-linear-attention 0.6


def micro_batch_group_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    group, pp = parallel.microbatch_group_size_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    if group is not None and group < pp:
        yield Problem(
            f"microbatch_group_size_per_virtual_pipeline_stage={group} is below pipeline parallel {pp}; raise it",
            options=("microbatch_group_size_per_virtual_pipeline_stage",),
        )


def context_parallel_problems(config: Config) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    seq_length = model.seq_length
    if len(model.cp_comm_type) not in (0, 1, model.num_layer_values):
        of_layers = f"layer of num_layers={model.num_layers}"
        if model.hybrid_layer_pattern is not None:
            of_layers = f"letter of {shown_pattern(model.hybrid_layer_pattern)}"
        yield Problem(
            f"{shown(config, 'cp_comm_type')} is neither one value nor one for each {of_layers}",
            options=("cp_comm_type", "num_layers", "hybrid_layer_pattern"),
        )
    if cp == 1:
        return
    unit = 2 * cp * tp
    if seq_length % unit:
        by_tp = f" x tp {tp}" if tp > 1 else ""
        yield Problem(
            f"context_parallel_size={cp} x 2{by_tp} does not divide seq_length={seq_length}: use "
            f"{nearest_multiples(seq_length, unit)}",
            options=("context_parallel_size", "seq_length", "tensor_model_parallel_size"),
        )
    yield from _head_exchange_problems(config)


def _head_exchange_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of layers that exchange heads over cp, whose number tp x cp must divide."""
    model, parallel = config.model, config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    try:
        layers = [*model.layers, *model.mtp_layers]
    except ValueError:  # another problem has the reason
        return
    mixers = {layer.mixer for layer in layers if layer.cp_comm_type == "a2a" and layer.mixer is not None}
    heads_of = {
        "num_attention_heads": (model.num_attention_heads, bool(mixers.difference(RECURRENT_MIXERS))),
        "linear_num_value_heads": (model.linear_num_value_heads, not mixers.isdisjoint(("gated_delta_net", "kda"))),
        "mamba_num_heads": (model.mamba_heads, "mamba2" in mixers),
    }
    for name, (heads, is_exchanged) in heads_of.items():
        if is_exchanged and heads % (cp * tp):
            remedy = "allgather" if name == "num_attention_heads" else "auto or allgather"
            yield Problem(
                f"cp_comm_type=a2a: {name}={heads} / tp {tp} is not a multiple of cp {cp}; use {remedy}",
                options=("cp_comm_type", name, "context_parallel_size"),
            )


def linear_attention_kernel_problems(config: Config) -> Iterator[Problem]:
    """Yield what flash-linear-attention's kernels exclude; a run also checks its device and the installed package."""
    model, parallel, train = config.model, config.parallel, config.train
    if parallel.linear_attention_kernel != "fla" or not model.uses_delta_rule:
        return
    setting, remedy = "linear_attention_kernel=fla", "use --linear-attention-kernel auto"
    if parallel.device == "cpu":
        yield Problem(f"{setting} needs a CUDA device; {remedy}", options=("linear_attention_kernel", "device"))
    if model.linear_key_head_dim > MAX_FLA_KEY_DIM:
        yield Problem(
            f"linear_key_head_dim={model.linear_key_head_dim} is above the {MAX_FLA_KEY_DIM} of {setting}; {remedy}",
            options=("linear_attention_kernel", "linear_key_head_dim"),
        )
    excluded = {
        "deterministic_mode": (train.deterministic_mode, "tiles, and so the rounding, depend on measured times"),
        "compile": (train.compile, "torch.compile does not trace its functions"),
        "cuda_graph_impl": (train.cuda_graph_impl != "none", "capturing its kernels is untested"),
    }
    for name, (is_requested, reason) in excluded.items():
        if is_requested:
            yield Problem(
                f"{setting} with {shown(config, name)}: {reason}; {remedy}", options=("linear_attention_kernel", name)
            )
    if parallel.context_parallel_size > 1:
        yield from _map_exchange_problems(config)


def _map_exchange_problems(config: Config) -> Iterator[Problem]:
    """Yield the problem of layers that exchange maps of states over cp, which only our kernels compute."""
    model, cp = config.model, config.parallel.context_parallel_size
    try:
        layers = [*model.layers, *model.mtp_layers]
    except ValueError:  # another problem has the reason
        return
    if any(layer.mixer in ("gated_delta_net", "kda") and layer.cp_comm_type != "a2a" for layer in layers):
        yield Problem(
            f"linear_attention_kernel=fla with context_parallel_size={cp} and {shown(config, 'cp_comm_type')}: its "
            "kernels compute no maps of states; use --cp-comm-type a2a or --linear-attention-kernel auto",
            options=("linear_attention_kernel", "context_parallel_size", "cp_comm_type"),
        )


def pipeline_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    layers_per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    uneven = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    accounted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    virtual = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    if layers_per_chunk is not None and chunks is not None:
        yield Problem(
            f"num_layers_per_virtual_pipeline_stage={layers_per_chunk} and "
            f"num_virtual_stages_per_pipeline_rank={chunks}: give one",
            options=virtual,
        )
    if parallel.pipeline_model_parallel_layout and any(options_set(config, *uneven, *accounted, *virtual)):
        yield Problem(
            "pipeline_model_parallel_layout already sets all stages' layers; drop the other flags",
            options=("pipeline_model_parallel_layout", *uneven, *accounted, *virtual),
        )
    splits = ("pipeline_model_parallel_layout", *uneven, *accounted, *virtual)
    set_options = [*options_set(config, *splits)]
    if set_options and len(config.model.pattern_stages) > 1:
        yield Problem(
            f"{shown_pattern(config.model.hybrid_layer_pattern or '')} already sets all stages' layers by |; drop "
            f"{', '.join(set_options)}",
            options=("hybrid_layer_pattern", *splits),
        )
    even = (*accounted, "num_layers_per_virtual_pipeline_stage")
    if any(options_set(config, *uneven)) and any(options_set(config, *even)):
        yield Problem(
            "decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers exclude "
            "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split and "
            "num_layers_per_virtual_pipeline_stage; use --pipeline-model-parallel-layout",
            options=(*uneven, *even, "pipeline_model_parallel_layout"),
        )


def sharding_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    stage = parallel.effective_zero_stage
    graphs = config.train.cuda_graph_impl
    if not parallel.use_distributed_optimizer and stage:
        yield Problem(
            f"use_distributed_optimizer=False and ZeRO stage {stage}, which shards the optimizer state; give one",
            options=("use_distributed_optimizer", "zero_stage", "use_megatron_fsdp"),
        )
    if graphs != "none" and stage > 1:
        yield Problem(
            f"cuda_graph_impl={graphs} needs buffers that are always allocated, and ZeRO stage {stage} frees them; use "
            "--zero-stage 1, or drop it",
            options=("cuda_graph_impl", "zero_stage", "use_megatron_fsdp"),
        )
    if parallel.outer_dp_sharding_strategy == "optim" and parallel.num_distributed_optimizer_instances == 1:
        yield requires("outer_dp_sharding_strategy=optim", "num_distributed_optimizer_instances", "above 1")


def noise_scale_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    stage, cp = parallel.effective_zero_stage, parallel.context_parallel_size
    if not config.log.log_noise_scale:
        return
    if cp > 1:
        yield Problem(
            f"log_noise_scale needs the gradients of complete samples, and context_parallel_size={cp} splits samples; "
            "leave one out",
            options=("log_noise_scale", "context_parallel_size"),
        )
    if stage > 1:
        yield Problem(
            f"log_noise_scale needs a rank's gradients of the whole step, and ZeRO stage {stage} reduces them earlier; "
            "use --zero-stage 1, or leave it out",
            options=("log_noise_scale", "zero_stage", "use_megatron_fsdp"),
        )


def fsdp_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    stage, strategy = parallel.zero_stage, parallel.data_parallel_sharding_strategy
    if stage is None or parallel.fsdp_stage in (None, stage):
        return
    if strategy is None:
        yield Problem(
            f"zero_stage={stage} and use_megatron_fsdp=True, which is stage 3; give one",
            options=("zero_stage", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
        )
    else:
        yield Problem(
            f"zero_stage={stage} and data_parallel_sharding_strategy={strategy}, which is stage "
            f"{parallel.fsdp_stage}; give one",
            options=("zero_stage", "data_parallel_sharding_strategy", "use_megatron_fsdp"),
        )


def layout_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the number of layers of each stage."""
    model, parallel = config.model, config.parallel
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank or 1
    try:
        stages = explicit_stage_layers(model, parallel)
    except ValueError as error:
        yield Problem(str(error), options=STAGE_OPTIONS)
        return
    if stages is None and pp * chunks > model.num_layers:
        yield Problem(
            f"pipeline_model_parallel_size={pp} x {chunks} chunks is above num_layers={model.num_layers}: use fewer",
            options=("pipeline_model_parallel_size", "num_layers", "num_virtual_stages_per_pipeline_rank"),
        )
