"""Start and end of a rank's process: its process group, its CUDA environment, its exit, torchrun's agent."""

import atexit
import contextlib
import ctypes
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megalite.common.console import discard_unwritable_output, print_err
from megalite.common.exits import exit_code, exit_now, report, wait_for_children
from megalite.launch.rank_info import VARIABLES, WAITS, LaunchError, RankInfo, read_environment, under_torchrun
from megalite.launch.rendezvous import AGENT_STORE, NOTICE_S, RendezvousError, rendezvous

CUDA_VARIABLES: dict[str, str] = {name: facts["other"] for name, facts in VARIABLES["cuda"].items()}


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


class _WaitReporter:
    """A function that prints for which ranks this rank waits, and what to do if it should not wait.

    If ranks that were started together wait for rank 0, only one of them prints it.
    """

    def __init__(self, ranks: RankInfo):
        self._ranks = ranks
        self._prints = ranks.rank == 0 or ranks.shared_dir is None

    def __call__(self, text: str) -> None:
        if not self._prints:
            try:
                Path(self._ranks.shared_dir or "", WAITS).touch(exist_ok=False)
            except FileExistsError:
                return
            except OSError:  # the directory was removed
                pass
            self._prints = True
        message = f"rank {self._ranks.rank}: {text}"
        if self._ranks.unset_remedy:
            message += f"; {self._ranks.unset_remedy}"
        print_err(message)


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
        num_nodes = -(-ranks.world_size // ranks.local_world_size)
        serves = ranks.init_method is not None or not under_torchrun() or os.environ.get(AGENT_STORE) != "True"
        store = rendezvous(
            ranks.rank,
            ranks.world_size,
            url,
            os.environ,
            startup_timeout,
            num_nodes=num_nodes,
            gloo=name == "gloo",
            serves=serves,
            report=_WaitReporter(ranks),
        )
        notice = f"all {ranks.world_size} ranks have joined; waiting for connections between them ({name})"
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
            exit_now(code or 0)
    report(code)
    sys.exit(code)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Send this process the signal `number` when its parent dies (PR_SET_PDEATHSIG); does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


def exit_with_torchrun() -> list[str]:
    """Make this rank end with its torchrun, which cannot end its ranks when it is killed.

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
