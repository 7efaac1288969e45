"""Ablations: measure what an option is worth, by steps of one run in one process with the option off and on.

The ablations of a group (gpu_report_runs.py) are measured in their order on a run that is built once. Options are
switched between two steps, and weights and optimizer state stay. Each variant has its own position in the data, so both
see the same tokens. The GPU is warm before the first ablation. Steps are timed in pairs, which run in the order off-on
and on-off alternately, and the median of their ratios counts. Results are written after each pair. The GPU's counters
are read while further steps run.

A variant may change flags of the run (kernels, windows, separate documents, micro-batches), the BLAS library, the size
of a chunk of the head's logits, and where the experts' activation is computed. Its FLOPs count only visible attention
scores. Each document takes half of the rest of a sample: of 4096 tokens 2048, 1024, 512, 256, 128 and 128.
"""

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.config import cli
from megalite.config.options import padded_vocab_size
from megalite.data.datasets.batches import Batches, DocumentBoundaries, Prefetcher
from megalite.data.datasets.mock_dataset import MockDataset
from megalite.kernels.activation import get_activation
from megalite.kernels.attention import select_backend
from megalite.kernels.cross_entropy import CHUNK_BYTES
from megalite.kernels.dispatch import set_kernel_options
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.planning.device_peaks import find_peak
from megalite.planning.layer_kinds import flops_per_token
from megalite.training.batch import to_host_batch
from megalite.training.setup import host_batch_options
from megalite.training.state import Progress
from megalite.training.train_step import train_step
from tools.bench.gpu_report_probe import query_gpus
from tools.bench.gpu_report_runs import ABLATIONS, Ablation, VariantOptions
from tools.bench.systems import build_run_from_task, peak_memory, time_steps
from tools.cli_common import write_json

NUM_HALVINGS = 5  # of a sample into documents
PAIRS, TINY_PAIRS = 9, 2
WARMUP_S = 45.0  # not with --tiny
GPU_COUNTERS = ("power.draw", "power.limit", "clocks.sm", "temperature.gpu")
Row = dict[str, Any]


@dataclass
class Variant:
    """A way to compute a step, and its measurements.

    Attributes:
        config: the configuration of the run with the variant's flags.
        data: its batches.
        blas: the BLAS library.
        chunk_bytes: the size of a chunk of the head's logits.
        flops: FLOPs per token.
        unfused: True if kernels after the experts' matmuls compute the activation.
        progress: its position in the data.
        properties: everything in which variants can differ; known after `AblationRun.activate`.
        seconds: the times of its steps.
        losses: the losses of its steps.
        memory: the peak memory of its steps.
    """

    config: Any
    data: Prefetcher[Any]
    blas: Any
    chunk_bytes: int
    flops: float
    unfused: bool = False
    progress: Progress = field(default_factory=Progress)
    properties: tuple[Any, ...] = ()
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: int = 0


