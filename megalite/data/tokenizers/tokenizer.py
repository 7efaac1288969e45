"""Tokenizers: text <-> ids, vocabulary size, end-of-document id, fingerprint; and those that need no file format.

The fingerprint is a sha256 over kind, model files and eod: equal exactly when equal text gives equal ids. The
libraries are imported when a tokenizer of their kind is built; no code of a model directory is ever run.
These are the references; tools/preprocess/fast_tokenizer.py makes the same ids faster where it can.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.text_file import read_small_bytes
from megalite.data.errors import DataError, wrap_library_errors

EOD_BYTE = 256
MAX_TOKENIZER_BYTES = 1 << 28


class Tokenizer(ABC):
    """name: for people; fingerprint: 64 hex digits; eod: the id that ends a document."""

    name: str
    fingerprint: str
    vocab_size: int
    eod: int
    is_null = False
    unk_id: int | None = None  # the id that stands for special tokens that the tokenizer lacks, if there is one
    literal_special_tokens: tuple[
        str, ...
    ] = ()  # special tokens that are ordinary text when written out; gigatoken differs in this

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of `encode_batch` end to end [tokens], in some integer dtype, and how many each text has [texts];
        without a Python object for each id where the library can do so."""
        documents = self.encode_batch(texts)
        lengths = count_ids(documents)
        return np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum())), lengths

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def ends_texts(self) -> bool:
        """Whether it puts the end of a document behind each text itself, as the template of a tokenizer.json can."""
        return self.encode("")[-1:] == [self.eod] and self.encode("a")[-1:] == [self.eod]

    def token_id(self, token: str) -> int | None:
        """The id of a (special) token by its name; None where there is no such token."""
        return None

    def load_gigatoken(self) -> Any:
        """The same model as the package gigatoken reads it, None where it cannot. Raises whatever the package does."""
        return None

    def set_identity(self, name: str, kind: str, *contents: bytes) -> None:
        """Set name and fingerprint. `kind` and `contents`: all that the ids of a text depend on, beside eod."""
        digest = hashlib.sha256()
        for part in (kind.encode(), *contents, str(self.eod).encode()):
            digest.update(hashlib.sha256(part).digest())
        self.name, self.fingerprint = name, digest.hexdigest()


class NullTokenizer(Tokenizer):
    is_null = True

    def __init__(self, vocab_size: int):
        self.vocab_size, self.eod = vocab_size, vocab_size - 1
        self.set_identity(f"NullTokenizer({vocab_size})", "null")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            wrong = f"{self.name} reads ids, as in '17 4 25', not {text[:40]!r}"
            raise DataError(f"{wrong}; give the tokenizer of your text") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = f"{self.name} has ids 0 to {self.vocab_size - 1}, not {min(ids)} to {max(ids)}"
            raise DataError(f"{wrong}; raise --vocab-size")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class ByteTokenizer(Tokenizer):
    def __init__(self) -> None:
        self.vocab_size, self.eod = EOD_BYTE + 1, EOD_BYTE
        self.set_identity("ByteTokenizer", "bytes")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        raw = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raw), np.uint8), count_ids(raw)

    def decode(self, ids: Sequence[int]) -> str:
        """The end of a document has no text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i != self.eod).decode("utf-8", "replace")


class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path: Path):
        import sentencepiece

        self.content = content = read(path)
        other = "; it may be a HuggingFaceTokenizer" if content.lstrip().startswith(b"{") else ""
        with wrap_library_errors(f"tokenizer_model={path} is not a SentencePiece model{other}"):
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

    @property
    def ends_texts(self) -> bool:
        """Whether it puts the end of a document behind each text itself, as the template of a tokenizer.json can."""
        return self.encode("")[-1:] == [self.eod] and self.encode("a")[-1:] == [self.eod]

    def token_id(self, token: str) -> int | None:
        piece = int(self._model.piece_to_id(token))
        return piece if self._model.id_to_piece(piece) == token else None

    def bos_eos_unk_pieces(self) -> list[str | None]:
        ids = (int(self._model.bos_id()), self.eod, int(self._model.unk_id()))
        return [self._model.id_to_piece(i) if i >= 0 else None for i in ids]

    def load_gigatoken(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_sentencepiece(self.content)


def read(path: Path) -> bytes:
    """The whole file; DataError when it cannot be read."""
    try:
        return read_small_bytes(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the tokenizer's file") from error


def count_ids(items: Sequence[Any]) -> NDArray[np.int64]:
    return np.fromiter(map(len, items), np.int64, len(items))
