"""Reports of a run besides the loss are equal under any layout: norms, counts, timers, profiles, replica checks."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import toml_tables
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_train_step import build
from torch import Tensor
from train_cases import SMALL_RUN, config_from, pretrain, run_from

from megalite.common.exit_codes import ExitCode
from megalite.config import cli
from megalite.config.options import Config, OperationsConfig, effective_log_interval, effective_log_style
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import ABSTRACT, Axis, Mesh
from megalite.pipeline.runtime import TimedAction
from megalite.training.logging.metrics_logger import ProgressLog
from megalite.training.logging.profiler import Profiler
from megalite.training.logging.step_log import parameter_norm
from megalite.training.logging.time_breakdown import PHASES, TimeBreakdown
from megalite.training.logging.timers import STEP_TIMERS, Timers
from megalite.training.replica_check import check_replicas, replica_checksums
from megalite.training.state import InvalidResultError
from megalite.training.train_step import train_step

CASES = toml_tables.read_table("training/cases")


def read(*flags: str) -> Config:
    return config_from([*SMALL_RUN, "--train-iters", "6", *flags])


# ---- style and interval of the log
STYLES = dict.fromkeys(("--use-mcore-models", "--log-throughput", "--no-load-rng", "--log-style megatron"), "megatron")
STYLES |= {"": "megalite", "--use-mcore-models --log-style megalite": "megalite"}


@pytest.mark.parametrize("flags", STYLES)
def test_log_style_follows_the_command_line(flags: str) -> None:
    """Use Megatron-LM's style if there are options that only Megatron-LM has."""
    assert effective_log_style(read(*flags.split())) == STYLES[flags]
    assert effective_log_style(Config(), megatron_spelling=True) == "megatron"


def test_default_log_interval() -> None:
    config = config_from([*SMALL_RUN[:-2], "--train-iters", "9"])
    assert config.log.log_interval is None
    assert [effective_log_interval(config, n) for n in (1, 99, 100, 2500, 10**6)] == [1, 1, 2, 50, 100]
    assert effective_log_interval(read(), 10**6) == 1  # set on the command line
    assert effective_log_interval(Config(log=config.log.__class__(log_style="megatron")), 20) == 100


# ---- protections that are requested but not available
def test_disabled_protections_are_named() -> None:
    options = ["--error-injection-rate 7", "--gpu-sniff-test-interval 5", "--inprocess-restart", "--enable-ft-package"]
    for flags in [*options, "--log-energy", "--run-workload-inspector-server", "--otel-enabled"]:
        parsed = cli.parse_config([*SMALL_RUN, "--train-iters", "6", *flags.split()], PRESETS)
        flag, [line] = flags.split()[0], parsed.warnings
        assert line.startswith(f"{flag}: ") and not any(flag in note for note in parsed.notes)
    assert cli.parse_config([*SMALL_RUN, "--train-iters", "6", "--error-injection-rate", "0"], PRESETS).warnings == []


# ---- norms and counts
def zeros_and_norms(flags: str) -> list[tuple[int | None, float]]:
    """Return zeros and norm of three steps, without biases: the gradient of a key's bias is 0 except for rounding."""
    config = read("--disable-bias-linear", "--hidden-dropout", "0", *flags.split())
    run, results = run_from(config, dtype=torch.float64), []
    for _ in range(3):
        result = train_step(run, count_zeros=True)
        results.append((result.zeros, parameter_norm(run)))
    return results


@pytest.mark.parametrize("name", CASES["counts"])
def test_norm_and_zeros_count_each_element_once(name: str) -> None:
    world, model, layout = CASES["counts"][name]
    expected = zeros_and_norms(model)
    for actual in run_ranks(world, zeros_and_norms, f"{model} {layout}"):
        assert [zeros for zeros, _ in actual] == [zeros for zeros, _ in expected]
        assert [norm for _, norm in actual] == pytest.approx([norm for _, norm in expected], rel=1e-10)
    padding = 3 * 32  # rows of the vocabulary, which is padded to 96
    for zeros, _ in expected:
        # rows of unseen tokens
        assert zeros > 2 * padding and zeros % 32 == 0 if "untie" in model else zeros == padding


