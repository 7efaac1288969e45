"""Byte-pair and other models for the library tokenizers: a Hugging Face tokenizer.json, or GPT-2's two files.

No code of a model directory is run and nothing is fetched: names on a hub are refused.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.data.errors import DataError, library
from megalite.data.tokenizers.tokenizer import Tokenizer, read

GPT2_EOD = "<|endoftext|>"
USUAL_EOD = (GPT2_EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


class HuggingFaceTokenizer(Tokenizer):
    """`model` is a tokenizers.Tokenizer; `contents` the files that define it."""

    def __init__(self, name: str, kind: str, model: Any, eod: int, contents: Sequence[bytes]):
        self._model, self.eod = model, eod
        # ids may have holes above the base vocabulary: the largest id counts, not the number of entries
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
        self._identify(name, kind, *contents)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with library(f"{self.name} cannot encode {texts[0][:40]!r}" if len(texts) == 1 else f"{self.name} fails"):
            return [encoding.ids for encoding in self._model.encode_batch_fast(list(texts))]

    def token_id(self, token: str) -> int | None:
        return self._model.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def library_model(self, end: str) -> Any:
        """A tokenizers.Tokenizer of its own, in which `end` is a special token."""
        from tokenizers import Tokenizer as Library

        model: Any = Library.from_str(self._model.to_str())
        model.add_special_tokens([end])
        return model

    def load_gigatoken(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(self._model.to_str())


def tokenizer_beside(folder: Path) -> dict[str, Any]:
    """The data options (--tokenizer-type and its like) of the tokenizer in a model directory; empty without one."""
    folder = folder.resolve()
    model, vocab, merges = (folder / name for name in ("tokenizer.model", "vocab.json", "merges.txt"))
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    if model.is_file():
        return {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(model)}
    if vocab.is_file() and merges.is_file():
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    return {}


def open_tokenizer_json(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of the directory that holds one; eod is its eos_token, or a usual one."""
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(
            f"tokenizer_model={path} is not a tokenizer.json or a directory with one; names on a hub are not "
            "fetched: download the tokenizer and give its directory"
        )
    content = read(file)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"tokenizer_model={file} is not a tokenizer.json: it is not UTF-8 text; "
            "if it is a SentencePiece model, give --tokenizer-type SentencePieceTokenizer"
        ) from None
    with library(f"tokenizer_model={file} is not a tokenizer.json"):
        model = tokenizers.Tokenizer.from_str(text)
    named = _eos_token(file.parent)
    candidates = (named,) if named else USUAL_EOD
    ids = [i for i in (model.token_to_id(token) for token in candidates) if i is not None]
    if not ids:
        raise DataError(
            f"{file}: no end-of-document token among {', '.join(candidates)}; "
            "name it as eos_token in tokenizer_config.json beside it"
        )
    model.no_padding()
    model.no_truncation()
    return HuggingFaceTokenizer(str(file), "huggingface", model, ids[0], [content])


def _eos_token(directory: Path) -> str | None:
    """eos_token of tokenizer_config.json or special_tokens_map.json, where it is a string or a record of one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if file.exists():
            try:
                value = json.loads(read(file)).get("eos_token")
            except (ValueError, AttributeError, RecursionError) as error:
                raise DataError(f"{file}: not a JSON object: {error}") from error
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
    return None


def open_gpt2(vocab: Path, merges: Path) -> Tokenizer:
    """GPT-2's byte-level BPE from vocab.json and merges.txt; eod is <|endoftext|>, also where a text writes it out, as
    transformers and so Megatron-LM read it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    contents = [read(vocab), read(merges)]
    with library(f"{vocab}, {merges}: not a GPT-2 vocabulary and merges"):
        model = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    eod = model.token_to_id(GPT2_EOD)
    if eod is None:
        raise DataError(f"{vocab}: has no {GPT2_EOD}; add it, or give a tokenizer.json as HuggingFaceTokenizer")
    model.add_special_tokens([GPT2_EOD])
    tokenizer = HuggingFaceTokenizer(str(vocab), "gpt2-bpe special", model, eod, contents)
    tokenizer.unknown = eod  # as in Megatron-LM
    return tokenizer
