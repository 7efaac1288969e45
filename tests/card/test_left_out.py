"""The trainer on simulated cards has no race; and every wait in the package that a race would be without is found to be
needed: it is left out, the trainer runs, and the detector names what was not waited for.

A new wait without a row in WAITS fails.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from train_cases import config_from, run_from

from card.left_out import Left, heard, sites, without
from card.runs import on_card
from card.simulator import nccl
from card.simulator.clocks import Race, races
from card.simulator.device import Card
from card.simulator.trace import Fact, HostAccess, Launch
from card.test_trainer import COMMON as STEPS
from card.test_trainer import LLAMA
from megalite.checkpoint.run.background_save import HostCopy
from megalite.checkpoint.run.saver import Saver
from megalite.generate.generation import Generator, Sampling, continue_texts
from megalite.launch.ranks import LaunchError
from megalite.optim import param_gather
from megalite.parallel.comm import gather_texts, start_all_gather_into
from megalite.parallel.self_test import check_collectives
from megalite.train.loop import evaluate
from megalite.train.replicas import check_replicas
from megalite.train.start.resume import save
from megalite.train.state import BadResult, Run
from megalite.train.step import train_step

COMMON = f"""{STEPS} --global-batch-size 8 --train-iters 99 --hidden-dropout 0 --attention-dropout 0 --bf16
 --no-check-for-nan-in-loss-and-grad"""
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SPLIT = f"{TP} {PP} --split-backward"
GRAPHS = "--cuda-graph-impl local"
ZERO = "--zero-stage 3"
MUON = "--optimizer muon --muon-extra-scale-factor 0.2"
HYBRID = f"{ZERO} --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"

# a layer gathers what its window sees, one all keys, and one exchanges heads
CP = "--context-parallel-size 2 --cp-comm-type allgather allgather a2a"
EP = f"{TP} --ep 2 --num-experts 4 --moe-aux-loss-coeff 0.1 --disable-bias-linear"
EP += " --qk-layernorm --qk-layernorm-over-heads --normalization RMSNorm"
SO_FAR = "--ep 2 --num-experts 4 --moe-aux-loss-coeff 0.1 --disable-bias-linear"
SO_FAR += " --moe-router-load-balancing-type global_aux_loss"
SINKHORN = f"{TP} --num-experts 4 --moe-router-topk 1 --disable-bias-linear --moe-router-load-balancing-type sinkhorn"

OFFLOAD = "--optimizer-cpu-offload --ddp-bucket-size 3000"
MOVED = "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 64"

# where a wait stands -> the flags of two ranks, or four, that race without it
BETWEEN_RANKS = {
    "optim/param_gather.py ParamGather._finish: pending.wait()": "",
    "optim/grad_reduce.py GradReduce.finish: work.wait()": "",
    "optim/grad_reduce.py GradReduce.settle: work.wait()": ZERO,
    "optim/muon.py _WholeMatrices.finish: coming.pop(0).wait()": MUON,
    "optim/muon.py _WholeMatrices._spread: results.wait()": MUON,
    "nn/context.py Route._exchange: start_all_to_all(parts.reshape(-1), given_sizes, got_sizes, self.cp).wait()": CP,
    "nn/context.py Route.gather: start_all_gather(kv, self.cp).wait()": CP,
    "nn/context.py Route.scatter: start_reduce_scatter(others.flatten(0, 1), self.cp).wait()": CP,
    "nn/context.py _Swap.forward: start_all_to_all(sent.view(-1), each, each, cp).wait()": CP,
    "nn/linear.py _GatherLinear.forward: start_all_gather(x_sBD, tp).wait()": TP,
    "nn/linear.py _GatherLinear.backward: gathering.wait()": TP,
    "nn/linear.py _GatherLinear.backward: scattering.wait()": TP,
    "nn/linear.py _LinearScatter.forward: start_reduce_scatter(a_SBf @ weight.T, tp).wait()": TP,
    "nn/linear.py _LinearScatter.backward: start_all_gather(dy_sBD, ctx.tp).wait()": TP,
    "nn/later.py Later.run: x.wait()": SPLIT,
    # the first of its layout: with what a step leaves behind that lacks another wait, no row may travel
    "nn/token_exchange.py _Back.backward: ctx.travel.swap(dy_ND[token_S], back=False).wait()": EP,
    "nn/norm.py _means_over: start_all_gather(own[None], tp).wait()": EP,
    "nn/router.py Router.add_losses_: start_all_gather(counts_BE[None], axis).wait()": EP,
    "nn/router.py Router.add_losses_: start_all_gather(counts_BE.sum(0)[None], self.dp).wait()": SO_FAR,
    "nn/router.py Router.balanced: start_all_gather(logits_NE, axis).wait()": SINKHORN,
    "nn/token_exchange.py _Receive.forward: sent.arriving.wait()": EP,
    "nn/token_exchange.py _Receive.backward: ctx.travel.swap(_pack(dx_RD, dprobs_RK), back=True).wait()": EP,
    "nn/token_exchange.py _Back.forward: sent.travel.swap(y_RD, back=True).wait()": EP,
    "nn/loss.py _chunk_stats_: start_all_gather(stats_1_2n, tp).wait()": TP,
    "nn/loss.py _LinearCrossEntropy.forward: start_all_gather(x_sBD, tp).wait()": TP,
    "nn/loss.py _LinearCrossEntropy.forward: scattering.wait()": TP,
    "parallel/comm.py _ScatterSeq.forward: start_reduce_scatter(x, axis).wait()": TP,
    "parallel/comm.py _ScatterSeq.backward: start_all_gather(dy, ctx.axis).wait()": TP,
    "parallel/comm.py Pending.wait: self._work.wait()": TP,
    "pipeline/runtime.py Pipeline._wait: message.wait()": PP,
}
CHECKED = "train/replicas.py _differences: buffer.wait_gather()"
SAVED = "train/start/resume.py save: run.buffer.wait_gather()"
GENERATED = (
    "generate/generation.py _logits: start_all_gather(chosen_logits(model.stage.head, x_sBD, chosen_B).T, mesh.tp).wait()",
    "generate/generation.py chosen_logits: start_all_gather(head.norm(x_sBD), head.tp).wait()",
)
STARTED = {
    "parallel/comm.py gather_texts: start_all_gather(row[None], axis).wait()": "",
    "parallel/self_test.py _outcomes: comm.start_reduce_scatter(sent.clone(), axis).wait()": "",
    "parallel/self_test.py pass_on: comm.start_message(*message).wait()": PP,
}
OF_REPLICAS = (
    "optim/grad_reduce.py GradReduce.finish: start_reduce_scatter_into(self.grads.owned(bucket), self.grads.held(bucket), outer).wait()",
    "optim/param_gather.py ParamGather._start: self._outer.pop(b).wait()",
)
BETWEEN_RANKS |= {**dict.fromkeys(OF_REPLICAS, HYBRID), CHECKED: "", **dict.fromkeys(GENERATED, TP), **STARTED}
BETWEEN_STREAMS = {
    "parallel/streams.py on_stream: stream.wait_stream(outside)": "graphs",
    "parallel/streams.py on_stream: outside.wait_stream(stream)": "graphs",
    "parallel/streams.py wait_for: event.wait()": "copy",
    "parallel/streams.py beside: wait_for(after)": "copy",
    "checkpoint/run/background_save.py HostCopy.wait_before_change: wait_for(self._done)": "save",
    "checkpoint/run/background_save.py HostCopy.wait_before_change: self._staged.wait()": "late copy",
    "checkpoint/run/background_save.py HostCopy.fill: self._done.synchronize()": "save",
    "optim/host_store.py HostStore.update_: there.synchronize()": "offload",
    "optim/host_store.py HostStore.update_: wait_for(sent)": "offload",
    "nn/activation_offload.py _Kept.let_go: wait_for(self.copied)": "offload",
    "nn/activation_offload.py _Kept.unpack: wait_for(self.copied)": "offload",
}
NO_RACE = {
    "checkpoint/run/background_save.py HostCopy.fill: wait_for(self._ready)": "the stream of training is the current one",
    "optim/param_gather.py ParamGather.wait: self._outer.pop(next(iter(self._outer))).wait()": "what is owned stays",
    "optim/param_gather.py ParamGather.gather: self.wait()": "in a step every gather has been waited for by then",
    "optim/param_gather.py ParamGather.gather: self.wait() again": "the hooks of the modules wait too; it says when",
    SAVED: "what is saved is owned, and a gather leaves it as it is",
    "train/loop.py Training.finish: self.run.buffer.wait_gather()": "as above",
    "train/replicas.py disagreement: buffer.wait_gather()": "the step's forward has waited for every weight",
    "pipeline/runtime.py Pipeline._now: synchronize(self.mesh.device)": "for the time alone",
    "train/tell/timers.py Phases.over_ranks: synchronize(self._mesh.device)": "for the time alone",
    "parallel/self_test.py _outcomes: comm.start_all_to_all(sent, each, each, axis).wait()": "the reduce-scatter after it waits",
    "parallel/self_test.py _outcomes: comm.start_all_gather(sent[:part], axis).wait()": "as above",
    "train/tell/timers.py Timers._now: synchronize(self.mesh.device)": "for the time alone",
    "parallel/streams.py synchronize: torch.cuda.synchronize(device)": "for the time alone",
}
UNSEEN = {
    "nn/token_exchange.py start_exchange: start_all_gather(facts[None], peers).wait()": "sizes that the host reads",
    "optim/buffer.py ParamBuffer.first_weights: self.wait_gather()": "only a fault on demand asks for them",
    "train/rehearsal.py _stepped.at_once: pending.wait()": "a rehearsal moves nothing",
    "train/rehearsal.py _stepped: run.buffer.wait_gather()": "as above",
    "train/watch/suspect.py Doubts.roll_back: run.buffer.wait_gather()": "a checkpoint overwrites them; no run here has one",
}
OF_THE_HOST = {
    "checkpoint/run/background_save.py wait_for_lists: give_up.wait(storage.look_every_s)",
    "checkpoint/run/saver.py Saver.save: self.wait()",
    "checkpoint/run/upload.py Uploader._run: self._wake.wait()",
    "checkpoint/storage/object_store.py RemoteStorage.reading.renew: over.wait(RENEW_S)",
    "launch/meeting.py within: futures.wait([outcome], seconds)",
    "launch/local_ranks.py _watch: connection.wait([p.sentinel for p in alive], wait)",
    "train/loop.py Training._roll_back: self.saver.wait()",
    "train/watch/hang.py Heartbeat._beat: self._closing.wait(BEAT_S)",
    "train/loop.py Training.finish: self.saver.wait()",
    "train/watch/hang.py Watchdog._watch: self._closing.wait(self.pace * POLL_S)",
    "parallel/comm.py Pending.wait: self._work.wait(limit)",  # over gloo
    # between processes that share memory, on CPUs
    "parallel/shared_memory.py SharedMemory._start: self._last.wait()",
    "parallel/shared_memory.py SharedMemory._steps: arrival.wait()",
}


def test_every_wait_has_its_row() -> None:
    rows = [*BETWEEN_RANKS, *BETWEEN_STREAMS, *NO_RACE, *UNSEEN, *OF_THE_HOST]
    assert len(set(rows)) == len(rows) and set(rows) == set(sites())


def build(flags: str, device: torch.device) -> Run:
    return run_from(f"{COMMON} {flags}", device=device)


def saved_behind_steps(run: Run, folder: Path, times: int = 2) -> None:
    saver = Saver(folder, run.mesh, 0, background=True)
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
        evaluate(run, run.valid[0].data, 1)
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
    return mock.patch("megalite.train.step.reason_to_doubt", return_value=None)


def _visit(run: Run, key: str, folder: Path) -> None:
    """Do what comes by there; values are nobody's affair any more."""
    if key in GENERATED:
        assert run.tokenizer is not None
        parts = run.pipeline.stages[0], run.mesh, config_from(COMMON).model, run.tokenizer
        model = Generator(*parts, frozenset([93]), 0)  # type: ignore[arg-type]
        continue_texts(model, [[1, 2, 3]], 1, Sampling())  # one token: ranks may draw different ones
        return
    if key in STARTED:
        with contextlib.suppress(LaunchError):  # it looks at what is not there yet
            check_collectives(run.mesh)
        gather_texts("what differs", run.mesh.world, run.mesh.device)
        return
    if "optim/muon.py" in key:  # a step whose numbers went wrong before would update nothing
        run.optimizer.step(lr=0.0, weight_decay=0.0, scale=1.0)
        return
    train_step(run)
    if key == SAVED:
        saved_behind_steps(run, folder)
        train_step(run)  # gathers that no later operation of the same communicator has been waited for
    if key == CHECKED:
        with contextlib.suppress(BadResult):
            check_replicas(run, 1)


