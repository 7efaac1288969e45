"""Text from a checkpoint, on one process: load the model under any saved layout and continue a prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import reader
from megalite.config import Config, ParallelConfig, build, parse_toml
from megalite.data.tokenizer import Tokenizer
from megalite.models.gpt import Batch, Stage
from megalite.nn.parameter import named_specs
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece
from megalite.train.checkpoints import tokenizer_differences
from megalite.train.datasets import open_tokenizer
from megalite.train.setup import SetupError, build_stages


def load_model(directory: str | Path, device: torch.device) -> tuple[Stage, Config, Tokenizer, int]:
    """The newest checkpoint of `directory` as one fp32 stage: (model, its configuration, tokenizer, step)."""
    mesh = Mesh.alone(device)
    found = reader.newest(directory, mesh)
    if found is None:
        raise SetupError(f"load={str(directory)!r} holds no checkpoint; give the --save directory of a run")
    folder, manifest = found
    saved = build(parse_toml(manifest.state["config"], str(folder)))
    config = replace(saved, parallel=ParallelConfig(), train=replace(saved.train, recompute_granularity=None))
    tokenizer = open_tokenizer(config.data)
    if tokenizer is None:
        raise SetupError(f"{folder} was trained without a tokenizer; only its loss can be looked at")
    if differences := tokenizer_differences(tokenizer, manifest):
        raise SetupError(f"{folder}: {differences[0]}; put back the tokenizer that it was trained with")
    vocab_size = int(manifest.state.get("vocab_size", tokenizer.vocab_size))
    (model,) = build_stages(config, mesh, vocab_size, torch.float32)
    unique = {spec.name: (spec, parameter) for spec, parameter in named_specs(model)}
    pieces = []
    for spec, parameter in unique.values():
        box = spec.stored_box(mesh.sizes, mesh.position)
        data = parameter.data.view(-1)[: box.numel]
        pieces.append(Piece(f"model/{spec.name}", spec.stored_shape, box, range(box.numel), data))
    reader.fill(folder, manifest, pieces, mesh)
    return model.eval(), config, tokenizer, int(manifest.state["progress"]["step"])


@torch.no_grad()
def continue_ids(
    model: Stage, ids: list[int], count: int, *, limit: int, vocab_size: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """`count` more ids, sampled from the `top_k` likeliest at `temperature` (0: the likeliest). At most `limit` ids of
    context are looked at."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(ids)
    for _ in range(count):
        tokens_SB = torch.tensor(ids[-limit:], device=next(model.parameters()).device)[:, None]
        batch = Batch(tokens_SB, None, None, torch.zeros(1, dtype=torch.int64, device=tokens_SB.device), 0)
        logits_v: Tensor = model(None, batch)[-1, 0, :vocab_size].float().cpu()
        if temperature < 1e-6:  # as good as 0, and not divisible by
            ids.append(int(logits_v.argmax()))
            continue
        values, order = (logits_v / temperature).topk(min(top_k, vocab_size))
        ids.append(int(order[torch.multinomial(values.softmax(-1), 1, generator=generator)]))
    return ids