class AblationRun:
    """A run whose steps are timed under different variants."""

    def __init__(self, flags: list[str], run: Any):
        self.flags, self.run, self.device = flags, run, run.mesh.device
        self.on_gpu = self.device.type == "cuda"
        self.default_chunk_bytes = CHUNK_BYTES[self.device.type]
        self.default_blas = torch.backends.cuda.preferred_blas_library()
        self.num_samples = run.batch_sizes.at(0)
        self.num_tokens = self.num_samples * run.seq_length
        self.peak_tflops = find_peak(self.device, run.pipeline.dtype).tflops

    def variant(self, options: VariantOptions | None = None) -> Variant:
        """Return a variant of the run, by default one without changes."""
        options = options or VariantOptions()
        seq_length, run = self.run.seq_length, self.run
        flags = options.flags.format(quarter=seq_length // 4 - 1, sixteenth=seq_length // 16 - 1)
        config, _ = cli.read([*self.flags, *flags.split()], PRESETS)
        model, has_documents = config.model, config.data.reset_attention_mask
        lengths = [seq_length]
        dataset = MockDataset(run.vocab_size, seq_length, config.train.seed)
        if has_documents:
            lengths = [seq_length >> n for n in range(1, NUM_HALVINGS + 1)] + [seq_length >> NUM_HALVINGS]
            dataset.piece_lengths = lambda index: [np.array(lengths, np.int32)] * len(index)
        boundaries = DocumentBoundaries(documents=has_documents)
        batches = Batches(dataset, config.train.micro_batch_size, 0, 1, run.vocab_size, boundaries)
        prepare = partial(to_host_batch, pin=self.on_gpu, **host_batch_options(config, run.mesh))
        padded_vocab = padded_vocab_size(run.vocab_size, model.make_vocab_size_divisible_by, 1)
        sample_flops = sum(
            length * flops_per_token(replace(model, seq_length=length), padded_vocab) for length in lengths
        )
        return Variant(
            config=config,
            data=Prefetcher(batches, prepare, run.batch_sizes.at),
            blas=options.blas or self.default_blas,
            chunk_bytes=self.default_chunk_bytes if options.chunk_mib is None else options.chunk_mib << 20,
            flops=sample_flops / seq_length,
            unfused=options.unfused,
        )

    def activate(self, variant: Variant) -> None:
        """Make the next steps those of a variant."""
        run, model, parallel = self.run, variant.config.model, variant.config.parallel
        set_kernel_options(parallel.kernels, parallel.attention_kernel)
        activation = get_activation(model.activation)
        if variant.unfused:
            activation = replace(activation, swiglu_constants=None)
        for stage in run.pipeline.stages:
            for block in stage.blocks:
                block.mixer.window = model.layers[block.layer].window
                block.mlp.activation = activation
        run.train_loader, run.progress = variant.data, variant.progress
        CHUNK_BYTES[self.device.type] = variant.chunk_bytes
        if self.on_gpu:
            torch.backends.cuda.preferred_blas_library(variant.blas)
            torch.cuda.reset_peak_memory_stats(self.device)
        has_documents, micro_batch_size = (
            variant.config.data.reset_attention_mask,
            variant.config.train.micro_batch_size,
        )
        q = torch.empty(2, 1, 2, model.head_size, dtype=run.pipeline.dtype, device=self.device)
        needs_own_kernel = model.layers[0].window is not None or model.attn_logit_softcapping is not None
        attention_kernel = select_backend(q, q, has_documents=has_documents, window=needs_own_kernel)
        variant.properties = (
            attention_kernel,
            str(variant.blas),
            model.attention_windows,
            has_documents,
            micro_batch_size,
            variant.chunk_bytes,
            variant.unfused,
        )

    def step(self, variant: Variant) -> None:
        """Run and time one step of a variant."""
        self.activate(variant)
        variant.seconds += time_steps(lambda: variant.losses.append(train_step(self.run).loss), self.device, 0, 1)
        variant.memory = max(variant.memory, peak_memory(self.device))

    def summary(self, variant: Variant) -> Row:
        """Return a variant's measurements, as JSON values."""
        seconds = statistics.median(variant.seconds)
        micro_batch_size = variant.config.train.micro_batch_size
        tflops = variant.flops * self.num_tokens / seconds / 1e12
        return {
            "tokens_per_s": self.num_tokens / seconds,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "memory": variant.memory,
            "micro_batch": micro_batch_size,
            "micro_batches": self.num_samples // micro_batch_size,
            "attention": variant.properties[0],
            "seconds": variant.seconds[:],
            "losses": variant.losses[:],
        }

    def measure(self, row: Row, ablation: Ablation, num_pairs: int, deadline: float, save: Callable[[], None]) -> None:
        """Measure one ablation, and add its results to `row` pair by pair."""
        off, on = self.variant(ablation.off), self.variant(ablation.on)
        try:
            for variant in (off, on, off, on):  # compile kernels, and allocate memory
                self.step(variant)
            if off.properties == on.properties:
                kernel = on.properties[0]
                row["status"] = f"not measured: both sides are the same here, with {kernel} for attention"
                return
            off.seconds, on.seconds = [], []
            ratios: list[float] = []
            while len(ratios) < num_pairs and time.monotonic() < deadline:
                for variant in (on, off) if len(ratios) % 2 else (off, on):
                    self.step(variant)
                ratios.append(off.seconds[-1] / on.seconds[-1])
                row["ratio"] = statistics.median(ratios)
                row["ratios"] = ratios
                row["load"] = {}
                row["status"] = "ok"
                row["sides"] = [self.summary(off), self.summary(on)]
                save()
            with ThreadPoolExecutor(1) as pool:
                counters = pool.submit(query_gpus, GPU_COUNTERS)
                while not counters.done():
                    self.step(on)
            row["load"] = next(iter(counters.result()), {})
        finally:
            for variant in (off, on):
                variant.data.close()


def run_ablations(ranks: RankInfo, task: Row) -> int:
    """Warm up, run the ablations of task["group"] for which there is time, and return the exit code.

    An ablation that fails costs only itself; its row has the error.
    """
    start = time.monotonic()
    deadline = start + task["seconds"]
    ablations = ABLATIONS[task["group"]]
    rows: list[Row] = [{"status": "not measured: no time was left", **asdict(ablation)} for ablation in ablations]
    results: Row = {"plan": task["plan"], "rows": rows}
    save = partial(write_json, Path(task["output_dir"]) / "ablations.json", results)
    num_pairs, warmup_s = (TINY_PAIRS, 0.0) if task["tiny"] else (PAIRS, WARMUP_S)
    save()
    with build_run_from_task(ranks, task) as (_, run):
        run.train_loader.close()
        ablation_run = AblationRun(task["flags"], run)
        warmup_start = time.monotonic()
        unchanged = ablation_run.variant()
        while not unchanged.seconds or time.monotonic() - warmup_start < warmup_s:
            ablation_run.step(unchanged)
        unchanged.data.close()
        results |= {"built_s": warmup_start - start, "warm_up": unchanged.seconds}
        for ablation, row in zip(ablations, rows, strict=True):
            row_start = time.monotonic()
            try:
                if ablation.gpu_only_reason and not ablation_run.on_gpu:
                    row["status"] = f"not measured: {ablation.gpu_only_reason}"
                elif row_start < deadline:
                    ablation_run.measure(row, ablation, num_pairs, deadline, save)
            except Exception as error:  # noqa: BLE001  a kernel that does not compile, or too little memory
                row["status"] = f"failed: {type(error).__name__}: {error}"
            gc.collect()
            row["took_s"] = time.monotonic() - row_start
            print(f"{row['name']}: {row['status']}, {row.get('ratio', 0):.3f}, {row['took_s']:.0f} s", flush=True)
            save()
        ablation_run.activate(unchanged)
    return int(any(row["status"].startswith("failed") for row in rows))
