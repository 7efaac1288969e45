"""Layers of the stages that the options give: the numbers that Megatron-LM's get_num_layers_to_build returns."""

import pytest
from train_cases import config_from

from megalite.config.options import ConfigError
from megalite.config.stage_layers import parse_layout
from megalite.plan.arrangement import Arrangement

MODEL = """--hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data
 --tokenizer-type NullTokenizer --vocab-size 5000 --eval-iters 0"""
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
CHUNKS, CHUNK = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"

SAME_AS_MEGATRON = [
    (6, 4, f"{CHUNKS} 2 {EMBEDDING} {LOSS}", [0, 1, 1, 1, 1, 1, 1, 0]),
    (6, 4, f"{CHUNK} 1 {EMBEDDING} {LOSS}", [0, 1, 1, 1, 1, 1, 1, 0]),
    (6, 4, f"{EMBEDDING} {LOSS}", [1, 2, 2, 1]),
    (7, 4, EMBEDDING, [1, 2, 2, 2]),
    (7, 4, LOSS, [2, 2, 2, 1]),
    (3, 1, f"{EMBEDDING} {LOSS}", [3]),
    (14, 4, f"{CHUNKS} 2 {EMBEDDING} {LOSS}", [1, 2, 2, 2, 2, 2, 2, 1]),
    (15, 2, f"{CHUNK} 2 {LOSS}", [2, 2, 2, 2, 2, 2, 2, 1]),
    (12, 4, f"{FIRST} 2 {LAST} 2", [2, 4, 4, 2]),
    (12, 4, f"{FIRST} 2 {LAST} 2 {CHUNKS} 2", [1, 2, 2, 1, 1, 2, 2, 1]),
    (10, 4, f"{FIRST} 1", [1, 3, 3, 3]),
    (11, 4, f"{LAST} 2", [3, 3, 3, 2]),
    (6, 2, f"{FIRST} 4", [4, 2]),
    (6, 2, f"{FIRST} 4 {LAST} 2", [4, 2]),
    (61, 16, f"{FIRST} 1 {LAST} 4", [1, *[4] * 15]),
    (8, 2, f"{CHUNK} 1", [1] * 8),
    (4, 1, f"{CHUNK} 4", [4]),
    (8, 2, "--pipeline-model-parallel-layout Ettt|(tt|)*2t,L", [3, 2, 2, 1]),
]


def counts(layers: int, pp: int, flags: str) -> list[int]:
    words = f"{MODEL} --num-layers {layers} --pipeline-model-parallel-size {pp} {flags}"
    config = config_from(words)
    ranges = Arrangement(config, pp, 5000).stages
    assert [i for r in ranges for i in r] == list(range(layers))
    return [len(r) for r in ranges]


@pytest.mark.parametrize("layers,pp,flags,want", SAME_AS_MEGATRON)
def test_given_stages_are_megatrons(layers: int, pp: int, flags: str, want: list[int]) -> None:
    assert counts(layers, pp, flags) == want


def test_what_is_not_given_is_balanced_by_flops() -> None:
    """The head of this small model costs 50 layers: it is alone, whatever divides, but with one micro-batch, of which
    no two stages ever run at once."""
    batch = "--global-batch-size 8"
    assert counts(8, 2, batch) == [8, 0] and counts(8, 2, "") == [4, 4]
    assert counts(7, 2, f"{batch} {CHUNKS} 2")[-1] == counts(8, 2, f"{batch} {CHUNKS} 2")[-1] == 0


@pytest.mark.parametrize(
    "layers,pp,flags,says",
    [
        (6, 4, EMBEDDING, r"num_layers=6 \+ embedding is not a multiple of pipeline_model_parallel_size=4"),
        (14, 4, f"{CHUNKS} 3 {EMBEDDING} {LOSS}", "num_virtual_stages_per_pipeline_rank=3 does not divide the 4 la"),
        (6, 4, f"{FIRST} 6", "decoder_first_pipeline_num_layers=6 of num_layers=6 leave 0 layers for 3 other"),
        (6, 4, f"{FIRST} 1", "leave 5 layers for 3 other"),
        (6, 2, f"{FIRST} 3 {LAST} 2", "leave 1 layers for 0 other"),
        (6, 1, f"{FIRST} 3 {LAST} 3", "are of two pipeline ranks, pipeline_model_parallel_size=1; raise it"),
        (6, 2, f"{FIRST} 0", "decoder_first_pipeline_num_layers=0 is too small"),
        (6, 2, f"{FIRST} 4 {LOSS}", "exclude"),
        (6, 2, f"{FIRST} 4 {CHUNK} 1", "exclude"),
        (6, 2, f"--pipeline-model-parallel-layout Ettt|tttL {LOSS}", "already sets"),
        (6, 2, "--microbatch-group-size-per-virtual-pipeline-stage 1", "is below pipeline parallel 2"),
        (6, 2, "--pipeline-model-parallel-layout Ettt|ttL", "holds 5 layers, num_layers=6"),
    ],
)
def test_what_does_not_fit_says_what_to_do(layers: int, pp: int, flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        counts(layers, pp, flags)


@pytest.mark.parametrize("text", ["tt|tL", "Ett", "Et|x|L", "Et|tt|L", "Ett|tL", "Ett||ttL", "Et|(t|)*999999999L"])
def test_a_bad_layout_says_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="pipeline_model_parallel_layout"):
        parse_layout(text, 4 if text != "Ett|tL" else 3, 2 if text != "Ett|tL" else 4)
