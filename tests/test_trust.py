"""What SECURITY.md says of code that lies beside what is read."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.data.tokenizers.tokenizer_types import build_tokenizer
from megalite.interop.hugging_face.model_files import open_model


def test_code_beside_a_tokenizer_or_a_model_is_not_run(tmp_path: Path) -> None:
    """Where transformers runs it, if it is told to trust it."""
    canary = tmp_path / "ran"
    Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    names = {
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    }
    for name in ("tokenizer_config.json", "config.json"):
        shape = {"model_type": "evil", "auto_map": names, "tokenizer_class": "Evil", "eos_token": "<|endoftext|>"}
        (tmp_path / name).write_text(json.dumps(shape))
    for name in ("evil.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).encode("a") == [1]
    with pytest.raises(CheckpointError, match="model_type='evil' is not one of"):
        open_model(tmp_path)
    assert not canary.exists()
