"""The launches of the kernels of gated activations (activations/swiglu.py, geglu.py), and their tiles."""

import torch
from torch import Tensor

from megalite.kernels.dispatch import Kernel, TileConfig, as_2d, ceil_div, fit_tile

# Up to 2048 columns of a row per program, or several narrow rows: 16 elements per thread, which are two 16-byte loads
# of bf16 from each half.
FORWARD_TILE = TileConfig(1, 2048, 4)
BACKWARD_TILE = TileConfig(1, 1024, 4)  # three inputs and three results are in registers at once


def launch_forward(forward_kernel: Kernel, u: Tensor, tile: TileConfig, *constants: float) -> Tensor:
    """Return a [..., F] of a gated activation for u [..., 2F], by its kernel with these constants."""
    u_N2F = as_2d(u)
    rows, columns = u_N2F.shape[0], u.shape[-1] // 2
    tile = fit_tile(tile, columns)
    a = torch.empty((*u.shape[:-1], columns), dtype=u.dtype, device=u.device)
    grid = (ceil_div(rows, tile.block_m), ceil_div(columns, tile.block_n))
    launch_args = (rows, columns, u_N2F.stride(0), *constants, tile.block_m, tile.block_n)
    forward_kernel[grid](u_N2F, a, *launch_args, num_warps=tile.num_warps)
    return a


def launch_backward(
    backward_kernel: Kernel, u: Tensor, da: Tensor, tile: TileConfig, *constants: float
) -> tuple[Tensor, Tensor]:
    """Return a [..., F] of a gated activation and du [..., 2F], by its kernel with these constants."""
    u_N2F, da_NF = as_2d(u), as_2d(da)
    rows, columns = da_NF.shape
    tile = fit_tile(tile, columns)
    a = torch.empty(da.shape, dtype=u.dtype, device=u.device)
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    grid = (ceil_div(rows, tile.block_m), ceil_div(columns, tile.block_n))
    launch_args = (rows, columns, u_N2F.stride(0), da_NF.stride(0), *constants, tile.block_m, tile.block_n)
    backward_kernel[grid](u_N2F, da_NF, a, du, *launch_args, num_warps=tile.num_warps)
    return a, du
