"""The trainer on simulated cards has no race; and every wait in the package that a race would be without is found to be
needed: it is left out, the trainer runs, and the detector names what was not waited for.

A new wait without a row in waits.toml fails.
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
from pairwise import rarely
from ranks import run_ranks
from train_cases import config_from, run_from

from megalite.checkpoint.manager.async_save import HostStager
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.generate.generation import Sampling, TextGenerator, generate_tokens
from megalite.launch.rank_info import LaunchError
from megalite.optim import param_gather
from megalite.parallel.comm import all_gather_strings, start_all_gather_into
from megalite.parallel.self_test import check_collectives
from megalite.training.checkpointing.save import save
from megalite.training.replica_check import check_replicas
from megalite.training.state import InvalidResultError, Run
from megalite.training.train_step import train_step
from megalite.training.trainer import evaluate
from simulated_gpu.removed_waits import Left, heard, sites, without
from simulated_gpu.runs import on_card
from simulated_gpu.simulator import nccl
from simulated_gpu.simulator.clocks import Race, races
from simulated_gpu.simulator.device import Card
from simulated_gpu.simulator.trace import Fact, HostAccess, Launch
from simulated_gpu.test_trainer import COMMON as STEPS
from simulated_gpu.test_trainer import LLAMA

COMMON = f"""{STEPS} --global-batch-size 8 --train-iters 99 --hidden-dropout 0 --attention-dropout 0 --bf16
 --no-check-for-nan-in-loss-and-grad"""
TABLES = tomllib.loads(Path(__file__).with_name("waits.toml").read_text("utf-8"))
FLAGS, BETWEEN_RANKS, BETWEEN_STREAMS = (TABLES[name] for name in ("flags", "between_ranks", "between_streams"))
OFTEN, LAYOUTS = TABLES["layouts"]["often"], TABLES["layouts"]["often"] | TABLES["layouts"]["rarely"]
ZERO, GRAPHS, OFFLOAD, MOVED = (FLAGS[name] for name in ("ZERO", "GRAPHS", "OFFLOAD", "MOVED"))
SAVED = "training/checkpointing/save.py save: run.buffer.wait_param_sync()"


def test_every_wait_has_a_row() -> None:
    tables = (
        *BETWEEN_RANKS.values(),
        *(TABLES[name] for name in ("between_streams", "no_race", "unseen", "of_the_host")),
    )
    rows = [row for table in tables for row in table]
    assert len(set(rows)) == len(rows) and set(rows) == set(sites())


def build(flags: str, device: torch.device) -> Run:
    return run_from(f"{COMMON} {flags}", device=device)


def saved_behind_steps(run: Run, folder: Path, times: int = 2) -> None:
    saver = CheckpointSaver(folder, run.mesh, 0, background=True)
    for _ in range(times):
        save(run, saver, "")
        train_step(run)
    saver.wait()
    saver.close()


# ---- between ranks


def _train(flags: str, keys: list[str], folder: Path) -> tuple[list[str], dict[str, list[str]]]:
    """On one rank: the races of an ordinary run, and those around each wait that is left out, a step each."""
    with heard(), on_card(dist.get_rank()) as card:
        run = build(flags, card.device)
        train_step(run)
        saved_behind_steps(run, folder)
        evaluate(run, run.valid_loaders[0].data, 1)
        train_step(run)
        clean = [str(race) for race in races(card.trace)]
        left: dict[str, Left] = {}
        for key in keys:
            with without(sites()[key]) as left[key], _nothing_doubted():
                _visit(run, key, folder)
        found = races(card.trace)
        run.close()
        return clean, {key: [str(race) for race in found if _of(race, one)] for key, one in left.items()}


def _nothing_doubted() -> contextlib.AbstractContextManager[object]:
    """A step whose numbers went wrong is not looked at again: words between ranks would be read too early as well."""
    return mock.patch("megalite.training.train_step.find_anomaly", return_value=None)


def _visit(run: Run, key: str, folder: Path) -> None:
    """Do what comes by there; values are nobody's affair any more."""
    if key in BETWEEN_RANKS["generated"]:
        assert run.tokenizer is not None
        parts = run.pipeline.stages[0], run.mesh, config_from(COMMON).model, run.tokenizer
        model = TextGenerator(*parts, frozenset([93]), 0)  # type: ignore[arg-type]
        generate_tokens(model, [[1, 2, 3]], 1, Sampling())  # one token: ranks may draw different ones
        return
    if key in BETWEEN_RANKS["started"]:
        with contextlib.suppress(LaunchError):  # it looks at what is not there yet
            check_collectives(run.mesh)
        all_gather_strings("what differs", run.mesh.world, run.mesh.device)
        return
    if "optim/muon.py" in key:  # a step whose numbers went wrong before would update nothing
        run.optimizer.step(lr=0.0, weight_decay=0.0, scale=1.0)
        return
    train_step(run)
    if key == SAVED:
        saved_behind_steps(run, folder)
        train_step(run)  # gathers that no later operation of the same communicator has been waited for
    if key in BETWEEN_RANKS["checked"]:
        with contextlib.suppress(InvalidResultError):
            check_replicas(run, 1)


