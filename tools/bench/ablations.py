"""What a lever is worth: steps of one run in one process, in turns with the lever off and on.

The levers of a group (gpu_report.toml) are measured in their order on a run that is built once: a lever is switched
between two steps, while weights and optimizer stay. Each side has a place of its own in the data, so both see the same
tokens. The card is warm before the first. Off and on, then on and off, are neighbours; the median of their ratios
counts. Results are written after each pair. What the card draws is asked for while further steps are computed.

A side is flags of the run (kernels, windows, documents apart, micro-batches), the BLAS library, the size of a chunk of
the head's logits, and where experts' activation is computed. Its FLOPs are those of the scores that are seen. Documents
are halves of what is left of a sample: of 4096 tokens 2048, 1024, 512, 256, 128 and 128.
"""

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.config import cli
from megalite.config.options import padded_vocab_size
from megalite.data.datasets.base_dataset import MockDataset
from megalite.data.datasets.batches import Batches, DocumentBoundaries, Prefetcher
from megalite.kernels.activation import get_activation
from megalite.kernels.attention import select_backend
from megalite.kernels.cross_entropy import CHUNK_BYTES
from megalite.kernels.dispatch import set_kernel_options
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.planning.cluster import find_peak
from megalite.planning.layer_kinds import flops_per_token
from megalite.training.batch import to_host_batch
from megalite.training.setup import host_batch_options
from megalite.training.state import Progress
from megalite.training.train_step import train_step
from tools.bench.gpu_report_goals import TABLE
from tools.bench.gpu_report_probe import ask_driver
from tools.bench.systems import build_run_from_task, peak_memory, time_steps
from tools.cli_common import write_json

HALVES = 5  # of a sample, and the last of them twice
PAIRS, WARM_S = 9, 45.0  # tiny: 2 pairs, and no time to warm up
LOAD = ("power.draw", "power.limit", "clocks.sm", "temperature.gpu")
Row = dict[str, Any]


@dataclass
class Side:
    """A way to compute a step, and what was measured of it. `facts`: in what sides may differ."""

    config: Any
    data: Prefetcher[Any]
    blas: Any
    chunk: int
    flops: float  # per token
    apart: bool = False  # whether experts' matmuls leave the activation to kernels after them
    state: Progress = field(default_factory=Progress)
    facts: tuple[Any, ...] = ()
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: int = 0


