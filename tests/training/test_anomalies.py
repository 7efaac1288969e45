"""Numbers that cannot be trusted: NaN named and skipped alike on all ranks, spikes, a second computation, rollback."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from program_runs import losses, pretrain, rows, status_of
from ranks import run_ranks
from test_train_step import BATCH, build
from token_files import write
from train_cases import SMALL, config_from, kept
from train_cases import pretrain as pretrain_here

from megalite.common.exit_codes import ExitCode
from megalite.common.fault_injection import FaultInjector
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.launch.rank_info import RankInfo
from megalite.parallel.mesh import abstract_mesh
from megalite.pipeline import runtime as pipeline_module
from megalite.training import train_step as step_module
from megalite.training.monitoring import rerun as suspect
from megalite.training.monitoring.spike_detector import SpikeDetector
from megalite.training.state import InvalidResultError
from megalite.training.train_step import train_step

SKIP = "--no-check-for-nan-in-loss-and-grad"


def strike(*faults: str) -> None:
    """Of this process."""
    step_module.inject_fault = FaultInjector({"MEGALITE_FAULT": ",".join(faults)})  # type: ignore[attr-defined]


# ---- a number that is not finite
def _named(flags: str, where: str, bad_rank: int) -> str:
    """Something on one rank makes a NaN each time: what the error says here."""
    run = build(flags)
    train_step(run)
    run.buffer.wait_param_sync()
    if dist.get_rank() == bad_rank and where == "forward":
        run.pipeline.stages[-1].blocks[-1].mlp.up.data.view(-1)[5] = math.nan  # type: ignore[union-attr, index]
    elif dist.get_rank() == bad_rank:
        block = run.pipeline.stages[0].blocks[1]  # type: ignore[index]
        block.register_full_backward_hook(lambda module, given, grad: (given[0] * math.nan, *given[1:]))
    before = kept(run)
    with pytest.raises(InvalidResultError) as error:
        train_step(run)
    pairs = zip(kept(run).values(), before.values(), strict=True)
    assert run.progress.step == 1 and all(torch.equal(a, b) or a.isnan().any() for a, b in pairs)
    return str(error.value)


PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
MLP, DOWN, ZERO3 = "the output of layers.1.mlp (nan) on", "the gradient of layers.0.mlp.down", "--zero-stage 3"
NAMED = {
    "forward, last stage": (2, PP2, ("forward", 1), f"{MLP} rank 1 (pp 1), samples 4..5"),
    "forward, half of a layer": (2, TP2, ("forward", 1), f"{MLP} rank 0 (tp 0), samples 4..5, and on ranks [1]"),
    "forward, one replica": (2, "", ("forward", 1), f"{MLP} rank 1 (dp 1), samples 6..7"),
    "backward, one replica": (2, "", ("backward", 1), f"{DOWN}_bias (nan) on rank 1 (dp 1);"),
    "backward, ZeRO-3": (2, f"{ZERO3} --disable-bias-linear", ("backward", 1), f"{DOWN} (nan) on rank 1 (dp 1);"),
}


@pytest.mark.parametrize("name", NAMED)
def test_origin_of_a_nan_is_named(name: str) -> None:
    world, flags, (where, rank), words = NAMED[name]
    told = run_ranks(world, _named, flags, where, rank)
    assert len(set(told)) == 1
    assert told[0].startswith("step 2: loss ") and f"first seen in {words}" in told[0]
    assert f" at samples {BATCH}..{2 * BATCH - 1}; nothing was updated" in told[0]
    assert "recomputed, it is the same: the data or the numbers, not the machine" in told[0]


def _named_behind_long_paths() -> str:
    with mock.patch.object(suspect, "format_samples", lambda run, ids: "sample 4 (" + "/päth" * 2000 + ")"):
        return _named("", "forward", 1)


def test_origin_with_long_data_paths_is_named() -> None:
    told = run_ranks(2, _named_behind_long_paths)
    assert len(set(told)) == 1 and "first seen in the output of layers.1.mlp (nan) on rank 1" in told[0]


# ---- computed again
def _struck(flags: str, *faults: str) -> list[Any]:
    run = build(flags)
    strike(*faults)
    results = [train_step(run) for _ in range(3)]
    weights = torch.cat([main.double() for main in run.optimizer.main])
    return [[r.loss for r in results], [r.anomaly for r in results], weights]


@pytest.mark.parametrize("flags", ["", "--zero-stage 2 --global-batch-size 8", "--zero-stage 3"])
def test_transient_error_is_distinguished_from_bad_data(flags: str) -> None:
    good, clean, weights = zip(*run_ranks(2, _struck, flags), strict=True)
    assert not any(any(anomalies) for anomalies in clean)
    faults = ("step.after_reduce:1:2:nan", "step.after_reduce:0:3:inf")
    for rank, (got, anomalies, moved) in enumerate(run_ranks(2, _struck, flags, *faults)):
        assert got == good[rank] and torch.equal(moved, weights[rank])
        assert anomalies[0] is None
        assert [(a.transient, a.differing_ranks) for a in anomalies[1:]] == [(True, (1,)), (True, (0,))]
        assert "recomputed, it is right" in str(anomalies[1]) and "of ranks [1]" in str(anomalies[1])


def test_report_stats_reruns_every_step() -> None:
    good, _, weights = _struck("")
    got, anomalies, moved = _struck("--rerun-mode report_determinism_stats", "step.after_reduce:0:2:bitflip")
    assert got == good and torch.equal(moved, weights)
    assert (
        anomalies[0] is None
        and anomalies[2] is None
        and anomalies[1].reason == "computed twice, with different results"
    )


def test_timeline_of_a_rerun_step_shows_the_first_time() -> None:
    run = build("--rerun-mode report_stats")
    run.pipeline.timeline = []
    train_step(run)
    actions = [timed.action for timed in run.pipeline.timeline]
    assert len(actions) == len(set(actions)) > 0


def _longest(flags: str) -> float:
    """Of this rank's forwards and backwards, where rank 0 sends everything late."""
    run = build(flags)
    pipeline_module.inject_fault = FaultInjector({"MEGALITE_FAULT": "pipeline.message:0:*:sleep=1"})  # type: ignore[attr-defined]
    run.pipeline.timeline = []
    train_step(run)
    return max(timed.end_s - timed.start_s for timed in run.pipeline.timeline if timed.action[0] in "FB")


