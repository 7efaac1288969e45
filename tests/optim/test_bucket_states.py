"""The states of a bucket: every allowed sequence of calls has the values of a model, every other one raises an error.

The collectives are those of rank 0 of two. The other rank has the same gradients, and its own shard of the weights.
"""

import datetime
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ranks import run_ranks
from torch import Tensor, nn

from megalite.optim.zero.grad_bucket import GradBucket, GradState
from megalite.optim.zero.layout import BufferLayout, ParamEntry, build_layout
from megalite.optim.zero.param_bucket import ParamBucket, ParamState
from megalite.optim.zero.resharded_parameter import ReshardedParameter
from megalite.optim.zero.sharding import BucketSharding
from megalite.optim.zero.storage import observe_allocations
from megalite.optim.zero.sync import PREFETCH_DEPTH, BucketSync, ZeroConfig
from megalite.parallel.cpu.shared_memory import CollectiveBackend
from megalite.parallel.mesh import Axis, Mesh, build_mesh
from megalite.parallel.spec import ParamSpec

SIZES = (40, 100, 7)  # elements of three matrices of one unit, with padding between them
SHARD = 128
DEVICE = torch.device("cpu")


class _Work:
    """A collective whose result is written when it is waited for."""

    def __init__(self, out: Tensor, result: Tensor):
        self.out, self.result = out, result

    def wait(self) -> None:
        self.out.copy_(self.result)


class _TwinBackend(CollectiveBackend):
    """The other rank: its gradients are those of this rank, and its shard of the weights is `other_shard`."""

    group = "none"

    def __init__(self) -> None:
        self.other_shard = torch.zeros(SHARD)

    def start_all_gather(self, out: Tensor, x: Tensor) -> _Work:
        return _Work(out, torch.cat([x, self.other_shard]))

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> _Work:
        return _Work(out, 2 * x[: len(out)])

    def start_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> _Work:
        raise NotImplementedError


def _layout() -> BufferLayout:
    specs = [ParamSpec(f"layers.0.w{i}", (size, 1)) for i, size in enumerate(SIZES)]
    entries = [ParamEntry(spec, size, 0, "layers.0") for spec, size in zip(specs, SIZES, strict=True)]
    return build_layout(entries, bucket_size=1, sizes={"dp_cp": 2}, by_unit=True)


def _sharding(backend: _TwinBackend) -> BucketSharding:
    none = Axis("dp_replicate")
    shard_axis = Axis("dp_shard", 2, 0, backend, (0, 1))
    return BucketSharding(shard_axis, none, none, (), None, None, 1, ("dp_shard", "dp_replicate"))


class _StateMachine(RuleBasedStateMachine):
    """Calls on a bucket; a call in a state that `allowed_states` does not list is refused.

    Attributes:
        max_steps: the largest number of steps or gathers that one sequence of calls has completed.
    """

    resident: bool
    max_steps: int
    bucket: Any

    def allowed_states(self) -> dict[str, set[Any]]:
        raise NotImplementedError

    @invariant()
    def calls_in_other_states_are_refused(self) -> None:
        state = self.bucket.state
        for name, allowed in self.allowed_states().items():
            if state not in allowed:
                with pytest.raises(RuntimeError, match=rf"bucket of layers.0.w2.* in state {state.name}, only in "):
                    getattr(self.bucket, name)()
                assert self.bucket.state is state, name


