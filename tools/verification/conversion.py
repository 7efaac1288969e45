"""Two checks of a conversion: every tensor is bitwise equal, and the logits agree with those of transformers, in fp32.

For the logits, both models are in memory completely, with 4 bytes per parameter each. transformers is needed only for
this check; it reads the directory with `trust_remote_code` off, and only safetensors files.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import Checkpoint
from megalite.common.optional_packages import KERNEL_PACKAGES_OF_TRANSFORMERS, hidden_packages, missing_package_message
from megalite.config.options import ModelConfig
from megalite.interop.huggingface.config_json import ALIASES
from megalite.interop.huggingface.model_files import read_json
from megalite.interop.name_mapping import FAMILIES
from megalite.interop.tensor_mapping import ExportSource, ExternalTensor, Specs
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, model_shards
from megalite.parallel.mesh import Mesh
from tools.export_files import stored_boxes

LOGIT_BOUND = 1e-4  # of equal models in fp32, relative to the largest logit if that is above 1
ROUNDINGS = 8  # allowed on top if the conversion rounds weights, in multiples of the rounding of their dtype


@dataclass(frozen=True)
class LogitVerdict:
    """The agreement of the logits of two models.

    Attributes:
        is_text: the tokens are a sample text, not random.
        largest: the largest absolute difference.
        scale: the largest absolute logit.
        agreement: fraction of the positions with the same most likely token.
        bound: the largest allowed difference, relative to `scale` if that is above 1.
    """

    is_text: bool
    positions: int
    largest: float
    scale: float
    agreement: float
    bound: float

    @property
    def within_bound(self) -> bool:
        return self.largest <= self.bound * max(1.0, self.scale)

    def __str__(self) -> str:
        tokens = "positions of a text" if self.is_text else "random tokens"
        return (
            f"check: logits of {self.positions} {tokens} differ by at most {self.largest:.2e} (largest logit "
            f"{self.scale:.1f}), likeliest token the same in {self.agreement:.2%}"
        )


def load_stage(stage: Stage, source: Checkpoint, use_main_weights: bool) -> None:
    """Load the weights of a stage; with `use_main_weights` the fp32 ones of the optimizer, if the checkpoint has them.

    Raises:
        CheckpointError: if the checkpoint does not have these tensors.
    """
    shards = model_shards(stage, Mesh.single_process())
    if use_main_weights:
        main_names = {shard.name: shard.name.replace("model/", "optimizer.main/", 1) for shard in shards}
        shards = [
            replace(shard, name=main_names[shard.name]) if main_names[shard.name] in source.manifest.tensors else shard
            for shard in shards
        ]
    source.fill(shards)


@torch.no_grad()
def megalite_logits(
    source: Checkpoint, model: ModelConfig, ids_BS: Tensor, vocab_size: int, use_main_weights: bool = False
) -> Tensor:
    """Return the fp32 logits [B, S, V] of a checkpoint, loaded as a single stage on the CPU.

    Args:
        use_main_weights: see `load_stage`.
    """
    num_rows = source.shape("model/embedding.word")[0]
    make = ParamFactory(Mesh.single_process(), torch.float32, seed=0)
    layers = range(model.num_layers)
    stage = Stage(make, model, [layers], 0, vocab_size=vocab_size, padded_vocab_size=num_rows)
    load_stage(stage, source, use_main_weights)
    batch = Batch(ids_BS.T, None, None, torch.zeros(len(ids_BS), dtype=torch.int64))
    return stage.eval()(None, batch, ForwardContext())[..., :vocab_size].transpose(0, 1)


def require_transformers() -> None:
    """Raise CheckpointError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        message = missing_package_message("comparing logits", "transformers")
        raise CheckpointError(f"{message}, or use --check-bits")


