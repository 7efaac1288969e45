"""What an optimizer is here: a rule for how one flat tensor of main weights moves (optim/adamw.py, optim/sgd.py), or
one in two halves, with an exchange of ranks between them, for whole tensors (optim/muon.py, optim/lamb.py)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from megalite.config.registry import KINDS
from megalite.config.run_options import OptimConfig

if TYPE_CHECKING:
    from megalite.optim.buffer import ParamBuffer
    from megalite.optim.layout import Bucket


class Update(NamedTuple):
    """What a rule gets for what this rank owns of a bucket: flat tensors of one length, and this step's numbers.

    param  the main weights, and `state` the tensors kept beside them: both updated in place
    grad   a sum; its gradient is scale * grad. Used up
    step   counts from 1
    copy   gets the new weights in its own dtype, for the gather; None: the main weights are the weights
    """

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    lr: float
    weight_decay: float
    step: int
    scale: float
    copy: Tensor | None = None


class Rule(Protocol):
    """`of`: with a run's options. `states` names the tensors that it keeps, with their dtype (None: that of the main
    weights)."""

    @classmethod
    def of(cls, o: OptimConfig) -> "Rule": ...

    @property
    def states(self) -> Mapping[str, torch.dtype | None]: ...

    def update_(self, u: Update) -> None: ...


Finish = Callable[[Sequence[Update]], None]


@runtime_checkable
class WholeRule(Rule, Protocol):
    """A rule for whole tensors: `update_` makes of a bucket's gradient what the tensors are to be judged by, and moves
    no weight. Then, once a step, what `second_half` returned gets the updates of all `buckets` of `buffer` that have
    the rule, in their order, and moves the weights; collective over the stage."""

    def second_half(self, buffer: "ParamBuffer", buckets: "Sequence[Bucket]") -> Finish: ...


def rules_of(o: OptimConfig) -> tuple[Rule, Rule | None]:
    """The rule that the options name, and of matrices, where they have another one."""
    named: Rule = KINDS["optimizer"].find(o.optimizer).of(o)
    if not isinstance(getattr(named, "states", None), Mapping):
        text = "of(options) gives {!r}, whose states are no dict; give a rule as megalite.optim.rule: Rule"
        raise ValueError(f"optimizer={o.optimizer!r}: " + text.format(named))
    return (KINDS["optimizer"].find("adam").of(o), named) if o.is_muon else (named, None)
