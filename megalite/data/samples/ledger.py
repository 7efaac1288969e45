"""The token ledger: what a run has taken of each source, kept in every checkpoint, and how a run continues from it.

    era         a stretch of the run with one blend: from sample `begin` on, one sequence length, sources and weights
    source      named for people, known by its digest (of its documents): moved files are the same source

A run that is resumed with the blend it had continues in the same era, bit for bit. With other weights, other sources or
another sequence length a new era begins at the present sample: each source continues with what is left of its epoch
(token_line.py), a new one starts at its beginning. The order of data within an era is a pure function of the ledger.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError
from megalite.data.samples.blend import Blend
from megalite.data.samples.blend_order import BlendOrder
from megalite.data.samples.source import Source

VERSION = 1


@dataclass(frozen=True)
class Share:
    """One source of an era. `weight` as BlendOrder takes it."""

    name: str
    digest: str
    weight: float


@dataclass(frozen=True)
class Era:
    """`begin`: the first sample of the run in it. `packed`: samples are packed documents."""

    begin: int
    seq_length: int
    packed: bool
    sources: tuple[Share, ...]

    def taken(self, samples: int) -> list[int]:
        """How many of its first `samples` samples each source gives."""
        return BlendOrder([share.weight for share in self.sources]).counts(samples)


@dataclass
class Total:
    """What was taken of a source up to sample `until` of the run. `documents`: those that began in it."""

    name: str
    tokens: int
    documents: int
    epochs: float


class Ledger:
    """The training data of a run: a dataset like any other, that knows what was taken of it."""

    def __init__(self, blend: Blend, seed: int):
        self.blend, self.seq_length, self.seed = blend, blend.seq_length, seed
        shares = [
            Share(source.name, source.digest, float(weight))
            for source, weight in zip(blend.datasets, blend.weights, strict=True)
        ]
        self.eras = [Era(0, blend.seq_length, blend.datasets[0].packed, tuple(shares))]
        self._past: dict[str, Total] = {}  # totals at the beginning of what `_counted` counts
        self._counted: dict[str, tuple[int, int, int]] = {}  # digest -> samples of this era; tokens, documents in them

    @property
    def datasets(self) -> list[Source]:
        return self.blend.datasets

    # ---- as a dataset

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.blend.samples(np.asarray(index) - self.eras[-1].begin)

    def layout(self, index: NDArray[np.int64]) -> list[NDArray[np.int32]] | None:
        return self.blend.layout(np.asarray(index) - self.eras[-1].begin)

    def where(self, i: int, position: int) -> str:
        return self.blend.where(i - self.eras[-1].begin, position)

    def describe(self, samples: int) -> str:
        return self.blend.describe(samples)

    # ---- as a ledger

    def totals(self, consumed: int) -> dict[str, Total]:
        """Per source, by digest, after `consumed` samples of the run."""
        era = self.eras[-1]
        result = {digest: Total(**asdict(total)) for digest, total in self._past.items()}
        for share, source, taken in zip(era.sources, self.blend.datasets, era.taken(consumed - era.begin), strict=True):
            counted, tokens, documents = self._counted.get(share.digest, (0, 0, 0))
            if counted > taken:  # an earlier point than the last one asked for
                counted, tokens, documents = 0, 0, 0
            more = source.count(range(counted, taken))
            tokens, documents = tokens + more[0], documents + more[1]
            self._counted[share.digest] = (taken, tokens, documents)
            total = result.setdefault(share.digest, Total(share.name, 0, 0, 0.0))
            total.name = share.name
            total.tokens += tokens
            total.documents += documents
            total.epochs = total.tokens / source.num_tokens
        return result

    def to_json(self, consumed: int) -> dict[str, Any]:
        """For the checkpoint after `consumed` samples."""

        def rows(totals: Mapping[str, Total]) -> list[dict[str, Any]]:
            return [{"digest": digest, **asdict(total)} for digest, total in totals.items()]

        return {
            "version": VERSION,
            "seed": self.seed,
            "consumed": consumed,
            "eras": [asdict(era) for era in self.eras],
            "past": rows(self._past),
            "sources": rows(self.totals(consumed)),
        }

    def go_on(self, saved: Mapping[str, Any]) -> list[str]:
        """Go on from a checkpoint's ledger; returns what is worth telling. The blend stays this run's."""
        eras, past_totals, totals, consumed = read(saved)
        if saved.get("seed") != self.seed:
            raise DataError(
                f"seed={self.seed}, but the data so far came in the order of seed {saved.get('seed')}; give that one"
            )
        mine, last = self.eras[-1], eras[-1]
        if mine.packed != last.packed:
            raise DataError("document_packing was changed since the checkpoint; set it as it was then")
        digests = [share.digest for share in mine.sources]
        same = mine.seq_length == last.seq_length and [(s.digest, s.weight) for s in mine.sources] == [
            (s.digest, s.weight) for s in last.sources
        ]
        notes = []
        past = eras[:-1] if same else eras
        if same:
            self.eras = [*past, replace(mine, begin=last.begin)]
        else:
            self.eras = [*eras, replace(mine, begin=consumed)]
            notes.append(f"the blend changed: from sample {consumed} on each source continues with what is left of it")
            for share in mine.sources:
                if share.digest not in totals:
                    notes.append(f"{share.name} is new, or its documents changed: it starts at its beginning")
            for digest, total in totals.items():
                if digest not in digests:
                    notes.append(f"{total.name} is no longer used, after {total.epochs:.2f} epochs")
        ends = [era.begin for era in self.eras[1:]]
        before: dict[str, list[tuple[int, int]]] = {digest: [] for digest in digests}
        for era, end in zip(past, ends, strict=False):
            for share, taken in zip(era.sources, era.taken(end - era.begin), strict=True):
                if share.digest in before:
                    before[share.digest].append((era.seq_length, taken))
        for digest, source in zip(digests, self.blend.datasets, strict=True):
            note = source.go_on(before[digest])
            notes += [note] if note else []
        self._past, self._counted = (past_totals if same else totals), {}
        if same:  # continue counting documents from here, not from the beginning of the era
            for share, taken in zip(last.sources, last.taken(consumed - last.begin), strict=True):
                total, before_era = totals[share.digest], past_totals.get(share.digest, Total("", 0, 0, 0.0))
                tokens, documents = total.tokens - before_era.tokens, total.documents - before_era.documents
                self._counted[share.digest] = (taken, tokens, documents)
        return notes


def read(saved: Mapping[str, Any]) -> tuple[list[Era], dict[str, Total], dict[str, Total], int]:
    """(eras, totals before the last era, totals, samples consumed), totals by digest. DataError when damaged."""

    def totals_of(key: str) -> dict[str, Total]:
        return {
            str(t["digest"]): Total(str(t["name"]), int(t["tokens"]), int(t["documents"]), float(t["epochs"]))
            for t in saved[key]
        }

    try:
        if saved["version"] != VERSION:
            raise ValueError(f"version {saved['version']}")
        eras = [
            Era(
                int(era["begin"]),
                int(era["seq_length"]),
                bool(era["packed"]),
                tuple(Share(str(s["name"]), str(s["digest"]), float(s["weight"])) for s in era["sources"]),
            )
            for era in saved["eras"]
        ]
        past, totals = totals_of("past"), totals_of("sources")
        consumed = int(saved["consumed"])
        borders = [era.begin for era in eras] + [consumed]
        if not eras or borders != sorted(borders) or borders[0] != 0:
            raise ValueError("eras do not follow each other")
        if {share.digest for share in eras[-1].sources} - totals.keys():
            raise ValueError("a source has no total")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the checkpoint's token ledger is damaged ({error}); use another checkpoint") from None
    return eras, past, totals, consumed
