"""One sentence on a measured step: what it loses the most by, and what the plan says of the remedy.

What is worth a word is what the report of a run says is (train/watch/report.py: WORTH); below that it is the kernels,
or what is computed again. Figures of remedies are the plan's, of the same arrangement with another option.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megalite.config.check import check
from megalite.config.options import Config
from megalite.train.arrangement import Arrangement
from megalite.train.watch.report import WORTH, too_few_cores

WORTH_OF = dict.fromkeys(("tp", "cp", "dp", "pp", "ranks"), WORTH["communication"]) | {
    name: WORTH[name] for name in ("bubble", "data", "optimizer", "other")
}
COMPUTING = ("kernels", "recompute")
GIB = 2**30


def advise(lost: Mapping[str, float], run: Mapping[str, Any], made: Arrangement) -> str:
    """`lost`: shares of a step, by breakdown.LOST. Empty where nothing is lost."""
    if not lost:
        return ""
    if run.get("cores") and (shared := too_few_cores(run["devices"], run["threads"], run["cores"])):
        return f"none: {shared}"
    above = {name: 100 * lost[name] / least for name, least in WORTH_OF.items()}
    worst = max(above, key=lambda name: above[name])
    if above[worst] < 1:
        worst = max(COMPUTING, key=lambda name: lost[name])
    return SENTENCES[worst](lost[worst], run, made)


def _twin(made: Arrangement, **options: Any) -> Arrangement | None:
    """The same run with other options, by "section.name"; None where they contradict each other."""
    config: Config = made.config
    for name, value in options.items():
        section, _, option = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    if check(config, made.world):
        return None
    twin = replace(made, config=config)
    try:
        _ = twin.stages
    except ValueError:
        return None
    return twin


def _twice_the_batch(made: Arrangement) -> Arrangement | None:
    return _twin(made, train__global_batch_size=2 * made.batch_size)


def _per_step(what: str) -> Callable[..., str]:
    """Of what happens once per step, whatever the number of micro-batches."""

    def sentence(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
        return (
            f"{what} {share:.1%}, once per step: with twice the micro-batches (--global-batch-size "
            f"{2 * made.batch_size}) {share / (2 - share):.1%}"
        )

    return sentence


def _bubble(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
    p, layers = made.config.parallel, made.config.model.num_layers
    found = {f"twice the micro-batches (--global-batch-size {2 * made.batch_size})": _twice_the_batch(made)}
    if not p.split_backward:
        found["--split-backward"] = _twin(made, parallel__split_backward=True)
    if made.chunks == 1 and layers >= 2 * made.pp:
        name = "--num-virtual-stages-per-pipeline-rank 2"
        found[name] = _twin(made, parallel__num_virtual_stages_per_pipeline_rank=2)
    told = [f"with {name} {twin.bubble:.1%}" for name, twin in found.items() if twin is not None]
    return (
        f"the bubble takes {share:.1%} of a step, as planned {made.bubble:.1%}: {', '.join(told) or 'use fewer stages'}"
    )


def _fewer(axis: str, option: str) -> Callable[..., str]:
    """Half of an axis that communicates within every layer, and what a rank then holds."""

    def sentence(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
        told = f"exposed messages of {axis} take {share:.1%} of a step"
        size = getattr(made.config.parallel, option)
        twin = _twin(made, **{f"parallel__{option}": size // 2}) if size > 1 else None
        if twin is None:
            return f"{told}: keep its ranks on one machine, or use larger micro-batches"
        return f"{told}: with {axis} {size // 2} and dp {twin.dp} {_room(twin, run)}"

    return sentence


def _room(made: Arrangement, run: Mapping[str, Any]) -> str:
    """What the plan says that the fullest rank holds, of what there is."""
    most = max(held.state + kept for held, kept in zip(made.holdings, made.activations, strict=True))
    there = run["memory_there"] / (run["devices"] if run["device"] == "CPU" else 1)
    fits = "" if most < there else ", which does not fit"
    size = f"{most / GIB:.2f} GiB" if most > GIB / 10 else f"{most / 2**20:.3g} MiB"
    return f"a rank holds {size} of {there / GIB:.1f} GiB as planned{fits}"


def _pp(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
    layers = ", ".join(map(str, made.counts))
    return (
        f"stages ({layers} layers) wait {share:.1%} of a step beyond the planned bubble of {made.bubble:.1%}: a "
        "stage is slower than its FLOPs say, or messages are slow (tools/benchmark_comm.py measures them)"
    )


def _ranks(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
    busy = [parts["forward"] + parts["backward"] for parts in run["parts"]]
    slowest, mean = max(range(len(busy)), key=lambda rank: busy[rank]), statistics.mean(busy)
    return (
        f"ranks wait {share:.1%} of a step for the slowest, and rank {slowest} computes {busy[slowest] / mean - 1:.1%} "
        "longer than the mean of them: look at its device (tools/check_cluster.py)"
    )


def _without(what: str, remedy: str) -> Callable[..., str]:
    """Of a wait that can go."""

    def sentence(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
        before = 1e3 * run["step_s"]
        return (
            f"{what} {share:.1%} of a step of {before:.4g} ms, which takes {before * (1 - share):.4g} without: {remedy}"
        )

    return sentence


def _recompute(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
    nothing: dict[str, Any] = dict.fromkeys(("granularity", "method", "num_layers"))
    twin = _twin(made, **{f"train__recompute_{name}": value for name, value in nothing.items()})
    told = f"computing activations again takes {share:.1%} of a step"
    return told if twin is None else f"{told}: without it {_room(twin, run)}"


def _kernels(share: float, run: Mapping[str, Any], made: Arrangement) -> str:
    of = statistics.mean((p["forward"] + p["backward"]) / sum(p.values()) for p in run["parts"])
    told = f"forward and backward take {of:.1%} of a step, of which {share:.1%} is below the peak"
    size = made.config.train.micro_batch_size
    twin = _twin(made, train__micro_batch_size=2 * size)
    return told if twin is None else f"{told}: with --micro-batch-size {2 * size} {_room(twin, run)}"


SENTENCES: Mapping[str, Callable[..., str]] = {
    "bubble": _bubble,
    "tp": _fewer("tp", "tensor_model_parallel_size"),
    "cp": _fewer("cp", "context_parallel_size"),
    "dp": _per_step("sums of gradients and gathers of weights take"),
    "pp": _pp,
    "ranks": _ranks,
    "data": _without(
        "the wait for tokens takes", "a thread makes or reads them, and shares the processors or the disk"
    ),
    "optimizer": _per_step("the update takes"),
    "recompute": _recompute,
    "kernels": _kernels,
    "other": _without("what is beside all parts takes", "look at a profile (--profile)"),
}
