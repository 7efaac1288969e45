"""The peak memory of a rank of each pipeline position, in bytes, counted from its shapes and schedule without a run.

    weights, gradients, optimizer   model_state.py: ModelStateBytes, exactly the bytes that the run allocates
    activations                     StageBalance.activation_bytes: the bytes that the schedule has in flight
    transient                       all other bytes at the peak of the schedule: messages, and temporary tensors of one
                                    layer, or of the head

The peak is found by simulating a rank's actions, and in each action the costs of the stage's layers, as the Triton
kernels allocate (planning/layer_cost.py). These are not counted: tokens, memory of CUDA, NCCL and cuBLAS (gigabytes on
a GPU), and memory that the allocator cannot reuse. In the layouts of tests/planning/test_rank_memory.py, activations
and transient memory together are within ACTIVATIONS_ERROR of the allocated bytes.
"""

from dataclasses import dataclass, replace

from megalite.pipeline.runtime import MAX_SENDS_IN_FLIGHT
from megalite.pipeline.schedule import Action, Op, add_sharding_actions
from megalite.planning.layer_cost import LayerCost
from megalite.planning.model_state import ModelStateBytes
from megalite.planning.run_plan import RunPlan
from megalite.planning.unsharded_units import UnshardedState, UnshardedUnits

# error of activations and transient memory, as a fraction of the allocated bytes: in the tests, and the largest ever
ACTIVATIONS_ERROR = 0.02
LARGEST_ERROR = 0.03
USABLE_MEMORY = 0.9  # fraction of a device's memory; CUDA's context, NCCL's buffers and fragmentation take the rest
SHARDED_BY_STAGE = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")  # by ZeRO stage


@dataclass(frozen=True)
class RankMemory:
    """The bytes on each rank of one pipeline position."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    transient: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


def rank_memory(plan: RunPlan) -> list[RankMemory]:
    """Return the memory of every pipeline rank."""
    _, actions_by_rank = plan.balance.schedule.actions()
    memories = []
    for rank, (state, activations) in enumerate(
        zip(plan.model_states.by_rank, plan.balance.activation_bytes, strict=True)
    ):
        transient = max(0, round(peak_bytes(actions_by_rank[rank], plan, rank)) - activations)
        memories.append(RankMemory(state.weights, state.gradients, state.optimizer, activations, transient))
    return memories


def state_by_zero_stage(plan: RunPlan) -> list[ModelStateBytes]:
    """Return the model state of the fullest pipeline rank at ZeRO stages 0 to 3, with the layers of the plan."""
    rank = plan.model_states.fullest_rank
    chunks = plan.balance.build_stages(plan.shape.mesh_at(rank), plan.shape.dtype, meta=True)
    states = []
    for stage in range(len(SHARDED_BY_STAGE)):
        config = replace(plan.config, parallel=replace(plan.config.parallel, zero_stage=stage))
        mesh = replace(plan.shape, config=config).mesh_at(rank)
        states.append(ModelStateBytes.from_modules(chunks, mesh, plan.shape.bytes_per_element, config))
    return states


def host_bytes(plan: RunPlan) -> list[int]:
    """Return the peak bytes of host memory for offload, on each rank of every pipeline position."""
    state_bytes = [state.host_bytes for state in plan.model_states.by_rank]
    if not plan.config.train.cpu_offloading_num_layers:
        return state_bytes
    offloaded_by_stage = [
        (sum(cost.host_bytes for cost, _ in plan.balance.stage_costs.layer_costs(layers)), 0)
        for layers in plan.balance.layer_ranges
    ]
    activation_bytes = plan.balance.schedule.peak_memory(offloaded_by_stage)
    return [state + round(activations) for state, activations in zip(state_bytes, activation_bytes, strict=True)]


def peak_bytes(actions: tuple[Action, ...], plan: RunPlan, rank: int) -> int:
    """Return the peak bytes of activations, messages, temporary tensors and unsharded units during a rank's actions."""
    reduced = set()  # (stage, micro-batch) after which gradients are reduced
    if plan.shape.sharding_policy.reduce_every_pass:  # as it always is if weights are unsharded by chunk
        actions = add_sharding_actions(actions, plan.shape.sharding_policy)
        reduced = {(action.stage, action.microbatch) for action in actions if action.op is Op.REDUCE_GRAD}
    simulator = _RankSimulator(plan, rank)
    for action in actions:
        simulator.apply(action, reduces=(action.stage, action.microbatch) in reduced)
    muon = plan.model_states.by_rank[rank].muon
    return max(simulator.peak, muon.peak_bytes if muon is not None else 0)


