"""Checks that replicas of shared values have the same bits: one that differs is a broken device's work, or a bug's.

    weights       all over data, those that are not split over tp, tied ones over the pipeline's ends (Megatron-LM
                  compares the first), those of experts over their own axes. Weights that ZeRO-3 shares out have copies
                  on replicas alone; what is gathered of them for a moment is not compared
    biases        of routers, over data and tp
    main weights  against their copies in half precision, or on the device, on the rank that owns them
    progress      step, samples, updates, loss scale: the coordinates of all randomness and of the data

An update overwrites replicas: it casts main weights and gathers. So the effect of a flipped bit would remain in the
main weights of all ranks, and all replicas would agree. Therefore each step sums the bits of the weights that it
computed with (`disagreement`), and the sums are compared in the step's one agreement, before the update.

A value without a replica is not checked. Repair: where weights are in half precision the owners' main weights are
right, and are cast and gathered again; else, with 3 ranks or more over data, the majority is. Of two nobody knows.
"""

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.format.safetensors_file import DEFAULT_HASH, hash_constructor
from megalite.parallel.comm import all_gather_strings, all_reduce_, broadcast_
from megalite.parallel.mesh import Axis
from megalite.parallel.spec import MESH_VIEWS, SHARD_AXES
from megalite.training.state import InvalidResultError, Run

CAST_BLOCK = 1 << 22  # main weights that are cast at a time, to reuse memory
CHECKSUM_PRIME = 2**32 - 5  # divides no power of two, so flipping one bit changes the remainder of a sum of bits
MajorityFix = list[tuple[Tensor, Axis, int]]  # what differs over its data axis, and a rank there that is right


def check_replicas(run: Run, step: int, action: str = "stop", seen: bool = False) -> str | None:
    """What differs, or was repaired, in words; None where nothing differs. Raises BadResult with `action` stop, or
    where the repair fails. `seen`: this step's sums of bits differed. Collective."""
    found, majority = _find_differences(run)
    if not found and not seen:
        return None
    told = f"step {step}{', before its update' if seen else ''}: copies of weights differ: "
    told += found or "in the sums of their bits, and a moment later not"
    if action == "repair":
        how = _repair(run, majority)
        if not (found := _find_differences(run)[0]):
            return f"{told}; repaired from {how}"
        told += f"; still after a repair from {how}: {found}"
    if action == "warn":
        return told
    raise InvalidResultError(told)


def replica_checksums(run: Run) -> Tensor:
    """[2] in fp64, whose sum over the world is [0, 0] if replicas over data have the same bits, and main weights those
    of their copies. For each home the first rank subtracts what the others add; sums are exact below 2^53, so up to
    2^21 ranks. Reads all weights once, what this rank owns once more with its main weights; the host does not wait."""
    buffer, optimizer = run.buffer, run.optimizer
    buffer.wait_param_sync()
    total = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    sums: dict[str, Tensor] = {}  # by the axis that has copies
    for bucket, main in zip(buffer.layout.buckets, optimizer.main, strict=True):
        stays, copy = buffer.weights.is_resident(bucket), buffer.weights.owned(bucket)
        over = _copied_over(bucket.key.mesh_view, stays)
        copies = buffer.weights.full(bucket) if stays else buffer.weights.shard(bucket)
        sums[over] = copies.view(torch.int64).sum() + sums.get(over, 0)
        if optimizer.has_separate_main(bucket):
            casts = (block.to(copy.dtype).view(torch.int64).sum() for block in main.split(CAST_BLOCK))
            total[1] += sum(casts, -copy.view(torch.int64).sum()).remainder(CHECKSUM_PRIME)
    for bias in run.expert_balancer.state_shards():
        sums["data"] = bias.data.view(torch.int32).sum() + sums.get("data", 0)
    for over, bits in sums.items():
        axis = run.mesh.axis(over)
        total[0] += bits.remainder(CHECKSUM_PRIME) * (1 - axis.size if axis.is_first else 1)
    return total


def _copied_over(home: str, stays: bool) -> str:
    """The axis of data that has copies of a bucket's weights: of those that come and go only of what a rank holds."""
    return MESH_VIEWS[home][0] if stays else SHARD_AXES[home][1]


