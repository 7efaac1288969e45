"""Bytes of the weights and gradients that are whole for a moment, where they come and go (ZeRO-2 and 3).

The same order of events as optim/param_gather.py and optim/grad_reduce.py have it, unit by unit: a unit's weights are
whole while it is used, and those of the next are on their way; its gradient from the first one that lands to the end
of its reduction, for which the next unit's waits.
"""

from collections.abc import Sequence

from megalite.plan.arrangement import Arrangement


class WholeUnits:
    """On one pipeline rank. A unit is known by its name: "embedding", "layers.17", "head"."""

    def __init__(self, made: Arrangement, rank: int):
        p = made.config.parallel
        self.units, self.weight, self.gradient = made.holdings[rank].units, *made.bytes_of_element()[:2]
        self.comes = p.shared_out > 2 and bool(self.units)
        self.by_chunk = made.sharing.by_chunk
        self.ahead = p.overlap_param_gather and not self.by_chunk
        self.rounded = 2 if p.grad_reduce_in_bf16 and made.config.precision.bf16 else 0
        self.overlap = p.overlap_grad_reduce
        self.weights: set[str] = set()
        self.gradients: set[str] = set()
        self.reducing: str | None = None

    @property
    def bytes(self) -> int:
        weights, gradients = (sum(self.units.get(unit, 0) for unit in some) for some in (self.weights, self.gradients))
        copies = self.units.get(self.reducing or "", 0) * self.rounded
        return weights * self.weight + gradients * self.gradient + copies

    def use(self, units: Sequence[str], ahead: str | None = None) -> None:
        if self.comes:
            self.weights.update(units, (ahead,) if ahead and self.ahead else ())

    def leave(self, units: Sequence[str]) -> None:
        """Used; in a run of the whole chunk they stay."""
        if not self.by_chunk:
            self.weights.difference_update(units)

    def land(self, unit: str) -> None:
        """The first gradient of a run."""
        if unit == self.reducing:
            self._settle()
        self.gradients.add(unit)

    def reduce(self, unit: str) -> None:
        self._settle()
        self.gradients.add(unit)
        self.reducing = unit
        if not self.overlap:
            self._settle()

    def _settle(self) -> None:
        if self.reducing is not None:
            self.gradients.discard(self.reducing)
            self.reducing = None
