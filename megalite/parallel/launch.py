"""From a command to a process group: the only reader of rank variables.

Four ways in: torchrun's variables (RANK, WORLD_SIZE, ...), mpirun's (MPI_LAUNCHERS), SLURM's (SLURM_PROCID, ...), or
`start_local`, which starts ranks on this machine itself, from a fork server that has imported torch once (0.2 s for 8
ranks, where 8 interpreters take 11 s on 2 cores). Local ranks meet through a file and gloo's loopback device: no port
is opened that another machine could reach.

A rank that dies takes the others with it: the launcher ends them and returns the first failing exit code. A rank whose
launcher is killed ends itself; the kernel alone would not (PR_SET_PDEATHSIG is about the fork server, which lives as
long as a rank does).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from megalite.config.run_options import EXIT_SIGNALS
from megalite.parallel.meeting import MeetingError, meet, torchrun_lacks

INTERRUPTED = 128 + signal.SIGINT
FORWARDED = tuple(signal.Signals[name] for name in EXIT_SIGNALS)
REQUEUE = 75  # exit code of a run that stopped on purpose, its checkpoint complete (train/run_dir.py)
ORDERLY_S = 600.0
STARTERS = "torchrun, srun, mpirun or --nproc"
# what the fork server imports for all ranks: the third, with sympy, is needed by the first backward (1 s of each rank)
PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "megalite.train.run"]


class LaunchError(Exception):
    """The environment does not describe a process group; the text says what to set. `local_rank`: who is to tell it."""

    def __init__(self, text: str, local_rank: int = 0):
        super().__init__(text)
        self.local_rank = local_rank


@dataclass(frozen=True)
class Ranks:
    """Who this process is. `init_method` None: the address is in MASTER_ADDR and MASTER_PORT."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    init_method: str | None = None


# rank, world, local rank, local world: of Open MPI, of MVAPICH, of Hydra (MPICH, Intel MPI) and what else speaks PMI
MPI_LAUNCHERS: tuple[tuple[str, str, str, str], ...] = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def read_environment(env: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks that torchrun, mpirun or SLURM announce in `env`; None where no launcher did."""
    if "RANK" in env or "WORLD_SIZE" in env:
        return _checked(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", init_method=None)
    slurm = "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and _number(env, "SLURM_NTASKS", "1") > 1
    for names in MPI_LAUNCHERS:
        # mpirun in a SLURM job has SLURM start its daemons, whose variables the ranks inherit: those count the daemons.
        # Only where srun speaks PMI itself do both say the same, and then SLURM knows the first host.
        same = slurm and names[0] == "PMI_RANK" and _pair(env, *names[:2]) == _pair(env, "SLURM_PROCID", "SLURM_NTASKS")
        if _number(env, names[1], "1") > 1 and not same:
            return _checked(env, *names, init_method=_meeting_of_mpi(env, names[1], names[3]))
    if slurm:
        host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
        port = env.get("MASTER_PORT") or str(20000 + _number(env, "SLURM_JOB_ID", "0") % 20000)
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        tasks = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_STEP_TASKS_PER_NODE", "1")  # "4(x2),3"
        env = {**env, "SLURM_NTASKS_PER_NODE": re.split(r"[(,]", tasks)[0]}
        return _checked(env, *names, init_method=f"tcp://{host}:{port}")
    return None


def _pair(env: Mapping[str, str], *names: str) -> list[str | None]:
    return [env.get(name) for name in names]


def _meeting_of_mpi(env: Mapping[str, str], world: str, local_world: str) -> str:
    """Where ranks of mpirun meet: MPI itself tells them no address."""
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if env.get(local_world) == env[world] else None)
    if host is None:
        raise LaunchError(
            f"MASTER_ADDR is not set and {world}={env[world]} ranks are on several nodes ({local_world}="
            f"{env.get(local_world)}): give every rank the host of rank 0, as mpirun -x MASTER_ADDR=HOST does"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")  # another job on this machine has another
    return f"tcp://{host}:{env.get('MASTER_PORT') or (20000 + zlib.crc32(job.encode()) % 20000 if job else 29500)}"


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name, default)
    if not re.fullmatch(r"[0-9]+", text):
        raise LaunchError(f"{name}={text!r} is not a whole number: start with {STARTERS}")
    return int(text)


def _checked(
    env: Mapping[str, str], rank: str, world: str, local_rank: str, local_world: str, init_method: str | None
) -> Ranks:
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
    return ranks


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,a2")
    ('gpu007', 'a1')
    """
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\](\S*?))?(?:,|$)", nodelist)
    if not match:
        raise LaunchError(f"SLURM_NODELIST={nodelist!r} names no host: set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")


