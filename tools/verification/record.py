"""Record a short run on one rank: inputs, hidden states, losses, gradients before each update, and weights.

    record_rank(ranks, config, dtype, steps, directory)    train, and write directory/rank-00000.npz
    read_all(directory, layout) -> [Recording]             read the recordings of all ranks

A rank records its local tensors, without their position in the full tensors: tools/verification/compare_ranks.py
computes that with a rule of its own. A layer is identified by its chunk and its index in the chunk. `read_all` numbers
the layers by counting those of all stages, so the numbers do not depend on those that the layers have themselves. The
run is evaluated after the first and after the last step.

Forward hooks of torch record hidden states. Gradients and weights are recorded in `run.before_update`, which a save
uses too. The forward has waited for the weights by then, so no all-gather finishes earlier than in a run that is not
recorded.
"""

import dataclasses
import datetime
import json
import re
import signal
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.config.options import Config
from megalite.launch.local_launcher import FORWARDED_SIGNALS
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import RankInfo
from megalite.optim.zero.layout import ParamSlot
from megalite.parallel.comm import all_reduce_
from megalite.parallel.spec import Constant
from megalite.training.evaluation import evaluate
from megalite.training.job.preflight import choose_device
from megalite.training.setup import build_run
from megalite.training.state import Run, StepResult
from megalite.training.train_step import train_step
from tools.verification.reference_sharding import Layout, RankCoordinates, expected_slices, is_expert_param

Array = NDArray[Any]
Parts = list[tuple[bool, bool]]  # (has a mixer, has an MLP) of each layer
ATTENTION_ADDED = ".attention_added"  # hidden states between the two halves of a block
FINAL_NORM = "final_norm"  # the hidden states that enter the head
STEP, MICROBATCH = "step", "micro-batch"  # names of losses
PERTURBATION = 0.1  # scale of what is added to constants (biases, norms), so that a wrong one shows at once


@dataclass(frozen=True)
class RecordedTensor:
    """The description of a recorded tensor.

    Attributes:
        step: the training step; n + 0.5 in the evaluation after step n.
        kind: input, forward, loss, gradient, norm, router or weight.
        name: of the parameter, or of the module with this output; for losses STEP or MICROBATCH.
        sample: the first sample of the micro-batch; -1 if the tensor does not belong to one.
        shape: shape of the rank's tensor. The data are its elements [start, start + len(data)), flat.
        start: see `shape`.
        first_position: with cp, the position in the sample of the first token; otherwise -1.
    """

    step: float
    kind: str
    name: str
    sample: int
    shape: tuple[int, ...]
    start: int
    first_position: int = -1


@dataclass(frozen=True)
class Recording:
    """The records of one rank.

    Attributes:
        parameters: names in the order of use.
        vocabulary: names of the parameters with a row per token id.
        tensors: (description, data) in the order of recording.
        parts_per_chunk: for each layer of each chunk, whether it has a mixer and whether it has an MLP.
    """

    parameters: list[str]
    vocabulary: list[str]
    tensors: list[tuple[RecordedTensor, Array]]
    parts_per_chunk: tuple[Parts, ...] = ()