def _find_differences(run: Run) -> tuple[str, MajorityFix]:
    """(differences on all ranks in words, majorities). Copies replicated weights to the host, a parameter at a time."""
    mesh, layout, buffer = run.mesh, run.buffer.layout, run.buffer
    buffer.wait_param_sync()
    slots = [(slot, layout.entries[slot.entry].spec) for bucket in layout.buckets for slot in bucket.slots]
    stay = [buffer.weights.is_resident(layout.buckets[slot.bucket]) for slot, _ in slots]
    over = [(_copied_over(s.mesh_view, stays), *s.replicated_axes) for (_, s), stays in zip(slots, stay, strict=True)]
    copies = [
        (s.name, axes, buffer.weights.resident_slice(slot)[1]) for (slot, s), axes in zip(slots, over, strict=True)
    ]
    copies += [(bias.name.partition("/")[2], ("dp_cp", "tp"), bias.data) for bias in run.expert_balancer.state_shards()]
    hashes: dict[int, int] = {}
    found, majority = _main_weight_mismatches(run), []
    for name in ("dp_cp", "dp_replicate", "edp", "edp_replicate", "tp", "ep", "etp", "tied_embedding"):
        chosen = [i for i, (_, axes, _) in enumerate(copies) if name in axes]
        axis = mesh.axis(name)
        if not chosen or axis.size == 1:
            continue
        table = torch.zeros(axis.size, len(chosen), dtype=torch.int64, device=mesh.device)
        for i in chosen:
            hashes[i] = hashes.get(i) or _hash(copies[i][2])
        table[axis.rank] = torch.tensor([hashes[i] for i in chosen], dtype=torch.int64)
        rows = all_reduce_(table, axis).tolist()
        for i, column in zip(chosen, zip(*rows, strict=True), strict=True):
            [(usual, times), *rest] = Counter(column).most_common()
            if rest and name == copies[i][1][0] and 2 * times > axis.size:
                majority.append((copies[i][2], axis, column.index(usual)))
            if rest and axis.is_first:  # of two that differ nobody can say which is right
                odd = [r for r, h in zip(axis.ranks, column, strict=True) if h != usual or times == rest[0][1]]
                found.append(f"{copies[i][0]} differs over {axis.name} on rank{'s' * (len(odd) > 1)} {odd}")
    place = json.dumps([run.state.to_json(), run.optimizer.num_updates, run.loss_scaler.to_json()])
    mine = _hash(torch.frombuffer(bytearray(place.encode()), dtype=torch.uint8))
    numbers = torch.tensor([len(found), mine, -mine], dtype=torch.int64, device=mesh.device)
    most, high, low = all_reduce_(numbers, mesh.world, dist.ReduceOp.MAX).tolist()
    if high != -low:
        found.append(f"{mesh.describe()} is at {place[:200]}")
    if not most and high == -low:  # texts of all ranks would take gigabytes on thousands of them
        return "", []
    words = [
        word for text in all_gather_strings("\n".join(found[:5]), mesh.world, mesh.device) for word in text.splitlines()
    ]
    return "; ".join(words[:5]) + (f"; and {len(words) - 5} more" if len(words) > 5 else ""), majority


def _hash(data: Tensor) -> int:
    raw: Any = data.view(torch.uint8).cpu().numpy()
    return int.from_bytes(hash_constructor(DEFAULT_HASH)(raw).digest()[:8]) >> 1  # 63 bits, for a signed integer


def _main_weight_mismatches(run: Run) -> list[str]:
    """Parameters whose part that this rank owns is not its rounded main weight."""
    buffer, optimizer, found = run.buffer, run.optimizer, []
    for bucket, main in zip(buffer.layout.buckets, optimizer.main, strict=True):
        wrong = (owned := buffer.weights.owned(bucket)) != main.to(owned)
        if not optimizer.has_separate_main(bucket) or not bool(wrong.any()):
            continue
        at = buffer.shardings[bucket.key].owned_range(bucket).start + int(wrong.nonzero()[0])
        slot = next(slot for slot in bucket.slots if at < slot.stop)
        name = buffer.layout.entries[slot.entry].spec.name
        found.append(f"{name} is not its main weight on {run.mesh.describe()}")
    return found


def _repair(run: Run, majority: MajorityFix) -> str:
    run.before_update()
    for kept, axis, source in majority:
        kept.copy_(broadcast_(kept.to(run.mesh.device), axis, source))  # which may be the host's
    if run.optimizer.main_is_model:
        return "what most replicas have"
    run.optimizer.sync_after_load()
    return "the main weights"
