"""The chunks of the model that a rank has. `made`: an Arrangement (arrangement.py, which imports this)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.models.gpt import Block, Stage
from megalite.nn.parameter import Maker, named_specs
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import HOMES, ParamSpec


def build_stages(made: Any, mesh: Mesh, dtype: torch.dtype, meta: bool = False, deferred: bool = False) -> list[Stage]:
    """The chunks of the model on this rank; `meta`, `deferred`: as a Maker has it."""
    make = Maker(mesh, dtype, made.config.train.seed, meta, deferred)
    return [build_stage(made, make, made.stages, s) for s in made.placement.stages(mesh.pp.rank)]


def build_stage(made: Any, make: Maker, layers: Sequence[range], number: int) -> Stage:
    return Stage(
        make,
        made.config.model,
        layers,
        number,
        vocab_size=made.vocab_size,
        padded_vocab_size=made.padded_vocab,
        recompute=made.recompute,
        z_loss=made.config.train.z_loss_coeff,
    )


def elements_of(block: Block) -> tuple[int, ...]:
    """The number of elements of its parameters on this rank, by home in the order of HOMES."""
    specs = list(named_specs(block))
    return tuple(sum(p.numel() for spec, p in specs if spec.home == home) for home in HOMES)


def parameters_of(specs: Mapping[str, ParamSpec]) -> Counter[str]:
    """The number of parameters by their home, without padding."""
    return sum((Counter({spec.home: math.prod(spec.stored_shape)}) for spec in specs.values()), Counter())