class _RankRecorder:
    """The tensors that a run has computed so far, recorded by hooks."""

    def __init__(self, run: Run):
        self.run = run
        self.step = 0.0
        self.sample: int | None = None  # the first one of the micro-batch in a recorded forward
        self.cp_positions: Tensor | None = None  # positions of this rank's tokens; None without cp
        self.tensors: list[tuple[RecordedTensor, Array]] = []
        self.recorded: set[tuple[float, str, int]] = set()  # (step, name, sample)
        self.num_depths = run.loss_sums.num_depths
        self.names = _param_names(run)
        self.router_names = [f"{name}.mlp.router" for name, block in _blocks(run) if block.spec.has_experts]
        for chunk, stage in enumerate(run.pipeline.stages):
            self._add_hooks(chunk, stage)
        run.before_update = self.before_update

    def add(
        self,
        kind: str,
        name: str,
        data: Tensor,
        *,
        sample: int = -1,
        first_position: int = -1,
        shape: tuple[int, ...] | None = None,
        start: int = 0,
    ) -> None:
        """Record a tensor; half precision becomes fp32.

        Args:
            shape: shape of the rank's tensor if `data` are only some of its elements, those from `start`.
        """
        data = data.detach().cpu()
        if data.is_floating_point() and data.dtype.itemsize < 4:
            data = data.float()
        shape = tuple(data.shape) if shape is None else shape
        recorded = RecordedTensor(self.step, kind, name, sample, shape, start, first_position)
        self.tensors.append((recorded, data.numpy().copy()))

    def record_weights(self, step: float) -> None:
        """Record all weights that are allocated between steps, under the number of a step.

        These are full parameters, or this rank's shards of parameters that are resharded.
        """
        current_step = self.step
        self.step = step
        for bucket in self.run.sync.param_buckets:
            for slot in bucket.layout.slots:
                elements, data = bucket.resident_slice(slot)
                if elements:
                    shape = self._param_shape(slot)
                    self.add("weight", self.names[slot.entry], data, shape=shape, start=elements.start)
        for name, router in zip(self.router_names, self.run.expert_balancer.routers, strict=True):
            if router.expert_bias is not None:
                self.add("weight", f"{name}.bias", router.expert_bias)
        self.step = current_step

    def record_routers(self, result: StepResult) -> None:
        """Record the load of experts and the losses of this rank's layers in a step."""
        balancer = self.run.expert_balancer
        for name, router in zip(self.router_names, balancer.routers, strict=True):
            self.add("router", f"{name}.counts", balancer.counts_LE[balancer.layers.index(router.layer)])
        stages: list[Any] = self.run.pipeline.stages
        for number in dict.fromkeys(block.layer for stage in stages for block in stage.all_blocks):
            losses = [loss for (_, layer), loss in result.layer_losses.items() if layer == number]
            if losses:
                self.add("router", f"layers.{number}.losses", torch.tensor(losses, dtype=torch.float64))

    def before_update(self) -> None:
        """Record the complete gradients that this rank owns, and the weights after the previous step."""
        self.record_weights(self.step - 1)
        for bucket in self.run.sync.grad_buckets:
            for slot in bucket.layout.slots:
                owned = bucket.owned_slice(slot)
                if owned.span:
                    data = owned.select(bucket.owned_sums)
                    shape = self._param_shape(slot)
                    self.add("gradient", self.names[slot.entry], data, shape=shape, start=owned.span.start)

    def _add_hooks(self, chunk: int, stage: Any) -> None:
        stage.register_forward_pre_hook(self._start_forward)
        for name, module, is_norm in _recorded_modules(chunk, stage):
            module.register_forward_hook(self._output_hook(name, is_norm))
        if stage.head is not None:
            stage.head.register_forward_pre_hook(self._record_depths)
        stage.register_forward_hook(self._end_forward)

    def _start_forward(self, stage: Any, args: tuple[Any, ...]) -> None:
        """Start to record a stage's forward. Recomputation, which calls the same modules, is not recorded."""
        batch = args[1]
        self.sample = int(batch.sample_ids_B[0])
        self.cp_positions = batch.cp_positions_S
        inputs: dict[str, Any] = {}
        if stage.embedding is not None:
            inputs = {"tokens": batch.tokens_SB, "positions": batch.positions_SB}
        if stage.head is not None:
            inputs |= {"labels": batch.labels_SB, "loss mask": batch.mask_SB}
            for depth in range(1, self.num_depths + 1):
                inputs[depth_name(depth, "tokens")] = batch.mtp_input(depth).tokens_SB
                inputs[depth_name(depth, "labels")] = batch.mtp_batch(depth).labels_SB
                inputs[depth_name(depth, "loss mask")] = batch.mtp_batch(depth).mask_SB
        for name, data in inputs.items():
            if data is not None:
                self._add_once("input", name, data)

    def _record_depths(self, _head: Any, args: tuple[Any, ...]) -> None:
        """Record the hidden states of the depths of multi-token prediction, which may share one module."""
        if self.sample is not None:
            for depth, h_sBD in enumerate(args[3], 1):
                self._add_once("forward", depth_name(depth), h_sBD)

    def _end_forward(self, stage: Any, _args: Any, y: Tensor) -> None:
        if stage.head is not None:
            loss = y.detach().clone()
            self._add_once("loss", MICROBATCH, all_reduce_(loss, self.run.mesh.cp))
        self.sample = None

    def _output_hook(self, name: str, is_norm: bool) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], y: Any) -> None:
            if self.sample is None:
                return
            if is_norm:  # of mlp_norm, or the MLP without one: its input, or the sum that a fused kernel returns
                y = y[0] if isinstance(y, tuple) else args[0]
            self._add_once("forward", name, y)

        return hook

    def _add_once(self, kind: str, name: str, data: Tensor) -> None:
        """Record a tensor of the current micro-batch unless it was recorded in this step."""
        assert self.sample is not None
        key = (self.step, name, self.sample)
        if key in self.recorded:
            return
        self.recorded.add(key)
        for first_position, tokens in self._split_by_position(data):
            self.add(kind, name, tokens, sample=self.sample, first_position=first_position)

    def _split_by_position(self, data: Tensor) -> list[tuple[int, Tensor]]:
        """Split the local tokens of a cp rank into ranges of consecutive positions, as (first position, tokens)."""
        if self.cp_positions is None or data.dim() == 0:
            return [(-1, data)]
        start = self.run.mesh.tp.rank * len(data) % len(self.cp_positions)  # 0 if `data` has all tokens of tp ranks
        positions = self.cp_positions[start : start + len(data)]
        cuts = (1 + (positions.diff() != 1).nonzero().flatten()).tolist()
        ranges = zip(positions.tensor_split(cuts), data.tensor_split(cuts), strict=True)
        return [(int(range_positions[0]), tokens) for range_positions, tokens in ranges]

    def _param_shape(self, slot: ParamSlot) -> tuple[int, ...]:
        return tuple(self.run.sync.parameters[slot.entry].shape)


