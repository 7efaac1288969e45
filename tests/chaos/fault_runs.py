"""`drill`: a whole run on ranks of the fork server (half a second to start), with a fault on demand, and how it ended."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_cases import SMALL

from megalite.common import fault_injection as faults
from megalite.config import cli
from megalite.launch import local_launcher as local_ranks
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.training.job.restarts import RestartPolicy
from megalite.training.job.stop_signals import StopSignalHandler

FLAGS = [word for word in SMALL if word != "--mock-data"]
FLAGS += "--device cpu --hidden-dropout 0.1 --lr-decay-style constant".split()
Before = Callable[[Path, int], None]


@dataclass(frozen=True)
class End:
    """`code`: the launcher's. `within_s`: from the fault to the end of the last rank. `told`: by the launcher. `said`: by
    each rank, also where only its own log has it. `ends`: exit code of each rank that left by itself."""

    code: int
    within_s: float
    told: list[str]
    said: list[str]
    ends: dict[int, int]
    status: dict[str, Any]


def _rank(ranks: RankInfo, base: str, flags: Sequence[str], fault: str, before: Before | None) -> int:
    from train_cases import pretrain

    folder = Path(base)
    sys.stdout = sys.stderr = open(folder / f"rank-{ranks.rank}.txt", "w", buffering=1)  # noqa: SIM115
    real_exit, real_strike = os._exit, faults._inject

    def leave(code: int) -> None:
        (folder / f"end-{ranks.rank}").write_text(str(code))
        real_exit(code)

    def strike(*args: Any) -> None:
        (folder / "struck").write_text(str(time.time()))
        real_strike(*args)

    os._exit, faults._inject = leave, strike  # type: ignore[assignment]
    faults.inject_fault.__init__({faults.FAULT_VARIABLE: fault})  # type: ignore[misc]  # the fork server's environment is an older one
    if before is not None:
        before(folder, ranks.rank)
    stop = StopSignalHandler()
    stop.install()
    code = pretrain(cli.parse_config_or_exit([*FLAGS, *flags], PRESETS).config, ranks, stop=stop)
    (folder / f"end-{ranks.rank}").write_text(str(int(code)))
    return int(code)


def said(base: Path, rank: int) -> str:
    log = base / f"run/ranks/rank-{rank:05d}.log"
    return (base / f"rank-{rank}.txt").read_text() + (log.read_text() if log.exists() else "")


def drill(base: Path, world: int, flags: Sequence[str], fault: str = "", before: Before | None = None) -> End:
    """Run in `base`/run until it ends. `before`: called on each rank with `base` and the rank; of a module."""
    base.mkdir(parents=True, exist_ok=True)
    for left in (*base.glob("end-*"), *base.glob("struck")):
        left.unlink()
    told, folder = list[str](), base / "run"
    data = [] if "--data-path" in flags else ["--mock-data"]
    flags = ["--save", str(folder), "--load", str(folder), *data, *flags]
    args, restarts = (
        (str(base), flags, fault, before),
        RestartPolicy(cli.parse_config_or_exit([*FLAGS, *flags], PRESETS).config),
    )

    def ended(end: local_ranks.LaunchResult) -> bool | None:
        told.append(end.cause)
        return restarts(end)

    code = local_ranks.launch_local(world, _rank, args, threads=1, grace_s=20, timeout_s=90, on_exit=ended)
    over, struck = time.time(), base / "struck"
    status = folder / "status.json"
    return End(
        code=code,
        within_s=over - float(struck.read_text()) if struck.exists() else 0.0,
        told=told,
        said=[said(base, rank) for rank in range(world)],
        ends={int(p.name[4:]): int(p.read_text()) for p in base.glob("end-*")},
        status=json.loads(status.read_text()) if status.exists() else {},
    )
