"""Memory of one rank, as the plan says it, is what the parts of a run take."""

from __future__ import annotations

import pytest
import torch
from train_cases import SMALL

from megalite import cli
from megalite.models.families import PRESETS
from megalite.models.flops import num_parameters
from megalite.parallel.launch import Ranks
from megalite.train.run import memory_of
from megalite.train.setup import build_run


@pytest.mark.parametrize(
    "flags",
    ["", "--bf16", "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "--bf16 --optimizer sgd", "--optimizer sgd"],
)
def test_the_estimate_is_what_is_taken(flags: str) -> None:
    config = cli.parse([*SMALL, "--train-iters", "1", *flags.split()], PRESETS)
    run = build_run(config, Ranks(), torch.device("cpu"))
    held = [run.buffer.weights, run.buffer.grads, *(t for state in run.optimizer.state for t in state.values())]
    held += [] if run.optimizer.same else run.optimizer.main
    taken = sum(t.numel() * t.element_size() for t in held)
    run.close()
    assert num_parameters(config.model, 93) > 50_000
    assert memory_of(config, 1, 93) == pytest.approx(taken, rel=0.1)  # padding of buckets and of the vocabulary
