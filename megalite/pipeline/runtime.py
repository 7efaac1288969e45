"""The executor: a loop over this rank's list of actions (pipeline/schedule.py), and nothing else decides.

    F  s,m   y = stage(x)             x received or embedded; only the graph's edge of y is kept, so y's memory
                                      goes as soon as it is sent
    B  s,m   backward from y's edge   with the received gradient, which goes as soon as it is used, or the loss weight
                                      on the last stage
    W  s,m   the weights' gradients   where backward is split: B has left them in the forward's `later` (nn/later.py)
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

from megalite.config.faults import fault
from megalite.nn.later import Later
from megalite.nn.parameter import GradientSink
from megalite.parallel.comm import Pending, start_message
from megalite.parallel.mesh import RECEIVE, SEND, Axis, Mesh
from megalite.parallel.streams import synchronize
from megalite.pipeline.schedule import EVALUATION, Action, Op, Placement, Sharing, Split, plan, with_sharing

Key = tuple[int, int]  # stage, micro-batch
SENT = 2  # messages under way on a CPU, each with its tensor; to wait for one is safe (schedule.py: with_messages)
SHARED = (Op.GATHER, Op.FREE, Op.REDUCE)  # which a timeline does not show
MESSAGES = "bubble"  # the clock's phase of messages and of waiting for them


class Store(Protocol):
    """What has the weights and gradients of the chunks. `of_step`: of the chunk's runs it is the step's last."""

    every_run: bool
    by_chunk: bool

    def on_last_backward(self, chunk: int, sinks: Iterable[GradientSink] | None = None, of_step: bool = True) -> None:
        """Before the last backward of a run, or, where that is split, its last W, of these sinks."""

    def after_run(self, chunk: int, of_step: bool = True) -> None:
        """Behind it."""

    def come(self, chunk: int) -> None:
        """A run of forwards or backwards is near, for which the weights have to be whole."""

    def go(self, chunk: int) -> None:
        """It is through."""


class Plain(Store):
    """A store that has nothing to reduce or gather."""

    every_run = by_chunk = False


class Timed(NamedTuple):
    """When an action ran, without its wait for a message, in seconds from the start of the step."""

    action: str
    start_s: float
    end_s: float


@dataclass
class Flight:
    """What is alive between the actions of one step."""

    inputs: dict[Key, Tensor] = field(default_factory=dict)  # x of F, kept until B for its gradient
    edges: dict[Key, Any] = field(default_factory=dict)
    later: dict[Key, Later] = field(default_factory=dict)  # of B, until W
    ready: dict[Key, Tensor] = field(default_factory=dict)  # computed, not yet sent
    coming: dict[tuple[Op, int, int], Pending] = field(default_factory=dict)
    sent: list[Pending] = field(default_factory=list)


def _backward_from(edge: GradientEdge, received: list[Tensor]) -> None:
    """Backward from `edge` with the one gradient in `received`, which is taken out as its first node begins. Who calls
    backward with a gradient holds it until the end of backward, so it begins with one that takes no memory."""
    at, shape = edge.output_nr, received[0].shape

    def give(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*grads[:at], received.pop(), *grads[at + 1 :])

    nothing = received[0].new_empty(()).expand(shape)
    edge.node.register_prehook(give)
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
        width: int,
        dtype: torch.dtype,
        group_size: int | None = None,
        split: Split | None = None,
        store: Store = Plain(),  # noqa: B008 (has no state)
    ):
        self.group_size, self.split = group_size, split
        self.stages, self.mesh, self.schedule = list(stages), mesh, schedule
        self.width, self.dtype, self.store = width, dtype, store
        self.sharing = Sharing(store.every_run, store.by_chunk)
        self.place = Placement(mesh.pp.size, len(self.stages))
        self.last = self.place.num_stages - 1
        self.timeline: list[Timed] | None = None  # set to [] to record the next step
        self._came = 0.0  # when the last message had come that was waited for

    def step(self, batches: Sequence[Any], loss_weight: float, more: bool = False) -> Tensor:
        """Forward and backward of all micro-batches; the sums of their losses and of what is added to them (z-loss):
        [2], zero but on the last stage.

        The gradient is that of loss_weight * sum of all. `more`: another call of the same training step follows, so
        none of these backwards is a chunk's last.
        """
        rows = plan(self.schedule, self.mesh.pp.size, len(batches), len(self.stages), self.group_size, self.split)
        return self._run(rows, batches, loss_weight, more)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any]) -> Tensor:
        """Forward only, in evaluation mode; the sum of the losses alone (zero but on the last stage)."""
        for stage in self.stages:
            stage.eval()
        try:
            rows = plan(EVALUATION, self.mesh.pp.size, len(batches), len(self.stages), self.group_size)
            return self._run(rows, batches, None)[0]
        finally:
            for stage in self.stages:
                stage.train()

    def _run(
        self, rows: tuple[tuple[Action, ...], ...], batches: Sequence[Any], weight: float | None, more: bool = False
    ) -> Tensor:
        mesh, flight = self.mesh, Flight()
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        row = with_sharing(rows[mesh.pp.rank], self.sharing)
        reduces = {(a.stage, a.microbatch) for a in row if a.op is Op.REDUCE}
        last = {a.stage: a.microbatch for a in row if a.op is Op.REDUCE and not more}  # of the step
        begin = time.perf_counter()
        for action in row:
            start = 0.0 if (shared := action.op in SHARED) else self._now(begin)
            key, chunk = (action.stage, action.microbatch), self.place.chunk(action.stage)
            of_step = last.get(action.stage) == action.microbatch
            if action.op is Op.F:
                with mesh.clock.span("forward", action):
                    losses = self._forward(flight, key, chunk, batches[action.microbatch], weight)
                total[: len(losses)] += losses
            elif action.op is Op.B:
                assert weight is not None
                if not self.split and key in reduces:
                    self.store.on_last_backward(chunk, None, of_step)
                with mesh.clock.span("backward", action):
                    self._backward(flight, key, weight)
            elif action.op is Op.W:
                later = flight.later.pop(key)
                if key in reduces:
                    self.store.on_last_backward(chunk, later.sinks, of_step)
                with mesh.clock.span("backward", action):
                    later.run()
            elif action.op is Op.REDUCE:
                self.store.after_run(chunk, of_step)
            elif action.op is Op.GATHER:
                self.store.come(chunk)
            elif action.op is Op.FREE:
                self.store.go(chunk)
            elif action.op in (Op.SEND_F, Op.SEND_B):
                self._send(flight, action, batches[action.microbatch])
            else:
                self._receive(flight, action, batches[action.microbatch])
            if self.timeline is not None and not shared:
                self.timeline.append(Timed(str(action), max(start, self._came - begin), self._now(begin)))
        for message in flight.sent:
            self._wait(message, "what was sent")
        return total

    def _send(self, flight: Flight, action: Action, batch: Any) -> None:
        tensor = flight.ready.pop((action.stage, action.microbatch)).contiguous()
        fault("pipeline.message", self.mesh.world.rank, batch.step, tensor)
        flight.sent = [message for message in flight.sent if not message.is_completed()]
        flight.sent.append(self._post(SEND, action, tensor))
        if len(flight.sent) > SENT and self.mesh.device.type == "cpu":  # gloo never says that one is done
            self._wait(flight.sent.pop(0), "what was sent")

    def _receive(self, flight: Flight, action: Action, batch: Any) -> None:
        shape = (batch.tokens_SB.shape[0] // self.mesh.tp.size, batch.tokens_SB.shape[1], self.width)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.mesh.device)
        flight.coming[action.op, action.stage, action.microbatch] = self._post(RECEIVE, action, tensor)

    def _wait(self, message: Pending, *name: object) -> Tensor:
        """For a message, which comes when its sender is there: most of it is the pipeline's bubble."""
        with self.mesh.clock.span(MESSAGES, "wait for", *name):
            tensor = message.wait()
        self._came = self._now(0.0)
        return tensor

    def _forward(self, flight: Flight, key: Key, chunk: int, batch: Any, weight: float | Tensor | None) -> Tensor:
        (stage, _), keep = key, weight is not None
        x = None
        if stage > 0:
            x = self._wait(flight.coming.pop((Op.RECV_F, *key)), Action(Op.RECV_F, *key))
            if keep:
                flight.inputs[key] = x.requires_grad_()
        # the loss is told its gradient now: it computes its own gradients in forward (nn/loss.py)
        given: dict[str, Any] = {"loss_weight": weight}
        if keep and self.split:
            given["later"] = flight.later[key] = Later()
        y = self.stages[chunk](x, replace(batch, **given))
        if keep:
            flight.edges[key] = y if stage == self.last else get_gradient_edge(y)
        if stage == self.last:
            return y.detach().double().reshape(-1)
        flight.ready[key] = y.detach()
        return y.new_empty(0, dtype=torch.float64)

    def _backward(self, flight: Flight, key: Key, weight: float | Tensor) -> None:
        stage, edge = key[0], flight.edges.pop(key)
        if stage == self.last:
            # made on the device: a copy would wait for it
            given = weight.to(edge.dtype) if isinstance(weight, Tensor) else edge.new_full((), weight)
            torch.autograd.backward(edge, given.expand_as(edge))
        else:
            received = [self._wait(flight.coming.pop((Op.RECV_B, *key)), Action(Op.RECV_B, *key))]
            _backward_from(edge, received)
        if stage > 0:
            x = flight.inputs.pop(key)
            assert x.grad is not None
            flight.ready[key] = x.grad

    def _post(self, op: str, action: Action, tensor: Tensor) -> Pending:
        """Post a message: upstream for inputs received and gradients sent, downstream for the other two."""
        forward = action.op in (Op.SEND_F, Op.RECV_F)
        axis: Axis = self.mesh.pp if forward else self.mesh.pp_back
        step = 1 if action.op in (Op.SEND_F, Op.RECV_B) else -1
        with self.mesh.clock.span(MESSAGES, action):
            return start_message(tensor, axis, self.place.rank(action.stage + step), op, action.microbatch)

    def _now(self, begin: float) -> float:
        if self.timeline is not None:
            synchronize(self.mesh.device)  # only while a timeline is recorded
        return time.perf_counter() - begin
