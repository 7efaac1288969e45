"""Megatron-LM's checkpoints of one file per rank, read without Megatron-LM, and the model that their `args` describe;
tools/export_files.py writes both.

    DIR/latest_checkpointed_iteration.txt        a number, or "release"
    DIR/iter_0000500/mp_rank_00/model_optim_rng.pt            mp_rank_TT[_PPP][_EEE], PPP where pp > 1, EEE where ep > 1
        args, checkpoint_version, model (or model0, model1, .. with virtual stages): name -> tensor

The files are pickles. They are opened with torch's restricted loader and an exact list of names: tensors, plain
containers, argparse.Namespace; other types that Megatron-LM writes (random states, enumerations) become an `Inert`, an
object without content. Anything else is refused by name, and no code of a file runs. Tensors stay on disk until they
are read. A layer's number counts within its stage; stages follow each other in depth, virtual ones in turn. Names and
meanings of args are those of Megatron-LM at d98e8a64, mostly ours too; the activation is several flags there.
"""

import contextlib
import itertools
import pickle  # its error only; torch's restricted loader does the reading
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.storage.location import TRACKER, is_megatron_checkpoint
from megalite.common.tables import load_table
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN, format_layer_pattern, parse_layer_pattern
from megalite.config.options import ModelConfig, gelu_variant
from megalite.config.text_file import read_small_bytes
from megalite.interop.name_mapping import TensorNames, rules
from megalite.interop.tensor_mapping import (
    ExternalModel,
    FileTensor,
    box_for_rank,
    build_mappings,
    build_model_config,
    match_tensors,
    raise_problems,
)
from megalite.models.specs import checkpoint_specs

NAME_TABLE = load_table(__file__, "names")
_CORE_RULES = rules(NAME_TABLE["core"], "decoder.layers.{n}.")
_STACKED_RULES = rules(NAME_TABLE["stacked"], "decoder.layers.{n}.mlp.experts.experts.")
SHARED_OPTIONS = tuple(f.name for f in fields(ModelConfig) if f.name not in NAME_TABLE["otherwise"])
# activations with a flag of their own there; the others are forms of gelu
ACTIVATION_FLAGS = ("swiglu", "squared_relu")
MEGATRON = TensorNames(
    name="megatron", rules=_CORE_RULES, alternatives=_STACKED_RULES, ignored=("._extra_state", ".inv_freq")
)
TE_GROUPED_EXPERT = re.compile(
    r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$"
)  # an expert of Transformer Engine's layers
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")  # numbered
STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")  # [L, ...] under one name
WORD_EMBEDDING = "embedding.word_embeddings.weight"

FUSED: list[list[str]] = NAME_TABLE["fused"]  # (another name, Megatron core's)
STUB_TYPES: list[str] = NAME_TABLE["inert"]
RankPosition = tuple[int, int, int]  # tp, pp and ep rank
TensorsByRank = Mapping[tuple[int, int], Mapping[str, FileTensor]]  # (tp, ep) rank -> its tensors
FILES = ("model_optim_rng.pt", "model_rng.pt")
# errors of the restricted loader for damaged files, as mutated files have shown
READ_ERRORS = (OSError, ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError)
READ_ERRORS += (RuntimeError, TypeError, ValueError)
_RANK = re.compile(r"mp_rank_(\d{2,}(?:_\d{3,}){0,2})")
_ONE_MATRIX = re.compile(r".*\.mlp\.experts\.weight[12]")


def mcore_name(name: str) -> str:
    """Megatron core's name of a tensor of any release."""
    for other, core in [*FUSED, *NAME_TABLE["older"]]:
        name = name.replace(other, core)
    return TE_GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)


