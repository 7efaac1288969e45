"""Conversion of Megatron-LM's hybrid models, where each letter of a pattern is a layer, to megalite and back.

The tensors are named here by hand after the modules of Megatron-LM (models/hybrid/hybrid_layer_specs.py): a letter has
the tensors of its part only, a norm before a matmul is part of Transformer Engine's layer, and the last norm is
`final_norm`.
"""

import argparse
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from test_convert_megatron import _edit, assert_refused, tool
from torch import Tensor
from train_cases import config_from, run_from

from megalite.checkpoint.offline import open_checkpoint
from megalite.config.config_file import parse_config_text
from megalite.config.options import ModelConfig, build
from megalite.interop.megatron.torch_format import load_pickle, read_args
from megalite.training.checkpointing.compatibility import model_differences
from megalite.training.checkpointing.initial_state import complete_config, load_initial_state
from megalite.training.setup import SetupError
from megalite.training.train_step import train_step
from tools.export_files import write_args

D, H, G, K, F, S, E, WIDTH, V, ROWS = 16, 4, 2, 4, 24, 8, 4, 12, 50, 256
Tensors = dict[str, Tensor]


def saved_args(pattern: str, **changes: Any) -> argparse.Namespace:
    """Return the args of a small hybrid model with RMSNorm, SwiGLU and rotary positions."""
    args: dict[str, Any] = {
        "num_layers": len(pattern.replace("|", "")),
        "hybrid_layer_pattern": pattern,
        "hidden_size": D,
        "num_attention_heads": H,
        "group_query_attention": True,
        "num_query_groups": G,
        "ffn_hidden_size": F,
        "seq_length": S,
        "max_position_embeddings": S,
        "padded_vocab_size": ROWS,
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "moe_layer_freq": 1,
    }
    if "E" in pattern:
        args |= {"num_experts": E, "moe_ffn_hidden_size": WIDTH, "moe_router_topk": 2}
        args |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    return argparse.Namespace(**{**args, **changes})


