"""The tensors of a model equal those that Megatron-LM creates for the same command line."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from reference_model import Model, shapes
from train_cases import config_from

from megalite.config.options import padded_vocab_size
from megalite.models.specs import model_specs

D, H, L, S, V = 48, 6, 3, 20, 100
LINE = f"""--num-layers {L} --hidden-size {D} --num-attention-heads {H} --seq-length {S} --max-position-embeddings {S}
 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data --vocab-size {V}"""
GPT = Model(
    num_layers=L,
    width=D,
    num_heads=H,
    head_size=D // H,
    num_kv_groups=H,
    ffn=4 * D,
    vocab_size=V,
    padded_vocab_size=128,
    max_positions=S,
)
LINES = tomllib.loads(Path(__file__).with_name("megatron_lines.toml").read_text("utf-8"))


@pytest.mark.parametrize("flags", LINES)
def test_tensor_shapes_equal_megatrons(flags: str) -> None:
    model = config_from(f"{LINE} {flags}").model
    specs = model_specs(model, padded_vocab_size(V, model.make_vocab_size_divisible_by, 1))
    assert {name: spec.shape for name, spec in specs.items()} == shapes(replace(GPT, **LINES[flags]))


def test_embeddings_have_their_own_initial_deviation() -> None:
    def deviations(flags: str) -> dict[str, object]:
        config = config_from(f"{LINE} {flags}")
        return {name: spec.init for name, spec in model_specs(config.model, 128).items()}

    plain = deviations("--untie-embeddings-and-output-weights --init-method-std 0.5")
    other = deviations("--untie-embeddings-and-output-weights --init-method-std 0.5 --embedding-init-method-std 1.5")
    changed = {name for name in plain if plain[name] != other[name]}
    assert changed == {"embedding.word", "embedding.position"}
    assert str(other["embedding.word"]) == "Normal(std=1.5)"
