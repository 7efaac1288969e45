"""Check by an independent reading that the layers of external files compute what those of their conversion compute.

None of the tables and code of the conversion are used (models/families.toml, megatron/names.toml, tensor_mapping.py,
ParamSpec). The names, the order of rows and which tensors are stored as a difference are written down here a second
time, in another form (names in independent_import.toml), so that a mistake in either is found. second_config.py is the
second reading of a config.json.

Each layer is filled from the external files and run in fp64 on the same hidden states as the checkpoint's layer. The
embedding, the final norm and the head together count as one more layer. Only one layer of each model is in memory at a
time, and transformers is not needed.
"""

import contextlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import Checkpoint
from megalite.config.options import ModelConfig
from megalite.config.registry import REGISTRIES
from megalite.interop.megatron.torch_format import TensorsByRank
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, model_shards
from megalite.parallel.mesh import Mesh
from tools.verification import second_config
from tools.verification.conversion import load_stage

NUM_TOKENS = 24  # length of the sequence
# Largest relative difference of equal layers: that of sums in fp64, and in multiples of the weights' rounding.
FP64_BOUND, ROUNDINGS = 1e-9, 8
ENDS_LAYER = -1  # the embedding, the final norm and the head

Names = Mapping[str, str]
# (megalite's name within a layer or outside the layers, the layer or ENDS_LAYER) -> its values in the external files
WeightFn = Callable[[str, int], Tensor]

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LLAMA: Names = TABLES["llama"]
LLAMA_VARIANTS: dict[str, Names] = {
    "mixtral": TABLES["mixtral"],
    "gpt_oss": TABLES["gpt_oss"],
    "gemma2": TABLES["gemma"],
    "gemma3_text": TABLES["gemma"],
}
FUSED_EXPERTS: Names = TABLES["fused_experts"]
GPT2: Names = TABLES["gpt2"]
GPT_NEOX: Names = TABLES["gpt_neox"]
MEGATRON: Names = TABLES["megatron"]
MEGATRON_REPLICATED: Names = TABLES["megatron_replicated"]
ENDS: dict[str, list[str]] = TABLES["ends"]


@dataclass(frozen=True)
class Reading:
    """External weights.

    Attributes:
        weight: returns the values of each parameter.
        model: the model that the external layers compute.
        waves: returns the wavelengths of the rotary positions of a layer; None to compute them from `model`.
    """

    weight: WeightFn
    model: ModelConfig
    waves: Callable[[int], second_config.Waves | None] | None = None


def hugging_face(directory: Path, family: str, model: ModelConfig) -> Reading:
    """Read the safetensors files and the config.json of a Hugging Face model directory.

    Args:
        model: the model that the import under test has built.

    Raises:
        CheckpointError: if the family comes from a plugin.
    """
    from safetensors import safe_open

    if family in REGISTRIES["family"].plugin_components:
        raise CheckpointError(
            f"model_type={family!r} is added by a plugin, and has no second reading; convert without a check"
        )
    config = second_config.read(directory)
    file_of_tensor: dict[str, Any] = {}
    for path in _safetensors_files(directory):
        file = safe_open(path, "pt")
        file_of_tensor |= dict.fromkeys(file.keys(), file)

    def get(name: str) -> Tensor:
        without_prefix = name.partition(".")[2]  # some files omit the first component
        if name not in file_of_tensor and without_prefix in file_of_tensor:
            name = without_prefix
        return file_of_tensor[name].get_tensor(name)

    if family == "gpt2":
        weight = _gpt2_weights(get)
    elif family == "gpt_neox":
        weight = _gpt_neox_weights(get, model)
    else:
        names = {**LLAMA, **LLAMA_VARIANTS.get(family, {})}
        if family != "gpt_oss" and any(name.endswith("experts.gate_up_proj") for name in file_of_tensor):
            names |= FUSED_EXPERTS
        weight = _llama_weights(get, names, family, model)
    return Reading(weight, second_config.model(config, model), partial(second_config.waves, config))


