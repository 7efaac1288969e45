"""Makes this rank's part of a parameter from its spec."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megalite.parallel.mesh import Mesh
from megalite.parallel.rng import initialize_
from megalite.parallel.spec import ParamSpec, TensorShard


@dataclass(frozen=True)
class ParamFactory:
    """Makes parameters from what all of a run have in common: mesh, dtype, seed (of initial weights and dropout).

    `meta`: without memory, for plans and dry runs. `deferred`: a parameter takes no memory, and is drawn where it is
    going to lie (`write_initial`). `unit`: the part of the model that uses the parameters at the same time:
    "embedding", "layers.17", "head".
    """

    mesh: Mesh
    dtype: torch.dtype
    seed: int
    meta: bool = False
    deferred: bool = False
    unit: str = ""

    def for_unit(self, unit: str) -> "ParamFactory":
        """A maker for the parameters of `unit`."""
        return replace(self, unit=unit)

    def __call__(self, spec: ParamSpec) -> nn.Parameter:
        device, shape = "meta" if self.meta else self.mesh.device, spec.local_shape(self.mesh.sizes)
        draw = partial(initialize_, spec=spec, mesh=self.mesh, seed=self.seed)
        if self.deferred:
            parameter = nn.Parameter(torch.empty((), dtype=self.dtype, device=device).expand(shape))
            parameter.draw = draw  # type: ignore[attr-defined]
        else:
            parameter = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=device))
            if not parameter.is_meta:
                draw(parameter.data)
        parameter.spec, parameter.unit = spec, self.unit  # type: ignore[attr-defined]
        return parameter


@torch.no_grad()
def write_initial_values(parameter: nn.Parameter, into: Tensor, span: range | None = None) -> None:
    """Write the parameter's initial values into a tensor of its shape; of a deferred one at least the elements `span`
    of the flattened tensor."""
    if (draw := getattr(parameter, "draw", None)) is None:
        into.copy_(parameter.data)
        return
    del parameter.draw  # pyright: ignore[reportAttributeAccessIssue]
    if not into.is_meta:
        draw(into, span=span)


def spec_of(parameter: nn.Parameter) -> ParamSpec:
    """The spec that `Maker` attached."""
    return parameter.spec  # type: ignore[attr-defined]


class MainGrad(Protocol):
    """Adds up a parameter's gradients outside of autograd (optim/grad_reduce.py)."""

    def accumulator(self) -> tuple[Tensor, bool]:
        """The sum so far, of the parameter's shape, which the caller adds to at once; and whether the caller must
        overwrite it, because it holds nothing yet. Raises RuntimeError if it was reduced already."""
        ...

    def mark_ready(self) -> None:
        """Called by code that adds outside of backward (nn/wgrad_store.py) when it has added everything."""
        ...


def main_grad_of(parameter: Tensor) -> MainGrad | None:
    """The sink of its gradients; None: they go to autograd. A function that adds to the sink in backward returns None
    for the parameter, and autograd still tells the sink when all uses of the parameter are done."""
    return getattr(parameter, "sink", None)


def params_with_specs(module: nn.Module) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
    """Every parameter of `module` with its spec, in order of registration, which is the order of use."""
    for parameter in module.parameters():
        yield spec_of(parameter), parameter


def shapes(module: nn.Module) -> str:
    """This rank's shapes of the module's own parameters, for its `extra_repr`: `up [128, 64], down [64, 128]`."""
    return ", ".join(f"{name} {[*parameter.shape]}" for name, parameter in module.named_parameters(recurse=False))


def model_shards(module: nn.Module, mesh: Mesh) -> list[TensorShard]:
    """This rank's weights as a checkpoint holds them, each parameter once, as views that loading may write; and the
    state that is none, which a module gives as `buffer_shards`."""
    pieces = []
    for spec, parameter in {spec.name: (spec, p) for spec, p in params_with_specs(module)}.values():
        box = spec.stored_box(mesh.sizes, mesh.coordinates)
        data = parameter.data.view(-1)[: box.numel]
        pieces.append(TensorShard(spec.stored_name, spec.stored_shape, box, range(box.numel), data))
    return pieces + [piece for part in module.modules() for piece in getattr(part, "buffer_shards", list)()]


class RunUnit(Protocol):
    """Runs a unit of the model where its weights are whole. `again`: in backward, to compute its activations again."""

    def __call__(self, unit: nn.Module, *args: Any, recomputing: bool = False) -> Tensor: ...


def call_unit(unit: nn.Module, *args: Any, recomputing: bool = False) -> Tensor:
    """unit(*args): its weights are always there."""
    return unit(*args)


@runtime_checkable
class ShardableModule(Protocol):
    """A module whose weights may come and go (optim/param_gather.py)."""

    run_unit: RunUnit

    @property
    def units(self) -> dict[nn.Module, bool]:
        """In order of use, and whether backward reads their weights."""
        ...
