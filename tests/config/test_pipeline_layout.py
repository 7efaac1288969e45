"""Layers per stage, equal to those of Megatron-LM's get_num_layers_to_build; and patterns of layers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toml_tables import MESSAGES
from train_cases import config_from

from megalite.config.option_parsers import format_layer_pattern, parse_layer_pattern
from megalite.config.options import ConfigError
from megalite.config.pipeline_layout import parse_layout
from megalite.planning.run_shape import RunShape
from megalite.planning.stage_balance import StageBalance

MODEL = """--hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data
 --tokenizer-type NullTokenizer --vocab-size 5000 --eval-iters 0"""
CHUNKS = "--num-virtual-stages-per-pipeline-rank"

STAGES = MESSAGES["stages"]


def counts(layers: int, pp: int, flags: str) -> list[int]:
    all_flags = f"{MODEL} --num-layers {layers} --pipeline-model-parallel-size {pp} {flags}"
    config = config_from(all_flags)
    ranges = StageBalance(RunShape(config, pp, 5000)).layer_ranges
    assert [i for r in ranges for i in r] == list(range(layers))
    return [len(r) for r in ranges]


@pytest.mark.parametrize("layers,pp,flags,expected", STAGES["megatrons"])
def test_explicit_stages_equal_megatrons(layers: int, pp: int, flags: str, expected: list[int]) -> None:
    assert counts(layers, pp, flags) == expected


def test_unspecified_stages_are_balanced_by_flops() -> None:
    """The head of this small model costs as much as 50 layers and gets a stage of its own.

    With one micro-batch no two stages run at once, and layers are divided evenly.
    """
    batch = "--global-batch-size 8"
    assert counts(8, 2, batch) == [8, 0] and counts(8, 2, "") == [4, 4]
    assert counts(7, 2, f"{batch} {CHUNKS} 2")[-1] == counts(8, 2, f"{batch} {CHUNKS} 2")[-1] == 0


@pytest.mark.parametrize("layers,pp,flags,message", STAGES["errors"])
def test_layers_that_do_not_fit_give_a_remedy(layers: int, pp: int, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        counts(layers, pp, flags)


@pytest.mark.parametrize("text", ["tt|tL", "Ett", "Et|x|L", "Et|tt|L", "Ett|tL", "Ett||ttL", "Et|(t|)*999999999L"])
def test_bad_layout_gives_a_correct_example(text: str) -> None:
    with pytest.raises(ValueError, match="pipeline_model_parallel_layout"):
        parse_layout(text, 4 if text != "Ett|tL" else 3, 2 if text != "Ett|tL" else 4)


# ---- patterns of layers: Megatron-LM's expressions are parsed, not executed
lists = st.recursive(  # (text, its value)
    st.lists(st.sampled_from([0, 1]), max_size=4).map(lambda bits: (str(bits), bits)),
    lambda inner: (
        st.tuples(inner, inner).map(lambda ab: (f"({ab[0][0]}+{ab[1][0]})", ab[0][1] + ab[1][1]))
        | st.tuples(inner, st.integers(0, 3)).map(lambda an: (f"{an[0][0]} * {an[1]}", an[0][1] * an[1]))
        | st.tuples(st.integers(0, 3), inner).map(lambda na: (f"({na[0]}*{na[1][0]})", na[0] * na[1][1]))
    ),
    max_leaves=6,
)


@settings(max_examples=100)
@given(lists)
def test_layer_expression_means_what_python_says(pair: tuple[str, list[int]]) -> None:
    text, expected = pair
    assert parse_layer_pattern(text, len(expected)) == tuple(map(bool, expected))


@settings(max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_layer_pattern_round_trips(bits: list[bool]) -> None:
    assert parse_layer_pattern(format_layer_pattern(bits), len(bits)) == tuple(bits)


def test_number_is_the_distance_between_layers() -> None:
    """Layers count from 1 as in Megatron-LM: layer n has no window if n % N == 0."""
    assert parse_layer_pattern("4", 9) == tuple(n % 4 != 0 for n in range(1, 10))
    assert format_layer_pattern([True, True, True, False] * 2) == "4" and format_layer_pattern([True] * 5) == "[1]*5"
    assert (
        format_layer_pattern([False, True] * 3) == "[0,1]*3"
        and format_layer_pattern([False] * 4 + [True]) == "[0]*4+[1]"
    )


INVALID_PATTERNS = ["", "[1]*(2)*x", "[1.0]", "[True]", "[1]*-1", "[1]*1000000000", "[1]*99999*99999*99999", "'ab'*2"]
INVALID_PATTERNS += ["__import__('os')", "(" * 3000 + "[1]" + ")" * 3000]
MESSAGES_OF_PATTERNS = {"0": "below 1", "-2": "below 1", "[1,0]": "has 2 numbers for 3 layers"}


@pytest.mark.parametrize(
    "text,message",
    [*MESSAGES_OF_PATTERNS.items(), *((text, "neither a number nor a list") for text in INVALID_PATTERNS)],
)
def test_invalid_pattern_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layer_pattern(text, 3)
