"""From a command to a process group: the only reader of rank variables.

Four ways in: variables of torchrun (RANK, ...), mpirun (ranks.toml) or SLURM (SLURM_PROCID, ...), or local_ranks.py.

All launchers are read by one rule. Each has a variable for the rank and one for the number of ranks; one without the
other is an error, and an empty variable is not set. The innermost launcher counts: torchrun, mpirun, SLURM. One that
has started a single process leaves the number of ranks to --nproc (but torchrun, which has restarts of its own); beside
any other, --nproc must be the same number.
Nothing shows whether a variable was left behind by an earlier program. So whatever waits for other ranks names the
variables that say that there are any, and that a single process needs them to be unset.
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

from megalite.common.tables import load_table
from megalite.config.console import discard_unwritable_output, print_err
from megalite.config.exits import end_at_once, exit_code, report, wait_for_children
from megalite.config.text_file import read_small_text
from megalite.launch.rendezvous import AGENT_STORE, NOTICE_S, RendezvousError, rendezvous

LAUNCHERS = "torchrun, srun, mpirun or --nproc"
VARIABLES = load_table(__file__, "launcher_variables")
CUDA_VARIABLES: dict[str, str] = {name: facts["other"] for name, facts in VARIABLES["cuda"].items()}
FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # from here on a step's number is a job's script or shell (slurm.h), and one process
# files in `Ranks.shared`
FIRST_FAILURE = (
    "first-failure.json"  # written by the first rank that fails on this machine (training/logging/rank_log.py)
)
WAITS = "waits"  # exists once a rank has said that rank 0 is missing
FAILURE_PRINTED = "said"  # exists once that failure is on the console
HANG_REPORT = (
    "hang.json"  # a hang that was reported and has not passed, in case a rank aborts before any rank fails by it
)


def read_first_failure(shared_dir: Path, name: str = FIRST_FAILURE) -> tuple[int, str] | None:
    """The exit code and the cause that the rank wrote, if any."""
    try:
        first = json.loads(read_small_text(shared_dir / name, "what the rank wrote"))
        return int(first["code"]), f"rank {first['rank']}: {first['reason']}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


class LaunchError(Exception):
    """The environment does not describe a process group; the text says what to set. `local_rank`: the rank of this
    machine that reports it; None: the first one that fails."""

    def __init__(self, text: str, local_rank: int | None = 0):
        super().__init__(text)
        self.local_rank = local_rank


class Names(NamedTuple):
    """The variables by which a launcher tells a process its rank, the number of ranks, and both on its machine."""

    rank: str
    world: str
    local_rank: str
    local_world: str


TORCH = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = [Names(*names) for names in VARIABLES["mpi"]]
SLURM = Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


@dataclass(frozen=True)
class RankInfo:
    """The identity of this process. `init_method` None: the address is in MASTER_ADDR and MASTER_PORT. `resumes`: the
    run was restarted after a rank had died. `shared`: a folder of the ranks that were started together here.
    `variables`: the names of those that say that there are other ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str | None = None
    is_restart: bool = False
    shared_dir: str | None = None
    variables: Sequence[str] = field(default=(), compare=False)

    @property
    def said(self) -> str:
        """The variables and their values."""
        rank, world = self.variables
        return f"{rank}={self.rank} of {world}={self.world_size}"

    @property
    def to_unset(self) -> str:
        """The remedy for variables of an earlier program; "" where none says that there are other ranks."""
        return f"{' and '.join(self.variables)} are set: unset them for a single process" if self.variables else ""


def read_environment(env: Mapping[str, str] = os.environ) -> RankInfo | None:
    """The ranks that torchrun, mpirun or SLURM announce in `env`; None if there is no launcher, or one other than
    torchrun has started a single process. Raises LaunchError."""
    env = {name: value for name, value in env.items() if value}
    inner = _place(env, TORCH)
    if inner is None:
        return _of_mpi_or_slurm(env)
    if under_torchrun(env):
        own = env.get("TORCHELASTIC_ERROR_FILE")  # .../attempt_1/LOCAL_RANK/error.json
        again = env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        inner = replace(inner, is_restart=again, shared_dir=own and str(Path(own).parents[1]))
    elif (outer := _outer(env)) is not None and outer.world_size > inner.world_size:
        raise LaunchError(
            f"{inner.said}, but {outer.said}: unset RANK and WORLD_SIZE if they are left from another run"
        )
    elif inner.world_size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT") if inner.world_size > 1 else ():
        if name not in env:
            text = f"{name} is not set although WORLD_SIZE={inner.world_size}: start with torchrun, or set it"
            raise LaunchError(f"{text}; {inner.to_unset}")
    return inner


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started this process, whose own variables a shell may still have without its ranks'."""
    return "TORCHELASTIC_RUN_ID" in env and "RANK" in env


