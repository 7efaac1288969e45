"""Foreign tensors as rectangles of ours, by the rules of a family (models/families.toml) at a model's shapes: foreign
weights straight into a rank's pieces, and tensors of a megalite checkpoint in foreign form.

    theirs c_attn.weight [D, 3 D]  = columns of   q [D, D]   kv[0] [D, D]   kv[1] [D, D]      GPT-2
    theirs query_key_value [G (H/G + 2) K, D]  = per group   H/G queries, a key, a value      NeoX, Megatron-LM

A `Recipe` makes one foreign tensor, or one rank's shard of it, of ours: the `ParamSpec` of ours says how it is split,
stacked and padded, so the shards of a foreign checkpoint need no table of their own. `split` cuts a foreign tensor into
our rectangles, `join` puts them together; each is the other's inverse, bit for bit. A foreign checkpoint is a list of
`Foreign`: which tensor, in which dtype, and how to read it; tools/export_files.py makes a megalite checkpoint of it.
"""

import math
import os
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.safetensors_file import CODES, shard_views
from megalite.checkpoint.offline import Checkpoint
from megalite.common.safe_open import remove
from megalite.config.console import logged_progress
from megalite.config.options import ConfigError, ModelConfig, build
from megalite.config.validation import find_problems
from megalite.interop.name_mapping import TensorNames, TensorRule
from megalite.parallel.spec import Box, ParamSpec, TensorShard, intersect, slices_within

Specs = Mapping[str, ParamSpec]
Part = tuple[ParamSpec, Box]  # a parameter of ours and a rectangle of it
BoxOf = Callable[[ParamSpec], Box]
# options of a run beside its model, so that `check` finds the model's problems alone
PLACEHOLDER_OPTIONS: dict[str, Any] = {
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 1.0,
    "mock_data": True,
    "vocab_size": 1,
}
# what a wrapper puts into the names of tensors -> what to do about it; "": any other prefix
WRAPPERS = {
    "_orig_mod.": "torch.compile puts that there: save the model that was compiled (its _orig_mod)",
    "_fsdp_wrapped_module.": "FSDP puts that there: save the full state_dict of the wrapped model",
    "_checkpoint_wrapped_module.": "activation checkpointing puts that there: save the model without its wrapper",
    "base_model.model.": "peft puts that there: save the result of merge_and_unload",
    "module.": "DistributedDataParallel puts that there: save the model's module",
    "": "rename the tensors",
}
MAX_LAYERS, MAX_EXPERTS = 10_000, 300_000  # of all layers; more is a damaged file, and would take long to refuse


@dataclass(frozen=True)
class TensorMapping:
    """`theirs` of `shape` is made of `parts` in order; `groups`: G of form "groups". `copy`: it repeats another foreign
    tensor (a head tied to the embedding), and files may lack it."""

    external_name: str
    parts: tuple[Part, ...]
    form: str
    groups: int
    is_duplicate: bool

    @cached_property
    def shape(self) -> tuple[int, ...]:
        shapes = [_shape(box, spec, self.form) for spec, box in self.parts]
        upright = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return upright[::-1] if self.form == "columns" else upright


def _shape(box: Box, spec: ParamSpec, form: str) -> tuple[int, ...]:
    """The shape that a rectangle of ours has in a foreign tensor: stacked matrices one below the other."""
    shape = box.shape
    if form == "row":
        return (1, *shape)
    if form == "experts":
        return (shape[0], math.prod(shape[1:-1]), shape[-1])
    if form == "reversed":
        *first, last = shape[:0:-1]
        in_turns = len(spec.shape) == (3 if spec.is_lookup else 4)  # gate and up: [E, 2, F, D], or biases [E, 2, F]
        return (shape[0], *first[:-1], first[-1] * last) if in_turns else (shape[0], *first, last)
    stacked = len(shape) - 2 if spec.mesh_view == "expert" else int(spec.stacked)
    return (math.prod(shape[: stacked + 1]), *shape[stacked + 1 :])


def _reversed(x: Tensor) -> Tensor:
    return x.permute(0, *range(x.dim() - 1, 0, -1))


