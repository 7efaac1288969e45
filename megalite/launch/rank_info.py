"""The rank of this process; the only reader of rank variables.

Ranks are announced by the variables of torchrun (RANK, ...), mpirun (launcher_variables.toml) or SLURM (SLURM_PROCID,
...), or started by local_launcher.py.

All launchers are read by one rule. Each has a variable for the rank and one for the number of ranks. One without the
other is an error; an empty variable is not set. The innermost launcher counts: torchrun, mpirun, SLURM. A launcher that
has started a single process leaves the number of ranks to --nproc (except torchrun, which has its own restarts). With
any other launcher, --nproc must be the same number.

It is unknown whether a variable was left by an earlier program. Messages of a rank that waits for others therefore name
the variables, and say that they must be unset for a single process.
"""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from megalite.common.tables import load_table
from megalite.common.text_file import read_small_text

LAUNCHERS = "torchrun, srun, mpirun or --nproc"
VARIABLES = load_table(__file__, "launcher_variables")
# step numbers from here on are a job's script or shell (slurm.h), which is one process
FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# files in `RankInfo.shared_dir`
# written by the first rank that fails on this machine (training/logging/rank_log.py)
FIRST_FAILURE = "first-failure.json"
WAITS = "waits"  # exists once a rank has reported that rank 0 is missing
FAILURE_PRINTED = "said"  # exists once the first failure is on the console
# a hang that was reported and has not passed, in case a rank aborts before any rank fails because of it
HANG_REPORT = "hang.json"


@dataclass(frozen=True)
class Failure:
    """The end of a rank that failed: its exit code, and the cause with its number."""

    code: int
    cause: str