class UnpickledStub:
    """In place of an object that is not needed: takes any arguments, and ignores them."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


class StubEnumMember(UnpickledStub):
    """In place of `getattr`, with which Python 3.11.0 to 3.11.3 writes a member of an enumeration. Raises
    UnpicklingError for an attribute of anything but Inert."""

    def __init__(self, of: object, name: object):
        if of is not UnpickledStub:
            raise pickle.UnpicklingError("global getattr")


def load_pickle(path: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """The dictionary of a .pt file; tensors stay on disk. Raises CheckpointError, with the name that is not listed."""
    say(f"opening {path}: a pickle, of which tensors and {1 + len(STUB_TYPES)} listed types are accepted")
    allowed = [Namespace, *((UnpickledStub, name) for name in STUB_TYPES), (StubEnumMember, "builtins.getattr")]
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|global) (?:`)?([\w.]+)", str(error))
        why = f"it names {name[1]}, which is not on the list of types" if name else "it is not a plain file of tensors"
        raise CheckpointError(f"{path}: refused: {why}; a file like this can run code") from None
    except READ_ERRORS as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); it is damaged, or of torch before 1.6") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not the dictionary of a checkpoint")
    return content


def get_args(content: dict[str, Any], path: Path) -> Namespace:
    """The args in the file `path`. Raises CheckpointError."""
    if not isinstance(args := content.get("args"), Namespace):
        raise CheckpointError(f"{path}: has no args; it is not a checkpoint of Megatron-LM")
    return args


def folder_of(directory: Path) -> Path:
    """The folder of the newest iteration, or `directory` if that holds the ranks. Raises CheckpointError."""
    tracker = directory / TRACKER
    if not tracker.is_file():
        return directory
    try:
        text = read_small_bytes(tracker, 1 << 20).decode("utf-8", "replace").strip()
    except OSError as error:
        raise CheckpointError(f"{tracker}: cannot be read ({error.strerror}); give the iteration's folder") from None
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{tracker}: {text[:40]!r} is neither a number nor release; give the iteration's folder")
    return directory / (text if text == "release" else f"iter_{int(text):07d}")


def has_checkpoint(directory: Path) -> bool:
    """Whether a checkpoint of Megatron-LM is in it."""
    return any(is_megatron_checkpoint(folder) for folder in (*directory.glob("iter_*"), directory / "release"))


def find_checkpoint(directory: Path, step: int | None = None) -> Path | None:
    """The folder of the Megatron-LM checkpoint that `directory` is, or that its tracker file names, or that of `step`;
    None where there is none. Raises CheckpointError where the named one is missing."""
    if is_megatron_checkpoint(directory):
        if step is not None and directory.name != f"iter_{step:07d}":
            raise CheckpointError(f"{directory} is not the checkpoint of step {step}; give the folder above it")
        return directory
    iterations = [p.name for p in sorted(directory.glob("iter_*")) if is_megatron_checkpoint(p)]
    folder = folder_of(directory) if step is None else directory / f"iter_{step:07d}"
    if is_megatron_checkpoint(folder):
        return folder
    if not iterations:
        return None
    where = f"{directory / TRACKER} names" if step is None and folder != directory else f"{directory} holds"
    near = ", ".join(iterations[-3:])
    raise CheckpointError(f"{where} no such checkpoint, but the directory has {near}; give --ckpt-step, or the folder")


def true_vocab_size(args: Namespace | None, rows: int, tokenizer: int | None = None) -> int | None:
    """Number of tokens among the embedding's `rows`, from our converter, the tokenizer's size `tokenizer`, or
    --vocab-size; None if none is known: Megatron-LM itself keeps the padded size alone."""
    known = (getattr(args, "true_vocab_size", None), tokenizer, getattr(args, "vocab_size", None))
    return next((n for n in known if type(n) is int and 0 < n <= rows), None)


def list_rank_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """The numbers in the name of a rank's folder -> its file. Raises CheckpointError where there is none."""
    files: dict[tuple[int, ...], Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _RANK.fullmatch(path.name)
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if match is not None:
            if file is None:
                raise CheckpointError(f"{path}: has no {FILES[0]}; the checkpoint is incomplete: copy it again")
            files[tuple(map(int, match[1].split("_")))] = file
    if not files:
        raise CheckpointError(f"{folder}: has no folder mp_rank_00; give the directory of a checkpoint")
    return files


def _rank_positions(
    names: Iterable[tuple[int, ...]], args: Namespace, folder: Path
) -> dict[RankPosition, tuple[int, ...]]:
    """(tp, pp, ep) rank -> the numbers in its name: of pp and ep only where they are above 1. Raises CheckpointError
    where a rank is missing, or the experts are cut in another way than by these."""
    result, ep = dict[RankPosition, tuple[int, ...]](), arg_or_default(args, "expert_model_parallel_size", 1)
    for name in names:
        t, *rest = name
        e = rest.pop() if ep != 1 or len(rest) > 1 else 0
        result[t, rest[0] if rest else 0, e] = name
    sizes = [1 + max(place[i] for place in result) for i in range(3)]
    for place in itertools.product(*map(range, sizes)):
        if place not in result:
            t, p, e = place
            rank = f"tp rank {t}, pp rank {p}" + (f", ep rank {e}" if sizes[2] > 1 else "")
            of = " x ".join(map(str, sizes if sizes[2] > 1 else sizes[:2]))
            raise CheckpointError(f"{folder}: {rank} of {of} is missing; copy it again")
    if (
        getattr(args, "num_experts", None)
        and (etp := arg_or_default(args, "expert_tensor_parallel_size", sizes[0])) != sizes[0]
    ):
        cut = f"expert_tensor_parallel_size={etp} is not tensor_model_parallel_size={sizes[0]}"
        raise CheckpointError(f"{folder}: {cut}, which files by rank cannot tell; save it as torch_dist")
    return result


def open_torch_checkpoint(directory: Path, say: Callable[[str], object] = print) -> ExternalModel:
    """Read args and the names of all tensors. Raises CheckpointError with all problems."""
    folder = folder_of(directory)
    files = list_rank_files(folder)
    loaded, first = {name: load_pickle(path, say) for name, path in files.items()}, min(files)
    args, version = get_args(loaded[first], files[first]), loaded[first].get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < 2:
        old = f"checkpoint_version={version!r} is below 2, when qkv had another order"
        raise CheckpointError(f"{files[first]}: {old}; save it again with a newer Megatron-LM")
    places = _rank_positions(files, args, folder).items()
    return build_external_model(
        folder, args, files[first], _number_layers({at: _stages(loaded[n], files[n]) for at, n in places})
    )


def build_external_model(folder: Path, args: Namespace, where: Path, ranks: TensorsByRank) -> ExternalModel:
    """The model of the args in the file `where`, of which each rank of tp and ep has `ranks`, Megatron core's names ->
    tensors. Raises CheckpointError with all problems."""
    (tp, ep), options = (1 + n for n in max(ranks)), read_args(args, str(where))
    model = build_model_config(options, str(where))
    if model.num_kv_groups % tp or model.num_attention_heads % model.num_kv_groups:
        raise CheckpointError(f"{folder}: num_query_groups={model.num_kv_groups} does not split over tp={tp}")
    if (model.num_experts or 0) % ep:
        raise CheckpointError(f"{folder}: num_experts={model.num_experts} does not split over ep={ep}")
    word = ranks[0, 0].get(WORD_EMBEDDING)
    if word is None or len(word.shape) != 2:
        raise CheckpointError(f"{where}: has no word embeddings; it is not the first stage of a GPT")
    padded, layers = word.shape[0] * tp, range(model.num_layers)
    specs, sizes = checkpoint_specs(model, padded), {"tp": tp, "ep": ep, "etp": tp}
    boxes = {(t, e): box_for_rank(sizes, {"tp": t, "ep": e, "etp": t}) for t, e in ranks}
    make = partial(build_mappings, MEGATRON, specs, model.num_kv_groups // tp, layers)
    pairs = [(rank, make(box_of=boxes[at], found=rank)) for at, rank in ranks.items()]
    tensors = match_tensors(pairs, f"{folder}: the tensors do not fit the args", "copy the checkpoint again")
    return ExternalModel(folder, f"Megatron-LM's {folder.name}", options, model, padded, tensors, args, ranks)


def _number_layers(stages: Mapping[RankPosition, Sequence[Mapping[str, FileTensor]]]) -> TensorsByRank:
    """The tensors of all stages on each rank of tp and ep; their layers are counted in the model."""
    ranks, begin = {(t, e): dict[str, FileTensor]() for t, _, e in sorted(stages)}, 0
    pp = 1 + max(p for _, p, _ in stages)
    for chunk, p in itertools.product(range(max(map(len, stages.values()))), range(pp)):
        end = begin
        for (t, e), rank in ranks.items():
            for name, one in stages[t, p, e][chunk].items() if chunk < len(stages[t, p, e]) else ():
                if layer := LAYER.match(name):
                    end = max(end, begin + int(layer[1]) + 1)
                    name = f"decoder.layers.{begin + int(layer[1])}.{name[layer.end() :]}"
                if name in rank:
                    raise CheckpointError(f"{one.place}: is {rank[name].place}, too; copy the checkpoint again")
                rank[name] = one
        begin = end
    return ranks


def _stages(file: Mapping[str, Any], path: Path) -> list[dict[str, FileTensor]]:
    """The virtual stages of one rank, each as Megatron core's names -> tensors."""
    names = ["model"] if "model" in file else [f"model{i}" for i in range(len(file)) if f"model{i}" in file]
    if not names:
        raise CheckpointError(f"{path}: has no model; give the checkpoint of a model")
    return [_named(file[name], path) for name in names]


def _named(node: Any, path: Path, prefix: str = "", depth: int = 0) -> dict[str, FileTensor]:
    """Core names -> tensors of nested dictionaries, whose keys are parts of a name."""
    if not isinstance(node, Mapping) or depth > 8:
        raise CheckpointError(f"{path}: {prefix or 'model'} is not a dictionary of tensors")
    result: dict[str, FileTensor] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if _ONE_MATRIX.fullmatch(name):
            raise CheckpointError(f"{path}: {name} is all experts of a GroupedMLP in one matrix; save it as torch_dist")
        if isinstance(value, Mapping):
            found = _named(value, path, name + ".", depth + 1)
        elif name.endswith(MEGATRON.ignored):
            continue
        elif not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name} is not a floating-point tensor")
        else:
            load = lambda value=value: value  # noqa: E731
            found = {
                mcore_name(name): FileTensor(tuple(value.shape), value.dtype, f"{mcore_name(name)} in {path}", load)
            }
        if twice := result.keys() & found.keys():
            raise CheckpointError(f"{path}: {min(twice)} is stored under two names")
        result |= found
    return result


def read_args(args: Namespace, where: str) -> dict[str, Any]:
    """Option names to values. Raises CheckpointError with all values that megalite does not have."""
    problems: list[str] = []
    options: dict[str, Any] = {}
    for name in SHARED_OPTIONS:
        if name.startswith("moe_") and not getattr(args, "num_experts", None):
            continue
        if (value := getattr(args, name, None)) is not None:
            options[name] = value
        elif name in NAME_TABLE["required"] and not hasattr(args, name):
            problems.append(f"{name} is missing")
    if options.get("num_experts"):
        options["moe_layer_freq"] = str(arg_or_default(args, "moe_layer_freq", 1)).replace(" ", "")
    if options.get("group_query_attention"):
        options["num_query_groups"] = getattr(args, "num_query_groups", None)
    options["norm_epsilon"] = getattr(args, "norm_epsilon", getattr(args, "layernorm_epsilon", 1e-5))
    options["rotary_base"] = float(getattr(args, "rotary_base", 10000.0))
    options["rotary_seq_len_interpolation_factor"] = float(
        arg_or_default(args, "rotary_seq_len_interpolation_factor", 1.0)
    )
    flagged = [name for name in ACTIVATION_FLAGS if getattr(args, name, False)]
    flags = {"add_bias_linear": True, "bias_gelu_fusion": True, "openai_gelu": False}
    gelu = gelu_variant(**{name: arg_or_default(args, name, default) for name, default in flags.items()})
    options["activation"] = flagged[0] if flagged else gelu
    try:
        options |= _read_patterns(args, options.get("num_layers"))
    except ValueError as error:
        problems.append(str(error))
    for name, usual in NAME_TABLE["only"].items():
        if (value := arg_or_default(args, name, usual)) != usual:
            problems.append(f"{name}={value!r}")
    raise_problems(problems, f"{where}: args with values that megalite does not have")
    return options


def _read_patterns(args: Namespace, layers: Any) -> dict[str, Any]:
    """Which layers rotate, and have a window: none if its left side is -1 or every bit is 0. Raises ValueError."""
    options: dict[str, Any] = {}
    window, skipped, bare = (
        arg_or_default(args, n, None) for n in ("window_size", "window_attn_skip_freq", "no_rope_freq")
    )
    size = tuple(window) if isinstance(window, (list, tuple)) else (window,)
    if size not in ((None,), (-1, 0), (-1, -1)):
        if len(size) != 2 or type(size[0]) is not int or size[0] < 1 or size[1] != 0:
            raise ValueError(f"window_size={window!r}")
        bits = _bits("window_attn_skip_freq", skipped, layers) if skipped is not None else (True,)
        if any(bits):
            options["window_size"] = size
        if any(bits) and not all(bits):
            options["window_attn_skip_freq"] = format_layer_pattern(bits)
    if bare is not None and bare != 0 and (any(_bits("no_rope_freq", bare, layers)) or type(bare) is int):
        options["no_rope_freq"] = str(bare).replace(" ", "")
    return options


def _bits(name: str, pattern: Any, layers: Any) -> tuple[bool, ...]:
    """A bit for each layer."""
    with contextlib.suppress(ValueError):
        if type(layers) is int and layers <= MAX_LAYERS_IN_PATTERN:
            return parse_layer_pattern(str(pattern), layers)
    raise ValueError(f"{name}={pattern!r}")


def arg_or_default(args: Namespace, name: str, default: Any) -> Any:
    """An argument, or `default` where it is missing or None."""
    value = getattr(args, name, None)
    return default if value is None else value
