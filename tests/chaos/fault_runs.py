"""`drill` runs a job on ranks of the fork server (half a second to start), with a fault on demand."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_cases import SMALL_RUN

from megalite.common import fault_injection as faults
from megalite.config import cli
from megalite.launch import local_launcher as local_ranks
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.training.job.restarts import RestartPolicy
from megalite.training.job.stop_signals import StopSignalHandler

FLAGS = [word for word in SMALL_RUN if word != "--mock-data"]
FLAGS += "--device cpu --hidden-dropout 0.1 --lr-decay-style constant".split()
Before = Callable[[Path, int], None]


@dataclass(frozen=True)
class End:
    """The end of a run.

    Attributes:
        code: exit code of the launcher.
        within_s: seconds from the fault to the end of the last rank.
        causes: the cause of each end of the ranks, as the launcher reports it.
        outputs: the output of each rank, with its own log.
        exit_codes: of the ranks that exited by themselves.
        status: status.json.
    """

    code: int
    within_s: float
    causes: list[str]
    outputs: list[str]
    exit_codes: dict[int, int]
    status: dict[str, Any]


def _rank(ranks: RankInfo, base: str, flags: Sequence[str], fault: str, before: Before | None) -> int:
    from train_cases import pretrain

    base_dir = Path(base)
    sys.stdout = sys.stderr = open(base_dir / f"rank-{ranks.rank}.txt", "w", buffering=1)  # noqa: SIM115
    real_exit, real_inject = os._exit, faults._inject

    def record_exit(code: int) -> None:
        (base_dir / f"end-{ranks.rank}").write_text(str(code))
        real_exit(code)

    def record_and_inject(*args: Any) -> None:
        (base_dir / "struck").write_text(str(time.time()))
        real_inject(*args)

    os._exit, faults._inject = record_exit, record_and_inject  # type: ignore[assignment]
    faults.inject_fault.__init__({faults.FAULT_VARIABLE: fault})  # type: ignore[misc]  # the fork server has an older environment
    if before is not None:
        before(base_dir, ranks.rank)
    stop = StopSignalHandler()
    stop.install()
    code = pretrain(cli.parse_config_or_exit([*FLAGS, *flags], PRESETS).config, ranks, signals=stop)
    (base_dir / f"end-{ranks.rank}").write_text(str(int(code)))
    return int(code)


def output_of(base: Path, rank: int) -> str:
    log = base / f"run/ranks/rank-{rank:05d}.log"
    return (base / f"rank-{rank}.txt").read_text() + (log.read_text() if log.exists() else "")


def drill(base: Path, world: int, flags: Sequence[str], fault: str = "", before: Before | None = None) -> End:
    """Run in `base`/run until the end. `before`, a function of a module, is called on each rank with `base` and the rank."""
    base.mkdir(parents=True, exist_ok=True)
    for leftover in (*base.glob("end-*"), *base.glob("struck")):
        leftover.unlink()
    causes, run_dir = list[str](), base / "run"
    data = [] if "--data-path" in flags else ["--mock-data"]
    flags = ["--save", str(run_dir), "--load", str(run_dir), *data, *flags]
    args, policy = (
        (str(base), flags, fault, before),
        RestartPolicy(cli.parse_config_or_exit([*FLAGS, *flags], PRESETS).config),
    )

    def on_exit(end: local_ranks.LaunchResult) -> bool | None:
        causes.append(end.cause)
        return policy(end)

    code = local_ranks.launch_local(world, _rank, args, threads=1, grace_s=20, timeout_s=90, on_exit=on_exit)
    end_s, fault_file = time.time(), base / "struck"
    status = run_dir / "status.json"
    return End(
        code=code,
        within_s=end_s - float(fault_file.read_text()) if fault_file.exists() else 0.0,
        causes=causes,
        outputs=[output_of(base, rank) for rank in range(world)],
        exit_codes={int(p.name[4:]): int(p.read_text()) for p in base.glob("end-*")},
        status=json.loads(status.read_text()) if status.exists() else {},
    )
