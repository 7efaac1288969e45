"""Foreign tensors as rectangles of ours: the rules of a family (models/families.toml) at a model's shapes. Pure.

    theirs c_attn.weight [D, 3 D]  = columns of   q [D, D]   kv[0] [D, D]   kv[1] [D, D]      GPT-2
    theirs query_key_value [G (H/G + 2) K, D]  = per group   H/G queries, a key, a value      NeoX, Megatron-LM

A `Recipe` makes one foreign tensor, or one tp rank's shard of it, of ours: the `ParamSpec` of ours says how it is
split, stacked and padded, so the shards of a foreign checkpoint need no table of their own. `split` cuts a foreign
tensor into our rectangles, `join` puts them together; each is the other's inverse, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.models.family import Naming, TensorRule
from megalite.parallel.spec import Box, ParamSpec

Specs = Mapping[str, ParamSpec]
Part = tuple[ParamSpec, Box]  # a parameter of ours and a rectangle of it


@dataclass(frozen=True)
class Recipe:
    """`theirs` of `shape` is made of `parts` in order; `groups`: G of form "groups". `copy`: it repeats another foreign
    tensor (a head tied to the embedding), and files may lack it."""

    theirs: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    form: str
    groups: int
    copy: bool


def _rows(box: Box, spec: ParamSpec) -> tuple[int, ...]:
    """The shape that a rectangle of ours has in a foreign tensor: stacked matrices one below the other."""
    return (box.shape[0] * box.shape[1], *box.shape[2:]) if spec.stacked else box.shape


def _part(reference: str, specs: Specs, tp: int, rank: int) -> Part | None:
    """NAME or NAME[i] as a rectangle on tp rank `rank` of `tp`; None where there is no such parameter."""
    name, _, index = reference.partition("[")
    if name not in specs:
        return None
    box = specs[name].box({"tp": tp}, {"tp": rank})
    if index:
        half = int(index[:-1])
        box = Box((half, *box.start[1:]), (half + 1, *box.stop[1:]))
    return specs[name], box


def recipes(naming: Naming, specs: Specs, groups: int, layers: range, *, tp: int = 1, rank: int = 0) -> list[Recipe]:
    """The foreign tensors of `specs`, a model or a stage with `layers`, as tp rank `rank` of `tp` holds them. Foreign
    layer numbers count from `layers.start`. Raises CheckpointError where a parameter has no foreign name."""
    result, named = [], set()
    for rule in naming.rules:
        for n in layers if "{n}" in rule.theirs else (0,):
            for copy, references in ((False, rule.ours), (True, rule.copied)):
                parts = [_part(reference.format(n=n), specs, tp, rank) for reference in references]
                kept = tuple(part for part in parts if part is not None)
                if kept and len(kept) == len(parts):
                    result.append(_recipe(rule, rule.theirs.format(n=n - layers.start), kept, groups // tp, copy))
                    named |= {spec.name for spec, _ in kept}
                    break
    if missing := sorted(set(specs) - named):
        raise CheckpointError(f"{naming.name} has no name for {', '.join(missing[:5])}; choose another family")
    return result


def _recipe(rule: TensorRule, theirs: str, parts: tuple[Part, ...], groups: int, copy: bool) -> Recipe:
    shapes = [_rows(box, spec) for spec, box in parts]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:])
    return Recipe(theirs, shape[::-1] if rule.form == "columns" else shape, parts, rule.form, groups, copy)


def split(recipe: Recipe, theirs: Tensor) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """(our parameter, rectangle, its values, a view if possible) for a tensor of `recipe.shape`."""
    rows = [_rows(box, spec)[0] for spec, box in recipe.parts]
    if recipe.form == "groups":
        pieces = theirs.unflatten(0, (recipe.groups, -1)).split([n // recipe.groups for n in rows], 1)
    else:
        pieces = (theirs.T if recipe.form == "columns" else theirs).split(rows)
    for (spec, box), piece in zip(recipe.parts, pieces, strict=True):
        yield spec, box, piece.reshape(box.shape)


def join(recipe: Recipe, read: Callable[[ParamSpec, Box], Tensor]) -> Tensor:
    """The foreign tensor, contiguous, from our rectangles, which `read` gives."""
    pieces = [read(spec, box).reshape(_rows(box, spec)) for spec, box in recipe.parts]
    if recipe.form == "groups":
        return torch.cat([p.unflatten(0, (recipe.groups, -1)) for p in pieces], 1).flatten(0, 1)
    upright = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return upright.T.contiguous() if recipe.form == "columns" else upright.contiguous()
