"""Models from a hybrid layer pattern: equal to --num-layers where they are the same model, and to one process."""

import functools
import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import programs
import pytest
import torch
from full_tensors import assemble, owned_shards
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_cases import COMMON, FP64_TOLERANCE, LLAMA, expand
from pairwise import nightly_except
from ranks import run_ranks
from train_cases import config_from, run_from

from megalite.config import cli
from megalite.config.config_file import dump_config
from megalite.config.hybrid_pattern import BORDER, num_parts, parse_hybrid_pattern, without_borders
from megalite.config.options import Config, ConfigError, ModelConfig
from megalite.config.validation import find_problems
from megalite.models.families import PRESETS
from megalite.training.checkpointing.compatibility import apply_checkpoint_args
from megalite.training.checkpointing.resume import LoadOptions, resume
from megalite.training.checkpointing.save import open_saver, save
from megalite.training.setup import SetupError
from megalite.training.train_step import train_step

STEPS = 3
TRAINING = COMMON.replace("--num-layers 4", "")
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1"


def _model(pattern: str) -> str:
    """Return the flags of a model."""
    experts = EXPERTS if "E" in pattern else ""
    return f"{LLAMA} {experts} --hybrid-layer-pattern {pattern}"


def _train(flags: str) -> tuple[list[float], list[float], list[tuple]]:
    """Train on this rank; return the losses, the gradient norms and the pieces of the weights that it owns."""
    run = run_from(f"{TRAINING} {flags}", dtype=torch.float64)
    results = [train_step(run) for _ in range(STEPS)]
    run.sync.wait_param_sync()
    run.close()
    return [r.loss for r in results], [r.grad_norm for r in results], owned_shards(run.optimizer, "model/")


@dataclass
class Trained:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, np.ndarray]


@functools.cache
def _trained(world: int, flags: str) -> Trained:
    ranks = run_ranks(world, _train, flags) if world > 1 else [_train(flags)]
    for losses, grad_norms, _ in ranks:
        assert (losses, grad_norms) == ranks[0][:2], "ranks disagree"
    weights = assemble(piece for _, _, pieces in ranks for piece in pieces)
    return Trained(ranks[0][0], ranks[0][1], {name: values.numpy() for name, values in weights.items()})


@pytest.mark.parametrize("world,layout", [(1, ""), (2, "tp2"), (2, "pp2"), (4, "pp2 vpp2 ZERO3"), (2, "CORE ZERO2")])
@pytest.mark.parametrize("letter", ["-", "E"])
def test_uniform_pattern_is_num_layers_bit_for_bit(world: int, layout: str, letter: str) -> None:
    layout = expand(layout)
    pattern = _trained(world, f"{_model(f'*{letter}' * 4)} {layout}")
    plain = _trained(world, f"{LLAMA} {EXPERTS if letter == 'E' else ''} --num-layers 4 {layout}")
    assert pattern.losses == plain.losses and pattern.grad_norms == plain.grad_norms
    assert pattern.weights.keys() == plain.weights.keys()
    assert all(np.array_equal(pattern.weights[name], plain.weights[name]) for name in plain.weights)


@dataclass(frozen=True)
class RandomCase:
    """A random pattern under a layout, with other options of the model."""

    pattern: str
    world: int
    layout: str
    options: str

    def __str__(self) -> str:
        return f"{self.pattern} {self.layout} {self.options}".rstrip()

    def model(self, pattern: str) -> str:
        return f"{_model(pattern)} {self.options}"


# (ranks, layout, number of stages): every kind of parallelism, sharding and recomputation
LAYOUTS = [
    (2, "tp2", 1),
    (2, "pp2", 2),
    (2, "cp2", 1),
    (4, "pp2", 4),
    (2, "ZERO2", 1),
    (4, "ZERO3 tp2", 1),
    (4, "ZERO3 pp2", 2),
    (2, "pp2 SPLIT", 2),
    (4, "tp2 pp2 PARTS core_attn layernorm mlp moe", 2),
    (2, "pp2 FULL uniform", 2),
    (2, "ep2", 1),
    (4, "ep2 pp2", 2),
]


def _random_case(seed: int) -> RandomCase:
    rng = random.Random(seed)
    world, layout, num_stages = LAYOUTS[seed % len(LAYOUTS)]
    letters = [rng.choice("**--E") for _ in range(rng.randint(5, 8))]
    if "*" not in letters:
        letters[rng.randrange(len(letters))] = "*"
    if "ep" in layout and "E" not in letters:
        letters[rng.randrange(1, len(letters))] = "E"
    for position in sorted(rng.sample(range(1, len(letters)), num_stages - 1), reverse=True):
        letters.insert(position, BORDER)
    return RandomCase("".join(letters), world, layout, "--sandwich-norm" if seed % 3 == 0 else "")


