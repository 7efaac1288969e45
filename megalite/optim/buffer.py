"""One flat weight and one flat gradient tensor; gradients are reduced as they arrive, weights gathered as needed.

    backward (last of a chunk)   ... layer 3 | layer 2 | layer 1 ...
    reduce-scatter over dp                    bucket 0 | bucket 1         one per bucket and step
    update of this rank's shard                                  |----|
    all-gather over dp                                                | bucket 1 | bucket 0      one per bucket and step
    next forward                                                        layer 1  | layer 2 ...

A matrix's gradient is added into its fp32 view by the matmul that computes it (`parameter.sink`, nn/linear.py); what
autograd accumulates itself, a hook adds and drops. The hook is on the parameter's node of the graph, which runs once
per backward, after all uses of the parameter and also if autograd saw no gradient: so it tells that the parameter is
done. A step's first gradient writes over the last step's; what gets none is zeroed when its bucket is reduced. The
pipeline says which backward of a chunk is the last. A full bucket waits for those before it, so every rank runs its
collectives in one order, even where ranks get gradients for different parameters. Gradients are sums: tokens, loss
scale and clipping are one factor in the optimizer. The extra sums (over tp, over the pipeline's ends) run on the dp
shard: 1/dp of the bytes.
Rejected: hooks that count backward passes to find the last one; they break when a micro-batch skips a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megalite.nn.parameter import spec_of
from megalite.optim.layout import Bucket, Entry, Layout, lay_out
from megalite.parallel.comm import all_reduce_, start_all_gather_into, start_reduce_scatter_into
from megalite.parallel.mesh import Mesh

DEFAULT_BUCKET_SIZE = 40_000_000  # elements
GATHERS_AHEAD = 2


def main_dtype(weights: torch.dtype) -> torch.dtype:
    """What gradients, main weights and states are kept in."""
    return torch.float64 if weights == torch.float64 else torch.float32


def lay_out_chunks(
    chunks: Sequence[nn.Module], mesh: Mesh, bucket_size: int | None = None, decoupled: bool = False
) -> tuple[list[nn.Parameter], Layout]:
    """The parameters of `chunks`, each once, and where they lie: entry i of the layout is parameter i."""
    found: dict[int, tuple[int, nn.Parameter]] = {}
    for chunk, module in enumerate(chunks):
        for p in module.parameters():
            found.setdefault(id(p), (chunk, p))
    parameters = [p for _, p in found.values()]
    entries = [Entry(spec_of(p), p.numel(), chunk) for chunk, p in found.values()]
    size = DEFAULT_BUCKET_SIZE if bucket_size is None else bucket_size
    return parameters, lay_out(entries, bucket_size=size, dp=mesh.dp.size, tp=mesh.tp.size, decoupled=decoupled)


class Sink:
    """The view of one parameter's gradient, [its shape] (nn/parameter.py, GradientSink)."""

    def __init__(self, name: str, grad: Tensor, slot: tuple[int, int], reducing: dict[int, Any], begun: set[int]):
        """`slot`: its bucket and its entry. `reducing`, `begun`: the buffer's own, of all buckets and entries."""
        self._name, self._grad, self._slot, self._reducing, self._begun = name, grad, slot, reducing, begun

    def open(self) -> tuple[Tensor, bool]:
        bucket, entry = self._slot
        if bucket in self._reducing:
            raise RuntimeError(
                f"{self._name}: a gradient came after its bucket was reduced; arm only the last backward"
            )
        begin = entry not in self._begun
        self._begun.add(entry)
        return self._grad, begin


def _lander(owner: weakref.ref[ParamBuffer], p: nn.Parameter, b: int, entry: int) -> Callable[..., None]:
    """The hook on a parameter's node. `owner` is weak: Python does not see through a node, to free a cycle of them."""

    def land(*_: Any) -> None:
        if p.grad is not None:
            grad, begin = p.sink.open()  # type: ignore[attr-defined]
            grad.copy_(p.grad) if begin else grad.add_(p.grad)
            p.grad = None
        buffer = owner()
        if buffer is not None:
            buffer._landed(b, entry)

    return land


