"""The chunks of the model that a rank has. `made`: an Arrangement (arrangement.py, which imports this)."""

from collections.abc import Sequence
from typing import Any

import torch

from megalite.models.gpt import Stage
from megalite.nn.parameter import Maker
from megalite.parallel.mesh import Mesh


def build_stages(made: Any, mesh: Mesh, dtype: torch.dtype, meta: bool = False, deferred: bool = False) -> list[Stage]:
    """The chunks of the model on this rank; `meta`, `deferred`: as a Maker has it."""
    make = Maker(mesh, dtype, made.config.train.seed, meta, deferred)
    return [build_stage(made, make, made.stages, s) for s in made.placement.stages(mesh.pp.rank)]


def build_stage(made: Any, make: Maker, layers: Sequence[range], number: int) -> Stage:
    rows = dict(vocab_size=made.vocab_size, padded_vocab_size=made.padded_vocab)
    more = dict(recompute=made.recompute, z_loss=made.config.train.z_loss_coeff)
    return Stage(make, made.config.model, layers, number, **rows, **more)