def _of(race: Race, left: Left) -> bool:
    return race.early in left.comms or race.late in left.comms


LAYOUTS = {
    "dp2": ("", "--ddp-bucket-size 32"),  # every norm has a bucket of its own
    "dp2 graphs": ("", f"{GRAPHS} --global-batch-size 16"),
    "dp2 offloaded": ("", OFFLOAD),
    "dp2 ZeRO-3, parameters offloaded": ("", f"{ZERO} {OFFLOAD} --param-cpu-offload"),
    "dp2 ZeRO-3, half offloaded, fp32": ("", f"{ZERO} {OFFLOAD} --optimizer-offload-fraction 0.5 --no-bf16"),
    "tp2": (TP, "--num-layers 1 --global-batch-size 4"),
    "tp2 ep2": (EP, "--num-layers 1"),
    "dp2 ep2, loss of a step so far": (SO_FAR, "--num-layers 1"),
    "tp2 sinkhorn": (SINKHORN, "--num-layers 1"),
    "pp2": (PP, ""),
    "cp2": (CP, "--num-layers 3 --window-size 4,0 --window-attn-skip-freq 2"),
    "tp2 pp2 split": (SPLIT, ""),
    "dp2 Muon": (MUON, ""),
    "dp2 ZeRO-3": (ZERO, ""),
    "dp4 ZeRO-3 hybrid": (HYBRID, "--global-batch-size 16"),
    "pp2 dp2 vpp2 ZeRO-3": (PP, f"--num-virtual-stages-per-pipeline-rank 2 --num-layers 4 {ZERO} --zero-hold chunk"),
}
QUICK = {"dp2", "tp2", "tp2 ep2", "pp2", "cp2", "tp2 pp2 split", "dp2 Muon", "dp2 ZeRO-3", "dp4 ZeRO-3 hybrid"}


