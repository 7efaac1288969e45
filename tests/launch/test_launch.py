"""The environment variables of launchers: ranks, addresses, missing and stale variables."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
from train_cases import SMALL_RUN

from megalite.launch.rank_info import LaunchError, RankInfo, read_environment

ROOT = Path(__file__).resolve().parents[2]


def ompi(rank: int, world: int, local: int, local_world: int, **env: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = map(str, (rank, world, local, local_world))
    return {**dict(zip([f"OMPI_COMM_WORLD_{n}" for n in names], values, strict=True)), **env}


def slurm(rank: int, world: int, **env: str) -> dict[str, str]:
    variables = {"PROCID": str(rank), "STEP_ID": "0", "NTASKS": str(world), "LOCALID": str(rank % 4), "JOB_ID": "5"}
    variables |= {"STEP_NODELIST": "gpu[07-08]", "STEP_TASKS_PER_NODE": "4(x2)"}
    return {**{f"SLURM_{name}": value for name, value in variables.items()}, **env}


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTERACTIVE = "4294967290"  # the step number of salloc's shell
MV2 = {name.replace("OMPI", "MV2"): value for name, value in ompi(1, 2, 1, 2).items()}


@pytest.mark.parametrize(
    "env,expected",
    [
        ({}, None),
        (TORCHRUN, RankInfo(3, 4, 1, 2)),
        ({**TORCHRUN, **ompi(1, 2, 0, 1), **slurm(1, 8)}, RankInfo(3, 4, 1, 2)),  # torchrun under mpirun under SLURM
        (ompi(1, 2, 1, 2), RankInfo(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (ompi(1, 2, 1, 2, MASTER_PORT="7"), RankInfo(1, 2, 1, 2, "tcp://127.0.0.1:7")),
        (ompi(5, 8, 1, 4, MASTER_ADDR="n0"), RankInfo(5, 8, 1, 4, "tcp://n0:29500")),
        (ompi(0, 1, 0, 1), None),  # one process: --nproc says how many
        (MV2, RankInfo(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (PMI, RankInfo(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (slurm(5, 8), RankInfo(5, 8, 1, 4, "tcp://gpu07:20005")),
        (slurm(0, 1), None),
        # mpirun in a SLURM job: SLURM counts the daemons, one per node
        ({**slurm(1, 2), **ompi(5, 8, 1, 4, MASTER_ADDR="n0")}, RankInfo(5, 8, 1, 4, "tcp://n0:29500")),
        ({**slurm(1, 2), **ompi(1, 2, 0, 1, MASTER_ADDR="n0")}, RankInfo(1, 2, 0, 1, "tcp://n0:29500")),
        # srun --mpi=pmi2: both say the same, and SLURM knows the first host
        ({**slurm(5, 8), "PMI_RANK": "5", "PMI_SIZE": "8"}, RankInfo(5, 8, 1, 4, "tcp://gpu07:20005")),
        # MPICH's mpiexec in a SLURM job: one daemon per node
        ({**slurm(0, 2), **PMI}, RankInfo(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        # a shell in an allocation of 4 tasks: salloc's interactive step, srun --pty, the job's script
        (slurm(0, 4, SLURM_STEP_NUM_TASKS="1"), None),
        (slurm(0, 4, SLURM_STEP_ID=INTERACTIVE), None),
        ({name: value for name, value in slurm(0, 4).items() if name != "SLURM_STEP_ID"}, None),
        ({**slurm(0, 4, SLURM_STEP_NUM_TASKS="1"), **PMI}, RankInfo(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        # a step smaller than its job, whose --ntasks-per-node is still set
        (
            slurm(1, 16, SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS_PER_NODE="8", SLURM_STEP_TASKS_PER_NODE="2"),
            RankInfo(1, 2, 1, 2, "tcp://gpu07:20005"),
        ),
        # nodes with different numbers of tasks
        (
            slurm(9, 11, SLURM_LOCALID="1", SLURM_NODEID="2", SLURM_STEP_TASKS_PER_NODE="4(x2),3"),
            RankInfo(9, 11, 1, 3, "tcp://gpu07:20005"),
        ),
        # one process: --nproc says how many; an empty variable counts as unset
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "", "WORLD_SIZE": ""}, None),
        # torchrun of one process in each task of a step of 4: four runs, as torchrun says
        ({**slurm(3, 4), "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, RankInfo()),
    ],
)
def test_launcher_environments(env: dict[str, str], expected: RankInfo | None) -> None:
    assert read_environment(env) == expected


def test_two_jobs_on_one_machine_use_two_ports() -> None:
    rank_infos = [read_environment(ompi(1, 2, 1, 2, PMIX_NAMESPACE=f"prterun-host-{i}@1")) for i in range(2)]
    ports = [
        int(rank_info.init_method.rpartition(":")[2])
        for rank_info in rank_infos
        if rank_info is not None and rank_info.init_method
    ]
    assert len(set(ports)) == 2 and all(20000 <= port < 40000 for port in ports)


@pytest.mark.parametrize(
    "env,message",
    [
        (ompi(5, 8, 1, 4), "MASTER_ADDR is not set and OMPI_COMM_WORLD_SIZE=8 ranks are on several nodes"),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, "MASTER_ADDR is not set and PMI_SIZE=8"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set although"),
        # half of a set, of any launcher, with both remedies
        ({"RANK": "0"}, "WORLD_SIZE is not set although RANK is: start with torchrun, .* or unset RANK"),
        ({"WORLD_SIZE": "1"}, "RANK is not set although WORLD_SIZE is: .* or unset WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set although OMPI_COMM_WORLD_RANK is"),
        ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_SIZE is not set although"),
        ({"PMI_RANK": "1"}, "PMI_SIZE is not set although PMI_RANK is: .* or unset PMI_RANK"),
        ({"PMI_SIZE": "1"}, "PMI_RANK is not set although PMI_SIZE is"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS is not set although SLURM_PROCID is"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is not set although SLURM_STEP_NUM_TASKS"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=0"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=4"),
        (ompi(1, 2, 1, 0, MASTER_ADDR="n0"), "OMPI_COMM_WORLD_LOCAL_RANK=1 is not below OMPI_COMM_WORLD_LOCAL_SIZE=0"),
        # variables that an earlier job has left in every process that a launcher has started
        (
            slurm(3, 4) | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=0 of WORLD_SIZE=2, but SLURM_PROCID=3 of SLURM_NTASKS=4: unset RANK and WORLD_SIZE if they are left over from another run",
        ),
        (ompi(1, 2, 1, 2) | {"RANK": "0", "WORLD_SIZE": "1"}, "RANK=0 of WORLD_SIZE=1, but OMPI_COMM_WORLD_RANK=1 of "),
        (ompi(9, 8, 1, 8), "OMPI_COMM_WORLD_RANK=9 is not below OMPI_COMM_WORLD_SIZE=8"),
        (ompi(0, 2, 0, 2) | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set although WORLD_SIZE=2"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not a port: set a number from 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "-1"}, "MASTER_PORT='-1' is not a port"),
        (slurm(5, 8, MASTER_PORT="abc"), "MASTER_PORT='abc' is not a port"),
        (ompi(1, 2, 1, 2, MASTER_PORT="0"), "MASTER_PORT='0' is not a port"),
    ],
)
def test_missing_launcher_variable_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_environment(env)


SIZES = {  # the variable that says that there are two processes -> the environment
    "WORLD_SIZE": TORCHRUN | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "OMPI_COMM_WORLD_SIZE": ompi(0, 2, 0, 2),
    "MV2_COMM_WORLD_SIZE": MV2,
    "PMI_SIZE": PMI,
    "SLURM_STEP_NUM_TASKS": slurm(0, 4, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2"),
}
PROGRAMS: dict[str, tuple[str, ...]] = {
    "pretrain_gpt.py": (*SMALL_RUN, "--train-iters", "1", "--device", "cpu"),
    "tools/check_cluster.py": ("--device", "cpu"),
    "tools/benchmark_comm.py": ("--device", "cpu"),
    "tools/generate.py": ("--load", "none", "--device", "cpu"),
}


def clean() -> dict[str, str]:
    """Return the environment of a user without a launcher."""
    prefixes = ("SLURM", "PMI", "OMPI", "MV2", "MPI_", "MASTER_", "TORCHELASTIC")
    return {name: value for name, value in os.environ.items() if name not in TORCHRUN and not name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("program", "size"),
    [("pretrain_gpt.py", size) for size in SIZES] + [(program, "WORLD_SIZE") for program in [*PROGRAMS][1:]],
)
def test_nproc_that_contradicts_the_launcher_is_refused(program: str, size: str, tmp_path: Path) -> None:
    run_dir_args = ("--run-dir", str(tmp_path / "r")) if program == "pretrain_gpt.py" else ()
    result = programs.run_python(
        program, *PROGRAMS[program], *run_dir_args, "--nproc", "3", env=clean() | SIZES[size], timeout=60
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert f"nproc=3, but {size}=2 processes were started by a launcher: leave out nproc, or unset" in result.stderr
    assert not (tmp_path / "r").exists()


STALE = {  # variables that an earlier program of two processes has left -> the ranks that are waited for
    "torchrun": (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "rank 1"),
    "torchrun's shell": (dict(RANK="0", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True"), "rank 1"),
    "the second": (
        dict(RANK="1", WORLD_SIZE="2"),
        "rank 0; 127.0.0.1 is 127.0.0.1 on this machine, which means itself",
    ),
    "Open MPI": (ompi(0, 2, 0, 2), "rank 1"),
    "PMI": (PMI, "rank 0; that machine answers, but nothing listens there"),
    "SLURM": (slurm(0, 2, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2"), "rank 1"),
}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_stale_variables_are_named_within_seconds(tmp_path: Path) -> None:
    started = []
    for number, (name, (env, _)) in enumerate(STALE.items()):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]), OMP_NUM_THREADS="1")
        argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *PROGRAMS["pretrain_gpt.py"]]
        argv += ["--run-dir", str(tmp_path / str(number)), "--distributed-timeout-minutes", "0.3"]
        pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = programs.Popen(argv, env=clean() | env | address, **pipes)
        started.append((name, address, process))
    for name, address, process in started:
        env, others = STALE[name]
        stderr = process.communicate(timeout=200)[1]
        rank, world = (next(n for n in env if n.endswith(end)) for end in (("RANK", "PROCID"), ("SIZE", "NUM_TASKS")))
        message = f"waiting for 1 of 2 ranks at 127.0.0.1:{address['MASTER_PORT']}: {others}"
        assert process.returncode == 3 and "Traceback" not in stderr, stderr
        assert message in stderr and f"{rank} and {world} are set: unset them for a single process" in stderr, stderr


@pytest.mark.parametrize("number", ["0", "-1"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_nproc_0_is_refused(program: str, number: str, tmp_path: Path) -> None:
    run_dir_args = ("--run-dir", str(tmp_path / "r")) if program == "pretrain_gpt.py" else ()
    result = programs.run_python(program, *PROGRAMS[program], *run_dir_args, "--nproc", number, env=clean(), timeout=60)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert re.search(rf"nproc=?.*{number}.*(give 1 or more|is not a number above 0)", result.stderr)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("env", [{"RANK": "0", "WORLD_SIZE": "1"}, slurm(0, 4, SLURM_STEP_NUM_TASKS="1")])
def test_single_process_launcher_leaves_the_number_to_nproc(env: dict[str, str], tmp_path: Path) -> None:
    flags = [*PROGRAMS["pretrain_gpt.py"], "--run-dir", str(tmp_path), "--nproc", "2"]
    result = programs.run_python("pretrain_gpt.py", *flags, env=clean() | env, timeout=100)
    assert result.returncode == 0 and "= 2 ranks" in result.stdout, result.stderr


def test_leftover_torchrun_variables_are_ignored(tmp_path: Path) -> None:
    """A requested stop ends with 75.

    Under a torchrun with restarts it would end with 0, and torchrun's own store would be at MASTER_ADDR.
    """
    stale_env = dict(TORCHELASTIC_RUN_ID="x", TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="True")
    flags = [*SMALL_RUN, "--train-iters", "3", "--device", "cpu", "--save", str(tmp_path), "--exit-interval", "2"]
    result = programs.run_python("pretrain_gpt.py", *flags, env=clean() | stale_env, timeout=100)
    assert result.returncode == 75, result.stderr


def test_two_mpirun_processes_are_one_training(tmp_path: Path) -> None:
    """Two plain processes with the variables of Open MPI give the losses of two local ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    flags = [*SMALL_RUN, "--train-iters", "2", "--device", "cpu", "--hidden-dropout", "0"]
    argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--save"]
    started = []
    for rank in range(2):
        env = clean() | ompi(rank, 2, rank, 2, MASTER_PORT=port, OMP_NUM_THREADS="1")
        started.append(programs.Popen([*argv, str(tmp_path / "mpi")], env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert "dp 2 x cp 1 x tp 1 = 2 ranks" in outputs[0] and outputs[1] == ""
    programs.run([*argv, str(tmp_path / "local"), "--nproc", "2"], env=clean(), check=True, timeout=100)
    mpi_losses, local_losses = (
        [json.loads(line)["train/loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()[:2]]
        for name in ("mpi", "local")
    )
    assert mpi_losses == local_losses and len(mpi_losses) == 2