class Weights:
    """Random weights of a pattern, in the shapes of full matrices, for each letter and for both ends."""

    def __init__(self, pattern: str, tied: bool = False):
        self.letters = pattern.replace("|", "")
        generator = torch.Generator().manual_seed(len(self.letters))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.tied = tied
        self.word, self.final_norm, self.head = normal(ROWS, D), normal(D), normal(ROWS, D)
        for table in (self.word, self.head):
            table[V:] = 0  # padding
        self.parts: list[Tensors] = []
        for letter in self.letters:
            if letter == "*":
                shapes = {"q": (H * K, D), "k": (G * K, D), "v": (G * K, D), "out": (D, H * K)}
            elif letter == "-":
                shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
            else:
                shapes = {"router": (E, D), "bias": (E,), "gate": (E, WIDTH, D), "up": (E, WIDTH, D)}
                shapes["down"] = (E, D, WIDTH)
            self.parts.append({name: normal(*shape) for name, shape in {"norm": (D,), **shapes}.items()})

    def of_megalite(self) -> Tensors:
        """Return the weights by megalite's names."""
        weights = {"model/embedding.word": self.word, "model/final_norm.weight": self.final_norm}
        if not self.tied:
            weights["model/head"] = self.head
        number, previous = -1, ""
        for letter, part in zip(self.letters, self.parts, strict=True):
            number += not (previous == "*" and letter != "*")
            previous = letter
            prefix = f"model/layers.{number}.{'attention' if letter == '*' else 'mlp'}"
            weights[f"{prefix}.norm.weight"] = part["norm"]
            if letter == "*":
                weights |= {f"{prefix}.q": part["q"], f"{prefix}.kv": torch.stack([part["k"], part["v"]])}
                weights[f"{prefix}.out"] = part["out"]
            elif letter == "-":
                weights[f"{prefix}.gate_up"] = torch.stack([part["gate"], part["up"]])
                weights[f"{prefix}.down"] = part["down"]
            else:
                weights |= {f"{prefix}.router": part["router"], f"{prefix}.experts.down": part["down"]}
                weights[f"{prefix}.experts.gate_up"] = torch.stack([part["gate"], part["up"]], 1)
                weights[prefix.replace("model/", "state/") + ".router.bias"] = part["bias"]
        return weights

    def of_stage(self, start: int, stop: int, tp: int, t: int, grouped: bool = True) -> Tensors:
        """Return the tensors of letters start to stop on tp rank t, by Megatron-LM's names within a stage.

        grouped: each expert is a tensor of Transformer Engine's grouped matmul; otherwise all are one (torch_dist).
        """

        def shard(values: Tensor, dim: int = 0) -> Tensor:
            return values.chunk(tp, dim)[t]

        def halves(gate: Tensor, up: Tensor, dim: int = 0) -> Tensor:
            return torch.cat([shard(gate, dim), shard(up, dim)], dim)

        tensors: Tensors = {}
        if start == 0:
            tensors["embedding.word_embeddings.weight"] = shard(self.word)
        for number, letter in enumerate(self.letters[start:stop]):
            part, prefix = self.parts[start + number], f"decoder.layers.{number}"
            if letter == "*":
                q = part["q"].view(G, H // G * K, D)
                k, v = part["k"].view(G, K, D), part["v"].view(G, K, D)
                qkv = torch.cat([q, k, v], 1)[t * G // tp : (t + 1) * G // tp].flatten(0, 1)
                tensors |= {
                    f"{prefix}.self_attention.linear_qkv.layer_norm_weight": part["norm"],
                    f"{prefix}.self_attention.linear_qkv.weight": qkv,
                    f"{prefix}.self_attention.linear_proj.weight": shard(part["out"], 1),
                }
            elif letter == "-":
                tensors |= {
                    f"{prefix}.mlp.linear_fc1.layer_norm_weight": part["norm"],
                    f"{prefix}.mlp.linear_fc1.weight": halves(part["gate"], part["up"]),
                    f"{prefix}.mlp.linear_fc2.weight": shard(part["down"], 1),
                }
            else:
                tensors |= {
                    f"{prefix}.pre_mlp_layernorm.weight": part["norm"],
                    f"{prefix}.mlp.router.weight": part["router"],
                    f"{prefix}.mlp.router.expert_bias": part["bias"],
                }
                up, down = halves(part["gate"], part["up"], 1), shard(part["down"], 2)
                if not grouped:
                    tensors[f"{prefix}.mlp.experts.experts.linear_fc1.weight"] = up
                    tensors[f"{prefix}.mlp.experts.experts.linear_fc2.weight"] = down
                    continue
                for i in range(E):
                    tensors[f"{prefix}.mlp.experts.linear_fc1.weight{i}"] = up[i]
                    tensors[f"{prefix}.mlp.experts.linear_fc2.weight{i}"] = down[i]
        if stop == len(self.letters):
            tensors["decoder.final_norm.weight"] = self.final_norm
            if not self.tied:
                tensors["output_layer.weight"] = shard(self.head)
            elif start > 0:
                tensors["output_layer.weight"] = shard(self.word)
        return tensors


def stage_bounds(pattern: str) -> list[tuple[int, int]]:
    """Return (first letter, end) of every stage of a pattern with borders."""
    stops = list(itertools.accumulate(len(stage) for stage in pattern.split("|")))
    return list(zip([0, *stops[:-1]], stops, strict=True))


def write(directory: Path, pattern: str, tp: int = 1, vpp: int = 1, tied: bool = False, **changes: Any) -> Weights:
    """Write a checkpoint with a file per rank, whose pattern has a border between two (virtual) stages."""
    weights, bounds = Weights(pattern, tied), stage_bounds(pattern)
    args = saved_args(pattern, untie_embeddings_and_output_weights=not tied, **changes)
    pp = len(bounds) // vpp
    for t, p in itertools.product(range(tp), range(pp)):
        chunks = [weights.of_stage(*bounds[c * pp + p], tp, t) for c in range(vpp)]
        models = {"model": chunks[0]} if vpp == 1 else {f"model{c}": chunk for c, chunk in enumerate(chunks)}
        rank_dir = directory / "iter_0000007" / f"mp_rank_{t:02d}{f'_{p:03d}' if pp > 1 else ''}"
        rank_dir.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, **models}, rank_dir / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    return weights


def write_dist(directory: Path, pattern: str, tied: bool = False, **changes: Any) -> Weights:
    """Write a checkpoint of format torch_dist, whose tensors are full."""
    target = directory / "iter_0000007"
    target.mkdir(parents=True)
    weights = Weights(pattern, tied)
    tensors = weights.of_stage(0, len(weights.letters), 1, 0, grouped=False)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(tensors, checkpoint_id=target, no_dist=True)
    args = saved_args(pattern, untie_embeddings_and_output_weights=not tied, **changes)
    torch.save({"args": args, "iteration": 7}, target / "common.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    return weights


def assert_holds(directory: Path, weights: Weights) -> None:
    """Assert that a checkpoint of megalite has exactly these weights."""
    source, expected = open_checkpoint(directory), weights.of_megalite()
    assert source.manifest.tensors.keys() == expected.keys()
    for name, values in expected.items():
        rows = V if name in ("model/embedding.word", "model/head") else len(values)
        assert torch.equal(source.read(name)[:rows], values[:rows]), name


def model_of(directory: Path) -> ModelConfig:
    return build(parse_config_text(open_checkpoint(directory).manifest.state["config"], "")).model


patterns = st.text("*-E", min_size=4, max_size=9)


@st.composite
def patterns_with_borders(draw: st.DrawFn, max_stages: int) -> str:
    letters = draw(patterns)
    num_borders = draw(st.integers(0, max_stages - 1))
    positions = draw(st.sets(st.integers(1, len(letters) - 1), min_size=num_borders, max_size=num_borders))
    for position in sorted(positions, reverse=True):
        letters = f"{letters[:position]}|{letters[position:]}"
    return letters


@settings(max_examples=12, deadline=None)
@given(patterns_with_borders(3), st.sampled_from([1, 2]), st.booleans())
def test_random_pattern_is_read_bit_exactly(tmp_path_factory, pattern: str, tp: int, tied: bool) -> None:
    directory = tmp_path_factory.mktemp("hybrid")
    weights = write(directory / "theirs", pattern, tp, tied=tied)
    argv = ["--save", directory / "ours", "--vocab-size", V, "--check-bits"]
    assert tool("--from-megatron", directory / "theirs", *argv) == 0
    assert_holds(directory / "ours", weights)
    assert model_of(directory / "ours").hybrid_layer_pattern == pattern.replace("|", "")


@settings(max_examples=10, deadline=None)
@given(patterns, st.booleans())
def test_random_pattern_of_torch_dist_is_read_bit_exactly(tmp_path_factory, pattern: str, tied: bool) -> None:
    directory = tmp_path_factory.mktemp("hybrid")
    weights = write_dist(directory / "theirs", pattern, tied)
    argv = ["--save", directory / "ours", "--vocab-size", V, "--check-bits"]
    assert tool("--from-megatron", directory / "theirs", *argv) == 0
    assert_holds(directory / "ours", weights)


def test_virtual_stages_are_read_in_the_order_of_depth(tmp_path: Path, capsys) -> None:
    weights = write(tmp_path / "theirs", "*|-*|E-|*-", tp=2, vpp=2)
    argv = ["--save", tmp_path / "ours", "--vocab-size", V, "--check"]
    assert tool("--from-megatron", tmp_path / "theirs", *argv) == 0
    assert "read a second way compute the same" in capsys.readouterr().out
    assert_holds(tmp_path / "ours", weights)


@settings(max_examples=12, deadline=None)
@given(patterns, st.sampled_from([1, 2]), st.integers(1, 4), st.booleans())
def test_random_pattern_is_written_under_megatrons_names(
    tmp_path_factory, pattern: str, tp: int, pp: int, tied: bool
) -> None:
    directory = tmp_path_factory.mktemp("hybrid")
    weights = write(directory / "theirs", pattern, tied=tied)
    assert tool("--from-megatron", directory / "theirs", "--save", directory / "ours", "--vocab-size", V) == 0
    sizes = ["--target-tensor-parallel-size", tp, "--target-pipeline-parallel-size", pp]
    assert tool("--load", directory / "ours", "--to-megatron", directory / "back", "--check-bits", *sizes) == 0
    for t, p in itertools.product(range(tp), range(pp)):
        rank = f"mp_rank_{t:02d}{f'_{p:03d}' if pp > 1 else ''}"
        file = load_pickle(directory / "back" / "release" / rank / "model_optim_rng.pt", lambda line: None)
        args = file["args"]
        stages = args.hybrid_layer_pattern.split("|")
        assert (len(stages), "".join(stages), args.num_layers) == (pp, pattern, len(pattern))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
        assert args.padded_vocab_size == 128 * tp and args.expert_tensor_parallel_size == tp
        weights.word, weights.head = weights.word[: 128 * tp], weights.head[: 128 * tp]
        expected = weights.of_stage(*stage_bounds(args.hybrid_layer_pattern)[p], tp, t)
        assert file["model"].keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(file["model"][name], values), name
    argv = ["--save", directory / "again", "--vocab-size", V]
    assert tool("--from-megatron", directory / "back", *argv) == 0
    assert_holds(directory / "again", weights)
    assert model_differences(model_of(directory / "again"), model_of(directory / "ours"), "") == []


NAMES = """
embedding.word_embeddings.weight
decoder.layers.0.self_attention.linear_qkv.layer_norm_weight
decoder.layers.0.self_attention.linear_qkv.weight
decoder.layers.0.self_attention.linear_proj.weight
decoder.layers.1.self_attention.linear_qkv.layer_norm_weight
decoder.layers.1.self_attention.linear_qkv.weight
decoder.layers.1.self_attention.linear_proj.weight
decoder.layers.2.mlp.linear_fc1.layer_norm_weight
decoder.layers.2.mlp.linear_fc1.weight
decoder.layers.2.mlp.linear_fc2.weight
decoder.layers.3.pre_mlp_layernorm.weight
decoder.layers.3.mlp.router.weight
decoder.layers.3.mlp.router.expert_bias
decoder.layers.3.mlp.experts.linear_fc1.weight0
decoder.layers.3.mlp.experts.linear_fc1.weight1
decoder.layers.3.mlp.experts.linear_fc1.weight2
decoder.layers.3.mlp.experts.linear_fc1.weight3
decoder.layers.3.mlp.experts.linear_fc2.weight0
decoder.layers.3.mlp.experts.linear_fc2.weight1
decoder.layers.3.mlp.experts.linear_fc2.weight2
decoder.layers.3.mlp.experts.linear_fc2.weight3
decoder.final_norm.weight
output_layer.weight
""".split()


def test_written_names_are_those_of_the_modules(tmp_path: Path) -> None:
    write(tmp_path / "theirs", "**-E")
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V) == 0
    assert tool("--load", tmp_path / "ours", "--to-megatron", tmp_path / "back") == 0
    file = load_pickle(tmp_path / "back/release/mp_rank_00/model_optim_rng.pt", lambda line: None)
    assert sorted(file["model"]) == sorted(NAMES)
    assert file["args"].spec == ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]


