"""What Python sees of tensors on a simulated card: attributes and methods of Tensor, and torch's factories.

C++ believes that all is on the CPU, so whatever asks for a device, or goes to one, is answered here.
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
    """None: neither here nor there, as "meta"."""
    kind = torch.device(device).type if not isinstance(device, int) else "cuda"
    return {"cuda": "card", "cpu": "host"}.get(kind)  # type: ignore[return-value]


def _factory(card: Any, original: Callable[..., Tensor], follows: bool) -> Callable[..., Tensor]:
    """`follows`: without a device it is the first argument's."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if card.native or (device is not None and side_of(device) is None):
            return original(*args, **kwargs)
        side = side_of(device) if device is not None else None if follows else "host"
        if kwargs.get("pin_memory"):
            side = "pinned"
            kwargs = {**kwargs, "pin_memory": False}
        if device is not None:
            kwargs = {**kwargs, "device": CPU}
        with card.making(side):
            return original(*args, **kwargs)

    return make


def _tensor(card: Any, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor and torch.as_tensor: made by the host, and copied, which the host waits for."""

    @functools.wraps(original)
    def make(data: Any, **kwargs: Any) -> Tensor:
        if card.native:
            return original(data, **kwargs)
        device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        grad = kwargs.pop("requires_grad", False)
        if isinstance(data, Tensor) and card.memory.on_card(data) and device is None:
            device = card.device
        made = original(data, **kwargs)
        made = made.pin_memory() if pinned else made
        made = made if device is None else made.to(device)
        return made.requires_grad_() if grad else made

    return make


def _moved(card: Any, x: Tensor, device: Any, dtype: torch.dtype | None, **how: Any) -> Tensor:
    """`how`: non_blocking, copy, memory_format."""
    side = None if device is None else side_of(device)
    there = "card" if card.memory.on_card(x) else "host"
    if device is not None and side is None:  # to meta, which is no memory
        return BASE.to(x, device, dtype, **how)
    if side is None or side == there:
        with card.making(None):
            return BASE.to(x, dtype or x.dtype, **how)
    with card.making(side):
        return BASE.to(x, CPU, dtype or x.dtype, **{**how, "copy": True})


def _to(card: Any) -> Callable[..., Tensor]:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if card.native:
            return BASE.to(self, *args, **kwargs)
        copy = kwargs.pop("copy", False)
        if isinstance(other := args[0] if args else kwargs.pop("other", None), Tensor):
            args = (other.device, other.dtype, *args[1:])
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        how = {} if form is None else {"memory_format": form}
        return _moved(card, self, device, dtype, non_blocking=non_blocking, copy=copy, **how)

    return to


def _methods(card: Any) -> dict[str, Any]:
    memory = card.memory

    def device(self: Tensor) -> torch.device:
        return BASE.device.__get__(self) if card.native or not memory.on_card(self) else card.device

    def is_cuda(self: Tensor) -> bool:
        return not card.native and memory.on_card(self)

    def cpu(self: Tensor, **how: Any) -> Tensor:
        return BASE.cpu(self, **how) if card.native else _moved(card, self, CPU, None, **how)

    def to_card(self: Tensor, device: Any = None, non_blocking: bool = False, **how: Any) -> Tensor:
        return _moved(card, self, card.device if device is None else device, None, non_blocking=non_blocking, **how)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        if memory.on_card(self):
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        if memory.side(self) == "pinned":
            return self
        with card.aside():
            made = self.detach().clone(memory_format=torch.contiguous_format)
        memory.place(made, "pinned")
        card.touched("pin_memory", [self], [made])
        return made

    def numpy(self: Tensor) -> Any:
        if card.native:
            return BASE.numpy(self)
        if memory.on_card(self):
            raise TypeError(
                f"can't convert {card.device} device type tensor to numpy. Use Tensor.cpu() to copy it first."
            )
        card.touched("numpy", [self], [])
        return BASE.numpy(self)

    def tolist(self: Tensor) -> Any:
        if memory.on_card(self) and not card.native:
            card.launch("copy to the host", [self])
            card.host_waits("tolist", "tolist")
        elif not card.native:
            card.touched("tolist", [self], [])
        return BASE.tolist(self)

    return {
        "device": property(device),
        "is_cuda": property(is_cuda),
        "is_cpu": property(lambda self: not is_cuda(self) and BASE.is_cpu.__get__(self)),
        "get_device": lambda self: device(self).index if device(self).index is not None else -1,
        "to": _to(card),
        "cpu": cpu,
        "cuda": to_card,
        "pin_memory": pin_memory,
        "is_pinned": lambda self, device=None: memory.side(self) == "pinned",
        "numpy": numpy,
        "tolist": tolist,
        **{name: _factory(card, getattr(BASE, name), follows=True) for name in NEW},
    }


def _attention_backends(original: Any) -> Any:
    """torch.nn.attention.sdpa_kernel, where the CPU's own ways are always among those that may be taken."""
    from torch.nn.attention import SDPBackend

    @functools.wraps(original)
    def sdpa_kernel(backends: Any, set_priority: bool = False) -> Any:
        asked = backends if isinstance(backends, list) else [backends]
        here = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        return original(list(dict.fromkeys([*asked, *here])), set_priority=set_priority)

    return sdpa_kernel


@contextlib.contextmanager
def replaced(card: Any) -> Iterator[None]:
    import torch.nn.attention as attention

    with contextlib.ExitStack() as stack:
        for name, value in _methods(card).items():
            stack.enter_context(mock.patch.object(Tensor, name, value))
        for names, follows in ((FACTORIES, False), (LIKE, True)):
            for name in names:
                made = _factory(card, getattr(torch, name), follows)
                stack.enter_context(mock.patch.object(torch, name, made))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _tensor(card, getattr(torch, name))))
        stack.enter_context(mock.patch.object(attention, "sdpa_kernel", _attention_backends(attention.sdpa_kernel)))
        yield


def noted(card: Any) -> contextlib.AbstractContextManager[object]:
    """Triton's kernels: interpreted on the CPU, written down as one Launch each. What one writes is what has changed; all
    arguments may be read."""
    plain = Kernel.__getitem__

    def at(kernel: Kernel, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            if any(x.is_meta for x in tensors):  # of a plan
                return plain(kernel, grid)(*args, **options)
            name = kernel.fn.__name__
            if not all(card.on_card(x) for x in tensors):
                card.mix(f"{name}({', '.join(card.memory.side(x) for x in tensors)})")
            with card.aside():
                before = [x.clone() for x in tensors]
                plain(kernel, grid)(*args, **options)
                written = [x for x, old in zip(tensors, before, strict=True) if not torch.equal(x, old)]
            card.launch(name, tensors, written)

        return launch

    return mock.patch.object(Kernel, "__getitem__", at)
