"""Ten optimizer steps of megalite, and of a model of transformers with torch's AdamW, on the same tokens."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from full_tensors import assemble, owned_shards
from layout_cases import FP64_TOLERANCE
from torch import Tensor
from train_cases import run_from

from megalite.training.state import Run
from megalite.training.train_step import train_step

STEPS, BATCH, LR = 10, 16, 0.01

RankResult = tuple[list[float], list, list[float]]  # losses and pieces of the weights in fp64, losses in fp32


def train_rank(flags: str) -> RankResult:
    """Train on this rank in fp64 and in fp32; return the losses and the pieces of the weights in fp64, and the losses."""
    runs = []
    for dtype in (torch.float64, torch.float32):
        run = run_from(flags, dtype=dtype)
        losses = [train_step(run).loss for _ in range(STEPS)]
        run.sync.wait_param_sync()
        runs.append((losses, owned_shards(run.optimizer, "model/")))
    return *runs[0], runs[1][0]


def initial_weights(run: Run) -> dict[str, Tensor]:
    """Return the weights of a run of one process by name."""
    return weights_by_name(owned_shards(run.optimizer, "model/"))


def weights_by_name(pieces: Iterable[Any]) -> dict[str, Tensor]:
    """Return the full weights by name, given the pieces of all ranks."""
    return {name.removeprefix("model/"): values for name, values in assemble(pieces).items()}


def training_batches(run: Run) -> list[Tensor]:
    """Return the tokens of each step, [B, S + 1]."""
    dataset = run.train_loader.batches.dataset
    return [torch.from_numpy(dataset.samples(np.arange(s * BATCH, (s + 1) * BATCH))) for s in range(STEPS)]


def train_transformers(
    model: Any, batches: list[Tensor], after_step: Callable[[], None] = lambda: None
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each step and the final weights, with torch's AdamW and clipping.

    `after_step` is called after each update.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-3)
    losses = []
    for tokens_BT in batches:
        logits = model(tokens_BT[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
        after_step()
    return losses, model.state_dict()


def assert_equal_steps(
    ranks: list[RankResult],
    expected: tuple[list[float], Mapping[str, Tensor]],
    expected_fp32_losses: list[float],
    transformers_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    fp32_tolerance: float,
) -> None:
    """Compare the losses of all ranks, in fp64 and in fp32, and the final weights in fp64 with those of transformers."""
    expected_losses, expected_weights = expected
    assert expected_losses[-1] < 0.9 * expected_losses[0]
    for losses, _, fp32_losses in ranks:
        assert losses == pytest.approx(expected_losses, rel=FP64_TOLERANCE)
        assert fp32_losses == pytest.approx(expected_fp32_losses, rel=fp32_tolerance)
    weights = transformers_weights(weights_by_name(piece for _, pieces, _ in ranks for piece in pieces))
    for name, values in weights.items():
        error = float((values - expected_weights[name]).abs().max() / values.abs().max())
        assert error <= 1e-9, f"{name} differs by {error:.1e}"
