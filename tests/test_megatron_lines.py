"""Ten Megatron-LM command lines, sizes made small, train unchanged on gloo."""

import math

import pytest
import torch
from megatron_lines import LINES
from ranks import run_ranks

from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.parallel.launch import Ranks
from megalite.train.setup import build_run
from megalite.train.step import train_step


def _train(line: str, world: int) -> list[float]:
    import torch.distributed as dist

    config, notes = cli.read(line.split(), PRESETS)
    assert any("--use-mcore-models" in note and note.startswith("no effect here: ") for note in notes)
    rank = dist.get_rank() if world > 1 else 0
    run = build_run(config, Ranks(rank, world), torch.device("cpu"))
    losses = [train_step(run).loss for _ in range(config.train.train_iters or 0)]
    run.data.close()
    return losses


@pytest.mark.parametrize("name", sorted(LINES))
def test_line_trains(name: str) -> None:
    world, line = LINES[name]
    per_rank = run_ranks(world, _train, line, world) if world > 1 else [_train(line, world)]
    assert all(losses == per_rank[0] for losses in per_rank) and len(per_rank[0]) == 2
    assert all(abs(loss - math.log(128)) < 1.0 for loss in per_rank[0])
