"""An optimizer whose state is in host memory: what it copies, how much, and when.

tests/layouts/test_layouts.py shows that it changes no result, tests/planning/test_dry_run_rank.py counts its bytes on
ranks, and tests/simulated_gpu/test_removed_waits.py shows that it waits for its copies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import COMMON, GPT, HALF, LLAMA, OFFLOAD, PARAMETERS, ZERO2, ZERO3
from ranks import run_ranks
from simulated_gpu.runs import on_gpu
from simulated_gpu.simulator import nccl
from simulated_gpu.simulator.trace import Fact, HostAccess, Launch
from train_cases import config_from, run_from

from megalite.config.validation import find_problems
from megalite.launch.rank_info import LaunchError, RankInfo
from megalite.optim.host_memory import allocate_mapped, pinned_bytes
from megalite.optim.optimizer_offload import allocation_sizes, offloaded_buckets
from megalite.optim.zero.layout import ParamEntry, build_layout
from megalite.parallel.spec import ParamSpec
from megalite.planning.run_plan import make_run_plan
from megalite.training.job import preflight
from megalite.training.state import Run
from megalite.training.train_step import train_step

ROOT = Path(__file__).resolve().parents[2]
GUARDS = pytest.mark.nightly(guards=("megalite/optim", "megalite/parallel/streams.py"))
UP, DOWN = "copy to the GPU", "copy to the host"
STORE = "megalite/optim/optimizer_offload.py"


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2)), min_size=1, max_size=20), st.floats(0, 1))
def test_fewest_buckets_reach_the_offload_fraction(rows: list[tuple[int, int]], share: float) -> None:
    entries = [ParamEntry(ParamSpec(f"p{i}", (n,)), n, chunk) for i, (n, chunk) in enumerate(rows)]
    layout = build_layout(entries, bucket_size=300, sizes={"dp_cp": 2})
    offloaded = offloaded_buckets(layout, share)
    assert offloaded == layout.buckets[: len(offloaded)]
    assert sum(bucket.size for bucket in offloaded) >= share * layout.size
    assert not offloaded or sum(bucket.size for bucket in offloaded[:-1]) < share * layout.size
    assert offloaded_buckets(layout, 1.0) == layout.buckets and offloaded_buckets(layout, 0.0) == ()


@given(st.lists(st.integers(1, 3 << 30), max_size=99))
def test_pinned_memory_is_close_to_the_minimum(parts: list[int]) -> None:
    """Each block has less than one part unused, and the last ones are rounded up."""
    overhead, large = pinned_bytes(parts) - sum(parts), max(parts, default=0)
    assert 0 <= overhead <= min(sum(parts), large * (2 + sum(parts).bit_length() - large.bit_length()))


def test_offloaded_parts_share_blocks() -> None:
    gib = 1 << 30
    assert pinned_bytes([gib] * 11) == 11 * gib and pinned_bytes([3 * gib // 4] * 5) == 5 * gib
    assert allocation_sizes([10, 30], 12, 4) == [120, 360, 120, 120] and allocation_sizes([], 12, 4) == []


LARGE = "--preset llama3-70b --mock-data --lr 1 --train-iters 1 --micro-batch-size 4 --bf16 --tp 8 --nproc 8"


def test_offload_beyond_host_memory_is_refused() -> None:
    plan, activations_plan = (
        make_run_plan(config_from(f"{LARGE} {flags}"), 8, 128256)
        for flags in (OFFLOAD, "--cpu-offloading-num-layers 80")
    )
    message = (
        r"=1: 1\d\d\.\d GiB of host memory per rank, but only 64\.0 GiB are available; offload less, or to a disk$"
    )
    cuda = mock.patch.object(preflight, "cuda_device", return_value=torch.device("cuda"))
    memory = mock.patch.object(
        preflight, "total_memory", lambda device: 512 << 30 if device.type == "cpu" else 80 << 30
    )
    with cuda, memory:
        for run_plan, pattern in (
            (plan, f"optimizer_offload_fraction{message}"),
            (activations_plan, r"cpu_offloading_num_layers=80: .*s$"),
        ):
            with pytest.raises(LaunchError, match=f"^{pattern}"):
                preflight.check_machine(run_plan, "cuda", RankInfo(0, 8, 0, 8))
        preflight.check_machine(plan, "cuda", RankInfo(0, 8, 0, 2))
        with pytest.raises(LaunchError, match=r"^weights and optimizer alone take 1\d\d\.\d GiB"):
            preflight.check_machine(plan, "cpu", RankInfo(0, 8, 0, 8))


def test_too_small_offload_directory_is_refused(tmp_path: Path) -> None:
    for directory, message in (
        (tmp_path, r": 9\d\.\d GiB per rank are needed, and 7 GiB are free"),
        ("/none", "No such file"),
    ):
        plan = make_run_plan(config_from(f"{LARGE} {OFFLOAD} --optimizer-offload-dir {directory}"), 8, 128256)
        with (
            mock.patch.object(preflight, "total_memory", return_value=80 << 30),
            mock.patch.object(preflight.shutil, "disk_usage", side_effect=_disk),
            pytest.raises(LaunchError, match=rf"^optimizer_offload_dir='{directory}'.*{message}"),
        ):
            preflight.check_machine(plan, "cpu", RankInfo(0, 8, 0, 2))


def test_weights_of_a_single_rank_are_not_offloaded() -> None:
    config = config_from(f"{COMMON} {GPT} {ZERO3} {PARAMETERS}")
    problem = "param_cpu_offload needs 2 or more ranks that shard weights: start more, or leave it out"
    assert (find_problems(config, 1), find_problems(config, 2)) == ([problem], [])


def _disk(directory: str) -> Any:
    os.stat(directory)
    return mock.Mock(free=14 << 30)


def test_offload_file_is_unnamed_and_allocated(tmp_path: Path) -> None:
    before = os.statvfs(tmp_path).f_bfree
    (flat,) = allocate_mapped([64 << 20], str(tmp_path), torch.device("cpu"))
    assert not os.listdir(tmp_path) and not flat.any()
    assert before - os.statvfs(tmp_path).f_bfree > (32 << 20) // os.statvfs(tmp_path).f_frsize


def _run(flags: str) -> Run:
    return run_from(f"{COMMON} {GPT} {flags}")


@pytest.mark.parametrize("flags", [OFFLOAD, f"{HALF} --bf16"])
def test_loaded_state_reaches_the_host(flags: str) -> None:
    trained, other = _run(flags), _run(f"{flags} --seed 8")
    for _ in range(2):
        train_step(trained)
    for loaded, source in zip(other.optimizer.checkpoint_shards(), trained.optimizer.checkpoint_shards(), strict=True):
        loaded.data.copy_(source.data)
    other.optimizer.num_updates, other.progress = trained.optimizer.num_updates, replace(trained.progress)
    other.optimizer.sync_after_load()
    other.train_loader = trained.train_loader  # its own has the order of another seed
    train_step(trained)
    other.progress.consumed_samples = trained.progress.consumed_samples - 16
    train_step(other)
    for loaded, source in zip(other.optimizer.checkpoint_shards(), trained.optimizer.checkpoint_shards(), strict=True):
        assert torch.equal(loaded.data, source.data), loaded.name
    for bucket in other.sync.param_buckets:
        bucket.full.fill_(0.5)
    other.optimizer.sync_after_load(main_loaded=False)
    assert all(bool((bucket.main == 0.5).all()) for bucket in other.optimizer.buckets)


def _traced(flags: str) -> tuple[list[Fact], int, int]:
    """Return the facts of one step on a simulated GPU, the offloaded elements of this rank, and all it owns."""
    with on_gpu(dist.get_rank()) as gpu:
        run = run_from(f"{COMMON} {flags} --kernels torch --attention-kernel torch", device=gpu.device)
        train_step(run)
        start = len(gpu.trace)
        train_step(run)
        run.sync.wait_param_sync()
        run.close()
        owned = sum(len(bucket.main) for bucket in run.optimizer.buckets if bucket.is_offloaded)
        return gpu.trace[start:], owned, run.sync.layout.size // run.mesh.dp.size


def _bytes(facts: list[Fact], name: str) -> int:
    """Return the bytes that the store copies with this operation."""
    copies = (f for f in facts if isinstance(f, Launch) and f.name == name and f.where.startswith(STORE))
    return sum(span.stop - span.start for f in copies for span in f.writes)


@GUARDS
@pytest.mark.parametrize(
    "flags,weight,share", [(OFFLOAD, 4, 1.0), (f"{ZERO2} {OFFLOAD} --bf16", 2, 1.0), (f"{HALF} --bf16 {ZERO3}", 2, 0.5)]
)
def test_offload_copies_each_owned_element_once(flags: str, weight: int, share: float) -> None:
    for facts, owned, local in run_ranks(2, _traced, f"{LLAMA} {flags}", backend=nccl.join):
        assert (_bytes(facts, DOWN), _bytes(facts, UP)) == (4 * owned, weight * owned)
        assert share * local <= owned <= (share + 0.2) * local


@GUARDS
def test_copies_overlap_host_updates() -> None:
    """The order of events shows the overlap: copies use a stream of their own and run next to the host's updates.

    A second gradient is copied down before the first update and a weight is copied up before the last one; no update on
    the GPU waits for the host's.
    """
    facts, _, _ = run_ranks(2, _traced, f"{LLAMA} {HALF} --bf16", backend=nccl.join)[0]
    indices = lambda test: [i for i, f in enumerate(facts) if test(f)]  # noqa: E731
    stores = indices(lambda f: isinstance(f, Launch) and f.where.startswith(STORE))
    copies = {name: [i for i in stores if facts[i].name == name] for name in (UP, DOWN)}  # type: ignore[attr-defined]
    updates = indices(lambda f: isinstance(f, HostAccess) and f.name == "_fused_adamw_")
    gpu_updates = indices(lambda f: isinstance(f, Launch) and f.name == "_fused_adamw_")
    streams = {facts[i].stream for name in copies for i in copies[name]}  # type: ignore[union-attr]
    assert len(streams) == 1 and 0 not in streams
    assert copies[DOWN][1] < updates[0] and copies[UP][0] < updates[-1] and gpu_updates[-1] < updates[0]


@GUARDS
def test_killed_offload_run_resumes_with_equal_files(tmp_path: Path) -> None:
    def train(name: str, *more: str, fault: str = "") -> dict[str, Any]:
        argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *f"{COMMON} {LLAMA} --bf16 --train-iters 4".split()]
        argv += [*more, "--save", str(tmp_path / name), "--save-interval", "1"]
        env = os.environ | ({"MEGALITE_FAULT": fault} if fault else {})
        result = programs.run(
            [*argv, "--run-dir", str(tmp_path / name / "run")], capture_output=True, text=True, env=env
        )
        assert result.returncode in ((-signal.SIGKILL, 128 + signal.SIGKILL) if fault else (0,)), result.stderr
        return {} if fault else json.loads((tmp_path / name / "iter_0000004/manifest.json").read_text())["files"]

    disk_flags = (*ZERO3.split(), *"--dp 2 --nproc 2 --optimizer-offload-dir".split(), str(tmp_path))
    train("weights, too", *PARAMETERS.split(), *disk_flags, "--async-save", "on", fault="step.after_update:0:3:kill")
    resumed_on_disk = train("weights, too", *PARAMETERS.split(), *disk_flags, "--load", str(tmp_path / "weights, too"))
    assert resumed_on_disk == train("on GPUs", *ZERO3.split(), *"--dp 2 --nproc 2".split())
    async_flags = (*HALF.split(), "--async-save", "on")
    train("killed", *async_flags, fault="step.after_update:0:3:kill")
    resumed = train("killed", OFFLOAD, *async_flags[-4:], "--load", str(tmp_path / "killed"))  # offload all
    assert resumed == train("straight", *HALF.split()[-2:])
