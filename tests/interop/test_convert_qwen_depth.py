"""The depth of multi-token prediction in files of Qwen3-Next, which transformers does not read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import SEQ_LENGTH, SHAPE, copy_model, create_model, in_fp64, load_in_fp64
from safetensors.torch import load_file, save_file
from test_convert_hugging_face import assert_same_bits, read_tensors, tokens_BS
from test_convert_latent import rms_norm, stage_in_fp64
from test_convert_megatron import tool
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.config.options import ModelConfig
from megalite.interop.huggingface.config_json import incompatibilities
from megalite.interop.huggingface.model_files import open_model
from megalite.interop.name_mapping import FAMILIES
from megalite.nn.micro_batch import Batch, ForwardContext

NUM_LAYERS = 4
KEY = "num_nextn_predict_layers"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model with a depth as it is published, and a model of all its layers."""
    directory = tmp_path_factory.mktemp("depth")
    deep_dir, model_dir = directory / "deep", directory / "model"
    kinds = ["linear_attention"] * (NUM_LAYERS - 1) + ["full_attention"] * 2
    create_model("qwen3_next", deep_dir, num_hidden_layers=NUM_LAYERS + 1, layer_types=kinds)
    last, generator = f"model.layers.{NUM_LAYERS}.", torch.Generator().manual_seed(7)
    tensors = {
        name.replace(last, "mtp.layers.0."): values
        for name, values in load_file(deep_dir / "model.safetensors").items()
    }
    D = SHAPE["hidden_size"]
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = 0.3 * torch.randn(D, generator=generator)
    tensors["mtp.fc.weight"] = 0.3 * torch.randn(D, 2 * D, generator=generator)
    model_dir.mkdir()
    save_file(tensors, model_dir / "model.safetensors")
    config = json.loads((deep_dir / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "layer_types": kinds[:NUM_LAYERS]}
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir, deep_dir


@torch.no_grad()
def expected_depth(model_dir: Path, deep_dir: Path) -> Tensor:
    """Return the hidden states [B, S, D] of the depth, with the layers of transformers."""
    deep = load_in_fp64(deep_dir)
    tensors = {name: values.double() for name, values in load_file(model_dir / "model.safetensors").items()}
    ids, eps = tokens_BS(), deep.config.rms_norm_eps
    S = ids.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, 1 + tensors[f"mtp.{name}.weight"], eps)

    with in_fp64():
        before_last = deep.model(ids, output_hidden_states=True).hidden_states[NUM_LAYERS]
        h = deep.model.norm(before_last)
        embedding = deep.model.embed_tokens(ids.roll(-1, 1))
        x = torch.cat((norm(embedding, "pre_fc_norm_embedding"), norm(h, "pre_fc_norm_hidden")), -1)
        x = x @ tensors["mtp.fc.weight"].T
        positions = torch.arange(S)[None]
        mask = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        rope = deep.model.rotary_emb(x, positions)
        x = deep.model.layers[NUM_LAYERS](x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        return norm(x, "norm")


def test_depth_equals_transformers_layer_and_export_is_bit_exact(
    directories: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    model_dir, deep_dir = directories
    assert open_model(model_dir).model.num_mtp_depths == 1
    stage, ids_SB = stage_in_fp64(model_dir), tokens_BS().T
    shifted = ids_SB.roll(-1, 0)[None]
    positions = torch.arange(SEQ_LENGTH)[:, None].expand_as(ids_SB)[None]
    batch = Batch(
        ids_SB, ids_SB, None, torch.zeros(2, dtype=torch.int64), mtp_tokens_JSB=shifted, mtp_labels_JSB=shifted,
        mtp_positions_JSB=positions, mtp_mask_JSB=torch.ones(shifted.shape),
    )  # fmt: skip
    assert stage.final_norm is not None
    with torch.no_grad():
        h_SBD = stage.final_norm(stage.forward_hidden(None, batch, ForwardContext()))
        (actual,) = stage._forward_mtp(h_SBD, batch, ForwardContext())
    torch.testing.assert_close(actual.transpose(0, 1), expected_depth(model_dir, deep_dir), rtol=0, atol=1e-10)
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours", "--check") == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--like", model_dir, "--check") == 0
    assert capsys.readouterr().out.count("all bits equal") == 2
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(model_dir))
    assert json.loads((tmp_path / "back" / "config.json").read_text())[KEY] == 1


@pytest.mark.parametrize("change,num_depths", [({}, 1), ({KEY: 1}, 1), ({KEY: 0}, 0), ({KEY: None}, 0)])
def test_configuration_may_leave_out_the_depth(
    directories: tuple[Path, Path], change: dict[str, Any], num_depths: int, tmp_path: Path
) -> None:
    model_dir = copy_model(directories[0], tmp_path / "hf")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | change))
    source = open_model(model_dir)
    assert source.model.num_mtp_depths == num_depths and not source.num_missing_depths
    names = {tensor.mapping.external_name for tensor in source.tensors}
    assert any(name.startswith("mtp.") for name in names) == bool(num_depths)


def test_two_depths_are_refused(directories: tuple[Path, Path], tmp_path: Path) -> None:
    model_dir = copy_model(directories[0], tmp_path / "hf")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {KEY: 2}))
    with pytest.raises(CheckpointError, match=f"{KEY}=2 is not 0 or 1"):
        open_model(model_dir)


@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"])
def test_incomplete_depth_is_refused(directories: tuple[Path, Path], name: str, tmp_path: Path) -> None:
    model_dir = copy_model(directories[0], tmp_path / "hf")
    tensors = load_file(model_dir / "model.safetensors")
    del tensors[name]
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        open_model(model_dir)


def test_files_without_depth_have_none(directories: tuple[Path, Path]) -> None:
    source = open_model(directories[1])
    assert source.model.num_mtp_depths == 0 and not source.num_missing_depths


def test_families_refuse_depths_that_they_cannot_express(directories: tuple[Path, Path]) -> None:
    model = open_model(directories[0]).model

    def reasons(model: ModelConfig, family: str) -> str:
        return "; ".join(incompatibilities(model, FAMILIES.get(family)))

    assert reasons(model, "qwen3_next") == ""
    rule = "qwen3_5_moe_text has no depths of multi-token prediction, the model has 1"
    assert rule in reasons(model, "qwen3_5_moe_text")
    assert "mtp_num_layers=2" in reasons(replace(model, mtp_num_layers=2), "qwen3_next")
    recurrent = replace(model, linear_attention_freq="[1,0,1,1]")
    assert "no attention" in reasons(recurrent, "qwen3_next")