def _llama_weights(get: Callable[[str], Tensor], names: Names, family: str, model: ModelConfig) -> WeightFn:
    """Return the weights of a Llama or one of its relatives."""

    norm_offset = 1 if family.startswith("gemma") else 0

    def weight(name: str, layer: int) -> Tensor:
        if name.endswith("norm.weight"):
            full_name = f"model.layers.{layer}.{names[name]}" if _is_in_layer(name) else _end_name(name, "llama")
            return get(full_name).double() + norm_offset
        if not _is_in_layer(name):
            return get(_end_name(name, "llama"))
        external_name = f"model.layers.{layer}.{{}}"
        if family == "gpt_oss" and "experts." in name:  # stored with the input dim first, gate and up interleaved
            values = get(external_name.format(names[name]))
            if "gate_up" in name:
                values = torch.stack([values[..., ::2], values[..., 1::2]], 1)
            return values if name.endswith("_bias") else values.mT
        experts = range(model.num_experts or 0) if "{e}" in names[name] else range(1)
        parts = [get(external_name.format(part.format(e=expert))) for expert in experts for part in names[name].split()]
        return torch.stack(parts) if len(parts) > 1 else parts[0]

    return weight


def _gpt2_weights(get: Callable[[str], Tensor]) -> WeightFn:
    """Return the weights of a GPT-2, whose matrices are stored with the input dim first, and q, k, v fused."""

    def weight(name: str, layer: int) -> Tensor:
        if not _is_in_layer(name):
            return get(_end_name(name, "gpt2"))
        values = get(f"transformer.h.{layer}.{_external_layer_name(name, GPT2)}")
        if values.dim() > 1:
            values = values.T.contiguous()
        if ".q" in name:
            return values.chunk(3)[0]
        if ".kv" in name:
            return torch.stack(values.chunk(3)[1:])
        return values

    return weight


def _gpt_neox_weights(get: Callable[[str], Tensor], model: ModelConfig) -> WeightFn:
    """Return the weights of a GPT-NeoX, whose q, k, v are fused head by head."""

    def weight(name: str, layer: int) -> Tensor:
        if not _is_in_layer(name):
            return get(_end_name(name, "gpt_neox"))
        values = get(f"gpt_neox.layers.{layer}.{_external_layer_name(name, GPT_NEOX)}")
        if ".q" not in name and ".kv" not in name:
            return values
        heads = values.view(model.num_attention_heads, 3, model.head_size, *values.shape[1:])
        return heads[:, 0].flatten(0, 1) if ".q" in name else heads[:, 1:].transpose(0, 1).flatten(1, 2)

    return weight


