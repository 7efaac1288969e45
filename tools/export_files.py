"""Files of one program's weights made of another's, tensor by tensor: a checkpoint of step 0 made of external weights
(megalite/interop/tensor_mapping.py), and a `release` for Megatron-LM, one file per (tp, pp) rank, under the names of
Megatron core (megalite/interop/megatron/torch_format.py).

Our checkpoint is stored without the rows that pad a vocabulary; theirs is padded to a multiple of 128 x tp. With a tied
embedding and pp > 1 their last stage holds a copy of it. torch writes a file at once, so the weights of one rank are in
memory, not of all.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.safetensors_file import split_by_size
from megalite.checkpoint.offline import TensorProducer, write_checkpoint
from megalite.checkpoint.storage.location import Location, checkpoint_dir
from megalite.checkpoint.storage.storage import steps_in
from megalite.config.console import ProgressBar
from megalite.config.option_parsers import parse_layer_pattern
from megalite.config.options import ModelConfig
from megalite.interop.megatron.torch_format import ACTIVATION_FLAGS, FILES, FUSED, MEGATRON, SHARED_OPTIONS, TRACKER
from megalite.interop.tensor_mapping import (
    ExportSource,
    ExternalTensor,
    Specs,
    atomic_directory,
    box_for_rank,
    build_mappings,
    join,
    split,
)
from megalite.models.specs import model_specs
from megalite.parallel.spec import Box, ParamSpec, intersect

Options = Mapping[str, Any]
FILE_BYTES = 4 << 30  # of a checkpoint that is made here


def write_import(
    directory: Path,
    foreign: Sequence[ExternalTensor],
    specs: Specs,
    state: dict[str, Any],
    file_bytes: int = FILE_BYTES,
) -> Location:
    """A checkpoint of step 0 from foreign weights; no optimizer states. Raises CheckpointError.

    No checkpoint may exist there yet: a converted model is the start of a run, not a step of one.
    """
    if steps_in(directory):
        raise CheckpointError(f"save={str(directory)!r} already holds checkpoints; give another directory")
    items = []
    for one in foreign:
        boxes = [(spec.stored_name, unpadded(box, specs[spec.name])) for spec, box in one.recipe.parts]
        if parts := [(name, box) for name, box in boxes if box is not None]:
            items.append(
                TensorProducer(one.dtype, parts, lambda one=one: (values for _, _, values in kept(one, specs)))
            )
    files = [[items[i] for i in chosen] for chosen in split_by_size([item.bytes for item in items], file_bytes)]
    folder = checkpoint_dir(directory, 0)
    write_checkpoint(folder, files, {spec.stored_name: spec.stored_shape for spec in specs.values()}, state)
    return folder


def kept(one: ExternalTensor, specs: Specs) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """Our rectangles and their values in a foreign tensor, without rows that `specs` do not store."""
    for spec, box, values in split(one.recipe, one.read()):
        kept = unpadded(box, specs[spec.name])
        if kept is not None:
            yield spec, kept, values[: kept.shape[0]]


def unpadded(box: Box, spec: ParamSpec) -> Box | None:
    """The part of a rectangle that a checkpoint stores: no rows that pad the vocabulary. None where it is empty."""
    return intersect(box, Box((0,) * len(box.start), spec.stored_shape))


def write_megatron(
    directory: Path,
    ours: ExportSource,
    model: ModelConfig,
    vocab_size: int,
    *,
    tokenizer: Options,
    tp: int,
    pp: int,
    fused: bool,
) -> Path:
    """A `release` of Megatron-LM for tp x pp ranks, in memory one rank at a time. Raises CheckpointError.

    tokenizer: its options, which Megatron-LM compares with its own.
    fused: names of Transformer Engine's layers (Megatron-LM's default), in which norms are part of the matmul after.
    """
    padded = -(-vocab_size // (128 * tp)) * 128 * tp
    if model.num_layers % pp or model.num_kv_groups % tp or model.ffn_size % tp or model.num_attention_heads % tp:
        uneven = f"heads, groups and ffn_hidden_size do not all split over tp={tp}, or layers not over pp={pp}"
        raise CheckpointError(f"{uneven}; choose sizes that divide them")
    dtype = str(ours.dtype_of("embedding.word"))[6:]
    sizes = dict(vocab_size=vocab_size, padded_vocab_size=padded)
    args = write_args(model, **sizes, tokenizer=tokenizer, tp=tp, pp=pp, dtype=dtype)

    def name_of(plain: str) -> str:
        for there, here in FUSED if fused else ():
            plain = plain.replace(here, there)
        return plain

    each = model.num_layers // pp
    stages = [range(p * each, (p + 1) * each) for p in range(pp)]
    with atomic_directory(directory) as part, ProgressBar("writing for Megatron-LM", tp * pp, "ranks") as bar:
        for p, layers in enumerate(stages):
            specs = model_specs(model, vocab_size, padded_vocab_size=padded, stages=stages, stage_index=p)
            for t in range(tp):
                wanted = build_mappings(
                    MEGATRON, specs, model.num_kv_groups // tp, layers, box_of=box_for_rank({"tp": tp}, {"tp": t})
                )
                twice = {recipe.parts for recipe in wanted if recipe.is_duplicate}  # the first stage names it as itself
                weights = OrderedDict(
                    (name_of(recipe.external_name), join(recipe, lambda spec, box: _padded(ours, spec, box)))
                    for recipe in wanted
                    if recipe.is_duplicate == (p > 0) or recipe.parts not in twice
                )
                folder = part / "release" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
                folder.mkdir(parents=True)
                state = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": weights}
                _save(state, folder / FILES[0])
                bar.add(1)
        (part / TRACKER).write_text("release\n", encoding="utf-8")
    return directory / "release"


def _save(state: Options, path: Path) -> None:
    """torch.save. Raises the OSError of a disk that fails, behind which torch raises an error about its own format."""
    try:
        with open(path, "xb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_args(
    model: ModelConfig, *, vocab_size: int, padded_vocab_size: int, tokenizer: Options, tp: int, pp: int, dtype: str
) -> Namespace:
    """The arguments that Megatron-LM compares on loading, or takes with --use-checkpoint-args; and the true vocabulary,
    for which it has no argument. `tokenizer`: the options that name it, None where one is not given. Raises
    CheckpointError.
    """
    if any(model.moe_layers):
        raise CheckpointError(f"num_experts={model.num_experts}: experts are not written for Megatron-LM, only read")
    for option in ("parallel_residual", "qk_layernorm_over_heads"):
        if getattr(model, option):
            raise CheckpointError(f"{option}=True is not in Megatron-LM; export to Hugging Face instead")
    if model.activation not in (*ACTIVATION_FLAGS, "gelu", "gelu_erf"):
        raise CheckpointError(f"activation={model.activation} is not in Megatron-LM; keep megalite's own checkpoint")
    values = {name: getattr(model, name) for name in SHARED_OPTIONS if not name.startswith("moe_")}
    if model.position_embedding_type != "yarn":
        values |= {name: None for name in SHARED_OPTIONS if name.startswith("yarn_")}
    values |= {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "num_query_groups": model.num_kv_groups,
    }
    values |= {"norm_epsilon": model.norm_epsilon, "rotary_base": int(model.rotary_base)}
    values |= {"max_position_embeddings": model.max_positions, "add_position_embedding": True}
    values |= {name: model.activation == name for name in ACTIVATION_FLAGS}
    values |= {"window_size": model.window_size}
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        values[name] = _pattern(getattr(model, name), model.num_layers)
    values["rotary_seq_len_interpolation_factor"] = _factor(model.rotary_seq_len_interpolation_factor)
    gelu, bias = model.activation == "gelu", model.add_bias_linear
    values |= {"openai_gelu": gelu and not bias, "bias_gelu_fusion": gelu and bias}
    values |= {**tokenizer, "true_vocab_size": vocab_size, "padded_vocab_size": padded_vocab_size}
    values |= {"make_vocab_size_divisible_by": 128, "virtual_pipeline_model_parallel_size": None}
    values |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    values |= {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    values |= {"consumed_train_samples": 0, "consumed_valid_samples": 0, "skipped_train_samples": 0}
    return Namespace(**values)


def _pattern(text: str | None, layers: int) -> int | list[int] | None:
    if text is None or text.strip().isdigit():
        return None if text is None else int(text)
    return [int(bit) for bit in parse_layer_pattern(text, layers)]


def _factor(value: float) -> int | float | None:
    """A whole number is one there; 1 is not written."""
    return None if value == 1 else int(value) if value == int(value) else value


def _padded(ours: ExportSource, spec: ParamSpec, box: Box) -> Tensor:
    """Our rectangle, with zeros where their vocabulary is padded."""
    kept = unpadded(box, spec)
    if kept == box:
        return ours.read(spec.name, box)
    values = torch.zeros(box.shape, dtype=ours.dtype_of(spec.name))
    if kept is not None:
        values[: kept.shape[0]] = ours.read(spec.name, kept)
    return values
