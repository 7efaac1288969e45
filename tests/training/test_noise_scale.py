"""The gradient noise scale: exact for a quadratic with known noise, and from the same sums under every layout."""

import datetime
import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from train_cases import config_from, run_from

from megalite.config.options import ConfigError
from megalite.config.validation import find_problems
from megalite.training.logging.log_format import megalite_line, metrics_row
from megalite.training.noise_scale import MEAN_DECAY, NoiseScale, NoiseSums
from megalite.training.train_step import train_step

BATCH = 4
FLAGS = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
 --global-batch-size {BATCH} --train-iters 100 --lr 0.01 --mock-data --vocab-size 40 --hidden-dropout 0 --eval-iters 0
 --attention-dropout 0 --init-method-std 0.2 --make-vocab-size-divisible-by 8 --bf16"""
NOISE = "--log-noise-scale"


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1, 1), (1, 3)])
def test_estimates_are_unbiased_for_a_quadratic_with_known_noise(sizes: tuple[int, ...]) -> None:
    """The loss of a label is |w - x|^2 / 2, and x is one of three vectors; all outcomes of the ranks are averaged."""
    w = torch.tensor([2.0, -1.0], dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [1.0, 3.0], [-4.0, 0.5]], dtype=torch.float64)
    gradients = w - x
    mean = gradients.mean(0)
    trace = float((gradients - mean).square().sum(1).mean())
    estimates = []
    for outcome in itertools.product(range(len(x)), repeat=sum(sizes)):
        per_rank = [labels.sum(0) for labels in gradients[list(outcome)].split(list(sizes))]
        sums = NoiseSums(
            local_norm_sq=float(sum(s.square().sum() for s in per_rank)),
            norm_sq=float(torch.stack(per_rank).sum(0).square().sum()),
            labels=sum(sizes),
            labels_sq=sum(n**2 for n in sizes),
        )
        estimates.append(sums.estimate())
    actual = torch.tensor(estimates, dtype=torch.float64).mean(0)
    assert actual.tolist() == pytest.approx([float(mean.square().sum()), trace], rel=1e-12)


def sums_of_step(flags: str) -> NoiseSums:
    """Return the sums of the first step under a layout, in fp64."""
    run = run_from(f"{FLAGS} {NOISE} {flags}", dtype=torch.float64)
    assert run.noise_scale is not None
    with mock.patch.object(run.noise_scale, "update") as update:
        train_step(run)
    ((sums, grad_scale), _) = update.call_args
    assert grad_scale == 1 / (BATCH * 16)
    return sums


def gradients_of(samples: list[int], flags: str) -> dict[str, torch.Tensor]:
    """Return the sum of the gradients of some samples of the batch, from one process without the noise scale."""
    run = run_from(f"{FLAGS} {flags}", dtype=torch.float64)
    batches, end = run.train_loader.get(0, BATCH)
    with (
        mock.patch.object(run.train_loader, "get", lambda *_: ([batches[i] for i in samples], end)),
        mock.patch("megalite.training.train_step._update"),  # it scales the gradients in place
    ):
        train_step(run)
    return {name: main_grad._main_grad.clone() for name, main_grad in run.sync.main_grads.items()}


UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS = [
    (2, ""),
    (2, "--no-use-distributed-optimizer"),
    (2, "--no-overlap-grad-reduce --ddp-bucket-size 5000"),
    (4, "--num-distributed-optimizer-instances 2"),
    (4, "--tensor-model-parallel-size 2"),
    (4, f"--pipeline-model-parallel-size 2 {UNTIED}"),
    (4, "--pipeline-model-parallel-size 2 --split-backward"),
]


@pytest.mark.parametrize("world,layout", LAYOUTS)
def test_sums_under_a_layout_equal_those_of_single_gradients(world: int, layout: str) -> None:
    model_parallel = 2 if "parallel-size" in layout else 1
    dp = world // model_parallel
    ties = UNTIED if UNTIED in layout else ""
    full = gradients_of(list(range(BATCH)), ties)
    per_rank = [gradients_of(list(range(rank, BATCH, dp)), ties) for rank in range(dp)]
    names = set(full)
    if "tensor" in layout:  # each tp rank has these gradients for its part of the sequence
        partial = ("norm", "out_bias", "down_bias", "embedding.position")
        names = {name for name in names if not any(text in name for text in partial)}
    if "pipeline" in layout and not ties:  # both ends of the pipeline have a summand of the gradient
        names -= {"embedding.word"}
    expected = [
        sum(float(gradients[name].square().sum()) for gradients in per_rank for name in names),
        sum(float(full[name].square().sum()) for name in names),
        BATCH * 16,
        dp * (BATCH // dp * 16) ** 2,
    ]
    for sums in run_ranks(world, sums_of_step, layout, timeout=120):
        actual = [sums.local_norm_sq, sums.norm_sq, sums.labels, sums.labels_sq]
        assert actual == pytest.approx(expected, rel=1e-10)


def steps_of(flags: str, steps: int) -> list[dict[str, Any]]:
    run = run_from(f"{FLAGS} {flags}", dtype=torch.float64)
    return [vars(train_step(run)) for _ in range(steps)]


def test_measuring_changes_no_result() -> None:
    with_noise, without = (run_ranks(2, steps_of, flags, 3, timeout=120)[0] for flags in (NOISE, ""))
    for a, b in zip(with_noise, without, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
        assert b["noise_scale"] is None
    known = [row["noise_scale"] for row in with_noise if row["noise_scale"] is not None]
    assert all(0 < value < math.inf for value in known)


def test_moving_means_do_not_depend_on_the_loss_scale() -> None:
    run = run_from(f"{FLAGS}", dtype=torch.float64)
    constant, changing = NoiseScale(run.optimizer), NoiseScale(run.optimizer)
    for step, factor in enumerate((1.0, 8.0, 0.5)):
        sums = NoiseSums(local_norm_sq=10.0 + step, norm_sq=14.0 + step * step, labels=4, labels_sq=8)
        constant.update(sums, 1.0)
        scaled = NoiseSums(sums.local_norm_sq * factor**2, sums.norm_sq * factor**2, 4, 8)
        changing.update(scaled, factor)
    assert changing.labels == pytest.approx(constant.labels, rel=1e-12)
    grad_sq = [(14.0 + n * n - 10.0 - n) / 8 for n in range(3)]
    weights = [(1 - MEAN_DECAY) * MEAN_DECAY ** (2 - n) for n in range(3)]
    assert constant.mean_grad_sq == pytest.approx(sum(w * g for w, g in zip(weights, grad_sq, strict=True)), rel=1e-12)


def test_no_value_is_logged_while_the_gradient_is_unknown() -> None:
    scale = NoiseScale(run_from(FLAGS, dtype=torch.float64).optimizer)
    assert scale.labels is None
    scale.update(NoiseSums(local_norm_sq=10.0, norm_sq=9.0, labels=4, labels_sq=8), 1.0)  # an estimate below 0
    assert scale.labels is None
    values = {"step": 1, "last_step": 2, "noise_scale": 1234.5}
    assert metrics_row(values)["train/noise_scale"] == 1234.5
    assert "noise scale 1.23e+03" in megalite_line(values, datetime.datetime(2026, 1, 1))
    assert "train/noise_scale" not in metrics_row({**values, "noise_scale": None})


@pytest.mark.parametrize(
    "flags,world,message",
    [
        ("", 1, "there is one; start more ranks"),
        ("--context-parallel-size 2", 4, "context_parallel_size=2 splits samples"),
        ("--zero-stage 2", 2, "ZeRO stage 2 reduces them earlier"),
    ],
)
def test_layouts_without_the_gradients_are_refused(flags: str, world: int, message: str) -> None:
    try:
        problems = [str(problem) for problem in find_problems(config_from(f"{FLAGS} {NOISE} {flags}"), world)]
    except ConfigError as error:  # a problem that does not depend on the world size
        problems = str(error).splitlines()
    assert len(problems) == 1 and message in problems[0]
