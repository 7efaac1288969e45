"""A second reading of foreign files, to check a conversion with: does a layer of theirs compute what ours computes?

The tables that convert (models/families.toml, megatron/names.toml, convert.py, ParamSpec) are not used: names, the
order of rows and what is stored as a difference stand here (names in second_reading.toml) once more, in another form,
so that a mistake in one of them shows. What a config.json means is read again in second_config.py.
Layer after layer is filled from the files and run in fp64 beside ours, on the same states; embedding, final norm and
head are one more layer. One layer of each is in memory at a time, and transformers is not needed.
"""

import contextlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import Checkpoint
from megalite.config.options import ModelConfig
from megalite.config.registry import REGISTRIES
from megalite.interop.megatron.torch_format import TensorsByRank
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import Batch
from megalite.nn.parameter import ParamFactory, model_shards
from megalite.parallel.mesh import Mesh
from tools.verification import second_config
from tools.verification.conversion import fill_stage

TOKENS = 24  # of the sequence that is computed
EXACT, ROUNDED = 1e-9, 8  # largest difference that is none, relative: of fp64 sums; in roundings of the weights

Weight = Callable[[str, int], Tensor]  # (our name within a layer, or outside of them; the layer) -> what is used


class Reading(NamedTuple):
    """`weight`: of each of our parameters. `model`: what its layers compute. `waves`: of its rotary positions, where
    they were read apart from `model`."""

    weight: Weight
    model: ModelConfig
    waves: second_config.Waves | None = None


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LLAMA, MIXTRAL, IN_MEMORY, GPT_OSS, GPT2, GPT_NEOX, MEGATRON, SINGLE, ENDS = TABLES.values()


def _end(name: str, kind: str) -> str:
    """The name that files of `kind` give to a parameter outside the layers."""
    word, position, norm, head = ENDS[kind]
    norms = {f"final_norm.{part}": f"{norm}.{part}" for part in ("weight", "bias")}
    return {"embedding.word": word, "embedding.position": position, "head": head, **norms}[name]


def _of_layer(name: str, which: Mapping[str, str]) -> str:
    """The matrix, norm or bias of `which` that our name is."""
    if name.endswith((".weight", ".bias")):
        norm, _, part = name.rpartition(".")
        return f"{which[norm]}.{part}"
    bare = name.removesuffix("_bias")
    return f"{which[bare]}.{'bias' if bare != name else 'weight'}"


def _files(folder: Path) -> list[Path]:
    """The files that transformers reads: model.safetensors, or else those in the index."""
    if (single := folder / "model.safetensors").is_file():
        return [single]
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def hugging_face(folder: Path, family: str, model: ModelConfig) -> Reading:
    """The safetensors files and the config.json of a directory. `model`: as the importer has it."""
    from safetensors import safe_open

    if family in REGISTRIES["family"].added:
        raise CheckpointError(f"model_type={family!r} is a plugin's: there is no second reading of it; do not check")
    config = second_config.read(folder)
    files = [safe_open(path, "pt") for path in _files(folder)]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def get(name: str) -> Tensor:
        bare = name.partition(".")[2]  # some files leave out the first word
        name = name if name in places or bare not in places else bare
        return places[name].get_tensor(name)

    kind = family if family in ("gpt2", "gpt_neox") else "llama"
    names = LLAMA | {"mixtral": MIXTRAL, "gpt_oss": GPT_OSS}.get(family, {})
    if family != "gpt_oss" and any(name.endswith("experts.gate_up_proj") for name in places):
        names |= IN_MEMORY
    H, K = model.num_attention_heads, model.head_size

    def weight(name: str, n: int) -> Tensor:
        if not name.startswith(("attention.", "mlp.")):
            return get(_end(name, kind))
        if family == "gpt_oss" and "experts." in name:
            found = get(f"model.layers.{n}.{names[name]}")
            found = torch.stack([found[..., ::2], found[..., 1::2]], 1) if "gate_up" in name else found
            return found if name.endswith("_bias") else found.mT
        if kind == "llama":
            every = range(model.num_experts or 0) if "{e}" in names[name] else (0,)
            parts = [get(f"model.layers.{n}.{theirs.format(e=e)}") for e in every for theirs in names[name].split()]
            return torch.stack(parts) if len(parts) > 1 else parts[0]
        if kind == "gpt2":
            found = get(f"transformer.h.{n}.{_of_layer(name, GPT2)}")
            found = found if found.dim() == 1 else found.T.contiguous()
            q, k, v = found.chunk(3) if ".q" in name or ".kv" in name else (found,) * 3
            return torch.stack([k, v]) if ".kv" in name else q
        found = get(f"gpt_neox.layers.{n}.{_of_layer(name, GPT_NEOX)}")
        if ".q" not in name and ".kv" not in name:
            return found
        heads = found.view(H, 3, K, *found.shape[1:])
        return heads[:, 0].flatten(0, 1) if ".q" in name else heads[:, 1:].transpose(0, 1).flatten(1, 2)

    return Reading(weight, second_config.model(config, model), second_config.waves(config))


