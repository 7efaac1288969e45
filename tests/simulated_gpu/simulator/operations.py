"""What an ATen operation is to a card, read from its schema: what it writes, whether it launches anything, whether the
host waits for it. Only what CUDA does differently from the schema stands here by name."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# They make tensors or names of tensors; no kernel runs. (Views are told by their schema.)
NO_KERNEL = """empty empty_strided empty_like new_empty new_empty_strided empty_permuted _unsafe_view lift lift_fresh
detach alias _reshape_alias resize_ set_ _local_scalar_dense is_same_size is_set_to _has_compatible_shallow_copy_type
result_type _version _nested_tensor_size""".split()  # noqa: SIM905

# Whatever is in what they write is not looked at.
OVERWRITE = """copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_
log_normal_""".split()  # noqa: SIM905

# The size of the result, or a number, is known on the card alone, and schemas do not always say so.
WAITS = (
    "nonzero masked_select unique_dim unique_consecutive unique_dim_consecutive _unique _unique2 bincount equal".split()
)  # noqa: E501, SIM905
WAITS += ["_linalg_check_errors", "is_nonzero", "allclose"]

# Beside pointwise operations (torch marks them) those that take a 0-dim tensor of the host where others are the card's.
TAKE_HOST_SCALAR = "fill_ copy_ masked_fill masked_fill_ index_put_ index_put where lerp".split()  # noqa: SIM905

BORDERLESS = {"c10d", "_c10d_functional", "symm_mem", "prim", "prims", "profiler", "record_function"}


@dataclass(frozen=True)
class Traits:
    """name         "mul_", without namespace and overload
    written      places and names of the arguments that are written
    overwrites   what is written is not read
    launches     a kernel runs where there is something to do
    waits        the host waits for the result
    host_scalar  a 0-dim tensor of the host may be among the card's
    skip         not an operation of the card: a collective, the profiler's
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
        skip=func.namespace in BORDERLESS,
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Flat; of lists, too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for one in value for x in tensors_in(one)]
    return []


def split(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(what is read, what is written) of the arguments; what is changed in place is both."""
    read, written = [], []
    for place, value in (*enumerate(args), *kwargs.items()):
        found = tensors_in(value)
        if place in traits.written:
            written += found
            if traits.overwrites:
                continue
        read += found
    return read, written


INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index")


def waits(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits: for a size, as the number of true elements of an index that is a mask."""
    if traits.name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if traits.name not in INDEXING:
        return traits.waits
    return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))


def fills(traits: Traits, args: tuple[Any, ...]) -> bool:
    """x[mask] = number: a masked_fill, if that number is on the host."""
    if traits.name != "index_put_" or len(args) > 3:
        return False
    indices, value = tensors_in(args[1]), args[2]
    return len(indices) == 1 and indices[0].dtype in (torch.bool, torch.uint8) and value.dim() == 0


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on this machine; the same numbers by another way where only a card has it."""
    if func is torch.ops.aten.addmm.dtype_out:  # products of halves are exact in fp32, and summed there
        kept, a, b, dtype = args
        return torch.addmm(kept, a.to(dtype), b.to(dtype), **kwargs)
    return func(*args, **kwargs)
