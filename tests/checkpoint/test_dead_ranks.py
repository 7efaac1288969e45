"""One rank of a run dies, or its disk is full, while a checkpoint is saved: nothing is committed, the others end with
an error within seconds, and the run that is started again is, bit for bit, the one that was never stopped."""

import json
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loads
import pytest
from cover import rarely
from train_cases import SMALL

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.storage import protocol as storage
from megalite.checkpoint.storage.file_system import LocalStorage
from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.parallel.launch import Ranks
from megalite.parallel.local_ranks import start_local
from megalite.parallel.mesh import Mesh

ALONE = Mesh.alone()
FLAGS = [*SMALL, "--train-iters", "6", "--save-interval", "2", "--hidden-dropout", "0.1"]
PART = ".iter_0000004.part"


@dataclass(frozen=True)
class Fault:
    """What happens to `victim` in the save of step 4, just before (or `after`) it writes the file `at`."""

    background: bool
    victim: int
    kind: str  # "kill" or "full"
    at: str
    after: bool = False


FAULTS = {
    "killed with its file written": Fault(False, 1, "kill", "rank-00001.json", after=True),
    "killed in the background with its file written": Fault(True, 1, "kill", "rank-00001.json"),
    "rank 0 killed before the commit": Fault(False, 0, "kill", "COMPLETE"),
    "rank 0 killed in the background before the commit": Fault(True, 0, "kill", "COMPLETE"),
    "a full disk": Fault(False, 1, "full", "rank-00001.safetensors"),
    "a full disk in the background": Fault(True, 1, "full", "rank-00001.safetensors"),
}


def _install(fault: Fault, base: Path) -> None:
    put, create = LocalStorage.put, LocalStorage.create

    def strike() -> None:
        (base / "struck").write_text(str(time.time()))
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    def here(path: Path, after: bool) -> bool:
        return (path.parent.name, path.name, after) == (PART, fault.at, fault.after)

    def faulty_put(self: Any, path: Path, *args: Any, **kwargs: Any) -> None:
        if here(path, False):
            strike()
        put(self, path, *args, **kwargs)
        if here(path, True):
            strike()

    def faulty_create(self: Any, path: Path) -> Any:
        if here(path, False):
            strike()
        return create(self, path)

    LocalStorage.put, LocalStorage.create = faulty_put, faulty_create  # type: ignore[method-assign]


def _run(ranks: Ranks, folder: str, fault: Fault | None, background: bool) -> None:
    """The program on one rank; what it prints and how it ends goes into files beside the checkpoints."""
    from train_cases import pretrain

    base = Path(folder).parent
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.stdout = sys.stderr = open(base / f"rank-{ranks.rank}.txt", "w", buffering=1)  # noqa: SIM115
    real = os._exit

    def leave(code: int) -> None:
        (base / f"end-{ranks.rank}.json").write_text(json.dumps([code, time.time()]))
        real(code)

    os._exit = leave  # type: ignore[assignment]
    if fault is not None and fault.victim == ranks.rank:
        _install(fault, base)
    flags = [*FLAGS, "--save", folder, "--load", folder, "--async-save" if background else "--no-async-save"]
    sys.exit(pretrain(cli.parse(flags, PRESETS), ranks))


def program(folder: Path, fault: Fault | None = None, background: bool = False) -> int:
    folder.parent.mkdir(exist_ok=True)
    return start_local(2, _run, (str(folder), fault, background), threads=1, grace_s=30, timeout_s=80)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> manifests.Manifest:
    """The last checkpoint of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert program(folder) == 0, (folder.parent / "rank-0.txt").read_text()
    return manifests.load(folder / "iter_0000006")


@pytest.mark.parametrize("name", rarely([*FAULTS], [*FAULTS][:2], str, guards=("megalite/checkpoint/run",)))
def test_nothing_is_committed_and_the_run_goes_on(name: str, tmp_path: Path, unbroken: manifests.Manifest) -> None:
    fault, folder = FAULTS[name], tmp_path / "run"
    code = program(folder, fault, fault.background)
    struck, said = float((tmp_path / "struck").read_text()), (tmp_path / f"rank-{1 - fault.victim}.txt").read_text()
    ended, at = json.loads((tmp_path / f"end-{1 - fault.victim}.json").read_text())
    log = folder / "ranks" / f"rank-{1 - fault.victim:05d}.log"
    said += log.read_text() if log.is_file() else ""  # where ranks but the first to fail tell it
    assert ended == 1 and at - struck < 25, said  # by itself, not by the launcher, who waits for 30 s
    if fault.kind == "kill":
        assert code == 128 + signal.SIGKILL and f"rank {1 - fault.victim}" in said and "step" in said
        assert "onnection" in said, said  # the reason, of the other side
    else:
        victim = (tmp_path / "rank-1.txt").read_text()
        assert code == 1 and "rank 1" in victim and "File too large" in victim and "Traceback" not in victim + said
        assert "rank 1" in json.loads((folder / "status.json").read_text())["reason"]
        assert not list(folder.glob(".iter_*"))
    assert storage.steps_in(folder) == [2]
    found = loads.newest(folder, ALONE)
    assert found is not None and found[1].state["progress"]["step"] == 2
    if fault.victim == 0 and fault.background:
        return  # the disk is as after the fault before this one
    assert program(folder, None, fault.background) == 0, (tmp_path / "rank-0.txt").read_text()
    last = manifests.load(folder / "iter_0000006")
    assert last.files == unbroken.files  # the hashes of weights, moments and all else
    assert {**last.state, "config": ""} == {**unbroken.state, "config": ""}
    assert not list(folder.glob(".iter_*"))