UNIFORM = "*-*E*-"


def test_same_model_is_written_for_both_classes(tmp_path: Path) -> None:
    weights = write(tmp_path / "theirs", UNIFORM)
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V) == 0
    sizes = ["--target-tensor-parallel-size", 2]
    for model_class, pattern in (("GPTModel", None), ("HybridModel", UNIFORM)):
        release, converted = tmp_path / model_class, tmp_path / f"from-{model_class}"
        target = ["--to-megatron", release, "--export-model-type", model_class, *sizes]
        assert tool("--load", tmp_path / "ours", *target) == 0
        assert tool("--from-megatron", release, "--save", converted, "--vocab-size", V, "--check-bits") == 0
        assert_holds(converted, weights)
        assert model_of(converted).hybrid_layer_pattern == pattern
        assert model_of(converted).layers == model_of(tmp_path / "ours").layers
    # from a checkpoint of a model without a pattern
    target = ["--to-megatron", tmp_path / "hybrid", "--export-model-type", "HybridModel"]
    assert tool("--load", tmp_path / "from-GPTModel", *target) == 0
    assert tool("--from-megatron", tmp_path / "hybrid", "--save", tmp_path / "again", "--vocab-size", V) == 0
    assert_holds(tmp_path / "again", weights)


@pytest.mark.parametrize(
    "changes,windows,rope",
    [
        ({"window_size": (4, 0)}, (5, 5, 5), (True, True, True)),
        ({"window_size": (4, 0), "window_attn_skip_freq": 2}, (5, None, 5), (True, True, True)),
        ({"window_size": [4, 0], "window_attn_skip_freq": [0, 0, 0, 1, 1, 1]}, (None, 5, 5), (True, True, True)),
        ({"window_size": (4, 0), "window_attn_skip_freq": [0, 1, 1, 0, 0, 1]}, (None, None, None), (True, True, True)),
        ({"no_rope_freq": 4}, (None, None, None), (True, False, True)),
        ({"no_rope_freq": [0, 1, 1, 0, 1, 1]}, (None, None, None), (True, True, False)),
        ({"no_rope_freq": 3}, (None, None, None), (True, True, True)),
    ],
)
def test_values_of_layers_count_letters(changes: dict[str, Any], windows: tuple, rope: tuple) -> None:
    """The letters of attention have numbers 1, 4 and 5; Megatron-LM compares `layer_number % freq`."""
    model = build(read_args(saved_args("*--**-", **changes), "")).model
    attention = [layer for layer in model.layers if layer.mixer is not None]
    assert tuple(layer.window for layer in attention) == windows
    assert tuple(layer.rope is not None for layer in attention) == rope
    sizes: dict[str, Any] = dict(vocab_size=V, padded_vocab_size=ROWS, tokenizer={}, tp=1, pp=1, dtype="float32")
    written = write_args(model, **sizes, is_hybrid=True)
    assert build(read_args(written, "")).model.layers == model.layers