@pytest.mark.timeout(400)  # of a machine that is busy
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.everything) for n in LAYOUTS])
def test_ranks_do_not_race_and_without_any_wait_they_do(name: str, tmp_path: Path) -> None:
    layout, more = LAYOUTS[name]
    first = name == next(other for other, (flags, _) in LAYOUTS.items() if flags == layout)
    keys = [key for key, flags in BETWEEN_RANKS.items() if flags == layout and first]
    needless = [SAVED] if name == "dp2" else []
    world = 4 if layout in (SPLIT, HYBRID) or "dp2" in name and layout == PP else 2
    results = run_ranks(world, _train, f"{layout} {more}", [*needless, *keys], tmp_path, backend=nccl.join, timeout=300)
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
    "parallel/streams.py beside: wait_for(after)": ("", "copy to the card", "megalite/optim/param_gather.py"),
    "gather": ("copy to the card", "mm", "megalite/nn/linear.py"),
}


@pytest.mark.parametrize("fault", RAISED)
def test_weights_that_come_up_from_the_host_race_without_their_waits(fault: str) -> None:
    assert all(RAISED[fault] in found for found in run_ranks(2, _raised, fault, backend=nccl.join, timeout=300))


# ---- between streams of one rank

COPY = "copy to the host"
SAVES = "checkpoint/run/background_save.py HostCopy."


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
def test_a_rank_alone_does_not_race(flags: str, tmp_path: Path) -> None:
    with one_rank(flags) as (card, run):
        train_step(run)
        saved_behind_steps(run, tmp_path)
        evaluate(run, run.valid[0].data, 1)
        train_step(run)
        assert [str(race) for race in races(card.trace)] == []
        assert len({fact.stream for fact in card.trace if isinstance(fact, Launch)}) > 1