def other_number(ranks: RankInfo | None, nproc: int | None) -> str | None:
    """The error of an --nproc that is not the number of ranks that a launcher has started."""
    if ranks is None or nproc is None or nproc == ranks.world_size:
        return None
    said = f"nproc={nproc}, but {ranks.variables[1]}={ranks.world_size} says how many processes were started"
    return f"{said}: leave out nproc, or unset {' and '.join(ranks.variables)} if no launcher did"


def _of_mpi_or_slurm(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks of the innermost of these launchers that has started more than one process. Raises LaunchError."""
    for names in MPI:
        by_mpi = _place(env, names)
        if by_mpi is not None and by_mpi.world_size > 1:
            break
    else:
        by_slurm = _of_slurm(env)
        return by_slurm and replace(by_slurm, init_method=_meeting_of_slurm(env))
    # In a SLURM job mpirun has SLURM start its daemons, and the ranks inherit SLURM's variables, which then count the
    # daemons. Both agree only where srun provides PMI itself, and then SLURM knows the first host.
    if names.rank == "PMI_RANK":
        with contextlib.suppress(LaunchError):
            by_slurm = _of_slurm(env)
            if by_slurm and (by_slurm.rank, by_slurm.world_size) == (by_mpi.rank, by_mpi.world_size):
                return replace(by_slurm, init_method=_meeting_of_slurm(env))
    return replace(by_mpi, init_method=_mpi_rendezvous(env, names, by_mpi))


def _outer(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks of a launcher around the one that counts; half of its variables is no error then."""
    try:
        return _of_mpi_or_slurm(env)
    except LaunchError:
        return None


def _of_slurm(env: Mapping[str, str]) -> RankInfo | None:
    """This process as a task of a step. A job's script and its shell (salloc) are one process; they have variables of
    the whole job, among them SLURM_NTASKS, the number of tasks that its steps may have."""
    if "SLURM_STEP_ID" not in env or _parse_int(env, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return None
    world = "SLURM_NTASKS" if "SLURM_NTASKS" in env and SLURM.world not in env else SLURM.world
    own = {name: value for name, value in env.items() if name != SLURM.local_world}
    ranks = _place(own, SLURM._replace(world=world))
    if ranks is None or ranks.world_size == 1:
        return None
    tasks = env.get(SLURM.local_world) or env.get("SLURM_NTASKS_PER_NODE", "1")  # of the step, else of the job
    here = _tasks_of_node(tasks, int(env["SLURM_NODEID"]) if env.get("SLURM_NODEID", "").isdecimal() else 0)
    return replace(ranks, local_world_size=max(min(here, ranks.world_size), ranks.local_rank + 1))


def _tasks_of_node(text: str, node: int) -> int:
    """The number of tasks of a node, out of those of all nodes.

    >>> _tasks_of_node("4(x2),3", 1), _tasks_of_node("4(x2),3", 2)
    (4, 3)
    """
    counts = [(int(count), int(times or 1)) for count, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text)]
    for count, times in counts:
        node -= times
        if node < 0:
            return count
    return counts[0][0] if counts else 1


def _mpi_rendezvous(env: Mapping[str, str], names: Names, ranks: RankInfo) -> str:
    """The address where ranks of mpirun meet, which MPI itself does not give them."""
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if env.get(names.local_world) == env[names.world] else None)
    if host is None:
        raise LaunchError(
            f"MASTER_ADDR is not set and {names.world}={ranks.world_size} ranks are on several nodes ({names.local_world}="
            f"{env.get(names.local_world)}): give every rank the host of rank 0, as mpirun -x MASTER_ADDR=HOST does; "
            f"{ranks.to_unset}"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")  # differs between jobs on one machine
    return f"tcp://{host}:{env.get('MASTER_PORT') or (20000 + zlib.crc32(job.encode()) % 20000 if job else 29500)}"


def _meeting_of_slurm(env: Mapping[str, str]) -> str:
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    return f"tcp://{host}:{env.get('MASTER_PORT') or 20000 + _parse_int(env, 'SLURM_JOB_ID', '0') % 20000}"


def _parse_int(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name, default)
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise LaunchError(f"{name}={text!r} is not a whole number: start with {LAUNCHERS}")
    return int(text)


def _place(env: Mapping[str, str], names: Names) -> RankInfo | None:
    """The place that the variables of one launcher give this process; None if neither the rank nor the number of ranks
    is set. Raises LaunchError."""
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
        said = f"{local_rank}={ranks.local_rank} is not below {local_world}={ranks.local_world_size}"
        raise LaunchError(f"{said}: start with {LAUNCHERS}")
    if not 1 <= ranks.local_world_size <= ranks.world_size:
        than = f"more than {world}={ranks.world_size}" if ranks.local_world_size else "no number of ranks"
        raise LaunchError(f"{local_world}={ranks.local_world_size} is {than}: start with {LAUNCHERS}")
    port = env.get("MASTER_PORT", "1")
    if ranks.world_size > 1 and not (re.fullmatch("[0-9]{1,9}", port) and 0 < int(port) < 1 << 16):
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


def set_cuda_environment(tp: int, folder: Path, deterministic: bool = False) -> None:
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


def cuda_device(ranks: RankInfo) -> Any:
    """The torch.device of this rank's card. Raises LaunchError, which the first rank without one reports."""
    import torch

    count = torch.cuda.device_count()
    if ranks.local_rank >= count:
        text = f"local rank {ranks.local_rank} has no card, {count} visible: use --nproc {count} or less"
        raise LaunchError(text + ", or let each rank see all cards of its machine", local_rank=count)
    return torch.device("cuda", ranks.local_rank)


class _Notice:
    """Says for whom this rank waits, and what to do if it should not. Of ranks that were started together and wait for
    rank 0, one says it for all."""

    def __init__(self, ranks: RankInfo):
        self._ranks, self._speaks = ranks, ranks.rank == 0 or ranks.shared_dir is None

    def __call__(self, text: str) -> None:
        if not self._speaks:
            try:
                Path(self._ranks.shared_dir or "", WAITS).touch(exist_ok=False)
            except FileExistsError:
                return
            except OSError:  # the folder is gone
                pass
            self._speaks = True
        print_err("; ".join(filter(None, (f"rank {self._ranks.rank}: {text}", self._ranks.to_unset))))


@contextlib.contextmanager
def _told_late(ranks: RankInfo, text: str) -> Iterator[None]:
    """Rank 0 says so if what is inside takes long."""
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
    """Join the group if there are other ranks, yield this rank's torch.device, and leave it on every way out. `device`:
    "cpu" or "cuda", where the local rank picks the card. `backend` None: nccl on CUDA, gloo elsewhere.
    `startup_timeout` covers the rendezvous and everything until `Mesh.set_timeout`."""
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
        how: dict[str, Any] = dict(nodes=nodes, gloo=name == "gloo", serves=serves, tell=_Notice(ranks))
        store = rendezvous(ranks.rank, ranks.world_size, url, os.environ, startup_timeout, **how)
        with _told_late(ranks, f"all {ranks.world_size} ranks have met; waiting for connections between them ({name})"):
            dist.init_process_group(
                name, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=startup_timeout
            )
    except RendezvousError as error:
        raise LaunchError(str(error), local_rank=None) from error
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {ranks.rank} of {ranks.world_size} cannot exchange data with all others ({error}): can all nodes reach "
            "each other's addresses, at every port? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME name the interface to use",
            local_rank=None,
        ) from error
    try:
        yield own_device
    finally:
        dist.destroy_process_group()


def exit_process(run: Callable[[], int | None]) -> NoReturn:
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
    """Let this rank end with its torchrun, which cannot end its ranks if it is killed. Returns the options that
    torchrun lacks, one line each with the consequence."""
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


def stop_when_torchrun_exits(most_s: float) -> None:
    """Send this rank SIGTERM when its torchrun ends (torchrun dies of a SIGUSR1 that it does not pass on), and kill it
    after `most_s`. For a rank that can save and no longer blocks signals."""
    if not under_torchrun() or sys.platform != "linux":
        return
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)

    def end() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.environ.get("LOCAL_RANK") == "0":
            print_err("torchrun has ended without its ranks: they save and stop")
        time.sleep(most_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, name="megalite-torchrun", daemon=True).start()


def torchrun_will_restart() -> bool:
    """Whether torchrun restarts a run that ends with any code but 0, even one that stopped on purpose (75)."""
    return under_torchrun() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