CASES = [_random_case(seed) for seed in range(30)]


@pytest.mark.parametrize("case", nightly_except(CASES, CASES[:4], str))
def test_random_pattern_equals_one_process(case: RandomCase) -> None:
    actual = _trained(case.world, f"{case.model(case.pattern)} {expand(case.layout)}")
    expected = _trained(1, case.model(without_borders(case.pattern)))
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=FP64_TOLERANCE)
    np.testing.assert_allclose(actual.grad_norms, expected.grad_norms, rtol=FP64_TOLERANCE)
    assert actual.weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        distance = np.abs(actual.weights[name] - values).max() / max(np.abs(values).max(), 1e-30)
        assert distance <= 1e-9, name
    assert expected.losses[0] != expected.losses[-1]


def test_borders_between_mixer_and_mlp_occur() -> None:
    splits_layer = [case for case in CASES if re.search(r"\*\|[-E]", case.pattern)]
    assert len(splits_layer) >= 3


def _train_and_save(directory: str, flags: str) -> list[float]:
    """Train two steps, save, and return the losses of two more."""
    config = config_from(f"{TRAINING} {flags} --save {directory} --save-interval 2")
    run = run_from(config)
    saver = open_saver(run, config)
    for _ in range(2):
        train_step(run)
    save(run, saver, dump_config(config))
    saver.wait()
    saver.close()
    return [train_step(run).loss for _ in range(2)]


def _resume(directory: str, flags: str) -> list[float]:
    config = config_from(f"{TRAINING} {flags}")
    run = run_from(config)
    assert resume(run, directory, config, LoadOptions()) is not None
    return [train_step(run).loss for _ in range(2)]


def test_checkpoint_resumes_under_other_borders_and_layouts(tmp_path: Path) -> None:
    directory = str(tmp_path)
    saved, *_ = run_ranks(2, _train_and_save, directory, f"{_model('*|-*-')} {expand('pp2')}")
    for world, flags in (
        (2, f"{_model('*-*-')} {expand('tp2')}"),
        (2, f"{_model('*-*|-')} {expand('pp2')}"),
        (1, f"{LLAMA} --num-layers 2"),
    ):
        losses, *_ = run_ranks(world, _resume, directory, flags) if world > 1 else [_resume(directory, flags)]
        np.testing.assert_allclose(losses, saved, rtol=1e-4)


def test_checkpoint_of_another_pattern_is_refused_by_name(tmp_path: Path) -> None:
    directory = str(tmp_path)
    _train_and_save(directory, _model("**--"))
    with pytest.raises(SetupError, match=r"hybrid_layer_pattern: '\*-\*-' here, '\*\*--' in the checkpoint"):
        _resume(directory, _model("*-*-"))