def test_norm_and_zeros_equal_the_model() -> None:
    run = build("")
    counts: list[int] = []
    step_optimizer = run.optimizer.step

    def count_zeros_and_step(**options: Any) -> None:  # the gradients are complete and not released yet
        counts.append(sum(int((main_grad._main_grad == 0).sum()) for main_grad in run.sync.main_grads.values()))
        step_optimizer(**options)

    run.optimizer.step = count_zeros_and_step  # type: ignore[method-assign]
    result = train_step(run, count_zeros=True)
    weights = [p.detach().double() for stage in run.pipeline.stages for p in stage.parameters()]
    assert parameter_norm(run) == pytest.approx(sum(float(w.square().sum()) for w in weights) ** 0.5, rel=1e-6)
    assert [result.zeros] == counts and train_step(run).zeros is None


def collectives(flags: str) -> list[tuple[int, ...]]:
    """Return the shapes of the small all-reduces of a run of four steps that logs at steps 1, 2 and 4.

    The last one, the report's, is checked and left out.
    """
    os.environ["MEGALITE_SHARED_MEMORY"] = "off"
    from megalite.training.job import job as module

    shapes: list[tuple[int, ...]] = []
    real_all_reduce, steps = dist.all_reduce, module.Trainer.steps

    def all_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel() < 40:
            shapes.append(tuple(x.shape))
        return real_all_reduce(x, *args, **kwargs)

    def spied_steps(*args: Any, **kwargs: Any) -> Any:
        dist.all_reduce = all_reduce
        return steps(*args, **kwargs)

    module.Trainer.steps = spied_steps  # type: ignore[method-assign]
    argv = [*SMALL_RUN, "--train-iters", "4", "--eval-iters", "0", "--log-interval", "2", "--log-style", "megalite"]
    config = config_from([*argv, *flags.split()])
    ranks = RankInfo(dist.get_rank(), dist.get_world_size())
    module.process_group = lambda *_, **__: nullcontext(torch.device("cpu"))  # type: ignore[assignment]  # it exists already
    assert pretrain(config, ranks) == ExitCode.DONE
    assert shapes.pop() == (len(PHASES),)
    return shapes


@pytest.mark.parametrize("flags", CASES["messages"])
def test_logging_adds_no_collectives_by_default(tmp_path: Path, flags: str) -> None:
    for shapes in run_ranks(2, collectives, f"{flags} --run-dir {tmp_path}"):
        assert shapes == [tuple(shape) for shape in CASES["messages"][flags]]


# ---- timers
def test_timers_accumulate_and_reset() -> None:
    timers = Timers(2)
    for _ in range(2):
        with timers("forward-backward", 1), timers("batch-generator", 2):
            pass
    timers.add_spans(
        [
            TimedAction("F0.0", 0.0, 1.5),
            TimedAction("RECV_F1.0", 1.5, 9.0),
            TimedAction("B0.0", 9.0, 9.5),
            TimedAction("F0.1", 10, 11),
        ]
    )
    times = timers.reduce_and_reset(timers.step_names, steps=2)
    assert times["forward-compute"] == [1.25] and times["backward-compute"] == [0.25] and times["optimizer"] == [0.0]
    assert 0 < times["batch-generator"][0] <= times["forward-backward"][0] < 1
    assert set(timers.reduce_and_reset(timers.step_names)["forward-backward"]) == {0.0}
    level_0 = Timers(0)
    with level_0("forward-backward", 1), level_0("evaluate", 0):
        pass
    assert (
        level_0.step_names == ()
        and level_0.reduce_and_reset(("evaluate",))["evaluate"][0] > 0
        and not level_0.reduce_and_reset(STEP_TIMERS)["optimizer"][0]
    )
    assert Timers().reduce_and_reset(("evaluate",)) == {}


# ---- replicas of weights
def flip_and_check(flags: str, flipped_rank: int, name: str, action: str = "stop") -> str:
    """Flip a bit of a parameter on one rank after the first step and return the message of the check on this rank."""
    run = build(flags)
    train_step(run)
    assert check_replicas(run, 1, action) is None
    weights = {
        name: bucket.resident_slice(slot)[1]
        for bucket in run.sync.param_buckets
        for name, slot in zip(bucket.names, bucket.layout.slots, strict=True)
    }
    intact = torch.cat([*weights.values()])
    if name == "state":
        run.optimizer.num_updates += dist.get_rank() == flipped_rank
    elif dist.get_rank() == flipped_rank:
        biases = {f"{router.name}.bias": router.expert_bias for router in run.expert_balancer.routers}
        weight = biases[name] if name in biases else weights[name]
        weight[:1].view(torch.uint8)[:1].bitwise_xor_(1)
    try:
        mismatch = check_replicas(run, 2, action) or ""
        assert action == "warn" or (
            torch.equal(torch.cat([*weights.values()]), intact) and check_replicas(run, 2) is None
        )
        return mismatch
    except InvalidResultError as error:
        return f"stopped: {error}"


