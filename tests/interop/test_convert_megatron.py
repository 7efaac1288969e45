"""Conversion of Megatron-LM's files to megalite and back.

The fixtures are written here from the description of the format, tensor by tensor, without the rules that are tested.
"""

import argparse
import contextlib
import enum
import math
import os
import pickle
import random
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.config_file import parse_config_text
from megalite.config.options import build
from megalite.interop.megatron.torch_format import load_pickle, open_torch_checkpoint, read_args
from megalite.training.checkpointing.compatibility import model_differences
from tools import convert_checkpoint
from tools.export_files import write_args

L, D, H, K, F, S, V, ROWS = 4, 16, 4, 4, 24, 8, 50, 64


def tool(*argv: object) -> int:
    return convert_checkpoint.main([str(arg) for arg in argv])


@dataclass(frozen=True)
class Case:
    groups: int = H
    llama: bool = False
    tied: bool = True
    old: bool = False  # the names from before Megatron core
    fused: bool = True  # Transformer Engine's names

    @property
    def args(self) -> dict[str, Any]:
        base = {"num_layers": L, "hidden_size": D, "num_attention_heads": H, "ffn_hidden_size": F, "seq_length": S}
        base |= {"max_position_embeddings": S, "padded_vocab_size": ROWS, "params_dtype": torch.float32}
        base |= {"untie_embeddings_and_output_weights": not self.tied, "add_bias_linear": not self.llama}
        if not self.llama:
            return base
        kind = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
        return base | kind | {"group_query_attention": True, "num_query_groups": self.groups}


