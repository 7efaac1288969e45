"""Parameters: this rank's shard of a parameter, created from its spec."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megalite.parallel.mesh import Mesh
from megalite.parallel.rng import initialize_
from megalite.parallel.spec import ParamSpec, TensorShard


def main_param_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients, main weights and optimizer state."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class ParamFactory:
    """Creates parameters from their specs and what all parameters of a run have in common.

    mesh         of the run
    dtype        of the model's weights, except of those that stay in fp32
    seed         of initial weights and dropout
    meta         parameters have no memory, for plans and dry runs
    deferred     a parameter has no memory yet; `write_initial_values` writes its values into their final place
    unit         the part of the model that uses the parameters at the same time: "embedding", "layers.17", "head"
    width_mult   the width of the model over that of muP's base model
    """

    mesh: Mesh
    dtype: torch.dtype
    seed: int
    meta: bool = False
    deferred: bool = False
    unit: str = ""
    width_mult: float = 1.0

    def for_unit(self, unit: str) -> "ParamFactory":
        """Return a factory for the parameters of `unit`."""
        return replace(self, unit=unit)

    def for_width(self, width_mult: float) -> "ParamFactory":
        """Return a factory for a model that is `width_mult` times as wide as muP's base model."""
        return replace(self, width_mult=width_mult)

    def dtype_of(self, spec: ParamSpec) -> torch.dtype:
        """Return the dtype of the weights of a parameter."""
        return main_param_dtype(self.dtype) if spec.keep_fp32 else self.dtype

    def __call__(self, spec: ParamSpec) -> nn.Parameter:
        """Return this rank's shard of the parameter, initialized unless it is deferred."""
        spec = spec.for_width(self.width_mult)
        device = "meta" if self.meta else self.mesh.device
        shape = spec.local_shape(self.mesh.sizes)
        dtype = self.dtype_of(spec)
        init_fn = partial(initialize_, spec=spec, mesh=self.mesh, seed=self.seed)
        if self.deferred:
            parameter = nn.Parameter(torch.empty((), dtype=dtype, device=device).expand(shape))
            parameter.init_fn = init_fn  # type: ignore[attr-defined]
        else:
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            if not parameter.is_meta:
                init_fn(parameter.data)
        parameter.spec = spec  # type: ignore[attr-defined]
        parameter.unit = self.unit  # type: ignore[attr-defined]
        return parameter


@torch.no_grad()
def write_initial_values(parameter: nn.Parameter, into: Tensor, span: range | None = None) -> None:
    """Write the initial values of a parameter into a tensor of its shape.

    If the parameter is deferred, at least the elements `span` of the flattened tensor are written.
    """
    if (init_fn := getattr(parameter, "init_fn", None)) is None:
        into.copy_(parameter.data)
        return
    del parameter.init_fn  # pyright: ignore[reportAttributeAccessIssue]
    if not into.is_meta:
        init_fn(into, span=span)


def spec_of(parameter: nn.Parameter) -> ParamSpec:
    """Return the spec that `ParamFactory` attached."""
    return parameter.spec  # type: ignore[attr-defined]


class MainGrad(Protocol):
    """The accumulator of a parameter's gradients outside of autograd (optim/zero/grad_bucket.py)."""

    def accumulator(self) -> tuple[Tensor, bool]:
        """Return the sum so far, in the parameter's shape, and whether the caller must overwrite it.

        The caller adds its gradient at once, or overwrites the sum if it contains nothing yet. Raises RuntimeError if
        the sum was reduced already.
        """
        ...

    def mark_ready(self) -> None:
        """Report that everything was added; called by code that adds outside of backward (nn/wgrad_store.py)."""
        ...


def main_grad_of(parameter: Tensor) -> MainGrad | None:
    """Return the accumulator of a parameter's gradients, or None if they go to autograd.

    A function that adds to it in backward returns None for the parameter. Autograd's hook still marks the gradient as
    ready when all uses of the parameter are done.
    """
    return getattr(parameter, "main_grad", None)


def params_with_specs(module: nn.Module) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
    """Yield every parameter of `module` with its spec, in order of registration, which is the order of use."""
    for parameter in module.parameters():
        yield spec_of(parameter), parameter


def shapes(module: nn.Module) -> str:
    """Return this rank's shapes of a module's own parameters for `extra_repr`: `up [128, 64], down [64, 128]`."""
    return ", ".join(f"{name} {[*parameter.shape]}" for name, parameter in module.named_parameters(recurse=False))


def name_in_unit(spec: ParamSpec, unit: str) -> str:
    """Return the name of a parameter without that of its unit: it is equal for all layers of a kind.

    >>> name_in_unit(ParamSpec("layers.3.mlp.down", (2, 2)), "layers.3")
    'mlp.down'
    """
    return spec.name.removeprefix(f"{unit}.")


def model_shards(module: nn.Module, mesh: Mesh) -> list[TensorShard]:
    """Return this rank's weights as shards of a checkpoint, as views that loading may write.

    Each parameter occurs once. State that is not a parameter comes from a module's `buffer_shards`.
    """
    shards = []
    for spec, parameter in {spec.name: (spec, p) for spec, p in params_with_specs(module)}.values():
        box = spec.stored_box(mesh.sizes, mesh.coordinates)
        data = parameter.data.view(-1)[: box.numel]
        shards.append(TensorShard(spec.stored_name, spec.stored_shape, box, range(box.numel), data))
    return shards + [shard for part in module.modules() for shard in getattr(part, "buffer_shards", list)()]


class RunUnit(Protocol):
    """Runs a unit of the model with its full weights. `recomputing`: in backward, to recompute its activations."""

    def __call__(self, unit: nn.Module, *args: Any, recomputing: bool = False) -> Tensor: ...


def call_unit(unit: nn.Module, *args: Any, recomputing: bool = False) -> Tensor:
    """Return unit(*args), for weights that are always unsharded."""
    return unit(*args)


@runtime_checkable
class ShardableModule(Protocol):
    """A module whose weights can be unsharded and resharded (optim/zero/sync.py)."""

    run_unit: RunUnit

    @property
    def units(self) -> dict[nn.Module, bool]:
        """The units in order of use, and whether backward reads their weights."""
        ...
