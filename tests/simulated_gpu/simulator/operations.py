"""The traits of an ATen operation on a GPU: what it writes, whether it launches a kernel or the host waits for it.

They are read from its schema. Only operations that CUDA treats differently from their schema are listed by name.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# operations that create tensors or views and run no kernel (the schema marks most views)
NO_KERNEL = """empty empty_strided empty_like new_empty new_empty_strided empty_permuted _unsafe_view lift lift_fresh
detach alias _reshape_alias resize_ set_ _local_scalar_dense is_same_size is_set_to _has_compatible_shallow_copy_type
result_type _version _nested_tensor_size""".split()  # noqa: SIM905

# operations that do not read the tensor that they write
OVERWRITE = """copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_
log_normal_""".split()  # noqa: SIM905

# operations whose result has a size or value known only on the GPU, which schemas do not always state
WAITS = (
    "nonzero masked_select unique_dim unique_consecutive unique_dim_consecutive _unique _unique2 bincount equal".split()
)  # noqa: E501, SIM905
WAITS += ["_linalg_check_errors", "is_nonzero", "allclose"]

# operations other than pointwise ones (which torch tags) that accept a 0-dim host tensor among GPU tensors
TAKE_HOST_SCALAR = "fill_ copy_ masked_fill masked_fill_ index_put_ index_put where lerp".split()  # noqa: SIM905

SKIPPED_NAMESPACES = {"c10d", "_c10d_functional", "symm_mem", "prim", "prims", "profiler", "record_function"}


@dataclass(frozen=True)
class Traits:
    """The properties of an operation that decide what a GPU does.

    name         "mul_", without namespace and overload
    written      positions and names of the arguments that are written
    overwrites   the written arguments are not read
    launches     a kernel runs if there is anything to compute
    waits        the host waits for the result
    host_scalar  accepts a 0-dim host tensor among GPU tensors
    skip         not an operation of the GPU: a collective, the profiler's
    """

    name: str
    written: frozenset[int | str]
    overwrites: bool
    launches: bool
    waits: bool
    host_scalar: bool
    skip: bool


@functools.cache
def traits_of(func: OpOverload) -> Traits:
    schema, name = func._schema, func._schema.name.partition("::")[2]
    written: set[int | str] = set()
    out = False
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {i, argument.name}
            out |= argument.is_out
    foreach = name.startswith("_foreach_")
    return Traits(
        name,
        frozenset(written),
        overwrites=out or name in OVERWRITE,
        launches=not func.is_view and name not in NO_KERNEL,
        waits=name in WAITS or torch.Tag.data_dependent_output in func.tags,
        host_scalar=torch.Tag.pointwise in func.tags or name in TAKE_HOST_SCALAR or foreach,
        skip=func.namespace in SKIPPED_NAMESPACES,
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, which may be a nested list."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for item in value for x in tensors_in(item)]
    return []


def split(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors among the arguments as (read, written); a tensor changed in place is in both."""
    read, written = [], []
    for place, value in (*enumerate(args), *kwargs.items()):
        found_tensors = tensors_in(value)
        if place in traits.written:
            written += found_tensors
            if traits.overwrites:
                continue
        read += found_tensors
    return read, written


INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index")


def waits(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits for a size, such as the number of true elements of a mask used as an index."""
    if traits.name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if traits.name not in INDEXING:
        return traits.waits
    return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))


def fills(traits: Traits, args: tuple[Any, ...]) -> bool:
    """Return whether this is x[mask] = number, which is a masked_fill if the number is on the host."""
    if traits.name != "index_put_" or len(args) > 3:
        return False
    indices, value = tensors_in(args[1]), args[2]
    return len(indices) == 1 and indices[0].dtype in (torch.bool, torch.uint8) and value.dim() == 0


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; compute the same result another way if only CUDA has it."""
    if func is torch.ops.aten.addmm.dtype_out:  # products of halves are exact in fp32, and summed there
        addend, a, b, dtype = args
        return torch.addmm(addend, a.to(dtype), b.to(dtype), **kwargs)
    return func(*args, **kwargs)
