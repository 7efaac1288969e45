"""Write converted weights, tensor by tensor.

`write_initial_checkpoint` makes a checkpoint of step 0 from external weights (megalite/interop/tensor_mapping.py).
`write_megatron` makes a `release` for Megatron-LM, one file per (tp, pp) rank, with the names of Megatron core
(megalite/interop/megatron/torch_format.py).

A checkpoint of megalite is stored without the rows that pad the vocabulary, while Megatron-LM's is padded to a multiple
of 128 x tp. With a tied embedding and pp > 1, Megatron-LM's last stage has a copy of the embedding. torch.save writes a
file at once, so the weights of one rank have to fit into memory.
"""

import functools
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
from megalite.common.console import ProgressBar
from megalite.config.hybrid_pattern import shown_pattern
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
FILE_BYTES = 4 << 30  # size of a file of the checkpoints that `write_initial_checkpoint` makes


def write_initial_checkpoint(
    directory: Path,
    tensors: Sequence[ExternalTensor],
    specs: Specs,
    state: dict[str, Any],
    file_bytes: int = FILE_BYTES,
) -> Location:
    """Write a checkpoint of step 0 from external weights, without optimizer states, and return its directory.

    `directory` must not contain checkpoints: a converted model is the start of a run, not a step of one. Raises
    CheckpointError.
    """
    if steps_in(directory):
        raise CheckpointError(f"save={str(directory)!r} already holds checkpoints; give another directory")
    producers = []
    for tensor in tensors:
        boxes = [(spec.stored_name, stored_box(box, specs[spec.name])) for spec, box in tensor.mapping.parts]
        parts = [(name, box) for name, box in boxes if box is not None]
        if parts:
            values = functools.partial(_stored_values, tensor, specs)
            producers.append(TensorProducer(tensor.dtype, parts, values))
    groups = split_by_size([producer.num_bytes for producer in producers], file_bytes)
    files = [[producers[i] for i in group] for group in groups]
    checkpoint = checkpoint_dir(directory, 0)
    write_checkpoint(checkpoint, files, {spec.stored_name: spec.stored_shape for spec in specs.values()}, state)
    return checkpoint


def stored_boxes(tensor: ExternalTensor, specs: Specs) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """Yield (parameter, rectangle, values) for an external tensor, without rows that a checkpoint omits."""
    for spec, box, values in split(tensor.mapping, tensor.read()):
        stored = stored_box(box, specs[spec.name])
        if stored is not None:
            yield spec, stored, values[: stored.shape[0]]


def _stored_values(tensor: ExternalTensor, specs: Specs) -> Iterator[Tensor]:
    for _, _, values in stored_boxes(tensor, specs):
        yield values


def stored_box(box: Box, spec: ParamSpec) -> Box | None:
    """Return the part of a rectangle that a checkpoint stores, without rows that pad the vocabulary, or None."""
    return intersect(box, Box((0,) * len(box.start), spec.stored_shape))


