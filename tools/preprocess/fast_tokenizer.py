"""The ids of a tokenizer made by the package gigatoken, many times faster, once it is shown that they are the same.

`accelerate` compares both on NASTY and on the first documents of the input. One difference, and the reference stays in
use, with a warning that quotes the text. While it works, one document in CHECK_EVERY is still compared, and there a
difference ends the run: silently different ids could not be noticed later. What decides is made once, before worker
processes begin, so that the output does not depend on their number.

gigatoken splits text by code of its own for each known pattern and remembers the ids of words; the library tokenizers
runs a regular expression over everything.
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

CHECK_EVERY = 2048


class FastTokenizer(Tokenizer):
    """Name, fingerprint, vocabulary, end of document and decoding are those of `reference`."""

    def __init__(self, reference: Tokenizer, engine: Any):
        self.name, self.fingerprint = reference.name, reference.fingerprint
        self.vocab_size, self.eod = reference.vocab_size, reference.eod
        self.reference, self._engine, self._seen = reference, engine, 0
        # the reference may put special tokens around every text; gigatoken leaves that to its caller
        around, bare = reference.encode(""), engine.encode("a").tolist()
        fits = [k for k in range(len(around) + 1) if reference.encode("a") == around[:k] + bare + around[k:]]
        cut = fits[0] if fits else 0  # if nothing fits, the comparison with the reference tells
        self._prefix, self._suffix = around[:cut], around[cut:]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids, lengths = self.encode_flat(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths[:-1]))] if len(lengths) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        ids, lengths = self._encode(texts)
        first = -self._seen % CHECK_EVERY or (0 if self._seen else CHECK_EVERY)  # the very first were compared already
        ends = np.cumsum(lengths)
        for i in range(first, len(texts), CHECK_EVERY):
            if self.reference.encode(texts[i]) != ids[ends[i] - lengths[i] : ends[i]].tolist():
                other = f"gigatoken makes other ids than {self.name} from the text {_quote(texts[i])}"
                raise DataError(f"{other}: run again without it")
        self._seen += len(texts)
        return ids, lengths

    def _encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """By gigatoken; texts that write out a special token which is ordinary text go to the reference."""
        words = self.reference.literal_special_tokens
        rows = [i for i, text in enumerate(texts) if any(word in text for word in words)] if words else []
        skip = set(rows)
        rest = ["" if i in skip else text for i, text in enumerate(texts)]
        layout = self._engine.encode_batch(rest).layout.to_ListOffsetArray64(True)
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[: offsets[-1]]
        ids, lengths = surround(ids, np.diff(offsets), self._prefix, self._suffix)
        if not rows:
            return ids, lengths
        parts = np.split(ids, np.cumsum(lengths[:-1]))
        for row in rows:
            parts[row] = np.asarray(self.reference.encode(texts[row]), ids.dtype)
            lengths[row] = len(parts[row])
        return np.concatenate(parts), lengths

    def decode(self, ids: Sequence[int]) -> str:
        return self.reference.decode(ids)

    def token_id(self, token: str) -> int | None:
        return self.reference.token_id(token)


def surround(
    ids: NDArray[Any], lengths: NDArray[Any], prefix: Sequence[int], suffix: Sequence[int]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Put `prefix` before and `suffix` after each document of those that lie end to end in `ids`."""
    lengths = lengths.astype(np.int64)
    for part, places in ((prefix, np.cumsum(lengths) - lengths), (suffix, np.cumsum(lengths + len(prefix)))):
        if part:
            ids = np.insert(ids, np.repeat(places, len(part)), np.tile(np.asarray(part, ids.dtype), len(places)))
    return ids, lengths + len(prefix) + len(suffix)


def accelerate(tokenizer: Tokenizer, texts: Sequence[str] = ()) -> Tokenizer:
    """`tokenizer` by gigatoken, if that is installed, can read the model and makes the same ids; else itself.

    Both encode NASTY and `texts`, the first documents of the input; 200 of them are a good number.
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
                other = "gigatoken makes other ids than %s from the text %s; the reference tokenizer is used"
                log.warning(other, tokenizer.name, _quote(text))
                return tokenizer
    except Exception as error:  # whatever it is, the reference can do the work
        log.warning("gigatoken fails on %s (%s); the reference tokenizer is used", tokenizer.name, error)
        return tokenizer
    return fast


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
