"""Checkpoints of Megatron-LM with one file per rank, read without Megatron-LM.

The `args` in them describe the model. tools/export_files.py converts such a model into a megalite checkpoint, and back.

    DIR/latest_checkpointed_iteration.txt        a number, or "release"
    DIR/iter_0000500/mp_rank_00/model_optim_rng.pt            mp_rank_TT[_PPP][_EEE], PPP where pp > 1, EEE where ep > 1
        args, checkpoint_version, model (or model0, model1, .. with virtual stages): name -> tensor

The files are pickles. They are opened with torch's restricted loader and an exact list of names: tensors, plain
containers, and argparse.Namespace. Other types that Megatron-LM writes (random states, enumerations) become an
`UnpickledStub`, an object without content. Anything else is refused by name, and no code of a file runs. Tensors stay
on disk until they are read. The number of a layer counts within its stage. Stages follow each other in depth, and
virtual stages take turns. The names and meanings of args are those of Megatron-LM at d98e8a64, and most are the same in
megalite. The activation is given by several flags there.

A checkpoint is of a GPTModel, or of a HybridModel (MambaModel before) if its args have a pattern. In the latter each
letter of the pattern is a layer with a number of its own, so a layer of megalite may be two there:

    GPTModel      decoder.layers.0.self_attention...  decoder.layers.0.mlp...  decoder.final_layernorm.weight
    HybridModel   decoder.layers.0.self_attention...  decoder.layers.1.mlp...  decoder.final_norm.weight
"""

import contextlib
import itertools
import pickle  # only for its error; torch's restricted loader reads the files
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.storage.location import TRACKER, is_megatron_checkpoint
from megalite.common.tables import load_table
from megalite.common.text_file import read_small_bytes
from megalite.config.hybrid_pattern import MLP_LETTERS, num_parts, num_pattern_layers, shown_pattern, without_borders
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN, format_layer_pattern, parse_layer_pattern
from megalite.config.options import ModelConfig, gelu_variant
from megalite.interop.name_mapping import TensorNames, number_by_letter, parse_rules
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
_CORE_RULES = parse_rules(NAME_TABLE["core"], "decoder.layers.{n}.")
_STACKED_RULES = parse_rules(NAME_TABLE["stacked"], "decoder.layers.{n}.mlp.experts.experts.")
SHARED_OPTIONS = tuple(f.name for f in fields(ModelConfig) if f.name not in NAME_TABLE["otherwise"])
# activations that have a flag in Megatron-LM; the others are variants of gelu
ACTIVATION_FLAGS = ("swiglu", "squared_relu")
MEGATRON = TensorNames(
    name="megatron", rules=_CORE_RULES, alternatives=_STACKED_RULES, ignored=("._extra_state", ".inv_freq")
)
# an expert in Transformer Engine's grouped layers
TE_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")  # a numbered layer
STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")  # all layers, [L, ...] under one name
WORD_EMBEDDING = "embedding.word_embeddings.weight"
NamePairs = list[list[str]]  # [another name, Megatron core's name]
FUSED: NamePairs = NAME_TABLE["fused"]
FUSED_MLP: NamePairs = NAME_TABLE["fused_mlp"]
HYBRID: NamePairs = NAME_TABLE["hybrid"]
FIRST_STAGE: list[str] = NAME_TABLE["first_stage"]
# args of hybrid models without a pattern, which had attention and MLPs between their Mamba layers
RATIO_ARGS = ("hybrid_attention_ratio", "hybrid_mlp_ratio", "is_hybrid_model")
STUB_TYPES: list[str] = NAME_TABLE["inert"]
RankPosition = tuple[int, int, int]  # tp, pp and ep rank
TensorsByRank = Mapping[tuple[int, int], Mapping[str, FileTensor]]  # (tp, ep) rank -> its tensors
FILES = ("model_optim_rng.pt", "model_rng.pt")
# errors that the restricted loader was seen to raise for damaged (mutated) files
READ_ERRORS = (OSError, ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError)
READ_ERRORS += (RuntimeError, TypeError, ValueError)
_RANK_NAME = re.compile(r"mp_rank_(\d{2,}(?:_\d{3,}){0,2})")
_GROUPED_MLP_MATRIX = re.compile(r".*\.mlp\.experts\.weight[12]")