@pytest.mark.parametrize("name", CASES["bits"])
def test_flipped_bit_is_detected_and_named(name: str) -> None:
    world, flags, parameter, action, text = CASES["bits"][name]
    messages = run_ranks(world, flip_and_check, flags, 1, parameter, action)
    assert len(set(messages)) == 1 and text in messages[0]  # the same on all ranks
    stops = action == "stop" or "still" in text or parameter == "state"
    assert messages[0].startswith(f"{'stopped: ' * stops}step 2: replicas of the weights differ: ")


def flip_between_checks(flags: str, action: str, flipped_rank: int | None, part: str = "copy") -> tuple[str, Tensor]:
    """Train three steps without a periodic check, and flip a bit of a rank after the first one.

    The bit is in the rank's copy of the weights that rank 0 owns, or in its main weights (`part`).

    Returns: the message of the next step, and the main weights at the end.
    """
    run = build(f"{flags} --check-weight-hash-across-dp-replicas-interval 100 --check-replicas-action {action}")
    assert train_step(run).replica_mismatch is None
    run.sync.wait_param_sync()
    if run.mesh.world.rank == flipped_rank:
        first = run.optimizer.buckets[0]
        owned = first.layout.shard_range(run.mesh.dp_cp.size, 0)
        copy = first.params.full[: owned.stop] if first.params.is_resident else first.params.shard
        flat = copy if part == "copy" else first.main
        index = int(flat.abs().argmax())
        flat[index : index + 1].view(torch.uint8)[-1:].bitwise_xor_(1)  # in its exponent
    before = torch.cat([bucket.main for bucket in run.optimizer.buckets])
    try:
        mismatches = [train_step(run).replica_mismatch or "" for _ in range(2)]
        assert action == "warn" or not mismatches[1]
        return mismatches[0], torch.cat([bucket.main for bucket in run.optimizer.buckets])
    except InvalidResultError as error:
        assert torch.equal(torch.cat([bucket.main for bucket in run.optimizer.buckets]), before)  # nothing was updated
        return f"stopped: {error}", before


@pytest.mark.parametrize("name", CASES["between"])
def test_flipped_bit_between_checks_reaches_no_main_weight(name: str) -> None:
    """Compare with a run without the flip: a repaired run continues with the same bits."""
    world, flags, action, flipped_rank, part, text = CASES["between"][name]
    results = run_ranks(world, flip_between_checks, flags, action, flipped_rank, part)
    assert len({message for message, _ in results}) == 1 and text in results[0][0], results[0][0]
    start = "stopped: " * (action == "stop") + "step 2, before its update: replicas of the weights differ: "
    assert results[0][0].startswith(start)
    if action == "stop":
        return
    twins = run_ranks(world, flip_between_checks, flags, action, None)
    equal = [torch.equal(actual, expected) for (_, actual), (_, expected) in zip(results, twins, strict=True)]
    assert all(equal) == (action == "repair")


def test_checksums_detect_every_bit() -> None:
    experts = CASES["bits"]["a router's bias"][1].replace("--ep 2", "")  # an expert under ep 2 has no copy
    assert all(run_ranks(4, detects_every_bit, "--bf16 --pipeline-model-parallel-size 2"))
    assert all(run_ranks(2, detects_every_bit, experts))


