"""The trainer on simulated GPUs has no race, and every wait that prevents one is needed.

Each wait in the package is removed in turn, the trainer runs, and the detector names the operation that was not waited
for. A new wait without a row in waits.toml fails.
"""

import contextlib
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pairwise import nightly_except
from ranks import run_ranks
from train_cases import config_from, run_from

from megalite.checkpoint.manager.async_save import HostStager
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.generate.generation import Sampling, TextGenerator, generate_tokens
from megalite.launch.rank_info import LaunchError
from megalite.optim.zero import param_bucket
from megalite.parallel.comm import all_gather_strings, start_all_gather_into
from megalite.parallel.self_test import check_collectives
from megalite.training.checkpointing.save import save
from megalite.training.evaluation import evaluate
from megalite.training.replica_check import check_replicas
from megalite.training.state import InvalidResultError, Run
from megalite.training.train_step import train_step
from simulated_gpu.removed_waits import RemovedWait, intercept_waits, sites, without
from simulated_gpu.runs import on_gpu
from simulated_gpu.simulator import nccl
from simulated_gpu.simulator.clocks import Race, races
from simulated_gpu.simulator.device import SimulatedGpu
from simulated_gpu.simulator.trace import Fact, HostAccess, Launch
from simulated_gpu.test_trainer import COMMON as STEPS
from simulated_gpu.test_trainer import LLAMA

COMMON = f"""{STEPS} --global-batch-size 8 --train-iters 99 --hidden-dropout 0 --attention-dropout 0 --bf16
 --no-check-for-nan-in-loss-and-grad"""
TABLES = tomllib.loads(Path(__file__).with_name("waits.toml").read_text("utf-8"))
FLAGS, BETWEEN_RANKS, BETWEEN_STREAMS = (TABLES[name] for name in ("flags", "between_ranks", "between_streams"))
OFTEN, LAYOUTS = TABLES["layouts"]["often"], TABLES["layouts"]["often"] | TABLES["layouts"]["rarely"]
ZERO, GRAPHS, OFFLOAD, MOVED = (FLAGS[name] for name in ("ZERO", "GRAPHS", "OFFLOAD", "MOVED"))
SAVE_WAIT = "training/checkpointing/save.py save: run.sync.wait_param_sync()"


def test_every_wait_has_a_row() -> None:
    tables = (
        *BETWEEN_RANKS.values(),
        *(TABLES[name] for name in ("between_streams", "no_race", "unseen", "of_the_host")),
    )
    rows = [row for table in tables for row in table]
    assert len(set(rows)) == len(rows) and set(rows) == set(sites())


def build(flags: str, device: torch.device) -> Run:
    return run_from(f"{COMMON} {flags}", device=device)


def save_during_steps(run: Run, save_dir: Path, times: int = 2) -> None:
    saver = CheckpointSaver(save_dir, run.mesh, 0, background=True)
    for _ in range(times):
        save(run, saver, "")
        train_step(run)
    saver.wait()
    saver.close()


# ---- between ranks


