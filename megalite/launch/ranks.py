"""From a command to a process group: the only reader of rank variables.

Four ways in: variables of torchrun (RANK, ...), mpirun (ranks.toml) or SLURM (SLURM_PROCID, ...), or local_ranks.py.
"""

import atexit
import contextlib
import ctypes
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.console import complain, let_go_of_console
from megalite.config.exits import end_at_once, exit_code, report, wait_for_children
from megalite.config.tables import table_beside
from megalite.launch.meeting import AGENT_STORE, MeetingError, meet

STARTERS = "torchrun, srun, mpirun or --nproc"
VARIABLES = table_beside(__file__, "ranks")
CUDA_VARIABLES: dict[str, str] = {name: facts["other"] for name, facts in VARIABLES["cuda"].items()}
# files in `Ranks.shared`
FIRST_FAILURE = "first-failure.json"  # written by the first rank that fails on this machine (train/tell/rank_log.py)
SAID = "said"  # exists once that failure is on the console
HANG = "hang.json"  # a hang that was reported and has not passed, in case a rank aborts before any rank fails by it


def read_first_failure(shared: Path, name: str = FIRST_FAILURE) -> tuple[int, str] | None:
    """The exit code and the cause that the rank wrote, if any."""
    try:
        first = json.loads((shared / name).read_text("utf-8"))
        return int(first["code"]), f"rank {first['rank']}: {first['reason']}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


class LaunchError(Exception):
    """The environment does not describe a process group; the text says what to set. `local_rank`: the rank of this
    machine that reports it; None: the first one that fails."""

    def __init__(self, text: str, local_rank: int | None = 0):
        super().__init__(text)
        self.local_rank = local_rank


@dataclass(frozen=True)
class Ranks:
    """The identity of this process. `init_method` None: the address is in MASTER_ADDR and MASTER_PORT. `resumes`: the
    run was restarted after a rank had died. `shared`: a folder of the ranks that were started together here."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    init_method: str | None = None
    resumes: bool = False
    shared: str | None = None


def read_environment(env: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks that torchrun, mpirun or SLURM announce in `env`; None if no launcher did."""
    if "RANK" in env or "WORLD_SIZE" in env:
        ranks = _checked(env, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), init_method=None)
        again = env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        own = env.get("TORCHELASTIC_ERROR_FILE")  # .../attempt_1/LOCAL_RANK/error.json
        return replace(ranks, resumes=again, shared=own and str(Path(own).parents[1]))
    slurm = "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and _number(env, "SLURM_NTASKS", "1") > 1
    slurm_place = env.get("SLURM_PROCID"), env.get("SLURM_NTASKS")
    for names in VARIABLES["mpi"]:
        # In a SLURM job mpirun has SLURM start its daemons, and the ranks inherit SLURM's variables, which then count
        # the daemons. Both agree only where srun provides PMI itself, and then SLURM knows the first host.
        same = slurm and names[0] == "PMI_RANK" and (env.get(names[0]), env.get(names[1])) == slurm_place
        if _number(env, names[1], "1") > 1 and not same:
            return _checked(env, names, init_method=_meeting_of_mpi(env, names[1], names[3]))
    if slurm:
        host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
        port = env.get("MASTER_PORT") or str(20000 + _number(env, "SLURM_JOB_ID", "0") % 20000)
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        tasks = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_STEP_TASKS_PER_NODE", "1")  # "4(x2),3"
        env = {**env, "SLURM_NTASKS_PER_NODE": re.split(r"[(,]", tasks)[0]}
        return _checked(env, names, init_method=f"tcp://{host}:{port}")
    return None


def _meeting_of_mpi(env: Mapping[str, str], world: str, local_world: str) -> str:
    """The address where ranks of mpirun meet, which MPI itself does not give them."""
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if env.get(local_world) == env[world] else None)
    if host is None:
        raise LaunchError(
            f"MASTER_ADDR is not set and {world}={env[world]} ranks are on several nodes ({local_world}="
            f"{env.get(local_world)}): give every rank the host of rank 0, as mpirun -x MASTER_ADDR=HOST does"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")  # differs between jobs on one machine
    return f"tcp://{host}:{env.get('MASTER_PORT') or (20000 + zlib.crc32(job.encode()) % 20000 if job else 29500)}"


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name, default)
    if not re.fullmatch(r"[0-9]+", text):
        raise LaunchError(f"{name}={text!r} is not a whole number: start with {STARTERS}")
    return int(text)