class Levers:
    """A run whose steps are timed, and its switches."""

    def __init__(self, flags: list[str], run: Any):
        self.flags, self.run, self.device = flags, run, run.mesh.device
        self.card, self.samples = self.device.type == "cuda", run.batch_sizes.at(0)
        self.chunk, self.blas = CHUNK_BYTES[self.device.type], torch.backends.cuda.preferred_blas_library()
        self.tokens, self.peak = self.samples * run.seq_length, find_peak(self.device, run.pipeline.dtype).tflops

    def side(self, flags: str = "", blas: str | None = None, chunk_mib: int | None = None, apart: bool = False) -> Side:
        S, run = self.run.seq_length, self.run
        words = flags.format(quarter=S // 4 - 1, sixteenth=S // 16 - 1).split()
        config, _ = cli.read([*self.flags, *words], PRESETS)
        model, documents = config.model, config.data.reset_attention_mask
        pieces = [S >> n for n in range(1, HALVES + 1)] + [S >> HALVES] if documents else [S]
        dataset = MockDataset(run.vocab_size, S, config.train.seed)
        if documents:
            dataset.piece_lengths = lambda index: [np.array(pieces, np.int32)] * len(index)
        batches = Batches(
            dataset, config.train.micro_batch_size, 0, 1, run.vocab_size, DocumentBoundaries(documents=documents)
        )
        prepare = partial(to_host_batch, pin=self.card, **host_batch_options(config, run.mesh))
        padded = padded_vocab_size(run.vocab_size, model.make_vocab_size_divisible_by, 1)
        flops = sum(n * flops_per_token(replace(model, seq_length=n), padded) for n in pieces) / S
        chunk = self.chunk if chunk_mib is None else chunk_mib << 20
        return Side(config, Prefetcher(batches, prepare, run.batch_sizes.at), blas or self.blas, chunk, flops, apart)

    def take(self, side: Side) -> None:
        """The next steps are of this side."""
        run, model, p = self.run, side.config.model, side.config.parallel
        set_kernel_options(p.kernels, p.attention_kernel)
        form = get_activation(model.activation)
        form = replace(form, swiglu_constants=None) if side.apart else form
        for block in (block for stage in run.pipeline.stages for block in stage.blocks):
            block.attention.window = model.layer_windows[block.layer]
            block.mlp.activation = form
        run.train_loader, run.state, CHUNK_BYTES[self.device.type] = side.data, side.state, side.chunk
        if self.card:
            torch.backends.cuda.preferred_blas_library(side.blas)
            torch.cuda.reset_peak_memory_stats(self.device)
        q = torch.empty(2, 1, 2, model.head_size, dtype=run.pipeline.dtype, device=self.device)
        documents, micro = side.config.data.reset_attention_mask, side.config.train.micro_batch_size
        kernel = select_backend(q, q, has_documents=documents, window=model.layer_windows[0] is not None)
        side.facts = (kernel, str(side.blas), model.layer_windows, documents, micro, side.chunk, side.apart)

    def step(self, side: Side) -> None:
        self.take(side)
        side.seconds += time_steps(lambda: side.losses.append(train_step(self.run).loss), self.device, 0, 1)
        side.memory = max(side.memory, peak_memory(self.device))

    def told(self, side: Side) -> Row:
        seconds = statistics.median(side.seconds)
        micro = side.config.train.micro_batch_size
        mfu = side.flops * self.tokens / seconds / 1e12 / self.peak if self.peak else None
        return {
            "tokens_per_s": self.tokens / seconds,
            "mfu": mfu,
            "memory": side.memory,
            "micro_batch": micro,
            "micro_batches": self.samples // micro,
            "attention": side.facts[0],
            "seconds": side.seconds[:],
            "losses": side.losses[:],
        }

    def measure(self, row: Row, pairs: int, end: float, save: Callable[[], None]) -> None:
        """Fills `row` in, pair by pair."""
        off, on = sides = [self.side(**row.get(name, {})) for name in ("off", "on")]
        try:
            for side in (off, on, off, on):  # kernels are compiled, and memory is taken
                self.step(side)
            if off.facts == on.facts:
                row["status"] = f"not measured: both sides are the same here, with {on.facts[0]} for attention"
                return
            off.seconds, on.seconds, ratios = [], [], []
            while len(ratios) < pairs and time.monotonic() < end:
                for side in sides[:: -1 if len(ratios) % 2 else 1]:
                    self.step(side)
                ratios.append(off.seconds[-1] / on.seconds[-1])
                row |= {"ratio": statistics.median(ratios), "ratios": ratios, "load": {}, "status": "ok"}
                row["sides"] = [self.told(off), self.told(on)]
                save()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask_driver, LOAD)
                while not asked.done():
                    self.step(on)
            row["load"] = next(iter(asked.result()), {})
        finally:
            for side in sides:
                side.data.close()


def levers_rank(ranks: RankInfo, task: Row) -> int:
    """Warm up, then every lever that there is time for; what one dies of is told in its row."""
    begin, rows = time.monotonic(), TABLE["levers"][task["group"]]
    made: Row = {"plan": task["plan"], "rows": [{"status": "not measured: no time was left", **row} for row in rows]}
    save = partial(write_json, Path(task["folder"]) / "levers.json", made)
    end = begin + task["seconds"]
    pairs, warm_s = (2, 0.0) if task["tiny"] else (PAIRS, WARM_S)
    save()
    with build_run_from_task(ranks, task) as (_, run):
        run.train_loader.close()
        levers, begun = Levers(task["flags"], run), time.monotonic()
        plain = levers.side()
        while not plain.seconds or time.monotonic() - begun < warm_s:
            levers.step(plain)
        plain.data.close()
        made |= {"built_s": begun - begin, "warm_up": plain.seconds}
        for row in made["rows"]:
            begun = time.monotonic()
            try:
                if "card" in row and not levers.card:
                    row["status"] = f"not measured: {row['card']}"
                elif begun < end:
                    levers.measure(row, pairs, end, save)
            except Exception as error:  # noqa: BLE001  a kernel that does not build, memory that is not there
                row["status"] = f"failed: {type(error).__name__}: {error}"
            gc.collect()
            row["took_s"] = time.monotonic() - begun
            print(f"{row['name']}: {row['status']}, {row.get('ratio', 0):.3f}, {row['took_s']:.0f} s", flush=True)
            save()
        levers.take(plain)
    return int(any(row["status"].startswith("failed") for row in made["rows"]))
