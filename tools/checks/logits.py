"""The last check of a conversion: the same logits as transformers computes, in fp32, on the same ids.

Both models are whole in memory, 4 bytes per parameter each. transformers is needed for this alone; it reads the
directory with `trust_remote_code` off and safetensors only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import Checkpoint
from megalite.config.options import ModelConfig
from megalite.config.packages import needs
from megalite.models.gpt import Batch, Stage
from megalite.nn.parameter import Maker, weight_pieces
from megalite.parallel.mesh import Mesh


@dataclass(frozen=True)
class LogitVerdict:
    """`largest`: absolute difference of logits; `scale`: the largest logit; `agreement`: share of the positions whose
    most likely token is the same. `text`: of a sample text; else of random tokens."""

    text: bool
    positions: int
    largest: float
    scale: float
    agreement: float

    def __str__(self) -> str:
        of = "positions of a text" if self.text else "random tokens"
        return (
            f"check: logits of {self.positions} {of} differ by at most {self.largest:.2e} (largest logit "
            f"{self.scale:.1f}), likeliest token the same in {self.agreement:.2%}"
        )


def fill_stage(stage: Stage, source: Checkpoint, main_weights: bool) -> None:
    """`main_weights`: of a run in half precision those that the optimizer keeps. Raises CheckpointError."""
    pieces = weight_pieces(stage, Mesh.alone())
    if main_weights:
        main = {piece.name: piece.name.replace("model/", "optimizer.main/", 1) for piece in pieces}
        pieces = [replace(p, name=main[p.name]) if main[p.name] in source.manifest.tensors else p for p in pieces]
    source.fill(pieces)


@torch.no_grad()
def our_logits(
    source: Checkpoint, model: ModelConfig, ids_BS: Tensor, vocab_size: int, main_weights: bool = False
) -> Tensor:
    """[B, S, V] in fp32, of the checkpoint loaded as one stage on the CPU; `main_weights`: as in `fill_stage`."""
    rows = source.shape("model/embedding.word")[0]
    make, layers = Maker(Mesh.alone(), torch.float32, seed=0), range(model.num_layers)
    stage = Stage(make, model, [layers], 0, vocab_size=vocab_size, padded_vocab_size=rows)
    fill_stage(stage, source, main_weights)
    batch = Batch(ids_BS.T, None, None, torch.zeros(len(ids_BS), dtype=torch.int64), 0)
    return stage.eval()(None, batch)[..., :vocab_size].transpose(0, 1)


def compare_logits(
    folder: Path,
    source: Checkpoint,
    model: ModelConfig,
    vocab_size: int,
    ids: list[int] | None = None,
    main_weights: bool = False,
) -> LogitVerdict:
    """`folder`: of Hugging Face. ids: a text; None: random ones. Raises CheckpointError without transformers."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise CheckpointError(needs("comparing logits", "transformers") + ", or use --check-bits") from None
    if ids:
        ids_BS = torch.tensor([ids[: model.positions]])
    else:
        generator = torch.Generator().manual_seed(1234)
        ids_BS = torch.randint(0, vocab_size, (2, min(model.positions, 64)), generator=generator)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    with torch.no_grad():
        want = theirs.eval()(ids_BS).logits[..., :vocab_size].float()
    del theirs
    got = our_logits(source, model, ids_BS, vocab_size, main_weights)
    agreement = (got.argmax(-1) == want.argmax(-1)).double().mean()
    largest, scale = float((got - want).abs().max()), float(want.abs().max())
    return LogitVerdict(bool(ids), ids_BS.numel(), largest, scale, float(agreement))
