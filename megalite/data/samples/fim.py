"""Fill-in-the-middle: documents rearranged so that a model learns to write between two texts (arXiv:2207.14255).

    document   prefix | middle | suffix      cut at two places, drawn uniformly; any of the three may be empty
    PSM        <PRE> prefix <SUF> suffix <MID> middle
    SPM        <PRE> <SUF> suffix <MID> prefix middle            (the paper's second variant)

It is done to finished samples ("context level"): the documents of a sample, as end-of-document tokens part them, are
rearranged one by one, each with probability `rate`, and the sample is cut back to its length, three tokens per
rearranged document. So a middle never lies in another sample than its prefix, and index, order and blend stay as they
are. Flags, sentinels and behaviour are those of Megatron-LM's GPTFIMDataset, but for its stream of random numbers:
here every draw is a hash of (seed, sample, position), so a sample does not depend on which others were read.

Characters or tokens: at inference the prefix may end within a word, and its last token is then one that the tokenizer
makes of half a word. Cutting between characters and encoding the three texts again teaches that; cutting between
tokens does not, but needs no tokenizer. What does not decode and encode to the same text (half a character at the
beginning of a sample) is cut between tokens in either case: no text is lost or invented.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError
from megalite.data.samples.packed_dataset import PackedDataset
from megalite.data.samples.permutation import below, fold, mix32
from megalite.data.samples.source import Dataset
from megalite.data.tokenizers.tokenizer import Tokenizer

WRITTEN = -1  # in a source: a token that the sample did not hold
Part = tuple[NDArray[np.int64], NDArray[np.int64]]  # tokens, and the positions in the sample that they come from
DOCUMENT, FRAGMENT, ORDER, CUT = 0, 1, 2, 3  # what a draw is for; a cut takes two


@dataclass(frozen=True)
class Fim:
    """rate           share of documents that are rearranged; spm_rate: share of these that become SPM, not PSM
    prefix .. eod  token ids; pad fills a sample that got shorter, which only encoding again can do
    split          a token that parts a document into fragments (files of a repository), each cut by itself
    fragment_rate  share of fragments that are rearranged, in documents that `rate` chose; needed with `split`
    no_prefix      a text: what begins with it stays as it is
    characters     cut between characters, not tokens
    unknown        the id of sentinels that the tokenizer has not; these alone may be alike
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None
    fragment_rate: float | None = None
    no_prefix: str | None = None
    characters: bool = True
    unknown: int | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate", "fragment_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise DataError(f"fim_{name}={value} is not a probability; use a number from 0 to 1")
        if (self.split is None) != (self.fragment_rate is None):
            raise DataError("fim_split_sample and fim_fragment_rate go together; give both or neither")
        if self.no_prefix == "":
            raise DataError("fim_no_prefix is empty, and every text begins with nothing; drop --fim-no-prefix")
        marks = {"prefix": self.prefix, "middle": self.middle, "suffix": self.suffix, "eod": self.eod}
        if self.split is not None:
            marks["split_sample"] = self.split
        seen: dict[int, str] = {}
        for name, token in marks.items():
            if token < 0:
                raise DataError(f"fim_{name}_token: id {token} is no token; use a tokenizer that has one")
            if token in seen and token != self.unknown:
                raise DataError(f"fim_{name}_token and fim_{seen[token]}_token are both id {token}; they must differ")
            seen[token] = name


def transform(tokens: NDArray[np.int64], key: int, fim: Fim, codec: Tokenizer | None = None) -> Part:
    """One sample [n] -> (tokens [n], source [n]): rearranged, and cut or filled to the same length.

    source tells the position in the sample that each token comes from, WRITTEN for those that were encoded again.
    """
    out, source = rearrange(tokens, key, fim, codec)
    short = max(0, len(tokens) - len(out))
    pads = np.full(short, fim.pad, np.int64), np.full(short, WRITTEN, np.int64)
    return np.concatenate([out, pads[0]])[: len(tokens)], np.concatenate([source, pads[1]])[: len(tokens)]


