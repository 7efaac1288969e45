"""What a rank would hold at every ZeRO stage, of the layers that it has at its own."""

from dataclasses import replace

from megalite.optim.buffer import lay_out_chunks
from megalite.plan.arrangement import Arrangement, build_stages
from megalite.plan.holding import Holding, Shares

SHARED_PARTS = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")


def by_stage(made: Arrangement) -> list[Holding]:
    """At stages 0 to 3, of the pipeline rank that holds the most."""
    chunks = build_stages(made, made.mesh_of(made.worst), made.dtype, meta=True)
    o, found = made.config.optim, list[Holding]()
    for stage in range(len(SHARED_PARTS)):
        p = replace(made.config.parallel, zero_stage=stage)
        mesh = replace(made, config=replace(made.config, parallel=p)).mesh_of(made.worst)
        _, layout = lay_out_chunks(chunks, mesh, p.ddp_bucket_size, by_unit=stage > 1, **o.apart)
        found.append(Holding.of(layout, mesh, Shares.of(p, mesh), made.bytes_of_element, o))
    return found
