"""Megatron-LM's command line -> the sizes of the tensors it makes of it, counted by hand, against ours."""

from dataclasses import dataclass

import pytest
from train_cases import config_from

from megalite.config.options import padded_vocab_size
from megalite.models.specs import specs_of

D, H, L, S, V = 48, 6, 3, 20, 100
LINE = f"""--num-layers {L} --hidden-size {D} --num-attention-heads {H} --seq-length {S} --max-position-embeddings {S}
 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data --vocab-size {V}"""


@dataclass(frozen=True)
class There:
    """What the line means: `biases` of qkv, and of all other linear layers; `one`: numbers per channel of a norm."""

    ffn: int = 4 * D
    gated: bool = False
    head: int = D // H
    groups: int = H
    biases: tuple[bool, bool] = (True, True)
    one: int = 2
    qk_norm: bool = False
    positions: int = S
    rows: int = 128
    tied: bool = True

    def counts(self) -> dict[str, int]:
        qkv, fc1 = (H + 2 * self.groups) * self.head, self.ffn * (2 if self.gated else 1)
        attention = qkv * D + D * H * self.head + qkv * self.biases[0] + D * self.biases[1]
        return {
            "embedding": (self.rows + self.positions) * D,
            "attention": L * attention,
            "mlp": L * (fc1 * D + D * self.ffn + (fc1 + D) * self.biases[1]),
            "norm": self.one * ((2 * L + 1) * D + (2 * L * self.head if self.qk_norm else 0)),
            "head": 0 if self.tied else self.rows * D,
        }


PLAIN = (False, False)
# what a size is where a flag does not say it; test_reference.py has the shapes of those that are said
LINES: dict[str, There] = {
    "": There(),
    "--swiglu": There(ffn=128, gated=True),  # 8/3 D in steps of 64
    "--swiglu --ffn-hidden-size 100": There(ffn=100, gated=True),
    "--add-qkv-bias": There(),  # all linear layers have one anyway
    "--group-query-attention": There(groups=1),
    "--group-query-attention --num-query-groups 3": There(groups=3),
    "--num-query-groups 3": There(),
    "--make-vocab-size-divisible-by 1": There(rows=100),
    "--make-vocab-size-divisible-by 40 --untie-embeddings-and-output-weights": There(rows=120, tied=False),
    "--max-position-embeddings 33": There(positions=33),
    "--position-embedding-type none --no-position-embedding": There(positions=0),
    "--use-rotary-position-embeddings": There(positions=0),
    "--use-rotary-position-embeddings --no-position-embedding --rotary-percent 0.5": There(positions=0),
    "--no-position-embedding --position-embedding-type rope --no-rope-freq 3": There(positions=0),
    "--rotary-percent 0.5 --rotary-base 500": There(),  # learned positions all the same
    "--embedding-init-method-std 1.0": There(),
    """--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --kv-channels 12
     --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --qk-layernorm""": There(
        ffn=128, gated=True, head=12, groups=2, biases=PLAIN, one=1, qk_norm=True, positions=0, tied=False
    ),
}


@pytest.mark.parametrize("flags", LINES)
def test_the_tensors_are_as_large_as_megatrons(flags: str) -> None:
    config = config_from(f"{LINE} {flags}")
    model, want = config.model, LINES[flags].counts()
    rows = padded_vocab_size(V, model.make_vocab_size_divisible_by, 1)
    found = dict.fromkeys(want, 0)
    for name, spec in specs_of(model, rows).items():
        words = name.split(".")
        part = "norm" if any("norm" in word for word in words) else next(word for word in words if word in found)
        size = 1
        for side in spec.shape:
            size *= side
        found[part] += size
    assert found == want


def test_embeddings_begin_with_a_deviation_of_their_own() -> None:
    def deviations(flags: str) -> dict[str, object]:
        config = config_from(f"{LINE} {flags}")
        return {name: spec.init for name, spec in specs_of(config.model, 128).items()}

    plain = deviations("--untie-embeddings-and-output-weights --init-method-std 0.5")
    other = deviations("--untie-embeddings-and-output-weights --init-method-std 0.5 --embedding-init-method-std 1.5")
    changed = {name for name in plain if plain[name] != other[name]}
    assert changed == {"embedding.word", "embedding.position"}
    assert str(other["embedding.word"]) == "Normal(std=1.5)"
