"""Mixtures of experts from and to Hugging Face, and from Megatron-LM's files, which this module writes."""

import argparse
import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hugging_face_cases import CASES, SHAPE, copy_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_convert_megatron import Case, D, F, L, assert_refused, full_weights, stage, tool
from test_convert_megatron import V as TOKENS
from torch import Tensor
from train_cases import config_from, run_from

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.options import build
from megalite.interop import tensor_mapping as convert
from megalite.interop.huggingface import model_files
from megalite.interop.huggingface.config_json import choose_family, incompatibilities, read_config
from megalite.interop.megatron.torch_format import load_pickle
from megalite.interop.name_mapping import FAMILIES
from megalite.training.checkpointing import initial_state as origin


# ---- Hugging Face
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_stacked_experts_equal_separate_experts(models, name: str, tmp_path: Path) -> None:
    hf_model, hf_dir = models(name)
    hf_model.save_pretrained(tmp_path / "memory", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "memory" / "model.safetensors")
    for form, source in (("many", hf_dir), ("one", tmp_path / "memory")):
        assert tool("--from-hf", source, "--save", tmp_path / form, "--check-bits") == 0
    separate, stacked = open_checkpoint(tmp_path / "many"), open_checkpoint(tmp_path / "one")
    assert separate.manifest.tensors.keys() == stacked.manifest.tensors.keys()
    assert all(torch.equal(separate.read(key), stacked.read(key)) for key in separate.manifest.tensors)


