"""The peak memory of a rank of each pipeline position, in bytes: counted from its shape and schedule, without a run.

    weights, gradients, optimizer   plan/holding.py: Holding, exactly the bytes that the run allocates
    activations                     Arrangement.activations: the bytes that the schedule has in flight
    buffers                         all other bytes at the worst moment of the schedule: messages that have come or are
                                    on their way, and temporary tensors of one layer, or of the head

The peak is found by walking through a rank's actions, and in each through the bills of the stage's layers
(plan/bill.py), as the Triton kernels allocate. Not counted: tokens, memory of CUDA, NCCL and cuBLAS (gigabytes on a
card), and memory that the allocator cannot reuse. In the layouts of tests/planning/test_rank_memory.py activations
with buffers are within ACTIVATIONS_ERROR of the allocated bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.pipeline.runtime import SENT
from megalite.pipeline.schedule import Action, Op, with_sharing
from megalite.plan.arrangement import Arrangement
from megalite.plan.bill import Bill
from megalite.plan.holding import Holding

ACTIVATIONS_ERROR = 0.02  # of activations with buffers, as a share of the allocated bytes
LARGEST_ERROR = 0.03  # in any layout that was ever counted
EMBEDDING, HEAD = ["embedding"], ["head"]  # units of the ends of a model
SHARED_PARTS = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")  # by ZeRO stage


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each rank of one pipeline position."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def memory(made: Arrangement) -> list[RankMemory]:
    """The memory of every pipeline rank."""
    found = []
    rows = made.rows(made.split, made.told)[1]
    for rank, (held, kept, row) in enumerate(zip(made.holdings, made.activations, rows, strict=True)):
        buffers = max(0, round(peak_of(row, made, rank)) - kept)
        found.append(RankMemory(held.weights, held.gradients, held.optimizer, kept, buffers))
    return found


def by_stage(made: Arrangement) -> list[Holding]:
    """What the pipeline rank that holds the most would hold at ZeRO stages 0 to 3, of the layers of its own."""
    chunks = made.build_stages(made.mesh_of(made.worst), made.dtype, meta=True)
    found = list[Holding]()
    for stage in range(len(SHARED_PARTS)):
        config = replace(made.config, parallel=replace(made.config.parallel, zero_stage=stage))
        mesh = replace(made, config=config).mesh_of(made.worst)
        found.append(Holding.of(chunks, mesh, made.bytes_of_element, config))
    return found


def on_host(made: Arrangement) -> list[int]:
    """Bytes of host memory on each rank of every pipeline position, of what is offloaded; activations at their most."""
    if not made.config.train.cpu_offloading_num_layers:
        return [held.host for held in made.holdings]
    sent = [(sum(bill.sent for bill, _ in made.layers.bills(layers)), 0) for layers in made.stages]
    most = made.most_alive(sent, made.split, made.told)
    return [held.host + round(activations) for held, activations in zip(made.holdings, most, strict=True)]


def peak_of(row: tuple[Action, ...], made: Arrangement, rank: int) -> int:
    """The most bytes of activations, messages, moments and whole units that a rank has at once, through its actions."""
    row = with_sharing(row, made.sharing)
    reduces = {(a.stage, a.microbatch) for a in row if a.op is Op.REDUCE and made.sharing.every_run}
    walk = _Walk(made, rank)
    for action in row:
        walk.take(action, (action.stage, action.microbatch) in reduces)
    matrices = made.holdings[rank].matrices
    return max(walk.most, matrices.at_once if matrices else 0)


class WholeUnits:
    """Bytes of weights and gradients that are whole for a moment on a pipeline rank, where they come and go (ZeRO-2 and
    3), in the order of events that optim/param_gather.py and optim/grad_reduce.py have. A unit's weights are whole
    while it is used, and those of the next are on their way; its gradient from the first one that lands to the end of
    its reduction, for which the next waits: of experts, which are a bucket of their own, in the unit's backward. A unit
    is known by its name: "embedding", "layers.17", "head"."""

    def __init__(self, made: Arrangement, rank: int):
        p = made.config.parallel
        self.units, self.weight, self.gradient = made.holdings[rank].units, *made.bytes_of_element()[:2]
        self.comes = p.shared_out > 2 and bool(self.units)
        self.by_chunk = made.sharing.by_chunk
        self.ahead = p.overlap_param_gather and not self.by_chunk
        self.rounded = 2 if p.grad_reduce_in_bf16 and made.config.precision.bf16 else 0
        self.overlap = p.overlap_grad_reduce
        self.weights: set[str] = set()
        self.gradients: set[tuple[str, str]] = set()  # unit, home
        self.reducing: tuple[str, str] | None = None

    @property
    def bytes(self) -> int:
        weights = sum(sum(self.units.get(unit, {}).values()) for unit in self.weights)
        gradients = sum(self.units[unit][home] for unit, home in self.gradients)
        copies = self.units[self.reducing[0]][self.reducing[1]] * self.rounded if self.reducing else 0
        return weights * self.weight + gradients * self.gradient + copies

    def use(self, units: Sequence[str], ahead: str | None = None) -> None:
        if self.comes:
            self.weights.update(units, (ahead,) if ahead and self.ahead else ())

    def leave(self, units: Sequence[str]) -> None:
        """Used; in a run of the whole chunk they stay."""
        if not self.by_chunk:
            self.weights.difference_update(units)

    def land(self, unit: str, home: str) -> None:
        """The first gradient of a run."""
        if (unit, home) == self.reducing:
            self._settle()
        if home in self.units.get(unit, {}):
            self.gradients.add((unit, home))

    def reduce(self, unit: str) -> None:
        for home in self.units.get(unit, {}):
            self._settle()
            self.gradients.add((unit, home))
            self.reducing = unit, home
        if not self.overlap:
            self._settle()

    def _settle(self) -> None:
        if self.reducing is not None:
            self.gradients.discard(self.reducing)
            self.reducing = None


class _Walk:
    """kept: what forwards have left behind; messages: on this rank, whether they have come or are on their way, of
    which `sent` are on their way; each of `edge` bytes, as x_sBD. most: bytes at once so far."""

    def __init__(self, made: Arrangement, rank: int):
        self.made, self.last, self.whole = made, len(made.stages) - 1, WholeUnits(made, rank)
        self.edge = made.edge
        self.parts: dict[int, list[tuple[Bill, list[str]]]] = {}  # of each stage: bills, and the units that each is of
        self.kept = self.most = 0
        self.messages = self.sent = 0

    def take(self, action: Action, last_of_run: bool) -> None:
        stage = action.stage
        if stage not in self.parts:
            costs = self.made.layers
            layers = [(bill, [f"layers.{n}" for n in some]) for bill, some in costs.bills(self.made.stages[stage])]
            first = [(costs.embedding, EMBEDDING)] if stage == 0 else []
            self.parts[stage] = [*first, *layers, *([(costs.head, HEAD)] if stage == self.last else [])]
        if action.op is Op.F:
            self._forward(stage)
        elif action.op is Op.B:
            self._backward(stage, last_of_run and self.made.split is None)
        elif action.op is Op.W:
            self._weights_gradients(stage, last_of_run)
        elif action.op is Op.GATHER:
            self.whole.weights.update(self._blocks(stage))
        elif action.op is Op.FREE:
            self.whole.weights.difference_update([*self._blocks(stage), *EMBEDDING, *HEAD])
        elif action.op in (Op.RECV_F, Op.RECV_B):
            self.messages += 1
        elif action.op in (Op.SEND_F, Op.SEND_B):
            self.messages, self.sent = self.messages - (self.sent == SENT), min(SENT, self.sent + 1)
        self._reach(0)

    def _blocks(self, stage: int) -> list[str]:
        return [unit for _, units in self.parts[stage] for unit in units if units not in (EMBEDDING, HEAD)]

    def _reach(self, moment: int) -> None:
        self.most = max(self.most, self.kept + self.messages * self.edge + moment + self.whole.bytes)

    def _through(self, bill: Bill, phase: str, unit: str, more: int = 0) -> None:
        for home, moment in bill.parts[phase].items():
            self.whole.land(unit, home)
            self._reach(moment + more)

    def _forward(self, stage: int) -> None:
        self.messages -= stage != 0  # x had come, and is the first layer's
        parts, leaves = self.parts[stage], 0  # what is on its way to the host, until the next block has ended
        for (bill, units), (_, behind) in zip(parts, [*parts[1:], (None, [None])], strict=True):
            self.whole.use(units[-2:], behind[0])  # of several at most two at once
            if units is HEAD:
                self.whole.land("head", "dense")
            self._reach(bill.moment["F"] + (self.edge if units is not EMBEDDING else 0))
            self.whole.leave(units)
            self.kept += (bill.saved if units is not EMBEDDING else 0) - leaves
            leaves = bill.away
            if behind is HEAD or behind[0] is None:
                self.kept, leaves = self.kept - leaves, 0
        self.messages += stage != self.last  # y is to be sent

    def _backward(self, stage: int, reduces: bool) -> None:
        self.messages -= stage != self.last  # dy had come, and is the last layer's
        parts, come = self.parts[stage], False  # come: up from the host, with what the block behind has there
        ahead = [(0, [""]), *((bill.away, units) for bill, units in parts)]
        for (bill, units), (away, before) in reversed(list(zip(parts, ahead, strict=False))):
            layers = units is not EMBEDDING and units is not HEAD
            if bill.away:
                self.kept, come = self.kept + away + bill.away * (not come), True
            if layers:
                self.whole.use(units, before[-1] if before is not EMBEDDING and len(units) == 1 else None)
            for unit in reversed(units):
                if units is not HEAD:  # whose gradients forward has computed
                    self._through(bill, "B", unit, self.edge)
                if reduces:
                    self.whole.reduce(unit)
            if layers:
                self.whole.leave(units)
            self.kept += bill.waiting - bill.saved if units is not EMBEDDING else 0
        self.messages += stage != 0  # dx is to be sent

    def _weights_gradients(self, stage: int, reduces: bool) -> None:
        for end in ["head"] * (stage == self.last) + ["embedding"] * (stage == 0) if reduces else []:
            self.whole.reduce(end)
        for bill, units in reversed([part for part in self.parts[stage] if part[1] not in (EMBEDDING, HEAD)]):
            for unit in reversed(units):
                self._through(bill, "W", unit)
                if reduces:
                    self.whole.reduce(unit)
            self.kept -= bill.waiting
