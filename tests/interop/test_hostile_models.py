"""Checkpoints whose hashes are right and whose configuration is not: the converter refuses them with one line."""

import json
import shutil
from pathlib import Path

import pytest
from loads import reseal
from make_fixtures import FOLDER

import megalite
from tools import convert_checkpoint

STORED = FOLDER / megalite.__version__ / "fp64" / "iter_0000002"
BAD = {
    "no configuration": ("config = ", None),
    "not TOML": ("num_layers = 1", "num_layers = "),
    "heads that do not divide": ("num_attention_heads = 2", "num_attention_heads = 3"),
    "another model": ("ffn_hidden_size = 12", "ffn_hidden_size = 16"),
}


@pytest.mark.parametrize("target", ["--to-hf", "--to-megatron"])
@pytest.mark.parametrize("name", BAD)
def test_a_configuration_that_cannot_be(name: str, target: str, tmp_path: Path, capsys) -> None:
    folder = shutil.copytree(STORED, tmp_path / "run" / STORED.name)
    data = json.loads((folder / "manifest.json").read_text())
    old, new = BAD[name]
    if new is None:
        del data["state"]["config"]
    else:
        assert old in data["state"]["config"]
        data["state"]["config"] = data["state"]["config"].replace(old, new)
    reseal(folder, data)
    assert convert_checkpoint.main(["--load", str(tmp_path / "run"), target, str(tmp_path / "out")]) == 3
    said = capsys.readouterr().err
    assert "convert_checkpoint.py: " in said, said
    assert not (tmp_path / "out").exists() or not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
