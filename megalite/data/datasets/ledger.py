"""The data ledger: how much of each source a run has read. Every checkpoint contains it, and a run resumes from it.

    phase       the part of a run with one blend: one sequence length, sources and weights, from sample `begin` on
                (an entry of "eras" in the checkpoint)
    source      identified by a digest of its documents: moved files are the same source

A run that is resumed with the same blend continues the phase, bit for bit. With another blend or sequence length a new
phase starts at the current sample: each source continues with the rest of its epoch (gpt_dataset.py), and a new source
starts at its beginning. The order of data within a phase is a pure function of the ledger.

A phase that has ended records how many samples each source gave. Version 1 of the ledger did not. It also repeated the
order of a blend with a long period after its first million samples, and a blend could contain a source twice, which
then gave each of its samples twice. Such a phase ends where it is read.
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
    """One source of a phase, with its weight in the BlendSchedule.

    `gave` is the number of samples that it gave in the phase, or None while the phase goes on.
    """

    name: str
    digest: str
    weight: float | int
    gave: int | None = None


@dataclass(frozen=True)
class BlendPhase:
    """A part of the run with one blend.

    begin   the phase's first sample, counted in the whole run
    packed  True if samples are packed documents
    """

    begin: int
    seq_length: int
    packed: bool
    sources: tuple[WeightedSource, ...]

    @property
    def has_ended(self) -> bool:
        return self.sources[0].gave is not None

    @property
    def order(self) -> BlendSchedule:
        return BlendSchedule([source.weight for source in self.sources])

    def samples_used(self, samples: int) -> list[int]:
        """Return how many of the phase's first `samples` samples each source gives."""
        return self.order.samples_per_source(samples)

    def ended(self, samples: int) -> "BlendPhase":
        """Return the phase, ended after `samples` samples, with its sample counts; unchanged if it has ended."""
        if self.has_ended:
            return self
        counts = self.samples_used(samples)
        return replace(self, sources=tuple(map(_with_count, self.sources, counts)))


@dataclass
class SourceUsage:
    """The amount of a source that a run has read. `documents` counts those that started in it."""

    name: str
    tokens: int
    documents: int
    epochs: float


@dataclass(frozen=True)
class CountedSamples:
    """The first `samples` samples of a source in the current phase, and the amount of data in them."""

    samples: int = 0
    tokens: int = 0
    documents: int = 0


@dataclass(frozen=True)
class SavedLedger:
    """A ledger as read from a checkpoint.

    Attributes:
        past: Totals before the last phase, by digest.
        totals: Totals at the checkpoint, by digest.
        consumed: Number of samples that the run had read.
    """

    phases: list[BlendPhase]
    past: dict[str, SourceUsage]
    totals: dict[str, SourceUsage]
    consumed: int