CUDA_VARIABLES: tuple[str, ...] = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
)
# what a user may call them as well: torch prefers ours
OTHER_NAMES = {
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


def cuda_environment(tp: int, folder: Path, capability: int | None) -> dict[str, str]:
    """Variables that torch, CUDA and NCCL read when they are loaded, so before torch is imported.

    One hardware queue keeps the order in which kernels were launched, so that a tensor-parallel collective starts
    before the matmul that it hides behind; devices from Blackwell on (`capability` 10) do not need it. The flight
    recorder keeps the last collectives of a group and writes them into `folder` when one times out.
    """
    values = ("1", "expandable_segments:True", "2000", "1", str(folder / "nccl_trace_rank_"))
    wanted = dict(zip(CUDA_VARIABLES, values, strict=True))
    if tp == 1 or (capability or 0) >= 10:
        del wanted["CUDA_DEVICE_MAX_CONNECTIONS"]
    return wanted


def prepare_cuda(tp: int, folder: Path, deterministic: bool = False) -> None:
    """Set `cuda_environment` where there is a card; what the user has set stays."""
    if deterministic:  # without it torch refuses every matmul on a card, which a container has without the tool as well
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    words = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    found = [int(line.partition(".")[0]) for line in answer.split() if re.match(r"[0-9]+\.", line)]
    for name, value in cuda_environment(tp, folder, min(found, default=None)).items():
        if OTHER_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


def card_of(ranks: Ranks) -> Any:
    """The torch.device of this rank's card. LaunchError, for the first rank without one to tell: those that have one
    wait for it and know nothing."""
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
    """Choose this rank's device, join the group (when there are other ranks) and leave it on every way out.

    device   "cpu" or "cuda"; with "cuda" the local rank picks the card
    backend  None: nccl on CUDA, gloo elsewhere
    Yields the torch.device. `startup_timeout` covers the rendezvous and all that happens before `Mesh.set_timeout`.
    """
    import torch
    import torch.distributed as dist

    if device == "cuda":
        here = card_of(ranks)
        torch.cuda.set_device(here)
    else:
        here = torch.device(device)
    if ranks.world == 1:
        yield here
        return
    name = backend or ("nccl" if device == "cuda" else "gloo")
    try:
        url = ranks.init_method or f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        nodes = -(-ranks.world // ranks.local_world)
        store = meet(ranks.rank, ranks.world, url, os.environ, startup_timeout, nodes=nodes, gloo=name == "gloo")
        dist.init_process_group(name, store=store, rank=ranks.rank, world_size=ranks.world, timeout=startup_timeout)
    except MeetingError as error:
        raise LaunchError(str(error)) from error
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {ranks.rank} of {ranks.world} cannot exchange data with all others ({error}): do all nodes reach "
            "each other's addresses, at every port? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME name the interface to use"
        ) from error
    try:
        yield here
    finally:
        dist.destroy_process_group()


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_local(
    nproc: int,
    target: Callable[..., None],
    args: tuple[Any, ...] = (),
    *,
    threads: int | None = None,
    grace_s: float = 1.5,
    timeout_s: float | None = None,
    holds_signals: bool = False,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Run `target(ranks, *args)` in `nproc` local processes; return 0, or the first failing exit code.

    `target` must be importable (a module-level function). FORWARDED signals are passed on to every rank; the fork
    server never gets any, as ranks die with it. `holds_signals`: they wait until `target` lets them in.
    When one rank fails the others get `grace_s` seconds to notice by themselves, then SIGKILL; after an orderly stop
    (75) they get ORDERLY_S, since rank 0 may still be closing its logs. `tell` hears of the first that fails.
    `threads`: CPU threads per rank; default: the cores divided by the ranks, unless OMP_NUM_THREADS is set.
    """
    wanted = re.match(r"[1-9][0-9]*", os.environ.get("OMP_NUM_THREADS", ""))  # OpenMP allows a list, "4,2", too
    os.environ["OMP_NUM_THREADS"] = wanted[0] if wanted else str(threads or max(1, cores() // nproc))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        processes: list[Any] = []
        with _forward_signals(processes) as seen:
            resource_tracker.ensure_running()  # it unblocks signals; the processes below find it there
            for rank in range(nproc):
                ranks = Ranks(rank, nproc, rank, nproc, f"file://{folder}/rendezvous")
                told = (ranks, target, args, holds_signals)
                process = context.Process(target=_local_rank, args=told, name=f"rank {rank}")
                with _held():  # the fork server inherits that, and whom it forks
                    process.start()
                processes.append(process)
                for number in seen:
                    _signal(process, number)
            return _watch(processes, grace_s, timeout_s, tell or (lambda text: None))


def _watch(processes: list[Any], grace_s: float, timeout_s: float | None, tell: Callable[[str], None]) -> int:
    failed, deadline = 0, None if timeout_s is None else time.monotonic() + timeout_s
    alive = list(processes)
    while alive:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = connection.wait([p.sentinel for p in alive], wait)
        if not ended:
            for process in alive:
                process.kill()
            failed = failed or 124
        for process in [p for p in alive if p.sentinel in ended]:
            process.join()
            code = process.exitcode
            if code and not failed:
                failed = code if code > 0 else 128 - code
                died = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                tell(f"{process.name} ended {died}")
                if code not in (2, 3, REQUEUE, INTERRUPTED):  # these have said what they had to say
                    with contextlib.suppress(OSError, ValueError):  # its disk may be full, and why they died
                        print(f"{process.name} ended {died}; ending the others", file=sys.stderr, flush=True)
                deadline = time.monotonic() + (ORDERLY_S if code == REQUEUE else grace_s)
        alive = [p for p in alive if p.is_alive()]
    return failed


@contextlib.contextmanager
def _held() -> Iterator[None]:
    """Signals to this thread wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal(process: Any, number: int) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


@contextlib.contextmanager
def _forward_signals(processes: list[Any]) -> Iterator[list[int]]:
    """To those of `processes` that live when a signal comes. Yields the signals so far: for those that come later."""
    seen: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        seen.append(number)
        for process in processes:
            _signal(process, number)

    if threading.current_thread() is not threading.main_thread():  # the caller has the signals
        yield seen
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = {n: signal.signal(n, forward) for n in FORWARDED if signal.getsignal(n) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        yield seen
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_launcher() -> None:
    """Wait for the end of a pipe that only the launcher holds open."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent() -> None:
    """PR_SET_PDEATHSIG, where there is such a thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def follow_torchrun(env: Mapping[str, str] = os.environ) -> list[str]:
    """A rank ends with its torchrun: that, killed, cannot end it. Returns what torchrun was not told."""
    if "TORCHELASTIC_RUN_ID" not in env:
        return []
    die_with_parent()
    return torchrun_lacks(env)


def torchrun_restarts(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun starts a run again that ends with any code but 0, as 75 of a run that stopped on purpose."""
    return env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _local_rank(ranks: Ranks, target: Callable[..., None], args: tuple[Any, ...], holds_signals: bool) -> None:
    die_with_parent()  # the fork server
    if not holds_signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    threading.Thread(target=_end_with_launcher, name="megalite-launcher", daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        target(ranks, *args)
    except KeyboardInterrupt:  # during start-up; later the run says what it did
        os._exit(INTERRUPTED)
