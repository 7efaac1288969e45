"""What plugins see of a run, while it trains: `log`, for figures of their own, and moments at which they are called.

A figure is a mean, weighted by counts: sum of values / sum of counts. So it is the same under every layout:
micro-batches and ranks add up, tp ranks that hold parts of a tensor log their parts, and copies on several ranks, or a
forward that runs again in backward, change nothing, where they would change a sum. Values stay on the device until a
line of the log is due, which takes one all-reduce; where no plugin registers a metric nothing of this happens.
"""

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megalite.config.registry import REGISTRIES
from megalite.models.gpt import Block, Stage
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh

_current: list[tuple["PluginMetrics | None", int | None]] = [
    (None, None)
]  # of this process's run, and the layer that computes


class PluginMetrics:
    """Of the metrics that plugins registered, since they were taken last. `sums_MLs`: of each metric and layer, and of
    what is outside of layers, the sums of values and of counts."""

    def __init__(self, stages: Iterable[Any], mesh: Mesh, layers: int):
        self.mesh, self.names = mesh, list(REGISTRIES["metric"].added)
        self.sums_MLs = torch.zeros(len(self.names), layers + 1, 2, dtype=torch.float64, device=mesh.device)
        _current[0] = self, None
        blocks = [block for stage in stages if isinstance(stage, Stage) for block in stage.blocks]
        for block in blocks if self.names else ():
            assert isinstance(block, Block)
            for module in block.modules():  # a part of it may run again by itself, in backward
                module.register_forward_pre_hook(self._enter(block.layer))
            block.register_forward_hook(self._leave)

    def _enter(self, layer: int) -> Any:
        def enter(module: torch.nn.Module, _: Any) -> None:
            _current[0] = (self, layer) if module.training else (None, None)  # evaluations are not logged

        return enter

    def _leave(self, *_: Any) -> None:
        _current[0] = self, None

    def add(self, metric: int, layer: int | None, value: Any, count: Any) -> None:
        values = torch.as_tensor(value, device=self.mesh.device).detach()
        at = self.sums_MLs[metric, -1 if layer is None else layer]
        at[0] += values.sum(dtype=torch.float64)
        at[1] += values.numel() if count is None else count

    def reduce_and_reset(self) -> dict[str, Any]:
        """Rows of metrics.jsonl: metric/NAME, the mean over layers, and where it is one per layer metric/NAME/layers.
        None where nothing was logged. Collective, where there are metrics."""
        if not self.names:
            return {}
        sums_MLs = all_reduce_(self.sums_MLs.clone(), self.mesh.world).cpu()
        self.sums_MLs.zero_()
        found = dict[str, Any]()
        for name, sums_Ls in zip(self.names, sums_MLs.tolist(), strict=True):
            of_layers = [total / count if count else None for total, count in sums_Ls]
            there = [mean for mean in of_layers if mean is not None]
            found[f"metric/{name}"] = sum(there) / len(there) if there else None
            if REGISTRIES["metric"].get(name) == "layer":  # JSON has no nan
                finite = [mean if mean is not None and math.isfinite(mean) else None for mean in of_layers]
                found[f"metric/{name}/layers"] = finite[:-1]
        return found


def log(name: str, value: float | Tensor, count: float | Tensor | None = None) -> None:
    """Add to the metric `name`: `value`, the sum of a tensor's elements, which count 1 each, or `count` together. From
    a forward in a block, or a callback. A run counts the metrics that were there when it began. Raises ValueError where
    no plugin has registered it."""
    if name not in REGISTRIES["metric"]:
        raise ValueError(f"metric={name!r} is not registered; megalite.register('metric', {name!r}, 'layer' or 'step')")
    if not isinstance(value, Real | Tensor) or not isinstance(count, Real | Tensor | None):
        kinds = f"{type(value).__name__}, with a count of type {type(count).__name__}"
        raise ValueError(f"metric={name!r} is logged with a value of type {kinds}; give numbers or tensors")
    figures, layer = _current[0]
    if (
        figures is not None and name in figures.names and not (isinstance(value, Tensor) and value.is_meta)
    ):  # a plan has no values
        figures.add(figures.names.index(name), layer, value, count)


def run_callbacks(moment: str, *about: Any) -> None:
    """Call the callbacks of plugins that have this moment, on every rank."""
    _current[0] = _current[0][0], None
    for callback in REGISTRIES["callback"].added.values():
        getattr(callback, moment, lambda *_: None)(*about)
