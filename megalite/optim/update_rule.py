"""What an optimizer is here: a rule for how one flat tensor of main weights moves (optim/adamw.py, optim/sgd.py), or
one in two halves, with an exchange of ranks between them, for whole tensors (optim/muon.py, optim/lamb.py)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from megalite.config.registry import REGISTRIES
from megalite.config.run_options import OptimConfig

if TYPE_CHECKING:
    from megalite.optim.buffer import ParamAndGradBuffer
    from megalite.optim.layout import Bucket


class ParamUpdate(NamedTuple):
    """What a rule gets for what this rank owns of a bucket: flat tensors of one length, and this step's numbers.

    param  the main weights, and `state` the tensors kept beside them: both updated in place
    grad   a sum; its gradient is scale * grad. Used up
    step   counts from 1
    model_param  gets the new weights in its own dtype, for the gather; None: the main weights are the weights
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
    """`from_config`: with a run's options. `state_dtypes` names the tensors that it keeps, with their dtype (None: that
    of the main weights)."""

    @classmethod
    def from_config(cls, o: OptimConfig) -> "UpdateRule": ...

    @property
    def state_dtypes(self) -> Mapping[str, torch.dtype | None]: ...

    def update_(self, update: ParamUpdate) -> None: ...


Finalizer = Callable[[Sequence[ParamUpdate]], None]


@runtime_checkable
class WholeTensorRule(UpdateRule, Protocol):
    """A rule for whole tensors: `update_` makes of a bucket's gradient what the tensors are to be judged by, and moves
    no weight. Then, once a step, what `make_finalizer` returned gets the updates of all `buckets` of `buffer` that have
    the rule, in their order, and moves the weights; collective over the stage."""

    def make_finalizer(self, buffer: "ParamAndGradBuffer", buckets: "Sequence[Bucket]") -> Finalizer: ...


def build_rules(o: OptimConfig) -> tuple[UpdateRule, UpdateRule | None]:
    """The rule that the options name, and of matrices, where they have another one."""
    rule: UpdateRule = REGISTRIES["optimizer"].get(o.optimizer).from_config(o)
    if not isinstance(getattr(rule, "state_dtypes", None), Mapping):
        text = f"from_config(options) gives {rule!r}, whose state_dtypes are no dict; give a rule as"
        raise ValueError(f"optimizer={o.optimizer!r}: {text} megalite.optim.update_rule: UpdateRule")
    return (REGISTRIES["optimizer"].get("adam").from_config(o), rule) if o.is_muon else (rule, None)
