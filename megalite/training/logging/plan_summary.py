"""The tables that a run prints before its first step: its plan and the memory of its ranks."""

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megalite.common.wording import plural
from megalite.data.datasets.blended_dataset import BlendedDataset
from megalite.kernels.attention import describe_backend
from megalite.kernels.delta_rule_triton import supports_heads
from megalite.kernels.dispatch import describe_kernels, fla_version, runs_fla, runs_triton, upcast_dtypes
from megalite.models.layers import RECURRENT_MIXERS, resolve_cp_comm_type
from megalite.models.torch_compile import COMPILE_SUMMARY
from megalite.planning.device_peaks import PeakRate
from megalite.planning.layer_kinds import single_document_sharding
from megalite.planning.memory import SHARDED_BY_STAGE, host_bytes, state_by_zero_stage
from megalite.planning.run_plan import RunPlan
from megalite.training.datasets import DatasetBundle
from megalite.training.logging import log_format
from megalite.training.monitoring.rank_consistency import machine_facts

MAX_ROWS = 16  # of the memory table
STATE_PARTS = ("weights", "gradients", "optimizer")
RECURRENT_NAMES = {"gated_delta_net": "gated delta net", "kda": "Kimi delta attention", "mamba2": "Mamba-2"}


def format_plan(
    plan: RunPlan,
    sources: DatasetBundle,
    local_world: int,
    peak: PeakRate | None = None,
    device_type: str | None = None,
) -> str:
    """Return the tables of a plan.

    Args:
        local_world: The number of ranks per node.
        peak: The peak FLOP/s; None in a dry run.
        device_type: None in a dry run.
    """
    shape = plan.shape
    config, model, batch_sizes = plan.config, plan.config.model, shape.batch_sizes
    windows = [window for window in model.attention_windows if window is not None]
    batch = f"{batch_sizes.final}"
    if len(batch_sizes.milestones) > 1:
        batch = f"{batch_sizes.at(0)} to {batch_sizes.final}"
    ranks = f"{shape.world} {plural('rank', shape.world)}"
    schedule = config.parallel.pipeline_schedule
    if plan.balance.split_backward is not None:
        schedule += ", split backward"
    chunks = f"{shape.vpp} {plural('chunk', shape.vpp)} per rank"
    microbatches = f"{shape.num_microbatches:,} {plural('micro-batch', shape.num_microbatches)}"
    tokens = shape.total_samples * model.seq_length
    rows = {
        "mesh": f"pp {shape.pp} x dp {shape.dp} x cp {shape.cp} x tp {shape.tp} = {ranks}",
        **format_groups(plan, local_world),
        "parameters": f"{format_parameters(plan)} (vocabulary {shape.vocab_size:,}, padded to {shape.padded_vocab:,})",
        "layers per stage": run_lengths(plan.balance.layers_per_stage),
        "schedule": f"{schedule}, {chunks}, {microbatches}; bubble {plan.balance.bubble:.1%}",
        "ZeRO": describe_zero(plan),
        "precision": "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32",
        "steps": f"{shape.num_steps:,} of {batch} x {model.seq_length} tokens: {tokens:,} tokens",
        "data": sources.train.describe(shape.total_samples),
    }
    eval_samples = config.train.eval_iters * shape.eval_batch_size
    unused = [
        line
        for dataset in sources.valid
        if isinstance(dataset.data, BlendedDataset)
        for line in dataset.data.unused(eval_samples)
    ]
    if unused:
        rows["validation"] = "\n".join(unused)
    if (base := config.optim.lr_base_batch_size) is not None and config.optim.lr is not None:
        lr = config.optim.lr * batch_sizes.final / base
        rows["learning rate"] = f"{config.optim.lr:g} at a batch of {base}, so {lr:g} at one of {batch_sizes.final}"
    if device_type is not None:
        rows["kernels"] = describe_kernels(device_type)
        if shape.dtype in upcast_dtypes(device_type):
            rows["precision"] += ", computed in fp32: this CPU has no instructions for it"
        is_half = config.precision.bf16 or config.precision.fp16
        has_dropout = model.attention_dropout > 0
        needs_own_kernel = model.attn_logit_softcapping is not None or model.multi_latent_attention
        rows["attention"] = describe_backend(
            device_type, has_dropout, half=is_half, window=bool(windows), needs_own_kernel=needs_own_kernel
        )
    if (matrices := plan.model_states.fullest.muon) is not None:
        rows["full matrices"] = f"{matrices}, per step"
    if shape.cp > 1:
        attention_layers = [layer for layer in model.layers if layer.has_attention]
        num_a2a = sum(layer.cp_comm_type == "a2a" for layer in attention_layers)
        num_gathering = len(attention_layers) - num_a2a
        gathered = "latents" if model.multi_latent_attention else "keys and values"
        rows["context"] = (
            f"{model.seq_length // shape.cp:,} tokens of each sample per cp rank; "
            f"attention gathers {gathered} in {num_gathering} layers, exchanges heads in {num_a2a}"
        )
    recurrent_mixers = Counter(layer.mixer for layer in model.layers if layer.mixer in RECURRENT_NAMES)
    if recurrent_mixers:
        counts = ", ".join(f"{RECURRENT_NAMES[name]} in {count}" for name, count in recurrent_mixers.items())
        rows["recurrence"] = f"{counts} of {len(model.layers)} layers"
        if device_type is not None:
            rows["recurrence"] += f", in {_describe_recurrent_kernels(plan, recurrent_mixers, device_type)}"
        if shape.cp > 1:
            rows["recurrence"] += f"; {_describe_recurrent_exchange(plan)}"
    if shape.has_experts:
        num_moe_layers = sum(layer.has_experts for layer in model.layers)
        rows["experts"] = (
            f"{model.num_experts:,} in {num_moe_layers} of {model.num_layers} layers, "
            f"{model.moe_router_topk} per token; ep {shape.ep} x etp {shape.etp} x edp {shape.mesh_at(0).edp.size}"
        )
    if windows:
        rows["window"] = f"{windows[0]:,} keys in {len(windows)} of {model.num_layers} layers"
    if offloaded_layers := config.train.cpu_offloading_num_layers:
        rows["activations"] = f"those of each chunk's first {offloaded_layers} layers in host memory"
    if config.train.compile:
        rows["compile"] = COMPILE_SUMMARY
    if config.train.cuda_graph_impl != "none":
        rows["CUDA graph"] = "one micro-batch, recorded at its second and then replayed"
    if peak is not None:
        rows["peak FLOP/s"] = "n/a" if peak.tflops is None else f"{peak.tflops:.3g} TFLOP/s ({peak.source})"
    tables = [log_format.table(rows), log_format.aligned_table(memory_rows(plan))]
    if device_type is None and shape.dp * shape.cp > 1:
        tables.append(log_format.aligned_table(stage_rows(plan)))
    return "\n".join(tables)


