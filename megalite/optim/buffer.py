"""Weights and gradients in buckets; gradients are reduced as they arrive, weights gathered as needed.

    backward (last of a chunk)   ... layer 3 | layer 2 | layer 1 ...
    reduce-scatter over data                  bucket 0 | bucket 1         one per bucket and step
    update of this rank's shard                                  |----|
    all-gather over dp                                                | bucket 1 | bucket 0      one per bucket and step
    next forward                                                        layer 1  | layer 2 ...

Four parts: what is done with a bucket of each kind and who owns what (bucket_rule.py), where weights and gradients lie
(flat_storage.py), how gradients land and are reduced (grad_reduce.py), how updated weights come to all ranks
(param_gather.py). The optimizer asks for what is owned alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from megalite.nn.parameter import spec_of
from megalite.optim.bucket_sharding import bucket_shardings
from megalite.optim.flat_buffers import FlatBuffers, main_param_dtype
from megalite.optim.grad_reduce import GradReducer
from megalite.optim.layout import BufferLayout, ParamEntry, build_layout
from megalite.optim.param_gather import ParamGatherer
from megalite.parallel.mesh import Mesh

DEFAULT_BUCKET_SIZE = 40_000_000  # elements


def chunk_layout(
    chunks: Sequence[nn.Module], mesh: Mesh, bucket_size: int | None = None, **apart: bool
) -> tuple[list[nn.Parameter], BufferLayout]:
    """The parameters of `chunks`, each once, and where they lie: entry i of the layout is parameter i. `apart`: what
    lies apart (optim/layout.py: build_layout)."""
    chunk_of_param: dict[int, tuple[int, nn.Parameter]] = {}
    for chunk, module in enumerate(chunks):
        for p in module.parameters():
            chunk_of_param.setdefault(id(p), (chunk, p))
    parameters = [p for _, p in chunk_of_param.values()]
    entries = [ParamEntry(spec_of(p), p.numel(), chunk, getattr(p, "unit", "")) for chunk, p in chunk_of_param.values()]
    size = DEFAULT_BUCKET_SIZE if bucket_size is None else bucket_size
    return parameters, build_layout(entries, bucket_size=size, sizes=mesh.sizes, **apart)


class ZeroConfig(NamedTuple):
    """What data-parallel ranks share out beside what the optimizer keeps (arXiv:1910.02054).

    stage      2: gradients of matrices come and go, 3: their weights, too
    by_chunk   these weights come for a run of a chunk, not for each unit
    once_more  replicas share out among them what the optimizer keeps
    on_host    weights that come do so from host memory
    """

    zero_stage: int = 1
    unshard_by_chunk: bool = False
    shard_over_replicas: bool = False
    offload_params: bool = False


class ParamAndGradBuffer:
    """Takes over the storage of all parameters of `chunks` (modules whose parameters carry `.spec`).

    reduce_in_bf16  the first sum moves bf16: half the bytes; each rank's own sum, and the extra ones, stay as they are
    shared          what comes and goes
    apart           what lies in buckets of its own
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        *,
        bucket_size: int | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        reduce_in_bf16: bool = False,
        shared: ZeroConfig = ZeroConfig(),  # noqa: B008 (frozen)
        **apart: bool,
    ):
        self.reduce_every_pass, self.unshard_by_chunk = shared.zero_stage > 1, shared.unshard_by_chunk
        self.parameters, self.layout = chunk_layout(chunks, mesh, bucket_size, by_unit=shared.zero_stage > 1, **apart)
        parameters, layout = self.parameters, self.layout
        dtypes, device = {p.dtype for p in parameters}, parameters[0].device
        if len(dtypes) != 1:
            raise ValueError(f"parameters have dtypes {sorted(map(str, dtypes))}, a buffer has one: build them alike")
        dtype = dtypes.pop()
        self.mesh, self.shardings = mesh, bucket_shardings(layout, mesh, reduce_in_bf16, shared.shard_over_replicas)
        self.weights = FlatBuffers(
            layout, self.shardings, dtype, device, parameters, shared.zero_stage > 2, shared.offload_params
        )
        self.grads = FlatBuffers(
            layout, self.shardings, main_param_dtype(dtype), device, resizable=shared.zero_stage > 1
        )
        self.grad_reduce = reduce = GradReducer(parameters, self.grads, overlap_grad_reduce)
        gather_options = overlap_param_gather, shared.unshard_by_chunk
        self.param_gather = gatherer = ParamGatherer(parameters, self.weights, chunks, *gather_options)
        # what the others call
        self.main_grads, self.zero_unwritten_grads, self.finish_grad_sync = (
            reduce.main_grads,
            reduce.zero_unwritten_grads,
            reduce.finish_grad_sync,
        )
        self.set_last_backward, self.finish_pass = reduce.set_last_backward, reduce.finish_pass
        self.start_param_sync, self.wait_param_sync = gatherer.start_param_sync, gatherer.wait_param_sync
        self.unshard, self.reshard = gatherer.unshard, gatherer.reshard

    def first_bucket_grad(self) -> Tensor:
        """Of the reduced ones, what this rank owns of the first bucket."""
        return self.grads.owned(self.layout.buckets[0])

    def first_bucket_weight(self) -> Tensor:
        """The first bucket, once no weight is on its way; of one that comes and goes what this rank owns."""
        self.wait_param_sync()
        bucket = self.layout.buckets[0]
        return self.weights.full(bucket) if self.weights.is_resident(bucket) else self.weights.owned(bucket)