class GradMachine(_StateMachine):
    """Calls on a GradBucket, next to a model: the sum of each gradient in this pass, and of earlier passes."""

    @initialize()
    def build(self) -> None:
        layout = _layout()
        [bucket_layout] = layout.buckets
        self.bucket = GradBucket(
            bucket_layout, layout.entries, _sharding(_TwinBackend()), torch.float32, DEVICE, not self.resident
        )
        self.slots = {slot.entry: slot for slot in bucket_layout.slots}
        self.pass_sums: dict[int, int] = {}  # entry -> sum of this pass
        self.step_sums = dict.fromkeys(self.slots, 0)
        self.unready: set[int] | None = None  # entries that are not ready, if the last backward was announced
        self.num_steps = 0

    def allowed_states(self) -> dict[str, set[Any]]:
        before_pass = {GradState.EMPTY, GradState.ACCUMULATING}
        if not self.resident:
            before_pass |= {GradState.REDUCING, GradState.REDUCED}
        return {
            "announce_last_backward": before_pass,
            "mark_all_ready": before_pass,
            "zero_unwritten": {GradState.EMPTY, GradState.ACCUMULATING, GradState.READY},
            "start_reduce": {GradState.READY},
            "finish_reduce": {GradState.REDUCING},
            "reduce_owned": {GradState.REDUCED},
            "reduce_tied": {GradState.REDUCED},
            "end_step": {GradState.REDUCED},
        }

    def is_allowed(self, name: str) -> bool:
        return self.bucket.state in self.allowed_states()[name]

    @rule(entry=st.integers(0, 2), value=st.integers(1, 9))
    def write(self, entry: int, value: int) -> None:
        name, slot = f"layers.0.w{entry}", self.slots[entry]
        if not self.is_allowed("mark_all_ready"):
            state = self.bucket.state.name
            with pytest.raises(RuntimeError, match=rf"{name}: got a gradient .* declared complete \({state}\)"):
                self.bucket.start_write(slot, name)
            return
        overwrite = self.bucket.start_write(slot, name)
        assert overwrite == (entry not in self.pass_sums) and self.bucket.state is GradState.ACCUMULATING
        view = self.bucket.param_view(slot)
        view.copy_(torch.full_like(view, value)) if overwrite else view.add_(value)
        self.pass_sums[entry] = self.pass_sums.get(entry, 0) + value

    @precondition(lambda self: self.is_allowed("announce_last_backward"))
    @rule(pending=st.none() | st.sets(st.integers(0, 2)))
    def announce(self, pending: set[int] | None) -> None:
        self.bucket.announce_last_backward(pending)
        self.unready = {0, 1, 2} if pending is None else set(pending)
        assert (self.bucket.state is GradState.READY) == (not self.unready)
        self.unready = self.unready or None

    @rule(entry=st.integers(0, 2))
    def mark_ready(self, entry: int) -> None:
        was_announced = self.unready is not None
        if self.unready is not None:
            self.unready.discard(entry)
            self.unready = self.unready or None
        is_last = was_announced and self.unready is None
        assert self.bucket.mark_ready(entry) == is_last
        if is_last:
            assert self.bucket.state is GradState.READY

    @precondition(lambda self: self.is_allowed("start_reduce"))
    @rule()
    def reduce(self) -> None:
        if len(self.pass_sums) < len(self.slots):
            with pytest.raises(RuntimeError, match=r"bucket of layers.0.w2.*: some main_grads have no gradient"):
                self.bucket.start_reduce()
        self.bucket.zero_unwritten()
        self.bucket.start_reduce()
        assert self.bucket.state is GradState.REDUCING
        for entry, value in self.pass_sums.items():
            self.step_sums[entry] += 2 * value
        self.pass_sums = {}

    @precondition(lambda self: self.is_allowed("finish_reduce"))
    @rule()
    def finish_reduce(self) -> None:
        self.bucket.finish_reduce()
        assert self.bucket.state is GradState.REDUCED
        self.check_sums(self.bucket.owned)

    @precondition(lambda self: self.is_allowed("end_step"))
    @rule()
    def end_step(self) -> None:
        self.bucket.reduce_owned()
        self.bucket.reduce_tied()
        with pytest.raises(RuntimeError, match="cannot read the gradients of a step in state REDUCED, only in EMPTY"):
            _ = self.bucket.owned_sums
        self.bucket.end_step()
        self.check_sums(self.bucket.owned_sums)
        self.step_sums = dict.fromkeys(self.step_sums, 0)
        self.unready = None
        self.num_steps += 1
        type(self).max_steps = max(self.max_steps, self.num_steps)

    @rule(
        values=st.dictionaries(st.integers(0, 2), st.integers(1, 9)),
        pending=st.none() | st.sets(st.integers(0, 2)),
        ends_step=st.booleans(),
    )
    def complete_pass(self, values: dict[int, int], pending: set[int] | None, ends_step: bool) -> None:
        """Complete what other calls have started, and then a pass: single calls alone rarely reach its end."""
        if self.bucket.state is GradState.READY:
            self.reduce()
        if self.bucket.state is GradState.REDUCING:
            self.finish_reduce()
        if self.resident and self.bucket.state is GradState.REDUCED:
            self.end_step()
        for entry, value in values.items():
            self.write(entry, value)
        if self.unready is None:
            self.announce(pending)
        for entry in sorted(self.unready or ()):
            self.mark_ready(entry)
        self.reduce()
        self.finish_reduce()
        if ends_step:
            self.end_step()

    def check_sums(self, owned: Tensor) -> None:
        for entry, slot in self.slots.items():
            assert (self.bucket.owned_slice(slot).select(owned) == self.step_sums[entry]).all()

    @invariant()
    def only_gradients_of_a_pass_are_allocated(self) -> None:
        if not self.resident:
            is_allocated = self.bucket.is_allocated
            if self.bucket.state in (GradState.ACCUMULATING, GradState.REDUCING):
                assert is_allocated
            elif self.bucket.state in (GradState.EMPTY, GradState.REDUCED):
                assert not is_allocated