def megatron(ranks: TensorsByRank, args: Any, model: ModelConfig) -> Reading:
    """Read the weights of a Megatron core checkpoint.

    Args:
        ranks: `ExternalModel.ranks`.
        args: the arguments in the checkpoint.
    """
    ep = getattr(args, "expert_model_parallel_size", None) or 1
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)
    letter_numbers = None if pattern is None else _number_letters(pattern)
    stores_norms_minus_one = getattr(args, "apply_layernorm_1p", False)  # all norms, Transformer Engine's too

    def shards(name: str, layer: int, ep_rank: int = 0) -> list[Tensor]:
        """Return the shards of all tp ranks."""
        full_name = name
        if layer != ENDS_LAYER:
            is_mlp = name.startswith(("mlp.", "pre_mlp_layernorm."))
            number = layer if letter_numbers is None else letter_numbers[layer, is_mlp]
            full_name = f"decoder.layers.{number}.{name}"
        return [tensors[full_name].load() for (_, rank), tensors in ranks.items() if rank == ep_rank]

    def feed_forward(name: str, tp_shards: list[Tensor]) -> Tensor:
        if name.startswith("mlp.gate_up"):
            return torch.stack([torch.cat([shard.chunk(2)[half] for shard in tp_shards]) for half in (0, 1)])
        return torch.cat(tp_shards, 1 if name == "mlp.down" else 0)

    def experts(name: str, layer: int) -> Tensor:
        external_name = _external_layer_name(name, MEGATRON).removeprefix("mlp.")
        with contextlib.suppress(KeyError):  # torch_dist has all experts in one tensor
            return shards(f"mlp.experts.experts.{external_name}", layer)[0]
        experts_per_rank = (model.num_experts or 0) // ep
        return torch.stack(
            [
                feed_forward(name, shards(f"mlp.experts.local_experts.{i}.{external_name}", layer, ep_rank))
                for ep_rank in range(ep)
                for i in range(experts_per_rank)
            ]
        )

    def attention(name: str, tp_shards: list[Tensor]) -> Tensor:
        """Take queries, or keys and values, out of the rows of each group: its queries, one key, one value."""
        heads_per_group = model.num_attention_heads // model.num_kv_groups
        rows = torch.cat(tp_shards)
        groups = rows.unflatten(0, (model.num_kv_groups, heads_per_group + 2, model.head_size))
        if ".q" in name:
            return groups[:, :heads_per_group].flatten(0, 2)
        return torch.stack([groups[:, heads_per_group + half].flatten(0, 1) for half in (0, 1)])

    def weight(name: str, layer: int) -> Tensor:
        if "norm." in name:
            values = shards(_external_layer_name(name, MEGATRON), layer)[0].double()
            return values + 1 if stores_norms_minus_one and name.endswith(".weight") else values
        if name in MEGATRON_REPLICATED:
            return shards(MEGATRON_REPLICATED[name], layer)[0]
        if not _is_in_layer(name):
            return torch.cat(shards(_end_name(name, "megatron"), layer))
        if name == "attention.sink":
            return torch.cat(shards("self_attention.core_attention.softmax_offset", layer))
        if name.startswith("mlp.experts."):
            return experts(name.replace("experts.", ""), layer)
        if name.startswith("mlp.shared."):
            name = name.replace("shared.", "")
            external_name = _external_layer_name(name, MEGATRON).replace("mlp.", "mlp.shared_experts.")
            return feed_forward(name, shards(external_name, layer))
        tp_shards = shards(_external_layer_name(name, MEGATRON), layer)
        if name in ("attention.out_bias", "mlp.down_bias"):
            return tp_shards[0]
        if name == "attention.out":
            return torch.cat(tp_shards, 1)
        if name.startswith("mlp."):
            return feed_forward(name, tp_shards)
        return attention(name, tp_shards)

    return Reading(weight, model)


def _number_letters(pattern: str) -> dict[tuple[int, bool], int]:
    """Return {(layer, is it an MLP): number of the letter} of Megatron-LM's pattern."""
    numbers: dict[tuple[int, bool], int] = {}
    layer, previous = -1, ""
    for number, letter in enumerate(pattern.replace("|", "")):
        is_mlp = letter in "-E"
        if not (is_mlp and previous == "*"):
            layer += 1
        numbers[layer, is_mlp] = number
        previous = letter
    return numbers


def _is_in_layer(name: str) -> bool:
    return name.startswith(("attention.", "mlp."))


def _end_name(name: str, kind: str) -> str:
    """Return the name of a parameter outside the layers in files of `kind`."""
    embedding, position, norm, head = ENDS[kind]
    external_names = {
        "embedding.word": embedding,
        "embedding.position": position,
        "final_norm.weight": f"{norm}.weight",
        "final_norm.bias": f"{norm}.bias",
        "head": head,
    }
    return external_names[name]


def _external_layer_name(name: str, names: Names) -> str:
    """Return the external name of a norm, a matrix or a bias of a layer, from a table without .weight and .bias."""
    if name.endswith((".weight", ".bias")):
        norm, _, parameter = name.rpartition(".")
        return f"{names[norm]}.{parameter}"
    if name.endswith("_bias"):
        return f"{names[name.removesuffix('_bias')]}.bias"
    return f"{names[name]}.weight"