def _describe_recurrent_kernels(plan: RunPlan, mixers: Iterable[str], device_type: str) -> str:
    """Return what computes the recurrences of these mixers."""
    package = f"flash-linear-attention {fla_version()}" if runs_fla(device_type) else None
    own = [name for name in mixers if package is None or name == "mamba2"]
    if not own:
        return str(package)
    shapes = [RECURRENT_MIXERS[name].shape_of(plan.config.model, plan.shape.tp) for name in own]
    has_kernels = all(supports_heads(each.key_dim, each.value_dim, plan.shape.dtype) for each in shapes)
    kernels = "Triton" if has_kernels and runs_triton(device_type) else "torch"
    return kernels if package is None else f"{package}; Mamba-2 in {kernels}"


def _describe_recurrent_exchange(plan: RunPlan) -> str:
    """Return what recurrent layers exchange over cp, for samples of one document."""
    shape, model = plan.shape, plan.config.model
    sharding = single_document_sharding(model, shape.cp)
    assert sharding is not None
    specs = [layer for layer in model.layers if layer.is_recurrent]
    num_a2a = sum(resolve_cp_comm_type(model, spec, shape.tp, sharding, shape.dtype) == "a2a" for spec in specs)
    num_maps = len(specs) - num_a2a
    return f"cp ranks exchange maps of states in {num_maps} {plural('layer', num_maps)}, heads in {num_a2a}"


