"""Fill-in-the-middle: documents rearranged so that a model learns to write between two texts (arXiv:2207.14255).

    document   prefix | middle | suffix      cut at two places, drawn uniformly; any of the three may be empty
    PSM        <PRE> prefix <SUF> suffix <MID> middle
    SPM        <PRE> <SUF> suffix <MID> prefix middle            (the paper's second variant)

Finished samples are rearranged ("context level"). Each document of a sample, as separated by end-of-document tokens, is
rearranged with probability `rate`. Then the sample is cut back to its length, by three tokens per rearranged document.
So a middle is never in another sample than its prefix, and index, order and blend do not change. Flags, sentinels and
behavior are the same as in Megatron-LM's GPTFIMDataset, but every draw is a hash of (seed, sample, position) and does
not depend on what else was read.

Cuts are between characters or between tokens. At inference the prefix may end within a word, with a token that the
tokenizer makes of half a word. Cutting between characters and encoding the three texts separately teaches this; cutting
between tokens does not, but needs no tokenizer. A text that does not decode and encode to itself (half a character at
the start of a sample) is always cut between tokens, so that no text is lost or invented.
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

REENCODED = -1  # the source of a token that was not in the sample
Part = Ints  # the position of each token that was in the sample, and ~id of each token that was not
DOCUMENT, FRAGMENT, ORDER, CUT = 0, 1, 2, 3  # purpose of a draw; a cut needs two


@dataclass(frozen=True)
class FimOptions:
    """The fill-in-the-middle options, with sentinels as token ids.

    rate           fraction of documents that are rearranged
    spm_rate       fraction of the rearranged documents that become SPM instead of PSM
    prefix .. eod  token ids; pad fills a sample that became shorter when it was encoded again
    split          a token that separates a document into fragments (files of a repository), each cut separately
    fragment_rate  fraction of fragments that are rearranged, in documents that `rate` chose; needed with `split`
    no_prefix      a text; documents that start with it are not changed
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
        for (name, a), (other_name, b) in combinations([*marks.items(), ("split_sample", self.split)], 2):
            if a == b != self.unknown:
                raise DataError(f"fim_{other_name}_token and fim_{name}_token are both id {a}; they must differ")


def apply_fim(tokens: Ints, key: int, fim: FimOptions, tokenizer: Tokenizer | None = None) -> tuple[Ints, Ints]:
    """Rearrange one sample [n] and cut or pad it to the same length.

    Returns:
        (tokens [n], source [n]); `source` is the position in the sample that each token comes from, or REENCODED for
        tokens that were inserted or encoded again
    """
    out, source = rearrange_documents(tokens, key, fim, tokenizer)
    fill = max(0, len(tokens) - len(out))
    out = np.append(out, np.full(fill, fim.pad))
    source = np.append(source, np.full(fill, REENCODED))
    return out[: len(tokens)], source[: len(tokens)]


def rearrange_documents(
    tokens: Ints, key: int, fim: FimOptions, tokenizer: Tokenizer | None = None
) -> tuple[Ints, Ints]:
    """Return the same as `apply_fim`, but before the sample is cut or padded."""
    tokens = np.asarray(tokens, np.int64)
    sample = _Sample(tokens, key, fim, tokenizer)
    part = np.concatenate(sample.texts(fim.eod, 0, len(tokens), DOCUMENT, fim.rate, sample.document))
    source = np.maximum(part, REENCODED)
    return np.where(part < 0, ~part, tokens[source]), source


class _Sample:
    """One sample that is being rearranged."""

    def __init__(self, tokens: Ints, key: int, fim: FimOptions, tokenizer: Tokenizer | None):
        self.tokens, self.key, self.fim, self.tokenizer = tokens, key, fim, tokenizer

    def texts(
        self, mark: int, start: int, end: int, purpose: int, rate: float, change: Callable[[int, int], list[Part]]
    ) -> list[Part]:
        """Return the texts of [start, end) and the `mark` tokens that separate them.

        Each text is changed with probability `rate`.
        """
        parts: list[Part] = []
        for stop in [*(np.flatnonzero(self.tokens[start:end] == mark) + start).tolist(), end]:
            chosen = int(self._draws(start)[purpose]) < rate * 2**32
            parts += change(start, stop) if chosen else [np.arange(start, stop)]
            parts.append(np.arange(stop, min(stop + 1, end)))
            start = stop + 1
        return parts

    def document(self, start: int, end: int) -> list[Part]:
        """Rearrange one document, fragment by fragment if it contains the `split` token."""
        split, rate = self.fim.split, self.fim.fragment_rate
        if split is None or rate is None or not (self.tokens[start:end] == split).any():
            return self._text(start, end)
        return self.texts(split, start, end, FRAGMENT, rate, self._text)

    def _text(self, start: int, end: int) -> list[Part]:
        """Return the tokens [start, end) as PSM or SPM; unchanged if there are none or they start with no_prefix."""
        if start == end:
            return []
        fim, tokenizer, draws = self.fim, self.tokenizer, self._draws(start)
        text = ""
        if tokenizer and (fim.characters or fim.no_prefix):
            text = tokenizer.decode(self.tokens[start:end].tolist())
        if fim.no_prefix and text.startswith(fim.no_prefix):
            return [np.arange(start, end)]
        cut = _cut_characters(text, draws[CUT:], fim, tokenizer) if tokenizer and fim.characters else None
        if cut is None:
            a, b = sorted((bounded(draws[CUT:], end - start + 1).astype(np.int64) + start).tolist())
            cut = [np.arange(start, a), np.arange(a, b), np.arange(b, end)]
        prefix, middle, suffix = cut
        pre, mid, suf = (~np.array([mark]) for mark in (fim.prefix, fim.middle, fim.suffix))
        spm = int(draws[ORDER]) < fim.spm_rate * 2**32
        if spm:
            return [pre, suf, suffix, mid, prefix, middle]
        return [pre, prefix, suf, suffix, mid, middle]

    def _draws(self, position: int) -> NDArray[np.uint32]:
        """Return five uniform 32-bit integers for the text that starts at `position` of the sample."""
        return mix32(np.arange(8 * position, 8 * position + 5, dtype=np.uint32), self.key)


def _cut_characters(text: str, draws: NDArray[np.uint32], fim: FimOptions, tokenizer: Tokenizer) -> list[Part] | None:
    """Return prefix, middle and suffix, encoded separately; None if their ids together do not decode to the text."""
    if "\ufffd" in text:  # from bytes that are not a character; encoding cannot restore them
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
    """Return the ids of text that follows other text: without the space that SentencePiece adds before a first word."""
    context = tokenizer.encode("\n")
    joined = tokenizer.encode("\n" + text)
    return joined[len(context) :] if joined[: len(context)] == context else tokenizer.encode(text)


class FimDataset(Dataset):
    """`dataset` with its documents rearranged, sample by sample.

    `tokenizer` is needed unless cuts are between tokens.
    """

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
