"""The pipeline executor: a loop over this rank's list of actions (pipeline/schedule.py).

    F  s,m      y = stage(x), where x is received or embedded. Only the graph edge of y is kept, so that y is freed as
                soon as it is sent.
    B  s,m      Backward from the edge of y: with the received gradient, which is freed as soon as it is used, or on the
                last stage with loss_grad.
    W  s,m      With a split backward: the weight gradients that B put into the store of its forward
                (nn/wgrad_store.py).
    SEND, RECV  Post an isend or irecv and continue; the wait is where the value is used.
    G, X, R     Unshard and reshard the weights of a stage, reduce its gradients (ParamSync; optim/zero/sync.py).

Activations are sent over mesh.pp, gradients over mesh.pp_grad: two groups, so that neither queues behind the other
(with two pipeline ranks and several chunks, activations of both directions use the same group). The last B (or W)
before an R calls `set_last_backward` for its chunk, so that each gradient bucket is reduced as soon as it is complete.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.common.fault_injection import inject_fault
from megalite.nn.micro_batch import Batch, ForwardContext
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
# Sends in flight on a CPU, each with its tensor. Waiting for one cannot deadlock (schedule.py: add_send_recv).
MAX_SENDS_IN_FLIGHT = 2
SHARDING_OPS = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)  # not in a timeline
P2P_PHASE = "bubble"  # phase of the PhaseTimer for messages and the waits for them


class ParamSync(Protocol):
    """Synchronization of the weights and gradients of this rank's chunks over data-parallel ranks.

    `last_in_step` is True in the last gradient pass of a chunk in a training step.
    """

    reduce_every_pass: bool
    unshard_by_chunk: bool

    def set_last_backward(
        self, chunk: int, main_grads: Iterable[MainGrad] | None = None, last_in_step: bool = True
    ) -> None:
        """Announce the last backward of a gradient pass.

        With a split backward this is its last W, which completes `main_grads`.
        """

    def finish_pass(self, chunk: int, last_in_step: bool = True) -> None:
        """Finish a gradient pass, after its last backward or W."""

    def unshard(self, chunk: int) -> None:
        """Start to unshard the weights of a chunk, shortly before a pass of forwards or backwards."""

    def reshard(self, chunk: int) -> None:
        """Free the full weights of a chunk after the pass."""


class NoParamSync(ParamSync):
    """A ParamSync with nothing to reduce or unshard."""

    reduce_every_pass = unshard_by_chunk = False


class TimedAction(NamedTuple):
    """The start and end of an action, without its wait for a message, in seconds from the start of the step."""

    action: str
    start_s: float
    end_s: float


@dataclass
class InFlight:
    """The tensors and messages that are alive between the actions of one step."""

    inputs: dict[Key, Tensor] = field(default_factory=dict)  # x of F, until B, which sends its gradient
    output_edges: dict[Key, Any] = field(default_factory=dict)  # graph edge of y; on the last stage the loss itself
    wgrad_stores: dict[Key, WeightGradStore] = field(default_factory=dict)  # from F until W
    outgoing: dict[Key, Tensor] = field(default_factory=dict)  # computed, not yet sent
    incoming: dict[tuple[Op, int, int], Pending] = field(default_factory=dict)
    sends: list[Pending] = field(default_factory=list)


def _backward_from_edge(edge: GradientEdge, received: list[Tensor]) -> None:
    """Run the backward from `edge` with the one gradient in `received`, which is popped when the first node starts.

    A gradient that is passed to torch.autograd.backward is alive until the backward ends. So the backward gets a
    placeholder that takes no memory, and a hook replaces it by the gradient.
    """
    index = edge.output_nr

    def inject_grad(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*grads[:index], received.pop(), *grads[index + 1 :])

    placeholder = received[0].new_empty(()).expand(received[0].shape)
    edge.node.register_prehook(inject_grad)
    torch.autograd.backward([edge], [placeholder])


class Pipeline:
    """The chunks of one pipeline rank, and the loop that runs a schedule on them."""

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
        """Create the pipeline.

        Args:
            stages: this rank's chunks.
            mesh: the mesh.
            schedule: a value of pipeline_schedule.
            hidden_size: hidden size D of the activations between stages, [S / tp, B, D].
            dtype: dtype of these activations.
            group_size: micro-batches that run through a chunk before the next chunk starts (`microbatch_groups`).
            split_backward: how to split the backward; None: not at all.
            param_sync: synchronizes the weights and gradients.
        """
        self.stages = list(stages)
        self.mesh = mesh
        self.schedule = schedule
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.group_size = group_size
        self.split_backward = split_backward
        self.param_sync = param_sync
        self.sharding_policy = ShardingPolicy(param_sync.reduce_every_pass, param_sync.unshard_by_chunk)
        self.placement = StagePlacement(mesh.pp.size, len(self.stages))
        self.last_stage = self.placement.num_stages - 1
        self.timeline: list[TimedAction] | None = None  # set to [] to record the next step
        self._last_arrival = 0.0  # time at which the wait for the last message ended

    def step(self, batches: Sequence[Batch], ctx: ForwardContext, more_microbatches: bool = False) -> None:
        """Run forward and backward of all micro-batches, which add their losses to ctx.loss_sums.

        Args:
            batches: the micro-batches.
            ctx: the context of all forwards: the gradients are those of ctx.loss_grad * (sum of all losses).
            more_microbatches: True if another call of the same training step follows, so that none of these backwards
                is the last of its chunk.
        """
        actions_by_rank = build_schedule(
            self.schedule, self.mesh.pp.size, len(batches), len(self.stages), self.group_size, self.split_backward
        )
        self._run_actions(actions_by_rank, batches, ctx, more_microbatches)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], ctx: ForwardContext) -> None:
        """Run forwards only, in evaluation mode, which add their losses to ctx.loss_sums."""
        assert ctx.loss_grad is None
        for stage in self.stages:
            stage.eval()
        try:
            actions_by_rank = build_schedule(
                FORWARD_ONLY, self.mesh.pp.size, len(batches), len(self.stages), self.group_size
            )
            self._run_actions(actions_by_rank, batches, ctx)
        finally:
            for stage in self.stages:
                stage.train()

    def _run_actions(
        self,
        actions_by_rank: tuple[tuple[Action, ...], ...],
        batches: Sequence[Batch],
        ctx: ForwardContext,
        more_microbatches: bool = False,
    ) -> None:
        """Run this rank's actions: forwards only if `ctx.loss_grad` is None."""
        mesh = self.mesh
        flight = InFlight()
        actions = add_sharding_actions(actions_by_rank[mesh.pp.rank], self.sharding_policy)
        reduce_actions = [action for action in actions if action.op is Op.REDUCE_GRAD]
        ends_pass = {(action.stage, action.microbatch) for action in reduce_actions}
        last_microbatch: dict[int, int] = {}  # stage -> micro-batch of the step's last backward
        if not more_microbatches:
            last_microbatch = {action.stage: action.microbatch for action in reduce_actions}
        step_start = time.perf_counter()
        for action in actions:
            is_sharding_op = action.op in SHARDING_OPS
            action_start = 0.0 if is_sharding_op else self._elapsed(step_start)
            key = (action.stage, action.microbatch)
            chunk = self.placement.chunk(action.stage)
            last_in_step = last_microbatch.get(action.stage) == action.microbatch
            if action.op is Op.F:
                with mesh.phase_timer.span("forward", action):
                    self._forward(flight, key, chunk, batches[action.microbatch], ctx)
            elif action.op is Op.B:
                if not self.split_backward and key in ends_pass:
                    self.param_sync.set_last_backward(chunk, None, last_in_step)
                with mesh.phase_timer.span("backward", action):
                    self._backward(flight, key, ctx)
            elif action.op is Op.W:
                wgrad_store = flight.wgrad_stores.pop(key)
                if key in ends_pass:
                    self.param_sync.set_last_backward(chunk, wgrad_store.main_grads, last_in_step)
                with mesh.phase_timer.span("backward", action):
                    wgrad_store.compute_all()
            elif action.op is Op.REDUCE_GRAD:
                self.param_sync.finish_pass(chunk, last_in_step)
            elif action.op is Op.UNSHARD:
                self.param_sync.unshard(chunk)
            elif action.op is Op.RESHARD:
                self.param_sync.reshard(chunk)
            elif action.op in (Op.SEND_F, Op.SEND_B):
                self._send(flight, action, ctx.step)
            else:
                self._receive(flight, action, batches[action.microbatch])
            if self.timeline is not None and not is_sharding_op:
                start_s = max(action_start, self._last_arrival - step_start)
                self.timeline.append(TimedAction(str(action), start_s, self._elapsed(step_start)))
        for message in flight.sends:
            self._wait_for_message(message, "what was sent")

    def _send(self, flight: InFlight, action: Action, step: int) -> None:
        tensor = flight.outgoing.pop((action.stage, action.microbatch)).contiguous()
        inject_fault("pipeline.message", self.mesh.world.rank, step, tensor)
        flight.sends = [message for message in flight.sends if not message.is_completed()]
        flight.sends.append(self._start_p2p(SEND, action, tensor))
        # gloo never reports that a send is complete, so the filter above removes none
        if len(flight.sends) > MAX_SENDS_IN_FLIGHT and self.mesh.device.type == "cpu":
            self._wait_for_message(flight.sends.pop(0), "what was sent")

    def _receive(self, flight: InFlight, action: Action, batch: Batch) -> None:
        seq_length, batch_size = batch.tokens_SB.shape[:2]
        shape = (seq_length // self.mesh.tp.size, batch_size, self.hidden_size)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.mesh.device)
        flight.incoming[action.op, action.stage, action.microbatch] = self._start_p2p(RECEIVE, action, tensor)

    def _wait_for_message(self, message: Pending, *name: object) -> Tensor:
        """Wait for a message and return its tensor. Most of the wait for the sender is the pipeline's bubble."""
        with self.mesh.phase_timer.span(P2P_PHASE, "wait for", *name):
            tensor = message.wait()
        self._last_arrival = self._elapsed(0.0)
        return tensor

    def _forward(self, flight: InFlight, key: Key, chunk: int, batch: Batch, ctx: ForwardContext) -> None:
        """Run one forward, and keep what its backward and the next stage need."""
        stage = key[0]
        needs_backward = ctx.loss_grad is not None
        x = None
        if stage > 0:
            x = self._wait_for_message(flight.incoming.pop((Op.RECV_F, *key)), Action(Op.RECV_F, *key))
            if needs_backward:
                flight.inputs[key] = x.requires_grad_()
        if needs_backward and self.split_backward:
            wgrad_store = flight.wgrad_stores[key] = WeightGradStore()
            ctx = replace(ctx, wgrad_store=wgrad_store)
        y = self.stages[chunk](x, batch, ctx)
        if needs_backward:
            flight.output_edges[key] = y if stage == self.last_stage else get_gradient_edge(y)
        if stage < self.last_stage:
            flight.outgoing[key] = y.detach()

    def _backward(self, flight: InFlight, key: Key, ctx: ForwardContext) -> None:
        stage = key[0]
        loss_grad = ctx.loss_grad
        assert loss_grad is not None
        edge = flight.output_edges.pop(key)
        if stage == self.last_stage:
            loss = edge
            if isinstance(loss_grad, Tensor):
                grad = loss_grad.to(loss.dtype)
            else:
                grad = loss.new_full((), loss_grad)  # created on the device: a copy from the host would wait for it
            torch.autograd.backward(loss, grad)
        else:
            received = [self._wait_for_message(flight.incoming.pop((Op.RECV_B, *key)), Action(Op.RECV_B, *key))]
            _backward_from_edge(edge, received)
        if stage > 0:
            x = flight.inputs.pop(key)
            assert x.grad is not None
            flight.outgoing[key] = x.grad

    def _start_p2p(self, op: str, action: Action, tensor: Tensor) -> Pending:
        """Post a message: with the previous stage for RECV_F and SEND_B, with the next stage for SEND_F and RECV_B."""
        forward = action.op in (Op.SEND_F, Op.RECV_F)
        axis: Axis = self.mesh.pp if forward else self.mesh.pp_grad
        step = 1 if action.op in (Op.SEND_F, Op.RECV_B) else -1
        with self.mesh.phase_timer.span(P2P_PHASE, action):
            return start_p2p(tensor, axis, self.placement.rank(action.stage + step), op, action.microbatch)

    def _elapsed(self, start: float) -> float:
        """Return the seconds since `start` (time.perf_counter). Synchronizes the device if a timeline is recorded."""
        if self.timeline is not None:
            synchronize(self.mesh.device)
        return time.perf_counter() - start