def box_for_rank(sizes: Mapping[str, int], ranks: Mapping[str, int]) -> BoxOf:
    """What the rank at position `ranks` holds; `sizes` of axes."""
    return lambda spec: spec.box(sizes, ranks)


UNSHARDED = box_for_rank({}, {})  # of a rank that is alone


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
    for n in layers if "{n}" in rule.external else (0,):
        part = _part(rule.params[0].partition("[")[0].format(n=n), specs, box_of) if "{e}" in rule.external else None
        experts = 1 if "{e}" not in rule.external else 0 if part is None else part[1].shape[0]
        yield from ((n, e) for e in range(experts))


def build_mappings(
    naming: TensorNames,
    specs: Specs,
    groups: int,
    layers: range,
    *,
    box_of: BoxOf = UNSHARDED,
    found: Container[str] = (),
) -> list[TensorMapping]:
    """The foreign tensors of `specs`, a model or a stage with `layers`, of a rank that has `groups` of keys and values,
    and of each parameter the rectangle `box_of`. Foreign numbers count from its first layer and expert. `found`: the
    files' names, which may be those of `others`. Raises CheckpointError where a parameter has no foreign name."""
    result, named, replaced = list[TensorMapping](), set[str](), set[str]()
    for rules in (naming.alternatives, naming.rules):
        for rule in rules:
            for n, e in _numbers(rule, specs, box_of, layers):
                external_name = rule.external.format(n=n - layers.start, e=e)
                if rules is naming.alternatives and external_name not in found:
                    continue
                for is_duplicate, references in ((False, rule.params), (True, rule.duplicates)):
                    parts = [_part(reference.format(n=n, e=e), specs, box_of) for reference in references]
                    kept = tuple(part for part in parts if part is not None)
                    names = {spec.name for spec, _ in kept}
                    if kept and len(kept) == len(parts) and not names & replaced:
                        result.append(TensorMapping(external_name, kept, rule.form, groups, is_duplicate))
                        named |= names
                        break
        replaced = set(named)
    if missing := sorted(set(specs) - named):
        raise CheckpointError(f"{naming.name} has no name for {', '.join(missing[:5])}; choose another family")
    return result