class ParamMachine(_StateMachine):
    """Calls on a ParamBucket, next to a model: the shards that both ranks have now, and those that were gathered."""

    @initialize()
    def build(self) -> None:
        layout = _layout()
        [bucket_layout] = layout.buckets
        self.parameters = [nn.Parameter(torch.full((size, 1), float(i))) for i, size in enumerate(SIZES)]
        for p, entry in zip(self.parameters, layout.entries, strict=True):
            p.spec, p.unit = entry.spec, entry.unit  # type: ignore[attr-defined]
        self.backend = _TwinBackend()
        self.bucket = ParamBucket(
            bucket_layout, layout.entries, _sharding(self.backend), self.parameters, not self.resident
        )
        full = torch.zeros(bucket_layout.size)
        for slot in bucket_layout.slots:
            full[slot.start : slot.stop] = float(slot.entry)
        self.shards = [full[:SHARD].clone(), full[SHARD:].clone()]
        self.backend.other_shard = self.shards[1].clone()
        self.gathered = full
        self.left: set[int] = set()
        self.num_gathers = 0

    def allowed_states(self) -> dict[str, set[Any]]:
        return {
            "unshard": {ParamState.SHARDED},
            "finish_unshard": {ParamState.UNSHARDING},
            "reshard": {ParamState.UNSHARDED},
            "start_shard_gather": {ParamState.SHARDED},
            "reshard_after_backward": {ParamState.UNSHARDED},
        }

    @precondition(lambda self: self.bucket.state is ParamState.SHARDED)
    @rule(value=st.integers(1, 9))
    def update(self, value: int) -> None:
        for shard in (self.bucket.shard, self.backend.other_shard, *self.shards):
            shard.add_(value)

    @precondition(lambda self: self.bucket.state is ParamState.SHARDED)
    @rule()
    def unshard(self) -> None:
        self.bucket.start_shard_gather()  # does nothing here: the shard is not split again
        self.bucket.unshard()
        assert self.bucket.state is ParamState.UNSHARDING
        self.gathered = torch.cat(self.shards)

    @precondition(lambda self: self.bucket.state is ParamState.UNSHARDING)
    @rule()
    def finish_unshard(self) -> None:
        self.bucket.finish_unshard()
        assert self.bucket.state is ParamState.UNSHARDED
        self.num_gathers += 1
        type(self).max_steps = max(self.max_steps, self.num_gathers)

    @precondition(lambda self: self.bucket.state is ParamState.UNSHARDED)
    @rule()
    def reshard(self) -> None:
        self.bucket.reshard()
        self.left = set()
        assert self.bucket.state is ParamState.SHARDED

    @precondition(lambda self: self.bucket.state is ParamState.UNSHARDED)
    @rule()
    def expect_backward(self) -> None:
        self.bucket.reshard_after_backward()
        self.left = {0, 1, 2}

    @rule(entry=st.integers(0, 2))
    def param_backward_done(self, entry: int) -> None:
        expected = self.bucket.state
        if self.left:
            self.left.discard(entry)
            if not self.left:
                expected = ParamState.SHARDED
        self.bucket.param_backward_done(entry)
        assert self.bucket.state is expected

    @rule()
    def end_backward(self) -> None:
        expected = ParamState.SHARDED if self.left else self.bucket.state
        self.left = set()
        self.bucket.end_backward()
        assert self.bucket.state is expected

    @invariant()
    def values_are_those_of_the_last_gather(self) -> None:
        is_usable = self.resident or self.bucket.state is ParamState.UNSHARDED
        assert all((type(p) is nn.Parameter) == is_usable for p in self.parameters)
        assert all((type(p) is ReshardedParameter) != is_usable for p in self.parameters)
        assert self.bucket.is_allocated == (self.resident or self.bucket.state is not ParamState.SHARDED)
        assert torch.equal(self.bucket.shard, self.shards[0])
        if self.bucket.state is ParamState.UNSHARDED:
            for slot, p in zip(self.bucket.layout.slots, self.bucket.parameters, strict=True):
                assert torch.equal(p.detach().view(-1), self.gathered[slot.start : slot.stop])


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("machine", [GradMachine, ParamMachine])
def test_calls_follow_the_states(machine: Any, resident: bool) -> None:
    class Machine(machine):  # type: ignore[misc]
        pass

    Machine.resident = resident
    Machine.max_steps = 0
    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))
    assert Machine.max_steps >= 2, "no sequence of calls reached a second step"


