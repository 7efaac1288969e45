"""What is asked of a run besides training: norms, counts, timers, profiles, checks of copies; the same on any layout."""

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
from train_cases import SMALL, config_from, pretrain, run_from

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
from megalite.training.logging.time_breakdown import PHASES
from megalite.training.logging.timers import STEP_TIMERS, Timers
from megalite.training.replica_check import check_replicas, replica_checksums
from megalite.training.state import InvalidResultError
from megalite.training.train_step import parameter_norm, train_step

CASES = toml_tables.read("training/cases")


def read(*flags: str) -> Config:
    return config_from([*SMALL, "--train-iters", "6", *flags])


# ---- the form of the log, and how often
STYLES = dict.fromkeys(("--use-mcore-models", "--log-throughput", "--no-load-rng", "--log-style megatron"), "megatron")
STYLES |= {"": "megalite", "--use-mcore-models --log-style megalite": "megalite"}


@pytest.mark.parametrize("flags", STYLES)
def test_log_style_follows_the_command_line(flags: str) -> None:
    """Options that only Megatron-LM has make it Megatron-LM's."""
    assert effective_log_style(read(*flags.split())) == STYLES[flags]
    assert effective_log_style(Config(), megatron_spelling=True) == "megatron"


def test_default_log_interval() -> None:
    config = config_from([*SMALL[:-2], "--train-iters", "9"])
    assert config.log.log_interval is None
    assert [effective_log_interval(config, n) for n in (1, 99, 100, 2500, 10**6)] == [1, 1, 2, 50, 100]
    assert effective_log_interval(read(), 10**6) == 1  # which is given
    assert effective_log_interval(Config(log=config.log.__class__(log_style="megatron")), 20) == 100


# ---- protections that are asked for and not there
def test_disabled_protections_are_named() -> None:
    asked = ["--error-injection-rate 7", "--gpu-sniff-test-interval 5", "--inprocess-restart", "--enable-ft-package"]
    for words in [*asked, "--log-energy", "--run-workload-inspector-server", "--otel-enabled"]:
        found = cli.parse_config([*SMALL, "--train-iters", "6", *words.split()], PRESETS)
        flag, [line] = words.split()[0], found.warnings
        assert line.startswith(f"{flag}: ") and not any(flag in note for note in found.notes)
    assert cli.parse_config([*SMALL, "--train-iters", "6", "--error-injection-rate", "0"], PRESETS).warnings == []


# ---- norms and counts
def told(flags: str) -> list[tuple[int | None, float]]:
    """Zeros and norm of three steps; without biases, as a key's has gradients that are 0 but for rounding."""
    config = read("--disable-bias-linear", "--hidden-dropout", "0", *flags.split())
    run, seen = run_from(config, dtype=torch.float64), []
    for _ in range(3):
        result = train_step(run, count_zeros=True)
        seen.append((result.zeros, parameter_norm(run)))
    return seen


@pytest.mark.parametrize("name", CASES["counts"])
def test_norm_and_zeros_count_each_element_once(name: str) -> None:
    world, model, layout = CASES["counts"][name]
    alone = told(model)
    for seen in run_ranks(world, told, f"{model} {layout}"):
        assert [zeros for zeros, _ in seen] == [zeros for zeros, _ in alone]
        assert [norm for _, norm in seen] == pytest.approx([norm for _, norm in alone], rel=1e-10)
    padding = 3 * 32  # rows of the vocabulary, which is padded to 96
    for zeros, _ in alone:
        # rows of unseen tokens
        assert zeros > 2 * padding and zeros % 32 == 0 if "untie" in model else zeros == padding


def test_norm_and_zeros_equal_the_model() -> None:
    run = build("")
    counts: list[int] = []
    real = run.optimizer.step

    def look(**options: Any) -> None:  # when the gradients are complete and not used up
        counts.append(sum(int((main_grad._main_grad == 0).sum()) for main_grad in run.buffer.main_grads.values()))
        real(**options)

    run.optimizer.step = look  # type: ignore[method-assign]
    result = train_step(run, count_zeros=True)
    weights = [p.detach().double() for stage in run.pipeline.stages for p in stage.parameters()]
    assert parameter_norm(run) == pytest.approx(sum(float(w.square().sum()) for w in weights) ** 0.5, rel=1e-6)
    assert [result.zeros] == counts and train_step(run).zeros is None