class DataLedger:
    """The counts of how much of each source of a run's training data `blend` was read."""

    def __init__(self, blend: BlendedDataset, seed: int):
        self.blend, self.seed = blend, seed
        pairs = zip(blend.datasets, blend.weights, strict=True)
        sources = tuple(WeightedSource(source.name, source.digest, weight) for source, weight in pairs)
        self.eras = [BlendPhase(0, blend.seq_length, blend.datasets[0].packed, sources)]
        self._past: dict[str, SourceUsage] = {}  # totals before `_counted`
        self._counted: dict[str, CountedSamples] = {}  # by digest, since counting starts where the last call ended

    def totals(self, consumed: int) -> dict[str, SourceUsage]:
        """Return the total of each source, by digest, after `consumed` samples of the run."""
        phase = self.eras[-1]
        result = {digest: SourceUsage(**asdict(total)) for digest, total in self._past.items()}
        samples_used = self.blend.order.samples_per_source(consumed - phase.begin)
        for weighted, source, samples in zip(phase.sources, self.blend.datasets, samples_used, strict=True):
            counted = self._counted.get(weighted.digest, CountedSamples())
            if counted.samples > samples:  # the last call was for a later point
                counted = CountedSamples()
            tokens, documents = source.count_tokens_and_documents(range(counted.samples, samples))
            counted = CountedSamples(samples, counted.tokens + tokens, counted.documents + documents)
            self._counted[weighted.digest] = counted
            total = result.setdefault(weighted.digest, SourceUsage(weighted.name, 0, 0, 0.0))
            total.name = weighted.name
            total.tokens += counted.tokens
            total.documents += counted.documents
            total.epochs = total.tokens / source.num_tokens
        return result

    def to_json(self, consumed: int) -> dict[str, Any]:
        """Return the ledger as JSON for the checkpoint after `consumed` samples."""

        def rows(totals: Mapping[str, SourceUsage]) -> list[dict[str, Any]]:
            return [{"digest": digest, **asdict(total)} for digest, total in totals.items()]

        eras = [asdict(phase) for phase in self.eras]
        sources = rows(self.totals(consumed))
        header = {"version": VERSION, "seed": self.seed, "consumed": consumed}
        return {**header, "eras": eras, "past": rows(self._past), "sources": sources}

    def resume(self, saved: Mapping[str, Any]) -> list[str]:
        """Resume from a checkpoint's ledger with this run's blend.

        Args:
            saved: what `to_json` returned

        Returns:
            notes for the log

        Raises:
            DataError: the ledger is damaged, or seed or document packing differ from the checkpoint's
        """
        ledger = read(saved)
        phases, totals, consumed = ledger.phases, ledger.totals, ledger.consumed
        if saved.get("seed") != self.seed:
            order = f"the data so far came in the order of seed {saved.get('seed')}"
            raise DataError(f"seed={self.seed}, but {order}; give that seed")
        current, last = replace(self.eras[-1], begin=0), phases[-1]
        if current.packed != last.packed:
            raise DataError("document_packing was changed since the checkpoint; set it as it was then")
        digests = [source.digest for source in current.sources]
        same_order = _blend_of(current) == _blend_of(last)
        continues = same_order and not last.has_ended
        notes = []
        if continues:
            past = phases[:-1]
            self.eras = [*past, replace(current, begin=last.begin)]
        else:
            past = [*phases[:-1], last.ended(consumed - last.begin)]
            self.eras = [*past, replace(current, begin=consumed)]
            reason = "this version mixes the blend in another order" if same_order else "the blend changed"
            notes.append(f"{reason}: from sample {consumed} on each source continues where it stopped")
            new_names = [source.name for source in current.sources if source.digest not in totals]
            notes += [f"{name} is new, or its documents changed: it starts at its beginning" for name in new_names]
            unused = [total for digest, total in totals.items() if digest not in digests]
            notes += [f"{total.name} is no longer used, after {total.epochs:.2f} epochs" for total in unused]
        self.blend.begin = self.eras[-1].begin
        history: dict[str, list[tuple[int, int]]] = {digest: [] for digest in digests}
        for phase in past:
            for weighted in phase.sources:
                if weighted.digest in history:
                    history[weighted.digest].append((phase.seq_length, weighted.gave or 0))
        for digest, source in zip(digests, self.blend.datasets, strict=True):
            note = source.resume(history[digest])
            if note:
                notes.append(note)
        self._past = ledger.past if continues else totals
        self._counted = {}
        if continues:  # continue counting documents at this point, not at the start of the phase
            samples_used = self.blend.order.samples_per_source(consumed - last.begin)
            for digest, samples in zip(digests, samples_used, strict=True):
                total = totals[digest]
                earlier = ledger.past.get(digest, SourceUsage("", 0, 0, 0.0))
                tokens = total.tokens - earlier.tokens
                documents = total.documents - earlier.documents
                self._counted[digest] = CountedSamples(samples, tokens, documents)
        return notes


def _blend_of(phase: BlendPhase) -> list[Any]:
    """Return the values that determine the order of a phase's samples."""
    return [phase.seq_length, *((source.digest, source.weight) for source in phase.sources)]