def _of(race: Race, left: Left) -> bool:
    return race.early in left.comms or race.late in left.comms


@pytest.mark.timeout(400)  # of a machine that is busy
@pytest.mark.parametrize("name", rarely([*LAYOUTS], [*OFTEN], str))
def test_removing_any_wait_gives_a_race(name: str, tmp_path: Path) -> None:
    layout, more = LAYOUTS[name]
    first = name == next(other for other, (flags, _) in LAYOUTS.items() if flags == layout)
    keys = [key for table in BETWEEN_RANKS.values() for key, flags in table.items() if flags == layout and first]
    needless = [SAVED] if name == "dp2" else []
    world = 4 if layout in ("SPLIT", "HYBRID") or "dp2" in name and layout == "PP" else 2
    flags = f"{FLAGS[layout]} {more.format_map(FLAGS)}"
    results = run_ranks(world, _train, flags, [*needless, *keys], tmp_path, backend=nccl.join, timeout=300)
    for rank, (clean, _) in enumerate(results):
        assert clean == [], f"rank {rank}"
    for key in (*needless, *keys):
        told = [line for _, found in results for line in found[key]]
        assert bool(told) == (key not in needless), (key, told)


def _raised(fault: str) -> set[tuple[str, str, str]]:
    """Of a step of a rank whose weights come up from the host: what comes too late, what too early, and its file."""

    def early(*args: Any) -> Any:  # a gather that is behind training, and not behind the copy of what it sends
        with torch.cuda.stream(torch.cuda.default_stream()):
            return start_all_gather_into(*args)

    gathers = mock.patch.object(param_gather, "start_all_gather_into", early)
    with heard(), on_card(dist.get_rank()) as card:
        run = build(f"{ZERO} {OFFLOAD} --param-cpu-offload", card.device)
        with gathers if fault == "gather" else without(sites()[fault]):
            train_step(run)
        found = races(card.trace)
        run.close()
    of = lambda fact, key: getattr(fact, key, "")  # noqa: E731
    return {(of(r.early, "name"), of(r.late, "name"), of(r.late, "where").partition(":")[0]) for r in found}


# what is left out of the way up -> what comes too late, and what too early: a use of the unit before, the copy itself
RAISED = {
    "parallel/streams.py on_side_stream: wait_event(after)": ("", "copy to the card", "megalite/optim/param_gather.py"),
    "gather": ("copy to the card", "mm", "megalite/kernels/matmul.py"),
}


@pytest.mark.parametrize("fault", RAISED)
def test_offloaded_weights_race_without_their_waits(fault: str) -> None:
    assert all(RAISED[fault] in found for found in run_ranks(2, _raised, fault, backend=nccl.join, timeout=300))


# ---- between streams of one rank

COPY = "copy to the host"
SAVES = "checkpoint/manager/async_save.py HostStager."


@contextlib.contextmanager
def one_rank(flags: str) -> Iterator[tuple[Card, Run]]:
    with heard(), on_card(0) as card:
        run = build(flags, card.device)
        train_step(run)
        try:
            yield card, run
        finally:
            run.close()


ALONE = [LLAMA, GRAPHS, f"{GRAPHS} --fp16 --no-bf16 --loss-scale 128", OFFLOAD, f"{GRAPHS} {OFFLOAD}", MOVED]


@pytest.mark.parametrize("flags", ["", *ALONE, f"{OFFLOAD} --no-bf16"])
def test_single_rank_does_not_race(flags: str, tmp_path: Path) -> None:
    with one_rank(flags) as (card, run):
        train_step(run)
        saved_behind_steps(run, tmp_path)
        evaluate(run, run.valid_loaders[0].data, 1)
        train_step(run)
        assert [str(race) for race in races(card.trace)] == []
        assert len({fact.stream for fact in card.trace if isinstance(fact, Launch)}) > 1


