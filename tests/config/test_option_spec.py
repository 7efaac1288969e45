"""The facts of an option: its resume class, the range of its value, and the problems that name it."""

import ast
import re
from dataclasses import Field, replace
from pathlib import Path
from typing import Any

import pytest
from train_cases import config_from

from megalite.config import option as field
from megalite.config.config_file import dump_config, parse_config_text
from megalite.config.option import EXECUTION, MODEL, OPERATIONAL, TRAINING, option_spec, type_name
from megalite.config.options import SECTIONS, Config, ConfigError, build, iter_options, training_options
from megalite.config.problems import Problem, no_effect, option_of, shown
from megalite.training.checkpointing import initial_state as origin

CONFIG = Path(field.__file__).parent
GOOD = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 16
 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --save here --load here --ckpt-step 2""".split()
# options that have an effect only together with these
REQUIRED_OPTIONS = {
    "num_query_groups": {"group_query_attention": True},
    "no_rope_freq": {"position_embedding_type": "rope"},
    "window_attn_skip_freq": {"window_size": (7, 0)},
    "moe_layer_freq": {"num_experts": 4},
    "moe_ffn_hidden_size": {"num_experts": 4},
    "qk_norm_epsilon": {"qk_layernorm": True},
    "moe_router_group_score_topk": {"num_experts": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 2},
    "micro_batch_size": {"global_batch_size": None},
    "mup_base_hidden_size": {"use_mup": True},
    "mup_output_mult": {"use_mup": True},
}
OTHER: dict[str, Any] = {
    "no_rope_freq": "2",
    "window_attn_skip_freq": "2",
    "window_size": (7, 0),
    "moe_layer_freq": "2",
    "hybrid_layer_pattern": "**--*-",
}
# these act through other options, which are compared instead
THROUGH = {f.name for _, f in iter_options() if option_spec(f).acts_through is not None}


def change_option(config: Config, f: Field[Any]) -> Config:
    """Return `config` with another value of the option."""
    section = next(name for name, g in iter_options() if g.name == f.name)
    value = getattr(getattr(config, section), f.name)
    kind, texts = type_name(f), [*option_spec(f).choices, "other"]
    other: Any = {"ints": (3, 0), "strs": ("x",), "str": next(text for text in texts if text != value)}.get(kind)
    if kind in ("int", "float"):
        other = (value or 4) * 2
    elif kind == "bool":
        other = not value
    return replace(config, **{section: replace(getattr(config, section), **{f.name: OTHER.get(f.name, other)})})


@pytest.mark.parametrize("f", [f for _, f in iter_options()], ids=lambda f: f.name)
def test_restart_is_the_same_training_unless_a_training_option_changed(f: Field[Any]) -> None:
    """The first start of a --ckpt-step command and its restart are compared; the first is read from its checkpoint."""
    resume = option_spec(f).resume
    assert resume in (OPERATIONAL, EXECUTION, TRAINING, MODEL)
    config = config_from(GOOD)
    for section in SECTIONS:
        more = {k: v for k, v in REQUIRED_OPTIONS.get(f.name, {}).items() if hasattr(getattr(config, section), k)}
        config = replace(config, **{section: replace(getattr(config, section), **more)})
    before = build(parse_config_text(dump_config(config), "checkpoint"))
    same = origin._training(change_option(config, f)) == origin._training(before)
    if f.name in THROUGH:
        assert option_spec(f).acts_through in {g.name for _, g in iter_options()}
    elif f.name not in ("save", "load"):  # their equality is checked earlier
        assert same == (resume in (OPERATIONAL, EXECUTION))


def test_other_spelling_of_the_same_model_is_the_same_training() -> None:
    short = config_from(GOOD)
    explicit = "--ffn-hidden-size 256 --kv-channels 16 --group-query-attention --num-query-groups 4"
    long = config_from([*GOOD, *explicit.split()])
    assert training_options(short) == training_options(long)
    other = config_from([*GOOD, "--group-query-attention", "--num-query-groups", "2"])
    assert training_options(short) != training_options(other)


def test_micro_batch_size_is_an_execution_option_with_a_global_batch_size() -> None:
    default = config_from(GOOD)
    larger = config_from([*GOOD, "--micro-batch-size", "4"])
    assert training_options(default) == training_options(larger)


def test_option_without_a_class_fails_at_import() -> None:
    with pytest.raises(TypeError, match="default"):
        field.option(0, help="a number")
    with pytest.raises(TypeError, match="colour"):
        field.execution(0, help="a number", colour="red")


def test_option_specs_name_existing_options() -> None:
    for section, f in iter_options():
        facts = option_spec(f)
        assert facts.help and all(alias.startswith("--") for alias in facts.aliases), f.name
        assert facts.effective_property is None or isinstance(
            getattr(SECTIONS[section], facts.effective_property), property
        )
        assert facts.range_error(f.default) is None or facts.required, f.name
        assert facts.placeholder is None or facts.range_error(facts.placeholder) is None
        assert f.default is None or not facts.choices or f.default in facts.choices


NO_OPTIONS = {"metric", "preset", "disable_bias_linear"}  # messages show these like options


def texts_of(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def options_in(text: str) -> set[str]:
    """Return the options that a text shows, as name=value or as a flag."""
    return set(re.findall(r"\b([a-z]\w*)=", text)) | {
        option_of(flag) for flag in re.findall(r"--[a-z][\w-]*\w(?![\w*-])", text)
    }


def test_problem_texts_name_existing_options() -> None:
    """Otherwise only users would discover a misspelt option in a rare problem."""
    names = {f.name for _, f in iter_options()} | NO_OPTIONS
    trees = [ast.parse(path.read_text()) for path in sorted((CONFIG / "validation").glob("*.py"))]
    keywords = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    tuples = [keyword.value for keyword in keywords if keyword.arg in ("options", "also")]
    elements = [element for node in tuples if isinstance(node, ast.Tuple) for element in node.elts]
    listed = {element.value for element in elements if isinstance(element, ast.Constant)}
    assert len(listed) > 80 and listed <= names
    shown = {name for tree in trees for text in texts_of(tree) for name in options_in(text)}
    assert len(shown) > 80 and shown <= names


def test_problem_mentions_the_options_in_its_text() -> None:
    """Otherwise it would be reported in addition to the error about the value of one of them."""
    trees = [ast.parse(path.read_text()) for path in sorted((CONFIG / "validation").glob("*.py"))]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    compared = 0
    for call in calls:
        tuples = [keyword.value for keyword in call.keywords if keyword.arg == "options"]
        if tuples and isinstance(tuples[0], ast.Tuple) and all(isinstance(e, ast.Constant) for e in tuples[0].elts):
            line = " ".join(texts_of(call.args[0]))
            missing = options_in(line) - set(texts_of(tuples[0])) - NO_OPTIONS
            assert not missing, (line, missing)
            compared += 1
    assert compared > 60


def test_problem_keeps_its_options_across_processes() -> None:
    import pickle

    config = build({"lr": 0.5, "window_size": (7, 0), "split": "a"})
    assert (shown(config, "lr"), shown(config, "window_size")) == ("lr=0.5", "window_size=7,0")
    problem = no_effect(shown(config, "window_size"), without="min_lr", value="0.1", also=("seed",))
    assert problem == "window_size=7,0 has no effect without --min-lr 0.1"
    assert problem.options == {"window_size", "min_lr", "seed"}
    unpickled = pickle.loads(pickle.dumps(problem))
    assert isinstance(unpickled, Problem) and (unpickled, unpickled.options) == (problem, problem.options)


def test_per_layer_list_is_not_checked_without_a_number_of_layers() -> None:
    flags = "--position-embedding-type rope --no-rope-freq [1,0]*2 --window-size 7,0 --window-attn-skip-freq [1,0]*2"
    with pytest.raises(ConfigError) as error:
        config_from([*GOOD, "--num-layers", "x", *flags.split()])
    assert error.value.problems == ["num_layers='x' is not an int; write it as one"]
