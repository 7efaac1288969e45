"""Record one rank of a short run: inputs, hidden states, losses, gradients before each update, and weights.

    take(ranks, config, dtype, steps, folder)     trains, and leaves folder/rank-00000.npz
    read_all(folder, layout) -> [Recording]       of every rank; numpy alone, for whoever compares

Everything is this rank's own copy in its own shape, with no word on where it lies in the whole tensor: that is for
tools/verification/compare_ranks.py to say, by a rule of its own. A layer is known by its place in the pipeline (chunk,
index in it), and gets its number when the layers of all stages are counted, whatever number it has itself. After the
first step and the last one the run is evaluated.

Forwards are watched by hooks of torch, gradients by the hook that a save has before an update. Weights are taken there,
too, when the forward has waited for them, so that no gather ends earlier than it does in a run.
"""

import datetime
import json
import re
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.config.options import Config
from megalite.launch.local_launcher import FORWARDED_SIGNALS
from megalite.launch.rank_info import RankInfo, process_group
from megalite.nn.moe import MoELayer
from megalite.parallel.comm import all_reduce_
from megalite.parallel.spec import Constant
from megalite.training.job.preflight import choose_device
from megalite.training.setup import build_run
from megalite.training.state import Run
from megalite.training.train_step import train_step
from megalite.training.trainer import evaluate
from tools.verification.reference_sharding import Layout, Place, of_experts, place

Array = NDArray[Any]
ADDED = ".attention_added"  # hidden states between the two halves of a block
ATTENTION = ".attention"
SUMMED = (ATTENTION, ".mlp")  # ends of the names of what ends in a sum over tp
FINAL = "final_norm"  # hidden states that the head takes
STEP, MICROBATCH = "step", "micro-batch"
APART = 0.1  # how far weights that begin as constants (biases, norms) are moved, so that a wrong one shows at once


class Item(NamedTuple):
    """kind   input, forward, loss, norm, gradient, router, weight
    name    of the parameter, or of the module whose output it is; of losses STEP or MICROBATCH
    step    of training; of the evaluation after step n, n + 0.5
    sample  the first of the micro-batch, -1 where there is none
    shape   of the rank's own tensor, of which [first, first + len(data)) of the flattened one is there
    row     of neighbouring tokens that a cp rank holds, the first one's place in the sample; else -1"""

    step: float
    kind: str
    name: str
    sample: int
    shape: tuple[int, ...]
    first: int
    row: int = -1


class Recording(NamedTuple):
    """In the order in which they were taken. `parameters`: names in the order of use; `vocabulary`: those that have a
    row per id; `layers`: how many each chunk has."""

    parameters: list[str]
    vocabulary: list[str]
    items: list[tuple[Item, Array]]
    layers: tuple[int, ...] = ()


