"""The token ledger: how much of each source a run has read, kept in every checkpoint, and how a run resumes from it.

    era         a stretch of the run with one blend: from sample `begin` on, one sequence length, sources and weights
    source      known by a digest of its documents: moved files are the same source

A run that is resumed with the same blend continues the era, bit for bit. With another blend or sequence length a new
era begins at the present sample: each source continues with the rest of its epoch (gpt_dataset.py), a new one starts at
its beginning. The order of data within an era is a pure function of the ledger.

An era that has ended records how many samples each source gave. Version 1 did not: it repeated the order of a blend
with a long period after its first million samples, and a blend could have a source twice, which then gave each of its
samples twice. Such an era ends where it is read.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megalite.data.datasets.blended_dataset import BlendedDataset, BlendSchedule
from megalite.data.errors import DataError

VERSION = 2


@dataclass(frozen=True)
class WeightedSource:
    """One source of an era, with its weight in BlendOrder. `gave`: samples of it in the era; None: the era goes on."""

    name: str
    digest: str
    weight: float | int
    gave: int | None = None


@dataclass(frozen=True)
class BlendPhase:
    """`begin`: its first sample, counted in the run. `packed`: samples are packed documents."""

    begin: int
    seq_length: int
    packed: bool
    sources: tuple[WeightedSource, ...]

    @property
    def has_ended(self) -> bool:
        return self.sources[0].gave is not None

    @property
    def order(self) -> BlendSchedule:
        return BlendSchedule([share.weight for share in self.sources])

    def samples_used(self, samples: int) -> list[int]:
        """Samples that each source gives of the era's first `samples`."""
        return self.order.samples_per_source(samples)

    def ended(self, samples: int) -> "BlendPhase":
        """The era that ends after so many samples."""
        if self.has_ended:
            return self
        counts = self.samples_used(samples)
        return replace(self, sources=tuple(map(_with_count, self.sources, counts)))


@dataclass
class SourceUsage:
    """Amount of a source that a run has read. `documents`: those that began in it."""

    name: str
    tokens: int
    documents: int
    epochs: float


class DataLedger:
    """Counts how much of each source of a run's training data `blend` was read."""

    def __init__(self, blend: BlendedDataset, seed: int):
        self.blend, self.seed = blend, seed
        weighed = zip(blend.datasets, blend.weights, strict=True)
        shares = tuple(WeightedSource(source.name, source.digest, weight) for source, weight in weighed)
        self.eras = [BlendPhase(0, blend.seq_length, blend.datasets[0].packed, shares)]
        self._past: dict[str, SourceUsage] = {}  # totals before `_counted`
        self._counted: dict[str, tuple[int, int, int]] = {}  # digest -> samples of this era; tokens, documents in them

    def totals(self, consumed: int) -> dict[str, SourceUsage]:
        """Digest of each source -> its total after `consumed` samples of the run."""
        era = self.eras[-1]
        result = {digest: SourceUsage(**asdict(total)) for digest, total in self._past.items()}
        samples_used = self.blend.order.samples_per_source(consumed - era.begin)
        for share, source, samples in zip(era.sources, self.blend.datasets, samples_used, strict=True):
            counted, tokens, documents = self._counted.get(share.digest, (0, 0, 0))
            if counted > samples:  # an earlier point than in the last call
                counted, tokens, documents = 0, 0, 0
            new_tokens, new_documents = source.count_tokens_and_documents(range(counted, samples))
            tokens, documents = tokens + new_tokens, documents + new_documents
            self._counted[share.digest] = (samples, tokens, documents)
            total = result.setdefault(share.digest, SourceUsage(share.name, 0, 0, 0.0))
            total.name = share.name
            total.tokens += tokens
            total.documents += documents
            total.epochs = total.tokens / source.num_tokens
        return result

    def to_json(self, consumed: int) -> dict[str, Any]:
        """For the checkpoint after `consumed` samples."""

        def rows(totals: Mapping[str, SourceUsage]) -> list[dict[str, Any]]:
            return [{"digest": digest, **asdict(total)} for digest, total in totals.items()]

        eras, sources = [asdict(era) for era in self.eras], rows(self.totals(consumed))
        known = {"version": VERSION, "seed": self.seed, "consumed": consumed}
        return {**known, "eras": eras, "past": rows(self._past), "sources": sources}

    def resume(self, saved: Mapping[str, Any]) -> list[str]:
        """Resume from a checkpoint's ledger with this run's blend; returns notes for people."""
        eras, past_totals, totals, consumed = read(saved)
        if saved.get("seed") != self.seed:
            order = f"the data so far came in the order of seed {saved.get('seed')}"
            raise DataError(f"seed={self.seed}, but {order}; give that one")
        mine, last = replace(self.eras[-1], begin=0), eras[-1]
        if mine.packed != last.packed:
            raise DataError("document_packing was changed since the checkpoint; set it as it was then")
        digests = [share.digest for share in mine.sources]
        alike = _blend_of(mine) == _blend_of(last)
        same = alike and not last.has_ended
        notes = []
        if same:
            past = eras[:-1]
            self.eras = [*past, replace(mine, begin=last.begin)]
        else:
            past = [*eras[:-1], last.ended(consumed - last.begin)]
            self.eras = [*past, replace(mine, begin=consumed)]
            why = "this version mixes the blend in another order" if alike else "the blend changed"
            notes.append(f"{why}: from sample {consumed} on each source continues where it stopped")
            new = [share.name for share in mine.sources if share.digest not in totals]
            notes += [f"{name} is new, or its documents changed: it starts at its beginning" for name in new]
            unused = [total for digest, total in totals.items() if digest not in digests]
            notes += [f"{total.name} is no longer used, after {total.epochs:.2f} epochs" for total in unused]
        self.blend.begin = self.eras[-1].begin
        before: dict[str, list[tuple[int, int]]] = {digest: [] for digest in digests}
        for era in past:
            for share in era.sources:
                if share.digest in before:
                    before[share.digest].append((era.seq_length, share.gave or 0))
        for digest, source in zip(digests, self.blend.datasets, strict=True):
            note = source.resume(before[digest])
            notes += [note] if note else []
        self._past, self._counted = (past_totals if same else totals), {}
        if same:  # continue counting documents at this point, not at the beginning of the era
            for digest, samples in zip(
                digests, self.blend.order.samples_per_source(consumed - last.begin), strict=True
            ):
                total, before_era = totals[digest], past_totals.get(digest, SourceUsage("", 0, 0, 0.0))
                tokens, documents = total.tokens - before_era.tokens, total.documents - before_era.documents
                self._counted[digest] = (samples, tokens, documents)
        return notes


