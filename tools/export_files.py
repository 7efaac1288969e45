"""Write converted weights, tensor by tensor.

`write_initial_checkpoint` makes a checkpoint of step 0 from external weights (megalite/interop/tensor_mapping.py).
`write_megatron` makes a `release` for Megatron-LM, one file per (tp, pp) rank, with the names of Megatron core
(megalite/interop/megatron/torch_format.py), for a GPTModel or a HybridModel.

A checkpoint of megalite is stored without the rows that pad the vocabulary, while Megatron-LM's is padded to a multiple
of 128 x tp. With a tied embedding and pp > 1, Megatron-LM's last stage has a copy of the embedding. torch.save writes a
file at once, so the weights of one rank have to fit into memory.
"""

import bisect
import functools
import itertools
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
from megalite.config.hybrid_pattern import BORDER, MLP_LETTERS, shown_pattern
from megalite.config.option_parsers import parse_layer_pattern
from megalite.config.options import ModelConfig
from megalite.interop.megatron.torch_format import (
    ACTIVATION_FLAGS,
    FILES,
    FIRST_STAGE,
    LAYER,
    SHARED_OPTIONS,
    TRACKER,
    hybrid_name,
    tensor_names,
    transformer_engine_name,
)
from megalite.interop.tensor_mapping import (
    ExportSource,
    ExternalTensor,
    Specs,
    TensorMapping,
    atomic_directory,
    box_for_rank,
    build_mappings,
    join,
    split,
)
from megalite.models.specs import checkpoint_specs
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
    transformer_engine: bool,
    is_hybrid: bool,
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
        transformer_engine: Use the names of Transformer Engine's layers (Megatron-LM's default), where a norm is part
            of the matmul that follows it, and the experts of a layer are one grouped matmul.
        is_hybrid: Write a HybridModel, where each mixer and each MLP is a layer, instead of a GPTModel.

    Raises:
        CheckpointError: Megatron-LM does not have such a model, or the sizes cannot be divided.
    """
    padded_vocab_size = -(-vocab_size // (128 * tp)) * 128 * tp
    args = write_args(
        model,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        tokenizer=tokenizer,
        tp=tp,
        pp=pp,
        dtype=str(source.dtype_of("embedding.word")).removeprefix("torch."),
        is_hybrid=is_hybrid,
        transformer_engine=transformer_engine,
    )
    widths = [model.ffn_size] if model.has_dense_ffn else []
    if model.has_experts:
        widths += [model.expert_ffn_size, model.moe_shared_expert_intermediate_size or 0]
    if any(size % tp for size in (model.num_attention_heads, model.num_kv_groups, *widths)):
        raise CheckpointError(f"heads, groups and feed-forward widths do not all split over tp={tp}; choose another tp")
    specs = checkpoint_specs(model, vocab_size, padded_vocab_size)
    names = tensor_names(model, is_hybrid)
    layers_per_stage = _layers_per_stage(model, pp, is_hybrid)
    with atomic_directory(directory) as staging_dir, ProgressBar("writing for Megatron-LM", tp * pp, "ranks") as bar:
        for tp_rank in range(tp):
            box_of = box_for_rank({"tp": tp, "etp": tp}, {"tp": tp_rank, "etp": tp_rank})
            groups = {"groups": model.num_kv_groups // tp}
            mappings = build_mappings(names, specs, groups, range(model.num_layers), box_of=box_of)
            for pp_rank, stage_mappings in enumerate(_split_into_stages(mappings, layers_per_stage)):
                # OrderedDict[str, Tensor]() would pickle its type arguments, which readers refuse
                weights: OrderedDict[str, Tensor] = OrderedDict()
                for name, mapping in stage_mappings:
                    if transformer_engine:
                        has_experts = model.moe_layers[_layer_of(mapping)] if LAYER.match(name) else False
                        name = transformer_engine_name(name, has_experts)
                    if is_hybrid:
                        name = hybrid_name(name)
                    weights[name] = join(mapping, functools.partial(_padded_values, source))
                rank_name = f"mp_rank_{tp_rank:02d}_{pp_rank:03d}" if pp > 1 else f"mp_rank_{tp_rank:02d}"
                rank_dir = staging_dir / "release" / rank_name
                rank_dir.mkdir(parents=True)
                state = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": weights}
                _save(state, rank_dir / FILES[0])
                bar.add(1)
        (staging_dir / TRACKER).write_text("release\n", encoding="utf-8")
    return directory / "release"


def _layers_per_stage(model: ModelConfig, pp: int, is_hybrid: bool) -> list[int]:
    """Return the number of Megatron-LM's layers of each stage, which differ by at most one in a hybrid model.

    Raises CheckpointError if the layers cannot be split.
    """
    num_layers = len(model.layer_parts) if is_hybrid else model.num_layers
    if not is_hybrid and num_layers % pp:
        raise CheckpointError(f"num_layers={num_layers} do not split over pp={pp}; choose a divisor")
    if num_layers < pp:
        raise CheckpointError(f"{num_layers} attention and MLP layers are fewer than pp={pp}; choose a smaller one")
    return [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]


def _layer_of(mapping: TensorMapping) -> int:
    """Return the number of the layer that a tensor in a layer belongs to."""
    return int(mapping.parts[0][0].name.split(".")[1])


def _split_into_stages(
    mappings: Sequence[TensorMapping], layers_per_stage: Sequence[int]
) -> list[list[tuple[str, TensorMapping]]]:
    """Return the tensors of each stage under their names there, which count layers within the stage.

    With several stages, the head of a tied embedding is a tensor of the last one.
    """
    stages: list[list[tuple[str, TensorMapping]]] = [[] for _ in layers_per_stage]
    first_layers = [0, *itertools.accumulate(layers_per_stage)]
    for mapping in mappings:
        name = mapping.external_name
        if match := LAYER.match(name):
            number = int(match[1])
            stage = bisect.bisect_right(first_layers, number) - 1
            stages[stage].append((f"decoder.layers.{number - first_layers[stage]}.{name[match.end() :]}", mapping))
        elif name in FIRST_STAGE:
            stages[0].append((name, mapping))
        elif not mapping.is_duplicate or len(stages) > 1:
            stages[-1].append((name, mapping))
    return stages


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
    model: ModelConfig,
    *,
    vocab_size: int,
    padded_vocab_size: int,
    tokenizer: Options,
    tp: int,
    pp: int,
    dtype: str,
    is_hybrid: bool = False,
    transformer_engine: bool = True,
) -> Namespace:
    """Return the arguments that Megatron-LM compares on loading, or takes with --use-checkpoint-args.

    They also have the true vocabulary size, for which Megatron-LM has no argument. Raises CheckpointError if
    Megatron-LM does not have such a model.
    """
    shown = shown_pattern(model.with_pattern().hybrid_layer_pattern or "")
    if model.multi_latent_attention:
        raise CheckpointError("multi_latent_attention=True is not converted to Megatron-LM; keep megalite's checkpoint")
    if plugin_mixers := sorted(set(model.layer_parts) - {"attention", *MLP_LETTERS.values()}):
        raise CheckpointError(f"{shown}: mixer {plugin_mixers[0]!r} is not in Megatron-LM; keep megalite's checkpoint")
    if is_hybrid and not transformer_engine:
        remedy = "drop it, or give --export-model-type GPTModel" if model.has_only_full_layers else "drop it"
        raise CheckpointError(f"transformer_impl=local: a HybridModel has layers of Transformer Engine; {remedy}")
    if not is_hybrid and not model.has_only_full_layers:
        raise CheckpointError(f"{shown} is not attention and MLP in turn; give --export-model-type HybridModel")
    for option in ("parallel_residual", "qk_layernorm_over_heads", "sandwich_norm"):
        if getattr(model, option):
            raise CheckpointError(f"{option}=True is not in Megatron-LM; export to Hugging Face instead")
    if model.norm_placement != "input":
        raise CheckpointError(
            f"norm_placement={model.norm_placement} is not in Megatron-LM; export to Hugging Face instead"
        )
    without_argument = {
        "embedding_multiplier": 1.0,
        "softmax_scale": None,
        "rotary_local_base": None,
        "qk_norm_epsilon": None,
        "moe_router_group_score_topk": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    for option, default in without_argument.items():
        if (value := getattr(model, option)) != default:
            raise CheckpointError(f"{option}={value:g} is not written for Megatron-LM; keep megalite's own checkpoint")
    if depths := model.num_mtp_depths:
        raise CheckpointError(f"mtp_num_layers={depths} is not written for Megatron-LM; keep megalite's own checkpoint")
    if model.activation not in (*ACTIVATION_FLAGS, "gelu", "gelu_erf"):
        raise CheckpointError(f"activation={model.activation} is not in Megatron-LM; keep megalite's own checkpoint")
    if model.has_experts and model.add_bias_linear:
        raise CheckpointError("experts with biases are not written for Megatron-LM; keep megalite's own checkpoint")
    values = {name: getattr(model, name) for name in SHARED_OPTIONS}
    for name in SHARED_OPTIONS:
        if name.startswith("moe_") and not model.has_experts:
            del values[name]
        elif isinstance(values[name], tuple):
            values[name] = [*values[name]]
    if model.has_experts:
        values |= {"moe_ffn_hidden_size": model.expert_ffn_size, "moe_grouped_gemm": transformer_engine}
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
        **_layer_values(model, pp, is_hybrid),
        "openai_gelu": is_gelu and not model.add_bias_linear,
        "bias_gelu_fusion": is_gelu and model.add_bias_linear,
        **tokenizer,
        "true_vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "make_vocab_size_divisible_by": 128,
        "virtual_pipeline_model_parallel_size": None,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tp,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    return Namespace(**values)


def _layer_values(model: ModelConfig, pp: int, is_hybrid: bool) -> dict[str, Any]:
    """Return the arguments about single layers: lists with a value for each layer, or for each letter of a pattern."""
    if not is_hybrid:
        texts = {name: getattr(model, name) for name in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq")}
        if model.hybrid_layer_pattern is not None:  # whose lists have a value for each letter
            texts = {
                "window_attn_skip_freq": texts["window_attn_skip_freq"]
                and str([int(w is not None) for w in model.layer_windows]),
                "no_rope_freq": texts["no_rope_freq"] and str([int(not use_rope) for use_rope in model.rope_layers]),
                "moe_layer_freq": str([int(has_experts) for has_experts in model.moe_layers]),
            }
        if not model.has_experts:
            del texts["moe_layer_freq"]
        return {name: _layer_pattern(text, model.num_layers) for name, text in texts.items()}
    hybrid = model.for_any_pipeline().with_pattern()
    letters = hybrid.hybrid_layer_pattern or ""
    stops = [0, *itertools.accumulate(_layers_per_stage(model, pp, is_hybrid))]
    stages = [letters[start:stop] for start, stop in itertools.pairwise(stops)]
    return {
        "num_layers": len(letters),
        "hybrid_layer_pattern": BORDER.join(stages),
        "is_hybrid_model": True,  # earlier releases ask for it
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        "window_attn_skip_freq": _layer_pattern(hybrid.window_attn_skip_freq, len(letters)),
        "no_rope_freq": _layer_pattern(hybrid.no_rope_freq, len(letters)),
    }


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