def plan_as_json(plan: RunPlan, sources: DatasetBundle, hosts: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Return the plan as JSON, for programs such as the HTML report of a run.

    `layers` are the start and stop of every stage, `memory` the bytes of a rank of each pipeline rank, and `hosts` the
    host names of all ranks.
    """
    shape = plan.shape
    memory = [{part: getattr(state, part) for part in STATE_PARTS} for state in plan.model_states.by_rank]
    return {
        "command": sys.argv,
        "mesh": {"world": shape.world, "pp": shape.pp, "dp": shape.dp, "cp": shape.cp, "tp": shape.tp},
        "dp_outermost": shape.mesh_sizes.get("dp_outermost", False),
        "layers": [[layers.start, layers.stop] for layers in plan.balance.layer_ranges],
        "memory": [
            state | {"activations": size} for state, size in zip(memory, plan.balance.activation_bytes, strict=True)
        ],
        "parameters": plan.model_states.num_parameters,
        "active_parameters": plan.model_states.num_active_parameters,
        "steps": shape.num_steps,
        "data": sources.train.describe(shape.total_samples),
        "hosts": list(dict.fromkeys(hosts)),
        "device": device.type,
        "machine": machine_facts(device),
    }


def format_parameters(plan: RunPlan) -> str:
    """Format the number of parameters, and the number that are active for a token if there are experts."""
    text = f"{plan.model_states.num_parameters:,}"
    if plan.shape.has_experts:
        text += f", {plan.model_states.num_active_parameters:,} active per token"
    return text


def run_lengths(counts: Iterable[int]) -> str:
    """Format counts with equal neighbors combined: "3 x 4, 5, 2" for [4, 4, 4, 5, 2]."""
    runs = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)


def format_groups(plan: RunPlan, local_world: int) -> dict[str, str]:
    """Return rows about the groups of rank 0, on nodes of `local_world` ranks; {} with a single node."""
    shape = plan.shape
    if shape.world <= local_world:
        return {}

    def format_group(ranks: Sequence[int]) -> str:
        nodes = len({rank // local_world for rank in ranks})
        rank_texts = list(map(str, ranks))
        if len(ranks) > 4:
            rank_texts = [*rank_texts[:2], "..", rank_texts[-1]]
        return f"{' '.join(rank_texts)} ({f'{nodes} nodes' if nodes > 1 else 'node 0'})"

    groups = ", ".join(f"{name} {format_group(ranks)}" for name, ranks in shape.rank0_groups.items() if len(ranks) > 1)
    rows = {"groups of rank 0": f"{groups}; nodes of {local_world} ranks" if groups else ""}
    if local_world % shape.tp:
        max_tp = max(tp for tp in range(1, min(shape.tp, local_world) + 1) if local_world % tp == 0)
        rows["warning"] = (
            f"tensor_model_parallel_size={shape.tp} crosses nodes of {local_world} ranks: each layer waits for the "
            f"network four times; use {max_tp}, or start {shape.tp} ranks per node"
        )
    return rows


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def num_replicas(plan: RunPlan) -> int:
    """Return the number of replicas under hybrid sharding, otherwise 1."""
    return plan.shape.mesh_at(0).dp_replicate.size if plan.config.parallel.effective_zero_stage else 1


def describe_zero(plan: RunPlan) -> str:
    """Describe the ZeRO stage, and the replicas under hybrid sharding."""
    parallel, replicas, size = plan.config.parallel, num_replicas(plan), plan.shape.mesh_at(0).dp_shard.size
    axes = "dp x cp" if plan.shape.cp > 1 else "dp"
    stage = parallel.effective_zero_stage
    text = f"stage {stage}, {SHARDED_BY_STAGE[stage]} sharded over {axes}"
    if replicas == 1:
        return text
    outer = ", optimizer sharded over these too" if parallel.outer_dp_sharding_strategy == "optim" else ""
    return f"{text} within each of {replicas} replicas of {size} {plural('rank', size)}{outer}"


def stage_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return the table of GiB of the fullest rank at every ZeRO stage, the head first."""
    rows: list[tuple[str, ...]] = [("ZeRO stage", *STATE_PARTS, "all")]
    replicas = num_replicas(plan)
    in_replicas = f", in {replicas} replicas" if replicas > 1 else ""
    for stage, state in enumerate(state_by_zero_stage(plan)):
        mark = f" <- here{in_replicas}" if stage == plan.config.parallel.effective_zero_stage else ""
        rows.append((f"{stage}{mark}", *(_gib(getattr(state, part)) for part in (*STATE_PARTS, "total"))))
    return rows


def memory_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return the table of GiB per pipeline rank, the head first.

    With more than MAX_ROWS pipeline ranks it has only the row of the largest, and the range of all.
    """
    shape = plan.shape
    host = host_bytes(plan)
    has_host = any(host)
    head = ("GiB per rank", "layers", *STATE_PARTS, "activations", "in flight", "all")
    if has_host:
        head += ("host",)
    rows: list[tuple[str, ...]] = []
    totals = [
        state.total + size for state, size in zip(plan.model_states.by_rank, plan.balance.activation_bytes, strict=True)
    ]
    for i, (state, activations, in_flight) in enumerate(
        zip(plan.model_states.by_rank, plan.balance.activation_bytes, plan.balance.peak_in_flight, strict=True)
    ):
        name = f"pipeline rank {i}" if shape.pp > 1 else ""
        layers = run_lengths(map(len, plan.balance.layer_ranges[i :: shape.pp]))
        parts = (_gib(getattr(state, part)) for part in STATE_PARTS)
        row = (name, layers, *parts, _gib(activations), str(in_flight), _gib(totals[i]))
        rows.append((*row, _gib(host[i])) if has_host else row)
    if shape.pp <= MAX_ROWS:
        return [head, *rows]
    columns = list(zip(*rows, strict=True))[2:]
    ranges = (f"{min(column, key=float)} - {max(column, key=float)}" for column in columns)
    return [head, rows[totals.index(max(totals))], (f"all {shape.pp}", "", *ranges)]