def test_timeline_excludes_message_waits() -> None:
    assert max(run_ranks(2, _longest, "--pipeline-model-parallel-size 2")) < 0.5


# ---- spikes
def judged(values: list[float], window: int = 40) -> list[int]:
    """At which of these losses a spike is seen, when those are skipped."""
    spikes, found = SpikeDetector(("loss",), "skip", 10.0, window), []
    for i, value in enumerate(values):
        out = spikes.detect(value, math.inf)  # the norm is not watched
        spikes.record(value, math.inf, skipped=out is not None)
        found += [i] if out else []
        spikes.from_json(json.loads(json.dumps(spikes.to_json())))  # as over a restart
    return found


def test_spike_is_far_above_previous_steps() -> None:
    noise = random.Random(3)
    falling = [2 + 8 * 0.97**i + noise.gauss(0, 0.05) for i in range(300)]
    assert judged(falling) == []
    assert judged([*falling[:200], 5.0, *falling[200:], 9.0]) == [200, 301]
    assert judged([2.0] * 50 + [2.1] * 5) == []  # a flat curve: 5 % are no spike
    assert judged([2.0] * 9 + [50.0]) == [] and judged([2.0] * 10 + [50.0]) == [10]  # a quarter of the window
    assert judged([*falling, -5.0, 0.0]) == []
    assert judged([2.0] * 20 + [50.0] * 30) == list(range(20, 50))  # it does not become what is usual


def test_damaged_spike_state_is_refused() -> None:
    for bad in ({}, *({"rollbacks": 0, "quiet": 0, "seen": seen} for seen in ({"loss": [math.nan]}, []))):
        with pytest.raises((KeyError, ValueError, AttributeError)):
            SpikeDetector().from_json(bad)


