"""Step times that others published, beside what this planner predicts from the same inputs and its default profiles.

Of each case all inputs are stated and none is tuned. What is predicted is megalite's program; where the published one
differs in what a flag or the profile can say, the case says it. One that misses stays in the table, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.15
MODEL = "--bf16 --mock-data --train-iters 1 --lr 1"
GPT = f"{MODEL} --seq-length 2048 --micro-batch-size 1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
PAPERS = {
    "dgxc": "github.com/NVIDIA/dgxc-benchmarking, nemo_megatron/README_175b.md and nemotron/README.md; DGX H100, BF16",
    "megatron": "README of Megatron-LM, images/model_table.png, Megatron-Core 0.8; H100 SXM, bf16, data parallel 48",
    "korthikanti": "arXiv:2205.05198, tables 3 and 5; Selene, DGX A100 80 GB",
    "megascale": "arXiv:2402.15627, table 2; Ampere GPUs, 8 x 200 Gbit/s per node",
    "llama3": "arXiv:2407.21783, table 4; H100 80 GB, 400 Gbit/s RoCE per GPU",
    "megalite": "docs/performance.md, GPU; what the H100's profile was made from, so no proof",
}


@dataclass(frozen=True)
class Case:
    """seconds   of a step, as published; or `mfu`, where only that is
    vocab_size   the true one
    profile      what of the default profile the published program had otherwise
    why          a miss: the reason, as far as it is known
    """

    name: str
    source: str
    device: str
    devices: int
    vocab_size: int
    flags: str
    seconds: float | None = None
    mfu: float | None = None
    profile: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Row:
    case: Case
    published: float  # seconds of a step, or MFU
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted time over published time."""
        return self.published / self.predicted if self.case.seconds is None else self.predicted / self.published

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def _dgxc() -> Iterator[Case]:
    """GPT-3's embedding is tied there as here. They hide part of tp's collectives behind matmuls."""
    shape = f"{GPT} {NO_DROPOUT} --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --vocab-size 51200"
    layout = "--tp 4 --pp 8 --num-virtual-stages-per-pipeline-rank 12"
    times = {128: 8.309, 256: 8.408, 512: 8.42, 1024: 8.453, 2048: 8.49}
    for devices, seconds in times.items():
        flags = f"{shape} {layout} --global-batch-size {2 * devices}"
        yield Case(f"GPT-3 175B, {devices} x H100", "dgxc", "h100", devices, 51200, flags, seconds)
    nemotron = (
        f"{MODEL} {NO_DROPOUT} --seq-length 4096 --vocab-size 256000 --squared-relu --normalization LayerNorm "
        "--position-embedding-type rope --rotary-percent 0.5 --disable-bias-linear --global-batch-size 64 "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8"
    )
    small = "--num-layers 32 --hidden-size 6144 --num-attention-heads 48 --tp 2 --micro-batch-size 2"
    large = "--num-layers 96 --hidden-size 18432 --num-attention-heads 96 --tp 8 --pp 8 --micro-batch-size 1"
    large += " --num-virtual-stages-per-pipeline-rank 12"
    yield Case("Nemotron-4 15B, 16 x H100", "dgxc", "h100", 16, 256000, f"{nemotron} {small}", 2.746)
    yield Case("Nemotron-4 340B, 256 x H100", "dgxc", "h100", 256, 256000, f"{nemotron} {large}", 4.606)


