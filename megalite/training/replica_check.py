"""Check that replicas of the same value have the same bits. A mismatch means a faulty device or a bug.

    weights       data-parallel replicas (as Megatron-LM); weights that tp does not split, over tp; tied weights, over
                  the first and last pipeline stage; weights of experts, over the axes of the expert mesh. Weights that
                  ZeRO-3 shards have replicas only with hybrid sharding; their unsharded form is not compared
    biases        router biases, over data parallelism and tp
    main weights  against the model weights (half precision, or on the device) of the rank that owns them
    progress      step, samples, updates, loss scale: the coordinates of all randomness and of the data

An update destroys the evidence: it casts the main weights and all-gathers them, so all replicas agree on weights that a
flipped bit has already changed. Each step therefore sums the bits of the weights that it used (`replica_checksums`),
and the sums are compared in the step's all-reduce, before the update.

A value without a replica is not checked. To repair weights in half precision, the owners' main weights are cast and
gathered. Otherwise the majority of the data-parallel ranks decides, which takes at least 3 of them.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.format.safetensors_file import DEFAULT_HASH, hash_constructor
from megalite.common.wording import plural
from megalite.parallel.comm import all_gather_strings, all_reduce_, broadcast_
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.spec import MESH_VIEWS, SHARD_AXES
from megalite.training.state import InvalidResultError, Run

CAST_BLOCK = 1 << 22  # main weights that are cast at a time, to reuse memory
CHECKSUM_PRIME = 2**32 - 5  # divides no power of two, so flipping one bit changes the remainder of a sum of bits
MAX_DIFFERENCES = 5  # that each rank reports, and that the message lists


@dataclass(frozen=True)
class ReplicatedTensor:
    """A weight or router bias of this rank, and the axes over which others have the same; the data axis comes first."""

    name: str
    axes: tuple[str, ...]
    values: Tensor


@dataclass(frozen=True)
class MajorityRepair:
    """A tensor that differs over its data axis, and the position of a rank there that has what most have."""

    values: Tensor
    axis: Axis
    source: int


def check_replicas(run: Run, step: int, action: str = "stop", checksums_differ: bool = False) -> str | None:
    """Compare all replicas and return a message about what differs or was repaired, or None if nothing differs.

    Collective over all ranks.

    Args:
        action: --check-replicas-action: stop, repair or warn.
        checksums_differ: This step's checksums differed, so there is something to report even if the replicas match.

    Raises:
        InvalidResultError: if replicas differ and `action` is stop, or if the repair fails.
    """
    differences, majority = _find_differences(run)
    if not differences and not checksums_differ:
        return None
    message = f"step {step}{', before its update' if checksums_differ else ''}: replicas of the weights differ: "
    message += differences or "in their checksums, but not when compared again (a transient error)"
    if action == "repair":
        source = _repair(run, majority)
        remaining = _find_differences(run)[0]
        if not remaining:
            return f"{message}; repaired from {source}"
        message += f"; still after a repair from {source}: {remaining}"
    if action == "warn":
        return message
    raise InvalidResultError(message)


def replica_checksums(run: Run) -> Tensor:
    """Return two fp64 values whose sums over the world are 0 if the replicas agree.

    The first covers the data-parallel replicas of weights and router biases, the second main weights and the model
    weights that were cast from them. On each axis the first rank subtracts what the others add. The sums are exact
    below 2^53, which allows 2^21 ranks. All weights are read once, and the owned ones again with their main weights;
    the host does not wait for the device.
    """
    run.sync.wait_param_sync()
    total = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    sums: dict[str, Tensor] = {}  # axis with replicas -> sum of bits
    for bucket in run.optimizer.buckets:
        params = bucket.params
        axis_name = _replica_axis(params.layout.key.mesh_view, params.is_resident)
        sums[axis_name] = params.resident.view(torch.int64).sum() + sums.get(axis_name, 0)
        if bucket.copies_main:
            owned = params.owned
            casts = (block.to(owned.dtype).view(torch.int64).sum() for block in bucket.main.split(CAST_BLOCK))
            total[1] += sum(casts, -owned.view(torch.int64).sum()).remainder(CHECKSUM_PRIME)
    for bias in run.expert_balancer.state_shards():
        sums["dp_cp"] = bias.data.view(torch.int32).sum() + sums.get("dp_cp", 0)
    for axis_name, bits in sums.items():
        axis = run.mesh.axis(axis_name)
        total[0] += bits.remainder(CHECKSUM_PRIME) * (1 - axis.size if axis.is_first else 1)
    return total


def _replica_axis(mesh_view: str, resident: bool) -> str:
    """Return the axis over which a bucket's weights, or if it is not resident their shards, are replicated."""
    return MESH_VIEWS[mesh_view][0] if resident else SHARD_AXES[mesh_view][1]