def megatron(ranks: TensorsByRank, args: Any, model: ModelConfig) -> Reading:
    """The weights of Megatron core's tensors. `ranks`: ForeignModel.ranks."""
    ep = getattr(args, "expert_model_parallel_size", None) or 1

    def shards(name: str, layer: int, ep_rank: int = 0) -> list[Tensor]:  # of each tp rank; layer -1: outside of them
        full = name if layer < 0 else f"decoder.layers.{layer}.{name}"
        return [rank[full].load() for (_, e), rank in ranks.items() if e == ep_rank]

    def feed_forward(name: str, found: list[Tensor]) -> Tensor:
        if name.startswith("mlp.gate_up"):
            return torch.stack([torch.cat([one.chunk(2)[half] for one in found]) for half in (0, 1)])
        return torch.cat(found, 1 if name == "mlp.down" else 0)

    def experts(name: str, n: int) -> Tensor:
        theirs = _of_layer(name, MEGATRON).removeprefix("mlp.")
        with contextlib.suppress(KeyError):  # torch_dist
            return shards(f"mlp.experts.experts.{theirs}", n)[0]
        places = [(i, e) for e in range(ep) for i in range((model.num_experts or 0) // ep)]
        each = [shards(f"mlp.experts.local_experts.{i}.{theirs}", n, e) for i, e in places]
        return torch.stack([feed_forward(name, found) for found in each])

    def weight(name: str, n: int) -> Tensor:
        if "norm." in name:  # Transformer Engine's zero_centered_gamma, for every norm that there is
            less = 1 if name.endswith(".weight") and getattr(args, "apply_layernorm_1p", False) else 0
            return shards(_of_layer(name, MEGATRON), n)[0].double() + less
        if name in SINGLE:
            return shards(SINGLE[name], n)[0]
        if not name.startswith(("attention.", "mlp.")):
            return torch.cat(shards(_end(name, "megatron"), n))
        if name == "attention.sink":
            return torch.cat(shards("self_attention.core_attention.softmax_offset", n))
        if name.startswith("mlp.experts."):
            return experts(name.replace("experts.", ""), n)
        if name.startswith("mlp.shared."):
            name = name.replace("shared.", "")
            return feed_forward(name, shards(_of_layer(name, MEGATRON).replace("mlp.", "mlp.shared_experts."), n))
        found = shards(_of_layer(name, MEGATRON), n)
        if name in ("attention.out_bias", "mlp.down_bias"):
            return found[0]
        if name == "attention.out":
            return torch.cat(found, 1)
        if name.startswith("mlp."):
            return feed_forward(name, found)
        each, K = model.num_attention_heads // model.num_kv_groups, model.head_size
        groups = torch.cat(found).unflatten(0, (model.num_kv_groups, each + 2, K))
        if ".q" in name:
            return groups[:, :each].flatten(0, 2)
        return torch.stack([groups[:, each + half].flatten(0, 1) for half in (0, 1)])

    return Reading(weight, model)


class Agreement(NamedTuple):
    """`largest`: difference of what a layer adds to its input, in parts of the largest such value; `where`: there."""

    layers: int
    largest: float
    where: str
    bound: float

    @property
    def good(self) -> bool:
        return self.largest <= self.bound

    def __str__(self) -> str:
        if self.good:
            return f"check: {self.layers} layers read a second way compute the same, to {self.largest:.1e}"
        return f"check: {self.where}, read a second way, computes something else: it differs by {self.largest:.2g}"


@torch.no_grad()
def compare_layers(
    reading: Reading,
    source: Checkpoint,
    model: ModelConfig,
    vocab_size: int,
    *,
    main_weights: bool = False,
    rounding: float = 0.0,
) -> Agreement:
    """Each layer of foreign files beside that of our checkpoint. `main_weights`: of ours, those that the optimizer
    keeps; `rounding`: what it changed in theirs at most, relative. Raises CheckpointError where a tensor is missing.
    """
    S = min(TOKENS, model.max_positions)
    generator = torch.Generator().manual_seed(1234)
    ids_SB = torch.randint(0, vocab_size, (S, 1), generator=generator)
    x_SBD = torch.randn(S, 1, model.hidden_size, generator=generator, dtype=torch.float64)
    batch = Batch(ids_SB, None, None, torch.zeros(1, dtype=torch.int64), 0)
    rows = source.shape("model/embedding.word")[0]
    worst, where = 0.0, "no layer"
    for n in range(-1, model.num_layers):
        mine = _stage(model, n, rows, S)
        fill_stage(mine, source, main_weights)
        other = _stage(replace(reading.model, apply_layernorm_1p=False), n, vocab_size, S)
        other.rope = other.rope if reading.waves is None else reading.waves.tables(S)
        try:
            for piece in model_shards(other, Mesh.single_process()):
                name = piece.name.partition("/")[2]
                used = reading.weight(name.removeprefix(f"layers.{n}."), n)
                if name in ("embedding.word", "head"):
                    used = used[:vocab_size]
                piece.data.copy_(used.reshape(piece.data.shape))
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"the second reading stops at layer {n}: {error}; give complete files") from None
        want, got = mine(x_SBD, batch), other(x_SBD, batch)
        if n >= 0:
            want, got = want - x_SBD, got - x_SBD
        want = want[..., :vocab_size]
        differs = float((want - got[..., :vocab_size]).abs().max() / want.abs().max().clamp(min=1e-30))
        differs = math.inf if math.isnan(differs) else differs
        if differs > worst:
            worst, where = differs, f"layer {n}" if n >= 0 else "the embedding with the final norm and the head"
    return Agreement(model.num_layers, worst, where, EXACT + ROUNDED * rounding)


def _stage(model: ModelConfig, n: int, rows: int, length: int) -> Stage:
    """Layer n alone in fp64, or for -1 the embedding and the head without a layer between."""
    make = ParamFactory(Mesh.single_process(), torch.float64, seed=0)
    if model.position_embedding_type != "learned_absolute":  # no longer tables than needed
        model = replace(model, seq_length=length, max_position_embeddings=length)
    stages = [range(0)] if n < 0 else [range(0), range(n, n + 1), range(0)]
    return Stage(make, model, stages, len(stages) // 2, vocab_size=rows, padded_vocab_size=rows).eval()
