"""Every kind of tokenizer: ids, end of document, fingerprint, and one clear error for what cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalite.data.indexed import DataError
from megalite.data.tokenizer import Tokenizer, build_tokenizer
from tools.train_tokenizer import train

TEXTS = ["hello world\n\n\tx = 1  # two  spaces\r\n", "ünïcødé 漢字 \u0000 🙂", "", "</s> <|endoftext|> 12345"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model, and a byte-level BPE as tokenizer.json and as vocab.json + merges.txt."""
    out = tmp_path_factory.mktemp("tokenizers")
    lines = [f"hello world {i} and some more text, number {i * i}" for i in range(300)]
    (out / "corpus.txt").write_text("\n".join(lines))
    train([str(out / "corpus.txt")], str(out / "spm"), 340, ["text"], 10**6, None, 1)
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(lines, trainer)
    (out / "hf").mkdir()
    bpe.save(str(out / "hf" / "tokenizer.json"))
    bpe.model.save(str(out))
    return out


def make(directory: Path, kind: str) -> Tokenizer:
    if kind == "NullTokenizer":
        return build_tokenizer(kind, vocab_size=100)
    if kind == "GPT2BPETokenizer":
        return build_tokenizer(kind, vocab_file=str(directory / "vocab.json"), merge_file=str(directory / "merges.txt"))
    return build_tokenizer(kind, str(directory / ("hf" if kind == "HuggingFaceTokenizer" else "spm.model")))


REAL = ["SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer"]


@pytest.mark.parametrize("kind", REAL)
def test_text_comes_back_exactly(directory: Path, kind: str) -> None:
    tokenizer = make(directory, kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert len(tokenizer.encode("hello world")) < 8  # the vocabulary is used
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


def test_gpt2_files_and_tokenizer_json_give_the_same_ids(directory: Path) -> None:
    a, b = make(directory, "GPT2BPETokenizer"), make(directory, "HuggingFaceTokenizer")
    assert a.encode(TEXTS[0]) == b.encode(TEXTS[0])
    assert a.eod == b.eod and a.vocab_size == b.vocab_size == 350


def test_null_tokenizer_is_megatrons() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode("Az~") == [65, 22, 26]
    assert tokenizer.decode([65, 100]) == "65 100"


def test_fingerprint_tells_tokenizers_apart_and_is_stable(directory: Path, tmp_path: Path) -> None:
    prints = {make(directory, kind).fingerprint for kind in REAL} | {make(directory, "NullTokenizer").fingerprint}
    assert len(prints) == 4  # Llama2Tokenizer reads the same model as SentencePieceTokenizer
    copy = tmp_path / "renamed.model"
    copy.write_bytes((directory / "spm.model").read_bytes())
    same = build_tokenizer("GPTSentencePieceTokenizer", str(copy))
    assert same.fingerprint == make(directory, "SentencePieceTokenizer").fingerprint
    assert build_tokenizer("NullTokenizer", vocab_size=7).fingerprint != make(directory, "NullTokenizer").fingerprint


def test_end_of_document_is_what_the_configuration_names(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes((directory / "hf" / "tokenizer.json").read_bytes())
    plain = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    for value in ("!", {"content": "!", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        named = build_tokenizer("HuggingFaceTokenizer", str(file))
        assert named.decode([named.eod]) == "!"
        assert named.fingerprint != plain.fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<missing>"}))
    with pytest.raises(DataError, match="no end-of-document token among <missing>"):
        build_tokenizer("HuggingFaceTokenizer", str(file))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match="tokenizer_config.json: not a JSON object"):
        build_tokenizer("HuggingFaceTokenizer", str(file))


BAD = [
    (("SentencePieceTokenizer",), "needs --tokenizer-model"),
    (("SentencePieceTokenizer", "missing.model"), "missing.model: No such file"),
    (("SentencePieceTokenizer", "garbage"), "is not a SentencePiece model"),
    (("HuggingFaceTokenizer",), "needs --tokenizer-model"),
    (("HuggingFaceTokenizer", "org/name"), "not downloaded|not fetched"),
    (("HuggingFaceTokenizer", "garbage"), "not a tokenizer.json"),
    (("GPT2BPETokenizer",), "needs --vocab-file"),
    (("GPT2BPETokenizer", None, "garbage"), "needs --merge-file"),
    (("GPT2BPETokenizer", None, "garbage", "garbage"), "not a GPT-2 vocabulary"),
    (("NullTokenizer",), "needs --vocab-size"),
    (("NullTokenizer", None, None, None, 0), "vocab_size=0 is not positive"),
    (("TikTokenizer",), "needs --tokenizer-model"),
    (("BertWordPieceCase",), "is not supported; use one of SentencePieceTokenizer"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD)
def test_what_cannot_be_used_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("garbage").write_bytes(b"\x08\x96\x01 not a model \xff")
    with pytest.raises(DataError, match=reason):
        build_tokenizer(*arguments)


def test_libraries_are_imported_only_when_needed() -> None:
    code = (
        "import sys; from megalite.data.tokenizer import build_tokenizer; import megalite.data.batches;"
        "build_tokenizer('NullTokenizer', vocab_size=5); import megalite.data.preprocess;"
        "print([m for m in ('torch', 'sentencepiece', 'tokenizers') if m in sys.modules])"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert got.stdout.strip() == "[]"