def record_rank(ranks: RankInfo, config: Config, dtype: str, steps: int, directory: str) -> None:
    """Train and evaluate on one rank, and write its recording; collective.

    Signals end the process silently, because the parent process reports them.

    Args:
        dtype: dtype of the weights, as the name of an attribute of torch.
    """
    for number in FORWARDED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    device = choose_device(config.parallel.device)
    with process_group(ranks, device=device, startup_timeout=timeout) as group_device:
        run = build_run(config, ranks, group_device, dtype=getattr(torch, dtype))
        _perturb_constants(run)
        recorder = _RankRecorder(run)
        for step in range(1, steps + 1):
            recorder.step = step
            result = train_step(run)
            recorder.add("loss", STEP, torch.tensor(result.loss, dtype=torch.float64))
            recorder.add("norm", STEP, torch.tensor(result.grad_norm, dtype=torch.float64))
            recorder.record_routers(result)
            if step in (1, steps) and run.valid_loaders:
                recorder.step = step + 0.5
                loss = evaluate(run, run.valid_loaders[0].data, config.train.eval_iters)
                recorder.add("loss", STEP, torch.tensor(loss, dtype=torch.float64))
        run.sync.wait_param_sync()
        recorder.record_weights(steps)
        run.close()
        stages: list[Any] = run.pipeline.stages
        parameters, vocabulary = _in_order_of_use(run, recorder.names)
        parts_per_chunk = tuple(
            [(block.mixer is not None, block.mlp is not None) for block in stage.blocks] for stage in stages
        )
        recording = Recording(parameters, vocabulary, recorder.tensors, parts_per_chunk)
        write(Path(directory) / f"rank-{ranks.rank:05d}.npz", recording)


