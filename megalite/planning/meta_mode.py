"""Runs code on the meta device and observes torch's operations, kernel launches and the lives of storages.

    operations   `__torch_dispatch__` sees each with its arguments and results
    launches     kernels/dispatch.py reports each instead of launching it
    storages     live from the operation that makes them to their last reference

Every value that the host reads is 1, so loss and gradient norm are finite, and a step is taken. Results are made from
shapes that were seen before, because most of torch's own functions for this device are slow Python. Rejected:
FakeTensorMode, which refuses such reads, needs CUDA for the backward of a card's tensors, and has no data pointers.
"""

import weakref
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels.dispatch import Kernel, observe_launches
from megalite.optim.flat_buffers import observe_allocations

META = torch.device("meta")
aten: Any = torch.ops.aten
MATMULS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1}  # place of the left operand
REDUCTIONS = {aten.all.default: 1, aten.logsumexp.default: 1, aten.mean.dim: 1, aten.linalg_vector_norm.default: 2}
ELEMENTWISE = (aten.add, aten.mul, aten.sub, aten.div, aten.pow, aten.relu, aten.neg, aten.rsqrt, aten.empty_like)
ELEMENTWISE += (aten.ones_like, aten.zeros_like, aten.clone, aten.clamp_min, aten.floor_divide, aten.remainder)
COMPARISONS = (aten.bitwise_or, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
RESULT_DTYPES = dict.fromkeys(ELEMENTWISE) | dict.fromkeys(
    COMPARISONS, torch.bool
)  # elementwise operation -> its result's; None: promoted
PLAIN_KWARGS = {"memory_format": (None, torch.contiguous_format, torch.preserve_format), "pin_memory": (None, False)}


def storage_id(x: Tensor) -> int:
    """Identify the storage of `x`, which other tensors may share, now or later."""
    return x.untyped_storage()._cdata


def _cache_key(value: Any) -> Any:
    """All that an operation on the meta device depends on in an argument. Raises TypeError if it may depend on more."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_cache_key, value))
    return type(value), value  # 1 and 1.0 are equal


class MetaMode(TorchDispatchMode):
    """`live`, `peak`: bytes of the storages that were made inside. `device_type`: the device that meta stands for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch imports its compiler for the first operation, which takes seconds
        return False

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self.device_type = device_type
        self.live = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._results: dict[Any, list[Any]] = {}  # operation and arguments -> its results; None: the first argument
        self._inside = ExitStack()

    def __enter__(self) -> Any:
        self._inside.enter_context(observe_launches(self))
        self._inside.enter_context(observe_allocations(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.close()

    def on_launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """Called for each kernel launch, which makes no tensors."""

    def on_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> None:
        """Called after each operation."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if op is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = self._run_op(op, args, kwargs)
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        self.on_op(op, args, kwargs, results)
        for x in results:
            if isinstance(x, Tensor) and x.is_meta:
                self._track(x.untyped_storage())
        return result

    def _run_op(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if op._overloadpacket in RESULT_DTYPES and (cached := _elementwise_result(op, args, kwargs)) is not None:
            return cached
        # torch's own functions for these import parts of its compiler, which takes seconds
        if op._overloadpacket in MATMULS:
            return _matmul_result(op, args, kwargs)
        if op._overloadpacket is aten.stack:
            parts = args[0]
            shape = list(parts[0].shape)
            shape.insert((args[1] if len(args) > 1 else 0) % (len(shape) + 1), len(parts))
            return torch.empty(shape, dtype=parts[0].dtype, device=META)
        if (at := REDUCTIONS.get(op)) is not None and args[0].is_meta:
            dims = {dim % args[0].dim() for dim in args[at]} if len(args) > at else range(args[0].dim())
            ones = [n if dim not in dims else 1 for dim, n in enumerate(args[0].shape)]
            shape = ones if args[at + 1 :] == (True,) else [n for dim, n in enumerate(ones) if dim not in dims]
            dtype = torch.bool if op is aten.all.default else kwargs.get("dtype") or args[0].dtype
            return torch.empty(shape, dtype=dtype, device=META)
        try:
            key = op, _cache_key(args), _cache_key(tuple(kwargs.items()))
            seen = self._results.get(key)
        except TypeError:  # also if an argument has no hash
            return op(*args, **kwargs)
        if seen is not None:
            cached = [args[0] if x is None else torch.empty_strided(*x[:2], dtype=x[2], device=META) for x in seen]
            return cached[0] if len(cached) == 1 else tuple(cached)
        result = op(*args, **kwargs)
        results = result if isinstance(result, tuple) and len(result) > 1 else (result,)
        if key[1] == _cache_key(args) and all(isinstance(x, Tensor) and _is_new(x, args) for x in results):
            self._results[key] = [None if args and x is args[0] else _cache_key(x) for x in results]
        return result

    def _track(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._alive or not self.should_count(key):
            return

        def on_free(_: Any) -> None:
            if self._alive.get(key) is ref:
                self.live -= size
                del self._alive[key]

        self._alive[key] = ref = weakref.ref(storage, on_free)
        self.live += size
        self.peak = max(self.peak, self.live)

    def on_allocate(self, flat: Tensor) -> None:
        self._track(flat.untyped_storage())

    def on_free(self, flat: Tensor) -> None:
        storage = flat.untyped_storage()
        if self._alive.pop(storage._cdata, None) is not None:
            self.live -= storage.nbytes()

    def should_count(self, storage: int) -> bool:
        """Whether the bytes of `storage` are counted."""
        return True


def _is_new(x: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether x is a new tensor, or the first argument written in place, but not a view."""
    if args and x is args[0]:
        return x.is_meta
    return x.is_meta and storage_id(x) not in {storage_id(a) for a in args if isinstance(a, Tensor)}


def _elementwise_result(op: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The dense result of sums, products and other elementwise operations; None if that is not certain."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    plain = all(kwargs[name] in PLAIN_KWARGS.get(name, ()) for name in kwargs.keys() - {"out"})
    if not plain or not all(x.is_meta and x.is_contiguous() for x in tensors):
        return None
    try:
        shape = np.broadcast_shapes(*(x.shape for x in tensors))  # torch's own imports parts of its compiler, too
    except ValueError:
        shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
        raise RuntimeError(f"{op}: the shapes {shapes} cannot be combined") from None
    if "out" in kwargs:
        return kwargs["out"] if kwargs["out"].shape == shape else None
    dtype = RESULT_DTYPES[op._overloadpacket] or (torch.result_type(*args[:2]) if len(args) > 1 else args[0].dtype)
    return torch.empty(shape, dtype=dtype, device=META)


def _matmul_result(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The product of two matrices, or of two batches of them. Raises RuntimeError if they cannot be multiplied."""
    a, b = args[MATMULS[op._overloadpacket] :][:2]
    shape = torch.Size((*a.shape[:-1], b.shape[-1]))
    out = kwargs.get("out", args[0]) if op._schema.is_mutable else None
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2] or (out is not None and out.shape != shape):
        into = "" if out is None else f" into {tuple(out.shape)}"
        raise RuntimeError(f"{op}: the shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied{into}")
    dtype = next((x for x in args if isinstance(x, torch.dtype)), a.dtype)
    return torch.empty(shape, dtype=dtype, device=META) if out is None else out
