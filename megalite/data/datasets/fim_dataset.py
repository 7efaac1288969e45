"""Fill-in-the-middle: documents rearranged so that a model learns to write between two texts (arXiv:2207.14255).

    document   prefix | middle | suffix      cut at two places, drawn uniformly; any of the three may be empty
    PSM        <PRE> prefix <SUF> suffix <MID> middle
    SPM        <PRE> <SUF> suffix <MID> prefix middle            (the paper's second variant)

Finished samples are rearranged ("context level"): each document of a sample, as end-of-document tokens separate them,
with probability `rate`; then the sample is cut back to its length, by three tokens per rearranged document. So a middle
is never in another sample than its prefix, and index, order and blend do not change. Flags, sentinels and behaviour are
those of Megatron-LM's GPTFIMDataset, but every draw is a hash of (seed, sample, position), whatever else was read.

Characters or tokens: at inference the prefix may end within a word, with a token that the tokenizer makes of half a
word. Cutting between characters and encoding the three texts again teaches that; cutting between tokens does not, but
needs no tokenizer. A text that does not decode and encode to itself (half a character at the beginning of a sample) is
always cut between tokens: no text is lost or invented.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.permutation import Ints, bounded, fold, mix32
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer

REENCODED = -1  # in a source: a token that the sample did not hold
Part = Ints  # positions in the sample of the tokens that it held, and ~id of those that it did not
DOCUMENT, FRAGMENT, ORDER, CUT = 0, 1, 2, 3  # purpose of a draw; a cut takes two


@dataclass(frozen=True)
class FimOptions:
    """rate           share of documents that are rearranged; spm_rate: share of these that become SPM, not PSM
    prefix .. eod  token ids; pad fills a sample that encoding again made shorter
    split          a token that separates a document into fragments (files of a repository), each cut by itself
    fragment_rate  share of fragments that are rearranged, in documents that `rate` chose; needed with `split`
    no_prefix      a text; documents that begin with it are not changed
    characters     cut between characters, not tokens
    unknown        the id of sentinels that the tokenizer lacks; only these may be equal
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
        marks = {"prefix": self.prefix, "middle": self.middle, "suffix": self.suffix, "eod": self.eod}
        for (one, a), (other, b) in combinations([*marks.items(), ("split_sample", self.split)], 2):
            if a == b != self.unknown:
                raise DataError(f"fim_{other}_token and fim_{one}_token are both id {a}; they must differ")


def apply_fim(tokens: Ints, key: int, fim: FimOptions, tokenizer: Tokenizer | None = None) -> tuple[Ints, Ints]:
    """One sample [n] -> (tokens [n], source [n]): rearranged, and cut or filled to the same length. `source`: the
    position in the sample that each token comes from, WRITTEN for tokens that were encoded again."""
    out, source = rearrange_documents(tokens, key, fim, tokenizer)
    fill = max(0, len(tokens) - len(out))
    out, source = np.append(out, np.full(fill, fim.pad)), np.append(source, np.full(fill, REENCODED))
    return out[: len(tokens)], source[: len(tokens)]


def rearrange_documents(
    tokens: Ints, key: int, fim: FimOptions, tokenizer: Tokenizer | None = None
) -> tuple[Ints, Ints]:
    """As `transform`, before the sample is cut or filled."""
    tokens = np.asarray(tokens, np.int64)
    sample = _Sample(tokens, key, fim, tokenizer)
    part = np.concatenate(sample.texts(fim.eod, 0, len(tokens), DOCUMENT, fim.rate, sample.document))
    source = np.maximum(part, REENCODED)
    return np.where(part < 0, ~part, tokens[source]), source


