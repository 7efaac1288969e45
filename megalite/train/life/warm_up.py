"""Compile before the first step, so that no step's time has the compiler in it."""

from __future__ import annotations

import time

import numpy as np
import torch

from megalite.config.options import Config
from megalite.data.samples.batches import MicroBatch
from megalite.models.gpt import Block, Stage
from megalite.train.batch import host_batch, on_device
from megalite.train.state import Run


def warm_up(run: Run, config: Config) -> float:
    """One block forward and backward on a micro-batch of the run's shape; its gradients are dropped. Seconds.

    All blocks share what is compiled (models/compiled.py). Collective over tp; a rank without blocks has nothing to do,
    nor have its peers. What evaluation alone needs is compiled by the first evaluation.
    """
    begin = time.perf_counter()
    stage = next((stage for stage in run.pipeline.stages if isinstance(stage, Stage) and len(stage.blocks)), None)
    if stage is None:
        return 0.0
    t, d, S = config.train, config.data, run.seq_length
    B = t.micro_batch_size
    zeros = np.zeros((B, S + 1), dtype=np.int64)
    first = np.zeros((B, S), np.int32) if d.reset_position_ids or d.reset_attention_mask else None
    micro = MicroBatch(zeros, np.arange(B, dtype=np.int64), None, first)
    host = host_batch(micro, pin=False, positions=d.reset_position_ids, documents=d.reset_attention_mask)
    where = stage.coordinates(on_device(host, run.mesh.device, step=1))
    block = stage.blocks[0]
    assert isinstance(block, Block)
    x_sBD = torch.zeros(
        (S // run.mesh.tp.size, B, run.pipeline.width),
        dtype=run.pipeline.dtype,
        device=run.mesh.device,
        requires_grad=True,
    )
    y_sBD = block(x_sBD, where)
    torch.autograd.grad(y_sBD, x_sBD, torch.zeros_like(y_sBD))
    return time.perf_counter() - begin
