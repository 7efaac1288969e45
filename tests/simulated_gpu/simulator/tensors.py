"""The Python side of tensors on a simulated GPU: attributes and methods of Tensor, and torch's factories.

For C++ all tensors are on the CPU, so everything that reads, selects or changes a device is replaced here.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalite.kernels.dispatch import Kernel
from simulated_gpu.simulator.memory import Side

CPU = torch.device("cpu")
FACTORIES = """zeros ones empty full arange rand randn randint randperm linspace logspace eye empty_strided scalar_tensor
tril_indices triu_indices normal from_numpy frombuffer""".split()  # noqa: SIM905
LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like randint_like".split()  # noqa: SIM905
NEW = "new_zeros new_ones new_empty new_full new_empty_strided".split()  # noqa: SIM905
BASE = torch._C.TensorBase


def side_of(device: Any) -> Side | None:
    """Return the side of a device, or None for one without memory, such as "meta"."""
    kind = torch.device(device).type if not isinstance(device, int) else "cuda"
    return {"cuda": "gpu", "cpu": "host"}.get(kind)  # type: ignore[return-value]


def _factory(gpu: Any, original: Callable[..., Tensor], follows: bool) -> Callable[..., Tensor]:
    """Replace a factory; if it `follows`, the default device is the first argument's."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if gpu.is_paused or (device is not None and side_of(device) is None):
            return original(*args, **kwargs)
        side = side_of(device) if device is not None else None if follows else "host"
        if kwargs.get("pin_memory"):
            side = "pinned"
            kwargs = {**kwargs, "pin_memory": False}
        if device is not None:
            kwargs = {**kwargs, "device": CPU}
        with gpu.new_tensors_on(side):
            return original(*args, **kwargs)

    return make


