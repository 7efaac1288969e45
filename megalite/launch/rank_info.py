"""The rank of this process and its process group; the only reader of rank variables.

Ranks are announced by the variables of torchrun (RANK, ...), mpirun (launcher_variables.toml) or SLURM (SLURM_PROCID,
...), or started by local_launcher.py.

All launchers are read by one rule. Each has a variable for the rank and one for the number of ranks. One without the
other is an error; an empty variable is not set. The innermost launcher counts: torchrun, mpirun, SLURM. A launcher that
has started a single process leaves the number of ranks to --nproc (except torchrun, which has its own restarts). With
any other launcher, --nproc must be the same number.

It is unknown whether a variable was left by an earlier program. Messages of a rank that waits for others therefore name
the variables, and say that they must be unset for a single process.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megalite.common.console import discard_unwritable_output, print_err
from megalite.common.exits import end_at_once, exit_code, report, wait_for_children
from megalite.common.tables import load_table
from megalite.common.text_file import read_small_text
from megalite.launch.rendezvous import AGENT_STORE, NOTICE_S, RendezvousError, rendezvous

LAUNCHERS = "torchrun, srun, mpirun or --nproc"
VARIABLES = load_table(__file__, "launcher_variables")
CUDA_VARIABLES: dict[str, str] = {name: facts["other"] for name, facts in VARIABLES["cuda"].items()}
# step numbers from here on are a job's script or shell (slurm.h), which is one process
FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# files in `RankInfo.shared_dir`
# written by the first rank that fails on this machine (training/logging/rank_log.py)
FIRST_FAILURE = "first-failure.json"
WAITS = "waits"  # exists once a rank has reported that rank 0 is missing
FAILURE_PRINTED = "said"  # exists once the first failure is on the console
# a hang that was reported and has not passed, in case a rank aborts before any rank fails because of it
HANG_REPORT = "hang.json"


def read_first_failure(shared_dir: Path, name: str = FIRST_FAILURE) -> tuple[int, str] | None:
    """Return the exit code and cause that the rank wrote, or None."""
    try:
        first = json.loads(read_small_text(shared_dir / name, "what the rank wrote"))
        return int(first["code"]), f"rank {first['rank']}: {first['reason']}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


class LaunchError(Exception):
    """The environment does not describe a process group. The text says what to set.

    `local_rank` is the rank of this machine that reports it; None: the first one that fails.
    """

    def __init__(self, text: str, local_rank: int | None = 0):
        super().__init__(text)
        self.local_rank = local_rank


class Names(NamedTuple):
    """The variables in which a launcher passes the rank, the number of ranks, and both on the machine."""

    rank: str
    world: str
    local_rank: str
    local_world: str


TORCH = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = [Names(*names) for names in VARIABLES["mpi"]]
SLURM = Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


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
        raise LaunchError(f"{rule}: unset RANK and WORLD_SIZE if they are left from another run")
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
    rule = f"nproc={nproc}, but {ranks.variables[1]}={ranks.world_size} says how many processes were started"
    return f"{rule}: leave out nproc, or unset {' and '.join(ranks.variables)} if no launcher did"


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
    world = "SLURM_NTASKS" if "SLURM_NTASKS" in env and SLURM.world not in env else SLURM.world
    step_env = {name: value for name, value in env.items() if name != SLURM.local_world}
    ranks = _read_rank(step_env, SLURM._replace(world=world))
    if ranks is None or ranks.world_size == 1:
        return None
    tasks = env.get(SLURM.local_world) or env.get("SLURM_NTASKS_PER_NODE", "1")  # the step's, else the job's
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


def _mpi_init_method(env: Mapping[str, str], names: Names, ranks: RankInfo) -> str:
    """Return the address of the rendezvous, which MPI itself does not provide. Raises LaunchError."""
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if env.get(names.local_world) == env[names.world] else None)
    if host is None:
        raise LaunchError(
            f"MASTER_ADDR is not set and {names.world}={ranks.world_size} ranks are on several nodes "
            f"({names.local_world}={env.get(names.local_world)}): give every rank the host of rank 0, as "
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


def _read_rank(env: Mapping[str, str], names: Names) -> RankInfo | None:
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
        rule = f"more than {world}={ranks.world_size}" if ranks.local_world_size else "no number of ranks"
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


def cuda_environment(tp: int, run_dir: Path, capability: int | None) -> dict[str, str]:
    """Return the variables for CUDA of launcher_variables.toml.

    GPUs from Blackwell on (major `capability` 10) do not need a single hardware queue.
    """
    variables = {name: facts["value"].replace("{run_dir}", str(run_dir)) for name, facts in VARIABLES["cuda"].items()}
    if tp == 1 or (capability or 0) >= 10:
        del variables["CUDA_DEVICE_MAX_CONNECTIONS"]
    return variables


def set_cuda_environment(tp: int, run_dir: Path, deterministic: bool = False) -> None:
    """Set the variables of `cuda_environment` if there is a GPU, except those that the user has set."""
    if deterministic:  # torch refuses matmuls without it; set even without nvidia-smi, which a container may lack
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if (tool := shutil.which("nvidia-smi")) is None:
        return
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    capabilities = [int(line.partition(".")[0]) for line in output.split() if re.match(r"[0-9]+\.", line)]
    for name, value in cuda_environment(tp, run_dir, min(capabilities, default=None)).items():
        if CUDA_VARIABLES[name] not in os.environ:
            os.environ.setdefault(name, value)


def cuda_device(ranks: RankInfo) -> Any:
    """Return the torch.device of this rank's GPU. Raises LaunchError, reported by the first rank without one."""
    import torch

    count = torch.cuda.device_count()
    if ranks.local_rank >= count:
        text = f"local rank {ranks.local_rank} has no GPU, {count} visible: use --nproc {count} or less"
        raise LaunchError(text + ", or let each rank see all GPUs of its machine", local_rank=count)
    return torch.device("cuda", ranks.local_rank)


