"""The mapping between external tensors and rectangles of megalite's parameters.

The rules of a family (models/families.toml) and the shapes of a model determine it. It is used to load external weights
directly into the shards of a rank, and to write the tensors of a megalite checkpoint in an external format.

    external c_attn.weight [D, 3 D]  = columns of   q [D, D]   kv[0] [D, D]   kv[1] [D, D]    GPT-2
    external query_key_value [G (H/G + 2) K, D]  = per group   H/G queries, a key, a value    NeoX, Megatron-LM

A `TensorMapping` describes one external tensor, or one rank's shard of it, in terms of megalite's parameters. Their
`ParamSpec` says how they are split, stacked and padded, so the shards of an external checkpoint need no table of their
own. `split` cuts an external tensor into rectangles, and `join` combines them. Each is the exact inverse of the other,
bit for bit. An external checkpoint is a list of `ExternalTensor`: the mapping, the dtype, and how to read the tensor.
tools/export_files.py converts it into a megalite checkpoint.
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
from megalite.checkpoint.format.safetensors_file import WEIGHT_DTYPE_CODES, shard_views
from megalite.checkpoint.offline import Checkpoint
from megalite.common.console import logged_progress
from megalite.common.safe_open import remove
from megalite.config.options import ConfigError, ModelConfig, build
from megalite.config.validation import find_problems
from megalite.interop.name_mapping import TensorNames, TensorRule
from megalite.models.specs import model_specs
from megalite.parallel.spec import Box, ParamSpec, TensorShard, intersect, slices_within

Specs = Mapping[str, ParamSpec]
Part = tuple[ParamSpec, Box]  # a parameter of megalite, and a rectangle of it
BoxOf = Callable[[ParamSpec], Box]
# values for the required options besides the model's, so that `find_problems` only reports problems of the model
PLACEHOLDER_OPTIONS: dict[str, Any] = {
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 1.0,
    "mock_data": True,
    "vocab_size": 1,
}
# what a wrapper inserts into the names of tensors -> the remedy; "": any other prefix
WRAPPERS = {
    "_orig_mod.": "torch.compile puts that there: save the model that was compiled (its _orig_mod)",
    "_fsdp_wrapped_module.": "FSDP puts that there: save the full state_dict of the wrapped model",
    "_checkpoint_wrapped_module.": "activation checkpointing puts that there: save the model without its wrapper",
    "base_model.model.": "peft puts that there: save the result of merge_and_unload",
    "module.": "DistributedDataParallel puts that there: save the model's module",
    "": "rename the tensors",
}
COPY_REMEDY = (
    "depths of multi-token prediction share the model's embedding and head: set num_nextn_predict_layers to 0 in "
    "config.json to leave them out"
)
# forms whose rows are in groups that each have rows of all parameters
GROUPED_FORMS = ("groups", "heads", "key heads")
# Limits of the number of layers, and of experts in all layers. More means a damaged file, whose check would take long.
MAX_LAYERS, MAX_EXPERTS = 10_000, 300_000


@dataclass(frozen=True)
class TensorMapping:
    """An external tensor, and the rectangles of megalite's parameters that it consists of.

    Attributes:
        external_name: Its name.
        parts: The rectangles in order.
        form: The layout of the rectangles in the tensor (see TensorRule).
        groups: The number of groups of rows, for the forms in GROUPED_FORMS.
        is_duplicate: It repeats another external tensor (a head tied to the embedding), and files may omit it.
        is_written: An export writes it. False for the head of a tied embedding.
    """

    external_name: str
    parts: tuple[Part, ...]
    form: str
    groups: int
    is_duplicate: bool
    is_written: bool = True

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the external tensor."""
        shapes = [_external_shape(box, spec, self.form) for spec, box in self.parts]
        row_shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return row_shape[::-1] if self.form == "columns" else row_shape


def _external_shape(box: Box, spec: ParamSpec, form: str) -> tuple[int, ...]:
    """Return the shape of a rectangle within an external tensor, in which stacked matrices are one below the other."""
    shape = box.shape
    if form == "row":
        return (1, *shape)
    if form == "heads of four dims":
        return (1, 1, *shape, 1)
    if form == "filters":
        return (math.prod(shape[:-1]), 1, shape[-1])
    if form == "experts":
        return (shape[0], math.prod(shape[1:-1]), shape[-1])
    if form == "reversed":
        *first, last = shape[:0:-1]
        is_interleaved = len(spec.shape) == (3 if spec.is_lookup else 4)  # gate and up: [E, 2, F, D], biases [E, 2, F]
        return (shape[0], *first[:-1], first[-1] * last) if is_interleaved else (shape[0], *first, last)
    num_stacked = len(shape) - 2 if spec.mesh_view == "expert" else int(spec.stacked)
    return (math.prod(shape[: num_stacked + 1]), *shape[num_stacked + 1 :])