def mcore_name(name: str) -> str:
    """Return Megatron core's name of a tensor, for the name in any release."""
    for other, core in [*FUSED, *FUSED_MLP, *NAME_TABLE["older"], *HYBRID]:
        name = name.replace(other, core)
    return TE_GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)


def transformer_engine_name(name: str, has_experts: bool) -> str:
    """Return the name that a tensor of Megatron core's local layers has in those of Transformer Engine.

    The norm before experts is a layer of its own there, because the router needs its output, too.
    """
    for fused, local in FUSED if has_experts else [*FUSED, *FUSED_MLP]:
        name = name.replace(local, fused)
    return LOCAL_EXPERT.sub(r".mlp.experts.\2.weight\1", name)


def hybrid_name(name: str) -> str:
    """Return the name that a tensor of a GPTModel has in a HybridModel, apart from the number of its layer."""
    for hybrid, gpt in HYBRID:
        name = name.replace(gpt, hybrid)
    return name


def tensor_names(model: ModelConfig, is_hybrid: bool) -> TensorNames:
    """Return the names of a GPTModel, or of a HybridModel except those in HYBRID."""
    if not is_hybrid:
        return MEGATRON
    return number_by_letter(MEGATRON, model)


class UnpickledStub:
    """A stand-in for an object that is not needed. It takes any arguments and ignores them."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


class StubEnumMember(UnpickledStub):
    """A stand-in for `getattr`, which Python 3.11.0 to 3.11.3 uses to pickle a member of an enumeration.

    Raises UnpicklingError for an attribute of anything but UnpickledStub.
    """

    def __init__(self, owner: object, name: object):
        if owner is not UnpickledStub:
            raise pickle.UnpicklingError("global getattr")


def load_pickle(path: Path, log: Callable[[str], object]) -> dict[str, Any]:
    """Return the dictionary in a .pt file, whose tensors stay on disk.

    `log` receives a line for the log. Raises CheckpointError with the first name that is not on the list.
    """
    log(f"opening {path}: a pickle; only tensors and {1 + len(STUB_TYPES)} listed types in it are accepted")
    allowed = [Namespace, *((UnpickledStub, name) for name in STUB_TYPES), (StubEnumMember, "builtins.getattr")]
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|global) (?:`)?([\w.]+)", str(error))
        reason = (
            f"it names {name[1]}, which is not on the list of types" if name else "it is not a plain file of tensors"
        )
        raise CheckpointError(f"{path}: refused: {reason}; a file like this can run code") from None
    except READ_ERRORS as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); it is damaged, or of torch before 1.6") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not the dictionary of a checkpoint")
    return content


def get_args(content: dict[str, Any], path: Path) -> Namespace:
    """Return the args in the contents of the file `path`. Raises CheckpointError."""
    if not isinstance(args := content.get("args"), Namespace):
        raise CheckpointError(f"{path}: has no args; it is not a checkpoint of Megatron-LM")
    return args


def rank_files_dir(directory: Path) -> Path:
    """Return the directory of the newest iteration, or `directory` if it contains the ranks. Raises CheckpointError."""
    tracker = directory / TRACKER
    if not tracker.is_file():
        return directory
    try:
        text = read_small_bytes(tracker, 1 << 20).decode("utf-8", "replace").strip()
    except OSError as error:
        raise CheckpointError(f"{tracker}: cannot be read ({error.strerror}); give the iteration's directory") from None
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(
            f"{tracker}: {text[:40]!r} is neither a number nor release; give the iteration's directory"
        )
    return directory / (text if text == "release" else f"iter_{int(text):07d}")


def has_checkpoint(directory: Path) -> bool:
    """Return True if the directory contains a checkpoint of Megatron-LM."""
    return any(is_megatron_checkpoint(path) for path in (*directory.glob("iter_*"), directory / "release"))


def find_checkpoint(directory: Path, step: int | None = None) -> Path | None:
    """Return the directory of the Megatron-LM checkpoint of `step`, or of the newest one.

    `directory` may be the checkpoint itself, or contain it; its tracker file names the newest one. Returns None if
    there is none. Raises CheckpointError if the checkpoint of `step`, or the named one, is missing among others.
    """
    if is_megatron_checkpoint(directory):
        if step is not None and directory.name != f"iter_{step:07d}":
            raise CheckpointError(f"{directory} is not the checkpoint of step {step}; give its parent directory")
        return directory
    iterations = [path.name for path in sorted(directory.glob("iter_*")) if is_megatron_checkpoint(path)]
    checkpoint = rank_files_dir(directory) if step is None else directory / f"iter_{step:07d}"
    if is_megatron_checkpoint(checkpoint):
        return checkpoint
    if not iterations:
        return None
    subject = f"{directory / TRACKER} names" if step is None and checkpoint != directory else f"{directory} holds"
    latest = ", ".join(iterations[-3:])
    raise CheckpointError(
        f"{subject} no such checkpoint, but the directory has {latest}; give --ckpt-step, or the directory"
    )


def true_vocab_size(args: Namespace | None, rows: int, tokenizer_size: int | None = None) -> int | None:
    """Return the number of tokens among the embedding's `rows`, or None if it is unknown.

    Megatron-LM itself only stores the padded size. The number is taken from megalite's converter, the size of the
    tokenizer, or --vocab-size.
    """
    candidates = (getattr(args, "true_vocab_size", None), tokenizer_size, getattr(args, "vocab_size", None))
    return next((n for n in candidates if type(n) is int and 0 < n <= rows), None)


def list_rank_files(directory: Path) -> dict[tuple[int, ...], Path]:
    """Return {numbers in the name of a rank's directory: its file}. Raises CheckpointError if there is none."""
    files: dict[tuple[int, ...], Path] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _RANK_NAME.fullmatch(path.name)
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if match is not None:
            if file is None:
                raise CheckpointError(f"{path}: has no {FILES[0]}; the checkpoint is incomplete: copy it again")
            files[tuple(map(int, match[1].split("_")))] = file
    if not files:
        raise CheckpointError(f"{directory}: has no directory mp_rank_00; give the directory of a checkpoint")
    return files


def _rank_positions(
    names: Iterable[tuple[int, ...]], args: Namespace, directory: Path
) -> dict[RankPosition, tuple[int, ...]]:
    """Return {(tp, pp, ep) rank: the numbers in its name}.

    A name has the pp and ep ranks only if their sizes are above 1. Raises CheckpointError if a rank is missing, or the
    experts are sharded differently.
    """
    positions: dict[RankPosition, tuple[int, ...]] = {}
    ep = arg_or_default(args, "expert_model_parallel_size", 1)
    for name in names:
        tp_rank, *remaining = name
        ep_rank = remaining.pop() if ep != 1 or len(remaining) > 1 else 0
        positions[tp_rank, remaining[0] if remaining else 0, ep_rank] = name
    sizes = [1 + max(position[i] for position in positions) for i in range(3)]
    for position in itertools.product(*map(range, sizes)):
        if position not in positions:
            tp_rank, pp_rank, ep_rank = position
            rank = f"tp rank {tp_rank}, pp rank {pp_rank}" + (f", ep rank {ep_rank}" if sizes[2] > 1 else "")
            layout = " x ".join(map(str, sizes if sizes[2] > 1 else sizes[:2]))
            raise CheckpointError(f"{directory}: {rank} of {layout} is missing; copy it again")
    etp = arg_or_default(args, "expert_tensor_parallel_size", sizes[0])
    if getattr(args, "num_experts", None) and etp != sizes[0]:
        problem = f"expert_tensor_parallel_size={etp} is not tensor_model_parallel_size={sizes[0]}"
        raise CheckpointError(f"{directory}: {problem}, which files by rank do not show; save it as torch_dist")
    return positions


def open_torch_checkpoint(directory: Path, log: Callable[[str], object] = print) -> ExternalModel:
    """Read the args and the names of all tensors. Raises CheckpointError with all problems.

    `log` receives a line for each pickle that is opened.
    """
    checkpoint = rank_files_dir(directory)
    files = list_rank_files(checkpoint)
    contents = {name: load_pickle(path, log) for name, path in files.items()}
    first = min(files)
    args = get_args(contents[first], files[first])
    version = contents[first].get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < 2:
        problem = f"checkpoint_version={version!r} is below 2, when qkv had another order"
        raise CheckpointError(f"{files[first]}: {problem}; save it again with a newer Megatron-LM")
    positions = _rank_positions(files, args, checkpoint)
    stages = {position: _virtual_stages(contents[name], files[name]) for position, name in positions.items()}
    return build_external_model(checkpoint, args, files[first], _number_layers(stages))


def build_external_model(directory: Path, args: Namespace, source: Path, ranks: TensorsByRank) -> ExternalModel:
    """Return the model that the args describe. Raises CheckpointError with all problems.

    Args:
        directory: The directory of the checkpoint.
        args: The args.
        source: The file of the args, for messages.
        ranks: The tensors of each (tp, ep) rank, by Megatron core's names.
    """
    tp, ep = (1 + n for n in max(ranks))
    options = read_args(args, str(source))
    model = build_model_config(options, str(source))
    if model.num_kv_groups % tp or model.num_attention_heads % model.num_kv_groups:
        raise CheckpointError(f"{directory}: num_query_groups={model.num_kv_groups} does not split over tp={tp}")
    if (model.num_experts or 0) % ep:
        raise CheckpointError(f"{directory}: num_experts={model.num_experts} does not split over ep={ep}")
    embedding = ranks[0, 0].get(WORD_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source}: has no word embeddings; it is not the first stage of a GPT")
    padded_vocab_size = embedding.shape[0] * tp
    names = tensor_names(model, is_hybrid=model.hybrid_layer_pattern is not None)
    layers = range(model.num_layers)
    specs = checkpoint_specs(model, padded_vocab_size)
    sizes = {"tp": tp, "ep": ep, "etp": tp}
    ranks_and_mappings = []
    for (tp_rank, ep_rank), stored in ranks.items():
        box_of = box_for_rank(sizes, {"tp": tp_rank, "ep": ep_rank, "etp": tp_rank})
        mappings = build_mappings(
            names, specs, {"groups": model.num_kv_groups // tp}, layers, box_of=box_of, stored_names=stored
        )
        ranks_and_mappings.append((stored, mappings))
    title = f"{directory}: the tensors do not fit the args"
    tensors = match_tensors(ranks_and_mappings, title, "copy the checkpoint again")
    name = f"Megatron-LM's {directory.name}"
    return ExternalModel(directory, name, options, model, padded_vocab_size, tensors, args, ranks)


def _number_layers(stages: Mapping[RankPosition, Sequence[Mapping[str, FileTensor]]]) -> TensorsByRank:
    """Return the tensors of all stages of each (tp, ep) rank, with layer numbers that count in the full model."""
    ranks = {(tp_rank, ep_rank): dict[str, FileTensor]() for tp_rank, _, ep_rank in sorted(stages)}
    pp = 1 + max(pp_rank for _, pp_rank, _ in stages)
    num_chunks = max(map(len, stages.values()))
    first_layer = 0
    for chunk, pp_rank in itertools.product(range(num_chunks), range(pp)):
        next_layer = first_layer
        for (tp_rank, ep_rank), tensors in ranks.items():
            chunks = stages[tp_rank, pp_rank, ep_rank]
            for name, tensor in chunks[chunk].items() if chunk < len(chunks) else ():
                if match := LAYER.match(name):
                    layer = first_layer + int(match[1])
                    next_layer = max(next_layer, layer + 1)
                    name = f"decoder.layers.{layer}.{name[match.end() :]}"
                if name in tensors:
                    raise CheckpointError(
                        f"{tensor.location}: is a duplicate of {tensors[name].location}; copy the checkpoint again"
                    )
                tensors[name] = tensor
        first_layer = next_layer
    return ranks


def _virtual_stages(file: Mapping[str, Any], path: Path) -> list[dict[str, FileTensor]]:
    """Return the virtual stages of one rank, each as {Megatron core's name: tensor}."""
    names = ["model"] if "model" in file else [f"model{i}" for i in range(len(file)) if f"model{i}" in file]
    if not names:
        raise CheckpointError(f"{path}: has no model; give the checkpoint of a model")
    return [_flatten_names(file[name], path) for name in names]


def _flatten_names(node: Any, path: Path, prefix: str = "", depth: int = 0) -> dict[str, FileTensor]:
    """Return {Megatron core's name: tensor} of nested dictionaries, whose keys are components of a name."""
    if not isinstance(node, Mapping) or depth > 8:
        raise CheckpointError(f"{path}: {prefix or 'model'} is not a dictionary of tensors")
    result: dict[str, FileTensor] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if _GROUPED_MLP_MATRIX.fullmatch(name):
            raise CheckpointError(f"{path}: {name} is all experts of a GroupedMLP in one matrix; save it as torch_dist")
        if isinstance(value, Mapping):
            tensors = _flatten_names(value, path, name + ".", depth + 1)
        elif name.endswith(MEGATRON.ignored):
            continue
        elif not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name} is not a floating-point tensor")
        else:
            load = lambda value=value: value  # noqa: E731
            external_name = mcore_name(name)
            location = f"{external_name} in {path}"
            tensors = {external_name: FileTensor(tuple(value.shape), value.dtype, location, load)}
        if duplicates := result.keys() & tensors.keys():
            raise CheckpointError(f"{path}: {min(duplicates)} is stored under two names")
        result |= tensors
    return result


def read_args(args: Namespace, source: str) -> dict[str, Any]:
    """Return the options that the args express.

    Raises CheckpointError with all values that megalite does not support.
    """
    problems: list[str] = []
    options: dict[str, Any] = {}
    pattern = _hybrid_pattern(args)
    has_experts = bool(getattr(args, "num_experts", None)) and (pattern is None or "E" in pattern)
    for name in SHARED_OPTIONS:
        if (name.startswith("moe_") or name == "num_experts") and not has_experts:
            continue
        if (value := getattr(args, name, None)) is not None:
            options[name] = value
        elif name in NAME_TABLE["required"] and not hasattr(args, name):
            problems.append(f"{name} is missing")
    try:
        if pattern is not None:
            options |= _read_hybrid_pattern(pattern, options.pop("num_layers", None))
        options |= _read_layer_values(args, options.get("num_layers"), pattern)
    except ValueError as error:
        problems.append(str(error))
    if has_experts and pattern is None:
        options["moe_layer_freq"] = str(arg_or_default(args, "moe_layer_freq", 1)).replace(" ", "")
    if options.get("group_query_attention"):
        options["num_query_groups"] = getattr(args, "num_query_groups", None)
    options["norm_epsilon"] = getattr(args, "norm_epsilon", getattr(args, "layernorm_epsilon", 1e-5))
    options["rotary_base"] = float(getattr(args, "rotary_base", 10000.0))
    options["rotary_seq_len_interpolation_factor"] = float(
        arg_or_default(args, "rotary_seq_len_interpolation_factor", 1.0)
    )
    active_flags = [name for name in ACTIVATION_FLAGS if getattr(args, name, False)]
    flags = {"add_bias_linear": True, "bias_gelu_fusion": True, "openai_gelu": False}
    gelu = gelu_variant(**{name: arg_or_default(args, name, default) for name, default in flags.items()})
    options["activation"] = active_flags[0] if active_flags else gelu
    for name, default in NAME_TABLE["only"].items():
        if name in RATIO_ARGS and pattern is not None:  # the pattern came before the ratios (ssm/mamba_block.py)
            continue
        if (value := arg_or_default(args, name, default)) != default:
            problems.append(f"{name}={value!r}")
    raise_problems(problems, f"{source}: args with values that megalite does not support")
    return options


def _hybrid_pattern(args: Namespace) -> str | None:
    """Return the pattern of a hybrid model without pipeline borders, which belong to the run that saved it."""
    pattern = arg_or_default(args, "hybrid_layer_pattern", arg_or_default(args, "hybrid_override_pattern", None))
    return without_borders(str(pattern)) if pattern else None


def _read_hybrid_pattern(pattern: str, saved_num_layers: Any) -> dict[str, Any]:
    """Return the options of a pattern. Raises ValueError if megalite, or a conversion, does not support it."""
    shown = shown_pattern(pattern)
    try:
        num_layers = num_pattern_layers(pattern)
    except ValueError as error:
        raise ValueError(f"{shown} {str(error).partition('; ')[0]}") from None
    for letter, part in (
        ("+", "multi-latent attention"),
        ("G", "a gated delta net"),
        ("K", "Kimi delta attention"),
        ("M", "a Mamba layer"),
        ("/", "multi-token prediction"),
    ):
        if letter in pattern:
            raise ValueError(f"{shown} has {letter}, {part}, which is not converted")
    if plugin_letters := sorted(set(pattern) - {"*", *MLP_LETTERS}):
        raise ValueError(f"{shown} has {', '.join(plugin_letters)} of a plugin, whose tensors have no names there")
    if saved_num_layers not in (None, num_parts(pattern)):
        raise ValueError(f"num_layers={saved_num_layers}, but {shown} has {num_parts(pattern)} letters")
    return {"hybrid_layer_pattern": pattern, "num_layers": num_layers}


def _read_layer_values(args: Namespace, num_layers: Any, pattern: str | None) -> dict[str, Any]:
    """Return the options of the layers with rotary positions and with a window.

    There is no window if its left side is -1 or the flag of every layer is 0. In a hybrid model each letter of
    `pattern` has a flag, and only those of attention have an effect. Raises ValueError for unsupported values.
    """
    options: dict[str, Any] = {}
    if pattern is not None:
        num_layers = len(pattern)

    def of_attention(flags: Sequence[bool]) -> list[bool]:
        return [flag for flag, letter in zip(flags, pattern or "*" * len(flags), strict=True) if letter == "*"]

    window, window_pattern, no_rope_pattern = (
        arg_or_default(args, name, None) for name in ("window_size", "window_attn_skip_freq", "no_rope_freq")
    )
    size = tuple(window) if isinstance(window, (list, tuple)) else (window,)
    if size not in ((None,), (-1, 0), (-1, -1)):
        if len(size) != 2 or type(size[0]) is not int or size[0] < 1 or size[1] != 0:
            raise ValueError(f"window_size={window!r}")
        has_window: Sequence[bool] = (True,) * (num_layers if type(num_layers) is int else 1)
        if window_pattern is not None:
            has_window = _layer_flags("window_attn_skip_freq", window_pattern, num_layers)
        windows = of_attention(has_window)
        if any(windows):
            options["window_size"] = size
        if any(windows) and not all(windows):
            options["window_attn_skip_freq"] = format_layer_pattern(has_window)
    if no_rope_pattern is not None and no_rope_pattern != 0:
        flags = _layer_flags("no_rope_freq", no_rope_pattern, num_layers)
        is_period = type(no_rope_pattern) is int  # whose flags are 0 in layers without positions; a list has 1 there
        without_rope = of_attention([flag != is_period for flag in flags])
        if any(without_rope) or (is_period and pattern is None):
            options["no_rope_freq"] = str(no_rope_pattern).replace(" ", "")
    return options


def _layer_flags(name: str, pattern: Any, num_layers: Any) -> tuple[bool, ...]:
    """Return a flag for each layer of a pattern. Raises ValueError."""
    with contextlib.suppress(ValueError):
        if type(num_layers) is int and num_layers <= MAX_LAYERS_IN_PATTERN:
            return parse_layer_pattern(str(pattern), num_layers)
    raise ValueError(f"{name}={pattern!r} does not have {num_layers} values, one for each layer")


def arg_or_default(args: Namespace, name: str, default: Any) -> Any:
    """Return an argument, or `default` if it is missing or None."""
    value = getattr(args, name, None)
    return default if value is None else value