class _Sample:
    def __init__(self, tokens: Ints, key: int, fim: FimOptions, tokenizer: Tokenizer | None):
        self.tokens, self.key, self.fim, self.tokenizer = tokens, key, fim, tokenizer

    def texts(
        self, mark: int, begin: int, end: int, purpose: int, rate: float, change: Callable[[int, int], list[Part]]
    ) -> list[Part]:
        """The texts of [begin, end) that `mark` separates, each changed with probability `rate`, and the marks."""
        parts: list[Part] = []
        for stop in [*(np.flatnonzero(self.tokens[begin:end] == mark) + begin).tolist(), end]:
            chosen = int(self._draws(begin)[purpose]) < rate * 2**32
            parts += change(begin, stop) if chosen else [np.arange(begin, stop)]
            parts.append(np.arange(stop, min(stop + 1, end)))
            begin = stop + 1
        return parts

    def document(self, begin: int, end: int) -> list[Part]:
        split, rate = self.fim.split, self.fim.fragment_rate
        if split is None or rate is None or not (self.tokens[begin:end] == split).any():
            return self._text(begin, end)
        return self.texts(split, begin, end, FRAGMENT, rate, self._text)

    def _text(self, begin: int, end: int) -> list[Part]:
        """The tokens [begin, end) as PSM or SPM; unchanged if there are none or they begin with no_prefix."""
        if begin == end:
            return []
        fim, tokenizer, draws = self.fim, self.tokenizer, self._draws(begin)
        text = (
            tokenizer.decode(self.tokens[begin:end].tolist()) if tokenizer and (fim.characters or fim.no_prefix) else ""
        )
        if fim.no_prefix and text.startswith(fim.no_prefix):
            return [np.arange(begin, end)]
        cut = _cut_characters(text, draws[CUT:], fim, tokenizer) if tokenizer and fim.characters else None
        if cut is None:
            a, b = sorted((bounded(draws[CUT:], end - begin + 1).astype(np.int64) + begin).tolist())
            cut = [np.arange(begin, a), np.arange(a, b), np.arange(b, end)]
        prefix, middle, suffix = cut
        pre, mid, suf = (~np.array([mark]) for mark in (fim.prefix, fim.middle, fim.suffix))
        spm = int(draws[ORDER]) < fim.spm_rate * 2**32
        return [pre, suf, suffix, mid, prefix, middle] if spm else [pre, prefix, suf, suffix, mid, middle]

    def _draws(self, position: int) -> NDArray[np.uint32]:
        """Five uniform 32-bit integers for the text that begins at `position` of the sample."""
        return mix32(np.arange(8 * position, 8 * position + 5, dtype=np.uint32), self.key)


def _cut_characters(text: str, draws: NDArray[np.uint32], fim: FimOptions, tokenizer: Tokenizer) -> list[Part] | None:
    """Prefix, middle and suffix encoded again; None when their ids together do not decode to the text."""
    if "\ufffd" in text:  # bytes that are not a character: encoding cannot bring them back
        return None
    a, b = sorted(bounded(draws, len(text) + 1).tolist())
    marks = {fim.prefix, fim.middle, fim.suffix, fim.eod, fim.split}
    for encode in (tokenizer.encode, lambda part: _encode_within(part, tokenizer)):
        ids = [tokenizer.encode(text[:a])]
        for part in (text[a:b], text[b:]):
            ids.append(encode(part) if any(ids) else tokenizer.encode(part))
        joined = ids[0] + ids[1] + ids[2]
        if tokenizer.decode(joined) == text and not marks.intersection(joined):
            return [~np.array(part, np.int64) for part in ids]
    return None


def _encode_within(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of text that follows other text: without the space that SentencePiece puts before a first word."""
    before, both = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text)


class FimDataset(Dataset):
    """`dataset` with its documents rearranged, sample by sample. `codec`: needed unless cuts are between tokens."""

    def __init__(self, dataset: Dataset, fim: FimOptions, seed: int, tokenizer: Tokenizer | None = None):
        self.dataset, self.fim, self.tokenizer = dataset, fim, tokenizer
        self.seq_length = dataset.seq_length
        self._key = fold(seed, "train")

    def _transform(self, tokens: Ints, i: int) -> tuple[Ints, Ints]:
        return apply_fim(tokens, fold(self._key, "fim", i), self.fim, self.tokenizer)

    def samples(self, index: Ints) -> Ints:
        out = self.dataset.samples(index)
        for row, i in enumerate(np.asarray(index).tolist()):
            out[row] = self._transform(out[row], i)[0]
        return out

    def locate(self, i: int, position: int) -> str:
        source = int(self._transform(self.dataset.samples(np.array([i]))[0], i)[1][position])
        if source == REENCODED:
            return f"fill-in-the-middle of sample {i}, position {position}"
        return self.dataset.locate(i, source)

    def describe(self, samples: int) -> str:
        fim, unit = self.fim, "characters" if self.fim.characters else "tokens"
        line = f"fill-in-the-middle: rate {fim.rate}, SPM {fim.spm_rate}, cut between {unit}"
        return f"{self.dataset.describe(samples)}\n{line}"