def test_use_checkpoint_args_takes_the_pattern_without_its_borders(tmp_path: Path) -> None:
    directory = str(tmp_path)
    run_ranks(2, _train_and_save, directory, f"{_model('*|-*E')} {expand('pp2')}")
    flags = f"--use-checkpoint-args --load {directory} --micro-batch-size 2 --train-iters 4 --lr 0.01 --mock-data"
    config = apply_checkpoint_args(config_from(flags))
    assert config.model.hybrid_layer_pattern == "*-*E" and config.model.num_experts == 4
    counts_letters = apply_checkpoint_args(config_from(f"{flags} --num-layers 4"))
    assert counts_letters.model == config.model and config.model.num_layers == 2
    with pytest.raises(SetupError, match="num_layers=3, but 2 in"):
        apply_checkpoint_args(config_from(f"{flags} --num-layers 3"))
    config = apply_checkpoint_args(config_from(f"{flags} --hybrid-layer-pattern *-*|E --pp 2"))
    assert config.model.hybrid_layer_pattern == "*-*|E"
    with pytest.raises(SetupError, match=r"hybrid_layer_pattern='\*\*-E', but '\*-\*E' in .*; drop the option"):
        apply_checkpoint_args(config_from(f"{flags} --hybrid-layer-pattern **-E"))


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--hybrid-layer-pattern *-x", "hybrid_layer_pattern='*-x' has 'x' at position 2; use * (attention), + (multi-"),
        ("--hybrid-layer-pattern D-*-", "hybrid_layer_pattern='D-*-' has D, sparse attention, which is not supported"),
        ("--hybrid-layer-pattern *-||*-", "hybrid_layer_pattern='*-||*-' is empty or has a stage without layers"),
        ("--hybrid-layer-pattern *-*- --num-layers 3", "num_layers=3 disagrees with hybrid_layer_pattern='*-*-', which "
         "has 2 layers, or 4 letters; drop it"),
        ("--hybrid-layer-pattern *-|*-", "hybrid_layer_pattern='*-|*-' has 2 stages; drop it or raise"),
        ("--hybrid-layer-pattern *-|*|- --pipeline-model-parallel-size 2", "has 3 stages, not a multiple of pipeline_"),
        ("--hybrid-layer-pattern *-*E", "hybrid_layer_pattern='*-*E' with E needs --num-experts"),
        ("--hybrid-layer-pattern *-*- --num-experts 4", "num_experts=4 needs a layer with experts, but hybrid_layer_"),
        ("--hybrid-layer-pattern *-- --parallel-residual", "parallel_residual=True adds a mixer and an MLP to the same"),
        ("--hybrid-layer-pattern *-*- --no-rope-freq 2", "no_rope_freq=2 changes no mixer, because each letter of "
         "hybrid_layer_pattern='*-*-' counts as a layer, and its mixers are at 0,2 of 0 to 3; give a list that"),
        ("--hybrid-layer-pattern *-*- --no-rope-freq [1,0]", "no_rope_freq=[1,0] has 2 numbers for 4 layers; give one "
         "for each; each letter of hybrid_layer_pattern='*-*-' counts as a layer"),
        ("--hybrid-layer-pattern *-*- --window-size 4,0 --window-attn-skip-freq [0,1,0,1]", "leaves no mixer of "
         "hybrid_layer_pattern='*-*-' with the window; drop --window-size"),
        ("--hybrid-layer-pattern *-*E --num-experts 4 --moe-layer-freq 2", "moe_layer_freq=2 is for models without "
         "hybrid_layer_pattern, where each E is a layer with experts; drop it"),
        ("--hybrid-layer-pattern *-*- --cp-comm-type a2a a2a --context-parallel-size 2", "cp_comm_type=a2a,a2a is "
         "neither one value nor one for each letter of hybrid_layer_pattern='*-*-'"),
        ("--hybrid-layer-pattern *-|*- --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
         "hybrid_layer_pattern='*-|*-' already sets all stages' layers by |; drop decoder_first_pipeline_num_layers"),
    ],
)  # fmt: skip
def test_bad_pattern_is_one_clear_problem(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.read(f"{TRAINING} {LLAMA} {flags}".split(), PRESETS)
    (problem,) = error.value.problems
    assert message in problem


def test_megatron_hybrid_command_line_starts_as_it_is() -> None:
    flags = """--hybrid-override-pattern *-*E --num-layers 4 --is-hybrid-model --num-experts 4
     --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"""
    config, _ = cli.read(f"{TRAINING} {LLAMA} {flags}".split(), PRESETS)
    assert config.model.num_layers == 2  # Megatron-LM counts four
    assert [layer.mlp for layer in config.model.layers] == ["mlp", "moe"]


@pytest.mark.parametrize("pattern", ["-E*", "--*-", "-", "E"])
def test_pattern_may_look_like_a_flag(pattern: str) -> None:
    flags = f"{TRAINING} {LLAMA} {EXPERTS} --hybrid-layer-pattern {pattern} --seed 5"
    parsed = cli.parse_args(flags.split())
    assert parsed.values["hybrid_layer_pattern"] == pattern and parsed.values["seed"] == "5" and not parsed.problems
    parsed = cli.parse_args("--hybrid-layer-pattern --seed 5".split())
    assert parsed.problems and parsed.values == {"seed": "5"}


def test_pattern_replaces_the_layers_of_a_preset() -> None:
    config, _ = cli.read(
        "--preset tiny --hybrid-layer-pattern **- --mock-data --lr 1 --train-iters 1 --micro-batch-size 1".split(),
        PRESETS,
    )
    assert config.model.num_layers == 2 and config.model.layer_numbers == (0, 1)


def test_model_without_attention_trains_under_context_parallelism() -> None:
    model = f"{_model('--')} --position-embedding-type none"
    actual = _trained(2, f"{model} {expand('cp2')}")
    np.testing.assert_allclose(actual.losses, _trained(1, model).losses, rtol=FP64_TOLERANCE)


def test_communication_of_each_layer_does_not_depend_on_borders(tmp_path: Path) -> None:
    flags = f"{expand('pp2 cp2')} --cp-comm-type a2a a2a allgather a2a"
    saved, *_ = run_ranks(4, _train_and_save, str(tmp_path), f"{_model('*|-*-')} {flags}")
    losses, *_ = run_ranks(4, _resume, str(tmp_path), f"{_model('*-|*-')} {flags}")
    np.testing.assert_allclose(losses, saved, rtol=1e-4)
    assert find_problems(config_from(f"{TRAINING} {_model('*|-*-')} {flags}"), 4) == []


def test_options_of_layers_count_letters_as_megatron_does() -> None:
    """Megatron-LM: `layer_number % freq` and `no_rope_freq[layer_number - 1]`, where each letter has a number from 1."""
    sizes = f"{TRAINING} {LLAMA} --window-size 4,0 --cp-comm-type a2a allgather a2a a2a allgather a2a --hybrid-layer-pattern"
    model = config_from(f"{sizes} **-*|-* --no-rope-freq 3 --window-attn-skip-freq 2 --cp 2 --pp 2").model
    attention = [layer for layer in model.layers if layer.mixer is not None]  # letters 1, 2, 4 and 6
    assert [layer.window for layer in attention] == [5, None, None, None]
    assert [layer.rope is not None for layer in attention] == [True, True, True, False]
    assert [layer.cp_comm_type for layer in attention] == ["a2a", "allgather", "a2a", "a2a"]


bits = st.lists(st.sampled_from([0, 1]), min_size=3, max_size=3)


@given(bits, bits, bits, st.sampled_from(["", "--position-embedding-type none"]))
def test_with_pattern_is_the_same_model(
    windows: list[int], without_rope: list[int], moe: list[int], positions: str
) -> None:
    lists = f"--no-rope-freq {without_rope} --window-attn-skip-freq {windows} --moe-layer-freq {moe}".replace(", ", ",")
    flags = f"{LLAMA} {EXPERTS} --num-layers 3 --window-size 4,0 --cp 2 --cp-comm-type a2a allgather a2a {positions} {lists}"
    assume(any(windows) and any(moe))
    model = config_from(f"{TRAINING} {flags}").model
    pattern = model.with_pattern()
    assert pattern.layers == model.layers and pattern.with_pattern() == pattern
    letters = "".join(f"*{'E' if has_experts else '-'}" for has_experts in moe)
    assert pattern.hybrid_layer_pattern == letters and find_problems(config_with(pattern), 2) == []


def config_with(model: ModelConfig) -> Config:
    """Return a configuration with this model, on two cp ranks."""
    return replace(config_from(f"{TRAINING} {LLAMA} {EXPERTS} --num-layers 3 --cp 2"), model=model)


def test_windows_and_positions_of_letters_equal_those_of_layers() -> None:
    sizes = f"{LLAMA} --window-size 3,0"
    letters = "--hybrid-layer-pattern *-*-*- --no-rope-freq [0,1,0,0,1,0] --window-attn-skip-freq 3"
    pattern = _trained(2, f"{sizes} {letters} {expand('tp2')}")
    plain = _trained(
        2, f"{sizes} --num-layers 3 --no-rope-freq [0,0,1] --window-attn-skip-freq [1,0,1] {expand('tp2')}"
    )
    other = _trained(2, f"{sizes} --num-layers 3 {expand('tp2')}")
    assert pattern.losses == plain.losses != other.losses and pattern.grad_norms == plain.grad_norms
    assert all(np.array_equal(pattern.weights[name], plain.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("flags", ["--cp-comm-type a2a a2a a2a", "--no-rope-freq [1,0,1]"])
def test_list_for_another_number_of_layers_is_one_clear_problem(flags: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.read(f"{TRAINING} {LLAMA} --hybrid-layer-pattern *-*- {flags}".split(), PRESETS)
    assert len(error.value.problems) == 1


def test_checkpoint_with_borders_converts_to_hugging_face(tmp_path: Path) -> None:
    run_ranks(2, _train_and_save, str(tmp_path / "saved"), f"{_model('*-|*-')} {expand('pp2')}")
    _train_and_save(str(tmp_path / "one-part"), _model("**--"))
    convert = ["tools/convert_checkpoint.py", "--to-hf", str(tmp_path / "llama"), "--load"]
    result = programs.run_python(*convert, str(tmp_path / "saved"))
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "llama/config.json").read_text("utf-8"))["num_hidden_layers"] == 2
    result = programs.run_python(*convert, str(tmp_path / "one-part"), "--family", "llama")
    assert result.returncode and "hybrid_layer_pattern='**--' is not attention and MLP in turn" in result.stderr


def test_search_plans_a_pattern_and_refuses_borders() -> None:
    sizes = "--hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --global-batch-size 8"
    plan = ["tools/plan.py", *sizes.split(), "--num-gpus", "4"]
    result = programs.run_python(*plan, "--hybrid-layer-pattern=*-**-")
    assert result.returncode == 0 and "the best:" in result.stdout, result.stderr
    result = programs.run_python(*plan, "--hybrid-layer-pattern=*-|**-")
    assert result.returncode == 2 and "hybrid_layer_pattern with |: only valid for one layout" in result.stderr


def test_number_of_parts_does_not_count_borders() -> None:
    assert num_parts("*-|*E") == 4
    assert [len(stage) for stage in parse_hybrid_pattern("*-*|E")] == [2, 1]
