"""What a run prints before its first step: its arrangement and the memory of its ranks, as tables."""

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megalite.data.datasets.blended_dataset import BlendedDataset
from megalite.kernels.attention import describe_backend
from megalite.kernels.dispatch import describe_kernels, upcast_dtypes
from megalite.models.torch_compile import COMPILE_SUMMARY
from megalite.planning.cluster import PeakRate
from megalite.planning.memory import SHARDED_BY_STAGE, host_bytes, state_by_zero_stage
from megalite.planning.run_plan import RunPlan
from megalite.training.datasets import DatasetBundle
from megalite.training.logging import log_format as lines
from megalite.training.monitoring.rank_consistency import machine_facts

MOST_ROWS = 16  # of the table of memory
STATE_PARTS = ("weights", "gradients", "optimizer")


def format_plan(
    plan: RunPlan,
    sources: DatasetBundle,
    local_world: int,
    peak: PeakRate | None = None,
    device_type: str | None = None,
) -> str:
    """The arrangement as a table. A dry run has neither a device nor a peak."""
    config, sizes = plan.config, plan.batch_sizes
    m, chunks = config.model, plan.vpp
    windows = [w for w in m.layer_windows if w is not None]
    batch = f"{sizes.final}" if len(sizes.milestones) == 1 else f"{sizes.at(0)} to {sizes.final}"
    ranks = f"{plan.world} rank{'s' * (plan.world > 1)}"
    rows = {
        "mesh": f"pp {plan.pp} x dp {plan.dp} x cp {plan.cp} x tp {plan.tp} = {ranks}",
        **format_groups(plan, local_world),
        "parameters": f"{format_parameters(plan)} (vocabulary {plan.vocab_size:,}, padded to {plan.padded_vocab:,})",
        "layers per stage": run_lengths(plan.layers_per_stage),
        "schedule": f"{config.parallel.pipeline_schedule}{', split backward' * (plan.split_backward is not None)}, "
        f"{chunks} chunk{'s' * (chunks > 1)} per rank, "
        f"{plan.num_microbatches:,} micro-batch{'es' * (plan.num_microbatches > 1)}; bubble {plan.bubble:.1%}",
        "ZeRO": zero_of(plan),
        "precision": "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32",
        "steps": f"{plan.num_steps:,} of {batch} x {m.seq_length} tokens: {plan.total_samples * m.seq_length:,} tokens",
        "data": sources.train.describe(plan.total_samples),
    }
    read = config.train.eval_iters * plan.eval_batch_size
    unused = [
        line for named in sources.valid if isinstance(named.data, BlendedDataset) for line in named.data.unused(read)
    ]
    if unused:
        rows["validation"] = "\n".join(unused)
    if (base := config.optim.lr_base_batch_size) is not None and config.optim.lr is not None:
        peak_rate = config.optim.lr * sizes.final / base
        rows["learning rate"] = f"{config.optim.lr:g} at a batch of {base}, so {peak_rate:g} at one of {sizes.final}"
    if device_type is not None:
        rows["kernels"] = describe_kernels(device_type)
        if plan.dtype in upcast_dtypes(device_type):
            rows["precision"] += ", multiplied in fp32: this CPU has no instructions for it"
        half = config.precision.bf16 or config.precision.fp16
        rows["attention"] = describe_backend(device_type, m.attention_dropout > 0, half=half, window=bool(windows))
    if (matrices := plan.model_states[plan.fullest_rank].muon) is not None:
        rows["full matrices"] = f"{matrices}, per step"
    if plan.cp > 1:
        by_heads = m.layer_cp_comm.count("a2a")
        rows["context"] = f"{m.seq_length // plan.cp:,} tokens of each sample on a rank of cp; "
        rows["context"] += f"attention gathers keys in {m.num_layers - by_heads} layers, exchanges heads in {by_heads}"
    if plan.has_experts:
        where = f"{m.num_experts:,} in {sum(m.moe_layers)} of {m.num_layers} layers, {m.moe_router_topk} for a token"
        rows["experts"] = f"{where}; ep {plan.ep} x etp {plan.etp} x edp {plan.mesh_at(0).edp.size}"
    if windows:
        rows["window"] = f"{windows[0]:,} keys in {len(windows)} of {m.num_layers} layers"
    if n := config.train.cpu_offloading_num_layers:
        rows["activations"] = f"of each chunk's first {n} layers on the host"
    if config.train.compile:
        rows["compile"] = COMPILE_SUMMARY
    if config.train.cuda_graph_impl != "none":
        rows["CUDA graph"] = "one micro-batch, recorded at its second and then replayed"
    if peak is not None:
        rows["peak FLOP/s"] = "n/a" if peak.tflops is None else f"{peak.tflops:.3g} TFLOP/s ({peak.source})"
    by_stages = [lines.aligned_table(stage_rows(plan))] if device_type is None and plan.dp * plan.cp > 1 else []
    return "\n".join([lines.table(rows), lines.aligned_table(memory_rows(plan)), *by_stages])


