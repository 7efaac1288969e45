"""When the collectives over dp of a stage start and end, and what waits for them, while one action runs.

A rank has one channel over dp, on which its collectives follow each other in the order in which they are started
(optim/zero/sync.py). A stage consists of units, whose weights are gathered and whose gradients
are reduced together: the embedding, each layer and the head, or resident buckets of any size.

    F               waits for the weights of each unit before it computes it; starts to gather those of later units
    B, W            in the last action of a gradient pass, starts to reduce the gradients of each unit after it
    UNSHARD         starts to gather the units of a stage ahead of their use. They follow each other without a gap; the
                    runtime starts each of them only when the one two units before it is waited for

All times are maxima of sums, so an action is a linear map in max-plus algebra (Baccelli et al. 1992, Synchronization
and linearity): its results are

    max(start + c_1, channel + c_2, reduced + c_3, unsharded + c_4)

with coefficients that depend only on the durations. `action_map` computes them by a walk through the units.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite.pipeline.schedule import ActionCosts, Op

# The inputs of an action's map: its start, the time at which the channel is free, the end of the last reduction, and
# the end of the gathers that the UNSHARD before it has started.
START, CHANNEL, REDUCED, UNSHARDED = range(4)
# The results of the map are its end, and the new values of CHANNEL and REDUCED.
NEVER = -np.inf  # coefficient of an input that a result does not depend on


class SyncUnit(NamedTuple):
    """A part of a stage whose parameters are gathered and reduced together.

    Attributes:
        costs: times of F, B and W.
        gather_s: time of gathering its weights.
        reduce_s: time of reducing its gradients.
        is_end: the embedding or the head, whose weights the backward does not read.
    """

    costs: ActionCosts
    gather_s: float
    reduce_s: float
    is_end: bool = False


@dataclass(frozen=True)
class StageSync:
    """The collectives over dp of a stage.

    Attributes:
        units: the units of the stage in the order of forward.
        splits_backward: weight gradients have actions of their own.
        gathers_by_unit: each F and B gathers the weights of each unit (ZeRO-3 by unit). Otherwise UNSHARD and the
            action that follows it gather them.
        reshards_weights: weights are freed after a pass, and those of the ends are gathered when they are used
            (ZeRO-3). Otherwise they are gathered once, the ends included.
        reshards_grads: the gradients of a unit are freed after their reduction, so that each reduction waits for the
            one before it (ZeRO-2 and 3).
        overlaps_gather: gathers overlap with the computation.
        overlaps_reduce: reductions overlap with the computation.
        finish_s: time of the collectives that follow the rank's last action.
    """

    units: tuple[SyncUnit, ...]
    splits_backward: bool = False
    gathers_by_unit: bool = False
    reshards_weights: bool = False
    reshards_grads: bool = False
    overlaps_gather: bool = True
    overlaps_reduce: bool = True
    finish_s: float = 0.0

    @property
    def unshard_waits(self) -> bool:
        """UNSHARD completes all gathers."""
        return not (self.overlaps_gather or self.reshards_weights)

    def is_ahead(self, unit: SyncUnit) -> bool:
        """Return True if UNSHARD starts the gather of a unit."""
        is_gathered_when_used = self.gathers_by_unit or (self.reshards_weights and unit.is_end)
        return unit.gather_s > 0 and not is_gathered_when_used

    def channel_s(self, op: Op, is_unsharded: bool, reduces: bool) -> float:
        """Return the time of the collectives of an action. Those that UNSHARD starts are counted in the next one."""
        gathers = is_unsharded or (self.gathers_by_unit and op in (Op.F, Op.B))
        seconds = 0.0
        for unit in self.units:
            if gathers and not (op is Op.B and unit.is_end):
                seconds += unit.gather_s
            if reduces:
                seconds += unit.reduce_s
        return seconds


@functools.lru_cache(maxsize=4096)  # most stages of a run are alike
def action_map(sync: StageSync, op: Op, is_unsharded: bool = False, reduces: bool = False) -> np.ndarray:
    """Return the map [3, 4] of an action: its end, and the new CHANNEL and REDUCED, from its inputs.

    Args:
        sync: the collectives of its stage.
        op: F, B, W or UNSHARD.
        is_unsharded: it is the first F or B of the stage after UNSHARD.
        reduces: it is the last action of a gradient pass.
    """
    walk = _Walk(sync)
    match op:
        case Op.UNSHARD:
            walk.unshard()
        case Op.F:
            walk.forward(is_unsharded)
        case _:
            walk.backward(op, is_unsharded, reduces)
    return np.stack([walk.now, walk.channel, walk.reduced])


class _Walk:
    """The times while an action runs through its units, as coefficients [4] of its inputs.

    Attributes:
        now: the time of the computation.
        channel: the time at which the channel is free.
        reduced: the end of the last reduction.
    """

    def __init__(self, sync: StageSync):
        self.sync = sync
        self.now, self.channel, self.reduced = _input(START), _input(CHANNEL), _input(REDUCED)
        self.ahead = [unit for unit in sync.units if sync.is_ahead(unit)]

    def unshard(self) -> None:
        ends = [self._start_gather(unit) for unit in self.ahead]
        if ends and self.sync.unshard_waits:
            self._wait(ends[-1])

    def forward(self, is_unsharded: bool) -> None:
        if self.sync.gathers_by_unit:
            self._run_by_unit(Op.F, self.sync.units, reduces=False)
            return
        ends = self._ends_of_gathers() if is_unsharded else []
        for unit in self.sync.units:
            if is_unsharded and unit.gather_s:
                self._wait(ends.pop(0) if self.sync.is_ahead(unit) else self._start_gather(unit))
            self._compute(Op.F, unit)

    def backward(self, op: Op, is_unsharded: bool, reduces: bool) -> None:
        units = self.sync.units[::-1]
        if self.sync.gathers_by_unit and op is Op.B:
            self._run_by_unit(op, units, reduces)
            return
        # gathers have the order of forward, so that the first unit of the backward waits for all of them
        if is_unsharded and self.ahead:
            self._wait(self._ends_of_gathers()[-1])
        for unit in units:
            self._compute(op, unit)
            if reduces:
                self._reduce(unit)

    def _ends_of_gathers(self) -> list[np.ndarray]:
        """Return the ends of the gathers that UNSHARD has started, which follow each other."""
        ends: list[np.ndarray] = []
        end = _input(UNSHARDED)
        for unit in reversed(self.ahead):
            ends.insert(0, end)
            end = end - unit.gather_s
        return ends

    def _run_by_unit(self, op: Op, units: Sequence[SyncUnit], reduces: bool) -> None:
        """Run the units. Each one gathers its weights, and with overlap those of the next unit."""
        prefetched: np.ndarray | None = None  # the end of the gather of the current unit, if it has been started
        for unit, next_unit in zip(units, [*units[1:], None], strict=True):
            if op is Op.F or not unit.is_end:
                self._wait(self._start_gather(unit) if prefetched is None else prefetched)
                prefetched = None
                if self.sync.overlaps_gather and next_unit is not None and (op is Op.F or not next_unit.is_end):
                    prefetched = self._start_gather(next_unit)
            self._compute(op, unit)
            if reduces:
                self._reduce(unit)

    def _wait(self, end: np.ndarray) -> None:
        self.now = np.maximum(self.now, end)

    def _compute(self, op: Op, unit: SyncUnit) -> None:
        f, b, w = unit.costs
        if op is Op.F:
            self.now = self.now + f
        elif op is Op.W:
            self.now = self.now + w
        else:
            self.now = self.now + (b if self.sync.splits_backward else b + w)

    def _start_gather(self, unit: SyncUnit) -> np.ndarray:
        """Start to gather the weights of a unit, and return the end."""
        if not unit.gather_s:
            return self.now
        self.channel = np.maximum(self.now, self.channel) + unit.gather_s
        return self.channel

    def _reduce(self, unit: SyncUnit) -> None:
        """Start to reduce the gradients of a unit that are ready now."""
        if not unit.reduce_s:
            return
        if self.sync.reshards_grads:
            self._wait(self.reduced)
        self.channel = np.maximum(self.now, self.channel) + unit.reduce_s
        self.reduced = self.channel
        if not self.sync.overlaps_reduce:
            self._wait(self.reduced)


def _input(index: int) -> np.ndarray:
    """Return the coefficients of the value of an input itself."""
    coefficients = np.full(4, NEVER)
    coefficients[index] = 0.0
    return coefficients
