"""The peak memory of a rank of each pipeline position, in bytes: counted from its shape and schedule, without a run.

    weights, gradients, optimizer   model_state.py: ModelStateBytes, exactly the bytes that the run allocates
    activations                     RunPlan.activation_bytes: the bytes that the schedule has in flight
    buffers                         all other bytes at the peak of the schedule: messages in memory, and temporary
                                    tensors of one layer, or of the head

The peak is found by simulating a rank's actions, and in each the costs of the stage's layers (planning/layer_cost.py),
as the Triton kernels allocate. Not counted: tokens, memory of CUDA, NCCL and cuBLAS (gigabytes on a GPU), and memory
that the allocator cannot reuse. In the layouts of tests/planning/test_rank_memory.py activations with buffers are
within ACTIVATIONS_ERROR of the allocated bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.pipeline.runtime import MAX_SENDS_IN_FLIGHT
from megalite.pipeline.schedule import Action, Op, add_sharding_actions
from megalite.planning.layer_cost import LayerCost
from megalite.planning.model_state import ModelStateBytes
from megalite.planning.run_plan import RunPlan

ACTIVATIONS_ERROR = 0.02  # of activations with buffers, as a share of the allocated bytes
LARGEST_ERROR = 0.03  # in any layout that was ever counted
EMBEDDING, HEAD = ["embedding"], ["head"]  # units of the ends of a model
SHARDED_BY_STAGE = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")  # by ZeRO stage


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each rank of one pipeline position."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    transient: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


def rank_memory(plan: RunPlan) -> list[RankMemory]:
    """The memory of every pipeline rank."""
    ranks = []
    rows = plan.actions(plan.split_backward, plan.reported_groups)[1]
    for rank, (held, saved, row) in enumerate(zip(plan.model_states, plan.activation_bytes, rows, strict=True)):
        transient = max(0, round(peak_bytes(row, plan, rank)) - saved)
        ranks.append(RankMemory(held.weights, held.gradients, held.optimizer, saved, transient))
    return ranks


def state_by_zero_stage(plan: RunPlan) -> list[ModelStateBytes]:
    """What the pipeline rank that holds the most would hold at ZeRO stages 0 to 3, of the layers of its own."""
    chunks = plan.build_stages(plan.mesh_at(plan.fullest_rank), plan.dtype, meta=True)
    ranks = list[ModelStateBytes]()
    for stage in range(len(SHARDED_BY_STAGE)):
        config = replace(plan.config, parallel=replace(plan.config.parallel, zero_stage=stage))
        mesh = replace(plan, config=config).mesh_at(plan.fullest_rank)
        ranks.append(ModelStateBytes.from_modules(chunks, mesh, plan.bytes_per_element, config))
    return ranks


def host_bytes(plan: RunPlan) -> list[int]:
    """Bytes of host memory on each rank of every pipeline position, of what is offloaded; activations at their most."""
    if not plan.config.train.cpu_offloading_num_layers:
        return [held.host_bytes for held in plan.model_states]
    sends = [
        (sum(bill.host_bytes for bill, _ in plan.stage_costs.layer_costs(layers)), 0) for layers in plan.layer_ranges
    ]
    peak = plan.peak_alive(sends, plan.split_backward, plan.reported_groups)
    return [held.host_bytes + round(activations) for held, activations in zip(plan.model_states, peak, strict=True)]


def peak_bytes(row: tuple[Action, ...], plan: RunPlan, rank: int) -> int:
    """The most bytes of activations, messages, moments and whole units that a rank has at once, through its actions."""
    row = add_sharding_actions(row, plan.sharding_policy)
    reduces = {
        (a.stage, a.microbatch) for a in row if a.op is Op.REDUCE_GRAD and plan.sharding_policy.reduce_every_pass
    }
    walk = _MemorySimulator(plan, rank)
    for action in row:
        walk.apply(action, (action.stage, action.microbatch) in reduces)
    matrices = plan.model_states[rank].muon
    return max(walk.peak, matrices.peak_bytes if matrices else 0)


class UnshardedUnits:
    """Bytes of weights and gradients that are whole for a moment on a pipeline rank, where they come and go (ZeRO-2 and
    3), in the order of events that optim/param_gather.py and optim/grad_reduce.py have. A unit's weights are whole
    while it is used, and those of the next are on their way; its gradient from the first one that lands to the end of
    its reduction, for which the next waits: of experts, which are a bucket of their own, in the unit's backward. A unit
    is known by its name: "embedding", "layers.17", "head"."""

    def __init__(self, plan: RunPlan, rank: int):
        p = plan.config.parallel
        self.units, self.weight, self.gradient = plan.model_states[rank].unit_numel, *plan.bytes_per_element()[:2]
        self.unshards = p.effective_zero_stage > 2 and bool(self.units)
        self.by_chunk = plan.sharding_policy.unshard_by_chunk
        self.prefetches = p.overlap_param_gather and not self.by_chunk
        self.reduce_copy_bytes = 2 if p.grad_reduce_in_bf16 and plan.config.precision.bf16 else 0
        self.overlap = p.overlap_grad_reduce
        self.weights: set[str] = set()
        self.gradients: set[tuple[str, str]] = set()  # unit, home
        self.reducing: tuple[str, str] | None = None

    @property
    def bytes(self) -> int:
        weights = sum(sum(self.units.get(unit, {}).values()) for unit in self.weights)
        gradients = sum(self.units[unit][home] for unit, home in self.gradients)
        copies = self.units[self.reducing[0]][self.reducing[1]] * self.reduce_copy_bytes if self.reducing else 0
        return weights * self.weight + gradients * self.gradient + copies

    def unshard(self, units: Sequence[str], prefetches: str | None = None) -> None:
        if self.unshards:
            self.weights.update(units, (prefetches,) if prefetches and self.prefetches else ())

    def reshard(self, units: Sequence[str]) -> None:
        """Used; in a run of the whole chunk they stay."""
        if not self.by_chunk:
            self.weights.difference_update(units)

    def first_grad(self, unit: str, home: str) -> None:
        """The first gradient of a run."""
        if (unit, home) == self.reducing:
            self._finish_reduce()
        if home in self.units.get(unit, {}):
            self.gradients.add((unit, home))

    def reduce(self, unit: str) -> None:
        for home in self.units.get(unit, {}):
            self._finish_reduce()
            self.gradients.add((unit, home))
            self.reducing = unit, home
        if not self.overlap:
            self._finish_reduce()

    def _finish_reduce(self) -> None:
        if self.reducing is not None:
            self.gradients.discard(self.reducing)
            self.reducing = None


class _MemorySimulator:
    """kept: what forwards have left behind; messages: on this rank, whether they have come or are on their way, of
    which `sent` are on their way; each of `edge` bytes, as x_sBD. most: bytes at once so far."""

    def __init__(self, plan: RunPlan, rank: int):
        self.made, self.last, self.unsharded = plan, len(plan.layer_ranges) - 1, UnshardedUnits(plan, rank)
        self.p2p_bytes = plan.p2p_bytes
        self.parts: dict[
            int, list[tuple[LayerCost, list[str]]]
        ] = {}  # of each stage: bills, and the units that each is of
        self.saved = self.peak = 0
        self.messages = self.sends = 0

    def apply(self, action: Action, last_of_run: bool) -> None:
        stage = action.stage
        if stage not in self.parts:
            costs = self.made.stage_costs
            layers = [
                (bill, [f"layers.{n}" for n in some]) for bill, some in costs.layer_costs(self.made.layer_ranges[stage])
            ]
            first = [(costs.embedding, EMBEDDING)] if stage == 0 else []
            self.parts[stage] = [*first, *layers, *([(costs.head, HEAD)] if stage == self.last else [])]
        if action.op is Op.F:
            self._forward(stage)
        elif action.op is Op.B:
            self._backward(stage, last_of_run and self.made.split_backward is None)
        elif action.op is Op.W:
            self._weight_grads(stage, last_of_run)
        elif action.op is Op.UNSHARD:
            self.unsharded.weights.update(self._blocks(stage))
        elif action.op is Op.RESHARD:
            self.unsharded.weights.difference_update([*self._blocks(stage), *EMBEDDING, *HEAD])
        elif action.op in (Op.RECV_F, Op.RECV_B):
            self.messages += 1
        elif action.op in (Op.SEND_F, Op.SEND_B):
            self.messages, self.sends = (
                self.messages - (self.sends == MAX_SENDS_IN_FLIGHT),
                min(MAX_SENDS_IN_FLIGHT, self.sends + 1),
            )
        self._update_peak(0)

    def _blocks(self, stage: int) -> list[str]:
        return [unit for _, units in self.parts[stage] for unit in units if units not in (EMBEDDING, HEAD)]

    def _update_peak(self, moment: int) -> None:
        self.peak = max(self.peak, self.saved + self.messages * self.p2p_bytes + moment + self.unsharded.bytes)

    def _run_phase(self, bill: LayerCost, phase: str, unit: str, more: int = 0) -> None:
        for home, moment in bill.peaks[phase].items():
            self.unsharded.first_grad(unit, home)
            self._update_peak(moment + more)

    def _forward(self, stage: int) -> None:
        self.messages -= stage != 0  # x had come, and is the first layer's
        parts, leaves = self.parts[stage], 0  # what is on its way to the host, until the next block has ended
        for (bill, units), (_, next_units) in zip(parts, [*parts[1:], (None, [None])], strict=True):
            self.unsharded.unshard(units[-2:], next_units[0])  # of several at most two at once
            if units is HEAD:
                self.unsharded.first_grad("head", "dense")
            self._update_peak(bill.peak_bytes["F"] + (self.p2p_bytes if units is not EMBEDDING else 0))
            self.unsharded.reshard(units)
            self.saved += (bill.saved_bytes if units is not EMBEDDING else 0) - leaves
            leaves = bill.offloaded_bytes
            if next_units is HEAD or next_units[0] is None:
                self.saved, leaves = self.saved - leaves, 0
        self.messages += stage != self.last  # y is to be sent

    def _backward(self, stage: int, reduces: bool) -> None:
        self.messages -= stage != self.last  # dy had come, and is the last layer's
        parts, prefetched = self.parts[stage], False  # come: up from the host, with what the block behind has there
        prefetches = [(0, [""]), *((bill.offloaded_bytes, units) for bill, units in parts)]
        for (bill, units), (away, before) in reversed(list(zip(parts, prefetches, strict=False))):
            layers = units is not EMBEDDING and units is not HEAD
            if bill.offloaded_bytes:
                self.saved, prefetched = self.saved + away + bill.offloaded_bytes * (not prefetched), True
            if layers:
                self.unsharded.unshard(units, before[-1] if before is not EMBEDDING and len(units) == 1 else None)
            for unit in reversed(units):
                if units is not HEAD:  # whose gradients forward has computed
                    self._run_phase(bill, "B", unit, self.p2p_bytes)
                if reduces:
                    self.unsharded.reduce(unit)
            if layers:
                self.unsharded.reshard(units)
            self.saved += bill.wgrad_bytes - bill.saved_bytes if units is not EMBEDDING else 0
        self.messages += stage != 0  # dx is to be sent

    def _weight_grads(self, stage: int, reduces: bool) -> None:
        for end in ["head"] * (stage == self.last) + ["embedding"] * (stage == 0) if reduces else []:
            self.unsharded.reduce(end)
        for bill, units in reversed([part for part in self.parts[stage] if part[1] not in (EMBEDDING, HEAD)]):
            for unit in reversed(units):
                self._run_phase(bill, "W", unit)
                if reduces:
                    self.unsharded.reduce(unit)
            self.saved -= bill.wgrad_bytes
