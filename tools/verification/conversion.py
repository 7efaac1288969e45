"""Two checks of a conversion: the same bits in every tensor; and the same logits as transformers computes, in fp32.

For logits both models are whole in memory, 4 bytes per parameter each. transformers is needed for this alone; it reads
the directory with `trust_remote_code` off and safetensors only.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import Checkpoint
from megalite.common.optional_packages import missing_package_message
from megalite.config.options import ModelConfig
from megalite.interop.tensor_mapping import ExportSource, ExternalTensor, Specs
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import Batch
from megalite.nn.parameter import ParamFactory, model_shards
from megalite.parallel.mesh import Mesh
from tools.export_files import kept


class LogitVerdict(NamedTuple):
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
    pieces = model_shards(stage, Mesh.single_process())
    if main_weights:
        main = {piece.name: piece.name.replace("model/", "optimizer.main/", 1) for piece in pieces}
        pieces = [p._replace(name=main[p.name]) if main[p.name] in source.manifest.tensors else p for p in pieces]
    source.fill(pieces)


@torch.no_grad()
def our_logits(
    source: Checkpoint, model: ModelConfig, ids_BS: Tensor, vocab_size: int, main_weights: bool = False
) -> Tensor:
    """[B, S, V] in fp32, of the checkpoint loaded as one stage on the CPU; `main_weights`: as in `fill_stage`."""
    rows = source.shape("model/embedding.word")[0]
    make, layers = ParamFactory(Mesh.single_process(), torch.float32, seed=0), range(model.num_layers)
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
        raise CheckpointError(
            missing_package_message("comparing logits", "transformers") + ", or use --check-bits"
        ) from None
    if ids:
        ids_BS = torch.tensor([ids[: model.max_positions]])
    else:
        generator = torch.Generator().manual_seed(1234)
        ids_BS = torch.randint(0, vocab_size, (2, min(model.max_positions, 64)), generator=generator)
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


@dataclass(frozen=True)
class Difference:
    """How one tensor differs from another. `note`: in its shape, its dtype, or in being there at all. `count` elements
    differ, the first at `index`, where it is `here` and `there`, by at most `largest`."""

    name: str
    note: str = ""
    index: tuple[int, ...] | None = None
    here: float = 0.0
    there: float = 0.0
    largest: float = 0.0
    count: int = 0


def difference(name: str, here: Tensor, there: Tensor) -> Difference | None:
    """How two tensors of one shape differ in bits or, where their dtypes differ, in values; there NaN equals NaN."""
    note = "" if here.dtype == there.dtype else f"{str(here.dtype)[6:]} and {str(there.dtype)[6:]}"
    if note:
        x, y = here.double(), there.double()
        far = ~((x == y) | (x.isnan() & y.isnan()))
    else:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[here.dtype.itemsize]
        far = here.contiguous().view(bits) != there.contiguous().view(bits)
    if not far.any():
        return Difference(name, note) if note else None
    first = far.reshape(-1).to(torch.uint8).argmax()
    index = tuple(int(i) for i in torch.unravel_index(first, here.shape)) if here.dim() else ()
    x, y = here[far].double(), there[far].double()
    largest = float((x - y).abs().nan_to_num(math.inf, math.inf).max())
    return Difference(name, note, index, float(x[0]), float(y[0]), largest, len(x))


class Verdict(NamedTuple):
    """`differing`: rectangles of ours, by the name of theirs and ours."""

    tensors: int
    elements: int
    differing: list[Difference]

    def __str__(self) -> str:
        if not self.differing:
            return f"check: {self.tensors} tensors, {self.elements:,} elements, all bits equal"
        largest = max(self.differing, key=lambda d: d.largest)
        head = f"check: {len(self.differing)} parts of {self.tensors} tensors differ"
        return "\n".join([head, f"first: {_told(self.differing[0])}", f"largest: {_told(largest)}"])


def _told(d: Difference) -> str:
    more = f"{d.count:,} elements of it differ, by at most {d.largest:g}"
    return f"{d.name}{list(d.index or ())}: {d.there!r} there, {d.here!r} here; {d.note and d.note + ', '}{more}"


def compare(foreign: Iterable[ExternalTensor], ours: ExportSource, specs: Specs) -> Verdict:
    """Every foreign tensor against ours, bit by bit; `specs` tell which rows pad the vocabulary and do not count."""
    tensors, elements, differing = 0, 0, []
    for one in foreign:
        tensors += 1
        for spec, box, theirs in kept(one, specs):
            elements += theirs.numel()
            found = difference(f"{one.place}, {spec.name}", ours.read(spec.name, box), theirs)
            if found is not None:
                at = zip(found.index or (), box.start, strict=False)  # no index where only dtypes differ
                differing.append(replace(found, index=tuple(i + start for i, start in at)))
    return Verdict(tensors, elements, differing)
