"""The synchronization of weights and gradients over data-parallel ranks: the order of collectives of all buckets.

    backward (last of a chunk)   ... layer 3 | layer 2 | layer 1 ...
    reduce-scatter over dp                    bucket 0 | bucket 1         one per bucket and step
    update of this rank's shard                                  |----|
    all-gather over dp                                                | bucket 1 | bucket 0      one per bucket and step
    next forward                                                        layer 1  | layer 2 ...

What a bucket does is in grad_bucket.py and param_bucket.py. What is here: which bucket is next, so that every rank
starts its collectives in the same order, even if ranks get gradients for different parameters.

Gradients. The pipeline announces the last backward of a pass of a chunk. From then on a bucket whose gradients are all
ready is reduced after the buckets before it. Resharded buckets (ZeRO-2) are reduced in every pass:

    last backward of a pass   layer 3 ready | layer 2 ready  | layer 1 ready
    reduce-scatter                          | layer 3        | layer 2          at most two full buckets
    sum of the shards                             += layer 3 |  += layer 2

Weights:

    resident bucket              gathered once per step: after the update, during the next forward
    resharded bucket (ZeRO-3)
      by unit                    around each run of a unit, forward and backward; overlaps with the unit before
      by chunk                   for a pass of forwards or backwards of a chunk (pipeline/schedule.py)

The order of units is that of the model, so nothing is traced. The model runs its units through `run_unit`
(models/gpt.py), and a hook on a parameter's graph node shows that the backward no longer needs it. The end of the
backward reshards the units with a parameter that they did not use. Embedding and head are used only in forward, since
the loss computes its gradients there.

Rejected: hooks that count backwards to find the last one. They break when a micro-batch skips a layer.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megalite.nn.parameter import MainGrad, ShardableModule, main_param_dtype, spec_of
from megalite.optim.host_memory import allocate_pinned, pinned_bytes
from megalite.optim.zero.grad_bucket import GradBucket, GradState, ParamMainGrad
from megalite.optim.zero.layout import BucketKey, chunk_layout
from megalite.optim.zero.param_bucket import ParamBucket, ParamState
from megalite.optim.zero.resharded_parameter import gradient_node
from megalite.optim.zero.sharding import BucketSharding, bucket_shardings
from megalite.parallel.mesh import Mesh
from megalite.parallel.streams import new_stream

PREFETCH_DEPTH = 2  # gathers in flight at a time
PARAM_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ZeroConfig:
    """The sharding of weights and gradients over data-parallel ranks (ZeRO, arXiv:1910.02054).

    Attributes:
        zero_stage: 1: only the optimizer state is sharded. 2: the gradients of matrices are resharded, too. 3: their
            weights, too.
        unshard_by_chunk: unshard weights for a pass of a chunk, not for each unit.
        shard_over_replicas: shard the optimizer state over replicas, too.
        offload_params: keep the shards of resharded weights in host memory.
    """

    zero_stage: int = 1
    unshard_by_chunk: bool = False
    shard_over_replicas: bool = False
    offload_params: bool = False


class BucketSync:
    """The buckets of a rank, and the order of their collectives (implements pipeline/runtime.py: ParamSync).

    Attributes:
        mesh: the mesh.
        parameters: the parameters of the entries of the layout.
        layout: the layout of all buckets.
        main_dtype: dtype of gradients, main weights and, unless a rule says otherwise, optimizer state.
        param_buckets: the weights, in the order of the layout.
        grad_buckets: the gradients, in the same order.
        main_grads: the main_grads by name of the parameter.
        host_bytes: pinned memory in bytes for the shards of offloaded weights.
        pre_reduce_hook: called with each bucket before it is reduced, when it contains the sum of this rank.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        *,
        bucket_size: int | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        half_reduce_dtype: torch.dtype | None = None,
        zero_config: ZeroConfig = ZeroConfig(),  # noqa: B008 (frozen)
        **separate_buckets: Any,
    ):
        """Move all parameters of `chunks` to buckets, and register hooks on the modules.

        Args:
            chunks: modules whose parameters have a `.spec`.
            mesh: the mesh.
            bucket_size: minimum number of elements of a bucket; None: layout.DEFAULT_BUCKET_SIZE.
            overlap_grad_reduce: reduce gradients during the last backward; otherwise in `finish_grad_sync`, except for
                resharded buckets, whose reductions are waited for as soon as they are started.
            overlap_param_gather: gather weights ahead of their use. Otherwise resident buckets are gathered all at
                once, and resharded ones when they are used.
            half_reduce_dtype: reduce gradients of weights of this dtype, bf16 or fp16, over the data axis in it, which
                halves the bytes. The sum of a rank's micro-batches, and the sums over other axes, keep the dtype of the
                gradients. A sum that overflows fp16 is infinite, so that the loss scaler skips the step.
            zero_config: the sharding of weights and gradients.
            separate_buckets: reasons for separate buckets (layout.build_layout).

        Raises:
            ValueError: the parameters have several dtypes, apart from those that keep fp32.
        """
        reshards_grads = zero_config.zero_stage > 1
        self.mesh = mesh
        self.reduce_every_pass = reshards_grads
        self.unshard_by_chunk = zero_config.unshard_by_chunk
        self.parameters, self.layout = chunk_layout(
            chunks, mesh, bucket_size, by_unit=reshards_grads, **separate_buckets
        )
        self.main_dtype = _main_dtype(self.parameters)
        shardings = bucket_shardings(self.layout, mesh, half_reduce_dtype, zero_config.shard_over_replicas)

        self.param_buckets = self._build_param_buckets(shardings, zero_config)
        self._overlap_param_gather = overlap_param_gather
        self._sharded = [bucket for bucket in self.param_buckets if bucket.sharding.is_sharded]
        self._queue: list[ParamBucket] = []  # buckets to unshard, in the order in which every rank starts them
        self._unsharding: list[ParamBucket] = []  # in the order in which they were started
        self._unit_buckets: dict[nn.Module, list[ParamBucket]] = {}  # the resharded buckets of a unit
        # (unit, 1): the resharded buckets of the unit after it; (unit, -1): those of the unit before it
        self._prefetch_buckets: dict[tuple[nn.Module, int], list[ParamBucket]] = {}
        self._read_in_backward: set[nn.Module] = set()  # units whose weights the backward reads

        self._overlap_grad_reduce = overlap_grad_reduce
        self.grad_buckets = [
            GradBucket(
                bucket,
                self.layout.entries,
                shardings[bucket.key],
                self.main_dtype,
                self.parameters[0].device,
                reshards_grads,
            )
            for bucket in self.layout.buckets
        ]
        self._announced: list[GradBucket] = []  # buckets to reduce, in the order in which every rank starts them
        self._reducing: GradBucket | None = None  # the last resharded bucket whose reduction was started
        self.pre_reduce_hook: Callable[[GradBucket], None] | None = None
        self.main_grads: dict[str, ParamMainGrad] = {}

        self._nodes: list[Any] = []  # the parameters' graph nodes, which autograd itself does not keep alive
        self._register_module_hooks(chunks)
        self._register_param_hooks()

    def _build_param_buckets(
        self, shardings: Mapping[BucketKey, BucketSharding], zero_config: ZeroConfig
    ) -> list[ParamBucket]:
        """Move the parameters to buckets, and set `host_bytes`."""
        device = self.parameters[0].device
        reshards = zero_config.zero_stage > 2
        host_sizes: dict[int, int] = {}  # index of a bucket whose shard is in host memory -> bytes
        if reshards and zero_config.offload_params:
            for bucket in self.layout.buckets:
                sharding = shardings[bucket.key]
                if sharding.can_reshard(bucket):
                    host_sizes[bucket.index] = len(sharding.shard_range(bucket)) * bucket.key.dtype.itemsize
        self.host_bytes = pinned_bytes([*host_sizes.values()])
        host_memory = allocate_pinned([*host_sizes.values()], device)
        h2d_stream = new_stream(device) if host_sizes else None
        buckets: list[ParamBucket] = []
        for bucket in self.layout.buckets:  # one at a time: the old memory of its parameters is freed before the next
            sharding = shardings[bucket.key]
            host_shard = next(host_memory) if bucket.index in host_sizes else None
            buckets.append(
                ParamBucket(bucket, self.layout.entries, sharding, self.parameters, reshards, host_shard, h2d_stream)
            )
        return buckets

    def _register_module_hooks(self, chunks: Sequence[nn.Module]) -> None:
        """Make modules wait for their resident buckets, and chunks run their units through `run_unit`."""
        bucket_of_param = {id(p): bucket for bucket in self._sharded for p in bucket.parameters}

        def buckets_of(module: nn.Module, resident: bool, recurse: bool = False) -> list[ParamBucket]:
            # containers are never called, so the module that contains them has to wait for their parameters
            containers = [child for child in module.children() if isinstance(child, PARAM_CONTAINERS)]
            buckets = {
                bucket_of_param[id(p)]
                for owner in (module, *containers)
                for p in owner.parameters(recurse)
                if id(p) in bucket_of_param
            }
            return sorted((b for b in buckets if b.is_resident == resident), key=lambda b: b.layout.index)

        for chunk in chunks:
            for module in chunk.modules():
                if resident_buckets := buckets_of(module, resident=True):
                    module.register_forward_pre_hook(partial(self._wait_all, resident_buckets))
            if all(bucket.is_resident for bucket in self.param_buckets):
                continue
            assert isinstance(chunk, ShardableModule), "its weights are resharded, but it does not run through units"
            units = chunk.units
            self._unit_buckets |= {unit: buckets_of(unit, resident=False, recurse=True) for unit in units}
            for previous, unit in itertools.pairwise(units):
                self._prefetch_buckets[previous, 1] = self._unit_buckets[unit]
                if units[previous]:
                    self._prefetch_buckets[unit, -1] = self._unit_buckets[previous]
            self._read_in_backward |= {unit for unit, read_in_backward in units.items() if read_in_backward}
            chunk.run_unit = self.run_unit

    def _register_param_hooks(self) -> None:
        """Attach the main_grads, and the hooks on the graph nodes of the parameters.

        No hook has a strong reference to this object, which keeps the nodes.
        """
        for grads, params in zip(self.grad_buckets, self.param_buckets, strict=True):
            for slot, name, p in zip(grads.layout.slots, grads.names, params.parameters, strict=True):
                main_grad = ParamMainGrad(name, grads.param_view(slot).view(p.shape), grads, slot, self._start_ready)
                self.main_grads[name] = main_grad
                p.main_grad = main_grad  # type: ignore[attr-defined]
                node = gradient_node(p)
                node.register_hook(partial(main_grad.accumulate_and_mark_ready, p))
                if not params.is_resident and not self.unshard_by_chunk:
                    node.register_hook(partial(params.param_backward_done, slot.entry))
                self._nodes.append(node)

    # ---- gradients

    def zero_unwritten_grads(self) -> None:
        """Zero the main_grads without a gradient in this pass, so that all later gradients are added."""
        for bucket in self.grad_buckets:
            bucket.zero_unwritten()

    def set_last_backward(
        self, chunk: int, main_grads: Iterable[MainGrad] | None = None, last_in_step: bool = True
    ) -> None:
        """Announce that the next backward of `chunk` is the last of its pass: reduce each bucket once it is ready.

        Args:
            chunk: index of the chunk.
            main_grads: with a split backward, the gradients that the last W will complete; all other gradients are
                ready.
            last_in_step: True if the pass is also the last of the step; otherwise resident buckets are not reduced.
        """
        pending_entries: set[int] | None = None
        if main_grads is not None:
            pending_entries = {grad.slot.entry for grad in main_grads if isinstance(grad, ParamMainGrad)}
        for bucket in self._buckets_to_reduce(chunk, last_in_step):
            bucket.announce_last_backward(pending_entries)
            if bucket not in self._announced:
                self._announced.append(bucket)
        self._start_ready()

    def finish_pass(self, chunk: int, last_in_step: bool = True) -> None:
        """Finish a pass: reduce the buckets that are still waiting, so that all ranks call the same collectives."""
        for bucket in self._buckets_to_reduce(chunk, last_in_step):
            if bucket in self._announced:
                self._announced.remove(bucket)
                self._start_reduce(bucket)

    def _buckets_to_reduce(self, chunk: int, last_in_step: bool) -> list[GradBucket]:
        """Return the buckets of a chunk that are reduced at the end of a pass."""
        include_resident = last_in_step and self._overlap_grad_reduce
        return [b for b in self.grad_buckets if b.layout.chunk == chunk and (include_resident or not b.is_resident)]

    def _start_ready(self) -> None:
        """Reduce the buckets at the head of the queue that are ready.

        A bucket waits for those before it: ranks that start collectives in different orders would sum gradients of
        different parameters.
        """
        while self._announced and self._announced[0].state is GradState.READY:
            self._start_reduce(self._announced.pop(0))

    def _start_reduce(self, bucket: GradBucket) -> None:
        """Start to reduce a bucket, whether or not all of its gradients are ready."""
        if not bucket.is_resident:  # free the one before it, so that at most two are allocated
            if self._reducing is not None and self._reducing.state is GradState.REDUCING:
                self._reducing.finish_reduce()
            self._reducing = bucket
        if bucket.state is not GradState.READY:
            bucket.mark_all_ready()
        bucket.zero_unwritten()
        if self.pre_reduce_hook is not None:
            self.pre_reduce_hook(bucket)
        bucket.start_reduce()
        if not bucket.is_resident and not self._overlap_grad_reduce:
            bucket.finish_reduce()

    def finish_grad_sync(self) -> None:
        """Complete the gradients of the step: the owned ones are summed over the data, tp and tied-embedding axes."""
        for bucket in [*self._announced, *self.grad_buckets]:
            if not bucket.reduction_started:  # it waited for another rank's gradients, or was never announced
                self._start_reduce(bucket)
        self._announced.clear()
        for bucket in self.grad_buckets:
            if bucket.state is GradState.REDUCING:
                bucket.finish_reduce()
        for bucket in self.grad_buckets:
            bucket.reduce_owned()
        for bucket in self.grad_buckets:
            bucket.reduce_tied()
        for bucket in self.grad_buckets:
            bucket.end_step()

    # ---- weights

    def start_param_sync(self) -> None:
        """Start to gather the resident buckets, in order of use, after their shards were updated.

        PREFETCH_DEPTH gathers are in flight at a time, and a wait for one of them starts the next: with a single
        hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), all at once would delay every later kernel. Shards that are
        split again over replicas are gathered first, all at once. Gathers that are in flight, of weights from before a
        load, are completed before, because nothing would wait for them later.
        """
        self.wait_param_sync()
        for bucket in _in_forward_order(self._sharded):
            if bucket.state is ParamState.UNSHARDED:
                bucket.reshard()  # other ranks have updated their shards
            bucket.start_shard_gather()
        self._enqueue([bucket for bucket in self._sharded if bucket.is_resident])
        if not self._overlap_param_gather:
            self.wait_param_sync()

    def wait_param_sync(self) -> None:
        """Wait for all gathers: of the resident buckets and of the shards."""
        while self._unsharding:
            self._wait(self._unsharding[0])
        for bucket in self._sharded:
            bucket.wait_for_shard()

    def _enqueue(self, buckets: Iterable[ParamBucket]) -> None:
        self._queue += _in_forward_order(buckets)
        while self._queue and len(self._unsharding) < PREFETCH_DEPTH:
            self._start_next_gather()

    def _start_next_gather(self) -> None:
        if self._queue:
            self._start_gather(self._queue.pop(0))

    def _start_gather(self, bucket: ParamBucket) -> None:
        bucket.unshard()
        self._unsharding.append(bucket)

    def _wait(self, bucket: ParamBucket) -> None:
        while bucket in self._queue:
            self._start_next_gather()
        if bucket.state is ParamState.UNSHARDING:
            self._unsharding.remove(bucket)
            bucket.finish_unshard()
            self._start_next_gather()

    def _wait_all(self, buckets: Iterable[ParamBucket], *_: Any) -> None:
        for bucket in buckets:
            self._wait(bucket)

    # ---- resharded weights

    def run_unit(self, unit: nn.Module, *args: Any, recomputing: bool = False) -> Tensor:
        """Return unit(*args), with unsharded weights.

        With `recomputing` this is a recomputation, which the backward of the unit follows, so the weights are kept.
        """
        self._unshard_unit(unit, 0 if recomputing else 1)
        y = unit(*args)
        if recomputing:
            self._expect_backward(unit)
        else:
            if not self.unshard_by_chunk:
                for bucket in self._unit_buckets[unit]:
                    bucket.reshard()
            if y.grad_fn is not None and unit in self._read_in_backward:
                y.grad_fn.register_prehook(lambda _: self._pre_backward(unit))
        return y

    def _pre_backward(self, unit: nn.Module) -> None:
        self._unshard_unit(unit, -1)
        self._expect_backward(unit)

    def _unshard_unit(self, unit: nn.Module, direction: int) -> None:
        """Unshard the weights of a unit, and start to gather those of the next unit.

        `direction` is 1 if that is the next one in forward, -1 in backward, and 0 if nothing is to be prefetched.
        """
        buckets = self._unit_buckets[unit]
        self._request(buckets)
        self._wait_all(buckets)
        if self._overlap_param_gather and not self.unshard_by_chunk:
            self._request(self._prefetch_buckets.get((unit, direction), []))

    def _request(self, buckets: Iterable[ParamBucket]) -> None:
        """Start to gather the buckets that are sharded and not in the queue."""
        for bucket in buckets:
            if bucket.state is ParamState.SHARDED and bucket not in self._queue:
                self._start_gather(bucket)

    def _expect_backward(self, unit: nn.Module) -> None:
        """Reshard the weights of a unit as soon as the running backward no longer needs them, or when it ends.

        A parameter that the unit does not use has no node in this backward, and its hook does not run. Another rank may
        use it: if the bucket stayed unsharded on one of them, only the other would gather it for its next use.
        """
        if not self.unshard_by_chunk:
            for bucket in self._unit_buckets[unit]:
                bucket.reshard_after_backward()
                Variable._execution_engine.queue_callback(bucket.end_backward)

    def unshard(self, chunk: int) -> None:
        """Start to gather the weights of a chunk that forward and backward need, shortly before a pass.

        Embedding and head, whose weights the backward does not read, are gathered when they are used.
        """
        needed = {bucket for unit in self._read_in_backward for bucket in self._unit_buckets[unit]}
        self._enqueue(
            bucket
            for bucket in needed
            if bucket.layout.chunk == chunk and bucket.state is ParamState.SHARDED and bucket not in self._queue
        )

    def reshard(self, chunk: int) -> None:
        """Reshard the weights of a chunk after a pass."""
        for bucket in self.param_buckets:
            if bucket.layout.chunk == chunk and not bucket.is_resident and bucket.state is not ParamState.SHARDED:
                self._wait(bucket)
                bucket.reshard()


def _in_forward_order(buckets: Iterable[ParamBucket]) -> list[ParamBucket]:
    """Return the buckets in the order in which forward uses them."""
    return sorted(buckets, key=lambda bucket: (bucket.layout.chunk, -bucket.layout.index))


def _main_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """Return the dtype of gradients and main weights.

    Raises ValueError if the parameters have several dtypes, apart from those that keep fp32.
    """
    dtypes = {p.dtype for p in parameters}
    model_dtypes = {p.dtype for p in parameters if not spec_of(p).keep_fp32} or dtypes
    main_dtypes = {main_param_dtype(dtype) for dtype in model_dtypes}
    if len(model_dtypes) != 1 or not dtypes <= model_dtypes | main_dtypes:
        raise ValueError(
            f"parameters have dtypes {sorted(map(str, dtypes))}, a bucket has only one: build them with one dtype, "
            "except for those that keep fp32"
        )
    return main_dtypes.pop()