@pytest.mark.parametrize("key", [key for key, scenario in BETWEEN_STREAMS.items() if scenario == "graphs"])
def test_graph_replay_races_without_its_wait(key: str) -> None:
    with one_rank(GRAPHS) as (card, run):
        with without(sites()[key]) as left:
            train_step(run)
        train_step(run)
        found = [race for race in races(card.trace) if isinstance(race.early, Launch) and isinstance(race.late, Launch)]
    assert left.times == 1 and found
    assert all(race.early.stream != race.late.stream for race in found)  # type: ignore[union-attr]


# what is left out -> what else is, so that it does not make up for it; what comes too late, what comes too early
MISSED: dict[str, tuple[str, str, str]] = {
    f"{SAVES}wait_until_staged: wait_event(self._done)": (f"{SAVES}stage: self._done.synchronize()", COPY, "update"),
    f"{SAVES}stage: self._done.synchronize()": ("", COPY, "the host"),
}


@pytest.mark.parametrize("key", MISSED)
def test_staging_copy_races_without_its_wait(key: str, tmp_path: Path) -> None:
    other, early, late = MISSED[key]
    with one_rank("") as (card, run), contextlib.ExitStack() as stack:
        left = [stack.enter_context(without(sites()[one])) for one in (key, other) if one]
        saved_behind_steps(run, tmp_path)
        found = races(card.trace)
    assert all(one.times for one in left)
    assert (early, late) in {(_what(race.early), _what(race.late)) for race in found}, [str(race) for race in found]


def _what(fact: Fact) -> str:
    if isinstance(fact, HostAccess):
        return "the host"
    if not isinstance(fact, Launch):
        return ""
    return fact.name if fact.name == COPY else "update" if "adamw" in fact.where else ""


STORE, ACTIVATIONS = (
    "optim/optimizer_offload.py OffloadedState.update_: ",
    "nn/activation_offload.py _BlockActivations.",
)
# what is left out, flags -> what comes too late, and where what comes too early stands
UNMOVED = [
    (f"{STORE}copy_event.synchronize()", OFFLOAD, COPY, "megalite/kernels/adamw.py"),
    (f"{STORE}wait_event(last_upload)", OFFLOAD, "copy to the card", "megalite/nn/"),
    (f"{STORE}wait_event(last_upload)", f"{OFFLOAD} --no-bf16", "copy to the card", "megalite/nn/"),
    (f"{ACTIVATIONS}free_device_copies: wait_event(self.copy_event)", MOVED, COPY, "megalite/"),
    (f"{ACTIVATIONS}unpack: wait_event(self.copy_event)", MOVED, "copy to the card", "megalite/"),
]


@pytest.mark.parametrize("key,flags,early,late", UNMOVED)
def test_offload_races_without_waiting_for_copies(key: str, flags: str, early: str, late: str) -> None:
    with one_rank(flags) as (card, run):
        with without(sites()[key]) as left:
            for _ in range(2):
                train_step(run)
        found = races(card.trace)
    pairs = {(getattr(race.early, "name", ""), getattr(race.late, "where", "")) for race in found}
    assert left.times and {key for key, *_ in UNMOVED} == {k for k, s in BETWEEN_STREAMS.items() if s == "offload"}
    assert any(first == early and where.startswith(late) for first, where in pairs), [str(race) for race in found]


@pytest.mark.parametrize("key", ["", *(key for key, scenario in BETWEEN_STREAMS.items() if scenario == "copy")])
def test_copy_before_the_update_races(key: str) -> None:
    """Of the copy alone: around a whole save the host happens to wait for the device."""
    with heard(), on_card(0) as card, without(sites()[key]) if key else contextlib.nullcontext():
        state, copy = torch.zeros(64, device=card.device), HostStager(card.device)
        for _ in range(2):
            state.add_(1)
            copy.start()
            copy.stage([state])
            copy.wait_until_staged()
        found = [race for race in races(card.trace) if isinstance(race.late, Launch) and race.late.name == COPY]
    assert bool(found) == bool(key)


def test_copy_after_the_update_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the save is slow, and the update does not wait until the copy has begun."""
    gate, real = threading.Event(), HostStager._parts
    monkeypatch.setattr(HostStager, "_parts", lambda *args: (gate.wait(20), real(*args))[1])
    with one_rank("") as (card, run), without(sites()[f"{SAVES}wait_until_staged: self._staged.wait()"]) as left:
        saver = CheckpointSaver(tmp_path, run.mesh, 0, background=True)
        save(run, saver, "")
        train_step(run)
        gate.set()
        assert saver._pending_save is not None
        saver._pending_save.join()  # `wait` would ask the device first
        saver.wait()
        saver.close()
        found = races(card.trace)
    assert left.times == 1 and ("update", COPY) in {(_what(race.early), _what(race.late)) for race in found}