class _Recorder:
    def __init__(self, run: Run):
        self.run, self.step, self.sample = run, 0.0, None  # sample: of the micro-batch whose forward is under way
        self.places: Tensor | None = None  # of its tokens on this rank of several of cp
        self.items: list[tuple[Item, Array]] = []
        self.seen: set[tuple[float, str, int]] = set()
        self.names = _names(run)
        self.routed = [f"{name}.mlp.router" for name, block in _blocks(run) if isinstance(block.mlp, MoELayer)]
        for chunk, stage in enumerate(run.pipeline.stages):
            self._watch(chunk, stage)
        run.before_update = self.before_update

    def add(self, kind: str, name: str, data: Tensor, sample: int = -1, row: int = -1, **of: Any) -> None:
        """In fp64 or fp32, whatever it is; integers as they are. of: shape and first, where it is a part."""
        data = data.detach().cpu()
        plain = data.float() if data.is_floating_point() and data.dtype.itemsize < 4 else data
        item = Item(self.step, kind, name, sample, of.get("shape", tuple(data.shape)), of.get("first", 0), row)
        self.items.append((item, plain.numpy().copy()))

    def _watch(self, chunk: int, stage: Any) -> None:
        stage.register_forward_pre_hook(self._begin)
        for name, module in _parts(chunk, stage):
            module.register_forward_hook(self._out(name))
        stage.register_forward_hook(self._end)

    def _begin(self, stage: Any, given: tuple[Any, ...]) -> None:
        """Start recording a stage's forward, until it ends: recomputation in backward calls the same modules."""
        batch = given[1]
        self.sample, self.places = int(batch.sample_ids_B[0]), batch.cp_positions_S
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
            self._once("loss", MICROBATCH, all_reduce_(y.detach().reshape(-1)[0].clone(), self.run.mesh.cp))
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
            for row, part in self._neighbours(data):
                self.add(kind, name, part, self.sample, row)

    def _neighbours(self, data: Tensor) -> list[tuple[int, Tensor]]:
        """What a cp rank, and of it this rank of tp, has of neighbouring tokens, each with its first place."""
        if self.places is None or data.dim() == 0:
            return [(-1, data)]
        first = self.run.mesh.tp.rank * len(data) % len(self.places)  # 0 where it has all
        places = self.places[first : first + len(data)]
        cuts = (1 + (places.diff() != 1).nonzero().flatten()).tolist()
        return [(int(at[0]), x) for at, x in zip(places.tensor_split(cuts), data.tensor_split(cuts), strict=True)]

    def weights(self, step: float) -> None:
        """All that is there between steps: of what comes and goes the part that this rank holds."""
        weights, now = self.run.buffer.weights, self.step
        self.step = step
        for bucket in weights.layout.buckets:
            for slot in bucket.slots:
                span, data = weights.resident_slice(slot)
                if span:
                    self.add("weight", self.names[slot.entry], data, shape=self.shape(slot), first=span.start)
        for name, router in zip(self.routed, self.run.expert_balancer.routers, strict=True):
            if router.bias is not None:
                self.add("weight", f"{name}.bias", router.bias)
        self.step = now

    def routers(self) -> None:
        """What they counted in the step, and their auxiliary losses."""
        balance = self.run.expert_balancer
        for name, router in zip(self.routed, balance.routers, strict=True):
            for what, sums in (("counts", balance.counts_LE), ("losses", balance.losses_L3)):
                self.add("router", f"{name}.{what}", sums[balance.layers.index(router.layer)])

    def before_update(self) -> None:
        """Every gradient that this rank owns is complete; weights are those of the step before."""
        self.weights(self.step - 1)
        grads = self.run.buffer.grads
        for bucket in grads.layout.buckets:
            for slot in bucket.slots:
                part = grads.owned_slice(slot)
                if part.span:
                    shape, data = self.shape(slot), part.select(grads.owned(bucket))
                    self.add("gradient", self.names[slot.entry], data, shape=shape, first=part.span.start)

    def shape(self, slot: Any) -> tuple[int, ...]:
        return tuple(self.run.buffer.parameters[slot.entry].shape)


def _layer(chunk: int, index: int) -> str:
    return f"layers.{chunk}:{index}"


def _parts(chunk: int, stage: Any) -> list[tuple[str, Any]]:
    """Modules whose outputs are compared, in the order of computation."""
    parts = [] if stage.embedding is None else [("embedding", stage.embedding)]
    for index, block in enumerate(stage.blocks):
        name = _layer(chunk, index)
        parts += [(f"{name}.attention", block.attention), (f"{name}{ADDED}", block.mlp_norm)]
        parts += [(f"{name}.mlp", block.mlp), (name, block)]
    return parts if stage.head is None else [*parts, (FINAL, stage.head.norm)]


