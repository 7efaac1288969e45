"""Tokenize with the package gigatoken, many times faster, after checking that it returns the same ids.

`accelerate` compares both on EDGE_CASE_TEXTS and on the first documents of the input. If one text differs, the
reference tokenizer is used, with a warning that quotes the text. Later, one document in CHECK_INTERVAL is still
compared. A difference there ends the run, because wrong ids in the data would not be noticed. The choice is made once,
before worker processes start, so the output does not depend on their number.

gigatoken is faster because it splits text with code for each known pattern and caches the ids of words, while the
library tokenizers runs a regular expression over everything.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError
from megalite.data.tokenizers.huggingface_tokenizer import EDGE_CASE_TEXTS
from megalite.data.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHECK_INTERVAL = 2048


class FastTokenizer(Tokenizer):
    """A tokenizer that returns the ids of `reference`, computed by gigatoken.

    Name, fingerprint, vocabulary, end of document and decoding are those of `reference`.
    """

    def __init__(self, reference: Tokenizer, engine: Any):
        self.name = reference.name
        self.fingerprint = reference.fingerprint
        self.vocab_size = reference.vocab_size
        self.eod = reference.eod
        self.reference = reference
        self._engine = engine
        self._num_encoded = 0
        # the reference may add special tokens around every text, which gigatoken does not
        special = reference.encode("")
        bare = engine.encode("a").tolist()
        expected = reference.encode("a")
        splits = [k for k in range(len(special) + 1) if expected == special[:k] + bare + special[k:]]
        split = splits[0] if splits else 0  # if no split fits, the comparison in `accelerate` finds a difference
        self._prefix = special[:split]
        self._suffix = special[split:]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        ids, lengths = self.encode_concatenated(texts)
        if not len(lengths):
            return []
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths[:-1]))]

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return (concatenated ids, number of ids of each text). Raises DataError if a checked text differs."""
        ids, lengths = self._encode(texts)
        # check texts number n * CHECK_INTERVAL, but not number 0, which was compared by `accelerate`
        first = CHECK_INTERVAL if self._num_encoded == 0 else -self._num_encoded % CHECK_INTERVAL
        ends = np.cumsum(lengths)
        for i in range(first, len(texts), CHECK_INTERVAL):
            if self.reference.encode(texts[i]) != ids[ends[i] - lengths[i] : ends[i]].tolist():
                problem = f"gigatoken makes other ids than {self.name} from the text {_quote(texts[i])}"
                raise DataError(f"{problem}: run again without it")
        self._num_encoded += len(texts)
        return ids, lengths

    def _encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return (concatenated ids, number of ids of each text).

        Texts that spell out a special token go to the reference if it takes this for ordinary text.
        """
        special_tokens = self.reference.literal_special_tokens
        rows = [i for i, text in enumerate(texts) if any(token in text for token in special_tokens)]
        engine_texts = list(texts)
        for row in rows:
            engine_texts[row] = ""
        layout = self._engine.encode_batch(engine_texts).layout.to_ListOffsetArray64(True)
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[: offsets[-1]]
        ids, lengths = add_prefix_suffix(ids, np.diff(offsets), self._prefix, self._suffix)
        if not rows:
            return ids, lengths
        parts = np.split(ids, np.cumsum(lengths[:-1]))
        for row in rows:
            parts[row] = np.asarray(self.reference.encode(texts[row]), ids.dtype)
            lengths[row] = len(parts[row])
        return np.concatenate(parts), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        return self.reference.decode(ids)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None."""
        return self.reference.token_id(token)


def add_prefix_suffix(
    ids: NDArray[Any], lengths: NDArray[Any], prefix: Sequence[int], suffix: Sequence[int]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Insert `prefix` before and `suffix` after each document, and return (ids, lengths).

    Args:
        ids: the ids of the documents, concatenated.
        lengths: the number of ids of each document.
        prefix: inserted before each document.
        suffix: inserted after each document.
    """
    lengths = lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    ends = np.cumsum(lengths + len(prefix))
    for inserted, positions in ((prefix, starts), (suffix, ends)):
        if inserted:
            values = np.tile(np.asarray(inserted, ids.dtype), len(positions))
            ids = np.insert(ids, np.repeat(positions, len(inserted)), values)
    return ids, lengths + len(prefix) + len(suffix)


def accelerate(tokenizer: Tokenizer, texts: Sequence[str] = ()) -> Tokenizer:
    """Return a FastTokenizer if gigatoken is installed, can read the model and returns the same ids, or `tokenizer`.

    Both are compared on EDGE_CASE_TEXTS and on `texts`, the first documents of the input; 200 of them are enough.
    """
    try:
        engine = tokenizer.load_gigatoken()
    except ImportError:
        log.info("gigatoken is not installed; pip install gigatoken makes tokenizing many times faster")
        return tokenizer
    except Exception as error:  # the package raises several kinds
        log.info("gigatoken cannot read %s (%s); the reference tokenizer is used", tokenizer.name, error)
        return tokenizer
    if engine is None:
        return tokenizer
    try:
        fast = FastTokenizer(tokenizer, engine)
        for text in (*EDGE_CASE_TEXTS, *texts):
            if fast._encode([text])[0].tolist() != tokenizer.encode(text):
                problem = "gigatoken makes other ids than %s from the text %s; the reference tokenizer is used"
                log.warning(problem, tokenizer.name, _quote(text))
                return tokenizer
    except Exception as error:  # the reference can always do the work
        log.warning("gigatoken fails on %s (%s); the reference tokenizer is used", tokenizer.name, error)
        return tokenizer
    return fast


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
