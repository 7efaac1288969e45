"""Megatron-LM's command line -> the tensors it makes of it, against ours."""

from dataclasses import replace

import pytest
from reference_model import Model, shapes
from train_cases import config_from

from megalite.config.options import padded_vocab_size
from megalite.models.specs import specs_of

D, H, L, S, V = 48, 6, 3, 20, 100
LINE = f"""--num-layers {L} --hidden-size {D} --num-attention-heads {H} --seq-length {S} --max-position-embeddings {S}
 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data --vocab-size {V}"""
GPT = Model(layers=L, width=D, heads=H, head_size=D // H, groups=H, ffn=4 * D, vocab_size=V, padded=128, positions=S)


def of(**facts: object) -> Model:
    return replace(GPT, **facts)  # type: ignore[arg-type]


# what a size is where a flag does not say it; test_reference.py has the shapes of those that are said
LINES: dict[str, Model] = {
    "": GPT,
    "--swiglu": of(activation="swiglu", ffn=128),  # 8/3 D in steps of 64
    "--swiglu --ffn-hidden-size 100": of(activation="swiglu", ffn=100),
    "--add-qkv-bias": GPT,  # all linear layers have one anyway
    "--group-query-attention": of(groups=1),
    "--group-query-attention --num-query-groups 3": of(groups=3),
    "--num-query-groups 3": GPT,
    "--make-vocab-size-divisible-by 1": of(padded=100),
    "--make-vocab-size-divisible-by 40 --untie-embeddings-and-output-weights": of(padded=120, tied=False),
    "--max-position-embeddings 33": of(positions=33),
    "--position-embedding-type none --no-position-embedding": of(learned_positions=False),
    "--use-rotary-position-embeddings": of(learned_positions=False),
    "--use-rotary-position-embeddings --no-position-embedding --rotary-percent 0.5": of(learned_positions=False),
    "--no-position-embedding --position-embedding-type rope --no-rope-freq 3": of(learned_positions=False),
    "--rotary-percent 0.5 --rotary-base 500": GPT,  # learned positions all the same
    "--embedding-init-method-std 1.0": GPT,
    """--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --kv-channels 12
     --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --qk-layernorm""": of(
        activation="swiglu", ffn=128, head_size=12, groups=2, bias="none", norm="RMSNorm", qk_norm=True,
        learned_positions=False, tied=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", LINES)
def test_the_tensors_are_those_of_megatron(flags: str) -> None:
    model = config_from(f"{LINE} {flags}").model
    made = specs_of(model, padded_vocab_size(V, model.make_vocab_size_divisible_by, 1))
    assert {name: spec.shape for name, spec in made.items()} == shapes(LINES[flags])


def test_embeddings_begin_with_a_deviation_of_their_own() -> None:
    def deviations(flags: str) -> dict[str, object]:
        config = config_from(f"{LINE} {flags}")
        return {name: spec.init for name, spec in specs_of(config.model, 128).items()}

    plain = deviations("--untie-embeddings-and-output-weights --init-method-std 0.5")
    other = deviations("--untie-embeddings-and-output-weights --init-method-std 0.5 --embedding-init-method-std 1.5")
    changed = {name for name in plain if plain[name] != other[name]}
    assert changed == {"embedding.word", "embedding.position"}
    assert str(other["embedding.word"]) == "Normal(std=1.5)"