def _train(flags: str, keys: list[str], save_dir: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return one rank's races in an ordinary run, and those without each wait, for which it runs another step."""
    with intercept_waits(), on_gpu(dist.get_rank()) as gpu:
        run = build(flags, gpu.device)
        train_step(run)
        save_during_steps(run, save_dir)
        evaluate(run, run.valid_loaders[0].data, 1)
        train_step(run)
        clean = [str(race) for race in races(gpu.trace)]
        removed_waits: dict[str, RemovedWait] = {}
        for key in keys:
            with without(sites()[key]) as removed_waits[key], _ignore_anomalies():
                _reach(run, key, save_dir)
        all_races = races(gpu.trace)
        run.close()
        return clean, {
            key: [str(race) for race in all_races if _concerns(race, removed)] for key, removed in removed_waits.items()
        }


def _ignore_anomalies() -> contextlib.AbstractContextManager[object]:
    """Do not check steps for anomalies, whose messages between ranks would be read too early as well."""
    return mock.patch("megalite.training.train_step.find_anomaly", return_value=None)


def _reach(run: Run, key: str, save_dir: Path) -> None:
    """Run the code that contains the wait; its results do not matter any more."""
    if key in BETWEEN_RANKS["generated"]:
        assert run.tokenizer is not None
        parts = run.pipeline.stages[0], run.mesh, config_from(COMMON).model, run.tokenizer
        model = TextGenerator(*parts, frozenset([93]), 0)  # type: ignore[arg-type]
        generate_tokens(model, [[1, 2, 3]], 1, Sampling())  # one token: ranks may draw different ones
        return
    if key in BETWEEN_RANKS["started"]:
        with contextlib.suppress(LaunchError):  # it reads results that are not complete yet
            check_collectives(run.mesh)
        all_gather_strings("what differs", run.mesh.world, run.mesh.device)
        return
    if "optim/muon.py" in key:  # after a step with wrong values, train_step would update nothing
        run.optimizer.step(lr=0.0, weight_decay=0.0, scale=1.0)
        return
    train_step(run)
    if key == SAVE_WAIT:
        save_during_steps(run, save_dir)
        train_step(run)  # its gathers precede no operation of their communicator that is waited for
    if key in BETWEEN_RANKS["checked"]:
        with contextlib.suppress(InvalidResultError):
            check_replicas(run, 1)


def _concerns(race: Race, removed: RemovedWait) -> bool:
    return race.early in removed.comms or race.late in removed.comms


@pytest.mark.timeout(400)  # for a busy machine
@pytest.mark.parametrize("name", nightly_except([*LAYOUTS], [*OFTEN], str))
def test_removing_any_wait_gives_a_race(name: str, tmp_path: Path) -> None:
    layout, more_flags = LAYOUTS[name]
    first = name == next(other for other, (flags, _) in LAYOUTS.items() if flags == layout)
    rows = [row for table in BETWEEN_RANKS.values() for row in table.items()]
    keys = [key for key, flags in rows if first and layout in ([flags] if isinstance(flags, str) else flags)]
    needless = [SAVE_WAIT] if name == "dp2" else []
    world = 4 if layout in ("SPLIT", "HYBRID") or "dp2" in name and layout == "PP" else 2
    flags = f"{FLAGS[layout]} {more_flags.format_map(FLAGS)}"
    results = run_ranks(world, _train, flags, [*needless, *keys], tmp_path, backend=nccl.join, timeout=300)
    for rank, (clean, _) in enumerate(results):
        assert clean == [], f"rank {rank}"
    for key in (*needless, *keys):
        lines = [line for _, races_by_key in results for line in races_by_key[key]]
        assert bool(lines) == (key not in needless), (key, lines)


def _race_without_upload_wait(fault: str) -> set[tuple[str, str, str]]:
    """Return the races of a step with offloaded weights, as (name of the early fact, name and file of the late one)."""

    def early_gather(*args: Any) -> Any:  # a gather that waits for training, but not for the upload of its input
        with torch.cuda.stream(torch.cuda.default_stream()):
            return start_all_gather_into(*args)

    gather_patch = mock.patch.object(param_bucket, "start_all_gather_into", early_gather)
    with intercept_waits(), on_gpu(dist.get_rank()) as gpu:
        run = build(f"{ZERO} {OFFLOAD} --param-cpu-offload", gpu.device)
        with gather_patch if fault == "gather" else without(sites()[fault]):
            train_step(run)
        all_races = races(gpu.trace)
        run.close()
    attribute_of = lambda fact, key: getattr(fact, key, "")  # noqa: E731
    return {
        (attribute_of(r.early, "name"), attribute_of(r.late, "name"), attribute_of(r.late, "where").partition(":")[0])
        for r in all_races
    }


# what is removed from the upload -> the early fact, and the name and file of the late one
UPLOAD_RACES = {
    "parallel/streams.py on_side_stream: wait_event(after)": (
        "",
        "copy to the GPU",
        "megalite/optim/zero/param_bucket.py",
    ),
    "gather": ("copy to the GPU", "mm", "megalite/kernels/matmul.py"),
}


@pytest.mark.parametrize("fault", UPLOAD_RACES)
def test_offloaded_weights_race_without_their_waits(fault: str) -> None:
    assert all(
        UPLOAD_RACES[fault] in pairs
        for pairs in run_ranks(2, _race_without_upload_wait, fault, backend=nccl.join, timeout=300)
    )


# ---- between streams of one rank

COPY = "copy to the host"
SAVES = "checkpoint/manager/async_save.py HostStager."


@contextlib.contextmanager
def one_rank(flags: str) -> Iterator[tuple[SimulatedGpu, Run]]:
    with intercept_waits(), on_gpu(0) as gpu:
        run = build(flags, gpu.device)
        train_step(run)
        try:
            yield gpu, run
        finally:
            run.close()


ALONE = [LLAMA, GRAPHS, f"{GRAPHS} --fp16 --no-bf16 --loss-scale 128", OFFLOAD, f"{GRAPHS} {OFFLOAD}", MOVED]


@pytest.mark.parametrize("flags", ["", *ALONE, f"{OFFLOAD} --no-bf16"])
def test_single_rank_does_not_race(flags: str, tmp_path: Path) -> None:
    with one_rank(flags) as (gpu, run):
        train_step(run)
        save_during_steps(run, tmp_path)
        evaluate(run, run.valid_loaders[0].data, 1)
        train_step(run)
        assert [str(race) for race in races(gpu.trace)] == []
        assert len({fact.stream for fact in gpu.trace if isinstance(fact, Launch)}) > 1


@pytest.mark.parametrize("key", [key for key, scenario in BETWEEN_STREAMS.items() if scenario == "graphs"])
def test_graph_replay_races_without_its_wait(key: str) -> None:
    with one_rank(GRAPHS) as (gpu, run):
        with without(sites()[key]) as removed:
            train_step(run)
        train_step(run)
        launch_races = [
            race for race in races(gpu.trace) if isinstance(race.early, Launch) and isinstance(race.late, Launch)
        ]
    assert removed.times == 1 and launch_races
    assert all(race.early.stream != race.late.stream for race in launch_races)  # type: ignore[union-attr]


# removed wait -> another one that is removed because it would replace it; the early and the late fact
STAGING_RACES: dict[str, tuple[str, str, str]] = {
    f"{SAVES}wait_until_staged: wait_event(self._done)": (f"{SAVES}stage: self._done.synchronize()", COPY, "update"),
    f"{SAVES}stage: self._done.synchronize()": ("", COPY, "the host"),
}


@pytest.mark.parametrize("key", STAGING_RACES)
def test_staging_copy_races_without_its_wait(key: str, tmp_path: Path) -> None:
    other, early, late = STAGING_RACES[key]
    with one_rank("") as (gpu, run), contextlib.ExitStack() as stack:
        removed_waits = [stack.enter_context(without(sites()[site_key])) for site_key in (key, other) if site_key]
        save_during_steps(run, tmp_path)
        all_races = races(gpu.trace)
    assert all(site_key.times for site_key in removed_waits)
    assert (early, late) in {(_kind_of(race.early), _kind_of(race.late)) for race in all_races}, [
        str(race) for race in all_races
    ]


def _kind_of(fact: Fact) -> str:
    if isinstance(fact, HostAccess):
        return "the host"
    if not isinstance(fact, Launch):
        return ""
    return fact.name if fact.name == COPY else "update" if "adamw" in fact.where else ""


OPTIMIZER, ACTIVATIONS = (
    "optim/optimizer_offload.py HostUpdater.update_: ",
    "nn/activation_offload.py _BlockActivations.",
)
# removed wait, flags, the early fact, the file of the late one
OFFLOAD_RACES = [
    (f"{OPTIMIZER}copy_event.synchronize()", OFFLOAD, COPY, "megalite/kernels/adamw.py"),
    (f"{OPTIMIZER}wait_event(last_upload)", OFFLOAD, "copy to the GPU", "megalite/nn/"),
    (f"{OPTIMIZER}wait_event(last_upload)", f"{OFFLOAD} --no-bf16", "copy to the GPU", "megalite/nn/"),
    (f"{ACTIVATIONS}free_device_copies: wait_event(self.copy_event)", MOVED, COPY, "megalite/"),
    (f"{ACTIVATIONS}unpack: wait_event(self.copy_event)", MOVED, "copy to the GPU", "megalite/"),
]


@pytest.mark.parametrize("key,flags,early,late", OFFLOAD_RACES)
def test_offload_races_without_waiting_for_copies(key: str, flags: str, early: str, late: str) -> None:
    with one_rank(flags) as (gpu, run):
        with without(sites()[key]) as removed:
            for _ in range(2):
                train_step(run)
        all_races = races(gpu.trace)
    pairs = {(getattr(race.early, "name", ""), getattr(race.late, "where", "")) for race in all_races}
    assert removed.times and {key for key, *_ in OFFLOAD_RACES} == {
        k for k, s in BETWEEN_STREAMS.items() if s == "offload"
    }
    assert any(first == early and where.startswith(late) for first, where in pairs), [str(race) for race in all_races]


@pytest.mark.parametrize("key", ["", *(key for key, scenario in BETWEEN_STREAMS.items() if scenario == "copy")])
def test_copy_before_the_update_races(key: str) -> None:
    """Test the copy alone, because the host happens to wait for the device during a complete save."""
    with intercept_waits(), on_gpu(0) as gpu, without(sites()[key]) if key else contextlib.nullcontext():
        state, stager = torch.zeros(64, device=gpu.device), HostStager(gpu.device)
        for _ in range(2):
            state.add_(1)
            stager.start()
            stager.stage([state])
            stager.wait_until_staged()
        copy_races = [race for race in races(gpu.trace) if isinstance(race.late, Launch) and race.late.name == COPY]
    assert bool(copy_races) == bool(key)


def test_copy_after_the_update_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint thread is slow, and the update does not wait until the copy has started."""
    gate, original = threading.Event(), HostStager._parts
    monkeypatch.setattr(HostStager, "_parts", lambda *args: (gate.wait(20), original(*args))[1])
    with one_rank("") as (gpu, run), without(sites()[f"{SAVES}wait_until_staged: self._staged.wait()"]) as removed:
        saver = CheckpointSaver(tmp_path, run.mesh, 0, background=True)
        save(run, saver, "")
        train_step(run)
        gate.set()
        assert saver._pending_save is not None
        saver._pending_save.join()  # `wait` would synchronize the device first
        saver.wait()
        saver.close()
        all_races = races(gpu.trace)
    assert removed.times == 1 and ("update", COPY) in {
        (_kind_of(race.early), _kind_of(race.late)) for race in all_races
    }