def _safetensors_files(directory: Path) -> list[Path]:
    """Return the files that transformers reads: model.safetensors if it exists, otherwise those in the index."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))
    return [directory / name for name in sorted(set(index["weight_map"].values()))]


@dataclass(frozen=True)
class LayerAgreement:
    """The agreement of all layers.

    Attributes:
        largest: the largest difference of a layer's output minus its input, relative to the largest such value.
        worst_layer: the layer with this difference, as text.
        bound: the largest allowed difference.
    """

    num_layers: int
    largest: float
    worst_layer: str
    bound: float

    @property
    def within_bound(self) -> bool:
        return self.largest <= self.bound

    def __str__(self) -> str:
        if self.within_bound:
            return f"check: {self.num_layers} layers read a second way compute the same, to {self.largest:.1e}"
        return (
            f"check: {self.worst_layer}, read a second way, computes something else: it differs by {self.largest:.2g}"
        )


@torch.no_grad()
def compare_layers(
    reading: Reading,
    source: Checkpoint,
    model: ModelConfig,
    vocab_size: int,
    *,
    use_main_weights: bool = False,
    rounding: float = 0.0,
) -> LayerAgreement:
    """Compare each layer of external files with that of a checkpoint of megalite.

    Args:
        model: the model of the checkpoint.
        use_main_weights: take the fp32 weights of the optimizer from the checkpoint.
        rounding: the largest relative change of a weight in the conversion.

    Raises:
        CheckpointError: if a tensor is missing.
    """
    length = min(NUM_TOKENS, model.max_positions)
    generator = torch.Generator().manual_seed(1234)
    ids_SB = torch.randint(0, vocab_size, (length, 1), generator=generator)
    x_SBD = torch.randn(length, 1, model.hidden_size, generator=generator, dtype=torch.float64)
    batch = Batch(ids_SB, None, None, torch.zeros(1, dtype=torch.int64))
    ctx = ForwardContext()
    num_rows = source.shape("model/embedding.word")[0]
    largest, worst_layer = 0.0, "no layer"
    for layer in range(ENDS_LAYER, model.num_layers):
        local = _layer_stage(model, layer, num_rows, length)
        load_stage(local, source, use_main_weights)
        external = _external_stage(reading, layer, vocab_size, length)
        expected, actual = local(x_SBD, batch, ctx), external(x_SBD, batch, ctx)
        if layer != ENDS_LAYER:  # only what the layer adds
            expected, actual = expected - x_SBD, actual - x_SBD
        expected, actual = expected[..., :vocab_size], actual[..., :vocab_size]
        differs = float((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-30))
        if math.isnan(differs):
            differs = math.inf
        if differs > largest:
            largest = differs
            worst_layer = "the embedding with the final norm and the head" if layer == ENDS_LAYER else f"layer {layer}"
    return LayerAgreement(model.num_layers, largest, worst_layer, FP64_BOUND + ROUNDINGS * rounding)


def _external_stage(reading: Reading, layer: int, vocab_size: int, length: int) -> Stage:
    """Build a stage with one layer, and fill it from the external files.

    Raises:
        CheckpointError: if a tensor is missing or has another size.
    """
    stage = _layer_stage(replace(reading.model, apply_layernorm_1p=False), layer, vocab_size, length)
    waves = None if reading.waves is None or layer == ENDS_LAYER else reading.waves(layer)
    if waves is not None:
        stage.rope_tables = dict.fromkeys(stage.rope_tables, waves.tables(length))
    try:
        for shard in model_shards(stage, Mesh.single_process()):
            name = shard.name.partition("/")[2].removeprefix(f"layers.{layer}.")
            values = reading.weight(name, layer)
            if name in ("embedding.word", "head"):
                values = values[:vocab_size]
            shard.data.copy_(values.reshape(shard.data.shape))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"the second reading stops at layer {layer}: {error}; give complete files") from None
    return stage


def _layer_stage(model: ModelConfig, layer: int, num_rows: int, length: int) -> Stage:
    """Build a stage in fp64 with one layer, or for ENDS_LAYER with only the embedding and the head."""
    make = ParamFactory(Mesh.single_process(), torch.float64, seed=0)
    if model.position_embedding_type != "learned_absolute":  # shorten the tables of positions
        model = replace(model, seq_length=length, max_position_embeddings=length)
    stages = [range(0), range(layer, layer + 1), range(0)]
    if layer == ENDS_LAYER:
        stages = [range(0)]
    return Stage(make, model, stages, len(stages) // 2, vocab_size=num_rows, padded_vocab_size=num_rows).eval()
