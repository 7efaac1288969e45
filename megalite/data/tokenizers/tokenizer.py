"""Tokenizers: text <-> ids, vocabulary size, end-of-document id and fingerprint; and those without a file format.

The fingerprint is a sha256 over kind, model files and eod. It is equal exactly when equal text gives equal ids. A
library is imported when a tokenizer of its kind is built. No code of a model directory is ever run. These classes are
the references; tools/preprocess/fast_tokenizer.py computes the same ids faster where it can.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.common.text_file import read_small_bytes
from megalite.data.errors import DataError, wrap_library_errors

EOD_BYTE = 256
MAX_TOKENIZER_BYTES = 1 << 28


class Tokenizer(ABC):
    """The interface of a tokenizer.

    name                    for messages and logs
    fingerprint             64 hex digits, equal for tokenizers that give equal ids
    vocab_size              number of ids
    eod                     the id that ends a document
    is_null                 True for NullTokenizer, whose text is ids
    unk_id                  the id that stands for special tokens that the tokenizer lacks, if there is one
    literal_special_tokens  special tokens that are ordinary text when written out; gigatoken treats them differently
    """

    name: str
    fingerprint: str
    vocab_size: int
    eod: int
    is_null = False
    unk_id: int | None = None
    literal_special_tokens: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. Raises DataError for a text that cannot be encoded."""
        ...

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ids of `encode_batch`, concatenated, and the number of ids of each text.

        The ids [tokens] have some integer dtype, the numbers [texts] int64. No Python object is created for each id
        where the library allows this.
        """
        documents = self.encode_batch(texts)
        lengths = count_ids(documents)
        return np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum())), lengths

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        ...

    @property
    def ends_texts(self) -> bool:
        """True if it appends the end of a document to each text itself, as the template of a tokenizer.json can."""
        return self.encode("")[-1:] == [self.eod] and self.encode("a")[-1:] == [self.eod]

    def token_id(self, token: str) -> int | None:
        """Return the id of a (special) token by its name, or None if there is no such token."""
        return None

    def load_gigatoken(self) -> Any:
        """Return the same model as loaded by the package gigatoken, or None if it cannot load it.

        Raises the package's own errors.
        """
        return None

    def set_identity(self, name: str, kind: str, *contents: bytes) -> None:
        """Set name and fingerprint.

        `kind` and `contents` are everything that the ids of a text depend on, except eod.
        """
        digest = hashlib.sha256()
        for content in (kind.encode(), *contents, str(self.eod).encode()):
            digest.update(hashlib.sha256(content).digest())
        self.name, self.fingerprint = name, digest.hexdigest()


class NullTokenizer(Tokenizer):
    """The tokenizer of text that already is ids: `vocab_size` ids separated by spaces; the last one is eod."""

    is_null = True

    def __init__(self, vocab_size: int):
        self.vocab_size, self.eod = vocab_size, vocab_size - 1
        self.set_identity(f"NullTokenizer({vocab_size})", "null")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        try:
            ids = [int(number) for number in text.split()]
        except ValueError:
            problem = f"{self.name} reads ids, as in '17 4 25', not {text[:40]!r}"
            raise DataError(f"{problem}; give the tokenizer of your text") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            problem = f"{self.name} has ids 0 to {self.vocab_size - 1}, not {min(ids)} to {max(ids)}"
            raise DataError(f"{problem}; raise --vocab-size")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class ByteTokenizer(Tokenizer):
    """The tokenizer whose ids are the bytes of the UTF-8 text, and 256 as eod."""

    def __init__(self) -> None:
        self.vocab_size, self.eod = EOD_BYTE + 1, EOD_BYTE
        self.set_identity("ByteTokenizer", "bytes")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        raw = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raw), np.uint8), count_ids(raw)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without eod; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i != self.eod).decode("utf-8", "replace")


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer of a SentencePiece .model file; eod is its eos piece."""

    def __init__(self, path: Path):
        import sentencepiece

        self.content = content = read_tokenizer_file(path)
        hint = "; it may be a HuggingFaceTokenizer" if content.lstrip().startswith(b"{") else ""
        with wrap_library_errors(f"tokenizer_model={path} is not a SentencePiece model{hint}"):
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            special = [i for i in range(len(self._model)) if self._model.is_control(i) or self._model.is_unknown(i)]
            self.literal_special_tokens = tuple(self._model.id_to_piece(i) for i in special)
        self.vocab_size, self.eod = int(self._model.get_piece_size()), int(self._model.eos_id())
        if self.eod < 0:
            raise DataError(f"tokenizer_model={path} has no end-of-sentence piece; train it with an eos_id")
        self.set_identity(str(path), "sentencepiece", content)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        if not texts or not hasattr(self._model, "encode_as_numpy"):  # since sentencepiece 0.2.2
            return super().encode_concatenated(texts)
        documents = self._model.encode(list(texts), num_threads=1, return_type="numpy")
        return np.concatenate(documents), count_ids(documents)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])

    def token_id(self, token: str) -> int | None:
        piece = int(self._model.piece_to_id(token))
        return piece if self._model.id_to_piece(piece) == token else None

    def bos_eos_unk_pieces(self) -> list[str | None]:
        """Return the pieces of the bos, eos and unk ids; None for one that the model does not have."""
        ids = (int(self._model.bos_id()), self.eod, int(self._model.unk_id()))
        return [self._model.id_to_piece(i) if i >= 0 else None for i in ids]

    def load_gigatoken(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_sentencepiece(self.content)


def read_tokenizer_file(path: Path) -> bytes:
    """Return the contents of a tokenizer file. Raises DataError if it cannot be read."""
    try:
        return read_small_bytes(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the tokenizer's file") from error


def count_ids(items: Sequence[Any]) -> NDArray[np.int64]:
    """Return the length of each item [items]."""
    return np.fromiter(map(len, items), np.int64, len(items))