def test_older_args_name_the_same_model() -> None:
    new = build(read_args(saved_args("*-*E"), "")).model
    ratios = {"hybrid_attention_ratio": 0.5, "hybrid_mlp_ratio": 0.25, "is_hybrid_model": True}
    args = saved_args("*-*E", hybrid_override_pattern="*-*E", hybrid_layer_pattern=None, **ratios)
    assert build(read_args(args, "")).model == new
    delattr(args, "hybrid_layer_pattern")
    assert build(read_args(args, "")).model == new
    uniform = saved_args("*-*-", hybrid_layer_pattern="", num_layers=2)
    assert build(read_args(uniform, "")).model.hybrid_layer_pattern is None
    dense = saved_args("*-*-", num_experts=8, moe_ffn_hidden_size=WIDTH)  # experts that no letter has
    assert build(read_args(dense, "")).model.num_experts is None


@pytest.mark.parametrize(
    "pattern,changes,reason",
    [
        ("M-*-", {}, "hybrid_layer_pattern='M-[*]-' has M, a Mamba layer, which is not converted"),
        ("K-*-", {}, "hybrid_layer_pattern='K-[*]-' has K, Kimi delta attention, which is not converted"),
        ("D-*-", {}, "hybrid_layer_pattern='D-[*]-' has D, sparse attention, which is not supported"),
        ("G*-", {}, "has G, a gated delta net, which is not converted"),
        ("*-+", {}, "has [+], multi-latent attention, which is not converted"),
        ("*-/*-", {"num_layers": 4}, "has /, multi-token prediction, which is not converted"),
        ("*-x", {}, "has 'x' at position 2"),
        ("*-*", {"num_layers": 4}, "num_layers=4, but hybrid_layer_pattern='[*]-[*]' has 3 letters"),
        (None, {"hybrid_attention_ratio": 0.5, "num_layers": 2}, "hybrid_attention_ratio=0.5"),
        (None, {"is_hybrid_model": True, "num_layers": 2}, "is_hybrid_model=True"),
        ("*E", {"num_experts": None}, "'[*]E' with E needs --num-experts"),
        ("*-*-", {"no_rope_freq": [0, 1]}, r"no_rope_freq=\[0, 1\] does not have 4 values, one for each layer"),
    ],
)
def test_unsupported_args_are_refused_by_name(
    pattern: str | None, changes: dict[str, Any], reason: str, tmp_path: Path, capsys
) -> None:
    write(tmp_path / "theirs", "*-*-")
    args = {**vars(saved_args(pattern or "")), "hybrid_layer_pattern": pattern, **changes}
    _edit(tmp_path / "theirs", lambda data: data.update(args=argparse.Namespace(**args)))
    assert_refused(tmp_path / "theirs", capsys, reason)


