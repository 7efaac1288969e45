"""The metrics of plugins: `log` adds to them, from forwards of blocks and from callbacks.

A metric is a mean weighted by counts: sum of values / sum of counts. It is therefore the same under every layout. The
sums of micro-batches and ranks add up, tp ranks that hold shards of a tensor log their shards, and replicas on several
ranks or a recomputed forward do not change a mean, although they would change a sum. Values remain on the device until
a log line is due, which takes one all-reduce. If no plugin registers a metric, none of this happens.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megalite.config.registry import REGISTRIES
from megalite.models.gpt import Stage
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh


@dataclass
class _Current:
    """The metrics that `log` adds to: those of this process's run, or None; and the layer that is computing."""

    metrics: "PluginMetrics | None" = None
    layer: int | None = None


_current = _Current()


class PluginMetrics:
    """The metrics that plugins registered, summed since the last log line.

    Attributes:
        names: The M registered metrics.
        sums_MLs: fp64 [M, layers + 1, 2]: sum of values and sum of counts of each metric and layer; the last row is for
            values that were logged outside of layers.
    """

    def __init__(self, stages: Iterable[Any], mesh: Mesh, layers: int):
        self.mesh = mesh
        self.names = list(REGISTRIES["metric"].plugin_components)
        self.sums_MLs = torch.zeros(len(self.names), layers + 1, 2, dtype=torch.float64, device=mesh.device)
        self._leave_layer()
        if not self.names:
            return
        for stage in stages:
            if isinstance(stage, Stage):
                for block in stage.all_blocks:
                    self._register_hooks(block)

    def _register_hooks(self, block: Any) -> None:
        def enter_layer(module: torch.nn.Module, _: Any) -> None:
            _current.metrics = self if module.training else None  # evaluations are not logged
            _current.layer = block.layer

        for module in block.modules():  # backward may recompute a single module of the block
            module.register_forward_pre_hook(enter_layer)
        block.register_forward_hook(self._leave_layer)

    def _leave_layer(self, *_: Any) -> None:
        _current.metrics = self
        _current.layer = None

    def add(self, metric: int, layer: int | None, value: Any, count: Any) -> None:
        """Add the elements of `value` to the metric of this index; `count` is their number by default."""
        values = torch.as_tensor(value, device=self.mesh.device).detach()
        sums = self.sums_MLs[metric, -1 if layer is None else layer]
        sums[0] += values.sum(dtype=torch.float64)
        sums[1] += values.numel() if count is None else count

    def reduce_and_reset(self) -> dict[str, Any]:
        """Return the metrics as fields of metrics.jsonl, and reset the sums; collective if there are metrics.

        metric/NAME is the mean over layers; a metric of kind "layer" also has metric/NAME/layers with one mean per
        layer. A value is None if nothing was logged.
        """
        if not self.names:
            return {}
        sums_MLs = all_reduce_(self.sums_MLs.clone(), self.mesh.world).cpu()
        self.sums_MLs.zero_()
        metrics = dict[str, Any]()
        for name, sums_Ls in zip(self.names, sums_MLs.tolist(), strict=True):
            means = [total / count if count else None for total, count in sums_Ls]
            logged_means = [mean for mean in means if mean is not None]
            metrics[f"metric/{name}"] = sum(logged_means) / len(logged_means) if logged_means else None
            if REGISTRIES["metric"].get(name) == "layer":
                layer_means = means[:-1]
                metrics[f"metric/{name}/layers"] = [  # JSON has no nan
                    mean if mean is not None and math.isfinite(mean) else None for mean in layer_means
                ]
        return metrics


def log(name: str, value: float | Tensor, count: float | Tensor | None = None) -> None:
    """Add a value to the metric `name`, from a forward within a block or from a callback.

    A run has the metrics that were registered when it started; a value of another metric is dropped.

    Args:
        value: A number, or a tensor whose elements are summed.
        count: The weight of the value in the mean; by default the number of its elements.

    Raises:
        ValueError: if no plugin has registered the metric, or if an argument is neither a number nor a tensor.
    """
    if name not in REGISTRIES["metric"]:
        raise ValueError(f"metric={name!r} is not registered; megalite.register('metric', {name!r}, 'layer' or 'step')")
    if not isinstance(value, Real | Tensor) or not isinstance(count, Real | Tensor | None):
        kinds = f"{type(value).__name__}, with a count of type {type(count).__name__}"
        raise ValueError(f"metric={name!r} is logged with a value of type {kinds}; give numbers or tensors")
    metrics = _current.metrics
    is_meta = isinstance(value, Tensor) and value.is_meta  # a dry run has no values
    if metrics is not None and name in metrics.names and not is_meta:
        metrics.add(metrics.names.index(name), _current.layer, value, count)


def leave_layers() -> None:
    """Let `log` add values that belong to no layer, until the next forward of a block."""
    _current.layer = None