def _tensor(gpu: Any, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace torch.tensor or torch.as_tensor: the host creates the tensor and waits for the copy to the GPU."""

    @functools.wraps(original)
    def make(data: Any, **kwargs: Any) -> Tensor:
        if gpu.is_paused:
            return original(data, **kwargs)
        device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        grad = kwargs.pop("requires_grad", False)
        if isinstance(data, Tensor) and gpu.memory.on_gpu(data) and device is None:
            device = gpu.device
        tensor = original(data, **kwargs)
        tensor = tensor.pin_memory() if pinned else tensor
        tensor = tensor if device is None else tensor.to(device)
        return tensor.requires_grad_() if grad else tensor

    return make


def _move(gpu: Any, x: Tensor, device: Any, dtype: torch.dtype | None, **options: Any) -> Tensor:
    """Copy a tensor to a device; `options` are non_blocking, copy and memory_format."""
    side = None if device is None else side_of(device)
    current_side = "gpu" if gpu.memory.on_gpu(x) else "host"
    if device is not None and side is None:  # to meta, which is no memory
        return BASE.to(x, device, dtype, **options)
    if side is None or side == current_side:
        with gpu.new_tensors_on(None):
            return BASE.to(x, dtype or x.dtype, **options)
    with gpu.new_tensors_on(side):
        return BASE.to(x, CPU, dtype or x.dtype, **{**options, "copy": True})


def _to(gpu: Any) -> Callable[..., Tensor]:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if gpu.is_paused:
            return BASE.to(self, *args, **kwargs)
        copy = kwargs.pop("copy", False)
        if isinstance(other := args[0] if args else kwargs.pop("other", None), Tensor):
            args = (other.device, other.dtype, *args[1:])
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        options = {} if form is None else {"memory_format": form}
        return _move(gpu, self, device, dtype, non_blocking=non_blocking, copy=copy, **options)

    return to


def _methods(gpu: Any) -> dict[str, Any]:
    memory = gpu.memory

    def device(self: Tensor) -> torch.device:
        return BASE.device.__get__(self) if gpu.is_paused or not memory.on_gpu(self) else gpu.device

    def is_cuda(self: Tensor) -> bool:
        return not gpu.is_paused and memory.on_gpu(self)

    def cpu(self: Tensor, **options: Any) -> Tensor:
        return BASE.cpu(self, **options) if gpu.is_paused else _move(gpu, self, CPU, None, **options)

    def to_gpu(self: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
        return _move(gpu, self, gpu.device if device is None else device, None, non_blocking=non_blocking, **options)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        if memory.on_gpu(self):
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        if memory.side(self) == "pinned":
            return self
        with gpu.pause_simulation():
            pinned = self.detach().clone(memory_format=torch.contiguous_format)
        memory.place(pinned, "pinned")
        gpu.host_access("pin_memory", [self], [pinned])
        return pinned

    def numpy(self: Tensor) -> Any:
        if gpu.is_paused:
            return BASE.numpy(self)
        if memory.on_gpu(self):
            raise TypeError(
                f"can't convert {gpu.device} device type tensor to numpy. Use Tensor.cpu() to copy it first."
            )
        gpu.host_access("numpy", [self], [])
        return BASE.numpy(self)

    def tolist(self: Tensor) -> Any:
        if memory.on_gpu(self) and not gpu.is_paused:
            gpu.launch("copy to the host", [self])
            gpu.host_waits("tolist", "tolist")
        elif not gpu.is_paused:
            gpu.host_access("tolist", [self], [])
        return BASE.tolist(self)

    return {
        "device": property(device),
        "is_cuda": property(is_cuda),
        "is_cpu": property(lambda self: not is_cuda(self) and BASE.is_cpu.__get__(self)),
        "get_device": lambda self: device(self).index if device(self).index is not None else -1,
        "to": _to(gpu),
        "cpu": cpu,
        "cuda": to_gpu,
        "pin_memory": pin_memory,
        "is_pinned": lambda self, device=None: memory.side(self) == "pinned",
        "numpy": numpy,
        "tolist": tolist,
        **{name: _factory(gpu, getattr(BASE, name), follows=True) for name in NEW},
    }


def _attention_backends(original: Any) -> Any:
    """Wrap torch.nn.attention.sdpa_kernel so that it always permits the CPU's own backends too."""
    from torch.nn.attention import SDPBackend

    @functools.wraps(original)
    def sdpa_kernel(backends: Any, set_priority: bool = False) -> Any:
        requested = backends if isinstance(backends, list) else [backends]
        available = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        return original(list(dict.fromkeys([*requested, *available])), set_priority=set_priority)

    return sdpa_kernel


@contextlib.contextmanager
def replace_torch_functions(gpu: Any) -> Iterator[None]:
    import torch.nn.attention as attention

    with contextlib.ExitStack() as stack:
        for name, value in _methods(gpu).items():
            stack.enter_context(mock.patch.object(Tensor, name, value))
        for names, follows in ((FACTORIES, False), (LIKE, True)):
            for name in names:
                factory = _factory(gpu, getattr(torch, name), follows)
                stack.enter_context(mock.patch.object(torch, name, factory))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _tensor(gpu, getattr(torch, name))))
        stack.enter_context(mock.patch.object(attention, "sdpa_kernel", _attention_backends(attention.sdpa_kernel)))
        yield


def record_kernels(gpu: Any) -> contextlib.AbstractContextManager[object]:
    """Interpret Triton's kernels on the CPU, and record each as one Launch.

    It reads all tensor arguments, and writes those whose values have changed.
    """
    original = Kernel.__getitem__

    def getitem(kernel: Kernel, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            if any(x.is_meta for x in tensors):  # a plan's measurement
                return original(kernel, grid)(*args, **options)
            name = kernel.fn.__name__
            if not all(gpu.on_gpu(x) for x in tensors):
                gpu.record_mixed(f"{name}({', '.join(gpu.memory.side(x) for x in tensors)})")
            with gpu.pause_simulation():
                before = [x.clone() for x in tensors]
                original(kernel, grid)(*args, **options)
                written = [x for x, old in zip(tensors, before, strict=True) if not torch.equal(x, old)]
            gpu.launch(name, tensors, written)

        return launch

    return mock.patch.object(Kernel, "__getitem__", getitem)