def full_weights(case: Case) -> dict[str, Tensor]:
    """Return random weights under megalite's names and in its shapes."""
    G, shapes = case.groups, {"embedding.word": (ROWS, D)}
    layer = {"attention.norm.weight": (D,), "mlp.norm.weight": (D,), "attention.q": (H * K, D), "mlp.down": (D, F)}
    layer |= {"attention.kv": (2, G * K, D), "attention.out": (D, H * K)}
    if case.llama:
        layer["mlp.gate_up"] = (2, F, D)
    else:
        shapes |= {"embedding.position": (S, D), "final_norm.bias": (D,)}
        layer |= {"attention.norm.bias": (D,), "mlp.norm.bias": (D,), "attention.q_bias": (H * K,), "mlp.up": (F, D)}
        layer |= {
            "attention.kv_bias": (2, G * K),
            "attention.out_bias": (D,),
            "mlp.up_bias": (F,),
            "mlp.down_bias": (D,),
        }
    shapes |= {"final_norm.weight": (D,)} | ({} if case.tied else {"head": (ROWS, D)})
    shapes |= {f"layers.{n}.{name}": shape for n in range(L) for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stage(case: Case, weights: dict[str, Tensor], tp: int, t: int, layers: range) -> dict[str, Tensor]:
    """Return one (virtual) stage of tp rank t under Megatron Core's names."""

    def shard(values: Tensor, dim: int = 0) -> Tensor:
        return values.chunk(tp, dim)[t]

    G = case.groups
    result: dict[str, Tensor] = {}
    if layers.start == 0:
        result["embedding.word_embeddings.weight"] = shard(weights["embedding.word"])
        if not case.llama:
            result["embedding.position_embeddings.weight"] = weights["embedding.position"]
    for local, n in enumerate(layers):
        prefix, megatron_prefix = f"layers.{n}.", f"decoder.layers.{local}."
        for kind in ("", "_bias"):
            if kind and case.llama:
                continue
            rest = () if kind else (D,)
            q = weights[f"{prefix}attention.q{kind}"].view(G, H // G * K, *rest)
            k, v = weights[f"{prefix}attention.kv{kind}"].view(2, G, K, *rest)
            rows = [torch.cat([q[g], k[g], v[g]]) for g in range(t * G // tp, (t + 1) * G // tp)]
            end = "bias" if kind else "weight"
            result[f"{megatron_prefix}self_attention.linear_qkv.{end}"] = torch.cat(rows)
            if case.llama:
                gate, up = weights[f"{prefix}mlp.gate_up"]
                result[f"{megatron_prefix}mlp.linear_fc1.{end}"] = torch.cat([shard(gate), shard(up)])
            else:
                result[f"{megatron_prefix}mlp.linear_fc1.{end}"] = shard(weights[f"{prefix}mlp.up{kind}"])
            for megatron_name, name in (
                ("self_attention.linear_proj", "attention.out"),
                ("mlp.linear_fc2", "mlp.down"),
            ):
                values = weights[f"{prefix}{name}{kind}"]
                result[f"{megatron_prefix}{megatron_name}.{end}"] = values if kind else shard(values, 1)
            for megatron_name, fused_name, name in (
                ("input_layernorm.", "self_attention.linear_qkv.layer_norm_", "attention.norm"),
                ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", "mlp.norm"),
            ):
                result[f"{megatron_prefix}{fused_name if case.fused else megatron_name}{end}"] = weights[
                    f"{prefix}{name}.{end}"
                ]
    if layers.stop == L:
        for end in ("weight",) if case.llama else ("weight", "bias"):
            result[f"decoder.final_layernorm.{end}"] = weights[f"final_norm.{end}"]
        if not case.tied:
            result["output_layer.weight"] = shard(weights["head"])
        elif layers.start > 0:
            result["output_layer.weight"] = shard(weights["embedding.word"])
    return result


OLD = {"linear_qkv": "query_key_value", "linear_proj": "dense", "pre_mlp_layernorm": "post_attention_layernorm"}
OLD |= {"linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h"}


def as_old(names: dict[str, Tensor]) -> dict[str, Any]:
    """Return the nested dictionaries that checkpoints had before Megatron Core."""
    encoder, language = {}, {}
    head: dict[str, Any] = {}
    for name, values in names.items():
        for new, old in OLD.items():
            name = name.replace(new, old)
        if name.startswith("decoder."):
            encoder[name.removeprefix("decoder.")] = values
        elif name.startswith("embedding."):
            _, table, end = name.split(".")
            language.setdefault("embedding", {}).setdefault(table, {})[end] = values
        else:
            head = {"weight": values}
    return {"language_model": language | {"encoder": encoder}} | ({"word_embeddings_for_head": head} if head else {})


class Backend(enum.Enum):
    auto = 5


Backend.__module__, Backend.__qualname__ = "megatron.core.transformer.enums", "AttnBackend"


def extras() -> dict[str, Any]:
    """Return what else such a file holds: the iteration, random states and an optimizer."""
    state = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(), "rng_tracker_states": {}}
    optimizer = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}}
    return {"iteration": 7, "rng_state": [state | {"torch_rng_state": torch.get_rng_state()}], "optimizer": optimizer}


def write(directory: Path, case: Case, tp: int = 1, pp: int = 1, vpp: int = 1, **args: Any) -> dict[str, Tensor]:
    weights = full_weights(case)
    with importable(Backend):
        _write_ranks(directory, case, weights, tp, pp, vpp, args)
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    return weights


def old_member(self: enum.Enum, protocol: int) -> tuple[Any, ...]:
    """Reduce a member of an enumeration as Python 3.11.0 to 3.11.3 do."""
    return getattr, (type(self), self.name)


@contextlib.contextmanager
def importable(cls: type) -> Iterator[None]:
    """Make `cls` importable, so that it can be pickled under the name of a module that is not installed."""
    parts = cls.__module__.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    modules = {name: types.ModuleType(name) for name in names}
    setattr(modules[names[-1]], cls.__qualname__, cls)
    sys.modules |= modules
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


Args = dict[str, Any]


def _write_ranks(
    directory: Path, case: Case, weights: dict[str, Tensor], tp: int, pp: int, vpp: int, args: Args
) -> None:
    size = L // (pp * vpp)
    for t in range(tp):
        for p in range(pp):
            chunks = []
            for c in range(vpp):
                start = (c * pp + p) * size
                names = stage(case, weights, tp, t, range(start, start + size))
                extra = {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}
                chunks.append(as_old(names) if case.old else OrderedDict(names | extra))
            models = {"model": chunks[0]} if vpp == 1 else {f"model{c}": chunk for c, chunk in enumerate(chunks)}
            rank_args = argparse.Namespace(**{**case.args, "attention_backend": Backend.auto, **args})
            rank_dir = directory / "iter_0000007" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
            rank_dir.mkdir(parents=True)
            torch.save(
                {"args": rank_args, "checkpoint_version": 3.0, **models, **extras()}, rank_dir / "model_optim_rng.pt"
            )


def assert_holds(directory: Path, weights: dict[str, Tensor], vocab: int = ROWS) -> None:
    source = open_checkpoint(directory)
    assert {name.removeprefix("model/") for name in source.manifest.tensors} == weights.keys()
    for name, expected in weights.items():
        actual = source.read(f"model/{name}")
        if name in ("embedding.word", "head"):
            assert torch.equal(actual[:vocab], expected[:vocab]) and not actual[vocab:].any(), name
        else:
            assert torch.equal(actual, expected), name


LAYOUTS = [
    ("gpt", Case(), 1, 1, 1),
    ("gpt tp2 pp2", Case(), 2, 2, 1),
    ("gpt tp2 pp2 vpp2", Case(fused=False), 2, 2, 2),
    ("gpt old names tp2 pp2", Case(old=True, fused=False), 2, 2, 1),
    ("llama groups 2 tp2 pp4", Case(groups=2, llama=True, tied=False), 2, 4, 1),
    ("llama one group pp2 vpp2", Case(groups=1, llama=True, fused=False), 1, 2, 2),
    ("llama old names tp4", Case(llama=True, tied=False, old=True, fused=False), 4, 1, 1),
]


@pytest.mark.parametrize("case,tp,pp,vpp", [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS])
def test_every_megatron_layout_is_read_bit_exactly(
    case: Case, tp: int, pp: int, vpp: int, tmp_path: Path, capsys
) -> None:
    weights = write(tmp_path / "theirs", case, tp, pp, vpp)
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V, "--check") == 0
    out = capsys.readouterr().out
    assert out.count("opening ") == tp * pp and "all bits equal" in out
    assert_holds(tmp_path / "ours", weights, V)
    config = build(parse_config_text(open_checkpoint(tmp_path / "ours").manifest.state["config"], ""))
    assert (config.data.vocab_size, config.model.num_kv_groups, config.model.ffn_size) == (V, case.groups, F)
    assert config.model.activation == ("swiglu" if case.llama else "gelu")
    counts = [
        len(open_torch_checkpoint(tmp_path / "theirs" / name, log=print).tensors) for name in ("", "iter_0000007")
    ]
    assert counts[0] == counts[1]


