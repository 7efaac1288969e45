"""Anomalies: the origin of a NaN, spikes, recomputed steps, rollbacks, with the same decision on all ranks."""

import json
import math
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from program_runs import load_json_lines, load_losses, load_status, run_pretrain
from ranks import run_ranks
from test_train_step import BATCH, build
from token_files import write_documents
from train_cases import SMALL_RUN, config_from, copy_state, pretrain

from megalite.common.exit_codes import ExitCode
from megalite.common.fault_injection import FaultInjector
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.launch.rank_info import RankInfo
from megalite.pipeline import runtime as pipeline_module
from megalite.training import train_step as step_module
from megalite.training.monitoring import rerun
from megalite.training.monitoring.spike_detector import SpikeDetector
from megalite.training.state import InvalidResultError
from megalite.training.train_step import train_step

SKIP = "--no-check-for-nan-in-loss-and-grad"


def inject(*faults: str) -> None:
    """Replace the faults of this process."""
    step_module.inject_fault = FaultInjector({"MEGALITE_FAULT": ",".join(faults)})  # type: ignore[attr-defined]


# ---- a number that is not finite
def _nan_message(flags: str, direction: str, bad_rank: int) -> str:
    """Produce a NaN on one rank in each computation of a step, and return the error message of this rank."""
    run = build(flags)
    train_step(run)
    run.sync.wait_param_sync()
    last_block: Any = run.pipeline.stages[-1].blocks[-1]
    if dist.get_rank() == bad_rank and direction == "forward":
        last_block.mlp.up.data.view(-1)[5] = math.nan
    elif dist.get_rank() == bad_rank and direction == "forward, norm after the MLP":
        last_block.mlp_post_norm.weight.data[5] = math.nan
    elif dist.get_rank() == bad_rank:
        block = run.pipeline.stages[0].blocks[1]  # type: ignore[index]
        block.register_full_backward_hook(lambda module, grads, grad: (grads[0] * math.nan, *grads[1:]))
    before = copy_state(run)
    with pytest.raises(InvalidResultError) as error:
        train_step(run)
    pairs = zip(copy_state(run).values(), before.values(), strict=True)
    assert run.progress.step == 1 and all(torch.equal(a, b) or a.isnan().any() for a, b in pairs)
    return str(error.value)


PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
MLP, DOWN, ZERO3 = "the output of layers.1.mlp (nan) on", "the gradient of layers.0.mlp.down", "--zero-stage 3"
ORIGINS = {
    "forward, last stage": (2, PP2, ("forward", 1), f"{MLP} rank 1 (pp 1), samples 4..5"),
    "forward, half of a layer": (2, TP2, ("forward", 1), f"{MLP} rank 0 (tp 0), samples 4..5, and on ranks [1]"),
    "forward, one replica": (2, "", ("forward", 1), f"{MLP} rank 1 (dp 1), samples 6..7"),
    "norm after the MLP": (
        *(2, "--sandwich-norm", ("forward, norm after the MLP", 1)),
        "the output of layers.1.mlp.post_norm (nan) on rank 1 (dp 1), samples 6..7",
    ),
    "backward, one replica": (2, "", ("backward", 1), f"{DOWN}_bias (nan) on rank 1 (dp 1);"),
    "backward, ZeRO-3": (2, f"{ZERO3} --disable-bias-linear", ("backward", 1), f"{DOWN} (nan) on rank 1 (dp 1);"),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_origin_of_a_nan_is_named(name: str) -> None:
    world, flags, (direction, rank), origin = ORIGINS[name]
    messages = run_ranks(world, _nan_message, flags, direction, rank)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 2: loss ") and f"first seen in {origin}" in messages[0]
    assert f" at samples {BATCH}..{2 * BATCH - 1}; nothing was updated" in messages[0]
    assert "recomputed, it is the same: the data or the numbers, not the machine" in messages[0]


def _nan_message_with_long_paths() -> str:
    with mock.patch.object(rerun, "format_samples", lambda run, ids: "sample 4 (" + "/päth" * 2000 + ")"):
        return _nan_message("", "forward", 1)


def test_origin_with_long_data_paths_is_named() -> None:
    messages = run_ranks(2, _nan_message_with_long_paths)
    assert len(set(messages)) == 1 and "first seen in the output of layers.1.mlp (nan) on rank 1" in messages[0]


# ---- recomputed steps
def _train_with_faults(flags: str, *faults: str) -> list[Any]:
    run = build(flags)
    inject(*faults)
    results = [train_step(run) for _ in range(3)]
    weights = torch.cat([bucket.main.double() for bucket in run.optimizer.buckets])
    return [[r.loss for r in results], [r.anomaly for r in results], weights]


@pytest.mark.parametrize("flags", ["", "--zero-stage 2 --global-batch-size 8", "--zero-stage 3"])
def test_transient_error_is_distinguished_from_bad_data(flags: str) -> None:
    expected, expected_anomalies, weights = zip(*run_ranks(2, _train_with_faults, flags), strict=True)
    assert not any(any(anomalies) for anomalies in expected_anomalies)
    faults = ("step.after_reduce:1:2:nan", "step.after_reduce:0:3:inf")
    for rank, (actual, anomalies, actual_weights) in enumerate(run_ranks(2, _train_with_faults, flags, *faults)):
        assert actual == expected[rank] and torch.equal(actual_weights, weights[rank])
        assert anomalies[0] is None
        assert [(a.transient, a.differing_ranks) for a in anomalies[1:]] == [(True, (1,)), (True, (0,))]
        assert "recomputed, it is right" in str(anomalies[1]) and "of ranks [1]" in str(anomalies[1])


def test_report_stats_reruns_every_step() -> None:
    expected, _, weights = _train_with_faults("")
    actual, anomalies, actual_weights = _train_with_faults(
        "--rerun-mode report_determinism_stats", "step.after_reduce:0:2:bitflip"
    )
    assert actual == expected and torch.equal(actual_weights, weights)
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


def _longest_pass_s(flags: str) -> float:
    """Return the duration of the longest pass on this rank while rank 0 sends every message late."""
    run = build(flags)
    pipeline_module.inject_fault = FaultInjector({"MEGALITE_FAULT": "pipeline.message:0:*:sleep=1"})  # type: ignore[attr-defined]
    run.pipeline.timeline = []
    train_step(run)
    return max(timed.end_s - timed.start_s for timed in run.pipeline.timeline if timed.action[0] in "FB")


def test_timeline_excludes_message_waits() -> None:
    assert max(run_ranks(2, _longest_pass_s, "--pipeline-model-parallel-size 2")) < 0.5


# ---- spikes
def spikes_at(values: list[float], window: int = 40) -> list[int]:
    """Return the indices of the losses that are detected as spikes, if spikes are skipped."""
    detector, steps = SpikeDetector(("loss",), "skip", 10.0, window), []
    for i, value in enumerate(values):
        spike = detector.detect(value, math.inf)  # the norm is not checked
        detector.record(value, math.inf, skipped=spike is not None)
        steps += [i] if spike else []
        detector.from_json(json.loads(json.dumps(detector.to_json())))  # as at a restart
    return steps


def test_spike_is_far_above_previous_steps() -> None:
    noise = random.Random(3)
    falling = [2 + 8 * 0.97**i + noise.gauss(0, 0.05) for i in range(300)]
    assert spikes_at(falling) == []
    assert spikes_at([*falling[:200], 5.0, *falling[200:], 9.0]) == [200, 301]
    assert spikes_at([2.0] * 50 + [2.1] * 5) == []  # a flat curve: 5 % are no spike
    assert spikes_at([2.0] * 9 + [50.0]) == [] and spikes_at([2.0] * 10 + [50.0]) == [10]  # a quarter of the window
    assert spikes_at([*falling, -5.0, 0.0]) == []
    assert spikes_at([2.0] * 20 + [50.0] * 30) == list(range(20, 50))  # spikes do not raise the reference


def test_damaged_spike_state_is_refused() -> None:
    for state in ({}, *({"rollbacks": 0, "quiet": 0, "seen": history} for history in ({"loss": [math.nan]}, []))):
        with pytest.raises((KeyError, ValueError, AttributeError)):
            SpikeDetector().from_json(state)


# ---- complete runs, on text with one batch of noise
STEPS, POISONED = 13, 10  # the samples of this step
SPIKE_FLAGS = "--check-for-spiky-loss --check-for-large-grads --spike-window 16".split()


def write_text(prefix: Path, noisy: set[int]) -> None:
    """Write documents of one sample each, identical except for those in `noisy`."""
    noise, count = np.random.default_rng(0), 8 * (STEPS + 2)
    write_documents(prefix, [noise.integers(10, 93, 16).tolist() if n in noisy else [5] * 16 for n in range(count)])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the flags of a run whose data is noise in a single step ("once"), or from there on ("on")."""
    directory, flags_of = tmp_path_factory.mktemp("data"), {}
    write_text(directory / "clean", set())
    order = GPTDataset(IndexedDataset(directory / "clean"), range(8 * (STEPS + 2)), 16, seed=5)
    for name, end in (("once", POISONED), ("on", STEPS + 1)):
        locations = [order.locate(i, 0) for i in range(8 * (POISONED - 1), 8 * end)]
        write_text(directory / name, {int(location.split()[2].rstrip(",")) for location in locations})
        flags = [flag for flag in SMALL_RUN if flag != "--mock-data"]
        data_flags = f"--split 1,0,0 --eval-iters 0 --seed 5 --lr-decay-style constant --lr 0.02 --train-iters {STEPS}"
        flags_of[name] = [*flags, "--data-path", str(directory / name), *data_flags.split()]
    return flags_of


def train(*flags: str) -> int:
    """Train on one rank in this process."""
    return pretrain(config_from(list(flags)), RankInfo())


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of anomalous steps."""
    return [
        row
        for row in load_json_lines(run_dir / "events.jsonl")
        if row["event"] in ("spike", "rollback", "transient-error", "non-finite")
    ]


def manifest(save_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((save_dir / f"iter_{step:07d}/manifest.json").read_text())


def test_spike_rollback_skips_its_samples(tmp_path: Path, texts: dict[str, list[str]]) -> None:
    """Compare with a run that is stopped by hand and resumed with --iterations-to-skip."""
    flags = [*texts["once"], "--save-interval", "8"]
    automatic, by_hand = tmp_path / "one", tmp_path / "hand"
    assert train(*flags, *SPIKE_FLAGS, "--spike-action", "rollback", "--save", str(automatic)) == ExitCode.DONE
    spike, rollback = events(automatic)
    assert (spike["event"], rollback["event"], spike["step"], rollback["step"]) == ("spike", "rollback", 10, 10)
    assert spike["samples"] == [72, 79] and rollback["samples"] == [64, 79] and rollback["checkpoint"] == 8
    assert len(spike["documents"]) == 8 and len(rollback["documents"]) == 16
    assert set(spike["documents"]) < set(rollback["documents"]) and "recomputed, it is the same" in spike["text"]
    state = manifest(automatic, 10)["state"]  # skipped samples are saved for later resumes
    progress = dict(step=10, consumed_samples=80, consumed_tokens=1280, skipped_steps=2, skipped_samples=16)
    assert state["progress"] == progress
    assert state["spikes"]["rollbacks"] == 1 and len(state["spikes"]["seen"]["loss"]) == 8
    assert train(*flags, "--save", str(by_hand), "--exit-interval", "8") == ExitCode.REQUEUE
    skip = ["--iterations-to-skip", "9", "10"]
    assert train(*flags, "--save", str(by_hand), "--load", str(by_hand), *skip) == ExitCode.DONE
    actual, expected = load_losses(automatic), load_losses(by_hand)
    assert [actual[step] for step in (11, 12, 13)] == [expected[step] for step in (11, 12, 13)]
    assert manifest(automatic, 13)["files"] == manifest(by_hand, 13)["files"]  # sha256 of weights and optimizer


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [TP2, f"{PP2} --split-backward"])
def test_rollback_is_collective(tmp_path: Path, texts: dict[str, list[str]], layout: str) -> None:
    flags = f"--nproc 2 {layout} --save-interval 8 --spike-action rollback".split()
    run_pretrain(*texts["once"], *SPIKE_FLAGS, *flags, "--save", str(tmp_path), check=True)
    spike, rollback = events(tmp_path)
    assert (spike["samples"], rollback["samples"]) == ([72, 79], [64, 79])
    assert "recomputed, it is the same" in spike["text"]


def test_spike_is_logged_or_skipped(tmp_path: Path, texts: dict[str, list[str]]) -> None:
    run_dirs = [tmp_path / name for name in ("skip", "hand", "log")]
    skip, hand = [*SPIKE_FLAGS, "--spike-action", "skip"], ["--iterations-to-skip", "10"]
    flag_lists = [skip, hand, [*SPIKE_FLAGS, "--rerun-mode", "disabled"]]
    for run_dir, flags in zip(run_dirs, flag_lists, strict=True):
        assert train(*texts["once"], "--train-iters", "11", *flags, "--save", str(run_dir)) == ExitCode.DONE
    [skipped], [logged] = events(run_dirs[0]), events(run_dirs[2])
    assert (skipped["done"], logged["done"]) == ("skipped", "updated")
    assert "deviations above" in logged["text"] and "computed again" not in logged["text"]
    skip_manifest, hand_manifest, log_manifest = (manifest(run_dir, 11) for run_dir in run_dirs)
    assert skip_manifest["files"] == hand_manifest["files"] != log_manifest["files"]
    assert load_losses(run_dirs[2])[10] > 3 and load_losses(run_dirs[0])[10] is None


def test_run_with_only_spikes_ends(tmp_path: Path, texts: dict[str, list[str]]) -> None:
    flags = [*texts["on"], *SPIKE_FLAGS, "--save", str(tmp_path), "--save-interval", "8", "--rerun-mode", "disabled"]
    flags += ["--spike-threshold", "3"]
    assert train(*flags, "--spike-action", "rollback") == ExitCode.BAD_RESULT
    assert [e["event"] for e in events(tmp_path)] == ["spike", "rollback"] * 3 + ["spike"]
    status = load_status(tmp_path)
    assert (status["outcome"], status["step"]) == ("bad-result", 13)
    assert status["reason"] == "step 13: another spike, after 3 rollbacks in a row"


def test_number_of_skipped_steps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FaultInjector({"MEGALITE_FAULT": ",".join(f"step.after_reduce:0:{n}:nan" for n in (1, 2, 4, 5, 6))})
    monkeypatch.setattr(step_module, "inject_fault", fault)
    flags = f"--train-iters 9 {SKIP} --max-skipped-steps 3 --rerun-mode disabled --run-dir {tmp_path}".split()
    assert train(*SMALL_RUN, *flags) == ExitCode.BAD_RESULT  # two in a row were not too many
    status = load_status(tmp_path)
    assert (status["outcome"], status["step"]) == ("bad-result", 6)
    assert status["reason"].startswith("max_skipped_steps=3 in a row: nothing is learned; step 6: loss ")


def test_repeated_transient_errors_end_the_run(tmp_path: Path, monkeypatch) -> None:
    fault = FaultInjector({"MEGALITE_FAULT": ",".join(f"step.after_reduce:0:{n}:nan" for n in (2, 3, 5))})
    monkeypatch.setattr(step_module, "inject_fault", fault)
    assert train(*SMALL_RUN, "--train-iters", "9", "--save", str(tmp_path)) == ExitCode.RERUN
    status = load_status(tmp_path)
    assert (status["outcome"], status["step"]) == ("rerun", 5)
    assert status["reason"] == "3 steps were right only when recomputed, the last on ranks [0]"
    assert [e["event"] for e in events(tmp_path)] == ["transient-error"] * 3
    assert manifest(tmp_path, 5)["state"]["progress"]["skipped_steps"] == 0