def _blend_of(era: BlendPhase) -> list[Any]:
    """What the order of an era's samples depends on."""
    return [era.seq_length, *((share.digest, share.weight) for share in era.sources)]


def _with_count(share: WeightedSource, count: int) -> WeightedSource:
    return replace(share, gave=count)


def _of_version_1(era: BlendPhase, samples: int, is_last: bool) -> BlendPhase:
    """An era of a ledger of version 1, of so many samples. It goes on if it is the last and its order is today's.

    Of a source that was there twice both copies gave the same samples, so as many were read as the larger of the two
    gave. But the next era began behind the sum of both; what lies between has not been read in that epoch.
    """
    order = era.order
    is_as_today = order.repeats or samples <= order.block
    if is_as_today:
        counts = order.samples_per_source(samples)
    else:
        in_block, rest = order.samples_per_source(order.block), order.samples_per_source(samples % order.block)
        counts = [samples // order.block * whole + part for whole, part in zip(in_block, rest, strict=True)]
    merged: dict[str, WeightedSource] = {}
    for share, count in zip(era.sources, counts, strict=True):
        if (copy := merged.get(share.digest)) is not None:
            count = max(copy.gave or 0, count) if is_last else (copy.gave or 0) + count
            share = replace(share, weight=copy.weight + share.weight)
        merged[share.digest] = _with_count(share, count)
    goes_on = is_last and is_as_today and len(merged) == len(era.sources)
    return era if goes_on else replace(era, sources=tuple(merged.values()))


def read(saved: Mapping[str, Any]) -> tuple[list[BlendPhase], dict[str, SourceUsage], dict[str, SourceUsage], int]:
    """(eras, totals before the last era, totals, samples consumed), totals by digest. DataError when damaged."""

    def total(t: Mapping[str, Any]) -> SourceUsage:
        return SourceUsage(str(t["name"]), int(t["tokens"]), int(t["documents"]), float(t["epochs"]))

    def share(s: Mapping[str, Any]) -> WeightedSource:
        weight, gave = s["weight"], s.get("gave")
        if not isinstance(weight, int | float):
            raise TypeError(f"weight {weight!r}")
        return WeightedSource(str(s["name"]), str(s["digest"]), weight, None if gave is None else int(gave))

    def era(e: Mapping[str, Any]) -> BlendPhase:
        return BlendPhase(int(e["begin"]), int(e["seq_length"]), bool(e["packed"]), tuple(map(share, e["sources"])))

    try:
        if saved["version"] not in (1, VERSION):
            raise ValueError(f"version {saved['version']}")
        eras = [era(entry) for entry in saved["eras"]]
        past, totals = ({str(t["digest"]): total(t) for t in saved[key]} for key in ("past", "sources"))
        consumed = int(saved["consumed"])
        borders = [*(era.begin for era in eras), consumed]
        if not eras or borders != sorted(borders) or borders[0] != 0:
            raise ValueError("eras do not follow each other")
        if {share.digest for share in eras[-1].sources} - totals.keys():
            raise ValueError("a source has no total")
        lasts = [end - begin for begin, end in itertools.pairwise(borders)]
        if saved["version"] == 1:
            eras = [_of_version_1(era, n, era is eras[-1]) for era, n in zip(eras, lasts, strict=True)]
        for number, (entry, samples) in enumerate(zip(eras, lasts, strict=True)):
            gave = [share.gave for share in entry.sources]
            if not gave or len({share.digest for share in entry.sources}) < len(gave):
                raise ValueError("an era has no source, or has one twice")
            if None in gave and (number + 1 < len(eras) or set(gave) != {None}):
                raise ValueError("an era does not say what its sources gave")
            if any(count is not None and not 0 <= count <= samples for count in gave):
                raise ValueError("a source gave more samples than its era has")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the checkpoint's token ledger is damaged ({error}); use another checkpoint") from None
    return eras, past, totals, consumed