def read_first_failure(shared_dir: Path, name: str = FIRST_FAILURE) -> Failure | None:
    """Return the failure that the rank wrote, or None."""
    try:
        first = json.loads(read_small_text(shared_dir / name, "what the rank wrote"))
        return Failure(int(first["code"]), f"rank {first['rank']}: {first['reason']}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


class LaunchError(Exception):
    """The environment does not describe a process group. The text says what to set.

    `local_rank` is the rank of this machine that reports it; None: the first one that fails.
    """

    def __init__(self, text: str, local_rank: int | None = 0):
        super().__init__(text)
        self.local_rank = local_rank


class RankVariables(NamedTuple):
    """The variables in which a launcher passes the rank, the number of ranks, and both on the machine."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


TORCH = RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = [RankVariables(*names) for names in VARIABLES["mpi"]]
SLURM = RankVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process.

    init_method   URL of the rendezvous; None: MASTER_ADDR and MASTER_PORT have the address
    is_restart    the run was restarted after a rank had died
    shared_dir    directory of the ranks that were started together on this machine
    variables     names of the variables that announce other ranks
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str | None = None
    is_restart: bool = False
    shared_dir: str | None = None
    variables: Sequence[str] = field(default=(), compare=False)

    @property
    def variable_values(self) -> str:
        """The variables and their values."""
        rank, world = self.variables
        return f"{rank}={self.rank} of {world}={self.world_size}"

    @property
    def unset_remedy(self) -> str:
        """The remedy for variables of an earlier program; "" if none announces other ranks."""
        return f"{' and '.join(self.variables)} are set: unset them for a single process" if self.variables else ""


def read_environment(env: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return the rank that torchrun, mpirun or SLURM announce in `env`. Raises LaunchError.

    Returns None if there is no launcher, or if one other than torchrun has started a single process.
    """
    env = {name: value for name, value in env.items() if value}
    inner = _read_rank(env, TORCH)
    if inner is None:
        return _read_mpi_or_slurm(env)
    if under_torchrun(env):
        error_file = env.get("TORCHELASTIC_ERROR_FILE")  # .../attempt_1/LOCAL_RANK/error.json
        is_restart = env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        inner = replace(inner, is_restart=is_restart, shared_dir=error_file and str(Path(error_file).parents[1]))
    elif (outer := _read_outer(env)) is not None and outer.world_size > inner.world_size:
        rule = f"{inner.variable_values}, but {outer.variable_values}"
        raise LaunchError(f"{rule}: unset RANK and WORLD_SIZE if they are left over from another run")
    elif inner.world_size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT") if inner.world_size > 1 else ():
        if name not in env:
            text = f"{name} is not set although WORLD_SIZE={inner.world_size}: start with torchrun, or set it"
            raise LaunchError(f"{text}; {inner.unset_remedy}")
    return inner


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if torchrun has started this process; RANK alone or TORCHELASTIC_RUN_ID alone may be left over."""
    return "TORCHELASTIC_RUN_ID" in env and "RANK" in env


def nproc_error(ranks: RankInfo | None, nproc: int | None) -> str | None:
    """Return the error of an --nproc that differs from the number of ranks that a launcher has started, or None."""
    if ranks is None or nproc is None or nproc == ranks.world_size:
        return None
    rule = f"nproc={nproc}, but {ranks.variables[1]}={ranks.world_size} processes were started by a launcher"
    return f"{rule}: leave out nproc, or unset {' and '.join(ranks.variables)} if there is no launcher"


def _read_mpi_or_slurm(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank by the innermost of these launchers that has started several processes. Raises LaunchError."""
    for names in MPI:
        by_mpi = _read_rank(env, names)
        if by_mpi is not None and by_mpi.world_size > 1:
            break
    else:
        by_slurm = _read_slurm(env)
        return by_slurm and replace(by_slurm, init_method=_slurm_init_method(env))
    # In a SLURM job mpirun has SLURM start its daemons, and the ranks inherit SLURM's variables, which then count the
    # daemons. Both agree only where srun provides PMI itself, and then SLURM knows the first host.
    if names.rank == "PMI_RANK":
        with contextlib.suppress(LaunchError):
            by_slurm = _read_slurm(env)
            if by_slurm and (by_slurm.rank, by_slurm.world_size) == (by_mpi.rank, by_mpi.world_size):
                return replace(by_slurm, init_method=_slurm_init_method(env))
    return replace(by_mpi, init_method=_mpi_init_method(env, names, by_mpi))


def _read_outer(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank by a launcher around the innermost one, or None; incomplete variables are no error then."""
    try:
        return _read_mpi_or_slurm(env)
    except LaunchError:
        return None


def _read_slurm(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process as a task of a SLURM step.

    A job's script and its shell (salloc) are one process. They have variables of the whole job, among them
    SLURM_NTASKS, the number of tasks that its steps may have.
    """
    if "SLURM_STEP_ID" not in env or _parse_int(env, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return None
    world = "SLURM_NTASKS" if "SLURM_NTASKS" in env and SLURM.world_size not in env else SLURM.world_size
    step_env = {name: value for name, value in env.items() if name != SLURM.local_world_size}
    ranks = _read_rank(step_env, SLURM._replace(world_size=world))
    if ranks is None or ranks.world_size == 1:
        return None
    tasks = env.get(SLURM.local_world_size) or env.get("SLURM_NTASKS_PER_NODE", "1")  # the step's, else the job's
    local_world = _tasks_of_node(tasks, int(env["SLURM_NODEID"]) if env.get("SLURM_NODEID", "").isdecimal() else 0)
    return replace(ranks, local_world_size=max(min(local_world, ranks.world_size), ranks.local_rank + 1))


def _tasks_of_node(text: str, node: int) -> int:
    """Return the number of tasks of a node from the text that lists those of all nodes.

    >>> _tasks_of_node("4(x2),3", 1), _tasks_of_node("4(x2),3", 2)
    (4, 3)
    """
    counts = [(int(count), int(times or 1)) for count, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text)]
    for count, times in counts:
        node -= times
        if node < 0:
            return count
    return counts[0][0] if counts else 1


def _mpi_init_method(env: Mapping[str, str], names: RankVariables, ranks: RankInfo) -> str:
    """Return the address of the rendezvous, which MPI itself does not provide. Raises LaunchError."""
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if env.get(names.local_world_size) == env[names.world_size] else None)
    if host is None:
        raise LaunchError(
            f"MASTER_ADDR is not set and {names.world_size}={ranks.world_size} ranks are on several nodes "
            f"({names.local_world_size}={env.get(names.local_world_size)}): give every rank the host of rank 0, as "
            f"mpirun -x MASTER_ADDR=HOST does; {ranks.unset_remedy}"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")  # differs between jobs on one machine
    return f"tcp://{host}:{env.get('MASTER_PORT') or (20000 + zlib.crc32(job.encode()) % 20000 if job else 29500)}"


def _slurm_init_method(env: Mapping[str, str]) -> str:
    """Return the address of the rendezvous: the first host of the step, and a port by the job's number."""
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    return f"tcp://{host}:{env.get('MASTER_PORT') or 20000 + _parse_int(env, 'SLURM_JOB_ID', '0') % 20000}"


def _parse_int(env: Mapping[str, str], name: str, default: str = "") -> int:
    """Return a variable as an integer. Raises LaunchError."""
    text = env.get(name, default)
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise LaunchError(f"{name}={text!r} is not a whole number: start with {LAUNCHERS}")
    return int(text)


def _read_rank(env: Mapping[str, str], names: RankVariables) -> RankInfo | None:
    """Return the rank by the variables of one launcher. Raises LaunchError.

    Returns None if neither the rank nor the number of ranks is set.
    """
    rank, world, local_rank, local_world = names
    if rank not in env and world not in env:
        return None
    for name, other in ((rank, world), (world, rank)):
        if name not in env:
            raise LaunchError(f"{name} is not set although {other} is: start with {LAUNCHERS}, or unset {other}")
    ranks = RankInfo(
        rank=_parse_int(env, rank),
        world_size=_parse_int(env, world),
        local_rank=_parse_int(env, local_rank, env[rank]),
        local_world_size=_parse_int(env, local_world, "1"),
        variables=(rank, world),
    )
    if ranks.rank >= ranks.world_size:
        raise LaunchError(f"{rank}={ranks.rank} is not below {world}={ranks.world_size}: start with {LAUNCHERS}")
    if local_rank in env and local_world in env and ranks.local_rank >= ranks.local_world_size:
        rule = f"{local_rank}={ranks.local_rank} is not below {local_world}={ranks.local_world_size}"
        raise LaunchError(f"{rule}: start with {LAUNCHERS}")
    if not 1 <= ranks.local_world_size <= ranks.world_size:
        rule = f"more than {world}={ranks.world_size}" if ranks.local_world_size else "not a number of ranks"
        raise LaunchError(f"{local_world}={ranks.local_world_size} is {rule}: start with {LAUNCHERS}")
    port = env.get("MASTER_PORT", "1")
    if ranks.world_size > 1 and not (re.fullmatch("[0-9]{1,9}", port) and 0 < int(port) < 1 << 16):
        raise LaunchError(f"MASTER_PORT={port!r} is not a port: set a number from 1 to 65535, the same on all ranks")
    return ranks


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list. Raises LaunchError.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,a2")
    ('gpu007', 'a1')
    """
    if not (match := re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\](\S*?))?(?:,|$)", nodelist)):
        raise LaunchError(f"SLURM_NODELIST={nodelist!r} names no host: set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")