def plan_as_json(plan: RunPlan, sources: DatasetBundle, hosts: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The same for programs, as JSON, for the page of a run. `layers`: from and to, of every stage; `memory`: bytes of
    a rank at each pipeline position; `hosts`: of all ranks."""
    memory = [{part: getattr(held, part) for part in STATE_PARTS} for held in plan.model_states]
    return {
        "command": sys.argv,
        "mesh": {"world": plan.world, "pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp},
        "dp_outermost": plan.mesh_sizes.get("dp_outermost", False),
        "layers": [[layers.start, layers.stop] for layers in plan.layer_ranges],
        "memory": [held | {"activations": size} for held, size in zip(memory, plan.activation_bytes, strict=True)],
        "parameters": plan.num_parameters,
        "active_parameters": plan.num_active_parameters,
        "steps": plan.num_steps,
        "data": sources.train.describe(plan.total_samples),
        "hosts": list(dict.fromkeys(hosts)),
        "device": device.type,
        "machine": machine_facts(device),
    }


def format_parameters(plan: RunPlan) -> str:
    return f"{plan.num_parameters:,}" + f", of which a token uses {plan.num_active_parameters:,}" * plan.has_experts


def run_lengths(counts: Iterable[int]) -> str:
    """Equal neighbours together: "3 x 4, 5, 2" for [4, 4, 4, 5, 2]."""
    same = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in same)


def format_groups(plan: RunPlan, local_world: int) -> dict[str, str]:
    """Lines about the groups of rank 0, on nodes of `local_world` ranks; {} where there is one node."""
    if plan.world <= local_world:
        return {}

    def where(ranks: Sequence[int]) -> str:
        nodes = len({rank // local_world for rank in ranks})
        shown = list(map(str, ranks)) if len(ranks) <= 4 else [*map(str, ranks[:2]), "..", str(ranks[-1])]
        return f"{' '.join(shown)} ({f'{nodes} nodes' if nodes > 1 else 'node 0'})"

    said = ", ".join(f"{name} {where(ranks)}" for name, ranks in plan.rank0_groups.items() if len(ranks) > 1)
    rows = {"groups of rank 0": f"{said}; nodes of {local_world} ranks" if said else ""}
    if local_world % plan.tp:
        fits = max(n for n in range(1, min(plan.tp, local_world) + 1) if local_world % n == 0)
        rows["warning"] = (
            f"tensor_model_parallel_size={plan.tp} crosses nodes of {local_world} ranks: each layer waits for the "
            f"network four times; use {fits}, or start {plan.tp} ranks per node"
        )
    return rows


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def replicas_of(plan: RunPlan) -> int:
    """With hybrid sharding the sets of ranks that hold the same; else 1."""
    return plan.mesh_at(0).dp_replicate.size if plan.config.parallel.effective_zero_stage else 1


def zero_of(plan: RunPlan) -> str:
    """The ZeRO stage, and with hybrid sharding its replicas."""
    p, replicas, size = plan.config.parallel, replicas_of(plan), plan.mesh_at(0).dp_shard.size
    axes = "dp x cp" if plan.cp > 1 else "dp"
    text = f"stage {p.effective_zero_stage}, {SHARDED_BY_STAGE[p.effective_zero_stage]} sharded over {axes}"
    if replicas == 1:
        return text
    over_all = ", optimizer sharded over these too" if p.outer_dp_sharding_strategy == "optim" else ""
    return f"{text} within each of {replicas} replicas of {size} rank{'s' * (size > 1)}{over_all}"


def stage_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """GiB of the fullest rank at every ZeRO stage, with the table's head."""
    rows: list[tuple[str, ...]] = [("ZeRO stage", *STATE_PARTS, "all")]
    replicas = replicas_of(plan)
    in_replicas = f", in {replicas} replicas" if replicas > 1 else ""
    for stage, held in enumerate(state_by_zero_stage(plan)):
        mark = f" <- here{in_replicas}" if stage == plan.config.parallel.effective_zero_stage else ""
        rows.append((f"{stage}{mark}", *(_gib(getattr(held, part)) for part in (*STATE_PARTS, "total"))))
    return rows


def memory_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """GiB per pipeline rank, with the table's head; of more than MOST_ROWS only the largest, and the range of all."""
    host = host_bytes(plan)
    hosts = ["host"] * any(host)
    rows: list[tuple[str, ...]] = []
    totals = [held.total + size for held, size in zip(plan.model_states, plan.activation_bytes, strict=True)]
    for i, (held, size, count) in enumerate(
        zip(plan.model_states, plan.activation_bytes, plan.peak_in_flight, strict=True)
    ):
        name, layers = f"pipeline rank {i}" * (plan.pp > 1), run_lengths(map(len, plan.layer_ranges[i :: plan.pp]))
        state = (_gib(getattr(held, part)) for part in STATE_PARTS)
        rows.append((name, layers, *state, _gib(size), str(count), _gib(totals[i]), *(_gib(host[i]) for _ in hosts)))
    head = ("GiB per rank", "layers", *STATE_PARTS, "activations", "in flight", "all", *hosts)
    if plan.pp <= MOST_ROWS:
        return [head, *rows]
    ends = (f"{min(column, key=float)} - {max(column, key=float)}" for column in list(zip(*rows, strict=True))[2:])
    return [head, rows[totals.index(max(totals))], (f"all {plan.pp}", "", *ends)]
