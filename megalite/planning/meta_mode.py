"""A mode that runs code on the meta device and observes operations, kernel launches and the lifetimes of storages.

    operations   `__torch_dispatch__` receives each operation with its arguments and results
    launches     kernels/dispatch.py reports each launch instead of starting it
    storages     are live from the operation that creates them until their last reference is gone

Every value that the host reads is 1, so the loss and the gradient norm are finite, and the optimizer step is taken.
Results are cached by the shapes of the arguments for all modes of the process, because most of torch's own functions
for this device are slow Python. FakeTensorMode was rejected: it refuses such reads, needs CUDA for the backward of CUDA
tensors, and has no data pointers.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels.dispatch import Kernel, observe_launches
from megalite.nn.storage_identity import storage_id
from megalite.optim.zero.storage import observe_allocations

META = torch.device("meta")
aten: Any = torch.ops.aten
# operation -> index of the left operand in its arguments
MATMULS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1, aten.baddbmm_: 1}
# operation -> index of the reduced dimensions in its arguments
REDUCTIONS = {aten.all.default: 1, aten.logsumexp.default: 1, aten.mean.dim: 1, aten.linalg_vector_norm.default: 2}
ELEMENTWISE = (
    aten.add,
    aten.mul,
    aten.sub,
    aten.div,
    aten.pow,
    aten.relu,
    aten.neg,
    aten.rsqrt,
    aten.empty_like,
    aten.ones_like,
    aten.zeros_like,
    aten.clone,
    aten.clamp_min,
    aten.floor_divide,
    aten.remainder,
)
NO_COST_OPS = {  # operations that move no bytes, besides views
    aten._unsafe_view,
    aten.detach,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.lift_fresh,
    aten.new_empty,
    aten.new_empty_strided,
}
COMPARISONS = (aten.bitwise_or, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
# elementwise operation -> dtype of its result, None if it is promoted from the arguments'
RESULT_DTYPES = {**dict.fromkeys(ELEMENTWISE), **dict.fromkeys(COMPARISONS, torch.bool)}
# keyword arguments with values that do not change the result's shape, strides and dtype
PLAIN_KWARGS = {"memory_format": (None, torch.contiguous_format, torch.preserve_format), "pin_memory": (None, False)}
MAX_CACHED_RESULTS = 200_000
# operation and arguments -> cache keys of its results, None for its first argument; [] if they are not cached
_cached_results: dict[Any, list[Any]] = {}


@dataclass(frozen=True)
class OpTraits:
    """The properties of an operation that decide how it is run and counted.

    Attributes:
        name: Its name without that of the overload.
        is_view: Its result is a view of an argument.
        is_elementwise: Its result has the shape of its arguments, broadcast.
        is_stack: It is `stack`.
        is_to_copy: It is `_to_copy`.
        reads_value: The host reads a number.
        result_dtype: The dtype of the result of an elementwise operation; None: it is promoted from the arguments'.
        matmul_index: The index of the left operand in the arguments of a product of matrices; otherwise None.
        reduced_dims_index: The index of the reduced dimensions in the arguments of a reduction; otherwise None.
        is_mutable: It writes into an argument.
        moves_no_bytes: It only allocates, or returns an argument or a view of one.
    """

    name: str
    is_view: bool
    is_elementwise: bool
    is_stack: bool
    is_to_copy: bool
    reads_value: bool
    result_dtype: torch.dtype | None
    matmul_index: int | None
    reduced_dims_index: int | None
    is_mutable: bool
    moves_no_bytes: bool


_traits: dict[int, OpTraits] = {}  # by id, because torch computes the hash of an operation in Python


def op_traits(op: Any) -> OpTraits:
    """Return the properties of an operation. Operations exist until the process ends."""
    traits = _traits.get(id(op))
    if traits is None:
        packet = op._overloadpacket
        traits = _traits[id(op)] = OpTraits(
            name=packet.__name__,
            is_view=op.is_view,
            is_elementwise=packet in RESULT_DTYPES,
            is_stack=packet is aten.stack,
            is_to_copy=op is aten._to_copy.default,
            reads_value=op is aten._local_scalar_dense.default,
            result_dtype=RESULT_DTYPES.get(packet),
            matmul_index=MATMULS.get(packet),
            reduced_dims_index=REDUCTIONS.get(op),
            is_mutable=op._schema.is_mutable,
            moves_no_bytes=op.is_view or packet in NO_COST_OPS,
        )
    return traits


def cache_key(value: Any) -> Any:
    """Return everything in an argument that an operation on the meta device depends on.

    Raises:
        TypeError: The operation may depend on more than that.
    """
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(cache_key, value))
    return type(value), value  # 1 and 1.0 are equal


class MetaMode(TorchDispatchMode):
    """A dispatch mode for code on the meta device, as a context manager.

    Attributes:
        device_type: The type of the device that the meta device stands for.
        live: The bytes of live storages that were created within the mode.
        peak: The largest value of `live` so far.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for the first operation, which takes seconds."""
        return False

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self.device_type = device_type
        self.live = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._observers = ExitStack()

    def __enter__(self) -> Any:
        self._observers.enter_context(observe_launches(self))
        self._observers.enter_context(observe_allocations(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._observers.close()

    def on_launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """Handle a kernel launch, which creates no tensors. Subclasses override it."""

    def num_events(self) -> int:
        """Return the number of events so far. Subclasses that count events override it."""
        return 0

    def on_repeat(self, first_event: int, times: int) -> None:
        """Handle events that happen again. Subclasses that count events override it."""

    def run_repeatable(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return what the repeatable function `fn` returns. Subclasses may replay an earlier run."""
        return fn(*args)

    def on_op(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> None:
        """Handle an operation that has run. Subclasses override it."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = op_traits(op)
        if traits.reads_value and args[0].is_meta:
            return 1
        if traits.is_to_copy and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = self._run_op(op, traits, args, kwargs)
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        self.on_op(traits, args, kwargs, results)
        for x in results:
            if isinstance(x, Tensor) and x.is_meta:
                self._track(x)
        return result

    def _run_op(self, op: Any, traits: OpTraits, args: Any, kwargs: dict[str, Any]) -> Any:
        if traits.is_view:
            return op(*args, **kwargs)
        if traits.is_elementwise:
            result = _elementwise_result(traits, op, args, kwargs)
            if result is not None:
                return result
        # torch's own functions for matmuls, stack and reductions import parts of its compiler, which takes seconds
        if traits.matmul_index is not None:
            return _matmul_result(op, traits.matmul_index, args, kwargs)
        if traits.is_stack:
            return _stack_result(*args)
        if traits.reduced_dims_index is not None and args[0].is_meta:
            return _reduction_result(traits, args, kwargs)
        try:
            key = id(op), cache_key(args), cache_key(tuple(kwargs.items())) if kwargs else ()
            cached_results = _cached_results.get(key)
        except TypeError:  # also if an argument is not hashable
            return op(*args, **kwargs)
        if cached_results is None:
            return _run_and_cache(op, args, kwargs, key)
        if not cached_results:
            return op(*args, **kwargs)
        results = tuple(args[0] if result is None else _empty_like_key(result) for result in cached_results)
        return results[0] if len(results) == 1 else results

    def _track(self, x: Tensor) -> None:
        """Count the bytes of the storage of x from now until its last reference is gone."""
        key, storage = storage_id(x), x.untyped_storage()
        size = storage.nbytes()
        if not size or key in self._storages or not self.should_count(key):
            return

        def on_collected(_: Any) -> None:
            if self._storages.get(key) is ref:
                self.live -= size
                del self._storages[key]

        ref = weakref.ref(storage, on_collected)
        self._storages[key] = ref
        self.live += size
        self.peak = max(self.peak, self.live)

    def on_allocate(self, flat: Tensor) -> None:
        self._track(flat)

    def on_free(self, flat: Tensor) -> None:
        if self._storages.pop(storage_id(flat), None) is not None:
            self.live -= flat.untyped_storage().nbytes()

    def should_count(self, storage: int) -> bool:
        """Return whether the bytes of a storage are counted. Subclasses override it."""
        return True


def _run_and_cache(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    """Return the result of an operation, and cache what it is for arguments with this key."""
    result = op(*args, **kwargs)
    results = result if isinstance(result, tuple) and len(result) > 1 else (result,)
    cached_results: list[Any] = []
    args_are_unchanged = key[1] == cache_key(args)
    if args_are_unchanged and all(isinstance(x, Tensor) and _is_new(x, args) for x in results):
        cached_results = [None if args and x is args[0] else cache_key(x) for x in results]
    if len(_cached_results) >= MAX_CACHED_RESULTS:
        _cached_results.clear()
    _cached_results[key] = cached_results
    return result


def _is_new(x: Tensor, args: tuple[Any, ...]) -> bool:
    """Return whether x is a new tensor, or the first argument written in place, but not a view."""
    if args and x is args[0]:
        return x.is_meta
    return x.is_meta and storage_id(x) not in {storage_id(a) for a in args if isinstance(a, Tensor)}


def _elementwise_result(traits: OpTraits, op: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the contiguous result of an elementwise operation; None if it may have another layout."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    has_plain_kwargs = all(kwargs[name] in PLAIN_KWARGS.get(name, ()) for name in kwargs.keys() - {"out"})
    if not has_plain_kwargs or not all(x.is_meta and x.is_contiguous() for x in tensors):
        return None
    try:
        shape = np.broadcast_shapes(*(x.shape for x in tensors))  # torch's function imports parts of its compiler, too
    except ValueError:
        shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
        raise RuntimeError(f"{op}: the shapes {shapes} cannot be combined") from None
    if "out" in kwargs:
        return kwargs["out"] if kwargs["out"].shape == shape else None
    dtype = traits.result_dtype
    if dtype is None:
        dtype = torch.result_type(*args[:2]) if len(args) > 1 else args[0].dtype
    return torch.empty(shape, dtype=dtype, device=META)


def _empty_like_key(key: Any) -> Tensor:
    """Return a tensor with the cache key `key`."""
    shape, strides, dtype = key
    return torch.empty_strided(shape, strides, dtype=dtype, device=META)


def _stack_result(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return torch.empty(shape, dtype=tensors[0].dtype, device=META)


def _reduction_result(traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x = args[0]
    dims_index = traits.reduced_dims_index
    assert dims_index is not None
    dims = {dim % x.dim() for dim in args[dims_index]} if len(args) > dims_index else set(range(x.dim()))
    keepdim = args[dims_index + 1 :] == (True,)
    shape = []
    for dim, size in enumerate(x.shape):
        if dim not in dims:
            shape.append(size)
        elif keepdim:
            shape.append(1)
    dtype = torch.bool if traits.name == "all" else kwargs.get("dtype") or x.dtype
    return torch.empty(shape, dtype=dtype, device=META)


def _matmul_result(op: Any, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the product of two matrices, or of two batches of matrices.

    Raises:
        RuntimeError: They cannot be multiplied.
    """
    a, b = args[index : index + 2]
    shape = torch.Size((*a.shape[:-1], b.shape[-1]))
    out = kwargs.get("out", args[0]) if op._schema.is_mutable else None
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2] or (out is not None and out.shape != shape):
        into = "" if out is None else f" into {tuple(out.shape)}"
        raise RuntimeError(f"{op}: the shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied{into}")
    dtype = next((x for x in args if isinstance(x, torch.dtype)), a.dtype)
    return torch.empty(shape, dtype=dtype, device=META) if out is None else out