def _with_count(source: WeightedSource, count: int) -> WeightedSource:
    return replace(source, gave=count)


def _of_version_1(phase: BlendPhase, samples: int, is_last: bool) -> BlendPhase:
    """Return a phase of a ledger of version 1 that has `samples` samples, in today's form.

    It continues if it is the last one and its order is the same in this version; otherwise it has ended.

    Both copies of a source that was there twice gave the same samples, so the number of samples read is the larger of
    the two counts. But the next phase started after the sum of both; the samples between were not read in that epoch.
    """
    order = phase.order
    is_current_order = order.repeats or samples <= order.block
    if is_current_order:
        counts = order.samples_per_source(samples)
    else:
        in_block, rest = order.samples_per_source(order.block), order.samples_per_source(samples % order.block)
        num_blocks = samples // order.block
        counts = [num_blocks * per_block + in_rest for per_block, in_rest in zip(in_block, rest, strict=True)]
    merged: dict[str, WeightedSource] = {}
    for source, count in zip(phase.sources, counts, strict=True):
        earlier = merged.get(source.digest)
        if earlier is not None:
            count = max(earlier.gave or 0, count) if is_last else (earlier.gave or 0) + count
            source = replace(source, weight=earlier.weight + source.weight)
        merged[source.digest] = _with_count(source, count)
    continues = is_last and is_current_order and len(merged) == len(phase.sources)
    return phase if continues else replace(phase, sources=tuple(merged.values()))


def read(saved: Mapping[str, Any]) -> SavedLedger:
    """Read a saved ledger. Raises DataError if it is damaged."""

    def to_total(t: Mapping[str, Any]) -> SourceUsage:
        return SourceUsage(str(t["name"]), int(t["tokens"]), int(t["documents"]), float(t["epochs"]))

    def to_source(s: Mapping[str, Any]) -> WeightedSource:
        weight, gave = s["weight"], s.get("gave")
        if not isinstance(weight, int | float):
            raise TypeError(f"weight {weight!r}")
        return WeightedSource(str(s["name"]), str(s["digest"]), weight, None if gave is None else int(gave))

    def to_phase(e: Mapping[str, Any]) -> BlendPhase:
        sources = tuple(map(to_source, e["sources"]))
        return BlendPhase(int(e["begin"]), int(e["seq_length"]), bool(e["packed"]), sources)

    try:
        if saved["version"] not in (1, VERSION):
            raise ValueError(f"version {saved['version']}")
        phases = [to_phase(entry) for entry in saved["eras"]]
        past, totals = ({str(t["digest"]): to_total(t) for t in saved[key]} for key in ("past", "sources"))
        consumed = int(saved["consumed"])
        boundaries = [*(phase.begin for phase in phases), consumed]
        if not phases or boundaries != sorted(boundaries) or boundaries[0] != 0:
            raise ValueError("eras do not follow each other")
        if {source.digest for source in phases[-1].sources} - totals.keys():
            raise ValueError("a source has no total")
        phase_lengths = [end - begin for begin, end in itertools.pairwise(boundaries)]
        if saved["version"] == 1:
            phases = [
                _of_version_1(phase, n, phase is phases[-1]) for phase, n in zip(phases, phase_lengths, strict=True)
            ]
        for number, (entry, samples) in enumerate(zip(phases, phase_lengths, strict=True)):
            gave = [source.gave for source in entry.sources]
            if not gave or len({source.digest for source in entry.sources}) < len(gave):
                raise ValueError("an era has no source, or has one twice")
            if None in gave and (number + 1 < len(phases) or set(gave) != {None}):
                raise ValueError("an era does not say what its sources gave")
            if any(count is not None and not 0 <= count <= samples for count in gave):
                raise ValueError("a source gave more samples than its era has")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the checkpoint's token ledger is damaged ({error}); use another checkpoint") from None
    return SavedLedger(phases, past, totals, consumed)
