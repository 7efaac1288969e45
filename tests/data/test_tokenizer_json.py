"""tokenizer.json made of other kinds of tokenizers: plain transformers gives the same ids, or there is no such file."""

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
    *(ROOT / "LICENSE").read_text().splitlines(True),  # a text that stays: which ties a model has hangs on it
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
texts, found = json.loads(sys.argv[1]), {}
for folder in sys.argv[2:]:
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = [loaded(text, add_special_tokens=True).input_ids for text in texts]
    found[folder] = [ids, loaded.eos_token_id, [loaded.decode(one) for one in ids]]
print(json.dumps(found))
"""


def by_tool(folder: Path, special: list[str]) -> Tokenizer:
    """What tools/train_tokenizer.py makes."""
    train_tokenizer.train_sentencepiece(
        train_tokenizer.split_pieces(["".join(CORPUS)]), str(folder / "mine"), 700, 1, special
    )
    return build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(folder / "mine.model"))


def trained(folder: Path, **options: Any) -> Tokenizer:
    usual = {"vocab_size": 500, "minloglevel": 2, "hard_vocab_limit": False, "normalization_rule_name": "identity"}
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(CORPUS), model_prefix=str(folder / "mine"), **{**usual, **options})
    return build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(folder / "mine.model"))


def gpt2(folder: Path) -> Tokenizer:
    byte_level_bpe(CORPUS, 400).model.save(str(folder))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return build_tokenizer("GPT2BPETokenizer", **files)


MADE: dict[str, Callable[[Path], Tokenizer]] = {
    "tool": lambda f: by_tool(f, []),
    "tool special": lambda f: by_tool(f, ["<fim_prefix>", "<fim_pad>"]),
    "bpe": lambda f: trained(f, model_type="bpe"),
    "bpe bytes": lambda f: trained(f, model_type="bpe", byte_fallback=True, user_defined_symbols=["<sep>", "\n"]),
    "unigram": lambda f: trained(f, model_type="unigram"),
    "unigram bytes": lambda f: trained(f, model_type="unigram", byte_fallback=True),
    "bytes": lambda f: build_tokenizer("ByteTokenizer"),
    "gpt2": gpt2,
}


def test_exported_tokenizer_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    made: dict[str, Tokenizer] = {}
    for name, make in MADE.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        made[str(folder)] = tokenizer = make(folder)
        for file, text in export_tokenizer_json(tokenizer).items():
            (folder / file).write_text(text)
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2" if "gpt2" in name else "llama"}))
    words = [sys.executable, "-c", LOAD, json.dumps(ODD), *made]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for folder, tokenizer in made.items():
        ids, eod, texts = found[folder]
        for text, one, back in zip(ODD, ids, texts, strict=True):
            assert one == tokenizer.encode(text), (folder, text)
            if not folder.endswith(("bpe", "unigram")):  # what is unknown there has no text
                assert back == tokenizer.decode(one), (folder, text)
        assert eod == tokenizer.eod


def test_unexportable_tokenizer_gives_a_reason(tmp_path: Path) -> None:
    """NFKC is done in another way there; only SentencePiece's library does it as it was trained."""
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
