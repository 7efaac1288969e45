"""Whether all copies of a weight hold the same bits: over data parallel ranks every one, over tensor parallel ranks
those that are not split, over the ends of the pipeline the tied ones (what Megatron-LM's check looks at, and the last
two). A copy that differs means a broken device or a bug, and every step makes it worse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from megalite.checkpoint.format.hashing import fastest, maker
from megalite.optim.buffer import ParamBuffer
from megalite.parallel.comm import all_reduce_


class ReplicaError(RuntimeError):
    """Copies of a weight differ: the parameters and the ranks, as far as this rank sees them."""


def check_replicas(buffer: ParamBuffer, step: int) -> None:
    """Collective. Raises ReplicaError on all ranks. Copies the weights to the host, one parameter at a time."""
    mesh, layout = buffer.mesh, buffer.layout
    buffer.wait_gather()
    hashes, specs, digest = [], [], maker(fastest())
    for slot in (slot for bucket in layout.buckets for slot in bucket.slots):
        data: Any = buffer.weights[slot.start : slot.stop].view(torch.uint8).cpu().numpy()
        hashes.append(int.from_bytes(digest(data).digest()[:8]) >> 1)  # 63 bits, for a signed integer
        specs.append(layout.entries[slot.entry].spec)
    found = []
    for axis, compared in (
        (mesh.dp, [True] * len(specs)),
        (mesh.tp, [all(name != "tp" for _, name in spec.shards) for spec in specs]),
        (mesh.ends, [spec.tied for spec in specs]),
    ):
        chosen = [i for i, here in enumerate(compared) if here]
        if axis.group is None or not chosen:
            continue
        table = torch.zeros(axis.size, len(chosen), dtype=torch.int64, device=mesh.device)
        table[axis.rank] = torch.tensor([hashes[i] for i in chosen], dtype=torch.int64)
        rows = all_reduce_(table, axis).tolist()
        for i, column in zip(chosen, zip(*rows, strict=True), strict=True):
            [(usual, times), *rest] = Counter(column).most_common()
            if rest and axis.is_first:  # of two that differ nobody can say which is right
                odd = [r for r, h in zip(axis.ranks, column, strict=True) if h != usual or times == rest[0][1]]
                found.append(f"{specs[i].name} differs over {axis.name} on rank{'s' * (len(odd) > 1)} {odd}")
    number = torch.tensor(len(found), dtype=torch.int64, device=mesh.device)
    if int(all_reduce_(number, mesh.world)):
        told = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        raise ReplicaError(f"step {step}: copies of weights differ: {told or 'another rank says which'}")