def test_early_python_3_11_enums_are_inert(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Backend, "__reduce_ex__", old_member)
    weights = write(tmp_path / "theirs", Case(fused=False))
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V) == 0
    assert_holds(tmp_path / "ours", weights, V)
    (path,) = (tmp_path / "theirs").rglob("model_optim_rng.pt")
    torch.save({"args": Calls(getattr, argparse.Namespace(a=1), "a")}, path)  # other classes that the loader allows
    capsys.readouterr()
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "others") == 3
    assert "names getattr, which is not on the list" in capsys.readouterr().err


@pytest.mark.parametrize(
    "case,tp,pp,impl",
    [
        *((Case(), 1, 1, "local"), (Case(), 2, 2, "transformer_engine"), (Case(groups=1, llama=True), 1, 2, "local")),
        (Case(groups=2, llama=True, tied=False), 2, 4, "transformer_engine"),
    ],
)
def test_written_files_equal_megatrons(case: Case, tp: int, pp: int, impl: str, tmp_path, capsys) -> None:
    weights = write(tmp_path / "theirs", case)
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V) == 0
    flags = ["--target-tensor-parallel-size", tp, "--target-pipeline-parallel-size", pp, "--transformer-impl", impl]
    export_dir = tmp_path / "back"
    assert tool("--load", tmp_path / "ours", "--to-megatron", export_dir, "--check", *flags) == 0
    assert "all bits equal" in capsys.readouterr().out
    assert (export_dir / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    padded = math.ceil(V / (128 * tp)) * 128 * tp
    tables = {n: w for n, w in weights.items() if n in ("embedding.word", "head")}
    padded_tables = {n: torch.cat([w[:V], torch.zeros(padded - V, D)]) for n, w in tables.items()}
    expected_case = Case(case.groups, case.llama, case.tied, fused=impl != "local")
    for t in range(tp):
        for p in range(pp):
            rank = f"mp_rank_{t:02d}{f'_{p:03d}' if pp > 1 else ''}"
            file = load_pickle(export_dir / "release" / rank / "model_optim_rng.pt", print)
            expected = stage(expected_case, weights | padded_tables, tp, t, range(p * L // pp, (p + 1) * L // pp))
            assert file["model"].keys() == expected.keys()
            for name in expected:
                assert torch.equal(file["model"][name], expected[name]), name
            assert file["checkpoint_version"] == 3.0
    args = read_args(file["args"], "")
    assert build(args).model == build(read_args(argparse.Namespace(**case.args), "") | {"kv_channels": K}).model
    assert tool("--from-megatron", export_dir, "--save", tmp_path / "again", "--vocab-size", V) == 0
    first, reimported = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "again")
    for name in first.manifest.tensors:
        assert torch.equal(first.read(name), reimported.read(name)), name


class Calls:
    """An object that calls a function when it is unpickled."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def evil(canary: Path) -> Calls:
    return Calls(os.system, f"touch {canary}")


def _edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = next(directory.rglob("model_optim_rng.pt"))
    data = torch.load(path, weights_only=False)
    change(data)
    torch.save(data, path)


def _file(directory: Path) -> Path:
    return next(directory.rglob("model_optim_rng.pt"))


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
HOSTILE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "command in args": (lambda f, c: _edit(f, lambda d: setattr(d["args"], "x", evil(c))), "names posix.system, which is not"),
    "command in model": (lambda f, c: _edit(f, lambda d: d["model"].update({QKV: evil(c)})), "names posix.system"),
    "eval": (lambda f, c: _edit(f, lambda d: d.update(rng_state=Calls(eval, "__import__('os').abort()"))), r"names (\w+\.)?eval,"),
    "plain pickle": (lambda f, c: _file(f).write_bytes(pickle.dumps(evil(c))), "refused|cannot be read"),
    "truncated": (lambda f, c: os.truncate(_file(f), _file(f).stat().st_size // 2), "cannot be read"),
    "list": (lambda f, c: torch.save([1], _file(f)), "holds a list"),
    "no args": (lambda f, c: _edit(f, lambda d: d.pop("args")), "has no args"),
    "no model": (lambda f, c: _edit(f, lambda d: d.pop("model")), "has no model"),
    "old order": (lambda f, c: _edit(f, lambda d: d.update(checkpoint_version=1.0)), "checkpoint_version=1.0 is below 2"),
    "no version": (lambda f, c: _edit(f, lambda d: d.pop("checkpoint_version")), "checkpoint_version=0 is below 2"),
    "missing tensor": (lambda f, c: _edit(f, lambda d: d["model"].pop(QKV)), "layers.1.self_attention.linear_qkv.weight is missing"),
    "stranger": (lambda f, c: _edit(f, lambda d: d["model"].update(x=torch.ones(2))), "not a tensor of this model"),
    "shape": (lambda f, c: _edit(f, lambda d: d["model"].update({QKV: torch.ones(2, 2)})), r"shape \(2, 2\), not"),
    "integers": (lambda f, c: _edit(f, lambda d: d["model"].update({QKV: torch.ones(48, 16).int()})), "not a floating-point"),
    "no tensor": (lambda f, c: _edit(f, lambda d: d["model"].update({QKV: "text"})), "not a floating-point tensor"),
    "more layers": (lambda f, c: _edit(f, lambda d: setattr(d["args"], "num_layers", 5)), "layers.4.input_layernorm.weight is missing"),
    "fewer layers": (lambda f, c: _edit(f, lambda d: setattr(d["args"], "num_layers", 3)), "layernorm.weight in .*: not a tensor of this model"),
    "experts": (lambda f, c: _edit(f, lambda d: setattr(d["args"], "num_experts", 8)), "no name for layers.0.mlp.experts.down_bias"),
    "wrong type": (lambda f, c: _edit(f, lambda d: setattr(d["args"], "hidden_size", "16")), "hidden_size='16' is not an int"),
    "tracker": (lambda f, c: (f / "latest_checkpointed_iteration.txt").write_text("../x"), "is neither a number"),
    "no rank": (lambda f, c: _file(f).parent.rename(f / "iter_0000007" / "x"), "has no directory mp_rank_00"),
    "no file": (lambda f, c: _file(f).unlink(), "has no model_optim_rng.pt"),
}  # fmt: skip


def assert_refused(directory: Path, capsys: pytest.CaptureFixture[str], reason: str) -> None:
    """Assert that the tool refuses `directory` in one line, runs nothing in it and writes no checkpoint."""
    assert tool("--from-megatron", directory, "--save", directory.parent / "ours") == 3
    error = capsys.readouterr().err
    assert error.startswith("convert_checkpoint.py: ") and "Traceback" not in error
    assert re.search(reason, error, re.DOTALL), error
    assert not (directory.parent / "canary").exists() and not list(directory.parent.glob("ours/iter*"))


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_torch_files_are_refused_without_execution(attack: str, tmp_path: Path, capsys) -> None:
    write(tmp_path / "theirs", Case(fused=False), attention_backend=None)
    change, reason = HOSTILE[attack]
    change(tmp_path / "theirs", tmp_path / "canary")
    assert_refused(tmp_path / "theirs", capsys, reason)


def test_replicas_must_agree_and_all_ranks_exist(tmp_path: Path, capsys) -> None:
    case = Case(fused=False)
    norm, word = "decoder.layers.0.input_layernorm.weight", "output_layer.weight"
    copies = (
        ("mp_rank_01_000", norm, rf"differs from {norm} in "),
        ("mp_rank_00_001", word, r"differs from embedding\."),
    )
    for rank, name, reason in copies:
        directory = tmp_path / rank
        write(directory, case, 2, 2, attention_backend=None)
        _edit(directory / "iter_0000007" / rank, lambda d, name=name: d["model"][name].view(-1)[3:4].add_(1))
        with pytest.raises(CheckpointError, match=reason):
            open_torch_checkpoint(directory)
        _file(directory / "iter_0000007" / rank).unlink()
        (directory / "iter_0000007" / rank).rmdir()
        with pytest.raises(CheckpointError, match=rf"tp rank {rank[9]}, pp rank {rank[-1]} of 2 x 2 is missing"):
            open_torch_checkpoint(directory)


def test_activation_and_model_flags() -> None:
    base = Case().args
    for flags, expected in (
        ({}, "gelu"),
        ({"bias_gelu_fusion": False}, "gelu_erf"),
        ({"add_bias_linear": False}, "gelu_erf"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu"),
        ({"squared_relu": True}, "squared_relu"),
    ):
        assert read_args(argparse.Namespace(**{**base, **flags}), "")["activation"] == expected
    with pytest.raises(CheckpointError, match="(?s)window_size=\\(128, 128\\).*glu_linear_offset=1.0"):
        read_args(argparse.Namespace(**base, glu_linear_offset=1.0, window_size=(128, 128)), "")
    model = replace(
        build(read_args(argparse.Namespace(**base), "")).model, activation="mish"
    )  # as if a later release had it
    with pytest.raises(CheckpointError, match="activation=mish is not in Megatron-LM"):
        write_args(model, vocab_size=V, padded_vocab_size=ROWS, tokenizer={}, tp=1, pp=1, dtype="float32")


@pytest.mark.parametrize(
    "option,value",
    [
        *[("sandwich_norm", True), ("embedding_multiplier", 2.5), ("softmax_scale", 0.3), ("rotary_local_base", 50)],
        *[("attn_logit_softcapping", 30), ("final_logit_softcapping", 30)],
    ],
)
def test_export_refuses_options_that_megatron_lacks(option: str, value: Any) -> None:
    model = replace(build(read_args(argparse.Namespace(**Case().args), "")).model, **{option: value})
    with pytest.raises(CheckpointError, match=f"^{option}={value} is not .* Megatron-LM; "):
        write_args(model, vocab_size=V, padded_vocab_size=ROWS, tokenizer={}, tp=1, pp=1, dtype="float32")


ROPE, YARN = {"position_embedding_type": "rope"}, {"position_embedding_type": "yarn"}
MORE = {"yarn_original_max_position_embeddings": 64, "yarn_beta_fast": 8.0, "mscale_all_dim": 1.0}
LESS = {"yarn_correction_range_round_to_int": False, "mscale": 0.5}
MUP = {"use_mup": True, "mup_base_hidden_size": 8, "mup_base_head_dim": 4.0, "mup_attn_scale_power": 0.75}
MUP |= {"mup_embedding_mult": 2.0, "mup_output_mult": 0.5}


@pytest.mark.parametrize(
    "args,options",
    [
        (ROPE | {"rotary_interleaved": True, "rotary_percent": 0.5}, {"rotary_interleaved": True}),
        (ROPE | {"rotary_seq_len_interpolation_factor": 4}, {"rotary_seq_len_interpolation_factor": 4.0}),
        (ROPE | {"rotary_seq_len_interpolation_factor": None}, {"rotary_seq_len_interpolation_factor": 1.0}),
        (ROPE | {"no_rope_freq": 2}, {"rope_layers": (True, False) * 2}),
        (ROPE | {"no_rope_freq": [1, 0, 0, 1]}, {"rope_layers": (False, True, True, False)}),
        (ROPE | {"no_rope_freq": None}, {"rope_layers": (True,) * L}),
        (YARN | {"rotary_scaling_factor": 4.0, "yarn_beta_slow": None}, {"rotary_scaling_factor": 4.0}),
        (YARN | MORE, MORE),
        (YARN | LESS | {"no_rope_freq": 4}, LESS | {"rope_layers": (True,) * 3 + (False,)}),
        ({"embedding_init_method_std": 1.0}, {"embedding_init_method_std": 1.0}),
        (MUP, MUP),
        ({"use_mup": True, "mup_base_hidden_size": None}, {"use_mup": True, "width_mult": 1.0}),
    ],
)
def test_position_options_round_trip(args: dict[str, Any], options: dict[str, Any]) -> None:
    model = build(read_args(argparse.Namespace(**Case().args, **args), "")).model
    assert {name: getattr(model, name) for name in options} == options
    written = write_args(model, vocab_size=V, padded_vocab_size=ROWS, tokenizer={}, tp=1, pp=1, dtype="float32")
    set_args = {name: value for name, value in args.items() if value is not None}
    assert {name: getattr(written, name) for name in set_args} == set_args
    reread = build(read_args(written, "")).model
    assert model_differences(reread, model, "") == []
    assert {name: getattr(reread, name) for name in options} == options


ODD = [{"no_rope_freq": pattern} for pattern in ([1, 0], "x", -2, [2, 0, 0, 0], True)]
ODD += [{"window_size": size} for size in ((7,), 7, "7,0")]
ODD += [{"window_size": (a, 0), "window_attn_skip_freq": skip} for a, skip in ((0, 2), (7, [1]), (7, "x"))]


@pytest.mark.parametrize("layer_args", ODD)
def test_unsupported_layer_patterns_are_refused(layer_args: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no_rope_freq=|window_"):
        read_args(argparse.Namespace(**Case().args, **ROPE, **layer_args), "")


ALL, NONE = (128,) * L, (None,) * L
WINDOWS = [((127, 0), None, ALL), ([127, 0], 2, (128, None) * 2), ((127, 0), [1, 0, 0, 1], (128, None, None, 128))]
WINDOWS += [
    ((127, 0), [1] * L, ALL),
    ((127, 0), [0] * L, NONE),
    ((127, 0), 1, NONE),
    ((-1, 0), 2, NONE),
    (None, 2, NONE),
]


@pytest.mark.parametrize("size,skip,windows", WINDOWS)
def test_window_options_round_trip(size: Any, skip: Any, windows: tuple[int | None, ...]) -> None:
    args = argparse.Namespace(**Case().args, window_size=size, window_attn_skip_freq=skip)
    model = build({**read_args(args, ""), "num_layers": L}).model
    assert model.layer_windows == windows
    written = write_args(model, vocab_size=V, padded_vocab_size=ROWS, tokenizer={}, tp=1, pp=1, dtype="float32")
    assert build({**read_args(written, "")}).model.layer_windows == windows
    if len(set(windows)) == 2:
        assert (tuple(size), skip) == (written.window_size, written.window_attn_skip_freq)
