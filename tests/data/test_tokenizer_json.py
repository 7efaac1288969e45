"""The tokenizer.json exported from other kinds of tokenizers: transformers gives the same ids, or none is written."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from token_files import byte_level_bpe

from megalite.config.options import build
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.huggingface_tokenizer import export_tokenizer_json
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.training.job.export_hf import tokenizer_files
from tools import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CORPUS = [
    *(ROOT / "LICENSE").read_text().splitlines(True),  # a text that does not change: the ties of a model depend on it
    "漢字かなカナ 한국어\n",
    "naïve café Ünïcødé\n",
    "עברית العربية\n",
] * 2
ODD = (
    "",
    " ",
    "  leading and trailing  ",
    "many    spaces\t\ttabs\n\n\nlines\r\n",
    "control \x00\x01\x07\x1b\x7f\x85 characters",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 and 𝔘𝔫𝔦",
    "漢字かなカナ한국어ภาษาไทย हिन्दी",
    "עברית \u202eالعربية\u202c",
    "e\u0301 \u00e9 \ufb01 \u212b \uff21 \u1e9b\u0323 \u200b\ufeff\u00ad",
    "\u2581literal\u2581 <0x41> \ue000\U0010ffff",
    "1234567890 0x1F 3.14",
    "x" * 500 + " " * 40 + "y",
)
LOAD = """
import sys, json
for name in ("sentencepiece", "tiktoken", "google.protobuf"):
    sys.modules[name] = None  # an import of it fails
from transformers import AutoTokenizer
texts, results = json.loads(sys.argv[1]), {}
for directory in sys.argv[2:]:
    loaded = AutoTokenizer.from_pretrained(directory)
    ids = [loaded(text, add_special_tokens=True).input_ids for text in texts]
    results[directory] = [ids, loaded.eos_token_id, [loaded.decode(text_ids) for text_ids in ids]]
print(json.dumps(results))
"""


def trained_by_tool(directory: Path, special: list[str]) -> Tokenizer:
    """Train a tokenizer with tools/train_tokenizer.py."""
    train_tokenizer.train_sentencepiece(
        train_tokenizer.split_pieces(["".join(CORPUS)]), str(directory / "mine"), 700, 1, special
    )
    return build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(directory / "mine.model"))


def trained(directory: Path, **options: Any) -> Tokenizer:
    defaults = {"vocab_size": 500, "minloglevel": 2, "hard_vocab_limit": False, "normalization_rule_name": "identity"}
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(CORPUS), model_prefix=str(directory / "mine"), **{**defaults, **options})
    return build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(directory / "mine.model"))


def gpt2(directory: Path) -> Tokenizer:
    byte_level_bpe(CORPUS, 400).model.save(str(directory))
    files = {"vocab_file": str(directory / "vocab.json"), "merge_file": str(directory / "merges.txt")}
    return build_tokenizer("GPT2BPETokenizer", **files)


TOKENIZERS: dict[str, Callable[[Path], Tokenizer]] = {
    "tool": lambda f: trained_by_tool(f, []),
    "tool special": lambda f: trained_by_tool(f, ["<fim_prefix>", "<fim_pad>"]),
    "bpe": lambda f: trained(f, model_type="bpe"),
    "bpe bytes": lambda f: trained(f, model_type="bpe", byte_fallback=True, user_defined_symbols=["<sep>", "\n"]),
    "unigram": lambda f: trained(f, model_type="unigram"),
    "unigram bytes": lambda f: trained(f, model_type="unigram", byte_fallback=True),
    "bytes": lambda f: build_tokenizer("ByteTokenizer"),
    "gpt2": gpt2,
}


def test_exported_tokenizer_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    tokenizers: dict[str, Tokenizer] = {}
    for name, make in TOKENIZERS.items():
        directory = tmp_path / name.replace(" ", "_")
        directory.mkdir()
        tokenizer = make(directory)
        tokenizers[str(directory)] = tokenizer
        for file, text in export_tokenizer_json(tokenizer).items():
            (directory / file).write_text(text)
        (directory / "config.json").write_text(json.dumps({"model_type": "gpt2" if "gpt2" in name else "llama"}))
    argv = [sys.executable, "-c", LOAD, json.dumps(ODD), *tokenizers]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    for directory, tokenizer in tokenizers.items():
        ids, eod, texts = results[directory]
        for text, text_ids, decoded in zip(ODD, ids, texts, strict=True):
            assert text_ids == tokenizer.encode(text), (directory, text)
            if not directory.endswith(("bpe", "unigram")):  # these decode unknown tokens differently
                assert decoded == tokenizer.decode(text_ids), (directory, text)
        assert eod == tokenizer.eod


def test_unexportable_tokenizer_gives_a_reason(tmp_path: Path) -> None:
    """The tokenizers library applies NFKC differently; only SentencePiece's library does it as in training."""
    trained(tmp_path, model_type="bpe", normalization_rule_name="nmt_nfkc")
    path = str(tmp_path / "mine.model")
    with pytest.raises(DataError, match="tokenizer.json would give other ids, for example for"):
        export_tokenizer_json(build_tokenizer("SentencePieceTokenizer", tokenizer_model=path))
    options = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": path}
    files, note = tokenizer_files(build(options).data, 2)
    assert list(files) == ["tokenizer.model"] and note is not None
    assert "no tokenizer.json is written" in note and "pip install sentencepiece protobuf" in note
    trained(tmp_path, model_type="char")
    with pytest.raises(DataError, match="a kind of SentencePiece model that tokenizer.json cannot express"):
        export_tokenizer_json(build_tokenizer("SentencePieceTokenizer", tokenizer_model=path))
    with pytest.raises(DataError, match="there is no tokenizer.json for a NullTokenizer"):
        export_tokenizer_json(build_tokenizer("NullTokenizer", vocab_size=5))
