"""Check by a second reading that the layers of a Megatron core checkpoint compute what those of its conversion compute.

There is no other program on a CPU that reads these files and computes the model, as transformers does for those of
Hugging Face. None of the tables and code of the conversion are used (megatron/names.toml, tensor_mapping.py,
ParamSpec). The names, the order of rows and which tensors are stored as a difference are written down here a second
time, in another form (names in megatron_reading.toml), so that a mistake in either is found.

Each layer is filled from the external files and run in fp64 on the same hidden states as the checkpoint's layer. The
embedding, the final norm and the head together count as one more layer. Only one layer of each model is in memory at a
time.
"""

import contextlib
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import Checkpoint
from megalite.config.options import ModelConfig
from megalite.interop.megatron.torch_format import TensorsByRank
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, model_shards
from megalite.parallel.mesh import Mesh
from tools.verification.conversion import ROUNDINGS, load_stage

NUM_TOKENS = 24  # length of the sequence
FP64_BOUND = 1e-9  # largest relative difference of equal layers, if no weight was rounded
ENDS_LAYER = -1  # the embedding, the final norm and the head

# (megalite's name within a layer or outside the layers, the layer or ENDS_LAYER) -> its values in the external files
WeightFn = Callable[[str, int], Tensor]

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LAYER: dict[str, str] = TABLES["layer"]
REPLICATED: dict[str, str] = TABLES["replicated"]
ENDS: dict[str, str] = TABLES["ends"]


def read_weights(ranks: TensorsByRank, args: Any, model: ModelConfig) -> WeightFn:
    """Return the weights of a Megatron core checkpoint.

    Args:
        ranks: `ExternalModel.ranks`.
        args: the arguments in the checkpoint.
        model: the model that the import under test has built.
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
        external_name = _layer_name(name).removeprefix("mlp.")
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
            values = shards(_layer_name(name), layer)[0].double()
            return values + 1 if stores_norms_minus_one and name.endswith(".weight") else values
        if name in REPLICATED:
            return shards(REPLICATED[name], layer)[0]
        if not _is_in_layer(name):
            return torch.cat(shards(ENDS[name], layer))
        if name == "attention.sink":
            return torch.cat(shards("self_attention.core_attention.softmax_offset", layer))
        if name.startswith("mlp.experts."):
            return experts(name.replace("experts.", ""), layer)
        if name.startswith("mlp.shared."):
            name = name.replace("shared.", "")
            external_name = _layer_name(name).replace("mlp.", "mlp.shared_experts.")
            return feed_forward(name, shards(external_name, layer))
        tp_shards = shards(_layer_name(name), layer)
        if name in ("attention.out_bias", "mlp.down_bias"):
            return tp_shards[0]
        if name == "attention.out":
            return torch.cat(tp_shards, 1)
        if name.startswith("mlp."):
            return feed_forward(name, tp_shards)
        return attention(name, tp_shards)

    return weight


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


def _layer_name(name: str) -> str:
    """Return the external name of a norm, a matrix or a bias of a layer."""
    if name.endswith((".weight", ".bias")):
        norm, _, parameter = name.rpartition(".")
        return f"{LAYER[norm]}.{parameter}"
    if name.endswith("_bias"):
        return f"{LAYER[name.removesuffix('_bias')]}.bias"
    return f"{LAYER[name]}.weight"


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
    external_weights: WeightFn,
    external_model: ModelConfig,
    source: Checkpoint,
    model: ModelConfig,
    vocab_size: int,
    *,
    use_main_weights: bool = False,
    rounding: float = 0.0,
) -> LayerAgreement:
    """Compare each layer of external files with that of a checkpoint of megalite.

    Args:
        external_weights: the result of `read_weights`.
        external_model: the model of the external files.
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
        external = _external_stage(external_weights, external_model, layer, vocab_size, length)
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


def _external_stage(
    external_weights: WeightFn, external_model: ModelConfig, layer: int, vocab_size: int, length: int
) -> Stage:
    """Build a stage with one layer, and fill it from the external files.

    Raises:
        CheckpointError: if a tensor is missing or has another size.
    """
    stage = _layer_stage(replace(external_model, apply_layernorm_1p=False), layer, vocab_size, length)
    try:
        for shard in model_shards(stage, Mesh.single_process()):
            name = shard.name.partition("/")[2].removeprefix(f"layers.{layer}.")
            values = external_weights(name, layer)
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