def split(recipe: TensorMapping, external_name: Tensor) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """(our parameter, rectangle, its values, a view if possible) for a tensor of `recipe.shape`."""
    rows = [_shape(box, spec, recipe.form)[0] for spec, box in recipe.parts]
    if recipe.form == "groups":
        pieces = external_name.unflatten(0, (recipe.groups, -1)).split([n // recipe.groups for n in rows], 1)
    else:
        pieces = (external_name.T if recipe.form == "columns" else external_name).split(rows)
    for (spec, box), piece in zip(recipe.parts, pieces, strict=True):
        if recipe.form == "reversed":
            piece = _reversed(piece.reshape(box.shape[0], *box.shape[:0:-1]))
        yield spec, box, piece.reshape(box.shape)


def join(recipe: TensorMapping, read: Callable[[ParamSpec, Box], Tensor]) -> Tensor:
    """The foreign tensor, contiguous, from our rectangles, which `read` gives."""
    turned = _reversed if recipe.form == "reversed" else lambda x: x
    pieces = [turned(read(spec, box)).reshape(_shape(box, spec, recipe.form)) for spec, box in recipe.parts]
    if recipe.form == "groups":
        return torch.cat([p.unflatten(0, (recipe.groups, -1)) for p in pieces], 1).flatten(0, 1)
    upright = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return upright.T.contiguous() if recipe.form == "columns" else upright.contiguous()


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a foreign file: `load()` gives it; `place` names it in messages. `dtype`: text if torch has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    place: str
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class ExternalTensor:
    """A foreign tensor: `load()` gives it, in recipe.shape and `dtype`; `place` names it in messages."""

    recipe: TensorMapping
    dtype: torch.dtype
    place: str
    load: Callable[[], Tensor]

    def read(self) -> Tensor:
        """Its values. Raises CheckpointError unless all are finite."""
        values = self.load()
        if bad := values.numel() - int(values.isfinite().sum()):
            first = values[~values.isfinite()][0]
            wrong = f"{bad:,} of {values.numel():,} values are not finite, the first is {first:g}"
            remedy = "training cannot begin with them: give another checkpoint"
            raise CheckpointError(f"{self.place}: {wrong}; {remedy}")
        return values


def check_wrapped(stored: Collection[str], wanted: Collection[str], title: str) -> None:
    """Raises CheckpointError where most tensors have their names with a word of a wrapper in them, as torch.compile's,
    or behind a prefix."""
    words = Counter(_extra_word(name, wanted) for name in stored if name not in wanted)
    words.pop("", None)
    for word, count in words.most_common(1):
        if 2 * count > len(stored):
            remedy = next(remedy for known, remedy in WRAPPERS.items() if known in word)
            raise CheckpointError(f"{title}: the names of {count} tensors have {word!r} too much; {remedy}")


def _extra_word(name: str, wanted: Collection[str]) -> str:
    """What to take out of a name for it to be wanted: a word of a wrapper anywhere, or all that is before it."""
    for word in WRAPPERS:
        if word and name.replace(word, "") in wanted:
            return word
    bare = name
    while bare:
        bare = bare.partition(".")[2]
        if bare in wanted:
            return name.removesuffix(bare)
    return ""


def match_tensors(
    ranks: Sequence[tuple[Mapping[str, FileTensor], Sequence[TensorMapping]]],
    title: str,
    remedy: str,
    problems: Sequence[str] = (),
) -> list[ExternalTensor]:
    """Every tensor once, of the tensors and recipes of each tp rank. Several can hold the same part of ours, as copies
    of a norm do, or a head that is tied to the embedding; then they must be equal. Raises CheckpointError: `title`,
    `problems` and all that is missing, unknown, or of another shape or type, or else what differs, and `remedy`."""
    lines, result = list(problems), list[ExternalTensor]()
    for found, build_mappings in ranks:
        check_wrapped(found, {recipe.external_name for recipe in build_mappings}, title)
        wanted = {recipe.external_name: recipe for recipe in build_mappings}
        lines += [f"{name} is missing" for name, r in wanted.items() if not r.is_duplicate and name not in found]
        for name, one in found.items():
            if name not in wanted:
                lines.append(f"{one.place}: not a tensor of this model")
            elif not isinstance(one.dtype, torch.dtype) or one.dtype not in CODES:
                lines.append(f"{one.place}: {one.dtype} is not a floating-point type that megalite has")
            elif one.shape != wanted[name].shape:
                lines.append(f"{one.place}: shape {one.shape}, not {wanted[name].shape}")
            else:
                result.append(ExternalTensor(wanted[name], one.dtype, one.place, one.load))
    raise_problems(lines, title)
    firsts: dict[tuple[tuple[str, Box], ...], ExternalTensor] = {}
    for one in sorted(result, key=lambda one: one.recipe.is_duplicate):
        first = firsts.setdefault(tuple((spec.name, box) for spec, box in one.recipe.parts), one)
        if one is not first and not torch.equal(one.read(), first.read()):
            lines.append(f"{one.place} differs from {first.place}, which it repeats; {remedy}")
    raise_problems(lines, title)
    return list(firsts.values())


@dataclass(frozen=True)
class ExternalModel:
    """An opened model of another program. `name`: its family, or the checkpoint's. `options`: of its configuration.
    `rows`: of embedding and head. Of Megatron-LM's, whose vocabulary may be padded: `args` as they were saved, and
    `ranks`, the tensors of each rank of tp and ep."""

    folder: Path
    name: str
    options: dict[str, Any]
    model: ModelConfig
    rows: int
    tensors: Sequence[ExternalTensor]
    args: Namespace | None = None
    ranks: Mapping[tuple[int, int], Mapping[str, FileTensor]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """That of most tensors."""
        return Counter(one.dtype for one in self.tensors).most_common(1)[0][0]


def raise_problems(problems: Sequence[str], title: str) -> None:
    """Raises CheckpointError if there are problems: the title, then a line for each."""
    if problems:
        rest = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CheckpointError("\n  ".join([f"{title}:", *problems[:20], *rest]))


def build_model_config(options: dict[str, Any], where: str) -> ModelConfig:
    """The model of options from a file. Raises CheckpointError for values that no model can have."""
    try:
        model = build({name: value for name, value in options.items() if name != "vocab_size"}).model
    except ConfigError as error:
        raise CheckpointError(f"{where}: {'; '.join(error.problems)}; it is damaged") from None
    values = {f.name: getattr(model, f.name) for f in fields(model)}
    large = [f"{name}={value}" for name, value in values.items() if isinstance(value, int) and value >= 1 << 31]
    if model.num_layers > MAX_LAYERS or model.num_layers * (model.num_experts or 1) > MAX_EXPERTS:
        large += [f"num_layers={model.num_layers}", f"num_experts={model.num_experts}"]
    if large:
        raise CheckpointError(f"{where}: {', '.join(large)} is out of range; it is damaged")
    if problems := find_problems(replace(build(PLACEHOLDER_OPTIONS), model=model)):
        reasons = "; ".join(str(problem).partition("; ")[0] for problem in problems)  # remedies are for options
        raise CheckpointError(f"{where}: {reasons}; megalite has no such model: convert another one")
    return model


def load_external_weights(
    foreign: Sequence[ExternalTensor], pieces: Sequence[TensorShard], specs: Specs, where: str, tell: bool
) -> None:
    """Write the values of `foreign`, a model of `specs`, into the data of pieces, named KIND/NAME, under any layout.
    Every rank reads the tensors that it holds a part of. `tell`: show the progress. Raises CheckpointError, before
    anything changes where shapes differ, later where a file cannot be read."""
    problems: list[str] = []
    wanted: dict[str, list[tuple[Box, Tensor]]] = {}
    for piece in pieces:
        name = piece.name.partition("/")[2]
        wanted.setdefault(name, []).extend(shard_views(piece))
        external_name = specs[name].shape if name in specs else "nothing"
        if piece.shape != external_name:
            problems.append(f"{name}: shape {piece.shape} here, {external_name} there")
    raise_problems(list(dict.fromkeys(problems)), f"{where} does not fit this model")
    with logged_progress(f"loading {where}", len(foreign), "tensors", not tell) as bar:
        for one in bar.track(foreign):
            _fill(one, wanted)


def _fill(one: ExternalTensor, wanted: Mapping[str, Sequence[tuple[Box, Tensor]]]) -> None:
    if all(intersect(held, box) is None for spec, box in one.recipe.parts for held, _ in wanted.get(spec.name, ())):
        return
    for spec, box, values in split(one.recipe, one.read()):
        for held, target in wanted.get(spec.name, ()):
            if (both := intersect(held, box)) is not None:
                target[slices_within(both, held)] = values[slices_within(both, box)].to(target)


@contextmanager
def atomic_directory(folder: Path) -> Iterator[Path]:
    """An empty directory to fill, which becomes `folder` when the block ends, and is deleted after an error. Raises
    CheckpointError if `folder` is not empty or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; give a new directory")
    part = folder.with_name(f".{folder.name}.part")
    try:
        remove(part)
        part.mkdir(parents=True)
        yield part
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); give a directory elsewhere") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class ExportSource:
    """Our side of an export: rectangles in `dtype`; None: as stored. For fp32 the more exact main weights are read.
    `used`: the model's specs, for a format with values as they are used: a stored difference gets its offset back."""

    source: Checkpoint
    dtype: torch.dtype | None = None
    used: Specs | None = None

    def _key(self, name: str) -> str:
        kinds = ("state", "optimizer.main") if self.dtype == torch.float32 else ("state",)
        keys = [key for kind in kinds if (key := f"{kind}/{name}") in self.source.manifest.tensors]
        return keys[0] if keys else f"model/{name}"

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype or self.source.dtype(self._key(name))

    def offset(self, name: str) -> float:
        return 0.0 if self.used is None else self.used[name].stored_offset

    def read(self, name: str, box: Box) -> Tensor:
        values = self.source.read(self._key(name), box)
        if offset := self.offset(name):
            values = values + offset
        return values if self.dtype is None else values.to(self.dtype)

    def join(self, recipe: TensorMapping) -> Tensor:
        return join(recipe, lambda spec, box: self.read(spec.name, box))