def collectives(flags: str) -> list[tuple[int, ...]]:
    """Shapes of the small all-reduces that a run of four steps makes while it trains, logging at 1, 2 and 4; the last
    is the report's."""
    os.environ["MEGALITE_SHARED_MEMORY"] = "off"
    from megalite.training.job import job as module

    shapes: list[tuple[int, ...]] = []
    real, steps = dist.all_reduce, module.Trainer.steps

    def all_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel() < 40:
            shapes.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    def spied(*args: Any, **kwargs: Any) -> Any:
        dist.all_reduce = all_reduce
        return steps(*args, **kwargs)

    module.Trainer.steps = spied  # type: ignore[method-assign]
    words = [*SMALL, "--train-iters", "4", "--eval-iters", "0", "--log-interval", "2", "--log-style", "megalite"]
    config = config_from([*words, *flags.split()])
    ranks = RankInfo(dist.get_rank(), dist.get_world_size())
    module.process_group = lambda *_, **__: nullcontext(torch.device("cpu"))  # type: ignore[assignment]  # it is there
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
    seen = timers.reduce_and_reset(timers.step_names, steps=2)
    assert seen["forward-compute"] == [1.25] and seen["backward-compute"] == [0.25] and seen["optimizer"] == [0.0]
    assert 0 < seen["batch-generator"][0] <= seen["forward-backward"][0] < 1
    assert set(timers.reduce_and_reset(timers.step_names)["forward-backward"]) == {0.0}
    low = Timers(0)
    with low("forward-backward", 1), low("evaluate", 0):
        pass
    assert (
        low.step_names == ()
        and low.reduce_and_reset(("evaluate",))["evaluate"][0] > 0
        and not low.reduce_and_reset(STEP_TIMERS)["optimizer"][0]
    )
    assert Timers().reduce_and_reset(("evaluate",)) == {}


# ---- copies of weights
def flipped(flags: str, where: int, name: str, action: str = "stop") -> str:
    """One bit of a parameter of one rank is turned after the first step; what the check says on this rank."""
    run = build(flags)
    train_step(run)
    assert check_replicas(run, 1, action) is None
    weights = run.buffer.weights
    slots = {run.buffer.layout.entries[s.entry].spec.name: s for b in run.buffer.layout.buckets for s in b.slots}
    good = torch.cat([weights.resident_slice(slot)[1] for slot in slots.values()])
    if name == "state":
        run.optimizer.num_updates += dist.get_rank() == where
    elif dist.get_rank() == where:
        biases = {f"{router.name}.bias": router.expert_bias for router in run.expert_balancer.routers}
        turned = biases[name] if name in biases else weights.resident_slice(slots[name])[1]
        turned[:1].view(torch.uint8)[:1].bitwise_xor_(1)
    try:
        told = check_replicas(run, 2, action) or ""
        assert action == "warn" or (
            torch.equal(torch.cat([weights.resident_slice(slot)[1] for slot in slots.values()]), good)
            and check_replicas(run, 2) is None
        )
        return told
    except InvalidResultError as error:
        return f"stopped: {error}"


@pytest.mark.parametrize("name", CASES["bits"])
def test_flipped_bit_is_detected_and_named(name: str) -> None:
    world, flags, parameter, action, words = CASES["bits"][name]
    told = run_ranks(world, flipped, flags, 1, parameter, action)
    assert len(set(told)) == 1 and words in told[0]  # all ranks know, and do the same
    stopped = action == "stop" or "still" in words or parameter == "state"
    assert told[0].startswith(f"{'stopped: ' * stopped}step 2: replicas of the weights differ: ")


def flipped_between(flags: str, action: str, where: int | None, part: str = "copy") -> tuple[str, Tensor]:
    """Three steps, none of which is a check's; after the first a bit of rank `where` is turned, in its copy of what the
    first rank owns or in its main weights. What was told, and the main weights afterwards."""
    run = build(f"{flags} --check-weight-hash-across-dp-replicas-interval 100 --check-replicas-action {action}")
    assert train_step(run).replica_mismatch is None
    run.buffer.wait_param_sync()
    if run.mesh.world.rank == where:
        first = run.buffer.layout.buckets[0]
        owned = first.shard_range(run.mesh.dp_cp.size, 0)
        weights = run.buffer.weights
        copy = weights.full(first)[: owned.stop] if weights.is_resident(first) else weights.shard(first)
        flat = copy if part == "copy" else run.optimizer.main[0]
        at = int(flat.abs().argmax())
        flat[at : at + 1].view(torch.uint8)[-1:].bitwise_xor_(1)  # of its exponent
    before = torch.cat(run.optimizer.main)
    try:
        told = [train_step(run).replica_mismatch or "" for _ in range(2)]
        assert action == "warn" or not told[1]
        return told[0], torch.cat(run.optimizer.main)
    except InvalidResultError as error:
        assert torch.equal(torch.cat(run.optimizer.main), before)  # nothing was updated
        return f"stopped: {error}", before