@dataclass(frozen=True)
class _Effect:
    """The effect of an action on the memory of its rank, which depends on the units that are unsharded before it.

    Attributes:
        peak: Bytes at the peak during the action, beyond those that are saved and of messages before it.
        saved_bytes: Bytes that it saves; negative if it frees some.
        num_messages: Messages that it allocates; negative if it frees some.
        unsharded: The units that are unsharded after it.
        unsharded_bytes: Their bytes.
    """

    peak: int
    saved_bytes: int
    num_messages: int
    unsharded: UnshardedState
    unsharded_bytes: int


@dataclass(frozen=True)
class _Part:
    """A part of a stage.

    Attributes:
        kind: "embedding"; "layers", one or several that are recomputed together; "mtp_embedding" for the inputs of all
            depths of multi-token prediction; "mtp_layer", a depth; or "head".
        cost: Its cost.
        units: The units with its weights. Those of the head are the embedding's if both share them on one stage.
    """

    kind: str
    cost: LayerCost
    units: tuple[str, ...]

    @property
    def is_embedding(self) -> bool:
        return self.kind in ("embedding", "mtp_embedding")

    @property
    def is_head(self) -> bool:
        return self.kind == "head"

    @property
    def is_layers(self) -> bool:
        """True if backward reads its weights."""
        return self.kind in ("layers", "mtp_layer")

    @property
    def is_depth(self) -> bool:
        """True for a depth of multi-token prediction, whose layers are unsharded together."""
        return self.kind == "mtp_layer"


class _RankSimulator:
    """The memory of a rank in addition to its model state, while its actions run.

    Attributes:
        peak: The peak bytes so far.
        saved_bytes: Bytes that forwards have saved for backward, and split backwards for their weight gradients.
        num_messages: The number of messages in memory, which have the size of x_sBD each.
        num_sends: The number of messages among these that are being sent.
        unsharded: The units that are unsharded.
        unsharded_bytes: Their bytes.
    """

    def __init__(self, plan: RunPlan, rank: int):
        self.p2p_bytes = plan.shape.p2p_bytes
        self.action_simulator = _ActionSimulator(plan, rank)
        self.effects: dict[tuple[Op, int, bool, UnshardedState], _Effect] = {}  # by what they depend on
        self.peak = 0
        self.saved_bytes = 0
        self.num_messages = 0
        self.num_sends = 0
        self.unsharded: UnshardedState = (frozenset(), frozenset(), None)
        self.unsharded_bytes = 0

    def apply(self, action: Action, reduces: bool) -> None:
        """Run an action. `reduces`: the gradients that it completes are reduced."""
        op, stage, _ = action
        if op in (Op.RECV_F, Op.RECV_B):
            self.num_messages += 1
        elif op in (Op.SEND_F, Op.SEND_B):
            if self.num_sends == MAX_SENDS_IN_FLIGHT:
                self.num_messages -= 1  # waits for the oldest one
            else:
                self.num_sends += 1
        else:
            # the actions of a step are many, but have few effects
            key = op, stage, reduces, self.unsharded
            if key not in self.effects:
                self.effects[key] = self.action_simulator.run(*key)
            effect = self.effects[key]
            self.peak = max(self.peak, self._saved_and_messages + effect.peak)
            self.saved_bytes += effect.saved_bytes
            self.num_messages += effect.num_messages
            self.unsharded, self.unsharded_bytes = effect.unsharded, effect.unsharded_bytes
        self.peak = max(self.peak, self._saved_and_messages + self.unsharded_bytes)

    @property
    def _saved_and_messages(self) -> int:
        return self.saved_bytes + self.num_messages * self.p2p_bytes


