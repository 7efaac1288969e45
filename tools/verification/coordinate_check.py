"""The coordinate check of the maximal update parametrization (arXiv:2203.03466, appendix D.1).

    scale_widths(model, factor)                            the model with all widths multiplied
    measure(config, device) -> Measurement                 train a few steps; sizes of activations after each
    find_growth(measurements) -> {name: growth}            how much wider models exceed the narrowest

The size of an activation is the root of the mean square of its coordinates, on tokens that are the same at every step.
The change is that of the difference from the activation before the first step. If hyperparameters are to be the best
ones at every width, neither may grow with it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.options import Config, ModelConfig
from megalite.launch.rank_info import RankInfo
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.training.batch import to_device
from megalite.training.setup import build_run
from megalite.training.state import InvalidResultError, Run
from megalite.training.train_step import train_step

EMBEDDING, MIXERS, MLPS, HIDDEN, LOGITS = "embedding", "mixers", "MLPs", "hidden states", "logits"
ACTIVATIONS = (EMBEDDING, MIXERS, MLPS, HIDDEN, LOGITS)
# options of ModelConfig that are multiplied with the width, as are heads; a head keeps its channels
_WIDTHS = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "q_lora_rank",
    "linear_num_value_heads",
    "mamba_num_heads",
    "mamba_num_groups",
)


@dataclass(frozen=True)
class Measurement:
    """The sizes of activations in a short training.

    Attributes:
        sizes: activation -> its size before the first step and after each.
        changes: activation -> the size of its change since the start, after each step.
        losses: the loss of each step.

    All end with infinity at the step in which a training diverges.
    """

    sizes: Mapping[str, list[float]]
    changes: Mapping[str, list[float]]
    losses: list[float]

    def to_json(self) -> dict[str, Any]:
        """Return the fields, in which a number that is not finite is None."""

        def finite(values: list[float]) -> list[float | None]:
            return [value if math.isfinite(value) else None for value in values]

        fields = asdict(self)
        by_activation = {key: {name: finite(x) for name, x in fields[key].items()} for key in ("sizes", "changes")}
        return {**by_activation, "losses": finite(self.losses)}


def scale_widths(model: ModelConfig, factor: int) -> ModelConfig:
    """Return the model with all widths multiplied by `factor`: there are more heads of the same size."""
    changes: dict[str, Any] = {name: value * factor for name in _WIDTHS if (value := getattr(model, name)) is not None}
    changes["ffn_hidden_size"] = model.ffn_size * factor
    changes["kv_channels"] = model.head_size
    if model.multi_latent_attention:
        changes["kv_lora_rank"] = model.kv_lora_rank * factor
    if model.uses_delta_rule:
        changes["linear_num_key_heads"] = model.linear_num_key_heads * factor
    return replace(model, **changes)


class _Probe:
    """The activations of a run for fixed tokens, read by hooks."""

    def __init__(self, run: Run):
        self.run = run
        host_batches, _ = run.train_loader.get(0, run.eval_batch_size)
        self.batch: Batch = replace(to_device(host_batches[0], run.mesh.device), labels_SB=None, mask_SB=None)
        self.outputs: dict[str, list[Tensor]] = defaultdict(list)

    def read(self) -> dict[str, list[Tensor]]:
        """Return activation -> its values in each layer, in fp32 on the CPU."""
        self.run.sync.wait_param_sync()
        stage: Any = self.run.pipeline.stages[0]  # the only one in one process
        modules: list[tuple[str, nn.Module | None]] = [
            (EMBEDDING, stage.embedding),
            *((MIXERS, block.mixer) for block in stage.blocks),
            *((MLPS, block.mlp) for block in stage.blocks),
            (HIDDEN, stage.final_norm),
        ]
        self.outputs.clear()
        handles = [
            module.register_forward_hook(partial(self._record, name)) for name, module in modules if module is not None
        ]
        was_training = stage.training
        stage.eval()
        try:
            with torch.no_grad():
                logits_SBV = stage(None, self.batch, ForwardContext(self.run.progress.step))
        finally:
            stage.train(was_training)
            for handle in handles:
                handle.remove()
        self.outputs[LOGITS].append(logits_SBV[..., : self.run.vocab_size].float().cpu())
        return dict(self.outputs)

    def _record(self, name: str, _: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs[name].append(output.float().cpu())


def _root_mean_square(values: Sequence[Tensor]) -> float:
    return float(torch.stack([x.square().mean() for x in values]).mean().sqrt())


def measure(config: Config, device: torch.device) -> Measurement:
    """Train the run for its --train-iters steps in this process and measure its activations."""
    run = build_run(config, RankInfo(), device)
    try:
        probe = _Probe(run)
        initial = probe.read()
        sizes = {name: [_root_mean_square(values)] for name, values in initial.items()}
        changes: dict[str, list[float]] = {name: [] for name in initial}
        losses = []
        for _ in range(run.last_step):
            try:
                losses.append(train_step(run).loss)
            except InvalidResultError:
                for values in (losses, *sizes.values(), *changes.values()):
                    values.append(math.inf)
                break
            for name, values in probe.read().items():
                sizes[name].append(_root_mean_square(values))
                differences = [x - start for x, start in zip(values, initial[name], strict=True)]
                changes[name].append(_root_mean_square(differences))
    finally:
        run.close()
    return Measurement(sizes, changes, losses)


def find_growth(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Return the growth from the narrowest model, the first one, to the largest value of a wider one.

    The keys are "NAME" for the size of an activation after the last step, and "change of NAME" for that of its change.
    A growth is NaN if one of the values is. In the narrowest model they are finite and not 0.
    """
    growth = {}
    for name in measurements[0].sizes:
        for key, values in (
            (name, [m.sizes[name][-1] for m in measurements]),
            (f"change of {name}", [m.changes[name][-1] for m in measurements]),
        ):
            growth[key] = largest(value / values[0] for value in values[1:])
    return growth


def largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if one is NaN."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)