@pytest.mark.parametrize("name", CASES["between"])
def test_flipped_bit_between_checks_reaches_no_main_weight(name: str) -> None:
    """Healed, the run goes on to the bits that it has without it."""
    world, flags, action, where, part, words = CASES["between"][name]
    told = run_ranks(world, flipped_between, flags, action, where, part)
    assert len({words for words, _ in told}) == 1 and words in told[0][0], told[0][0]
    begin = "stopped: " * (action == "stop") + "step 2, before its update: replicas of the weights differ: "
    assert told[0][0].startswith(begin)
    if action == "stop":
        return
    twins = run_ranks(world, flipped_between, flags, action, None)
    alike = [torch.equal(mine, wanted) for (_, mine), (_, wanted) in zip(told, twins, strict=True)]
    assert all(alike) == (action == "repair")


def test_checksums_detect_every_bit() -> None:
    experts = CASES["bits"]["a router's bias"][1].replace("--ep 2", "")  # an expert under ep 2 has no copy
    assert all(run_ranks(4, unseen, "--bf16 --pipeline-model-parallel-size 2") + run_ranks(2, unseen, experts))


def unseen(flags: str) -> bool:
    """Whether `disagreement` is zero as it is, and never with a bit of a weight turned on any rank."""
    run = build(flags)
    biases = [bias.data for bias in run.expert_balancer.state_shards()]
    weights = [flat.view(torch.uint8) for flat in (*run.buffer.weights.tensors, *biases)]
    seen = [bool(all_reduce_(replica_checksums(run), run.mesh.world).any())]
    for turn in range(40):
        flat = weights[turn % len(weights)]
        place = (turn * 7919 * 8) % (8 * flat.numel())
        mine = turn % dist.get_world_size() == dist.get_rank()
        flat[place // 8] ^= mine << (turn % 8)
        seen.append(bool(all_reduce_(replica_checksums(run), run.mesh.world).any()))
        flat[place // 8] ^= mine << (turn % 8)
    return seen == [False] + [True] * 40


# ---- the collector and profilers
def test_gpu_only_profiles_are_a_warning_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Profiler(OperationsConfig(profile=True, record_memory_history=True), Mesh.single_process(), tmp_path).before(11)
    err = capsys.readouterr().err
    assert "WARNING: profile does nothing on a CPU; add --use-pytorch-profiler" in err
    assert "WARNING: record_memory_history needs CUDA; nothing is recorded" in err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_history_and_nsys_on_a_gpu(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    options = OperationsConfig(profile=True, record_memory_history=True, memory_snapshot_path=str(snapshot))
    mesh = Mesh(world=Axis("world", 4, 3, ABSTRACT), device=torch.device("cuda"))
    profiler = Profiler(options, mesh, tmp_path)
    profiler.before(11)
    torch.zeros(1000, device="cuda")
    profiler.after(12, True)
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
    twice = ["Saving async checkpoint", "Saved async checkpoint"] * 2
    assert [row[3] for row in rows] == ["Starting job", "Saved checkpoint", "Starting job", *twice]
    assert rows[1][1:3] == ["Job ID: " + os.environ.get("SLURM_JOB_ID", ""), "# GPUs: 4"]
    assert rows[3][4] == "Iteration: 20" and rows[3][5].startswith("Job throughput: ")
    assert float(rows[3][5].split()[2]) == pytest.approx(30000, rel=0.05)  # 6e18 FLOPs, 2 devices, 100 s
    assert rows[3][7:] == ["Floating-point operations: 1.20e+19", "Tokens (in billions): 2.00"]
    assert rows[4][4] == "Iteration: 20" and stamp == rows[2][0]
    begin, then = other._first_job()
    assert (f"{begin:%Y-%m-%d %H:%M:%S}", then) == (stamp, 6e18)  # the first job on two devices, and what was before


# ---- a whole run
def test_long_evaluation_shows_progress(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from megalite.training.logging import metrics_logger as metrics

    flags = ("--run-dir", str(tmp_path), "--eval-iters", "3", "--train-iters", "1")
    assert pretrain(read(*flags), RankInfo()) == ExitCode.DONE
    assert "evaluating" not in capsys.readouterr().out  # a short one
    monkeypatch.setattr(metrics, "FIRST_PROGRESS_S", -1.0)
    monkeypatch.setattr(metrics, "PROGRESS_S", -1.0)
    assert pretrain(read(*flags), RankInfo()) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert shown.count("step     1  evaluating: 1 of 3 batches") == shown.count("evaluating: 2 of 3 batches") == 2
    assert "3 of 3" not in shown


def test_last_step_is_logged(tmp_path: Path) -> None:
    for name, flags, steps in (
        ("end", "--log-interval 4", [1, 4, 6]),
        ("stop", "--log-interval 4 --exit-interval 5", [1, 4, 5]),
        ("long", "--log-interval 100", [1, 6]),
    ):
        pretrain(read(*flags.split(), "--run-dir", str(tmp_path / name)), RankInfo())
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows if "train/loss" in r] == steps
