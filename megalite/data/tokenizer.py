"""Tokenizers under Megatron's names: text <-> ids, vocabulary size, end-of-document id, fingerprint.

    SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer   a SentencePiece .model; eod is its eos
    HuggingFaceTokenizer   a tokenizer.json, or a directory with one; its own rules for special tokens are kept
    GPT2BPETokenizer       vocab.json + merges.txt; eod is <|endoftext|>
    NullTokenizer          --vocab-size ids, and one more as eod (as in Megatron-LM); for data that is ids already

The fingerprint is a sha256 over kind, model files and eod: equal exactly when equal text gives equal ids. The
libraries are imported when a tokenizer of their kind is built; no code of a model directory is ever run.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.data.indexed import DataError

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TYPES = (*SENTENCEPIECE, "HuggingFaceTokenizer", "GPT2BPETokenizer", "NullTokenizer")
USUAL_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


class Tokenizer(ABC):
    """name: for people; fingerprint: 64 hex digits; eod: the id that ends a document."""

    name: str
    fingerprint: str
    vocab_size: int
    eod: int
    is_null = False

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    def _identify(self, name: str, kind: str, *contents: bytes) -> None:
        digest = hashlib.sha256()
        for part in (kind.encode(), *contents, str(self.eod).encode()):
            digest.update(hashlib.sha256(part).digest())
        self.name, self.fingerprint = name, digest.hexdigest()


class NullTokenizer(Tokenizer):
    is_null = True

    def __init__(self, vocab_size: int):
        self.vocab_size, self.eod = vocab_size + 1, vocab_size
        self._identify(f"NullTokenizer({vocab_size})", "null")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) % self.eod for character in text] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path: Path):
        import sentencepiece

        content = _read(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            raise DataError(f"tokenizer_model={path} is not a SentencePiece model: {error}") from error
        self.vocab_size, self.eod = int(self._model.get_piece_size()), int(self._model.eos_id())
        if self.eod < 0:
            raise DataError(f"tokenizer_model={path} has no end-of-sentence piece; train it with an eos_id")
        self._identify(path.name, "sentencepiece", content)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer(Tokenizer):
    """`model` is a tokenizers.Tokenizer; `contents` the files that define it."""

    def __init__(self, name: str, kind: str, model: Any, eod: int, contents: Sequence[bytes]):
        self._model, self.eod = model, eod
        # ids may have holes above the base vocabulary: the largest id counts, not the number of entries
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
        self._identify(name, kind, *contents)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """The tokenizer that the flags of the same names describe; DataError says which one is missing or wrong."""

    def need(name: str, value: Any) -> Any:
        if value is None:
            raise DataError(f"tokenizer_type={tokenizer_type} needs --{name.replace('_', '-')}")
        return value

    if tokenizer_type == "NullTokenizer":
        if need("vocab_size", vocab_size) < 1:
            raise DataError(f"vocab_size={vocab_size} is not positive")
        return NullTokenizer(int(vocab_size or 0))
    if tokenizer_type in SENTENCEPIECE:
        return SentencePieceTokenizer(Path(need("tokenizer_model", tokenizer_model)))
    if tokenizer_type == "HuggingFaceTokenizer":
        return _hugging_face(Path(need("tokenizer_model", tokenizer_model)))
    if tokenizer_type == "GPT2BPETokenizer":
        return _gpt2(Path(need("vocab_file", vocab_file)), Path(need("merge_file", merge_file)))
    raise DataError(f"tokenizer_type={tokenizer_type} is not supported; use one of {', '.join(TYPES)}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the tokenizer's file") from error


def _hugging_face(path: Path) -> Tokenizer:
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(
            f"tokenizer_model={path} is not a tokenizer.json or a directory with one; names on a hub are not "
            "fetched: download the tokenizer and give its directory"
        )
    content = _read(file)
    try:
        model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file}: not a tokenizer.json: {error}") from error
    named = _eos_token(file.parent)
    candidates = (named,) if named else USUAL_EOD
    found = [i for i in (model.token_to_id(token) for token in candidates) if i is not None]
    if not found:
        raise DataError(
            f"{file}: no end-of-document token among {', '.join(candidates)}; "
            "name it as eos_token in tokenizer_config.json beside it"
        )
    model.no_padding()
    model.no_truncation()
    return HuggingFaceTokenizer(f"{file.parent.name}/{file.name}", "huggingface", model, found[0], [content])


def _eos_token(directory: Path) -> str | None:
    """eos_token of tokenizer_config.json or special_tokens_map.json; there it is a string, or a record of one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if file.exists():
            try:
                value = json.loads(_read(file)).get("eos_token")
            except (ValueError, AttributeError, RecursionError) as error:
                raise DataError(f"{file}: not a JSON object: {error}") from error
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
    return None


def _gpt2(vocab: Path, merges: Path) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    contents = [_read(vocab), _read(merges)]
    try:
        model = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{vocab}, {merges}: not a GPT-2 vocabulary and merges: {error}") from error
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    eod = model.token_to_id("<|endoftext|>")
    if eod is None:
        raise DataError(f"{vocab}: has no <|endoftext|>")
    return HuggingFaceTokenizer(vocab.name, "gpt2-bpe", model, eod, contents)