# ---- whole runs, on text with one batch of noise
STEPS, POISONED = 13, 10  # the samples of this step
WATCHED = "--check-for-spiky-loss --check-for-large-grads --spike-window 16".split()


def write_text(prefix: Path, noisy: set[int]) -> None:
    """Documents of one sample each, all alike but for those that are noise."""
    noise, count = np.random.default_rng(0), 8 * (STEPS + 2)
    write(prefix, [noise.integers(10, 93, 16).tolist() if n in noisy else [5] * 16 for n in range(count)])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Flags of a run whose data is noise in one step, or from there on."""
    folder, found = tmp_path_factory.mktemp("data"), {}
    write_text(folder / "clean", set())
    order = GPTDataset(IndexedDataset(folder / "clean"), range(8 * (STEPS + 2)), 16, seed=5)
    for name, end in (("once", POISONED), ("on", STEPS + 1)):
        places = [order.locate(i, 0) for i in range(8 * (POISONED - 1), 8 * end)]
        write_text(folder / name, {int(place.split()[2].rstrip(",")) for place in places})
        flags = [word for word in SMALL if word != "--mock-data"]
        more = f"--split 1,0,0 --eval-iters 0 --seed 5 --lr-decay-style constant --lr 0.02 --train-iters {STEPS}"
        found[name] = [*flags, "--data-path", str(folder / name), *more.split()]
    return found


def train(*flags: str) -> int:
    """A run of one rank in this process."""
    return pretrain_here(config_from(list(flags)), RankInfo())


def events(folder: Path) -> list[dict[str, Any]]:
    """Those of steps in doubt."""
    return [
        row
        for row in rows(folder / "events.jsonl")
        if row["event"] in ("spike", "rollback", "transient-error", "non-finite")
    ]


def manifest(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"iter_{step:07d}/manifest.json").read_text())


def test_spike_rollback_skips_its_samples(tmp_path: Path, texts: dict[str, list[str]]) -> None:
    """The same as stopping by hand and starting again from the checkpoint with --iterations-to-skip."""
    flags = [*texts["once"], "--save-interval", "8"]
    one, hand = tmp_path / "one", tmp_path / "hand"
    assert train(*flags, *WATCHED, "--spike-action", "rollback", "--save", str(one)) == ExitCode.DONE
    spike, back = events(one)
    assert (spike["event"], back["event"], spike["step"], back["step"]) == ("spike", "rollback", 10, 10)
    assert spike["samples"] == [72, 79] and back["samples"] == [64, 79] and back["checkpoint"] == 8
    assert len(spike["documents"]) == 8 and len(back["documents"]) == 16
    assert set(spike["documents"]) < set(back["documents"]) and "recomputed, it is the same" in spike["text"]
    state = manifest(one, 10)["state"]  # what is passed over is kept, for whatever comes after
    passed = dict(step=10, consumed_samples=80, consumed_tokens=1280, skipped_steps=2, skipped_samples=16)
    assert state["progress"] == passed
    assert state["spikes"]["rollbacks"] == 1 and len(state["spikes"]["seen"]["loss"]) == 8
    assert train(*flags, "--save", str(hand), "--exit-interval", "8") == ExitCode.REQUEUE
    skip = ["--iterations-to-skip", "9", "10"]
    assert train(*flags, "--save", str(hand), "--load", str(hand), *skip) == ExitCode.DONE
    got, wanted = losses(one), losses(hand)
    assert [got[step] for step in (11, 12, 13)] == [wanted[step] for step in (11, 12, 13)]
    assert manifest(one, 13)["files"] == manifest(hand, 13)["files"]  # sha256 of weights and optimizer


def test_rerun_divides_by_all_tokens() -> None:
    """Those of other samples, and of other parts of the same, are on other ranks."""
    run, weights = build(""), list[float]()
    run.pipeline.step = lambda batches, weight, more_microbatches: weights.append(weight)  # type: ignore[assignment, method-assign, return-value]
    run.mesh = abstract_mesh(12, 0, cp=2, pp=2)
    micro_batch = SimpleNamespace(tokens_SB=torch.zeros(4, 2))
    suspect.rerun_forward_backward(run, [micro_batch] * 2)  # type: ignore[list-item]
    assert weights == [1 / (2 * 4 * 2 * 3 * 2)]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [TP2, f"{PP2} --split-backward"])
def test_rollback_is_collective(tmp_path: Path, texts: dict[str, list[str]], layout: str) -> None:
    flags = f"--nproc 2 {layout} --save-interval 8 --spike-action rollback".split()
    pretrain(*texts["once"], *WATCHED, *flags, "--save", str(tmp_path), ok=True)
    spike, back = events(tmp_path)
    assert (spike["samples"], back["samples"]) == ([72, 79], [64, 79])
    assert "recomputed, it is the same" in spike["text"]


def test_spike_is_logged_or_skipped(tmp_path: Path, texts: dict[str, list[str]]) -> None:
    folders = [tmp_path / name for name in ("skip", "hand", "log")]
    skip, hand = [*WATCHED, "--spike-action", "skip"], ["--iterations-to-skip", "10"]
    ways = [skip, hand, [*WATCHED, "--rerun-mode", "disabled"]]
    for folder, flags in zip(folders, ways, strict=True):
        assert train(*texts["once"], "--train-iters", "11", *flags, "--save", str(folder)) == ExitCode.DONE
    [skipped], [logged] = events(folders[0]), events(folders[2])
    assert (skipped["done"], logged["done"]) == ("skipped", "updated")
    assert "deviations above" in logged["text"] and "computed again" not in logged["text"]
    one, hand, log = (manifest(folder, 11) for folder in folders)
    assert one["files"] == hand["files"] != log["files"]
    assert losses(folders[2])[10] > 3 and losses(folders[0])[10] is None


def test_run_with_only_spikes_ends(tmp_path: Path, texts: dict[str, list[str]]) -> None:
    flags = [*texts["on"], *WATCHED, "--save", str(tmp_path), "--save-interval", "8", "--rerun-mode", "disabled"]
    flags += ["--spike-threshold", "3"]
    assert train(*flags, "--spike-action", "rollback") == ExitCode.BAD_RESULT
    assert [e["event"] for e in events(tmp_path)] == ["spike", "rollback"] * 3 + ["spike"]
    status = status_of(tmp_path)
    assert (status["outcome"], status["step"]) == ("bad-result", 13)
    assert status["reason"] == "step 13: another spike, after 3 rollbacks in a row"


def test_number_of_skipped_steps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FaultInjector({"MEGALITE_FAULT": ",".join(f"step.after_reduce:0:{n}:nan" for n in (1, 2, 4, 5, 6))})
    monkeypatch.setattr(step_module, "inject_fault", fault)
    flags = f"--train-iters 9 {SKIP} --max-skipped-steps 3 --rerun-mode disabled --run-dir {tmp_path}".split()
    assert train(*SMALL, *flags) == ExitCode.BAD_RESULT  # two in a row were not too many
    status = status_of(tmp_path)
    assert (status["outcome"], status["step"]) == ("bad-result", 6)
    assert status["reason"].startswith("max_skipped_steps=3 in a row: nothing is learned; step 6: loss ")


def test_repeated_transient_errors_end_the_run(tmp_path: Path, monkeypatch) -> None:
    fault = FaultInjector({"MEGALITE_FAULT": ",".join(f"step.after_reduce:0:{n}:nan" for n in (2, 3, 5))})
    monkeypatch.setattr(step_module, "inject_fault", fault)
    assert train(*SMALL, "--train-iters", "9", "--save", str(tmp_path)) == ExitCode.RERUN
    status = status_of(tmp_path)
    assert (status["outcome"], status["step"]) == ("rerun", 5)
    assert status["reason"] == "3 steps were right only when recomputed, the last on ranks [0]"
    assert [e["event"] for e in events(tmp_path)] == ["transient-error"] * 3
    assert manifest(tmp_path, 5)["state"]["progress"]["skipped_steps"] == 0
