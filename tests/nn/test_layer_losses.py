"""Losses of layers: their gradients by autograd, and a plugin's mixer with a loss under every layout."""

import json
import math
import re
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from layout_cases import FP64_TOLERANCE
from ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train_cases import run_from

from megalite.config import plugins
from megalite.config.options import ConfigError
from megalite.nn.layer_loss import train_on_layer_loss
from megalite.nn.loss_sums import LossSums
from megalite.nn.micro_batch import ForwardContext
from megalite.parallel.mesh import Mesh
from megalite.training.evaluation import evaluate
from megalite.training.train_step import train_step
from tools.plots import curves
from tools.plots.run_data import read_runs

CPU = torch.device("cpu")
STEPS = 3


def test_gradients_of_a_layer_loss_equal_autograd() -> None:
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    ctx = ForwardContext(
        loss_grad=0.25,
        token_weight=torch.tensor(0.5, dtype=torch.float64),
        loss_sums=LossSums(("loss",), [("p_loss", 7)], CPU),
    )
    loss = x.pow(4).sum()
    y = train_on_layer_loss(x, loss, 0.1, "p_loss", 7, ctx)
    assert ctx.loss_sums is not None and not ctx.loss_sums.values.any(), "only backward counts"
    dy = torch.randn_like(x)
    (actual,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad((x * dy).sum() + 0.1 * 0.25 * 0.5 * x.pow(4).sum(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    assert ctx.loss_sums.values.tolist() == [0.0, float(loss.detach())]
    assert train_on_layer_loss(x, loss, 0.1, "p_loss", 7, ForwardContext()) is x


@pytest.mark.parametrize(
    ("loss", "name", "message"),
    [
        (torch.zeros(3), "p_loss", r"is \[3\] of torch.float32, not a scalar"),
        (torch.zeros((), dtype=torch.bfloat16), "p_loss", r"is \[\] of torch.bfloat16, not a scalar"),
        (0.5, "p_loss", "is 0.5, not a scalar"),
        (torch.zeros(()), "q_loss", "q_loss of layer 7 is not declared"),
    ],
)
def test_mistakes_of_a_mixer_are_named_in_forward(loss: Any, name: str, message: str) -> None:
    ctx = ForwardContext(loss_grad=0.25, loss_sums=LossSums(("loss",), [("p_loss", 7)], CPU))
    with pytest.raises(ConfigError, match=message):
        train_on_layer_loss(torch.zeros(2, requires_grad=True), loss, 0.1, name, 7, ctx)


def test_negative_losses_are_in_the_picture(tmp_path: Path) -> None:
    rows = [{"step": step, "tokens": step, "train/loss": 5.0, "loss/p_loss": -step / 10} for step in range(1, 9)]
    tmp_path.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tmp_path.joinpath("status.json").write_text("{}")
    picture = curves.other_losses(read_runs([tmp_path]))
    assert picture is not None
    low, high = picture.draw(6.0).axes[0].get_ylim()
    assert low <= -0.8 < -0.1 <= high


def test_means_are_over_labels_and_over_tokens_and_layers() -> None:
    sums = LossSums(("loss", "z_loss"), [("a_loss", 0), ("a_loss", 3), ("b_loss", 3)], CPU)
    totals = [12.0, 6.0, 8.0, 24.0, 2.0]
    means = dict(loss=4.0, z_loss=2.0, a_loss=4.0, b_loss=0.5)
    assert sums.means(totals, labels=3, tokens=4) == means
    assert sums.layer_means(totals, 4) == {("a_loss", 0): 2.0, ("a_loss", 3): 6.0, ("b_loss", 3): 0.5}
    assert sums.means([0.0] * 5, labels=0, tokens=4)["loss"] == 0.0
    assert math.isnan(sums.means([math.nan] * 5, labels=0, tokens=4)["loss"]), "a masked NaN stays visible"
    sums.values += 1
    assert sums.local_values(Mesh.single_process()).tolist() == [1.0] * 5


MIXER = """
import torch
from torch import nn
from megalite.kernels.dispatch import accum_dtype
from megalite.nn.layer_loss import train_on_layer_loss
from megalite.parallel.spec import Normal, ParamSpec

class Penalized(nn.Module):
    letter = "P"
    losses = LOSSES
    supports_context_parallel = True

    def __init__(self, make_param, name, model, layer, spec, recomputed):
        super().__init__()
        self.layer = layer
        spec = ParamSpec(f"{name}.w", (model.hidden_size,), partial_grad_axes=("tp",), init=Normal(1.0))
        self.w = make_param(spec)

    def forward(self, x_sBD, batch, ctx):
        y_sBD = x_sBD * self.w
        loss = y_sBD.square().mean(-1).sum(dtype=accum_dtype(y_sBD))
        return train_on_layer_loss(y_sBD, loss, 0.5, "power_loss", self.layer, ctx)

megalite.register("mixer", "penalized", Penalized)
"""
FLAGS = """--num-layers 4 --hybrid-layer-pattern P-*-P-*- --hidden-size 32 --num-attention-heads 4 --seq-length 16
 --vocab-size 93 --make-vocab-size-divisible-by 32 --micro-batch-size 1 --global-batch-size 8 --mock-data --eval-iters 1
 --train-iters 3 --lr 1e-2 --init-method-std 0.3 --z-loss-coeff 0.01 --hidden-dropout 0.1"""
LAYOUTS = {
    "tp2": (2, "--tp 2"),
    "pp2 split": (2, "--pp 2 --split-backward"),
    "border in a layer": (2, "--pp 2 --hybrid-layer-pattern P-*|-P-*-"),
    "cp2": (2, "--cp 2"),
    "dp2 zero3": (2, "--dp 2 --zero-stage 3"),
    "vpp recomputed": (
        2,
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full --recompute-method uniform",
    ),
    "tp2 dp2": (4, "--tp 2 --dp 2"),
}


def _write_mixer(directory: Path, losses: str = '("power_loss",)') -> str:
    path = directory / "penalized.py"
    path.write_text("import megalite\n" + MIXER.replace("LOSSES", losses))
    return str(path)


def _train(plugin: str, flags: str) -> list[list[float]]:
    """Return the losses and the gradient norm of each step, and the loss of an evaluation."""
    run = run_from(f"{FLAGS} --plugin {plugin} {flags}", dtype=torch.float64)
    results = [train_step(run) for _ in range(STEPS)]
    rows = [[result.grad_norm, *result.losses.values(), *result.layer_losses.values()] for result in results]
    assert list(results[0].losses) == ["loss", "z_loss", "power_loss"]
    assert [*results[0].layer_losses] == [("power_loss", 0), ("power_loss", 2)]
    rows.append([evaluate(run, run.valid_loaders[0].data, 1)])
    run.sync.wait_param_sync()
    run.close()
    return rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_of_a_plugin_is_independent_of_the_layout(layout: str, tmp_path: Path) -> None:
    plugin = _write_mixer(tmp_path)
    (expected,) = run_ranks(1, _train, plugin, "")
    world, flags = LAYOUTS[layout]
    for actual in run_ranks(world, _train, plugin, flags):
        for actual_row, expected_row in zip(actual, expected, strict=True):
            assert actual_row == pytest.approx(expected_row, rel=FP64_TOLERANCE)
    assert expected[0][3] > 0


def _pretrain(*flags: str) -> str:
    result = programs.run_python("pretrain_gpt.py", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_loss_of_a_plugin_is_in_every_log(tmp_path: Path) -> None:
    plugin = _write_mixer(tmp_path)
    output = f"--run-dir {tmp_path / 'run'} --tensorboard-dir {tmp_path / 'board'} --log-interval 1 --eval-interval 2"
    program = f"{FLAGS} --plugin {plugin} {output} --moe-per-layer-logging"
    _pretrain(*program.split())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["step"] == 3)
    assert row["loss/power_loss"] > 0 and row["train/z_loss"] > 0
    assert next(row for row in rows if "val/valid/loss" in row)["val/valid/z_loss"] > 0
    line = (tmp_path / "run/log.txt").read_text()
    assert re.search(r"loss [\d.]+  power_loss [\d.]+  z-loss ", line)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    tags = {
        "power_loss",
        "power_loss_layer_0",
        "power_loss_layer_2",
        "lm loss validation",
        "lm z_loss",
        "lm z_loss validation",
    }
    assert tags <= set(board.Tags()["scalars"])
    means = [[event.value for event in board.Scalars(f"power_loss{layer}")] for layer in ("", "_layer_0", "_layer_2")]
    assert means[0] == pytest.approx([(a + b) / 2 for a, b in zip(*means[1:], strict=True)], rel=1e-6)
    megatron = _pretrain(*FLAGS.split(), "--plugin", plugin, "--log-style", "megatron", "--log-interval", "1")
    assert re.search(r" \| lm loss: \S+ \| power_loss: \S+ \| lm z_loss: \S+ \|", megatron)
    picture = curves.other_losses(read_runs([tmp_path / "run"]))
    assert picture is not None and len(picture.draw(6.0).axes) == 2


@pytest.mark.parametrize(
    "losses", ['"power_loss"', '("power",)', '("Power_loss",)', '("z_loss",)', '("a_loss", "a_loss")', "(3,)"]
)
def test_names_of_losses_are_checked(losses: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has losses="):
        plugins.load_plugins([_write_mixer(tmp_path, losses)])
