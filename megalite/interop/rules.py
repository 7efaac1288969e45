"""Foreign tensors as rectangles of ours: the rules of a family (models/families.py) applied to a model's shapes. Pure.

    theirs c_attn.weight [D, 3 D]  = columns of   q [D, D]   kv[0] [D, D]   kv[1] [D, D]      GPT-2
    theirs query_key_value [G (H/G + 2) K, D]  = per group   H/G queries, a key, a value      NeoX, Megatron-LM

An `Entry` is one foreign tensor, or one tp rank's shard of it: how a tensor of ours is split is read from its
`ParamSpec`, so the shards of a foreign checkpoint need no table of their own. `split` cuts a foreign tensor into our
rectangles, `join` puts it together from them; each is the other's inverse, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.pieces import intersect
from megalite.config.options import ModelConfig
from megalite.models.families import Family, Rule
from megalite.models.gpt import Stage
from megalite.nn.parameter import Maker, named_specs
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box, ParamSpec

STACKED = ("kv", "kv_bias", "gate_up", "gate_up_bias")  # [2, rows, ...]: foreign files hold the two one below the other
Specs = Mapping[str, ParamSpec]


@dataclass(frozen=True)
class Entry:
    """`theirs` of `shape` is made of `parts`, (our name, rectangle of it) in order; `groups`: G of form "groups"."""

    theirs: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Box], ...]
    form: str
    groups: int


def specs_of(model: ModelConfig, vocab_rows: int) -> dict[str, ParamSpec]:
    """Every parameter of the whole model by name, with `vocab_rows` rows in embedding and head; no memory is used."""
    make = Maker(Mesh.alone(), torch.float32, seed=0, meta=True)
    stage = Stage(make, model, [range(model.num_layers)], 0, vocab_size=vocab_rows, padded_vocab_size=vocab_rows)
    return {spec.name: spec for spec, _ in named_specs(stage)}


def _rows(box: Box, name: str) -> tuple[int, ...]:
    """The shape that a rectangle of ours has in a foreign tensor: stacked halves one below the other."""
    stacked = name.rsplit(".", 1)[-1] in STACKED
    return (box.shape[0] * box.shape[1], *box.shape[2:]) if stacked else box.shape


def _part(reference: str, specs: Specs, tp: int, rank: int) -> tuple[str, Box] | None:
    """NAME or NAME[i] as (name, rectangle) on tp rank `rank` of `tp`; None where the model has no such parameter."""
    name, _, index = reference.partition("[")
    if name not in specs:
        return None
    box = specs[name].box({"tp": tp}, {"tp": rank})
    if index:
        half = int(index[:-1])
        box = Box((half, *box.start[1:]), (half + 1, *box.stop[1:]))
    return name, box


def entries(family: Family, specs: Specs, groups: int, layers: range, *, tp: int = 1, rank: int = 0) -> list[Entry]:
    """The foreign tensors of `layers` and of what is outside the layers, as tp rank `rank` of `tp` holds them.

    Foreign layer numbers count from `layers.start`. Raises CheckpointError where a parameter of the model has no name
    in the family.
    """
    found, named = [], set()
    for rule in family.rules:
        for n in layers if "{n}" in rule.theirs else (0,):
            parts = [_part(reference.format(n=n), specs, tp, rank) for reference in rule.ours]
            kept = tuple(part for part in parts if part is not None)
            if len(kept) == len(parts):
                found.append(_entry(rule, rule.theirs.format(n=n - layers.start), kept, groups // tp))
                named |= {name for name, _ in kept}
    wanted = {name for name in specs if not name.startswith("layers.") or int(name.split(".")[1]) in layers}
    if missing := sorted(wanted - named):
        raise CheckpointError(f"{family.name} has no name for {', '.join(missing[:5])}; choose another family")
    return found


def _entry(rule: Rule, theirs: str, parts: tuple[tuple[str, Box], ...], groups: int) -> Entry:
    shapes = [_rows(box, name) for name, box in parts]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:])
    return Entry(theirs, shape[::-1] if rule.form == "columns" else shape, parts, rule.form, groups)


def split(entry: Entry, theirs: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
    """(our name, rectangle, its values, a view where that is possible) for a tensor of `entry.shape`."""
    if entry.form == "groups":
        rows = [box.shape[-1 if len(entry.shape) == 1 else -2] // entry.groups for _, box in entry.parts]
        pieces = list(theirs.unflatten(0, (entry.groups, sum(rows))).split(rows, 1))
    else:
        upright = theirs.T if entry.form == "columns" else theirs
        pieces = list(upright.split([_rows(box, name)[0] for name, box in entry.parts], 0))
    for (name, box), piece in zip(entry.parts, pieces, strict=True):
        yield name, box, piece.reshape(box.shape)


def join(entry: Entry, read: Callable[[str, Box], Tensor]) -> Tensor:
    """The foreign tensor, contiguous, of what `read` gives for our rectangles."""
    pieces = [read(name, box).reshape(_rows(box, name)) for name, box in entry.parts]
    if entry.form == "groups":
        return torch.cat([p.unflatten(0, (entry.groups, -1)) for p in pieces], 1).flatten(0, 1)
    upright = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return upright.T.contiguous() if entry.form == "columns" else upright.contiguous()


def trimmed(name: str, box: Box, vocab_size: int) -> Box | None:
    """Without the rows that pad the vocabulary; None where nothing is left."""
    if name not in ("embedding.word", "head"):
        return box
    return intersect(box, Box((0, *box.start[1:]), (vocab_size, *box.stop[1:])))
