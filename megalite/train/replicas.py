"""Whether all copies of what ranks share hold the same bits. A copy that differs means a broken device or a bug, and
every step makes it worse.

    weights       over data every one, over tp those that are not split, over the pipeline's ends the tied ones (what
                  Megatron-LM's check looks at, and the last two); of experts over the axes of theirs
    main weights  against their copies in half precision, on the rank that owns them
    progress      step, samples, updates, loss scale: the coordinates of all randomness and of the data

What has no copy is not looked at. Healing: where weights are in half precision the owners' main weights are the truth,
cast and gathered again; else, with 3 ranks or more over data, what most have. Of two that differ nobody can say which.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint.format.hashing import fastest, maker
from megalite.optim.layout import Slot
from megalite.parallel.comm import all_reduce_, broadcast_, gather_texts
from megalite.parallel.mesh import Axis
from megalite.train.state import Run

Majority = list[tuple[Slot, Axis, int]]  # what differs over its data axis, and the rank there that has what most have


class ReplicaError(RuntimeError):
    """Copies differ; the same words on all ranks."""


def check_replicas(run: Run, step: int, action: str = "stop") -> str | None:
    """What differs, or was healed, in words; None where all is well. Raises ReplicaError with `action` stop, or where
    healing fails. Collective."""
    found, majority = _differences(run)
    if not found:
        return None
    told = f"step {step}: copies of weights differ: {found}"
    if action == "heal":
        how = _heal(run, majority)
        if not (found := _differences(run)[0]):
            return f"{told}; healed from {how}"
        told += f"; still after healing from {how}: {found}"
    if action == "warn":
        return told
    raise ReplicaError(told)


def _differences(run: Run) -> tuple[str, Majority]:
    """In words, of all ranks; copies the weights that have a copy to the host, one parameter at a time."""
    mesh, layout, buffer = run.mesh, run.buffer.layout, run.buffer
    buffer.wait_gather()
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    specs = [layout.entries[slot.entry].spec for slot in slots]
    hashes: dict[int, int] = {}
    found, majority = _casts(run), []
    for name in ("data", "edp", "tp", "ep", "etp", "ends"):
        chosen = [i for i, spec in enumerate(specs) if name in (spec.data_axis, *spec.copied_over)]
        axis = mesh.axis(name)
        if not chosen or axis.size == 1:
            continue
        table = torch.zeros(axis.size, len(chosen), dtype=torch.int64, device=mesh.device)
        for i in chosen:
            hashes[i] = hashes.get(i) or _hash(buffer.weights[slots[i].start : slots[i].stop])
        table[axis.rank] = torch.tensor([hashes[i] for i in chosen], dtype=torch.int64)
        rows = all_reduce_(table, axis).tolist()
        for i, column in zip(chosen, zip(*rows, strict=True), strict=True):
            [(usual, times), *rest] = Counter(column).most_common()
            if rest and name == specs[i].data_axis and 2 * times > axis.size:
                majority.append((slots[i], axis, column.index(usual)))
            if rest and axis.is_first:  # of two that differ nobody can say which is right
                odd = [r for r, h in zip(axis.ranks, column, strict=True) if h != usual or times == rest[0][1]]
                found.append(f"{specs[i].name} differs over {axis.name} on rank{'s' * (len(odd) > 1)} {odd}")
    place = json.dumps([run.state.to_json(), run.optimizer.updates, run.loss_scaler.to_json()])
    mine = _hash(torch.frombuffer(bytearray(place.encode()), dtype=torch.uint8))
    numbers = torch.tensor([len(found), mine, -mine], dtype=torch.int64, device=mesh.device)
    most, high, low = all_reduce_(numbers, mesh.world, dist.ReduceOp.MAX).tolist()
    if high != -low:
        found.append(f"{mesh.describe()} is at {place[:200]}")
    if not most and high == -low:
        return "", []
    words = [word for text in gather_texts("\n".join(found[:5]), mesh.world, mesh.device) for word in text.splitlines()]
    return "; ".join(words[:5]) + (f"; and {len(words) - 5} more" if len(words) > 5 else ""), majority


def _hash(data: torch.Tensor) -> int:
    raw: Any = data.view(torch.uint8).cpu().numpy()
    return int.from_bytes(maker(fastest())(raw).digest()[:8]) >> 1  # 63 bits, for a signed integer


def _casts(run: Run) -> list[str]:
    """Parameters whose part that this rank owns is not its main weight, rounded."""
    buffer, optimizer, found = run.buffer, run.optimizer, []
    for bucket, main in zip(buffer.layout.buckets, optimizer.main, strict=True):
        wrong = buffer.owned_weight(bucket) != main.to(buffer.weights.dtype)
        if optimizer.same or not bool(wrong.any()):
            continue
        at = buffer.owned_range(bucket).start + int(wrong.nonzero()[0])
        slot = next(slot for slot in bucket.slots if at < slot.stop)
        name = buffer.layout.entries[slot.entry].spec.name
        found.append(f"{name} is not its main weight on {run.mesh.describe()}")
    return found


def _heal(run: Run, majority: Majority) -> str:
    run.before_update()
    if not run.optimizer.same:
        run.optimizer.after_load()
        return "the main weights"
    for slot, axis, source in majority:
        broadcast_(run.buffer.weights[slot.start : slot.stop], axis, source)
    return "what most replicas have"
