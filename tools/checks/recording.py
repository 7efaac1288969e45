"""What one rank of a short run had: its inputs, hidden states, losses, gradients before each update, and weights.

    take(ranks, config, dtype, steps, folder)     trains, and leaves folder/rank-00000.npz
    read(path) -> Recording                       numpy alone, for whoever compares

Everything is this rank's own copy in its own shape, with no word on where it lies in the whole tensor: that is for
tools/checks/agreement.py to say, by a rule of its own. Forwards are watched by hooks of torch, gradients by the hook
that a save has before an update. Weights are taken there, too, when the forward has waited for them, so that no gather
ends earlier than it does in a run.
"""

from __future__ import annotations

import datetime
import json
import signal
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tools.checks.places import Layout, place

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.config.options import Config
    from megalite.parallel.launch import Ranks
    from megalite.train.state import Run

Array = NDArray[Any]
ADDED = ".attention_added"  # hidden states between the two halves of a block
SUMMED = (".attention", ".mlp")  # ends of the names of what ends in a sum over tp
FINAL = "final_norm"  # hidden states that the head takes
STEP, MICROBATCH = "step", "micro-batch"
APART = 0.1  # how far weights that begin as constants (biases, norms) are moved, so that a wrong one shows at once


@dataclass(frozen=True)
class Item:
    """kind   input, forward, loss, norm, gradient, weight
    name    of the parameter, or of the module whose output it is; of losses STEP or MICROBATCH
    sample  the first of the micro-batch, -1 where there is none
    shape   of the rank's own tensor, of which [first, first + len(data)) of the flattened one is there"""

    step: int
    kind: str
    name: str
    sample: int
    shape: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Recording:
    """In the order in which they were taken. `parameters`: names in the order of use; `vocabulary`: those that have a
    row per id."""

    parameters: list[str]
    vocabulary: list[str]
    items: list[tuple[Item, Array]]


class _Recorder:
    def __init__(self, run: Run):
        self.run, self.step, self.sample = run, 0, None  # sample: of the micro-batch whose forward is under way
        self.items: list[tuple[Item, Array]] = []
        self.seen: set[tuple[int, str, int]] = set()
        for stage in run.pipeline.stages:
            self._watch(stage)
        run.before_update = self.before_update

    def add(self, kind: str, name: str, data: Tensor, sample: int = -1, shape: Any = None, first: int = 0) -> None:
        """In fp64 or fp32, whatever it is; integers as they are."""
        data = data.detach().cpu()
        plain = data.float() if data.is_floating_point() and data.dtype.itemsize < 4 else data
        made = tuple(data.shape if shape is None else shape)
        self.items.append((Item(self.step, kind, name, sample, made, first), plain.numpy().copy()))

    def _watch(self, stage: Any) -> None:
        stage.register_forward_pre_hook(self._begin)
        for name, module in _parts(stage):
            module.register_forward_hook(self._out(name))
        stage.register_forward_hook(self._end)

    def _begin(self, stage: Any, given: tuple[Any, ...]) -> None:
        """Of a stage. Only until its end: what is computed again in backward calls the same modules."""
        batch = given[1]
        self.sample = int(batch.sample_ids_B[0])
        inputs: dict[str, Any] = {}
        if stage.embedding is not None:
            inputs = {"tokens": batch.tokens_SB, "positions": batch.positions_SB}
        if stage.head is not None:
            inputs |= {"labels": batch.labels_SB, "loss mask": batch.mask_SB}
        for name, data in inputs.items():
            if data is not None:
                self._once("input", name, data)

    def _end(self, stage: Any, _given: Any, y: Tensor) -> None:
        if stage.head is not None:  # with a z-loss [2], the loss first
            self._once("loss", MICROBATCH, y.reshape(-1)[0])
        self.sample = None

    def _out(self, name: str) -> Callable[..., None]:
        def hook(_module: Any, given: tuple[Any, ...], y: Any) -> None:
            if self.sample is not None:
                if name.endswith(ADDED):  # what the second norm takes, or has added up itself
                    y = y[0] if isinstance(y, tuple) else given[0]
                self._once("forward", name, y)

        return hook

    def _once(self, kind: str, name: str, data: Tensor) -> None:
        assert self.sample is not None
        key = (self.step, name, self.sample)
        if key not in self.seen:
            self.seen.add(key)
            self.add(kind, name, data, self.sample)

    def weights(self, step: int) -> None:
        buffer, now = self.run.buffer, self.step
        self.step = step
        for bucket in buffer.layout.buckets:
            for slot in bucket.slots:
                data = buffer.weights[slot.start : slot.stop]
                self.add("weight", self.name(slot), data, shape=self.shape(slot))
        self.step = now

    def before_update(self) -> None:
        """Every gradient that this rank owns is complete; weights are those of the step before."""
        self.weights(self.step - 1)
        buffer = self.run.buffer
        for bucket in buffer.layout.buckets:
            owned = buffer.owned_range(bucket)
            for slot in bucket.slots:
                first, last = max(slot.start, owned.start), min(slot.stop, owned.stop)
                if first < last:
                    shape, data = self.shape(slot), buffer.grads[first:last]
                    self.add("gradient", self.name(slot), data, shape=shape, first=first - slot.start)

    def name(self, slot: Any) -> str:
        return self.run.buffer.layout.entries[slot.entry].spec.name

    def shape(self, slot: Any) -> tuple[int, ...]:
        return tuple(self.run.buffer.storage.parameters[slot.entry].shape)


