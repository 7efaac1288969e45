"""Learning rates in runs: changes on resume, the rate of an update, skipped steps; batch sizes of evaluations."""

import math
from pathlib import Path

import pytest
import toml_tables
import torch
from program_runs import load_json_lines
from ranks import run_ranks
from test_run_start import make_run, save_step, start_run, weights
from train_cases import SMALL_RUN, config_from, pretrain, run_from, train

import pretrain_gpt
from megalite.checkpoint.format import manifest as manifests
from megalite.common.exit_codes import ExitCode
from megalite.launch.rank_info import RankInfo
from megalite.training.evaluation import evaluate
from megalite.training.setup import SetupError
from megalite.training.state import Run
from megalite.training.train_step import train_step

MISMATCHES = toml_tables.read_table("training/cases")["rates"]


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a checkpoint of step 2 of 6, with one skipped step."""
    save_dir = tmp_path_factory.mktemp("saved")
    run, config = make_run("--save", str(save_dir))
    run.progress.advance(8, tokens=128, skipped=True)
    save_step(run, config)
    return save_dir


def resume(load_dir: Path, *flags: str) -> Run:
    return start_run("--load", str(load_dir), *flags)[0]


@pytest.mark.parametrize("flags,lines", MISMATCHES.items())
def test_resume_with_other_rates_is_refused(checkpoint_dir: Path, flags: str, lines: list[str]) -> None:
    with pytest.raises(SetupError) as error:
        resume(checkpoint_dir, *flags.split())
    for line in lines:
        assert f"{line} the checkpoint" in str(error.value)
    assert "--override-opt-param-scheduler uses the options" in str(error.value)


RAMP = "--rampup-batch-size 8 8 32 --global-batch-size 16"
CURVE = "--lr-decay-style cosine --lr-warmup-iters 2"


@pytest.mark.parametrize("batch", ["--global-batch-size 16", RAMP])
def test_base_batch_size_scales_the_rates(batch: str) -> None:
    base_rates = "--lr 0.004 --min-lr 0.001 --lr-warmup-init 0.0004 --decoupled-lr 0.002 --lr-base-batch-size 4"
    scaled_rates = "--lr 0.016 --min-lr 0.004 --lr-warmup-init 0.0016 --decoupled-lr 0.008"
    scaled, _ = make_run(*f"{base_rates} {batch} {CURVE}".split())
    expected, _ = make_run(*f"{scaled_rates} {batch} {CURVE}".split())
    for n in range(0, 97, 8):
        assert scaled.schedules.lr.at(n) == pytest.approx(expected.schedules.lr.at(n), rel=1e-12)
        assert scaled.schedules.decoupled and expected.schedules.decoupled
        assert scaled.schedules.decoupled.at(n) == pytest.approx(expected.schedules.decoupled.at(n), rel=1e-12)
    assert scaled.schedules.weight_decay == expected.schedules.weight_decay


def test_base_batch_size_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, is_reported in (("--lr 0.0025 --lr-base-batch-size 4", True), ("--lr 0.01", False)):
        argv = [*SMALL_RUN, *"--global-batch-size 16 --train-iters 3 --nproc 2 --device cpu --dry-run".split()]
        assert pretrain_gpt.main([*argv, *flags.split()]) == ExitCode.DONE
        output = " ".join(capsys.readouterr().out.split())
        assert ("0.0025 at a batch of 4, so 0.01 at one of 16" in output) == ("at a batch of" in output) == is_reported


def test_longer_run_keeps_its_decay(checkpoint_dir: Path) -> None:
    run = resume(checkpoint_dir, "--train-iters", "9", "--lr-decay-iters", "6")
    assert run.last_step == 9 and run.progress.step == 2 and run.schedules.lr.decay == 48


def test_rates_from_flags_or_checkpoint(checkpoint_dir: Path) -> None:
    flags = ("--lr", "0.02", "--train-iters", "9", "--weight-decay", "0.3", "--lr-decay-style", "cosine")
    flags += ("--decoupled-lr", "0.1")
    from_flags = resume(checkpoint_dir, *flags, "--override-opt-param-scheduler")
    lr = from_flags.schedules.lr
    assert (lr.peak, lr.style, lr.decay) == (0.02, "cosine", 72)
    assert from_flags.schedules.weight_decay.at(0) == 0.3 and from_flags.schedules.decoupled is not None
    # as in Megatron-LM, the samples of the schedules restart at all consumed samples
    assert (from_flags.progress.consumed_samples, from_flags.progress.skipped_samples) == (16, 0)
    from_checkpoint = resume(checkpoint_dir, *flags[:-2], "--use-checkpoint-opt-param-scheduler")
    assert (
        from_checkpoint.schedules == resume(checkpoint_dir).schedules and from_checkpoint.progress.skipped_samples == 8
    )


def test_decoupled_rate_of_the_checkpoint_is_kept(tmp_path: Path) -> None:
    """Require the flag: buckets are laid out before a checkpoint is read, and none would follow the rate without it."""
    save_step(*make_run("--save", str(tmp_path), "--decoupled-lr", "0.03"))
    message = r"decoupled_lr=0\.03 in the checkpoint, but none here; add --decoupled-lr 0\.03"
    with pytest.raises(SetupError, match=message):
        resume(tmp_path, "--use-checkpoint-opt-param-scheduler")
    from_checkpoint = resume(tmp_path, "--use-checkpoint-opt-param-scheduler", "--decoupled-lr", "0.5")
    assert from_checkpoint.schedules.decoupled is not None and from_checkpoint.schedules.decoupled.peak == 0.03
    assert resume(tmp_path, "--override-opt-param-scheduler").schedules.decoupled is None


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_rates_are_free_without_the_optimizer_state(checkpoint_dir: Path, flag: str) -> None:
    assert resume(checkpoint_dir, flag, "--lr", "0.5").schedules.lr.peak == 0.5


def test_checkpoint_without_rates_resumes(checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a checkpoint from before 2026-11-22, whose state has no rates."""
    load_manifest = manifests.load_manifest

    def load_without_rates(directory: Path) -> manifests.Manifest:
        manifest = load_manifest(directory)
        return manifest._replace(state={name: value for name, value in manifest.state.items() if name != "rates"})

    monkeypatch.setattr(manifests, "load_manifest", load_without_rates)
    run, _, notes = start_run("--load", str(checkpoint_dir), "--lr", "0.5")
    assert run.schedules.lr.peak == 0.5 and "has no learning rate" in notes[0]