def _reverse_inner_dims(x: Tensor) -> Tensor:
    """Reverse all dims of `x` but the first."""
    return x.permute(0, *range(x.dim() - 1, 0, -1))


def box_for_rank(sizes: Mapping[str, int], ranks: Mapping[str, int]) -> BoxOf:
    """Return a function that maps a parameter to the box of the rank at the coordinates `ranks`.

    `sizes` are the sizes of the axes.
    """
    return lambda spec: spec.box(sizes, ranks)


UNSHARDED = box_for_rank({}, {})  # the full parameter, on a single rank


def _resolve_reference(reference: str, specs: Specs, box_of: BoxOf) -> Part | None:
    """Return the rectangle of NAME, NAME[i] or NAME[e,i] on a rank, or None if there is no such parameter."""
    name, _, index = reference.partition("[")
    if name not in specs:
        return None
    box = box_of(specs[name])
    fixed = tuple(a + int(i) for a, i in zip(box.start, index[:-1].split(","), strict=False)) if index else ()
    num_fixed = len(fixed)
    return specs[name], Box((*fixed, *box.start[num_fixed:]), (*(i + 1 for i in fixed), *box.stop[num_fixed:]))


def _tensor_indices(rule: TensorRule, specs: Specs, box_of: BoxOf, layers: range) -> Iterator[tuple[int, int]]:
    """Yield (layer n, expert e) of every tensor of a rule. e counts from the rank's first expert."""
    has_experts = "{e}" in rule.external
    for n in layers if "{n}" in rule.external + rule.params[0] else (0,):
        num_experts = 1
        if has_experts:
            part = _resolve_reference(rule.params[0].partition("[")[0].format(n=n), specs, box_of)
            num_experts = 0 if part is None else part[1].shape[0]
        yield from ((n, e) for e in range(num_experts))


def build_mappings(
    naming: TensorNames,
    specs: Specs,
    groups: Mapping[str, int],
    layers: range,
    *,
    box_of: BoxOf = UNSHARDED,
    stored_names: Container[str] = (),
) -> list[TensorMapping]:
    """Return the mappings of all external tensors of a model.

    Args:
        naming: The tensor names of the family.
        specs: The parameters of the model.
        groups: The number of groups of the rank for each form of GROUPED_FORMS that the family has.
        layers: The layers of the model. The numbers of experts count from the first one of the rank.
        box_of: Maps a parameter to the rectangle that the rank has.
        stored_names: The names in the files, which may be those of `naming.alternatives`.

    Raises:
        CheckpointError: A parameter has no external name.
    """
    mappings: list[TensorMapping] = []
    named: set[str] = set()  # parameters that have a mapping
    replaced: set[str] = set()  # those with a mapping by an alternative rule
    for rules in (naming.alternatives, naming.rules):
        for rule in rules:
            for n, e in _tensor_indices(rule, specs, box_of, layers):
                external_name = naming.external_name(rule, n, e, specs)
                if rules is naming.alternatives and external_name not in stored_names:
                    continue
                is_copy = bool(rule.copied_for)
                if is_copy and rule.copied_for.format(n=n) not in specs:
                    continue
                for is_tied, references in ((False, rule.params), (True, rule.duplicates)):
                    parts = [_resolve_reference(reference.format(n=n, e=e), specs, box_of) for reference in references]
                    existing = tuple(part for part in parts if part is not None)
                    names = {spec.name for spec, _ in existing}
                    if existing and len(existing) == len(parts) and not names & replaced:
                        is_duplicate, is_written = is_tied or is_copy, is_copy or not is_tied
                        num_parts = groups[rule.form] if rule.form in GROUPED_FORMS else 1
                        mappings.append(
                            TensorMapping(external_name, existing, rule.form, num_parts, is_duplicate, is_written)
                        )
                        named |= names
                        break
        replaced = set(named)
    if missing := sorted(set(specs) - named):
        raise CheckpointError(f"{naming.name} has no name for {', '.join(missing[:5])}; choose another family")
    return mappings


def num_groups(model: ModelConfig) -> dict[str, int]:
    """Return the number of groups of rows for each form of GROUPED_FORMS, on one rank."""
    return dict(
        zip(GROUPED_FORMS, (model.num_kv_groups, model.num_attention_heads, model.linear_num_key_heads), strict=True)
    )


