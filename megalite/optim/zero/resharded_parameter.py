"""Parameters whose weights are resharded: using one is a Python error, not an access to memory that has been freed.

A parameter of a resharded bucket (ZeRO-3) is a view of memory that is freed between its uses. To read it then ends the
process on a CPU (SIGSEGV), and is an illegal access on a GPU. While the memory is freed, the parameter has the class
`ReshardedParameter`, whose `__torch_function__` raises an error. An unsharded parameter is a plain `nn.Parameter`,
which torch does not dispatch: so nothing is checked when weights are used as they should be. torch changes the class of
`nn.UninitializedParameter` in the same way.

Views of a parameter that were created while it was unsharded are plain tensors. torch's CUDA builds check them, too
(storage.py: ResizableStorage).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from megalite.nn.parameter import spec_of
from megalite.optim.zero.storage import list_names

_METADATA = ("shape", "dtype", "device", "layout", "ndim", "is_meta", "is_cuda", "is_cpu", "is_leaf", "requires_grad")
_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "is_floating_point",
    "is_contiguous",
    "untyped_storage",
)
# torch functions that do not read the values of a tensor
_READS_NO_VALUES: frozenset[Callable[..., Any]] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in (*_METADATA, "grad", "grad_fn")),
        Tensor.grad.__set__,  # type: ignore[attr-defined]
        *(getattr(Tensor, name) for name in (*_METHODS, "__hash__", "register_hook")),
    ]
)


class ReshardedParameter(nn.Parameter):
    """A parameter without memory, which has only its metadata and its gradient."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` if it reads no values; otherwise raise a RuntimeError that names the parameter."""
        kwargs = kwargs or {}
        if func not in _READS_NO_VALUES:
            _raise_error(next(_find_resharded((args, kwargs))))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _find_resharded(value: Any) -> Iterator[ReshardedParameter]:
    """Yield the resharded parameters in arguments of a torch function."""
    if isinstance(value, ReshardedParameter):
        yield value
    elif isinstance(value, Mapping):
        yield from _find_resharded(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find_resharded(item)


def _raise_error(parameter: ReshardedParameter) -> NoReturn:
    unit = parameter.unit  # type: ignore[attr-defined]
    raise RuntimeError(use_message([spec_of(parameter).name], unit))


def use_message(names: Sequence[str], unit: str) -> str:
    """Return the error message when one of these parameters is used while it is resharded."""
    subject = (
        f"{list_names(names)} is used while its" if len(names) == 1 else f"{list_names(names)} are used while their"
    )
    return (
        f"{subject} weights are resharded; with --zero-stage 3 they are unsharded only while {unit!r} "
        "runs: use the parameter there, or lower --zero-stage"
    )


def set_resharded(parameters: Iterable[nn.Parameter], is_resharded: bool) -> None:
    """Make each use of the parameters an error, or allow their use again."""
    for parameter in parameters:
        parameter.__class__ = ReshardedParameter if is_resharded else nn.Parameter


def gradient_node(parameter: nn.Parameter) -> Node:
    """Return the node of the graph that accumulates the gradient of a parameter, which may be resharded.

    torch does not keep the node alive.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(parameter).node