def test_first_update_without_warmup_uses_the_peak_rate() -> None:
    run, _ = make_run("--train-iters", "1", "--lr", "1e-5", "--weight-decay", "0", "--adam-eps", "1e-30")
    before = weights(run)
    assert train_step(run).lr == 0.0  # the rate of the next update
    max_change = max(float((after - before[name]).abs().max()) for name, after in weights(run).items())
    assert max_change == pytest.approx(1e-5, rel=1e-2)  # the first step of Adam is as long as the rate


def test_skip_train_evaluates_the_loaded_weights(tmp_path: Path) -> None:
    """Evaluate without optimizer state and learning rate, and save nothing."""
    save_dir, flags = tmp_path / "saved", [*SMALL_RUN, "--train-iters", "3", "--eval-iters", "2"]
    config = config_from([*flags, "--save", str(save_dir)])
    assert pretrain(config, RankInfo()) is ExitCode.DONE
    checkpoints = sorted(save_dir.glob("iter_*"))
    expected = [
        row
        for row in load_json_lines(save_dir / "metrics.jsonl")
        if any("valid" in name or "test" in name for name in row)
    ]
    argv = [flag for i, flag in enumerate(flags) if "--lr" not in flags[max(i - 1, 0) : i + 1]]
    argv += ["--load", str(save_dir), "--save", str(save_dir), "--run-dir", str(tmp_path / "logs"), "--skip-train"]
    assert pretrain(config_from(argv), RankInfo()) is ExitCode.DONE
    assert sorted(save_dir.glob("iter_*")) == checkpoints
    actual = load_json_lines(tmp_path / "logs/metrics.jsonl")
    assert actual and actual == expected


def test_evaluation_batch_size(tmp_path: Path) -> None:
    run, _ = make_run("--eval-iters", "2")
    expected = evaluate(run, run.valid_loaders[0].data, 2)  # 2 x 8 samples
    run, config = make_run("--eval-iters", "4", "--eval-global-batch-size", "4", "--eval-micro-batch-size", "1")
    shapes, original = [], run.pipeline.evaluate
    run.pipeline.evaluate = lambda batches, ctx: (
        shapes.extend(b.tokens_SB.shape for b in batches),
        original(batches, ctx),
    )[1]  # type: ignore[method-assign]
    assert evaluate(run, run.valid_loaders[0].data, 4) == pytest.approx(expected, rel=1e-6)
    assert shapes == [(16, 1)] * 16 and run.batch_sizes.final == 8
    run.last_step = 0
    train(run, config, tmp_path)
    assert shapes == [(16, 1)] * 16 * 3  # at the end, on the validation and the test set


def test_batch_size_schedule_trains_and_resumes() -> None:
    index = SMALL_RUN.index("--global-batch-size")
    argv = [
        *SMALL_RUN[:index],
        *SMALL_RUN[index + 2 :],
        "--train-samples",
        "20",
        "--step-batch-size-schedule",
        "0:4 128:8",
    ]
    run = run_from(argv)
    sizes = [train_step(run).batch_size for _ in range(run.last_step)]
    assert sizes == [4, 4, 8, 8]  # 128 tokens are 8 samples; the last batch goes beyond the 20
    assert run.batch_sizes.at(8) == 8 and run.progress.consumed_samples == 24
    assert run.schedules.lr.decay == 20 and run.eval_batch_size == 2


def test_run_without_evaluation() -> None:
    for count in ("0", "-1"):
        run, _ = make_run("--eval-iters", count)
        assert not run.valid_loaders and not run.test_loaders


def _bf16_ranks(extra: str) -> tuple[list[float], dict[str, bytes]]:
    run = run_from([*SMALL_RUN, "--train-iters", "6", "--bf16", *extra.split()])
    losses = [train_step(run).loss for _ in range(3)]
    run.sync.wait_param_sync()
    return losses, {
        "weights": torch.cat([bucket.full for bucket in run.sync.param_buckets]).view(torch.uint8).numpy().tobytes()
    }


@pytest.mark.parametrize("zero", ["", "--no-use-distributed-optimizer"])
def test_bf16_gradient_reduction_keeps_ranks_equal(zero: str) -> None:
    one, two = run_ranks(2, _bf16_ranks, f"--grad-reduce-in-bf16 {zero}")
    plain, _ = run_ranks(2, _bf16_ranks, zero)
    assert one == two and one[1] != plain[1]
    assert one[0] == pytest.approx(plain[0], rel=2e-3)
    assert math.isfinite(one[0][-1])