def write_megatron(
    directory: Path,
    source: ExportSource,
    model: ModelConfig,
    vocab_size: int,
    *,
    tokenizer: Options,
    tp: int,
    pp: int,
    fused: bool,
) -> Path:
    """Write a `release` of Megatron-LM for tp x pp ranks, with one rank in memory at a time, and return its directory.

    Args:
        directory: Must not exist yet; it becomes the value of Megatron-LM's --load.
        source: The checkpoint.
        model: Its model.
        vocab_size: The number of rows without padding.
        tokenizer: The options of the tokenizer, which Megatron-LM compares with its own.
        tp: The number of tensor parallel ranks.
        pp: The number of pipeline stages.
        fused: Use the names of Transformer Engine's layers (Megatron-LM's default), where a norm is part of the
            matmul that follows it.

    Raises:
        CheckpointError: Megatron-LM does not have such a model, or the sizes cannot be divided.
    """
    padded_vocab_size = -(-vocab_size // (128 * tp)) * 128 * tp
    if model.num_layers % pp or model.num_kv_groups % tp or model.ffn_size % tp or model.num_attention_heads % tp:
        problem = f"heads, groups and ffn_hidden_size do not all split over tp={tp}, or layers not over pp={pp}"
        raise CheckpointError(f"{problem}; choose sizes that divide them")
    args = write_args(
        model,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        tokenizer=tokenizer,
        tp=tp,
        pp=pp,
        dtype=str(source.dtype_of("embedding.word")).removeprefix("torch."),
    )
    layers_per_stage = model.num_layers // pp
    stages = [range(p * layers_per_stage, (p + 1) * layers_per_stage) for p in range(pp)]
    with atomic_directory(directory) as staging_dir, ProgressBar("writing for Megatron-LM", tp * pp, "ranks") as bar:
        for pp_rank, layers in enumerate(stages):
            specs = model_specs(
                model, vocab_size, padded_vocab_size=padded_vocab_size, stages=stages, stage_index=pp_rank
            )
            for tp_rank in range(tp):
                box_of = box_for_rank({"tp": tp}, {"tp": tp_rank})
                mappings = build_mappings(MEGATRON, specs, model.num_kv_groups // tp, layers, box_of=box_of)
                duplicates = {mapping.parts for mapping in mappings if mapping.is_duplicate}
                # OrderedDict[str, Tensor]() would pickle its type arguments, which readers refuse
                weights: OrderedDict[str, Tensor] = OrderedDict()
                for mapping in mappings:
                    # the head of a tied embedding: the first stage has the embedding, the last one the head
                    if mapping.parts in duplicates and mapping.is_duplicate != (pp_rank > 0):
                        continue
                    name = _fused_name(mapping.external_name) if fused else mapping.external_name
                    weights[name] = join(mapping, functools.partial(_padded_values, source))
                rank_name = f"mp_rank_{tp_rank:02d}_{pp_rank:03d}" if pp > 1 else f"mp_rank_{tp_rank:02d}"
                rank_dir = staging_dir / "release" / rank_name
                rank_dir.mkdir(parents=True)
                state = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": weights}
                _save(state, rank_dir / FILES[0])
                bar.add(1)
        (staging_dir / TRACKER).write_text("release\n", encoding="utf-8")
    return directory / "release"


def _fused_name(name: str) -> str:
    """Return the name that a tensor has in Transformer Engine's layers."""
    for fused_part, part in FUSED:
        name = name.replace(part, fused_part)
    return name


def _save(state: Options, path: Path) -> None:
    """Save with torch, but raise the OSError of a failing disk, which torch hides behind an error about its format."""
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
    """Return the arguments that Megatron-LM compares on loading, or takes with --use-checkpoint-args.

    They also have the true vocabulary size, for which Megatron-LM has no argument. Raises CheckpointError if
    Megatron-LM does not have such a model.
    """
    if model.has_experts:
        raise CheckpointError(f"num_experts={model.num_experts}: experts are not written for Megatron-LM, only read")
    if model.layer_parts != ("attention", "mlp") * model.num_layers:
        raise CheckpointError(
            f"{shown_pattern(model.hybrid_layer_pattern or '')} is not attention and MLP in turn; keep megalite's "
            "own checkpoint"
        )
    for option in ("parallel_residual", "qk_layernorm_over_heads"):
        if getattr(model, option):
            raise CheckpointError(f"{option}=True is not in Megatron-LM; export to Hugging Face instead")
    for option in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (value := getattr(model, option)) is not None:
            raise CheckpointError(f"{option}={value:g} is not in Megatron-LM; keep megalite's own checkpoint")
    if model.activation not in (*ACTIVATION_FLAGS, "gelu", "gelu_erf"):
        raise CheckpointError(f"activation={model.activation} is not in Megatron-LM; keep megalite's own checkpoint")
    values = {name: getattr(model, name) for name in SHARED_OPTIONS if not name.startswith("moe_")}
    if model.position_embedding_type != "yarn":
        values |= {name: None for name in SHARED_OPTIONS if name.startswith("yarn_")}
    values |= {name: model.activation == name for name in ACTIVATION_FLAGS}
    is_gelu = model.activation == "gelu"
    interpolation = model.rotary_seq_len_interpolation_factor
    values |= {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "num_query_groups": model.num_kv_groups,
        "norm_epsilon": model.norm_epsilon,
        "rotary_base": int(model.rotary_base),
        "rotary_seq_len_interpolation_factor": None if interpolation == 1 else _int_if_integral(interpolation),
        "max_position_embeddings": model.max_positions,
        "add_position_embedding": True,
        "window_size": model.window_size,
        "window_attn_skip_freq": _layer_pattern(model.window_attn_skip_freq, model.num_layers),
        "no_rope_freq": _layer_pattern(model.no_rope_freq, model.num_layers),
        "openai_gelu": is_gelu and not model.add_bias_linear,
        "bias_gelu_fusion": is_gelu and model.add_bias_linear,
        **tokenizer,
        "true_vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "make_vocab_size_divisible_by": 128,
        "virtual_pipeline_model_parallel_size": None,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    return Namespace(**values)


def _layer_pattern(text: str | None, num_layers: int) -> int | list[int] | None:
    """Return a pattern of layers as Megatron-LM stores it: a frequency, or a list with 0 or 1 for each layer."""
    if text is None:
        return None
    if text.strip().isdigit():
        return int(text)
    return [int(bit) for bit in parse_layer_pattern(text, num_layers)]


def _int_if_integral(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _padded_values(source: ExportSource, spec: ParamSpec, box: Box) -> Tensor:
    """Return the values of a rectangle, with zeros in the rows that pad the vocabulary."""
    stored = stored_box(box, spec)
    if stored == box:
        return source.read(spec.name, box)
    values = torch.zeros(box.shape, dtype=source.dtype_of(spec.name))
    if stored is not None:
        values[: stored.shape[0]] = source.read(spec.name, stored)
    return values