# ---- the order of collectives


class Unit(nn.Module):
    """y = x * weight, a unit of the model whose weights are one bucket.

    With `has_optional` it has a second parameter, which it adds if `uses_optional` is set.
    """

    def __init__(self, index: int, numel: int, has_optional: bool, device: str):
        super().__init__()
        self.numel = numel
        self.uses_optional = False
        for name, size in (("weight", numel), ("optional", 1))[: 1 + has_optional]:
            parameter = nn.Parameter(torch.ones(size, 1, device=device))
            parameter.spec = ParamSpec(f"layers.{index}.{name}", (size, 1))  # type: ignore[attr-defined]
            parameter.unit = f"layers.{index}"  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y + self.optional if self.uses_optional else y


class Chunk(nn.Module):
    """Units that are applied to one input each, and summed."""

    def __init__(self, numels: list[int], has_optional: bool = False, device: str = "cpu"):
        super().__init__()
        self.unit_list = nn.ModuleList(Unit(i, numel, has_optional, device) for i, numel in enumerate(numels))
        self.units = dict.fromkeys(self.unit_list, True)
        self.run_unit = lambda unit, *args, recomputing=False: unit(*args)

    def forward(self, value: float) -> Tensor:
        inputs = [torch.full((unit.numel, 1), value, requires_grad=True) for unit in self.units]
        return torch.stack([self.run_unit(unit, x).sum() for unit, x in zip(self.units, inputs, strict=True)]).sum()


