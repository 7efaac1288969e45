"""Randomness with coordinates instead of state: a value depends on its place, never on the rank that draws it.

Initial weights are a function of (seed, name, block). A whole tensor is cut into blocks of indices along its first
sharded dimension, and each block has a generator of its own. A rank draws the blocks that overlap its part and keeps
its share along other sharded dimensions, so every layout gets the same bits. Blocks are drawn on the CPU in float32
(the same on every device and in every precision) and then converted. Dropout has coordinates too (kernels/dropout.py).

Rejected: one generator per rank (Megatron-LM's RNG tracker): runs would depend on the layout, and reshard its state.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Constant, ParamSpec

MIN_PARALLEL_NUMEL = 1 << 20  # elements


def _overlapping_indices(span: range, shape: tuple[int, ...], dim: int) -> tuple[int, int]:
    """The indices along `dim` that elements `span` of the flattened `shape` have: first, and one beyond the last; all
    of them where the span runs through several rows of an earlier dim."""
    inner = math.prod(shape[dim + 1 :])
    first, last = span.start // inner, -(-span.stop // inner)
    if not span:
        return 0, 0
    if first // shape[dim] != (last - 1) // shape[dim]:
        return 0, shape[dim]
    return first % shape[dim], (last - 1) % shape[dim] + 1


@torch.no_grad()
def initialize_(tensor: Tensor, spec: ParamSpec, mesh: Mesh, seed: int, span: range | None = None) -> Tensor:
    """Fill `tensor`, this rank's part of `spec`, with its part of the whole initial tensor; with a `span` at least
    these elements of the flattened tensor: only blocks that meet them are drawn."""
    if isinstance(spec.init, Constant):
        return tensor.fill_(spec.init.value)
    box, dim, size = spec.box(mesh.sizes, mesh.coordinates), spec.init_dim, spec.init_block
    start, stop, std = box.start[dim], box.stop[dim], spec.init.std
    if span is not None:
        first, last = _overlapping_indices(span, box.shape, dim)
        start, stop = start + first, start + last
        tensor = tensor.narrow(dim, first, last - first)
    rows = tensor.movedim(dim, 0)
    others = [n for n in range(len(spec.shape)) if n != dim]
    row, share = [spec.shape[n] for n in others], [slice(box.start[n], box.stop[n]) for n in others]

    @torch.no_grad()  # grad mode belongs to a thread
    def fill(block: int) -> None:
        first, last = block * size, min((block + 1) * size, spec.shape[dim])
        digest = hashlib.sha256(f"{seed}/{spec.name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # 63 bits
        # the whole block, also at the end: the last values of a draw depend on whether its size is a multiple of 16
        values = torch.randn(size, *row, generator=generator) * std
        a, b = max(first, start), min(last, stop)
        rows[a - start : b - start].copy_(values[(slice(a - first, b - first), *share)])

    blocks = range(start // size, (stop - 1) // size + 1) if stop > start else range(0)
    threads = min(len(blocks), torch.get_num_threads()) if tensor.numel() >= MIN_PARALLEL_NUMEL else 1
    if threads == 1:
        for block in blocks:
            fill(block)
    else:  # a generator uses one thread, and 8 G weights would take one core 40 s
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, blocks))
    return tensor
