"""Initial weights whose random values depend on their position in the full tensor, not on the rank that draws them.

Initial weights are a function of (seed, name, block). The full tensor is split into blocks of indices along its first
sharded dim, and each block has its own generator. A rank draws the blocks that overlap its shard and selects its part
along the other sharded dims, so every layout gets the same bits. Blocks are drawn on the CPU in float32 (the same on
every device and in every precision) and then converted. Dropout is a function of position, too (kernels/dropout.py).

Rejected: one generator per rank (Megatron-LM's RNG tracker). Runs would depend on the layout, and a change of the
layout would have to reshard the generators' state.
"""

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Constant, InverseSoftplus, Normal, ParamSpec, Uniform

MIN_PARALLEL_NUMEL = 1 << 20  # elements from which on a tensor is drawn by several threads


def _overlapping_indices(span: range, shape: tuple[int, ...], dim: int) -> tuple[int, int]:
    """Return the half-open range (start, stop) of indices along `dim` of the elements `span` of a flattened tensor.

    It is the full dim if the span covers several indices of an earlier dim.
    """
    inner = math.prod(shape[dim + 1 :])
    first, last = span.start // inner, -(-span.stop // inner)
    if not span:
        return 0, 0
    if first // shape[dim] != (last - 1) // shape[dim]:
        return 0, shape[dim]
    return first % shape[dim], (last - 1) % shape[dim] + 1


def _draw(init: Normal | Uniform | InverseSoftplus, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random values of a distribution, in fp32 on the CPU."""
    if isinstance(init, Normal):
        return torch.randn(*shape, generator=generator) * init.std
    uniform = torch.rand(*shape, generator=generator)
    if isinstance(init, InverseSoftplus):
        softplus = init.low * (init.high / init.low) ** uniform
        return softplus + torch.log(-torch.expm1(-softplus))
    values = init.low + (init.high - init.low) * uniform
    return values.log() if init.of_log else values


@torch.no_grad()
def initialize_(tensor: Tensor, spec: ParamSpec, mesh: Mesh, seed: int, span: range | None = None) -> Tensor:
    """Fill `tensor`, this rank's shard of `spec`, with its part of the initial full tensor, and return it.

    If `span` is set, only the blocks that overlap these elements of the flattened shard are drawn. Other elements may
    keep their old values; constants always fill the full shard.
    """
    init = spec.init
    if isinstance(init, Constant):
        return tensor.fill_(init.value)
    box = spec.box(mesh.sizes, mesh.coordinates)
    dim = spec.init_dim
    size = spec.init_block
    start, stop = box.start[dim], box.stop[dim]
    shard = tensor
    if span is not None:
        first, last = _overlapping_indices(span, box.shape, dim)
        start, stop = start + first, start + last
        shard = tensor.narrow(dim, first, last - first)
    rows = shard.movedim(dim, 0)
    other_dims = [d for d in range(len(spec.shape)) if d != dim]
    row_shape = [spec.shape[d] for d in other_dims]
    row_slices = [slice(box.start[d], box.stop[d]) for d in other_dims]

    @torch.no_grad()  # grad mode is per thread
    def fill(block: int) -> None:
        first, last = block * size, min((block + 1) * size, spec.shape[dim])
        digest = hashlib.sha256(f"{seed}/{spec.name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # 63 bits
        # always a full block: the last values of a draw depend on whether its size is a multiple of 16
        values = _draw(init, (size, *row_shape), generator)
        a, b = max(first, start), min(last, stop)
        rows[a - start : b - start].copy_(values[(slice(a - first, b - first), *row_slices)])

    blocks = range(start // size, (stop - 1) // size + 1) if stop > start else range(0)
    num_threads = min(len(blocks), torch.get_num_threads()) if shard.numel() >= MIN_PARALLEL_NUMEL else 1
    if num_threads == 1:
        for block in blocks:
            fill(block)
    else:  # a generator uses one thread, and drawing 8 G weights would take one core 40 s
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill, blocks))
    return tensor