class _RecordingBackend(_TwinBackend):
    """Records the operations with their sizes, which identify the buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def start_all_gather(self, out: Tensor, x: Tensor) -> _Work:
        self.calls.append(("all-gather", len(out)))
        return _Work(out, x.repeat(2) if not x.is_meta else out)  # torch imports its compiler to repeat a meta tensor

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> _Work:
        self.calls.append(("reduce-scatter", len(x)))
        return super().start_reduce_scatter(out, x)


NUMELS = [100, 200, 300, 500]  # bucket sizes are multiples of 128, and all different


def _sync(chunk: Chunk, backend: CollectiveBackend, device: str = "cpu", **options: Any) -> BucketSync:
    axis = Axis("dp_shard", 2, 0, backend, (0, 1))
    mesh = Mesh(dp_shard=axis, dp_cp=axis, device=torch.device(device))
    return BucketSync([chunk], mesh, bucket_size=1, **options)


def _orders_of(data: st.DataObject, passes: int, zero_stage: int, overlap: bool) -> list[list[tuple[str, int]]]:
    """Return the collectives of two ranks that get some of the gradients, in any order, in each of the passes."""
    calls = []
    for _ in range(2):
        backend = _RecordingBackend()
        chunk = Chunk(NUMELS)
        sync = _sync(chunk, backend, zero_config=ZeroConfig(zero_stage), overlap_grad_reduce=overlap)
        for i in range(passes):
            is_last = i == passes - 1
            sync.set_last_backward(0, last_in_step=is_last)
            for name in data.draw(st.permutations([*sync.main_grads]).flatmap(_prefixes)):
                grad, overwrite = sync.main_grads[name].accumulator()
                grad.fill_(1) if overwrite else grad.add_(1)
                sync.main_grads[name].mark_ready()
            sync.finish_pass(0, last_in_step=is_last)
        sync.finish_grad_sync()
        assert all(bucket.state is GradState.EMPTY for bucket in sync.grad_buckets)
        calls.append(backend.calls)
    return calls


def _prefixes(names: list[str]) -> st.SearchStrategy[list[str]]:
    return st.integers(0, len(names)).map(lambda count: names[:count])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), passes=st.integers(1, 3), zero_stage=st.sampled_from([1, 2]), overlap=st.booleans())
def test_ranks_reduce_in_one_order(data: st.DataObject, passes: int, zero_stage: int, overlap: bool) -> None:
    first, second = _orders_of(data, passes, zero_stage, overlap)
    assert first == second and len(first) == len(NUMELS) * (passes if zero_stage == 2 else 1)


def test_a_backward_reshards_units_with_unused_parameters() -> None:
    """The hook of a parameter that its unit does not use never runs, so the end of the backward reshards the unit."""
    backend, chunk = _RecordingBackend(), Chunk(NUMELS[:2], has_optional=True)
    sync = _sync(chunk, backend, zero_config=ZeroConfig(3))
    chunk(1.0).backward()
    assert [bucket.state for bucket in sync.param_buckets] == [ParamState.SHARDED] * 2
    sync.finish_grad_sync()
    for bucket in sync.param_buckets:
        bucket.shard.fill_(3.0)
    sync.start_param_sync()
    assert chunk(1.0).item() == 3.0 * sum(NUMELS[:2])


def _losses_of_different_branches() -> list[float]:
    """Return the losses of three steps, the first without an update; only rank 0 uses the optional parameters."""
    mesh = build_mesh(device=DEVICE, timeout=datetime.timedelta(seconds=20), shared_memory=False)
    chunk = Chunk(NUMELS[:2], has_optional=True)
    for unit in chunk.units:
        unit.uses_optional = mesh.dp.rank == 0  # type: ignore[assignment]
    sync = BucketSync([chunk], mesh, bucket_size=1, zero_config=ZeroConfig(3))
    losses = []
    for updates in (False, True, True):
        for last_in_step in (False, True):
            sync.set_last_backward(0, last_in_step=last_in_step)
            loss = chunk(1.0)
            loss.backward()
            losses.append(loss.item())
            sync.finish_pass(0, last_in_step)
        sync.finish_grad_sync()
        if updates:
            for bucket in sync.param_buckets:
                bucket.shard.add_(1.0)
            sync.start_param_sync()
    return losses


def test_ranks_may_use_different_parameters_of_a_unit() -> None:
    """A rank that kept a unit unsharded would not take part in its next all-gather, and the other would wait."""
    numel = sum(NUMELS[:2])
    expected = [1.0 * numel] * 4 + [2.0 * numel] * 2
    first, second = run_ranks(2, _losses_of_different_branches, timeout=50)
    assert second == expected and first == [2 * loss for loss in expected]


def test_gathers_in_flight_are_completed_before_the_next_ones() -> None:
    """A load starts to gather all buckets again while gathers are in flight, and others are in the queue."""
    backend, chunk = _RecordingBackend(), Chunk(NUMELS)
    sync = _sync(chunk, backend)
    for bucket in sync.param_buckets:
        bucket.shard.fill_(2.0)
    for _ in range(2):
        sync.start_param_sync()
        assert [bucket.state for bucket in sync.param_buckets].count(ParamState.UNSHARDING) == PREFETCH_DEPTH
    assert chunk(1.0).item() == 2.0 * sum(NUMELS)
    assert len(backend.calls) == 2 * len(NUMELS)


def test_unreferenced_buckets_are_freed_at_every_stage() -> None:
    """Hooks on graph nodes, which Python's garbage collector does not search, keep no bucket alive."""
    for stage in (1, 2, 3):
        chunk = Chunk(NUMELS)
        sync = _sync(chunk, _RecordingBackend(), zero_config=ZeroConfig(stage))
        chunk(1.0).backward()
        flats = [weakref.ref(bucket.full) for bucket in (*sync.param_buckets, *sync.grad_buckets)]
        del sync, chunk
        gc.collect()
        assert all(flat() is None for flat in flats), stage