def detects_every_bit(flags: str) -> bool:
    """Return whether the checksums agree, and differ after each of 40 flips of a bit in a weight of a rank."""
    run = build(flags)
    biases = [bias.data for bias in run.expert_balancer.state_shards()]
    weights = [flat.view(torch.uint8) for flat in (*(bucket.full for bucket in run.sync.param_buckets), *biases)]
    detected = [bool(all_reduce_(replica_checksums(run), run.mesh.world).any())]
    for i in range(40):
        flat = weights[i % len(weights)]
        position = (i * 7919 * 8) % (8 * flat.numel())
        bit = i % dist.get_world_size() == dist.get_rank()
        flat[position // 8] ^= bit << (i % 8)
        detected.append(bool(all_reduce_(replica_checksums(run), run.mesh.world).any()))
        flat[position // 8] ^= bit << (i % 8)
    return detected == [False] + [True] * 40


# ---- the collector and profilers
def test_gpu_only_profiles_are_a_warning_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options, mesh = OperationsConfig(profile=True, record_memory_history=True), Mesh.single_process()
    Profiler(options, mesh, tmp_path, TimeBreakdown(mesh, 0.0)).before(11)
    err = capsys.readouterr().err
    assert "WARNING: profile does nothing on a CPU; add --use-pytorch-profiler" in err
    assert "WARNING: record_memory_history needs CUDA; nothing is recorded" in err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_history_and_nsys_on_a_gpu(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    options = OperationsConfig(profile=True, record_memory_history=True, memory_snapshot_path=str(snapshot))
    mesh = Mesh(world=Axis("world", 4, 3, ABSTRACT), device=torch.device("cuda"))
    profiler = Profiler(options, mesh, tmp_path, TimeBreakdown(mesh, 0.0))
    profiler.before(11)
    torch.zeros(1000, device="cuda")
    profiler.write_memory_snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    assert (tmp_path / "snapshot_3.pickle").stat().st_size > 0


# ---- progress.txt and memory
def test_progress_log_continues_over_jobs(tmp_path: Path) -> None:
    first = ProgressLog(tmp_path, 4, 6e9, 0)
    first.log_start()
    first.log_save(10, 1_000_000_000, background=False)
    other = ProgressLog(tmp_path, 2, 6e9, 1_000_000_000)  # on fewer devices
    other.log_start()
    other._start -= 100.0
    text = other.path.read_text().splitlines()
    stamp = text[2][:19]
    other.path.write_text("\n".join([*text, "torn by a cra"]) + "\n")
    other.log_save(20, 2_000_000_000, background=True)
    other.log_save(30, 3_000_000_000, background=True)
    other.log_saves_done()
    other.log_saves_done()
    rows = [line.split("\t") for line in other.path.read_text().splitlines() if "torn" not in line]
    async_saves = ["Saving async checkpoint", "Saved async checkpoint"] * 2
    assert [row[3] for row in rows] == ["Starting job", "Saved checkpoint", "Starting job", *async_saves]
    assert rows[1][1:3] == ["Job ID: " + os.environ.get("SLURM_JOB_ID", ""), "# GPUs: 4"]
    assert rows[3][4] == "Iteration: 20" and rows[3][5].startswith("Job throughput: ")
    assert float(rows[3][5].split()[2]) == pytest.approx(30000, rel=0.05)  # 6e18 FLOPs, 2 devices, 100 s
    assert rows[3][7:] == ["Floating-point operations: 1.20e+19", "Tokens (in billions): 2.00"]
    assert rows[4][4] == "Iteration: 20" and stamp == rows[2][0]
    start, flops = other._first_job()
    # the first job on two devices, and the FLOPs before it
    assert (f"{start:%Y-%m-%d %H:%M:%S}", flops) == (stamp, 6e18)


# ---- complete runs
def test_long_evaluation_shows_progress(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from megalite.training.logging import metrics_logger as metrics

    flags = ("--run-dir", str(tmp_path), "--eval-iters", "3", "--train-iters", "1")
    assert pretrain(read(*flags), RankInfo()) == ExitCode.DONE
    assert "evaluating" not in capsys.readouterr().out  # it is short
    monkeypatch.setattr(metrics, "FIRST_PROGRESS_S", -1.0)
    monkeypatch.setattr(metrics, "PROGRESS_S", -1.0)
    assert pretrain(read(*flags), RankInfo()) == ExitCode.DONE
    output = capsys.readouterr().out
    assert output.count("step     1  evaluating: 1 of 3 batches") == output.count("evaluating: 2 of 3 batches") == 2
    assert "3 of 3" not in output


def test_last_step_is_logged(tmp_path: Path) -> None:
    for name, flags, steps in (
        ("end", "--log-interval 4", [1, 4, 6]),
        ("stop", "--log-interval 4 --exit-interval 5", [1, 4, 5]),
        ("long", "--log-interval 100", [1, 6]),
    ):
        pretrain(read(*flags.split(), "--run-dir", str(tmp_path / name)), RankInfo())
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows if "train/loss" in r] == steps