def write(path: Path, recording: Recording) -> None:
    """Write a recording as an npz file, with a JSON index of its tensors."""
    index = {
        "parameters": recording.parameters,
        "vocabulary": recording.vocabulary,
        "parts_per_chunk": recording.parts_per_chunk,
        "tensors": [dataclasses.asdict(tensor) for tensor, _ in recording.tensors],
    }
    arrays: dict[str, Any] = {str(i): data for i, (_, data) in enumerate(recording.tensors)}
    np.savez(path, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **arrays)


def read_all(directory: Path, layout: Layout) -> list[Recording]:
    """Read the recordings of all ranks, in order, and number the layers from the first stage to the last."""
    recordings = [_read(path) for path in sorted(directory.glob("rank-*.npz"))]
    parts: dict[tuple[int, int], Parts] = {}  # of (chunk, pp rank)
    for rank, recording in enumerate(recordings):
        for chunk, parts_of_chunk in enumerate(recording.parts_per_chunk):
            parts[chunk, layout.coordinates(rank).pp] = parts_of_chunk
    numbers: dict[tuple[int, int], list[int]] = {}
    number = -1
    ends_in_mixer = False
    for stage in sorted(parts):  # chunk 0 of all pipeline ranks, chunk 1 of all of them, ...
        numbers[stage] = []
        for has_mixer, has_mlp in parts[stage]:
            if has_mixer or not ends_in_mixer:  # otherwise it is the other half of the layer before it
                number += 1
            ends_in_mixer = not has_mlp
            numbers[stage].append(number)
    return [_number_layers(one, layout.coordinates(rank).pp, numbers) for rank, one in enumerate(recordings)]


def _number_layers(recording: Recording, pp_rank: int, numbers: dict[tuple[int, int], list[int]]) -> Recording:
    """Replace CHUNK:INDEX by the number of the layer in all names of a recording."""

    def renamed(name: str) -> str:
        return re.sub(r"(\d+):(\d+)", lambda match: str(numbers[int(match[1]), pp_rank][int(match[2])]), name, count=1)

    tensors = [(dataclasses.replace(tensor, name=renamed(tensor.name)), data) for tensor, data in recording.tensors]
    return dataclasses.replace(
        recording,
        parameters=[renamed(name) for name in recording.parameters],
        vocabulary=[renamed(name) for name in recording.vocabulary],
        tensors=tensors,
    )


def _read(path: Path) -> Recording:
    with np.load(path, allow_pickle=False) as file:
        index = json.loads(file["index"].tobytes())
        tensors = []
        for i, fields in enumerate(index["tensors"]):
            tensor = RecordedTensor(**{**fields, "shape": tuple(fields["shape"])})
            tensors.append((tensor, file[str(i)]))
        return Recording(index["parameters"], index["vocabulary"], tensors, tuple(index["parts_per_chunk"]))


def _perturb_constants(run: Run) -> None:
    """Add noise to the parameters that are initialized to constants.

    The noise depends only on the name of the parameter and the position in the full tensor.
    """
    sizes, coordinates = run.mesh.sizes, run.mesh.coordinates
    layout = Layout(sizes["tp"], ep=sizes["ep"], etp=sizes["etp"])
    tp_rank = coordinates["tp"]
    rank = RankCoordinates(tp_rank, tp_rank, 0, 0, ep=coordinates["ep"], etp=coordinates["etp"])
    for bucket in run.sync.param_buckets:
        for slot in bucket.layout.slots:
            spec = run.sync.layout.entries[slot.entry].spec
            if not isinstance(spec.init, Constant):
                continue
            shape = tuple(run.sync.parameters[slot.entry].shape)
            full = PERTURBATION * _normal_numbers(spec.name, spec.shape)
            slices = expected_slices(
                shape, full.shape, rank, layout, is_expert=is_expert_param(spec.name), has_token_rows=spec.is_vocab
            )
            elements, data = bucket.resident_slice(slot)  # only the shard of an expert's bias at ZeRO-3
            data.add_(torch.from_numpy(full[slices].reshape(-1)[elements.start : elements.stop]).to(data))
    for router in run.expert_balancer.routers:
        if router.expert_bias is not None:
            noise = torch.from_numpy(_normal_numbers(router.name, router.expert_bias.shape))
            router.expert_bias += PERTURBATION * noise.to(router.expert_bias)
    run.optimizer.sync_after_load(main_loaded=False)