def test_tensors_at_the_number_of_another_letter_are_refused(tmp_path: Path, capsys) -> None:
    write(tmp_path / "theirs", "*-*-")
    _edit(tmp_path / "theirs", lambda data: setattr(data["args"], "hybrid_layer_pattern", "**--"))
    assert_refused(tmp_path / "theirs", capsys, r"layers.1.self_attention.linear_qkv.weight is missing")
    as_gpt = {"hybrid_layer_pattern": None, "num_layers": 2}
    _edit(tmp_path / "theirs", lambda data: [setattr(data["args"], *pair) for pair in as_gpt.items()])
    assert_refused(tmp_path / "theirs", capsys, r"layers.0.mlp.linear_fc1.weight is missing")


def test_impossible_exports_are_refused_with_a_remedy(tmp_path: Path, capsys) -> None:
    write(tmp_path / "theirs", "**-E")
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V) == 0
    for flags, reason in (
        (
            ["--export-model-type", "GPTModel"],
            "='**-E' is not attention and MLP in turn; give --export-model-type HybridModel",
        ),
        (["--transformer-impl", "local"], "transformer_impl=local: a HybridModel has layers of Transformer Engine"),
        (["--target-pipeline-parallel-size", 5], "4 attention and MLP layers are fewer than pp=5"),
        (["--target-tensor-parallel-size", 4], "do not all split over tp=4"),
    ):
        assert tool("--load", tmp_path / "ours", "--to-megatron", tmp_path / "back", *flags) == 3
        assert reason in capsys.readouterr().err and not (tmp_path / "back").exists()