def test_allocations_can_be_observed_on_the_meta_device() -> None:
    """A planner observes the same buckets without memory, and without process groups."""
    events: list[tuple[str, int]] = []

    class Observer:
        def on_allocate(self, flat: Tensor) -> None:
            events.append(("allocate", len(flat)))

        def on_free(self, flat: Tensor) -> None:
            events.append(("free", len(flat)))

    backend, chunk = _RecordingBackend(), Chunk([100, 200], device="meta")
    sync = _sync(chunk, backend, "meta", zero_config=ZeroConfig(3))
    with observe_allocations(Observer()):
        for unit in chunk.units:
            sync.run_unit(unit, torch.empty(unit.numel, 1, device="meta"))
    sizes = [bucket.layout.size for bucket in reversed(sync.param_buckets)]
    assert events == [("allocate", sizes[0]), ("allocate", sizes[1]), ("free", sizes[0]), ("free", sizes[1])]


# ---- views of freed memory

CHECKS_ACCESS = hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")


@pytest.mark.skipif(not CHECKS_ACCESS, reason="torch's CPU builds cannot check the memory of views")
def test_views_of_freed_memory_are_errors() -> None:
    sync = _sync(Chunk(NUMELS), _RecordingBackend(), zero_config=ZeroConfig(3))
    params, grads = sync.param_buckets[0], sync.grad_buckets[0]
    params.unshard()
    params.finish_unshard()
    [slot] = grads.layout.slots
    grads.start_write(slot, "")
    views = {"layers.3.weight is used": params.full[:10].view(2, 5).t(), "main_grad of layers.3": grads.full[:10]}
    params.reshard()
    grads.mark_all_ready()
    grads.start_reduce()
    grads.finish_reduce()
    for message, view in views.items():
        for use in (torch.sum, torch.clone, Tensor.tolist, Tensor.zero_, lambda x: x.reshape(10) + 1):
            with pytest.raises(RuntimeError, match=message):
                use(view)
    params.unshard()
    params.finish_unshard()
    assert views["layers.3.weight is used"].sum() == 10
