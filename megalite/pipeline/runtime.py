"""The executor: a loop over this rank's list of actions (pipeline/schedule.py), and nothing else decides.

    F  s,m   y = stage(x)             x received or embedded; only the graph's edge of y is kept, so y's memory
                                      goes as soon as it is sent
    B  s,m   backward from y's edge   with the received gradient, which goes as soon as it is used, or the loss weight
                                      on the last stage
    W  s,m   the weights' gradients   where backward is split: B left them in its forward's store (nn/wgrad_store.py)
    SEND/RECV post an isend or irecv and go on; the wait is where the value is used
    G, X, R   gather and free a stage's weights, reduce its gradients: what the store does (optim/buffer.py)

Activations travel on mesh.pp, gradients on mesh.pp_back: two groups, so that neither queues behind the other (with two
pipeline ranks and several chunks, activations of both directions share theirs). The backward, or the W, before an R
arms the gradient buckets of its chunk, so that each is reduced as soon as it is full.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.common.fault_injection import inject_fault
from megalite.nn.parameter import MainGrad
from megalite.nn.wgrad_store import WeightGradStore
from megalite.parallel.comm import Pending, start_p2p
from megalite.parallel.mesh import RECEIVE, SEND, Axis, Mesh
from megalite.parallel.streams import synchronize
from megalite.pipeline.schedule import (
    FORWARD_ONLY,
    Action,
    Op,
    ShardingPolicy,
    SplitBackward,
    StagePlacement,
    add_sharding_actions,
    build_schedule,
)

Key = tuple[int, int]  # stage, micro-batch
MAX_SENDS_IN_FLIGHT = (
    2  # messages under way on a CPU, each with its tensor; to wait for one is safe (schedule.py: with_messages)
)
SHARDING_OPS = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)  # which a timeline does not show
P2P_PHASE = "bubble"  # the clock's phase of messages and of waiting for them


class ParamSync(Protocol):
    """What has the weights and gradients of the chunks. `of_step`: of the chunk's runs it is the step's last."""

    reduce_every_pass: bool
    unshard_by_chunk: bool

    def set_last_backward(self, chunk: int, sinks: Iterable[MainGrad] | None = None, last_in_step: bool = True) -> None:
        """Before the last backward of a run, or, where that is split, its last W, of these sinks."""

    def finish_pass(self, chunk: int, last_in_step: bool = True) -> None:
        """Behind it."""

    def unshard(self, chunk: int) -> None:
        """A run of forwards or backwards is near, for which the weights have to be whole."""

    def reshard(self, chunk: int) -> None:
        """It is through."""


class NoParamSync(ParamSync):
    """A store that has nothing to reduce or gather."""

    reduce_every_pass = unshard_by_chunk = False


class TimedAction(NamedTuple):
    """When an action ran, without its wait for a message, in seconds from the start of the step."""

    action: str
    start_s: float
    end_s: float


@dataclass
class InFlight:
    """What is alive between the actions of one step."""

    inputs: dict[Key, Tensor] = field(default_factory=dict)  # x of F, kept until B for its gradient
    output_edges: dict[Key, Any] = field(default_factory=dict)
    wgrad_stores: dict[Key, WeightGradStore] = field(default_factory=dict)  # of B, until W
    outgoing: dict[Key, Tensor] = field(default_factory=dict)  # computed, not yet sent
    incoming: dict[tuple[Op, int, int], Pending] = field(default_factory=dict)
    sends: list[Pending] = field(default_factory=list)


def _backward_from_edge(edge: GradientEdge, received: list[Tensor]) -> None:
    """Backward from `edge` with the one gradient in `received`, which is taken out as its first node begins. Who calls
    backward with a gradient holds it until the end of backward, so it begins with one that takes no memory."""
    at, shape = edge.output_nr, received[0].shape

    def inject_grad(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*grads[:at], received.pop(), *grads[at + 1 :])

    nothing = received[0].new_empty(()).expand(shape)
    edge.node.register_prehook(inject_grad)
    torch.autograd.backward([edge], [nothing])


class Pipeline:
    """The chunks of one pipeline rank.

    split        how backward is split, if it is
    store        what has their weights and gradients
    group_size   micro-batches that run through a chunk before the next one (schedule.group_sizes)
    width        hidden size D of the activations that travel, [S / tp, B, D] in `dtype`
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: Mesh,
        *,
        schedule: str,
        hidden_size: int,
        dtype: torch.dtype,
        group_size: int | None = None,
        split_backward: SplitBackward | None = None,
        param_sync: ParamSync = NoParamSync(),  # noqa: B008 (has no state)
    ):
        self.group_size, self.split = group_size, split_backward
        self.stages, self.mesh, self.schedule = list(stages), mesh, schedule
        self.width, self.dtype, self.store = hidden_size, dtype, param_sync
        self.sharding_policy = ShardingPolicy(param_sync.reduce_every_pass, param_sync.unshard_by_chunk)
        self.placement = StagePlacement(mesh.pp.size, len(self.stages))
        self.last_stage = self.placement.num_stages - 1
        self.timeline: list[TimedAction] | None = None  # set to [] to record the next step
        self._last_arrival = 0.0  # when the last message had come that was waited for

    def step(self, batches: Sequence[Any], loss_grad: float, more_microbatches: bool = False) -> Tensor:
        """Forward and backward of all micro-batches; the sums of their losses and of what is added to them (z-loss):
        [2], zero but on the last stage.

        The gradient is that of loss_weight * sum of all. `more`: another call of the same training step follows, so
        none of these backwards is a chunk's last.
        """
        actions_by_rank = build_schedule(
            self.schedule, self.mesh.pp.size, len(batches), len(self.stages), self.group_size, self.split
        )
        return self._run_actions(actions_by_rank, batches, loss_grad, more_microbatches)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any]) -> Tensor:
        """Forward only, in evaluation mode; the sum of the losses alone (zero but on the last stage)."""
        for stage in self.stages:
            stage.eval()
        try:
            actions_by_rank = build_schedule(
                FORWARD_ONLY, self.mesh.pp.size, len(batches), len(self.stages), self.group_size
            )
            return self._run_actions(actions_by_rank, batches, None)[0]
        finally:
            for stage in self.stages:
                stage.train()

    def _run_actions(
        self,
        actions_by_rank: tuple[tuple[Action, ...], ...],
        batches: Sequence[Any],
        loss_grad: float | None,
        more_microbatches: bool = False,
    ) -> Tensor:
        mesh, flight = self.mesh, InFlight()
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        actions = add_sharding_actions(actions_by_rank[mesh.pp.rank], self.sharding_policy)
        reduces = {(a.stage, a.microbatch) for a in actions if a.op is Op.REDUCE_GRAD}
        last_stage = {
            a.stage: a.microbatch for a in actions if a.op is Op.REDUCE_GRAD and not more_microbatches
        }  # of the step
        begin = time.perf_counter()
        for action in actions:
            start = 0.0 if (is_sharding_op := action.op in SHARDING_OPS) else self._elapsed(begin)
            key, chunk = (action.stage, action.microbatch), self.placement.chunk(action.stage)
            last_in_step = last_stage.get(action.stage) == action.microbatch
            if action.op is Op.F:
                with mesh.clock.span("forward", action):
                    losses = self._forward(flight, key, chunk, batches[action.microbatch], loss_grad)
                total[: len(losses)] += losses
            elif action.op is Op.B:
                assert loss_grad is not None
                if not self.split and key in reduces:
                    self.store.set_last_backward(chunk, None, last_in_step)
                with mesh.clock.span("backward", action):
                    self._backward(flight, key, loss_grad)
            elif action.op is Op.W:
                wgrad_stores = flight.wgrad_stores.pop(key)
                if key in reduces:
                    self.store.set_last_backward(chunk, wgrad_stores.main_grads, last_in_step)
                with mesh.clock.span("backward", action):
                    wgrad_stores.compute_all()
            elif action.op is Op.REDUCE_GRAD:
                self.store.finish_pass(chunk, last_in_step)
            elif action.op is Op.UNSHARD:
                self.store.unshard(chunk)
            elif action.op is Op.RESHARD:
                self.store.reshard(chunk)
            elif action.op in (Op.SEND_F, Op.SEND_B):
                self._send(flight, action, batches[action.microbatch])
            else:
                self._receive(flight, action, batches[action.microbatch])
            if self.timeline is not None and not is_sharding_op:
                self.timeline.append(
                    TimedAction(str(action), max(start, self._last_arrival - begin), self._elapsed(begin))
                )
        for message in flight.sends:
            self._wait_for_message(message, "what was sent")
        return total

    def _send(self, flight: InFlight, action: Action, batch: Any) -> None:
        tensor = flight.outgoing.pop((action.stage, action.microbatch)).contiguous()
        inject_fault("pipeline.message", self.mesh.world.rank, batch.step, tensor)
        flight.sends = [message for message in flight.sends if not message.is_completed()]
        flight.sends.append(self._start_p2p(SEND, action, tensor))
        if (
            len(flight.sends) > MAX_SENDS_IN_FLIGHT and self.mesh.device.type == "cpu"
        ):  # gloo never says that one is done
            self._wait_for_message(flight.sends.pop(0), "what was sent")

    def _receive(self, flight: InFlight, action: Action, batch: Any) -> None:
        shape = (batch.tokens_SB.shape[0] // self.mesh.tp.size, batch.tokens_SB.shape[1], self.width)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.mesh.device)
        flight.incoming[action.op, action.stage, action.microbatch] = self._start_p2p(RECEIVE, action, tensor)

    def _wait_for_message(self, message: Pending, *name: object) -> Tensor:
        """For a message, which comes when its sender is there: most of it is the pipeline's bubble."""
        with self.mesh.clock.span(P2P_PHASE, "wait for", *name):
            tensor = message.wait()
        self._last_arrival = self._elapsed(0.0)
        return tensor

    def _forward(self, flight: InFlight, key: Key, chunk: int, batch: Any, loss_grad: float | Tensor | None) -> Tensor:
        (stage, _), keep = key, loss_grad is not None
        x = None
        if stage > 0:
            x = self._wait_for_message(flight.incoming.pop((Op.RECV_F, *key)), Action(Op.RECV_F, *key))
            if keep:
                flight.inputs[key] = x.requires_grad_()
        # the loss is told its gradient now: it computes its own gradients in forward (nn/loss.py)
        batch_fields: dict[str, Any] = {"loss_grad": loss_grad}
        if keep and self.split:
            batch_fields["wgrad_store"] = flight.wgrad_stores[key] = WeightGradStore()
        y = self.stages[chunk](x, replace(batch, **batch_fields))
        if keep:
            flight.output_edges[key] = y if stage == self.last_stage else get_gradient_edge(y)
        if stage == self.last_stage:
            return y.detach().double().reshape(-1)
        flight.outgoing[key] = y.detach()
        return y.new_empty(0, dtype=torch.float64)

    def _backward(self, flight: InFlight, key: Key, loss_grad: float | Tensor) -> None:
        stage, edge = key[0], flight.output_edges.pop(key)
        if stage == self.last_stage:
            # made on the device: a copy would wait for it
            batch_fields = loss_grad.to(edge.dtype) if isinstance(loss_grad, Tensor) else edge.new_full((), loss_grad)
            torch.autograd.backward(edge, batch_fields.expand_as(edge))
        else:
            received = [self._wait_for_message(flight.incoming.pop((Op.RECV_B, *key)), Action(Op.RECV_B, *key))]
            _backward_from_edge(edge, received)
        if stage > 0:
            x = flight.inputs.pop(key)
            assert x.grad is not None
            flight.outgoing[key] = x.grad

    def _start_p2p(self, op: str, action: Action, tensor: Tensor) -> Pending:
        """Post a message: upstream for inputs received and gradients sent, downstream for the other two."""
        forward = action.op in (Op.SEND_F, Op.RECV_F)
        axis: Axis = self.mesh.pp if forward else self.mesh.pp_grad
        step = 1 if action.op in (Op.SEND_F, Op.RECV_B) else -1
        with self.mesh.clock.span(P2P_PHASE, action):
            return start_p2p(tensor, axis, self.placement.rank(action.stage + step), op, action.microbatch)

    def _elapsed(self, begin: float) -> float:
        if self.timeline is not None:
            synchronize(self.mesh.device)  # only while a timeline is recorded
        return time.perf_counter() - begin