@pytest.mark.parametrize("key", [key for key, scenario in BETWEEN_STREAMS.items() if scenario == "graphs"])
def test_a_graph_that_is_not_waited_for_races(key: str) -> None:
    with one_rank(GRAPHS) as (card, run):
        with without(sites()[key]) as left:
            train_step(run)
        train_step(run)
        found = [race for race in races(card.trace) if isinstance(race.early, Launch) and isinstance(race.late, Launch)]
    assert left.times == 1 and found
    assert all(race.early.stream != race.late.stream for race in found)  # type: ignore[union-attr]


# what is left out -> what else is, so that it does not make up for it; what comes too late, what comes too early
MISSED: dict[str, tuple[str, str, str]] = {
    f"{SAVES}wait_before_change: wait_for(self._done)": (f"{SAVES}fill: self._done.synchronize()", COPY, "update"),
    f"{SAVES}fill: self._done.synchronize()": ("", COPY, "the host"),
}


@pytest.mark.parametrize("key", MISSED)
def test_a_copy_behind_the_step_that_is_not_waited_for_races(key: str, tmp_path: Path) -> None:
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


STORE, ACTIVATIONS = "optim/host_store.py HostStore.update_: ", "nn/activation_offload.py _Kept."
# what is left out, flags -> what comes too late, and where what comes too early stands
UNMOVED = [
    (f"{STORE}there.synchronize()", OFFLOAD, COPY, "megalite/kernels/adamw.py"),
    (f"{STORE}wait_for(sent)", OFFLOAD, "copy to the card", "megalite/nn/"),
    (f"{STORE}wait_for(sent)", f"{OFFLOAD} --no-bf16", "copy to the card", "megalite/nn/"),
    (f"{ACTIVATIONS}let_go: wait_for(self.copied)", MOVED, COPY, "megalite/"),
    (f"{ACTIVATIONS}unpack: wait_for(self.copied)", MOVED, "copy to the card", "megalite/"),
]


