"""Foreign tensors as rectangles of ours: the rules of a family (models/families.toml) at a model's shapes. Pure.

    theirs c_attn.weight [D, 3 D]  = columns of   q [D, D]   kv[0] [D, D]   kv[1] [D, D]      GPT-2
    theirs query_key_value [G (H/G + 2) K, D]  = per group   H/G queries, a key, a value      NeoX, Megatron-LM

A `Recipe` makes one foreign tensor, or one rank's shard of it, of ours: the `ParamSpec` of ours says how it is split,
stacked and padded, so the shards of a foreign checkpoint need no table of their own. `split` cuts a foreign
tensor into our rectangles, `join` puts them together; each is the other's inverse, bit for bit.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.models.families import Naming, TensorRule
from megalite.parallel.spec import Box, ParamSpec

Specs = Mapping[str, ParamSpec]
Part = tuple[ParamSpec, Box]  # a parameter of ours and a rectangle of it
BoxOf = Callable[[ParamSpec], Box]
WHOLE: BoxOf = methodcaller("box", {}, {})  # of a rank that is alone


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


def _shape(box: Box, spec: ParamSpec, form: str) -> tuple[int, ...]:
    """The shape that a rectangle of ours has in a foreign tensor: stacked matrices one below the other."""
    shape = box.shape
    if form == "row":
        return (1, *shape)
    if form == "experts":
        return (shape[0], math.prod(shape[1:-1]), shape[-1])
    stacked = len(shape) - 2 if spec.home == "expert" else int(spec.stacked)
    return (math.prod(shape[: stacked + 1]), *shape[stacked + 1 :])


def box_on(sizes: Mapping[str, int], ranks: Mapping[str, int]) -> BoxOf:
    """What the rank at position `ranks` holds; `sizes` of axes."""
    return lambda spec: spec.box(sizes, ranks)


def _part(reference: str, specs: Specs, box_of: BoxOf) -> Part | None:
    """NAME, NAME[i] or NAME[e,i] as a rectangle of what the rank has; None where there is no such parameter."""
    name, _, index = reference.partition("[")
    if name not in specs:
        return None
    box = box_of(specs[name])
    chosen = tuple(a + int(i) for a, i in zip(box.start, index[:-1].split(","), strict=False)) if index else ()
    rest = len(chosen)
    return specs[name], Box((*chosen, *box.start[rest:]), (*(i + 1 for i in chosen), *box.stop[rest:]))


def _numbers(rule: TensorRule, specs: Specs, box_of: BoxOf, layers: range) -> Iterator[tuple[int, int]]:
    """The layer n and the expert e of every tensor of a rule; e counts from the rank's first expert."""
    for n in layers if "{n}" in rule.theirs else (0,):
        part = _part(rule.ours[0].partition("[")[0].format(n=n), specs, box_of) if "{e}" in rule.theirs else None
        experts = 1 if "{e}" not in rule.theirs else 0 if part is None else part[1].shape[0]
        yield from ((n, e) for e in range(experts))


def recipes(
    naming: Naming, specs: Specs, groups: int, layers: range, *, box_of: BoxOf = WHOLE, found: Container[str] = ()
) -> list[Recipe]:
    """The foreign tensors of `specs`, a model or a stage with `layers`, of a rank that has `groups` of keys and values,
    and of each parameter the rectangle `box_of`. Foreign numbers count from its first layer and expert. `found`: the
    files' names, which may be those of `others`. Raises CheckpointError where a parameter has no foreign name."""
    result, named, replaced = list[Recipe](), set[str](), set[str]()
    for rules in (naming.others, naming.rules):
        for rule in rules:
            for n, e in _numbers(rule, specs, box_of, layers):
                theirs = rule.theirs.format(n=n - layers.start, e=e)
                if rules is naming.others and theirs not in found:
                    continue
                for copy, references in ((False, rule.ours), (True, rule.copied)):
                    parts = [_part(reference.format(n=n, e=e), specs, box_of) for reference in references]
                    kept = tuple(part for part in parts if part is not None)
                    names = {spec.name for spec, _ in kept}
                    if kept and len(kept) == len(parts) and not names & replaced:
                        result.append(_recipe(rule, theirs, kept, groups, copy))
                        named |= names
                        break
        replaced = set(named)
    if missing := sorted(set(specs) - named):
        raise CheckpointError(f"{naming.name} has no name for {', '.join(missing[:5])}; choose another family")
    return result


def _recipe(rule: TensorRule, theirs: str, parts: tuple[Part, ...], groups: int, copy: bool) -> Recipe:
    shapes = [_shape(box, spec, rule.form) for spec, box in parts]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:])
    return Recipe(theirs, shape[::-1] if rule.form == "columns" else shape, parts, rule.form, groups, copy)


def split(recipe: Recipe, theirs: Tensor) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """(our parameter, rectangle, its values, a view if possible) for a tensor of `recipe.shape`."""
    rows = [_shape(box, spec, recipe.form)[0] for spec, box in recipe.parts]
    if recipe.form == "groups":
        pieces = theirs.unflatten(0, (recipe.groups, -1)).split([n // recipe.groups for n in rows], 1)
    else:
        pieces = (theirs.T if recipe.form == "columns" else theirs).split(rows)
    for (spec, box), piece in zip(recipe.parts, pieces, strict=True):
        yield spec, box, piece.reshape(box.shape)


def join(recipe: Recipe, read: Callable[[ParamSpec, Box], Tensor]) -> Tensor:
    """The foreign tensor, contiguous, from our rectangles, which `read` gives."""
    pieces = [read(spec, box).reshape(_shape(box, spec, recipe.form)) for spec, box in recipe.parts]
    if recipe.form == "groups":
        return torch.cat([p.unflatten(0, (recipe.groups, -1)) for p in pieces], 1).flatten(0, 1)
    upright = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return upright.T.contiguous() if recipe.form == "columns" else upright.contiguous()