def _open_with_transformers(directory: Path) -> Any:
    """Return the model in fp32, as its published code defines it.

    A model_type that is another name of a family is read as that, with the family's values of keys that transformers
    uses in another way.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    keys = read_json(directory / "config.json")
    model_type = str(keys.get("model_type"))
    family = ALIASES.get(model_type, model_type)
    model_class: Any = transformers.AutoModelForCausalLM
    kwargs: dict[str, Any] = {}
    if family in FAMILIES and family in transformers.CONFIG_MAPPING:
        if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # Mistral 4
            model_class = getattr(transformers, FAMILIES.get(family).architecture)
        if family != model_type:
            kwargs["config"] = transformers.CONFIG_MAPPING[family].from_dict({**keys, "model_type": family})
        kwargs |= FAMILIES.get(family).written_keys  # in place of the values in config.json
    with hidden_packages(*KERNEL_PACKAGES_OF_TRANSFORMERS):
        return model_class.from_pretrained(
            directory,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **kwargs,
        )


def compare_logits(
    directory: Path,
    source: Checkpoint,
    model: ModelConfig,
    vocab_size: int,
    ids: list[int] | None = None,
    *,
    use_main_weights: bool = False,
    rounding: float = 0.0,
) -> LogitVerdict:
    """Compare the logits of a Hugging Face model directory, as transformers computes them, with those of a checkpoint.

    Args:
        ids: the tokens of a text; None: random tokens.
        use_main_weights: see `load_stage`.
        rounding: the largest relative change of a weight in the conversion.

    Raises:
        CheckpointError: if transformers is not installed, or cannot open the model.
    """
    require_transformers()

    if ids:
        ids_BS = torch.tensor([ids[: model.max_positions]])
    else:
        generator = torch.Generator().manual_seed(1234)
        ids_BS = torch.randint(0, vocab_size, (2, min(model.max_positions, 64)), generator=generator)
    try:
        hf_model = _open_with_transformers(directory)
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        # an architecture that it does not have, such as a plugin's, or config.json does not fit the weights
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"transformers cannot open {directory} ({reason}); correct its config.json, or use --check-bits"
        ) from None
    with torch.no_grad():
        # with a cache, transformers fails if no layer has attention
        expected = hf_model.eval()(ids_BS, use_cache=False).logits[..., :vocab_size].float()
    del hf_model  # two models at once may not fit in memory
    actual = megalite_logits(source, model, ids_BS, vocab_size, use_main_weights)
    return LogitVerdict(
        is_text=bool(ids),
        positions=ids_BS.numel(),
        largest=float((actual - expected).abs().max()),
        scale=float(expected.abs().max()),
        agreement=float((actual.argmax(-1) == expected.argmax(-1)).double().mean()),
        bound=LOGIT_BOUND + ROUNDINGS * rounding * math.sqrt(model.num_layers),
    )


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors.

    Attributes:
        note: a difference in shape, dtype or existence, or an empty string.
        index: of the first element that differs; None if no elements do.
        first, second: the two values at `index`.
        largest: the largest absolute difference.
        count: number of elements that differ.
    """

    name: str
    note: str = ""
    index: tuple[int, ...] | None = None
    first: float = 0.0
    second: float = 0.0
    largest: float = 0.0
    count: int = 0


def difference(name: str, first: Tensor, second: Tensor) -> Difference | None:
    """Compare two tensors of one shape, and return None if they are equal.

    Tensors of one dtype have to be bitwise equal, those of different dtypes equal in values, where NaN equals NaN.
    """
    note = ""
    if first.dtype == second.dtype:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]
        differs = first.contiguous().view(bits) != second.contiguous().view(bits)
    else:
        note = f"{str(first.dtype)[6:]} and {str(second.dtype)[6:]}"
        x, y = first.double(), second.double()
        differs = ~((x == y) | (x.isnan() & y.isnan()))
    if not differs.any():
        return Difference(name, note) if note else None
    flat_index = differs.reshape(-1).to(torch.uint8).argmax()
    index = tuple(int(i) for i in torch.unravel_index(flat_index, first.shape)) if first.dim() else ()
    x, y = first[differs].double(), second[differs].double()
    largest = float((x - y).abs().nan_to_num(math.inf, math.inf).max())
    return Difference(name, note, index, float(x[0]), float(y[0]), largest, len(x))


@dataclass(frozen=True)
class Verdict:
    """The comparison of all tensors; `differing` has one entry per rectangle of a megalite tensor that differs."""

    tensors: int
    elements: int
    differing: list[Difference]

    def __str__(self) -> str:
        if not self.differing:
            return f"check: {self.tensors} tensors, {self.elements:,} elements, all bits equal"
        largest = max(self.differing, key=lambda difference: difference.largest)
        lines = [
            f"check: {len(self.differing)} parts of {self.tensors} tensors differ",
            f"first: {_format_difference(self.differing[0])}",
            f"largest: {_format_difference(largest)}",
        ]
        return "\n".join(lines)


def _format_difference(difference: Difference) -> str:
    dtypes = f"{difference.note}, " if difference.note else ""
    return (
        f"{difference.name}{list(difference.index or ())}: {difference.second!r} in the external files, "
        f"{difference.first!r} in the checkpoint; {dtypes}{difference.count:,} elements differ, by at most "
        f"{difference.largest:g}"
    )


def compare(external_tensors: Iterable[ExternalTensor], source: ExportSource, specs: Specs) -> Verdict:
    """Compare every external tensor with the same elements in a checkpoint of megalite.

    Args:
        specs: specs of the parameters; rows beyond their stored shape pad the vocabulary and are ignored.
    """
    num_tensors, num_elements = 0, 0
    differing = []
    for tensor in external_tensors:
        num_tensors += 1
        for spec, box, values in stored_boxes(tensor, specs):
            num_elements += values.numel()
            diff = difference(f"{tensor.location}, {spec.name}", source.read(spec.name, box), values)
            if diff is None:
                continue
            index = None
            if diff.index is not None:  # in the full tensor
                index = tuple(i + start for i, start in zip(diff.index, box.start, strict=True))
            differing.append(dataclasses.replace(diff, index=index))
    return Verdict(num_tensors, num_elements, differing)