@pytest.mark.parametrize(
    "change,reason",
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "layers.1.mlp.experts.3.up_proj.weight is missing"),
        (lambda t: t.update({"model.layers.1.mlp.experts.6.up_proj.weight": torch.ones(20, 32)}), "not a tensor of this model"),
        (lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(6, 32)}), "layers.0.mlp.gate.weight in .*: not a tensor"),
        (lambda t: t.pop("model.layers.1.mlp.shared_expert_gate.weight"), "shared_expert_gate.weight is missing"),
    ],
)  # fmt: skip
def test_missing_or_extra_expert_is_named(models, change: Callable, reason: str, tmp_path: Path) -> None:
    hf_dir = copy_model(models("qwen2_moe")[1], tmp_path / "hf")
    tensors = load_file(hf_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, hf_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        model_files.open_model(hf_dir)


def test_check_detects_swapped_experts(models, tmp_path: Path, monkeypatch, capsys) -> None:
    real = convert.build_mappings

    def build_swapped_mappings(*args: Any, **kwargs: Any) -> list[Any]:
        swaps = {"experts.0.": "experts.1.", "experts.1.": "experts.0."}
        swapped_name = lambda name: re.sub(r"experts\.[01]\.", lambda match: swaps[match[0]], name)  # noqa: E731
        return [replace(recipe, external_name=swapped_name(recipe.external_name)) for recipe in real(*args, **kwargs)]

    monkeypatch.setattr(convert, "build_mappings", build_swapped_mappings)
    assert tool("--from-hf", models("mixtral")[1], "--save", tmp_path / "ours", "--check") == 1
    out = capsys.readouterr().out
    assert "all bits equal" in out and "logits of 96 random tokens differ by" in out


CONFIG = {**SHAPE, **CASES["experts"]["shape"]}


@settings(max_examples=40)
@given(step=st.integers(1, 4), dense=st.lists(st.integers(0, 8)), layers=st.integers(1, 8), normalize=st.booleans())
def test_expert_layers_equal_transformers(step: int, dense: list[int], layers: int, normalize: bool) -> None:
    keys = {"decoder_sparse_step": step, "mlp_only_layers": dense, "num_hidden_layers": layers}
    model = build(read_config({**CONFIG, **keys, "norm_topk_prob": normalize}, None, "")[1]).model
    assert model.moe_layers == tuple(n not in dense and (n + 1) % step == 0 for n in range(layers))
    assert model.moe_router_pre_softmax == (not normalize)
    assert not incompatibilities(model, FAMILIES.get("qwen3_moe"))
    if any(model.moe_layers):
        assert choose_family(model, None, None) == "qwen3_moe"


def test_missing_moe_keys_have_transformers_defaults() -> None:
    import transformers

    classes = dict(mixtral="Mixtral", qwen2_moe="Qwen2Moe", qwen3_moe="Qwen3Moe", olmoe="Olmoe", gpt_oss="GptOss")
    for name, cls in classes.items():
        hf_config = getattr(transformers, f"{cls}Config")(**SHAPE)
        expected = build(read_config(hf_config.to_dict(), None, "")[1]).model
        keys = SHAPE | {"num_key_value_heads": hf_config.num_key_value_heads}
        actual = build(read_config({**keys, "model_type": name}, None, "")[1]).model
        assert actual == expected and actual.num_experts == hf_config.num_experts


# ---- Megatron-LM
E, WIDTH, SHARED = 4, 12, 8
CASE = Case(groups=2, llama=True, tied=False)
SOME, ALL = [0, 1, 0, 1], [1, 1, 1, 1]
SIZES = {"mlp.router": (E, D), "mlp.router.bias": (E,), "mlp.experts.gate_up": (E, 2, WIDTH, D)}
SIZES |= {"mlp.experts.down": (E, D, WIDTH), "mlp.shared.gate_up": (2, SHARED, D), "mlp.shared.down": (D, SHARED)}
SIZES["mlp.shared_gate"] = (D,)
Names = dict[str, Tensor]


def weights_of(freq: list[int]) -> Names:
    """Return random weights under megalite's names and in its shapes."""
    weights, generator = full_weights(CASE), torch.Generator().manual_seed(4)
    for n in (n for n in range(L) if freq[n]):
        del weights[f"layers.{n}.mlp.gate_up"], weights[f"layers.{n}.mlp.down"]
        weights |= {f"layers.{n}.{name}": torch.randn(size, generator=generator) for name, size in SIZES.items()}
    return weights


def expert_stage(freq: list[int], layers: range, form: str, tp: int = 1, t: int = 0, ep: int = 1, e: int = 0) -> Names:
    """Return one stage of (tp, ep) rank (t, e) under Megatron Core's names."""
    weights = weights_of(freq)
    names = stage(CASE, full_weights(CASE) | weights, tp, t, layers)

    def add(prefix: str, up: str, down: str, gate_up: Tensor, down_DF: Tensor) -> None:
        names[prefix + up] = torch.cat([half.chunk(tp)[t] for half in gate_up])
        names[prefix + down] = down_DF.chunk(tp, 1)[t]

    for local, n in ((local, n) for local, n in enumerate(layers) if freq[n]):
        prefix, mlp = f"decoder.layers.{local}.mlp.", {name[4:]: weights[f"layers.{n}.{name}"] for name in SIZES}
        names[prefix.replace("mlp.", "pre_mlp_layernorm.weight")] = names.pop(f"{prefix}linear_fc1.layer_norm_weight")
        del names[f"{prefix}linear_fc1.weight"], names[f"{prefix}linear_fc2.weight"]
        names |= {f"{prefix}router.weight": mlp["router"], f"{prefix}router.expert_bias": mlp["router.bias"]}
        names[f"{prefix}shared_experts.gate_weight"] = mlp["shared_gate"][None]
        linears = "linear_fc1.weight", "linear_fc2.weight"
        add(f"{prefix}shared_experts.", *linears, mlp["shared.gate_up"], mlp["shared.down"])
        up, down = mlp["experts.gate_up"], mlp["experts.down"]
        if form == "dist":
            names[f"{prefix}experts.experts.linear_fc1.weight"] = up.flatten(1, 2)
            names[f"{prefix}experts.experts.linear_fc2.weight"] = down
            continue
        for i in range(E // ep):
            target_names = (f"{prefix}experts.local_experts.{i}.", *linears)
            if form == "grouped":
                target_names = (f"{prefix}experts.", *(f"{name}{i}" for name in linears))
            add(*target_names, up[e * E // ep + i], down[e * E // ep + i])
    return names


def write(directory: Path, freq: list[int], tp: int = 1, pp: int = 1, ep: int = 1, form: str = "grouped") -> Path:
    target, moe_args = (
        directory / "iter_0000007",
        {"num_experts": E, "moe_layer_freq": freq, "moe_ffn_hidden_size": WIDTH},
    )
    moe_args |= {
        "moe_shared_expert_intermediate_size": SHARED,
        "moe_shared_expert_gate": True,
        "moe_aux_loss_coeff": 0.01,
    }
    moe_args |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_z_loss_coeff": None,
    }
    moe_args |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp64", "moe_router_topk": 2}
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp}
    args = argparse.Namespace(**CASE.args, **moe_args, **sizes)
    target.mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    if form == "dist":
        _save_dist(target, expert_stage(freq, range(L), form), all(freq))
        torch.save({"args": args, "iteration": 7}, target / "common.pt")
        return target
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        (target / name).mkdir()
        model = expert_stage(freq, range(p * L // pp, (p + 1) * L // pp), form, tp, t, ep, e)
        torch.save({"args": args, "checkpoint_version": 3.0, "model": model}, target / name / "model_optim_rng.pt")
    return target


def _save_dist(target: Path, names: Names, stacked: bool) -> None:
    """Save `names` in the torch_dist format, the layers of one kind as one tensor if `stacked`."""
    if stacked:
        stacked_names = {name.replace(".layers.0.", ".layers.") for name in names if ".layers.0." in name}
        layers = {key: [names.pop(key.replace(".layers.", f".layers.{n}.")) for n in range(L)] for key in stacked_names}
        names |= {key: torch.stack(values) for key, values in layers.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(names), checkpoint_id=target, no_dist=True)


LAYOUTS = [(SOME, 1, 1, 1, "sequential"), (ALL, 2, 1, 2, "sequential"), (SOME, 1, 1, 4, "grouped")]
LAYOUTS += [(SOME, 2, 2, 2, "grouped"), (SOME, 1, 1, 1, "dist"), (ALL, 1, 1, 1, "dist")]


@pytest.mark.parametrize("freq,tp,pp,ep,form", LAYOUTS)
def test_experts_are_read_bit_exactly(freq, tp: int, pp: int, ep: int, form: str, tmp_path: Path, capsys) -> None:
    write(tmp_path / "theirs", freq, tp, pp, ep, form)
    argv = ["--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", TOKENS]
    assert tool(*argv, "--check") == 0
    assert "read a second way compute the same" in capsys.readouterr().out
    source = open_checkpoint(tmp_path / "ours")
    expected = {f"{'state' if name.endswith('r.bias') else 'model'}/{name}": w for name, w in weights_of(freq).items()}
    assert source.manifest.tensors.keys() == expected.keys()
    for key, values in expected.items():
        rows = TOKENS if key in ("model/embedding.word", "model/head") else len(values)
        assert torch.equal(source.read(key)[:rows], values[:rows]), key


def test_run_starts_with_imported_experts_and_biases(tmp_path: Path) -> None:
    write(tmp_path, SOME, form="dist")
    flags = "--micro-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --eval-iters 0 --device cpu --vocab-size 50"
    config = origin.complete_config(config_from([*flags.split(), "--load", str(tmp_path), "--use-checkpoint-args"]))
    run, expected = run_from(config), weights_of(SOME)
    assert origin.load_external_model(run, config) is not None
    assert [router.layer for router in run.expert_balancer.routers] == [1, 3]
    for router in run.expert_balancer.routers:
        assert router.expert_bias is not None and torch.equal(
            router.expert_bias, expected[f"layers.{router.layer}.mlp.router.bias"]
        )
        assert torch.equal(router.weight, expected[f"layers.{router.layer}.mlp.router"])


def _change(directory: Path, rank: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "iter_0000007" / rank / "model_optim_rng.pt"
    data = torch.load(path, weights_only=False)
    change(data)
    torch.save(data, path)


EXPERT, ROUTER = "decoder.layers.3.mlp.experts.linear_fc2.weight1", "decoder.layers.1.mlp.router.weight"
BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no expert": (lambda d: d["model"].pop(EXPERT), "layers.3.mlp.experts.local_experts.1.linear_fc2.weight is missing"),
    "more experts": (lambda d: d["model"].update({EXPERT[:-1] + "2": torch.ones(D, WIDTH)}), "local_experts.2.* not a tensor"),
    "no bias": (lambda d: d["model"].pop("decoder.layers.1.mlp.router.expert_bias"), "layers.1.mlp.router.expert_bias is missing"),
    "another copy": (lambda d: d["model"].update({ROUTER: torch.ones(E, D)}), f"{ROUTER} in .* differs from {ROUTER} in "),
    "one matrix": (lambda d: d["model"].update({"decoder.layers.1.mlp.experts.weight1": torch.ones(D, F)}), "weight1 is all experts of a GroupedMLP"),
}  # fmt: skip
ARGS = {
    "expert_tensor_parallel_size=2 is not tensor_model_parallel_size=1": {"expert_tensor_parallel_size": 2},
    "num_experts=3 does not split over ep=2": {"num_experts": 3},
    "moe_latent_size=8": {"moe_latent_size": 8},
    "moe_mlp_glu_interleave_size=32": {"moe_mlp_glu_interleave_size": 32},
}


@pytest.mark.parametrize("kind", [*BAD, *ARGS])
def test_incompatible_experts_are_named(kind: str, tmp_path: Path, capsys) -> None:
    directory = tmp_path / "theirs"
    write(directory, SOME, ep=2)
    change, reason = BAD.get(kind, (lambda d: [setattr(d["args"], *pair) for pair in ARGS[kind].items()], kind))
    _change(directory, "mp_rank_00_001" if kind in BAD else "mp_rank_00_000", change)
    assert_refused(directory, capsys, reason)


@pytest.mark.parametrize(
    "freq,tp,pp,impl", [(SOME, 1, 1, "local"), (SOME, 2, 2, "transformer_engine"), (ALL, 1, 4, None)]
)
def test_written_experts_equal_megatrons(freq, tp: int, pp: int, impl: str | None, tmp_path: Path, capsys) -> None:
    write(tmp_path / "theirs", freq)
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", TOKENS) == 0
    flags = ["--target-tensor-parallel-size", tp, "--target-pipeline-parallel-size", pp]
    flags += [] if impl is None else ["--transformer-impl", impl]
    assert tool("--load", tmp_path / "ours", "--to-megatron", tmp_path / "back", "--check", *flags) == 0
    assert "all bits equal" in capsys.readouterr().out
    for t, p in itertools.product(range(tp), range(pp)):
        rank = f"mp_rank_{t:02d}{f'_{p:03d}' if pp > 1 else ''}"
        file = load_pickle(tmp_path / "back" / "release" / rank / "model_optim_rng.pt", print)
        form = "sequential" if impl == "local" else "grouped"
        expected = expert_stage(freq, range(p * L // pp, (p + 1) * L // pp), form, tp, t)
        if impl == "local":  # where norms are layers of their own
            for fused, norm in (("self_attention.linear_qkv", "input"), ("mlp.linear_fc1", "pre_mlp")):
                fused_name, name = f"{fused}.layer_norm_weight", f"{norm}_layernorm.weight"
                expected = {key.replace(fused_name, name): values for key, values in expected.items()}
        assert file["model"].keys() == expected.keys()
        for name, values in expected.items():
            if name not in ("embedding.word_embeddings.weight", "output_layer.weight"):  # padded to another size
                assert torch.equal(file["model"][name], values), name
        assert file["args"].moe_grouped_gemm == (impl != "local") and file["args"].num_experts == E
    assert tool("--from-megatron", tmp_path / "back", "--save", tmp_path / "second", "--vocab-size", TOKENS) == 0
    first, second = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "second")
    assert first.manifest.tensors.keys() == second.manifest.tensors.keys()
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.manifest.tensors)


def test_missing_rank_and_export_to_hugging_face_are_refused(tmp_path: Path, capsys) -> None:
    iteration_dir = write(tmp_path / "theirs", SOME, tp=2, ep=2)
    (iteration_dir / "mp_rank_00_001").rename(iteration_dir / "gone")
    assert_refused(tmp_path / "theirs", capsys, "tp rank 0, pp rank 0, ep rank 1 of 2 x 1 x 2 is missing")
    (iteration_dir / "gone").rename(iteration_dir / "mp_rank_00_001")
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", TOKENS) == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "hf") == 3
    assert "moe_router_enable_expert_bias=True is not False" in capsys.readouterr().err
