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
from megalite.optim.bucket_rule import rules_for
from megalite.optim.flat_storage import FlatStorage, main_dtype
from megalite.optim.grad_reduce import GradReduce
from megalite.optim.layout import Entry, Layout, lay_out
from megalite.optim.param_gather import ParamGather
from megalite.parallel.mesh import Mesh

DEFAULT_BUCKET_SIZE = 40_000_000  # elements


def lay_out_chunks(
    chunks: Sequence[nn.Module], mesh: Mesh, bucket_size: int | None = None, **apart: bool
) -> tuple[list[nn.Parameter], Layout]:
    """The parameters of `chunks`, each once, and where they lie: entry i of the layout is parameter i. `apart`: what
    lies apart (optim/layout.py: lay_out)."""
    found: dict[int, tuple[int, nn.Parameter]] = {}
    for chunk, module in enumerate(chunks):
        for p in module.parameters():
            found.setdefault(id(p), (chunk, p))
    parameters = [p for _, p in found.values()]
    entries = [Entry(spec_of(p), p.numel(), chunk, getattr(p, "unit", "")) for chunk, p in found.values()]
    size = DEFAULT_BUCKET_SIZE if bucket_size is None else bucket_size
    return parameters, lay_out(entries, bucket_size=size, sizes=mesh.sizes, **apart)


class Shared(NamedTuple):
    """What data-parallel ranks share out beside what the optimizer keeps (arXiv:1910.02054).

    stage      2: gradients of matrices come and go, 3: their weights, too
    by_chunk   these weights come for a run of a chunk, not for each unit
    once_more  replicas share out among them what the optimizer keeps
    on_host    weights that come do so from host memory
    """

    stage: int = 1
    by_chunk: bool = False
    once_more: bool = False
    on_host: bool = False


class ParamBuffer:
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
        shared: Shared = Shared(),  # noqa: B008 (frozen)
        **apart: bool,
    ):
        self.every_run, self.by_chunk = shared.stage > 1, shared.by_chunk
        self.parameters, self.layout = lay_out_chunks(chunks, mesh, bucket_size, by_unit=shared.stage > 1, **apart)
        parameters, layout = self.parameters, self.layout
        dtypes, device = {p.dtype for p in parameters}, parameters[0].device
        if len(dtypes) != 1:
            raise ValueError(f"parameters have dtypes {sorted(map(str, dtypes))}, a buffer has one: build them alike")
        dtype = dtypes.pop()
        self.mesh, self.rules = mesh, rules_for(layout, mesh, reduce_in_bf16, shared.once_more)
        self.weights = FlatStorage(layout, self.rules, dtype, device, parameters, shared.stage > 2, shared.on_host)
        self.grads = FlatStorage(layout, self.rules, main_dtype(dtype), device, elastic=shared.stage > 1)
        self.grad_reduce = reduce = GradReduce(parameters, self.grads, overlap_grad_reduce)
        how = overlap_param_gather, shared.by_chunk
        self.param_gather = gather = ParamGather(parameters, self.weights, chunks, *how)
        # what the others call
        self.sinks, self.begin_all, self.finish = reduce.sinks, reduce.begin_all, reduce.finish
        self.on_last_backward, self.after_run = reduce.on_last_backward, reduce.after_run
        self.gather, self.wait_gather = gather.gather, gather.wait
        self.come, self.go = gather.come, gather.go

    def first_gradient(self) -> Tensor:
        """Of the reduced ones, what this rank owns of the first bucket."""
        return self.grads.owned(self.layout.buckets[0])

    def first_weights(self) -> Tensor:
        """The first bucket, once no weight is on its way; of one that comes and goes what this rank owns."""
        self.wait_gather()
        bucket = self.layout.buckets[0]
        return self.weights.whole(bucket) if self.weights.stays(bucket) else self.weights.owned(bucket)