# ---- training
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 --mock-data --eval-iters 0 --device cpu "
    f"--hidden-dropout 0 --attention-dropout 0 --use-checkpoint-args --finetune --vocab-size {V}"
)


def train_from(directory: str, flags: str) -> list[float]:
    """Train three steps from a checkpoint and return their losses."""
    config = complete_config(config_from([*TRAINING.split(), "--load", directory, *flags.split()]))
    run = run_from(config, dtype=torch.float64)
    load_initial_state(run, config)
    return [train_step(run).loss for _ in range(3)]


@pytest.mark.parametrize("flags", ["--tp 2", "--pp 2 --hybrid-layer-pattern *-*|E", "--ep 2 --zero-stage 2"])
def test_training_from_a_hybrid_checkpoint_equals_one_process(flags: str, tmp_path: Path) -> None:
    write(tmp_path / "torch", "*-|*E", window_size=(4, 0), window_attn_skip_freq=3)
    write_dist(tmp_path / "torch_dist", "*-*E", window_size=(4, 0), window_attn_skip_freq=3)
    assert tool("--from-megatron", tmp_path / "torch", "--save", tmp_path / "ours", "--vocab-size", V) == 0
    expected = train_from(str(tmp_path / "ours"), "")
    assert expected[0] != expected[-1]
    for kind in ("torch", "torch_dist"):
        assert train_from(str(tmp_path / kind), "") == expected
        for losses in run_ranks(2, train_from, str(tmp_path / kind), flags):
            assert losses == pytest.approx(expected, rel=1e-12)


def test_gpt_checkpoint_starts_a_run_with_the_pattern_of_its_layers(tmp_path: Path) -> None:
    lists = {"window_size": (4, 0), "window_attn_skip_freq": 3, "no_rope_freq": [0, 0, 1, 0, 0, 0]}
    write(tmp_path / "theirs", UNIFORM, **lists)
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V) == 0
    target = ["--to-megatron", tmp_path / "gpt", "--export-model-type", "GPTModel"]
    assert tool("--load", tmp_path / "ours", *target) == 0
    assert tool("--from-megatron", tmp_path / "gpt", "--save", tmp_path / "plain", "--vocab-size", V) == 0
    assert model_of(tmp_path / "plain").hybrid_layer_pattern is None
    expected = train_from(str(tmp_path / "theirs"), "")
    for directory in ("gpt", "plain"):
        assert train_from(str(tmp_path / directory), f"--hybrid-layer-pattern {UNIFORM}") == expected


def test_checkpoint_of_another_pattern_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path, "*-*-")
    with pytest.raises(SetupError, match=r"hybrid_layer_pattern='\*\*--', but '\*-\*-' in .*; drop the option"):
        train_from(str(tmp_path), "--hybrid-layer-pattern **--")