def _megatron() -> Iterator[Case]:
    """Rates by their own count, with the whole square of scores, so seconds are what is compared. Micro-batch and
    chunks are not in the table; one rule for all: without a pipeline what a rank has of the batch at once, else
    micro-batches of 1 and as many chunks as divide the layers of a rank, 12 at most."""
    table = {  # name: heads, hidden, layers, tp, pp, batch, TFLOP/s per GPU
        "1.7B": (16, 2048, 24, 1, 1, 192, 408.8),
        "7.1B": (32, 4096, 30, 2, 1, 192, 465.9),
        "16B": (48, 6144, 32, 4, 1, 192, 489.1),
        "32B": (56, 7168, 48, 8, 1, 192, 459.6),
        "70B": (64, 8192, 84, 8, 2, 384, 419.7),
        "119B": (80, 10240, 92, 8, 4, 768, 420.5),
        "177B": (96, 12288, 96, 8, 6, 1152, 432.8),
        "314B": (128, 16384, 96, 8, 8, 1536, 474.4),
        "462B": (144, 18432, 112, 8, 16, 3072, 459.9),
    }
    shape = f"{MODEL} {NO_DROPOUT} --seq-length 4096 --vocab-size 131072 --untie-embeddings-and-output-weights"
    why = "a step is one micro-batch of 4 here, which is a guess: with micro-batches of 1 the ratios are 0.89 and 0.84"
    for name, (heads, hidden, layers, tp, pp, batch, tflops) in table.items():
        devices, per_token = 48 * tp * pp, 6 * hidden * (12 * layers * hidden + 131072 + 2 * layers * 4096)
        chunks = max(n for n in range(1, 13) if layers // pp % n == 0)
        flags = (
            f"{shape} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --tp {tp} --pp {pp}"
        )
        flags += f" --global-batch-size {batch} --micro-batch-size {1 if pp > 1 else batch // 48}"
        flags += f" --num-virtual-stages-per-pipeline-rank {chunks}" * (pp > 1 and chunks > 1)
        seconds = per_token * batch * 4096 / (devices * tflops * 1e12)
        missed = why if name in ("1.7B", "7.1B") else ""
        yield Case(f"{name}, {devices} x H100", "megatron", "h100", devices, 131072, flags, seconds, why=missed)


def _korthikanti() -> Iterator[Case]:
    """Before fused attention: scores are kept in memory, and computed again in backward."""
    shape = f"{MODEL} --seq-length 2048 --vocab-size 51200 --recompute-granularity selective --tp 8"
    layouts = (
        ("22B", 8, 1.10, "48 --hidden-size 6144 --num-attention-heads 64 --global-batch-size 4 --micro-batch-size 4"),
        ("175B", 64, 13.75, "96 --hidden-size 12288 --num-attention-heads 96 --global-batch-size 64 --pp 8"),
        ("530B", 280, 37.83, "105 --hidden-size 20480 --num-attention-heads 128 --global-batch-size 280 --pp 35"),
        ("1T", 512, 71.49, "128 --hidden-size 25600 --num-attention-heads 160 --global-batch-size 512 --pp 64"),
    )
    for name, devices, seconds, rest in layouts:
        flags = f"{shape} --num-layers {rest}" + " --micro-batch-size 1" * (name != "22B")
        flags += " --num-virtual-stages-per-pipeline-rank 3" * (name in ("175B", "530B"))
        yield Case(
            f"{name}, {devices} x A100", "korthikanti", "a100", devices, 51200, flags, seconds, profile={"fused": False}
        )


def _megascale() -> Iterator[Case]:
    shape = f"{GPT} {NO_DROPOUT} --num-layers 96 --hidden-size 12288 --num-attention-heads 128 --vocab-size 64000"
    shape += " --tp 8 --pp 8 --num-virtual-stages-per-pipeline-rank 6"
    theirs = {256: 32.0, 512: 16.5, 768: 11.5, 1024: 8.9, 3072: 23.66, 6144: 12.21, 8192: 9.56, 12288: 6.34}
    for devices, seconds in theirs.items():
        flags = f"{shape} --parallel-residual --global-batch-size {768 if devices < 2000 else 6144}"
        yield Case(f"MegaScale 175B, {devices} x A100", "megascale", "a100", devices, 64000, flags, seconds)
    baseline = {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9, 3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57}
    why = (
        "the baseline waits for messages between stages and for tp, and has older kernels, which are what MegaScale "
        "changed; how much of a row is from that, and why it loses more on more GPUs, is not published by row"
    )
    for devices, seconds in baseline.items():
        flags = f"{shape} --no-overlap-grad-reduce --no-overlap-param-gather"
        flags += f" --global-batch-size {768 if devices < 2000 else 6144}"
        name = f"its Megatron-LM 175B, {devices} x A100"
        missed = why if devices not in (256, 512, 6144) else ""
        yield Case(name, "megascale", "a100", devices, 64000, flags, seconds, why=missed)


def _llama3() -> Iterator[Case]:
    """126 layers, embedding and head on 16 ranks; how many chunks each has is not published (figure 6 draws 2), so all
    that divide the 8 layers of a rank are here. Nor is it said how FLOPs are counted."""
    shape = f"--preset llama3-405b {MODEL} --seq-length 8192 --micro-batch-size 1 --global-batch-size 2048 --tp 8"
    shape += " --pp 16 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    why = "8 chunks are a guess, with less bubble than 2 or 4; what else their program loses is not published"
    for devices, mfu in {8192: 0.43, 16384: 0.41}.items():
        for chunks in (2, 4, 8):
            flags = f"{shape} --num-virtual-stages-per-pipeline-rank {chunks}"
            name = f"Llama 3 405B, {devices} x H100, if in {chunks} chunks"
            yield Case(
                name,
                "llama3",
                "h100",
                devices,
                128256,
                flags,
                mfu=mfu,
                why=why if (devices, chunks) == (8192, 8) else "",
            )


def _megalite() -> Iterator[Case]:
    shape = f"--preset llama3-8b {MODEL} --seq-length 4096 --global-batch-size 16 --exp-avg-dtype bf16"
    rows = (
        ("h100", 18, 1, 0.576),
        ("h100", 6, 4, 0.601),
        ("h200", 32, 1, 0.589),
        ("h200", 25, 4, 0.603),
    )
    for device, layers, micro, mfu in rows:
        flags = f"{shape} --num-layers {layers} --micro-batch-size {micro}"
        name = f"Llama-3-8B shape, {layers} layers, micro-batches of {micro}, {device.upper()}"
        yield Case(name, "megalite", device, 1, 128256, flags, mfu=mfu)
    gpt = f"{MODEL} {NO_DROPOUT} --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50257"
    for length, micro, batch, mfu in ((2048, 8, 64, 0.533), (4096, 4, 32, 0.528)):
        flags = f"{gpt} --seq-length {length} --micro-batch-size {micro} --global-batch-size {batch}"
        yield Case(f"GPT 1.3B, sequence {length}, H100", "megalite", "h100", 1, 50257, flags, mfu=mfu)


def cases() -> list[Case]:
    return [*_dgxc(), *_megatron(), *_korthikanti(), *_megascale(), *_llama3(), *_megalite()]


def predict(case: Case) -> Row:
    from megalite.config import cli
    from megalite.models.families import PRESETS
    from megalite.plan.arrangement import arrange
    from megalite.plan.cluster import cluster
    from megalite.plan.profile import default_profile
    from megalite.plan.step_time import step_time

    made = arrange(cli.parse(case.flags.split(), PRESETS), case.devices, case.vocab_size)
    profile = dataclasses.replace(default_profile(case.device), **case.profile)
    found = step_time(made, cluster(case.device, case.devices), profile)
    if case.seconds is not None:
        return Row(case, case.seconds, found.seconds)
    assert case.mfu is not None
    return Row(case, case.mfu, found.mfu)


def table(of: Iterable[Case] | None = None) -> list[tuple[str, ...]]:
    """Of all cases, or of these, its head first: case, source, published, predicted, ratio of times, what misses."""
    rows: list[tuple[str, ...]] = [("case", "source", "published", "predicted", "time, predicted / published", "")]
    for row in map(predict, cases() if of is None else of):
        text = (lambda x: f"{x:.2f} s") if row.case.seconds is not None else (lambda x: f"MFU {x:.1%}")
        said = "" if row.holds else f"misses: {row.case.why or 'not explained'}"
        numbers = (text(row.published), text(row.predicted), f"{row.ratio:.2f}")
        rows.append((row.case.name, PAPERS[row.case.source].split(";")[0], *numbers, said))
    return rows
