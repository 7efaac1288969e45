"""Layers of the stages that the options give: the numbers that Megatron-LM's get_num_layers_to_build returns."""

import tomllib
from pathlib import Path

import pytest
from train_cases import config_from

from megalite.config.options import ConfigError
from megalite.config.stage_layers import parse_layout
from megalite.plan.arrangement import Arrangement

MODEL = """--hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data
 --tokenizer-type NullTokenizer --vocab-size 5000 --eval-iters 0"""
CHUNKS = "--num-virtual-stages-per-pipeline-rank"

STAGES = tomllib.loads((Path(__file__).parents[1] / "answers.toml").read_text("utf-8"))["stages"]


def counts(layers: int, pp: int, flags: str) -> list[int]:
    words = f"{MODEL} --num-layers {layers} --pipeline-model-parallel-size {pp} {flags}"
    config = config_from(words)
    ranges = Arrangement(config, pp, 5000).stages
    assert [i for r in ranges for i in r] == list(range(layers))
    return [len(r) for r in ranges]


@pytest.mark.parametrize("layers,pp,flags,want", STAGES["megatrons"])
def test_given_stages_are_megatrons(layers: int, pp: int, flags: str, want: list[int]) -> None:
    assert counts(layers, pp, flags) == want


def test_what_is_not_given_is_balanced_by_flops() -> None:
    """The head of this small model costs 50 layers: it is alone, whatever divides, but with one micro-batch, of which
    no two stages ever run at once."""
    batch = "--global-batch-size 8"
    assert counts(8, 2, batch) == [8, 0] and counts(8, 2, "") == [4, 4]
    assert counts(7, 2, f"{batch} {CHUNKS} 2")[-1] == counts(8, 2, f"{batch} {CHUNKS} 2")[-1] == 0


@pytest.mark.parametrize("layers,pp,flags,says", STAGES["refused"])
def test_what_does_not_fit_says_what_to_do(layers: int, pp: int, flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        counts(layers, pp, flags)


@pytest.mark.parametrize("text", ["tt|tL", "Ett", "Et|x|L", "Et|tt|L", "Ett|tL", "Ett||ttL", "Et|(t|)*999999999L"])
def test_a_bad_layout_says_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="pipeline_model_parallel_layout"):
        parse_layout(text, 4 if text != "Ett|tL" else 3, 2 if text != "Ett|tL" else 4)