def _normal_numbers(name: str, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def depth_name(depth: int, quantity: str = "") -> str:
    """Return the name of the hidden states of a depth of multi-token prediction, or of one of its inputs."""
    return f"mtp_{depth} {quantity}".strip()


def _layer_name(chunk: int, index: int) -> str:
    return f"layers.{chunk}:{index}"


def _recorded_modules(chunk: int, stage: Any) -> list[tuple[str, Any, bool]]:
    """Return (name, module, is_norm) of the modules whose outputs are compared, in the order of computation.

    Of a norm (`is_norm`) the input is compared. The output of a block without an MLP has the name of the hidden states
    between the halves of a block, because a pipeline border may be there.
    """
    modules = []
    if stage.embedding is not None:
        modules.append(("embedding", stage.embedding, False))
    for index, block in enumerate(stage.blocks):
        name = _layer_name(chunk, index)
        if block.mixer is not None:
            modules.append((f"{name}.{block.spec.mixer}", block.mixer, False))
        if block.mlp is None:
            modules.append((f"{name}{ATTENTION_ADDED}", block, False))
            continue
        if block.mixer is not None:
            first = block.mlp if block.mlp_norm is None else block.mlp_norm
            modules.append((f"{name}{ATTENTION_ADDED}", first, True))
        modules.append((f"{name}.mlp", block.mlp, False))
        modules.append((name, block, False))
    if stage.head is not None:
        modules.append((FINAL_NORM, stage.final_norm, False))
    return modules


def _blocks(run: Run) -> list[tuple[str, Any]]:
    """Return (name, block) of all layers on this rank. Those of multi-token prediction have the names of the model."""
    stages: list[Any] = run.pipeline.stages
    blocks = [
        (_layer_name(chunk, i), block) for chunk, stage in enumerate(stages) for i, block in enumerate(stage.blocks)
    ]
    for stage in stages:
        blocks += [(f"layers.{block.layer}", block) for layer in stage.mtp_layers for block in layer.blocks]
    return blocks


def _param_names(run: Run) -> list[str]:
    """Return the names of all parameters on this rank, with CHUNK:INDEX as the number of a layer."""
    layer_names = {id(parameter): name for name, block in _blocks(run) for parameter in block.parameters()}
    entries = zip(run.sync.parameters, run.sync.layout.entries, strict=True)
    return [
        re.sub(r"^layers\.\d+", layer_names.get(id(parameter), r"\g<0>"), entry.spec.name)
        for parameter, entry in entries
    ]


def _in_order_of_use(run: Run, names: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of all parameters in the order of use, and those of the vocabulary's parameters among them.

    The layout has this order except for an untied head, which is used last.
    """
    stages: list[Any] = run.pipeline.stages
    embeddings = {id(stage.embedding.word) for stage in stages if stage.embedding is not None}
    heads = {id(stage.head.weight) for stage in stages if stage.head is not None}
    untied_heads = heads - embeddings
    entries = zip(run.sync.parameters, run.sync.layout.entries, names, strict=True)
    used = [(name, entry.spec) for _, entry, name in sorted(entries, key=lambda entry: id(entry[0]) in untied_heads)]
    return [name for name, _ in used], [name for name, spec in used if spec.is_vocab]
