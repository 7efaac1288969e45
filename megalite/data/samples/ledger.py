"""The token ledger: how much of each source a run has read, kept in every checkpoint, and how a run resumes from it.

    era         a stretch of the run with one blend: from sample `begin` on, one sequence length, sources and weights
    source      known by a digest of its documents: moved files are the same source

A run that is resumed with the same blend continues the era, bit for bit. With another blend or sequence length a new
era begins at the present sample: each source continues with the rest of its epoch (gpt_dataset.py), a new one starts at
its beginning. The order of data within an era is a pure function of the ledger.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megalite.data.errors import DataError
from megalite.data.samples.blend import Blend, BlendOrder

VERSION = 1


@dataclass(frozen=True)
class Share:
    """One source of an era, with its weight in BlendOrder."""

    name: str
    digest: str
    weight: float


@dataclass(frozen=True)
class Era:
    """`begin`: its first sample, counted in the run. `packed`: samples are packed documents."""

    begin: int
    seq_length: int
    packed: bool
    sources: tuple[Share, ...]

    def taken(self, samples: int) -> list[int]:
        """Samples that each source gives of the era's first `samples`."""
        return BlendOrder([share.weight for share in self.sources]).counts(samples)


@dataclass
class Total:
    """Amount of a source that a run has read. `documents`: those that began in it."""

    name: str
    tokens: int
    documents: int
    epochs: float


class Ledger:
    """Counts how much of each source of a run's training data `blend` was read."""

    def __init__(self, blend: Blend, seed: int):
        self.blend, self.seed = blend, seed
        weighed = zip(blend.datasets, blend.weights, strict=True)
        shares = tuple(Share(source.name, source.digest, float(weight)) for source, weight in weighed)
        self.eras = [Era(0, blend.seq_length, blend.datasets[0].packed, shares)]
        self._past: dict[str, Total] = {}  # totals before `_counted`
        self._counted: dict[str, tuple[int, int, int]] = {}  # digest -> samples of this era; tokens, documents in them

    def totals(self, consumed: int) -> dict[str, Total]:
        """Digest of each source -> its total after `consumed` samples of the run."""
        era = self.eras[-1]
        result = {digest: Total(**asdict(total)) for digest, total in self._past.items()}
        for share, source, taken in zip(era.sources, self.blend.datasets, era.taken(consumed - era.begin), strict=True):
            counted, tokens, documents = self._counted.get(share.digest, (0, 0, 0))
            if counted > taken:  # an earlier point than in the last call
                counted, tokens, documents = 0, 0, 0
            new_tokens, new_documents = source.count(range(counted, taken))
            tokens, documents = tokens + new_tokens, documents + new_documents
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

        eras, sources = [asdict(era) for era in self.eras], rows(self.totals(consumed))
        known = {"version": VERSION, "seed": self.seed, "consumed": consumed}
        return {**known, "eras": eras, "past": rows(self._past), "sources": sources}

    def go_on(self, saved: Mapping[str, Any]) -> list[str]:
        """Resume from a checkpoint's ledger with this run's blend; returns notes for people."""
        eras, past_totals, totals, consumed = read(saved)
        if saved.get("seed") != self.seed:
            order = f"the data so far came in the order of seed {saved.get('seed')}"
            raise DataError(f"seed={self.seed}, but {order}; give that one")
        mine, last = self.eras[-1], eras[-1]
        if mine.packed != last.packed:
            raise DataError("document_packing was changed since the checkpoint; set it as it was then")
        digests = [share.digest for share in mine.sources]
        blends = [[era.seq_length, *((share.digest, share.weight) for share in era.sources)] for era in (mine, last)]
        same, notes = blends[0] == blends[1], []
        past = eras[:-1] if same else eras
        if same:
            self.eras = [*past, replace(mine, begin=last.begin)]
        else:
            self.eras = [*eras, replace(mine, begin=consumed)]
            notes.append(f"the blend changed: from sample {consumed} on each source continues where it stopped")
            new = [share.name for share in mine.sources if share.digest not in totals]
            notes += [f"{name} is new, or its documents changed: it starts at its beginning" for name in new]
            unused = [total for digest, total in totals.items() if digest not in digests]
            notes += [f"{total.name} is no longer used, after {total.epochs:.2f} epochs" for total in unused]
        self.blend.begin = self.eras[-1].begin
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
        if same:  # continue counting documents at this point, not at the beginning of the era
            for share, taken in zip(last.sources, last.taken(consumed - last.begin), strict=True):
                total, before_era = totals[share.digest], past_totals.get(share.digest, Total("", 0, 0, 0.0))
                tokens, documents = total.tokens - before_era.tokens, total.documents - before_era.documents
                self._counted[share.digest] = (taken, tokens, documents)
        return notes


def read(saved: Mapping[str, Any]) -> tuple[list[Era], dict[str, Total], dict[str, Total], int]:
    """(eras, totals before the last era, totals, samples consumed), totals by digest. DataError when damaged."""

    def total(t: Mapping[str, Any]) -> Total:
        return Total(str(t["name"]), int(t["tokens"]), int(t["documents"]), float(t["epochs"]))

    def era(e: Mapping[str, Any]) -> Era:
        shares = tuple(Share(str(s["name"]), str(s["digest"]), float(s["weight"])) for s in e["sources"])
        return Era(int(e["begin"]), int(e["seq_length"]), bool(e["packed"]), shares)

    try:
        if saved["version"] != VERSION:
            raise ValueError(f"version {saved['version']}")
        eras = [era(entry) for entry in saved["eras"]]
        past, totals = ({str(t["digest"]): total(t) for t in saved[key]} for key in ("past", "sources"))
        consumed = int(saved["consumed"])
        borders = [*(era.begin for era in eras), consumed]
        if not eras or borders != sorted(borders) or borders[0] != 0:
            raise ValueError("eras do not follow each other")
        if {share.digest for share in eras[-1].sources} - totals.keys():
            raise ValueError("a source has no total")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the checkpoint's token ledger is damaged ({error}); use another checkpoint") from None
    return eras, past, totals, consumed
