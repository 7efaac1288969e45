"""FP8 weights with a scale for each block, as DeepSeek-V3 is published (arXiv:2412.19437, section 3.3.2).

    NAME             [.., M, N] in float8_e4m3fn
    NAME_scale_inv   [.., ceil(M / m), ceil(N / n)] in fp32, the factor of each block of m x n elements

A weight is its elements times the factor of their block, multiplied in fp32 and rounded once to the dtype of the
configuration. Blocks at the end of a dimension may be smaller. The scale may be in another file than its weight. Each
weight is converted when it is read, so that one is in memory at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.common.tables import load_table
from megalite.interop.tensor_mapping import FileTensor

FP8_CODE: str = load_table(__file__, "constants")["fp8_dtype"]
SCALE_SUFFIX = "_scale_inv"
_KEY = "quantization_config"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_BLOCK = 1 << 20  # elements along one side; more means a damaged file


@dataclass(frozen=True)
class BlockQuantization:
    """The blocks of quantized weights, and the dtype of their values.

    Attributes:
        block: The rows and columns of a block, (m, n).
        dtype: The dtype of the values.
    """

    block: tuple[int, int]
    dtype: torch.dtype


def quantization_problems(config: Mapping[str, Any]) -> list[str]:
    """Return the problem of a quantization_config that megalite cannot read, if any."""
    quantization = config.get(_KEY)
    if quantization in (None, {}):
        return []
    remedy = "give the model as it was before, or save it dequantised with transformers"
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        return [f"{_KEY}: the weights are quantised with quant_method={method!r}, not fp8; {remedy}"]
    if quantization.get("fmt", "e4m3") != "e4m3":
        return [f"{_KEY}: fmt={quantization['fmt']!r} is not e4m3; {remedy}"]
    block = quantization.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(size) is not int or not 0 < size <= MAX_BLOCK for size in sizes):
        return [f"{_KEY}: weight_block_size={block!r} is not the rows and columns of a block; {remedy}"]
    dtype = _dtype_name(config)
    if dtype not in _DTYPES:
        return [f"dtype={dtype!r} of the dequantised weights is not {', '.join(_DTYPES)}; correct it"]
    return []


def _dtype_name(config: Mapping[str, Any]) -> Any:
    """Return the name of the dtype of the weights; the key was torch_dtype before transformers 5."""
    return config.get("dtype") or config.get("torch_dtype") or "bfloat16"


def read_quantization(config: Mapping[str, Any]) -> BlockQuantization | None:
    """Return the quantization of a config.json without `quantization_problems`; None: the weights are not quantized."""
    quantization = config.get(_KEY)
    if not quantization:
        return None
    rows, columns = quantization["weight_block_size"]
    return BlockQuantization((rows, columns), _DTYPES[_dtype_name(config)])


def dequantize(weight: Tensor, scale: Tensor, quantization: BlockQuantization) -> Tensor:
    """Return the values of a weight [.., M, N], whose blocks have the factors `scale`.

    Memory: besides the result, one row of blocks in fp32.
    """
    rows, columns = quantization.block
    values = torch.empty(weight.shape, dtype=quantization.dtype)
    M, N = weight.shape[-2:]
    flat_weight, flat_values = weight.reshape(-1, M, N), values.view(-1, M, N)
    factors = scale.float().reshape(len(flat_weight), *scale.shape[-2:])
    for number, matrix in enumerate(flat_weight):
        for block_row, start in enumerate(range(0, M, rows)):
            of_columns = factors[number, block_row].repeat_interleave(columns)[:N]
            flat_values[number, start : start + rows] = matrix[start : start + rows].float() * of_columns
    return values


def dequantized(
    tensors: Mapping[str, FileTensor], quantization: BlockQuantization
) -> tuple[dict[str, FileTensor], list[str]]:
    """Return the tensors of a model with the values of quantized weights in place of weights and scales, and problems.

    The problems are scales without a weight, weights without a scale, and scales of another shape or dtype.
    """
    results: dict[str, FileTensor] = {}
    problems: list[str] = []
    rows, columns = quantization.block
    for name, tensor in tensors.items():
        weight = tensors.get(name.removesuffix(SCALE_SUFFIX)) if name.endswith(SCALE_SUFFIX) else None
        if weight is not None:
            if weight.dtype != FP8_CODE:
                problems.append(f"{tensor.location}: a scale, but {weight.location} has {weight.dtype}, not {FP8_CODE}")
            continue
        if tensor.dtype != FP8_CODE:
            results[name] = tensor
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        if scale is None:
            problems.append(f"{tensor.location}: {FP8_CODE} without {name}{SCALE_SUFFIX}")
            continue
        if len(tensor.shape) < 2:
            problems.append(f"{tensor.location}: {FP8_CODE} of shape {tensor.shape} is not a matrix")
            continue
        *batch, M, N = tensor.shape
        expected_shape = (*batch, -(-M // rows), -(-N // columns))
        if scale.shape != expected_shape:
            problems.append(
                f"{scale.location}: shape {scale.shape}, not {expected_shape} for blocks of {rows} x {columns}"
            )
        elif not isinstance(scale.dtype, torch.dtype):
            problems.append(f"{scale.location}: {scale.dtype} is not a floating-point type that megalite supports")
        else:
            load = partial(_load, tensor, scale, quantization)
            results[name] = replace(tensor, dtype=quantization.dtype, load=load)
    return results, problems


def _load(weight: FileTensor, scale: FileTensor, quantization: BlockQuantization) -> Tensor:
    return dequantize(weight.load(), scale.load(), quantization)