class _Notice:
    """Prints for which ranks this rank waits, and what to do if it should not wait.

    If ranks that were started together wait for rank 0, only one of them prints it.
    """

    def __init__(self, ranks: RankInfo):
        self._ranks, self._prints = ranks, ranks.rank == 0 or ranks.shared_dir is None

    def __call__(self, text: str) -> None:
        if not self._prints:
            try:
                Path(self._ranks.shared_dir or "", WAITS).touch(exist_ok=False)
            except FileExistsError:
                return
            except OSError:  # the directory was removed
                pass
            self._prints = True
        print_err("; ".join(filter(None, (f"rank {self._ranks.rank}: {text}", self._ranks.unset_remedy))))


@contextlib.contextmanager
def _notice_if_slow(ranks: RankInfo, text: str) -> Iterator[None]:
    """Let rank 0 print `text` if the block takes longer than NOTICE_S."""
    timer = threading.Timer(NOTICE_S, print_err, [f"rank 0: {text}: can all nodes reach each other at every port?"])
    timer.daemon = True
    if ranks.rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def process_group(
    ranks: RankInfo, *, device: str, backend: str | None = None, startup_timeout: datetime.timedelta
) -> Iterator[Any]:
    """Join the process group if there are other ranks, and leave it at the end of the block.

    Args:
        ranks: this rank.
        device: "cpu" or "cuda"; the local rank selects the GPU.
        backend: default: nccl on CUDA, gloo elsewhere.
        startup_timeout: limit for the rendezvous and everything until `Mesh.set_timeout`.

    Yields:
        The torch.device of this rank.

    Raises:
        LaunchError: if not all ranks can be reached.
    """
    import torch
    import torch.distributed as dist

    own_device = cuda_device(ranks) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own_device)
    if ranks.world_size == 1:
        yield own_device
        return
    name = backend or ("nccl" if device == "cuda" else "gloo")
    try:
        url = ranks.init_method or f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        nodes = -(-ranks.world_size // ranks.local_world_size)
        serves = ranks.init_method is not None or not under_torchrun() or os.environ.get(AGENT_STORE) != "True"
        store = rendezvous(
            ranks.rank,
            ranks.world_size,
            url,
            os.environ,
            startup_timeout,
            nodes=nodes,
            gloo=name == "gloo",
            serves=serves,
            report=_Notice(ranks),
        )
        notice = f"all {ranks.world_size} ranks have met; waiting for connections between them ({name})"
        with _notice_if_slow(ranks, notice):
            dist.init_process_group(
                name, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=startup_timeout
            )
    except RendezvousError as error:
        raise LaunchError(str(error), local_rank=None) from error
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {ranks.rank} of {ranks.world_size} cannot exchange data with all others ({error}): can all nodes "
            "reach each other's addresses, at every port? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME name the interface to "
            "use",
            local_rank=None,
        ) from error
    try:
        yield own_device
    finally:
        dist.destroy_process_group()


def exit_process(run: Callable[[], int | None]) -> NoReturn:
    """End the process with the exit code of `run`, whether returned or raised as SystemExit.

    A rank of a launcher ends like a rank of --nproc under multiprocessing: everything is flushed and closed, but the
    interpreter is not shut down. gloo's threads live until the last reference to their group is gone, possibly during
    the shutdown. Python would end a thread that needs the interpreter then, to free a tensor for instance, and C++
    would abort.
    """
    wait_for_children()
    try:
        code: Any = run()
    except SystemExit as error:
        code = exit_code(error)
    with contextlib.suppress(LaunchError):
        if (ranks := read_environment()) is not None and ranks.world_size > 1 and isinstance(code, int | None):
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
            discard_unwritable_output()
            end_at_once(code or 0)
    report(code)
    sys.exit(code)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Send this process the signal `number` when its parent dies (PR_SET_PDEATHSIG); does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


def exit_with_torchrun() -> list[str]:
    """Let this rank end when its torchrun is killed, which cannot end its ranks then.

    Returns a line for each option that torchrun lacks, with the consequence.
    """
    lines, env = list[str](), os.environ
    if not under_torchrun():
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
    if torchrun_will_restart() and several_nodes and env.get(AGENT_STORE) == "True":
        lines.append("a node that is lost cannot come back: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    return lines


def stop_when_torchrun_exits(grace_s: float) -> None:
    """Send this rank SIGTERM when its torchrun ends, and kill it after `grace_s`.

    torchrun dies of a SIGUSR1 that it does not pass on. For a rank that can save and no longer blocks signals.
    """
    if not under_torchrun() or sys.platform != "linux":
        return
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)

    def end() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.environ.get("LOCAL_RANK") == "0":
            print_err("torchrun has ended without its ranks: they save and stop")
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, name="megalite-torchrun", daemon=True).start()


def torchrun_will_restart() -> bool:
    """Return True if torchrun restarts a run that ends with any code but 0, even one that stopped on purpose (75)."""
    return under_torchrun() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