class _ActionSimulator:
    """The memory of a rank during a single action that is not a message.

    Attributes:
        peak, saved_bytes, num_messages: As in _Effect, so far.
    """

    def __init__(self, plan: RunPlan, rank: int):
        self.plan = plan
        self.last_stage = len(plan.balance.layer_ranges) - 1
        self.num_depths = plan.config.model.num_mtp_depths
        is_tied = not plan.config.model.untie_embeddings_and_output_weights
        has_embedding = self.last_stage == 0 or self.num_depths > 0  # on the last stage
        self.head_unit = "embedding" if is_tied and has_embedding else "head"  # the unit with its weight
        self.head_weight = "embedding.word".removeprefix(f"{self.head_unit}.") if is_tied else "head"
        self.p2p_bytes = plan.shape.p2p_bytes
        self.unsharded = UnshardedUnits(plan, rank)
        self.parts: dict[int, list[_Part]] = {}  # by stage
        self.peak = 0
        self.saved_bytes = 0
        self.num_messages = 0

    def run(self, op: Op, stage: int, reduces: bool, unsharded: UnshardedState) -> _Effect:
        """Return the effect of an action.

        Args:
            op: Its operation.
            stage: Its stage.
            reduces: The gradients that it completes are reduced.
            unsharded: The units that are unsharded before it.
        """
        self.peak = self.saved_bytes = self.num_messages = 0
        self.unsharded.state = unsharded
        if stage not in self.parts:
            self.parts[stage] = self._parts_of(stage)
        match op:
            case Op.F:
                self._forward(stage)
            case Op.B:
                self._backward(stage, reduces and self.plan.balance.split_backward is None)
            case Op.W:
                self._weight_grads(stage, reduces)
            case Op.UNSHARD:
                self.unsharded.weights.update(self._layer_units(stage))
            case Op.RESHARD:
                self.unsharded.weights.difference_update([*self._layer_units(stage), "embedding", "head"])
        return _Effect(self.peak, self.saved_bytes, self.num_messages, self.unsharded.state, self.unsharded.bytes)

    def _parts_of(self, stage: int) -> list[_Part]:
        costs, model = self.plan.balance.stage_costs, self.plan.config.model
        parts = []
        if stage == 0:
            parts.append(_Part("embedding", costs.embedding, ("embedding",)))
        for cost, layers in costs.layer_costs(self.plan.balance.layer_ranges[stage]):
            units = tuple(model.layers[index].unit_name(model.layer_numbers[index]) for index in layers)
            parts.append(_Part("layers", cost, units))
        if stage == self.last_stage:
            if model.num_mtp_depths:
                parts.append(_Part("mtp_embedding", costs.mtp_embedding, ("embedding",)))
            for depth, cost in enumerate(costs.mtp_layers):
                numbers = model.mtp_layer_numbers[min(depth, len(model.mtp_layer_numbers) - 1)]
                units = [spec.unit_name(number) for number, spec in zip(numbers, model.mtp_layers, strict=True)]
                parts.append(_Part("mtp_layer", cost, tuple(units)))
            parts.append(_Part("head", costs.head, (self.head_unit,)))
        return parts

    def _layer_units(self, stage: int) -> list[str]:
        return [unit for part in self.parts[stage] if part.is_layers for unit in part.units]

    def _update_peak(self, temporary_bytes: int) -> None:
        message_bytes = self.num_messages * self.p2p_bytes
        current_bytes = self.saved_bytes + message_bytes + temporary_bytes + self.unsharded.bytes
        self.peak = max(self.peak, current_bytes)

    def _run_phase(self, part: _Part, phase: str, unit: str, extra_bytes: int = 0) -> None:
        for param, section_peak in part.cost.peaks[phase].items():
            self.unsharded.first_grad(unit, param)
            self._update_peak(section_peak + extra_bytes)

    def _forward(self, stage: int) -> None:
        if stage != 0:
            self.num_messages -= 1  # the received input is the first layer's
        parts = self.parts[stage]
        copied_bytes = 0  # offloaded by the previous block, and freed on the device when this one has ended
        num_depths_left = self.num_depths
        for index, part in enumerate(parts):
            next_part = parts[index + 1] if index + 1 < len(parts) else None
            # layers that are recomputed together are unsharded two at a time
            together = part.units if part.is_depth else part.units[-2:]
            self.unsharded.unshard(together, self._prefetch_units(parts[index:]))
            if part.is_head:
                self.unsharded.first_grad(part.units[0], self.head_weight)
            num_inputs = 0 if part.kind == "embedding" else 1
            if part.kind == "mtp_embedding":
                num_inputs = 2  # hidden states before and after the final norm
            elif part.is_depth:
                num_inputs = 2 + num_depths_left  # and the embeddings of this depth and of later ones
                num_depths_left -= 1
            self._update_peak(part.cost.peak_bytes["F"] + num_inputs * self.p2p_bytes)
            self.unsharded.reshard(part.units)
            if not part.is_embedding:
                self.saved_bytes += part.cost.saved_bytes
            self.saved_bytes -= copied_bytes
            copied_bytes = part.cost.offloaded_bytes
            if next_part is None or next_part.kind != "layers":  # the last block
                self.saved_bytes -= copied_bytes
                copied_bytes = 0
        if stage != self.last_stage:
            self.num_messages += 1  # the output

    def _backward(self, stage: int, reduces: bool) -> None:
        if stage != self.last_stage:
            self.num_messages -= 1  # the received gradient is the last layer's
        parts = self.parts[stage]
        num_depths_left = self.num_depths
        has_prefetched = False  # a later block has started to copy this one's activations back
        for part, previous in reversed(list(zip(parts, [None, *parts[:-1]], strict=True))):
            if part.cost.offloaded_bytes:
                if not has_prefetched:
                    self.saved_bytes += part.cost.offloaded_bytes
                if previous is not None:
                    self.saved_bytes += previous.cost.offloaded_bytes
                has_prefetched = True
            if part.is_layers:
                prefetch: tuple[str, ...] = ()
                if previous is not None and previous.is_layers and (part.is_depth or len(part.units) == 1):
                    prefetch = previous.units if previous.is_depth else previous.units[-1:]
                self.unsharded.unshard(part.units, prefetch)
            num_grads = 1  # of its output
            if part.is_depth:
                # the head's gradients of earlier outputs; embeddings of later depths, which have one storage, and their
                # gradients
                num_grads += num_depths_left + 2 * (self.num_depths - num_depths_left)
                num_depths_left -= 1
            elif part.kind == "mtp_embedding":
                num_grads += self.num_depths
                if self.num_depths > 1:  # a copy of the gradients in one tensor
                    self._update_peak((num_grads + self.num_depths) * self.p2p_bytes)
            for unit in reversed(part.units):
                if not part.is_head:  # forward has computed the gradients of the head
                    self._run_phase(part, "B", unit, num_grads * self.p2p_bytes)
                if reduces:
                    self._reduce(part, unit, stage)
            if part.is_layers:
                self.unsharded.reshard(part.units)
            if not part.is_embedding:
                self.saved_bytes += part.cost.wgrad_bytes - part.cost.saved_bytes
        if stage != 0:
            self.num_messages += 1  # the gradient of the input

    def _weight_grads(self, stage: int, reduces: bool) -> None:
        for part in reversed(self.parts[stage]):  # the embedding's gradient waits for those of all layers
            for unit in reversed(part.units):
                if part.is_layers:
                    self._run_phase(part, "W", unit)
                if reduces:
                    self._reduce(part, unit, stage)
            if part.is_layers:
                self.saved_bytes -= part.cost.wgrad_bytes

    def _prefetch_units(self, parts: list[_Part]) -> tuple[str, ...]:
        """Return the units that are prefetched when the forward of the first of these parts starts its last unit.

        They are those of the next part with other weights, since depths may share weights.
        """
        for part in parts[1:]:
            if part.units != parts[0].units:
                return part.units if part.is_depth else part.units[:1]
        return ()

    def _reduce(self, part: _Part, unit: str, stage: int) -> None:
        """Start to reduce the gradients of a unit of a part that has ended its backward.

        Weights that several parts share are complete after the backward of the first one.
        """
        if next(other for other in self.parts[stage] if unit in other.units) is part:
            self.unsharded.reduce(unit)