def numbers_of_layers(model: ModelConfig) -> range:
    """Return the numbers of all layers, including those of depths of multi-token prediction."""
    return range(1 + max(number for number, _ in model.numbered_layers))


def split(mapping: TensorMapping, external: Tensor) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """Yield (parameter, rectangle, values) for an external tensor of `mapping.shape`.

    The values are views if possible.
    """
    rows = [_external_shape(box, spec, mapping.form)[0] for spec, box in mapping.parts]
    if mapping.form in GROUPED_FORMS:
        pieces = external.unflatten(0, (mapping.groups, -1)).split([n // mapping.groups for n in rows], 1)
    else:
        pieces = (external.T if mapping.form == "columns" else external).split(rows)
    for (spec, box), piece in zip(mapping.parts, pieces, strict=True):
        if mapping.form == "reversed":
            piece = _reverse_inner_dims(piece.reshape(box.shape[0], *box.shape[:0:-1]))
        yield spec, box, piece.reshape(box.shape)


def join(mapping: TensorMapping, read: Callable[[ParamSpec, Box], Tensor]) -> Tensor:
    """Return the external tensor, contiguous, from the rectangles that `read(parameter, box)` returns."""
    pieces = []
    for spec, box in mapping.parts:
        values = read(spec, box)
        if mapping.form == "reversed":
            values = _reverse_inner_dims(values)
        pieces.append(values.reshape(_external_shape(box, spec, mapping.form)))
    if mapping.form in GROUPED_FORMS:
        return torch.cat([piece.unflatten(0, (mapping.groups, -1)) for piece in pieces], 1).flatten(0, 1)
    rows = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return rows.T.contiguous() if mapping.form == "columns" else rows.contiguous()


@dataclass(frozen=True)
class FileTensor:
    """A tensor in an external file.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, as text if torch has no such dtype.
        location: Its location, for messages.
        load: Returns its values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    location: str
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class ExternalTensor:
    """An external tensor with its mapping.

    Attributes:
        mapping: The rectangles of megalite's parameters that it consists of.
        dtype: Its dtype.
        location: Its location, for messages.
        load: Returns its values, of shape `mapping.shape`.
    """

    mapping: TensorMapping
    dtype: torch.dtype
    location: str
    load: Callable[[], Tensor]

    def read(self) -> Tensor:
        """Return its values. Raises CheckpointError unless all are finite."""
        values = self.load()
        num_bad = values.numel() - int(values.isfinite().sum())
        if num_bad:
            first = values[~values.isfinite()][0]
            problem = f"{num_bad:,} of {values.numel():,} values are not finite, the first is {first:g}"
            remedy = "training cannot start with them: give another checkpoint"
            raise CheckpointError(f"{self.location}: {problem}; {remedy}")
        return values


def check_wrapped(stored: Collection[str], expected: Collection[str], title: str) -> None:
    """Raise CheckpointError if most tensor names contain what a wrapper inserts, or have an additional prefix.

    torch.compile, for example, inserts "_orig_mod.".
    """
    insertions = Counter(_insertion(name, expected) for name in stored if name not in expected)
    insertions.pop("", None)
    for insertion, count in insertions.most_common(1):
        if 2 * count > len(stored):
            remedy = next(remedy for known, remedy in WRAPPERS.items() if known in insertion)
            raise CheckpointError(f"{title}: the names of {count} tensors contain an extra {insertion!r}; {remedy}")


def _insertion(name: str, expected: Collection[str]) -> str:
    """Return what to remove from a name to get an expected one, or "" if nothing fits.

    This is what a wrapper inserts anywhere in the name, or a prefix.
    """
    for wrapper in WRAPPERS:
        if wrapper and name.replace(wrapper, "") in expected:
            return wrapper
    bare = name
    while bare:
        bare = bare.partition(".")[2]
        if bare in expected:
            return name.removesuffix(bare)
    return ""


def match_tensors(
    ranks: Sequence[tuple[Mapping[str, FileTensor], Sequence[TensorMapping]]],
    title: str,
    remedy: str,
    problems: Sequence[str] = (),
) -> list[ExternalTensor]:
    """Match the tensors in files with the expected ones, and return each once.

    Several tensors can hold the same rectangle, such as the copies of a norm on the tp ranks, or a head that is tied to
    the embedding. Their values must then be equal.

    Args:
        ranks: The tensors in the files of each tp rank, by name, and the mappings of the rank.
        title: The first line of the error message.
        remedy: The advice to the user if copies differ.
        problems: Problems that are already known.

    Raises:
        CheckpointError: With all `problems` and all tensors that are missing, unexpected, or of another shape or type;
            without any of these, all copies that differ.
    """
    lines = list(problems)
    matches: list[ExternalTensor] = []
    for stored, mappings in ranks:
        expected = {mapping.external_name: mapping for mapping in mappings}
        check_wrapped(stored, set(expected), title)
        lines += [
            f"{name} is missing"
            for name, mapping in expected.items()
            if not mapping.is_duplicate and name not in stored
        ]
        for name, tensor in stored.items():
            if name not in expected:
                lines.append(f"{tensor.location}: not a tensor of this model")
            elif not isinstance(tensor.dtype, torch.dtype) or tensor.dtype not in WEIGHT_DTYPE_CODES:
                lines.append(f"{tensor.location}: {tensor.dtype} is not a floating-point type that megalite supports")
            elif tensor.shape != expected[name].shape:
                lines.append(f"{tensor.location}: shape {tensor.shape}, not {expected[name].shape}")
            else:
                matches.append(ExternalTensor(expected[name], tensor.dtype, tensor.location, tensor.load))
    raise_problems(lines, title)
    firsts: dict[tuple[tuple[str, Box], ...], ExternalTensor] = {}
    for tensor in sorted(matches, key=lambda tensor: tensor.mapping.is_duplicate):
        first = firsts.setdefault(tuple((spec.name, box) for spec, box in tensor.mapping.parts), tensor)
        if tensor is not first and not torch.equal(tensor.read(), first.read()):
            is_copy = tensor.mapping.is_duplicate and tensor.mapping.is_written
            advice = COPY_REMEDY if is_copy else remedy
            lines.append(f"{tensor.location} differs from {first.location}, which it repeats; {advice}")
    raise_problems(lines, title)
    return list(firsts.values())


@dataclass(frozen=True)
class ExternalModel:
    """An opened model of another program.

    Attributes:
        directory: Its directory.
        name: The family, or the name of the checkpoint.
        options: The model's options in its configuration.
        model: The same options as a ModelConfig.
        rows: The number of rows of the embedding and head. The vocabulary of Megatron-LM may be padded.
        tensors: Its tensors.
        args: The arguments that Megatron-LM saved; None for other programs.
        ranks: The tensors of each (tp, ep) rank of Megatron-LM.
        is_quantized: Its tensors are read from quantized weights, and rounded to their dtype.
        num_missing_depths: Depths of multi-token prediction that its configuration has and its files lack. `model` is
            without them.
    """

    directory: Path
    name: str
    options: dict[str, Any]
    model: ModelConfig
    rows: int
    tensors: Sequence[ExternalTensor]
    args: Namespace | None = None
    ranks: Mapping[tuple[int, int], Mapping[str, FileTensor]] = field(default_factory=dict)
    is_quantized: bool = False
    num_missing_depths: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most tensors."""
        return Counter(tensor.dtype for tensor in self.tensors).most_common(1)[0][0]


def raise_problems(problems: Sequence[str], title: str) -> None:
    """Raise CheckpointError with the title and a line for each problem, if there are any."""
    if problems:
        rest = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CheckpointError("\n  ".join([f"{title}:", *problems[:20], *rest]))


def build_model_config(options: dict[str, Any], source: str) -> ModelConfig:
    """Return the ModelConfig of options from a file. Raises CheckpointError for values that no model can have."""
    try:
        model = build({name: value for name, value in options.items() if name != "vocab_size"}).model.for_any_pipeline()
    except ConfigError as error:
        raise CheckpointError(f"{source}: {'; '.join(error.problems)}; it is damaged") from None
    except ValueError as error:
        raise CheckpointError(f"{source}: hybrid_layer_pattern {error}; it is damaged") from None
    values = {option.name: getattr(model, option.name) for option in fields(model)}
    out_of_range = [f"{name}={value}" for name, value in values.items() if isinstance(value, int) and value >= 1 << 31]
    if model.num_layers > MAX_LAYERS or model.num_layers * (model.num_experts or 1) > MAX_EXPERTS:
        out_of_range += [f"num_layers={model.num_layers}", f"num_experts={model.num_experts}"]
    if out_of_range:
        raise CheckpointError(f"{source}: {', '.join(out_of_range)} is out of range; it is damaged")
    if problems := find_problems(replace(build(PLACEHOLDER_OPTIONS), model=model)):
        reasons = "; ".join(
            str(problem).partition("; ")[0] for problem in problems
        )  # without the remedies, which are for command lines
        raise CheckpointError(f"{source}: {reasons}; megalite has no such model: convert another one")
    return model


def load_external_weights(
    tensors: Sequence[ExternalTensor], shards: Sequence[TensorShard], specs: Specs, source: str, show_progress: bool
) -> None:
    """Write the values of external tensors into the data of shards, under any layout.

    Every rank only reads the tensors that its shards need.

    Args:
        tensors: The tensors of the external model.
        shards: The shards to fill, named KIND/NAME.
        specs: The parameters of the model.
        source: The name of the external model, for messages.
        show_progress: Print progress lines.

    Raises:
        CheckpointError: Before anything changes if shapes differ, or later if a file cannot be read.
    """
    problems: list[str] = []
    targets: dict[str, list[tuple[Box, Tensor]]] = {}
    for shard in shards:
        name = shard.name.partition("/")[2]
        targets.setdefault(name, []).extend(shard_views(shard))
        external_shape = specs[name].shape if name in specs else "nothing"
        if shard.shape != external_shape:
            problems.append(f"{name}: shape {shard.shape} here, {external_shape} there")
    raise_problems(list(dict.fromkeys(problems)), f"{source} does not fit this model")
    with logged_progress(f"loading {source}", len(tensors), "tensors", not show_progress) as bar:
        for tensor in bar.track(tensors):
            _fill(tensor, targets)


def _fill(tensor: ExternalTensor, targets: Mapping[str, Sequence[tuple[Box, Tensor]]]) -> None:
    """Write the values of a tensor into the targets, and do not read it if none needs them."""
    parts = tensor.mapping.parts
    if all(intersect(target_box, box) is None for spec, box in parts for target_box, _ in targets.get(spec.name, ())):
        return
    for spec, box, values in split(tensor.mapping, tensor.read()):
        for target_box, target in targets.get(spec.name, ()):
            if (overlap := intersect(target_box, box)) is not None:
                target[slices_within(overlap, target_box)] = values[slices_within(overlap, box)].to(target)


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory to fill, which becomes `directory` when the context ends, or is deleted after an error.

    Raises CheckpointError if `directory` is not empty or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is not empty; give a new directory")
    staging_dir = directory.with_name(f".{directory.name}.part")
    try:
        remove(staging_dir)
        staging_dir.mkdir(parents=True)
        yield staging_dir
        if directory.exists():
            directory.rmdir()
        os.replace(staging_dir, directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written ({error}); give a directory elsewhere") from error
    finally:
        shutil.rmtree(staging_dir, ignore_errors=True)


def norm_offsets(model: ModelConfig, zero_centered: bool) -> dict[str, float]:
    """Return norm weight -> the number to add to its stored values for a format that stores it in another form.

    Args:
        model: The model, whose norm weights are stored as they are used, or as their difference from 1.
        zero_centered: The format stores their difference from 1.
    """
    local, external = (
        model_specs(replace(model, apply_layernorm_1p=centered), 1)
        for centered in (model.apply_layernorm_1p, zero_centered)
    )
    offsets = {name: spec.stored_offset - external[name].stored_offset for name, spec in local.items()}
    return {name: offset for name, offset in offsets.items() if offset}


@dataclass(frozen=True)
class ExportSource:
    """A megalite checkpoint as the source of an export.

    Attributes:
        checkpoint: The megalite checkpoint.
        dtype: The dtype of exported values; None: as stored. For fp32, the more exact main weights are read.
        offsets: Parameter -> what is added to its stored values (`norm_offsets`); those without an entry are exported
            as they are stored.
        factors: Parameter -> the factor of its values after that (fold_mup.py); those without an entry have none.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype | None = None
    offsets: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def _key(self, name: str) -> str:
        """Return the name of the stored tensor with the best values of a parameter."""
        kinds = ("state", "optimizer.main") if self.dtype == torch.float32 else ("state",)
        keys = [key for kind in kinds if (key := f"{kind}/{name}") in self.checkpoint.manifest.tensors]
        return keys[0] if keys else f"model/{name}"

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the exported dtype of a parameter. State, such as the biases of routers, keeps its own."""
        key = self._key(name)
        return self.checkpoint.dtype(key) if self.dtype is None or key.startswith("state/") else self.dtype

    def offset(self, name: str) -> float:
        """Return the offset that is added to the stored values of a parameter."""
        return self.offsets.get(name, 0.0)

    def read(self, name: str, box: Box) -> Tensor:
        """Return the exported values of a rectangle of a parameter."""
        values = self.checkpoint.read(self._key(name), box)
        if offset := self.offset(name):
            values = values + offset
        values = values.to(self.dtype_of(name))
        return values * self.factors[name] if name in self.factors else values

    def join(self, mapping: TensorMapping) -> Tensor:
        """Return an external tensor."""
        return join(mapping, lambda spec, box: self.read(spec.name, box))
