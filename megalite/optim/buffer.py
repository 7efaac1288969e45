"""Weights and gradients in buckets. Gradients are reduced as they become ready, weights are gathered as needed.

    backward (last of a chunk)   ... layer 3 | layer 2 | layer 1 ...
    reduce-scatter over dp                    bucket 0 | bucket 1         one per bucket and step
    update of this rank's shard                                  |----|
    all-gather over dp                                                | bucket 1 | bucket 0      one per bucket and step
    next forward                                                        layer 1  | layer 2 ...

It has four parts: the sharding of each bucket (bucket_sharding.py), the storage of weights and gradients
(flat_buffers.py), the accumulation and reduction of gradients (grad_reduce.py), and the all-gather of updated weights
(param_gather.py). The optimizer uses only the elements that its rank owns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megalite.nn.parameter import main_param_dtype, spec_of
from megalite.optim.bucket_sharding import bucket_shardings
from megalite.optim.flat_buffers import FlatBuffers
from megalite.optim.grad_reduce import GradReducer
from megalite.optim.layout import BufferLayout, ParamEntry, build_layout
from megalite.optim.param_gather import ParamGatherer
from megalite.parallel.mesh import Mesh

DEFAULT_BUCKET_SIZE = 40_000_000  # elements


def chunk_layout(
    chunks: Sequence[nn.Module], mesh: Mesh, bucket_size: int | None = None, **separate_buckets: bool
) -> tuple[list[nn.Parameter], BufferLayout]:
    """Return the parameters of `chunks`, each once, and their layout: entry i of the layout is parameter i.

    Args:
        chunks: modules whose parameters have a `.spec`.
        mesh: the mesh.
        bucket_size: minimum number of elements of a bucket; None: DEFAULT_BUCKET_SIZE.
        separate_buckets: reasons for separate buckets (layout.build_layout).
    """
    chunk_of_param: dict[int, tuple[int, nn.Parameter]] = {}
    for chunk, module in enumerate(chunks):
        for p in module.parameters():
            chunk_of_param.setdefault(id(p), (chunk, p))
    parameters = [p for _, p in chunk_of_param.values()]
    entries = [
        ParamEntry(spec_of(p), p.numel(), chunk, getattr(p, "unit", ""), p.dtype)
        for chunk, p in chunk_of_param.values()
    ]
    size = DEFAULT_BUCKET_SIZE if bucket_size is None else bucket_size
    return parameters, build_layout(entries, bucket_size=size, sizes=mesh.sizes, **separate_buckets)


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


class ParamAndGradBuffer:
    """The storage of all weights and gradients of a rank, and their synchronization (it is a pipeline's ParamSync)."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        *,
        bucket_size: int | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        reduce_in_bf16: bool = False,
        zero_config: ZeroConfig = ZeroConfig(),  # noqa: B008 (frozen)
        **separate_buckets: bool,
    ):
        """Move all parameters of `chunks` to the buffer.

        Args:
            chunks: modules whose parameters have a `.spec`.
            mesh: the mesh.
            bucket_size: minimum number of elements of a bucket; None: DEFAULT_BUCKET_SIZE.
            overlap_grad_reduce: reduce gradients during the backward.
            overlap_param_gather: all-gather weights during the forward.
            reduce_in_bf16: reduce gradients over the data axis in bf16, which halves the bytes. The sum of a rank's
                micro-batches, and the sums over other axes, keep the dtype of the gradients.
            zero_config: the sharding of weights and gradients.
            separate_buckets: reasons for separate buckets (layout.build_layout).

        Raises:
            ValueError: the parameters have several dtypes, apart from those that keep fp32.
        """
        reshard_grads = zero_config.zero_stage > 1
        reshard_weights = zero_config.zero_stage > 2
        self.reduce_every_pass = reshard_grads
        self.unshard_by_chunk = zero_config.unshard_by_chunk
        parameters, layout = chunk_layout(chunks, mesh, bucket_size, by_unit=reshard_grads, **separate_buckets)
        self.parameters = parameters
        self.layout = layout
        dtypes = {p.dtype for p in parameters}
        model_dtypes = {p.dtype for p in parameters if not spec_of(p).keep_fp32} or dtypes
        main_dtypes = {main_param_dtype(dtype) for dtype in model_dtypes}
        if len(model_dtypes) != 1 or not dtypes <= model_dtypes | main_dtypes:
            raise ValueError(
                f"parameters have dtypes {sorted(map(str, dtypes))}, a buffer has only one: build them with one dtype, "
                "except for those that keep fp32"
            )
        self.main_dtype = main_dtypes.pop()  # of gradients, main weights and, unless a rule says otherwise, its state
        device = parameters[0].device
        self.mesh = mesh
        self.shardings = bucket_shardings(layout, mesh, reduce_in_bf16, zero_config.shard_over_replicas)
        self.weights = FlatBuffers(
            layout,
            self.shardings,
            [bucket.key.dtype for bucket in layout.buckets],
            device,
            parameters,
            resizable=reshard_weights,
            on_host=zero_config.offload_params,
        )
        grad_dtypes = [self.main_dtype] * len(layout.buckets)
        self.grads = FlatBuffers(layout, self.shardings, grad_dtypes, device, resizable=reshard_grads)
        reducer = GradReducer(parameters, self.grads, overlap_grad_reduce)
        gatherer = ParamGatherer(parameters, self.weights, chunks, overlap_param_gather, zero_config.unshard_by_chunk)
        self.grad_reduce = reducer
        self.param_gather = gatherer
        # the methods that the pipeline, the trainer and the optimizer call
        self.main_grads = reducer.main_grads
        self.zero_unwritten_grads = reducer.zero_unwritten_grads
        self.set_last_backward = reducer.set_last_backward
        self.finish_pass = reducer.finish_pass
        self.finish_grad_sync = reducer.finish_grad_sync
        self.start_param_sync = gatherer.start_param_sync
        self.wait_param_sync = gatherer.wait_param_sync
        self.unshard = gatherer.unshard
        self.reshard = gatherer.reshard

    def first_bucket_grad(self) -> Tensor:
        """Return the part of the first bucket's reduced gradient that this rank owns."""
        return self.grads.owned(self.layout.buckets[0])

    def first_bucket_weight(self) -> Tensor:
        """Return the first bucket after all gathers are complete; only the owned part if it is resharded."""
        self.wait_param_sync()
        bucket = self.layout.buckets[0]
        return self.weights.full(bucket) if self.weights.is_resident(bucket) else self.weights.owned(bucket)