def _find_differences(run: Run) -> tuple[str, list[MajorityRepair]]:
    """Compare the hashes of all replicas and return (message, majorities), with an empty message if they agree.

    Collective. Replicated weights are copied to the host, a parameter at a time.
    """
    mesh = run.mesh
    run.sync.wait_param_sync()
    differences = _main_weight_mismatches(run)
    replica_differences, majority = _compare_hashes(mesh, _replicated_tensors(run))
    differences += replica_differences
    progress = json.dumps([run.progress.to_json(), run.optimizer.num_updates, run.loss_scaler.to_json()])
    progress_hash = _hash(torch.frombuffer(bytearray(progress.encode()), dtype=torch.uint8))
    local = torch.tensor([len(differences), progress_hash, -progress_hash], dtype=torch.int64, device=mesh.device)
    max_differences, max_hash, negated_min_hash = all_reduce_(local, mesh.world, dist.ReduceOp.MAX).tolist()
    same_progress = max_hash == -negated_min_hash
    if not same_progress:
        differences.append(f"{mesh.describe()} is at {progress[:200]}")
    if not max_differences and same_progress:  # gathering texts would take gigabytes with thousands of ranks
        return "", []
    texts = all_gather_strings("\n".join(differences[:MAX_DIFFERENCES]), mesh.world, mesh.device)
    lines = [line for text in texts for line in text.splitlines()]
    message = "; ".join(lines[:MAX_DIFFERENCES])
    if len(lines) > MAX_DIFFERENCES:
        message += f"; and {len(lines) - MAX_DIFFERENCES} more"
    return message, majority


def _replicated_tensors(run: Run) -> list[ReplicatedTensor]:
    """Return this rank's weights and router biases that other ranks have replicas of."""
    tensors: list[ReplicatedTensor] = []
    for bucket in run.sync.param_buckets:
        for slot in bucket.layout.slots:
            spec = run.sync.layout.entries[slot.entry].spec
            axes = (_replica_axis(spec.mesh_view, bucket.is_resident), *spec.replicated_axes)
            tensors.append(ReplicatedTensor(spec.name, axes, bucket.resident_slice(slot)[1]))
    for bias in run.expert_balancer.state_shards():
        tensors.append(ReplicatedTensor(bias.name.partition("/")[2], ("dp_cp", "tp"), bias.data))
    return tensors


def _compare_hashes(mesh: Mesh, replicated: Sequence[ReplicatedTensor]) -> tuple[list[str], list[MajorityRepair]]:
    """Compare the hashes of `replicated` over its axes; collective.

    Returns (a line for each tensor that differs, on the first rank of the axis; repairs by the majority).
    """
    hashes: dict[int, int] = {}  # index in `replicated` -> hash
    differences: list[str] = []
    majority: list[MajorityRepair] = []
    for axis_name in ("dp_cp", "dp_replicate", "edp", "edp_replicate", "tp", "ep", "etp", "tied_embedding"):
        indices = [i for i, tensor in enumerate(replicated) if axis_name in tensor.axes]
        axis = mesh.axis(axis_name)
        if not indices or axis.size == 1:
            continue
        table = torch.zeros(axis.size, len(indices), dtype=torch.int64, device=mesh.device)
        for i in indices:
            hashes[i] = hashes.get(i) or _hash(replicated[i].values)
        table[axis.rank] = torch.tensor([hashes[i] for i in indices], dtype=torch.int64)
        rows = all_reduce_(table, axis).tolist()
        for i, column in zip(indices, zip(*rows, strict=True), strict=True):
            tensor = replicated[i]
            [(most_common, count), *others] = Counter(column).most_common()
            if others and axis_name == tensor.axes[0] and 2 * count > axis.size:
                majority.append(MajorityRepair(tensor.values, axis, column.index(most_common)))
            if others and axis.is_first:
                # In a tie the right hash is unknown, so all ranks are listed.
                is_tie = count == others[0][1]
                odd = [rank for rank, hash_ in zip(axis.ranks, column, strict=True) if hash_ != most_common or is_tie]
                differences.append(f"{tensor.name} differs over {axis.name} on {plural('rank', len(odd))} {odd}")
    return differences, majority


def _hash(data: Tensor) -> int:
    raw: Any = data.view(torch.uint8).cpu().numpy()
    return int.from_bytes(hash_constructor(DEFAULT_HASH)(raw).digest()[:8]) >> 1  # 63 bits fit a signed integer


def _main_weight_mismatches(run: Run) -> list[str]:
    """Return a line for each bucket in which a weight that this rank owns is not its main weight, rounded."""
    lines = []
    for bucket in run.optimizer.buckets:
        owned = bucket.params.owned
        differs = owned != bucket.main.to(owned)
        if not bucket.copies_main or not bool(differs.any()):
            continue
        offset = bucket.sharding.owned_range(bucket.layout).start + int(differs.nonzero()[0])
        slots = zip(bucket.layout.slots, bucket.params.names, strict=True)
        name = next(name for slot, name in slots if offset < slot.stop)
        lines.append(f"{name} does not match its main weight on {run.mesh.describe()}")
    return lines


def _repair(run: Run, majority: list[MajorityRepair]) -> str:
    """Overwrite replicas that differ and return where the right values came from; collective."""
    run.before_update()
    for repair in majority:
        values = repair.values.to(run.mesh.device)  # they may lie in host memory
        repair.values.copy_(broadcast_(values, repair.axis, repair.source))
    if not any(bucket.rounds_main for bucket in run.optimizer.buckets):
        return "the majority of replicas"
    run.optimizer.sync_after_load()
    return "the main weights"