def _numbers(name: str, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def _set_apart(run: Run) -> None:
    """Move what begins as a constant, by an amount that depends on the name and the place in the whole tensor alone."""
    sizes, at, weights = run.mesh.sizes, run.mesh.coordinates, run.buffer.weights
    layout = Layout(sizes["tp"], ep=sizes["ep"], etp=sizes["etp"])
    here = Place(at["tp"], at["tp"], 0, 0, ep=at["ep"], etp=at["etp"])
    for slot in (slot for bucket in weights.layout.buckets for slot in bucket.slots):
        parameter, spec = run.buffer.parameters[slot.entry], run.buffer.layout.entries[slot.entry].spec
        if isinstance(spec.init, Constant):
            whole = APART * _numbers(spec.name, spec.shape)
            mine = whole[place(tuple(parameter.shape), whole.shape, here, layout, of_experts(spec.name))]
            span, data = weights.resident_slice(slot)  # a bias of experts comes and goes at ZeRO-3
            data.add_(torch.from_numpy(mine.reshape(-1)[span.start : span.stop]).to(data))
    for router in run.expert_balancer.routers:
        if router.bias is not None:
            router.bias += APART * torch.from_numpy(_numbers(router.name, router.bias.shape)).to(router.bias)
    run.optimizer.sync_after_load(main_loaded=False)


def take(ranks: RankInfo, config: Config, dtype: str, steps: int, folder: str) -> None:
    """On one rank; `dtype`: of the weights, a name of torch's. Collective. A signal ends it without a word: who has
    started it tells it."""
    for number in FORWARDED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
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
            recorder.routers()
            if step in (1, steps) and run.valid_loaders:
                recorder.step = step + 0.5
                loss = evaluate(run, run.valid_loaders[0].data, config.train.eval_iters)
                recorder.add("loss", STEP, torch.tensor(loss, dtype=torch.float64))
        run.buffer.wait_param_sync()
        recorder.weights(steps)
        run.close()
        layers = tuple(len(stage.blocks) for stage in run.pipeline.stages)  # type: ignore[arg-type]
        recording = Recording(*_in_order_of_use(run, recorder.names), recorder.items, layers)
        write(Path(folder) / f"rank-{ranks.rank:05d}.npz", recording)


def _names(run: Run) -> list[str]:
    """The names of all parameters; those of a layer contain its place."""
    places = {id(parameter): name for name, block in _blocks(run) for parameter in block.parameters()}
    pairs = zip(run.buffer.parameters, run.buffer.layout.entries, strict=True)
    return [re.sub(r"^layers\.\d+", places.get(id(parameter), ""), entry.spec.name) for parameter, entry in pairs]


def _blocks(run: Run) -> list[tuple[str, Any]]:
    """Every block, by its place."""
    stages: list[Any] = run.pipeline.stages
    return [(_layer(chunk, i), block) for chunk, stage in enumerate(stages) for i, block in enumerate(stage.blocks)]


def _in_order_of_use(run: Run, names: list[str]) -> tuple[list[str], list[str]]:
    """The names of the parameters, the head's own weight after its norm, and the names of the vocabulary's."""
    stages: list[Any] = run.pipeline.stages
    heads = [stage.head.weight for stage in stages if stage.head is not None]
    words = [stage.embedding.word for stage in stages if stage.embedding is not None]
    own = {id(weight) for weight in heads} - {id(word) for word in words}
    rows = zip(run.buffer.parameters, run.buffer.layout.entries, names, strict=True)
    used = [(name, entry.spec) for _, entry, name in sorted(rows, key=lambda row: id(row[0]) in own)]
    return [name for name, _ in used], [name for name, spec in used if spec.is_vocab]


def write(path: Path, found: Recording) -> None:
    names = {"parameters": found.parameters, "vocabulary": found.vocabulary, "layers": found.layers}
    index = json.dumps({**names, "items": [item._asdict() for item, _ in found.items]})
    arrays: dict[str, Any] = {str(i): data for i, (_, data) in enumerate(found.items)}
    np.savez(path, index=np.frombuffer(index.encode(), np.uint8), **arrays)


def read_all(folder: Path, layout: Layout) -> list[Recording]:
    """In order of ranks, their layers numbered from the first stage to the last by how many each has."""
    ranks = [_read(path) for path in sorted(folder.glob("rank-*.npz"))]
    pp = [layout.at(rank).pp for rank in range(len(ranks))]
    counts = {(chunk, pp[rank]): n for rank, one in enumerate(ranks) for chunk, n in enumerate(one.layers)}
    first, total = {}, 0
    for stage in sorted(counts):  # chunk 0 of every pipeline rank, chunk 1 of every one, ...
        first[stage], total = total, total + counts[stage]

    def numbered(one: Recording, pp: int) -> Recording:
        def name(text: str) -> str:
            return re.sub(r"(\d+):(\d+)", lambda at: str(first[int(at[1]), pp] + int(at[2])), text, count=1)

        items = [(item._replace(name=name(item.name)), data) for item, data in one.items]
        return Recording([*map(name, one.parameters)], [*map(name, one.vocabulary)], items, one.layers)

    return [numbered(one, pp[rank]) for rank, one in enumerate(ranks)]


def _read(path: Path) -> Recording:
    with np.load(path, allow_pickle=False) as file:
        index = json.loads(file["index"].tobytes())
        items = [Item(**{**one, "shape": tuple(one["shape"])}) for one in index["items"]]
        arrays = [(item, file[str(i)]) for i, item in enumerate(items)]
        return Recording(index["parameters"], index["vocabulary"], arrays, tuple(index["layers"]))