def rearrange(tokens: NDArray[np.int64], key: int, fim: Fim, codec: Tokenizer | None = None) -> Part:
    """The same before it is cut: nothing is missing."""
    if codec is None and (fim.characters or fim.no_prefix is not None):
        raise DataError("fim between characters, or with fim_no_prefix, needs the tokenizer that made the data")
    tokens = np.asarray(tokens, np.int64)
    parts: list[Part] = []
    for begin, end, stop in _spans(tokens, fim.eod, 0, len(tokens)):
        parts += _document(tokens, begin, end, key, fim, codec)
        parts.append(_copy(tokens, end, stop))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _spans(tokens: NDArray[np.int64], mark: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, end with the mark after it) of the texts that `mark` separates."""
    for at in (np.flatnonzero(tokens[begin:end] == mark) + begin).tolist():
        yield begin, at, at + 1
        begin = at + 1
    yield begin, end, end


def _document(
    tokens: NDArray[np.int64], begin: int, end: int, key: int, fim: Fim, codec: Tokenizer | None
) -> list[Part]:
    chosen = _chance(_draws(begin, key)[DOCUMENT], fim.rate)
    if not chosen:
        return [_copy(tokens, begin, end)]
    if fim.split is None or fim.fragment_rate is None or not (tokens[begin:end] == fim.split).any():
        return _text(tokens, begin, end, key, fim, codec)
    parts: list[Part] = []
    for a, b, stop in _spans(tokens, fim.split, begin, end):
        chosen = _chance(_draws(a, key)[FRAGMENT], fim.fragment_rate)
        parts += _text(tokens, a, b, key, fim, codec) if chosen else [_copy(tokens, a, b)]
        parts.append(_copy(tokens, b, stop))
    return parts


def _text(tokens: NDArray[np.int64], begin: int, end: int, key: int, fim: Fim, codec: Tokenizer | None) -> list[Part]:
    """The tokens [begin, end) as PSM or SPM; an empty text, and one that begins with no_prefix, as it is."""
    if begin == end:
        return []
    draws = _draws(begin, key)
    spm = _chance(draws[ORDER], fim.spm_rate)
    text = codec.decode(tokens[begin:end].tolist()) if codec and (fim.characters or fim.no_prefix) else ""
    if fim.no_prefix and text.startswith(fim.no_prefix):
        return [_copy(tokens, begin, end)]
    cut = _cut_characters(text, draws[CUT:], fim, codec) if codec and fim.characters else None
    if cut is None:
        a, b = sorted((below(draws[CUT:], end - begin + 1).astype(np.int64) + begin).tolist())
        cut = [_copy(tokens, begin, a), _copy(tokens, a, b), _copy(tokens, b, end)]
    prefix, middle, suffix = cut
    pre, mid, suf = (_written([mark]) for mark in (fim.prefix, fim.middle, fim.suffix))
    return [pre, suf, suffix, mid, prefix, middle] if spm else [pre, prefix, suf, suffix, mid, middle]


def _cut_characters(text: str, draws: NDArray[np.uint32], fim: Fim, codec: Tokenizer) -> list[Part] | None:
    """Prefix, middle and suffix encoded again; None when their ids in a row are not the text again."""
    a, b = sorted(below(draws, len(text) + 1).tolist())
    texts = text[:a], text[a:b], text[b:]
    marks = {fim.prefix, fim.middle, fim.suffix, fim.eod, fim.split}
    if "\ufffd" in text:  # bytes that are no character: encoding cannot bring them back
        return None
    for encode in (codec.encode, lambda part: _encode_within(part, codec)):
        ids = [codec.encode(texts[0])]
        for k in (1, 2):
            ids.append(encode(texts[k]) if any(ids) else codec.encode(texts[k]))
        joined = ids[0] + ids[1] + ids[2]
        if codec.decode(joined) == text and not marks.intersection(joined):
            return [_written(part) for part in ids]
    return None


def _encode_within(text: str, codec: Tokenizer) -> list[int]:
    """The ids of text that follows other text: without the space that SentencePiece puts before a first word."""
    before, both = codec.encode("\n"), codec.encode("\n" + text)
    return both[len(before) :] if both[: len(before)] == before else codec.encode(text)


def _draws(position: int, key: int) -> NDArray[np.uint32]:
    """Five uniform 32-bit integers of the text that begins at `position` of the sample."""
    return mix32(np.arange(8 * position, 8 * position + 5, dtype=np.uint32), key)


def _chance(draw: Any, rate: float) -> bool:
    return int(draw) < rate * 2**32


def _copy(tokens: NDArray[np.int64], begin: int, end: int) -> Part:
    return tokens[begin:end], np.arange(begin, end)


def _written(ids: Sequence[int]) -> Part:
    return np.array(ids, np.int64), np.full(len(ids), WRITTEN, np.int64)


def _is_packed(dataset: Dataset) -> bool:
    return isinstance(dataset, PackedDataset) or any(_is_packed(part) for part in getattr(dataset, "datasets", ()))


class FimDataset(Dataset):
    """`dataset` with its documents rearranged, sample by sample. codec: needed unless tokens alone are cut."""

    def __init__(self, dataset: Dataset, fim: Fim, seed: int, codec: Tokenizer | None = None, name: str = "train"):
        if _is_packed(dataset):  # three tokens more per document would cut the documents that packing kept whole
            raise DataError("fill-in-the-middle and best-fit packing do not go together; leave one of them out")
        if codec is None and (fim.characters or fim.no_prefix is not None):
            raise DataError("fim between characters, or with fim_no_prefix, needs the tokenizer that made the data")
        self.dataset, self.fim, self.codec = dataset, fim, codec
        self.seq_length = dataset.seq_length
        self._key = fold(seed, name)

    def _transform(self, tokens: NDArray[np.int64], i: int) -> Part:
        return transform(tokens, fold(self._key, "fim", i), self.fim, self.codec)

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens [len(index), seq_length + 1]."""
        out = self.dataset.samples(index)
        for row, i in enumerate(np.asarray(index).tolist()):
            out[row] = self._transform(out[row], i)[0]
        return out

    def where(self, i: int, position: int) -> str:
        source = int(self._transform(self.dataset.samples(np.array([i]))[0], i)[1][position])
        if source == WRITTEN:
            return f"fill-in-the-middle of sample {i}, position {position}"
        return self.dataset.where(i, source)

    def describe(self, samples: int) -> str:
        fim = self.fim
        what = f"fill-in-the-middle: rate {fim.rate}, SPM {fim.spm_rate}, cut between "
        return f"{self.dataset.describe(samples)}\n{what}{'characters' if fim.characters else 'tokens'}"