def _checked(env: Mapping[str, str], names: Sequence[str], init_method: str | None) -> Ranks:
    """`names`: of the variables with the rank, the world, and both of this machine. Raises LaunchError."""
    rank, world, local_rank, local_world = names
    for name, other in ((rank, world), (world, rank)):
        if name not in env:
            raise LaunchError(f"{name} is not set although {other} is: start with {STARTERS}")
    ranks = Ranks(
        rank=_number(env, rank),
        world=_number(env, world),
        local_rank=_number(env, local_rank, env[rank]),
        local_world=_number(env, local_world, "1"),
        init_method=init_method,
    )
    if ranks.world < 1 or ranks.rank >= ranks.world:
        raise LaunchError(f"{rank}={ranks.rank} is not below {world}={ranks.world}: start with {STARTERS}")
    if init_method is None and ranks.world > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise LaunchError(f"{name} is not set although {world}={ranks.world}: start with torchrun, or set it")
    port = env.get("MASTER_PORT") or "1"
    if ranks.world > 1 and not (re.fullmatch("[0-9]{1,9}", port) and 0 < int(port) < 1 << 16):
        raise LaunchError(f"MASTER_PORT={port!r} is not a port: set a number from 1 to 65535, the same on all ranks")
    return ranks


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,a2")
    ('gpu007', 'a1')
    """
    if not (match := re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\](\S*?))?(?:,|$)", nodelist)):
        raise LaunchError(f"SLURM_NODELIST={nodelist!r} names no host: set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")


def cuda_environment(tp: int, folder: Path, capability: int | None) -> dict[str, str]:
    """The variables of ranks.toml. Devices from Blackwell on (`capability` 10) do not need one queue."""
    wanted = {name: facts["value"].replace("FOLDER", str(folder)) for name, facts in VARIABLES["cuda"].items()}
    if tp == 1 or (capability or 0) >= 10:
        del wanted["CUDA_DEVICE_MAX_CONNECTIONS"]
    return wanted


def prepare_cuda(tp: int, folder: Path, deterministic: bool = False) -> None:
    """Set `cuda_environment` if there is a card, except what the user has set."""
    if deterministic:  # or torch refuses every matmul on a card, and a container may have a card without nvidia-smi
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if (tool := shutil.which("nvidia-smi")) is None:
        return
    words = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    capabilities = [int(line.partition(".")[0]) for line in answer.split() if re.match(r"[0-9]+\.", line)]
    for name, value in cuda_environment(tp, folder, min(capabilities, default=None)).items():
        if CUDA_VARIABLES[name] not in os.environ:
            os.environ.setdefault(name, value)


def card_of(ranks: Ranks) -> Any:
    """The torch.device of this rank's card. Raises LaunchError, which the first rank without one reports."""
    import torch

    count = torch.cuda.device_count()
    if ranks.local_rank >= count:
        text = f"local rank {ranks.local_rank} has no card, {count} visible: use --nproc {count} or less"
        raise LaunchError(text + ", or let each rank see all cards of its machine", local_rank=count)
    return torch.device("cuda", ranks.local_rank)


@contextlib.contextmanager
def process_group(
    ranks: Ranks, *, device: str, backend: str | None = None, startup_timeout: datetime.timedelta
) -> Iterator[Any]:
    """Join the group if there are other ranks, yield this rank's torch.device, and leave it on every way out. `device`:
    "cpu" or "cuda", where the local rank picks the card. `backend` None: nccl on CUDA, gloo elsewhere.
    `startup_timeout` covers the rendezvous and everything until `Mesh.set_timeout`."""
    import torch
    import torch.distributed as dist

    own_device = card_of(ranks) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own_device)
    if ranks.world == 1:
        yield own_device
        return
    name = backend or ("nccl" if device == "cuda" else "gloo")
    try:
        url = ranks.init_method or f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        nodes = -(-ranks.world // ranks.local_world)
        store = meet(ranks.rank, ranks.world, url, os.environ, startup_timeout, nodes=nodes, gloo=name == "gloo")
        dist.init_process_group(name, store=store, rank=ranks.rank, world_size=ranks.world, timeout=startup_timeout)
    except MeetingError as error:
        raise LaunchError(str(error), local_rank=None) from error
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {ranks.rank} of {ranks.world} cannot exchange data with all others ({error}): can all nodes reach "
            "each other's addresses, at every port? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME name the interface to use",
            local_rank=None,
        ) from error
    try:
        yield own_device
    finally:
        dist.destroy_process_group()


def leave(run: Callable[[], int | None]) -> NoReturn:
    """End the process with the exit code of `run`, whether returned or raised as SystemExit.

    A rank of a launcher ends as multiprocessing ends a rank of --nproc: everything is flushed and closed, but the
    interpreter is not shut down: gloo's threads live until the last reference to their group is gone, maybe during the
    shutdown, where Python ends a thread that needs the interpreter, as to free a tensor, and C++ answers with SIGABRT.
    """
    wait_for_children()
    try:
        code: Any = run()
    except SystemExit as error:
        code = exit_code(error)
    with contextlib.suppress(LaunchError):
        if (ranks := read_environment()) is not None and ranks.world > 1 and isinstance(code, int | None):
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
            let_go_of_console()
            end_at_once(code or 0)
    report(code)
    sys.exit(code)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Send this process the signal `number` when its parent dies (PR_SET_PDEATHSIG); does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


def follow_torchrun() -> list[str]:
    """Let this rank end with its torchrun, which cannot end its ranks if it is killed. Returns the options that
    torchrun lacks, one line each with the consequence."""
    lines, env = list[str](), os.environ
    if "TORCHELASTIC_RUN_ID" not in env:
        return lines
    die_with_parent()
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{os.getppid()}/status").read_text("ascii", "replace")
        caught = re.search(r"SigCgt:\s*([0-9a-f]+)", state)
        if "SLURM_JOB_ID" in env and caught and not int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            lines.append(
                "torchrun dies of SIGUSR1, which SLURM may send before a time limit: start it with "
                "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
            )
    several_nodes = env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE")
    if torchrun_restarts() and several_nodes and env.get(AGENT_STORE) == "True":
        lines.append("a node that is lost cannot come back: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    return lines


def save_after_torchrun(most_s: float) -> None:
    """Send this rank SIGTERM when its torchrun ends (torchrun dies of a SIGUSR1 that it does not pass on), and kill it
    after `most_s`. For a rank that can save and no longer blocks signals."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)

    def end() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.environ.get("LOCAL_RANK") == "0":
            complain("torchrun has ended without its ranks: they save and stop")
        time.sleep(most_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, name="megalite-torchrun", daemon=True).start()


def torchrun_restarts() -> bool:
    """Whether torchrun restarts a run that ends with any code but 0, even one that stopped on purpose (75)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