class ParamBuffer:
    """Takes over the storage of all parameters of `chunks` (modules whose parameters carry `.spec`).

    shard    True: ZeRO-1, gradients are reduce-scattered and each dp rank owns its part of each bucket;
             False: gradients are all-reduced and each rank owns everything
    reduce_in_bf16  the sum over dp moves bf16: half the bytes; each rank's own sum, and the extra ones, stay as
             they are
    decoupled  embedding and head have a learning rate of their own
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        *,
        bucket_size: int | None = None,
        shard: bool = True,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        reduce_in_bf16: bool = False,
        decoupled: bool = False,
    ):
        self.mesh, self.sharded, self.reduce_in_bf16 = mesh, shard, reduce_in_bf16
        self.overlap_grad_reduce, self.overlap_param_gather = overlap_grad_reduce, overlap_param_gather
        parameters, self.layout = lay_out_chunks(chunks, mesh, bucket_size, decoupled)
        dtypes = {p.dtype for p in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"parameters have dtypes {sorted(map(str, dtypes))}, a buffer has one: build them alike")
        dtype = dtypes.pop()
        self.weights = torch.zeros(self.layout.size, dtype=dtype, device=mesh.device)
        self._waiting: dict[int, set[int]] = {}  # armed and not yet reduced, in order: entries still to land
        self._reducing: dict[int, Any] = {}
        self._rounded: dict[int, Tensor] = {}  # what is owned of buckets on their way in bf16
        self._begun: set[int] = set()  # entries whose gradient is of this step; all else is left from the last
        self.sinks: dict[str, Sink] = {}
        self._nodes: list[Any] = []  # the parameters' nodes of the graph: autograd itself does not keep them
        self._to_gather: list[int] = []  # in the order in which every rank starts them
        self._gathering: dict[int, Any] = {}
        bucket_of: dict[int, int] = {}
        for b, bucket in enumerate(self.layout.buckets):
            for slot in bucket.slots:
                p = parameters[slot.entry]
                view = self.weights[slot.start : slot.stop].view_as(p)
                view.copy_(p.data)
                p.data = view
                bucket_of[id(p)] = b
        # the old weights are gone by now
        self.grads = torch.zeros(self.layout.size, dtype=main_dtype(dtype), device=mesh.device)
        for b, bucket in enumerate(self.layout.buckets):
            for slot in bucket.slots:
                p = parameters[slot.entry]
                grad = self.grads[slot.start : slot.stop].view_as(p)
                name = self.layout.entries[slot.entry].spec.name
                self.sinks[name] = Sink(name, grad, (b, slot.entry), self._reducing, self._begun)
                p.sink = self.sinks[name]  # type: ignore[attr-defined]
                node = get_gradient_edge(p).node
                node.register_hook(_lander(weakref.ref(self), p, b, slot.entry))
                self._nodes.append(node)
        for module in (m for chunk in chunks for m in chunk.modules()):
            needs = sorted({bucket_of[id(p)] for p in module.parameters(recurse=False)})
            if needs and shard and mesh.dp.size > 1:
                module.register_forward_pre_hook(self._waiter(needs))

    def _waiter(self, needs: list[int]) -> Any:
        def wait(module: nn.Module, args: Any) -> None:
            for b in needs:
                self._finish_gather(b)

        return wait

    # ---- gradients

    def zero_grad(self) -> None:
        """Begin a step. `grads` holds zeros for what gets no gradient once it is reduced, not before."""
        self._begun.clear()

    def begin_all(self) -> None:
        """Zero what got no gradient in this step so far: all that come are added."""
        for bucket in self.layout.buckets:
            self._begin_rest(bucket)

    def _begin_rest(self, bucket: Bucket) -> None:
        rest = [slot for slot in bucket.slots if slot.entry not in self._begun]
        spans = [(bucket.start, bucket.stop)] if len(rest) == len(bucket.slots) else [(s.start, s.stop) for s in rest]
        for start, stop in spans:
            self.grads[start:stop] = 0
        self._begun.update(slot.entry for slot in rest)

    def on_last_backward(self, chunk: int) -> None:
        """The next backward of `chunk` is its last in this step: reduce each bucket when its last gradient lands."""
        if not self.overlap_grad_reduce:
            return
        for b, bucket in enumerate(self.layout.buckets):
            if bucket.chunk == chunk:
                self._waiting[b] = {slot.entry for slot in bucket.slots}

    def _landed(self, b: int, entry: int) -> None:
        if b in self._waiting:
            self._waiting[b].discard(entry)
            self._start_full()

    def _start_full(self) -> None:
        """Reduce the full buckets at the head of the queue. One behind a bucket that is not full waits: dp ranks
        that start collectives in different orders would sum gradients of different parameters."""
        for b in list(self._waiting):
            if self._waiting[b]:
                return
            del self._waiting[b]
            self._start_reduce(b)

    def _start_reduce(self, b: int) -> None:
        bucket, dp = self.layout.buckets[b], self.mesh.dp
        self._begin_rest(bucket)
        self._reducing[b] = None
        if dp.group is None:
            return
        whole, owned = self.grads[bucket.start : bucket.stop], self.owned_grad(bucket)
        if self.reduce_in_bf16:
            mine, whole = self.owned_range(bucket), whole.bfloat16()
            owned = self._rounded[b] = whole[mine.start - bucket.start : mine.stop - bucket.start]
        if self.sharded:
            self._reducing[b] = start_reduce_scatter_into(owned, whole, dp)
        else:
            self._reducing[b] = dist.all_reduce(whole, group=dp.group, async_op=True)

    def finish(self) -> None:
        """After the last backward: every gradient this rank owns is complete (summed over dp, tp and ends)."""
        for b in [*self._waiting, *range(len(self.layout.buckets))]:
            if b not in self._reducing:  # behind a parameter that got no gradient here, or never armed
                self._start_reduce(b)
        self._waiting.clear()
        for work in self._reducing.values():
            if work is not None:
                work.wait()
        for b, rounded in self._rounded.items():
            self.owned_grad(self.layout.buckets[b]).copy_(rounded)
        self._rounded.clear()
        for bucket in self.layout.buckets:
            if bucket.kind.partial:
                all_reduce_(self.owned_grad(bucket), self.mesh.tp)
        for bucket in self.layout.buckets:
            if bucket.kind.tied:
                all_reduce_(self.owned_grad(bucket), self.mesh.ends)
        self._reducing.clear()

    # ---- weights

    def gather(self) -> None:
        """Give every dp rank the updated shards of the others; in order of use, hidden behind the next forward.

        GATHERS_AHEAD are under way at a time, and one that is waited for starts the next: with a single hardware
        queue (CUDA_DEVICE_MAX_CONNECTIONS=1) all at once would hold up every kernel behind them.
        """
        if not self.sharded or self.mesh.dp.group is None:
            return
        buckets = self.layout.buckets
        self._to_gather = sorted(range(len(buckets)), key=lambda b: (buckets[b].chunk, -b))
        for _ in range(GATHERS_AHEAD):
            self._start_gather()
        if not self.overlap_param_gather:
            self.wait_gather()

    def _start_gather(self) -> None:
        if self._to_gather:
            b = self._to_gather.pop(0)
            bucket = self.layout.buckets[b]
            whole = self.weights[bucket.start : bucket.stop]
            self._gathering[b] = start_all_gather_into(whole, self.owned_weight(bucket), self.mesh.dp)

    def _finish_gather(self, b: int) -> None:
        while b in self._to_gather:
            self._start_gather()
        pending = self._gathering.pop(b, None)
        if pending is not None:
            pending.wait()
            self._start_gather()

    def wait_gather(self) -> None:
        """All weights are whole."""
        while self._gathering:
            self._finish_gather(next(iter(self._gathering)))

    # ---- what this rank owns

    def owned_range(self, bucket: Bucket) -> range:
        dp = self.mesh.dp
        return bucket.shard(dp.size, dp.rank) if self.sharded else range(bucket.start, bucket.stop)

    def owned_grad(self, bucket: Bucket) -> Tensor:
        owned = self.owned_range(bucket)
        return self.grads[owned.start : owned.stop]

    def owned_weight(self, bucket: Bucket) -> Tensor:
        owned = self.owned_range(bucket)
        return self.weights[owned.start : owned.stop]