def _parts(stage: Any) -> list[tuple[str, Any]]:
    """Modules whose outputs are compared, in the order of computation."""
    found = [] if stage.embedding is None else [("embedding", stage.embedding)]
    for block in stage.blocks:
        name = f"layers.{block.layer}"
        found += [(f"{name}.attention", block.attention), (f"{name}{ADDED}", block.mlp_norm)]
        found += [(f"{name}.mlp", block.mlp), (name, block)]
    return found if stage.head is None else [*found, (FINAL, stage.head.norm)]


def _set_apart(run: Run) -> None:
    """Move what begins as a constant, by an amount that depends on the name and the place in the whole tensor alone."""
    import torch

    from megalite.parallel.spec import Constant

    mesh, layout = run.mesh, Layout.of(run.mesh.sizes)
    for parameter, entry in zip(run.buffer.storage.parameters, run.buffer.layout.entries, strict=True):
        if isinstance(entry.spec.init, Constant):
            generator = np.random.default_rng(zlib.crc32(entry.spec.name.encode()))
            whole = APART * generator.standard_normal(entry.spec.shape)
            mine = whole[place(tuple(parameter.shape), whole.shape, mesh.tp.rank, layout)]
            parameter.data.add_(torch.from_numpy(mine).to(parameter))
    run.optimizer.after_load(main_loaded=False)


def take(ranks: Ranks, config: Config, dtype: str, steps: int, folder: str) -> None:
    """On one rank; `dtype`: of the weights, a name of torch's. Collective. A signal ends it without a word: who has
    started it tells it."""
    import torch

    from megalite.parallel.launch import process_group
    from megalite.parallel.local_ranks import FORWARDED
    from megalite.train.preflight import choose_device
    from megalite.train.setup import build_run
    from megalite.train.step import train_step

    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    limit = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    device = choose_device(config.parallel.device)
    with process_group(ranks, device=device, startup_timeout=limit) as here:
        run = build_run(config, ranks, here, dtype=getattr(torch, dtype))
        _set_apart(run)
        recorder = _Recorder(run)
        for step in range(1, steps + 1):
            recorder.step = step
            result = train_step(run)
            for kind, value in (("loss", result.loss), ("norm", result.grad_norm)):
                recorder.add(kind, STEP, torch.tensor(value, dtype=torch.float64))
        run.buffer.wait_gather()
        recorder.weights(steps)
        run.close()
        found = Recording(*_names(run), recorder.items)
        _write(Path(folder) / f"rank-{ranks.rank:05d}.npz", found)


def _names(run: Run) -> tuple[list[str], list[str]]:
    """Of parameters in the order of use, the head's own weight after its norm, and of those of the vocabulary."""
    stages: list[Any] = run.pipeline.stages
    heads = [stage.head.weight for stage in stages if stage.head is not None]
    words = [stage.embedding.word for stage in stages if stage.embedding is not None]
    own = {id(weight) for weight in heads} - {id(word) for word in words}
    pairs = zip(run.buffer.storage.parameters, run.buffer.layout.entries, strict=True)
    used = [entry.spec for _, entry in sorted(pairs, key=lambda pair: id(pair[0]) in own)]
    return [spec.name for spec in used], [spec.name for spec in used if spec.vocabulary]


def _write(path: Path, found: Recording) -> None:
    names = {"parameters": found.parameters, "vocabulary": found.vocabulary}
    index = json.dumps({**names, "items": [asdict(item) for item, _ in found.items]})
    arrays: dict[str, Any] = {str(i): data for i, (_, data) in enumerate(found.items)}
    np.savez(path, index=np.frombuffer(index.encode(), np.uint8), **arrays)


def read(path: Path) -> Recording:
    with np.load(path, allow_pickle=False) as file:
        index = json.loads(file["index"].tobytes())
        items = [Item(**{**one, "shape": tuple(one["shape"])}) for one in index["items"]]
        arrays = [(item, file[str(i)]) for i, item in enumerate(items)]
        return Recording(index["parameters"], index["vocabulary"], arrays)