@pytest.mark.parametrize("key,flags,early,late", UNMOVED)
def test_what_is_offloaded_and_does_not_wait_for_its_copies_races(key: str, flags: str, early: str, late: str) -> None:
    with one_rank(flags) as (card, run):
        with without(sites()[key]) as left:
            for _ in range(2):
                train_step(run)
        found = races(card.trace)
    pairs = {(getattr(race.early, "name", ""), getattr(race.late, "where", "")) for race in found}
    assert left.times and {key for key, *_ in UNMOVED} == {k for k, s in BETWEEN_STREAMS.items() if s == "offload"}
    assert any(first == early and where.startswith(late) for first, where in pairs), [str(race) for race in found]


@pytest.mark.parametrize("key", ["", *(key for key, scenario in BETWEEN_STREAMS.items() if scenario == "copy")])
def test_a_copy_that_does_not_wait_for_the_update_before_it_races(key: str) -> None:
    """Of the copy alone: around a whole save the host happens to wait for the device."""
    with heard(), on_card(0) as card, without(sites()[key]) if key else contextlib.nullcontext():
        state, copy = torch.zeros(64, device=card.device), HostCopy(card.device)
        for _ in range(2):
            state.add_(1)
            copy.begin()
            copy.fill([state])
            copy.wait_before_change()
        found = [race for race in races(card.trace) if isinstance(race.late, Launch) and race.late.name == COPY]
    assert bool(found) == bool(key)


def test_a_copy_that_begins_behind_the_update_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the save is slow, and the update does not wait until the copy has begun."""
    gate, real = threading.Event(), HostCopy._parts
    monkeypatch.setattr(HostCopy, "_parts", lambda *args: (gate.wait(20), real(*args))[1])
    with one_rank("") as (card, run), without(sites()[f"{SAVES}wait_before_change: self._staged.wait()"]) as left:
        saver = Saver(tmp_path, run.mesh, 0, background=True)
        save(run, saver, "")
        train_step(run)
        gate.set()
        assert saver._flight is not None
        saver._flight.join()  # `wait` would ask the device first
        saver.wait()
        saver.close()
        found = races(card.trace)
    assert left.times == 1 and ("update", COPY) in {(_what(race.early), _what(race.late)) for race in found}
