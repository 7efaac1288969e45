"""The interface of an optimizer: a rule that updates a flat tensor of main weights (optim/adamw.py, optim/sgd.py).

Rules that need full tensors have a second half, in which ranks communicate (optim/muon.py, optim/lamb.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megalite.config.registry import REGISTRIES
from megalite.config.run_options import OptimConfig

if TYPE_CHECKING:
    from megalite.optim.zero.layout import BufferLayout
    from megalite.optim.zero.param_bucket import ParamBucket
    from megalite.parallel.mesh import Mesh


@dataclass(frozen=True)
class ParamUpdate:
    """The arguments of an update of the part of a bucket that this rank owns. All tensors are flat, of one length.

    Attributes:
        param: the main weights, updated in place.
        grad: a sum of gradients; the gradient is scale * grad. The update may overwrite it.
        state: the optimizer state by name, updated in place.
        lr: learning rate.
        weight_decay: weight decay.
        step: number of the update, counted from 1.
        scale: factor of `grad`.
        model_param: receives the new weights in its own dtype, for the all-gather; None: the main weights are the
            weights of the model.
    """

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    lr: float
    weight_decay: float
    step: int
    scale: float
    model_param: Tensor | None = None


class UpdateRule(Protocol):
    """An elementwise update rule."""

    @classmethod
    def from_config(cls, config: OptimConfig) -> "UpdateRule":
        """Return the rule with the options of a run."""
        ...

    @property
    def state_dtypes(self) -> Mapping[str, torch.dtype | None]:
        """The names of the tensors of its state, with their dtype (None: the dtype of the main weights)."""
        ...

    def update_(self, update: ParamUpdate) -> None:
        """Update the owned part of one bucket."""
        ...


Finalizer = Callable[[Sequence[ParamUpdate]], None]


@runtime_checkable
class WholeTensorRule(UpdateRule, Protocol):
    """A rule that needs full tensors.

    `update_` replaces the gradient of a bucket by the quantity that the second half needs, and changes no weight. The
    second half, a Finalizer, updates the weights.
    """

    def make_finalizer(self, mesh: "Mesh", layout: "BufferLayout", buckets: "Sequence[ParamBucket]") -> Finalizer:
        """Return the second half of the update.

        It is called once per step, with the updates of `buckets`, all those of `layout` that have this rule, in order.
        Collective over the stage.
        """
        ...


def build_rules(config: OptimConfig, width_mult: float = 1.0) -> tuple[UpdateRule, UpdateRule | None]:
    """Return the update rule of the optimizer, and the rule for matrices if it has a separate one (Muon), else None.

    Args:
        config: the options of the optimizer.
        width_mult: the width of the model over that of muP's base model. Gradients shrink by it, and so does Adam's
            epsilon (arXiv:2203.03466, appendix B.3).

    Raises:
        ValueError: if a plugin's optimizer is not an UpdateRule.
    """
    config = replace(config, adam_eps=config.adam_eps / width_mult)
    rule: UpdateRule = REGISTRIES["optimizer"].get(config.optimizer).from_config(config)
    if not isinstance(getattr(rule, "state_dtypes", None), Mapping):
        text = f"from_config(options) gives {rule!r}, whose state_dtypes is not a dict; return a rule like"
        raise ValueError(f"optimizer={config.optimizer!r}: {text} megalite.optim.update_rule: UpdateRule")
    if config.is_muon:
        muon: Any = rule
        return REGISTRIES["optimizer"].get("adam").from_config(config), muon.for_width(width_mult)
    return rule, None
