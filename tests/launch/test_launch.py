"""What a rank learns from the variables of its launcher."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from train_cases import SMALL

from megalite.launch.ranks import LaunchError, Ranks, read_environment

ROOT = Path(__file__).resolve().parents[2]


def ompi(rank: int, world: int, local: int, local_world: int, **more: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = map(str, (rank, world, local, local_world))
    return {**dict(zip([f"OMPI_COMM_WORLD_{n}" for n in names], values, strict=True)), **more}


def slurm(rank: int, world: int, **more: str) -> dict[str, str]:
    where = {"PROCID": str(rank), "STEP_ID": "0", "NTASKS": str(world), "LOCALID": str(rank % 4), "JOB_ID": "5"}
    where |= {"STEP_NODELIST": "gpu[07-08]", "STEP_TASKS_PER_NODE": "4(x2)"}
    return {**{f"SLURM_{name}": value for name, value in where.items()}, **more}


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MV2 = {name.replace("OMPI", "MV2"): value for name, value in ompi(1, 2, 1, 2).items()}


@pytest.mark.parametrize(
    "env,want",
    [
        ({}, None),
        (TORCHRUN, Ranks(3, 4, 1, 2)),
        ({**TORCHRUN, **ompi(1, 2, 0, 1), **slurm(1, 8)}, Ranks(3, 4, 1, 2)),  # torchrun under mpirun under SLURM
        (ompi(1, 2, 1, 2), Ranks(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (ompi(1, 2, 1, 2, MASTER_PORT="7"), Ranks(1, 2, 1, 2, "tcp://127.0.0.1:7")),
        (ompi(5, 8, 1, 4, MASTER_ADDR="n0"), Ranks(5, 8, 1, 4, "tcp://n0:29500")),
        (ompi(0, 1, 0, 1), None),  # one process: --nproc says how many
        (MV2, Ranks(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (PMI, Ranks(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (slurm(5, 8), Ranks(5, 8, 1, 4, "tcp://gpu07:20005")),
        (slurm(0, 1), None),
        # mpirun in a SLURM job: SLURM counts the daemons, of which there is one per node
        ({**slurm(1, 2), **ompi(5, 8, 1, 4, MASTER_ADDR="n0")}, Ranks(5, 8, 1, 4, "tcp://n0:29500")),
        ({**slurm(1, 2), **ompi(1, 2, 0, 1, MASTER_ADDR="n0")}, Ranks(1, 2, 0, 1, "tcp://n0:29500")),
        # srun --mpi=pmi2: both say the same, and SLURM knows the first host
        ({**slurm(5, 8), "PMI_RANK": "5", "PMI_SIZE": "8"}, Ranks(5, 8, 1, 4, "tcp://gpu07:20005")),
        # MPICH's mpiexec in a SLURM job: one daemon per node
        ({**slurm(0, 2), **PMI}, Ranks(1, 2, 1, 2, "tcp://127.0.0.1:29500")),
    ],
)
def test_the_table_of_environments(env: dict[str, str], want: Ranks | None) -> None:
    assert read_environment(env) == want


def test_two_jobs_of_one_machine_have_two_ports() -> None:
    found = [read_environment(ompi(1, 2, 1, 2, PMIX_NAMESPACE=f"prterun-host-{i}@1")) for i in range(2)]
    ports = [int(ranks.init_method.rpartition(":")[2]) for ranks in found if ranks is not None and ranks.init_method]
    assert len(set(ports)) == 2 and all(20000 <= port < 40000 for port in ports)


@pytest.mark.parametrize(
    "env,says",
    [
        (ompi(5, 8, 1, 4), "MASTER_ADDR is not set and OMPI_COMM_WORLD_SIZE=8 ranks are on several nodes"),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, "MASTER_ADDR is not set and PMI_SIZE=8"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set although"),
        (ompi(9, 8, 1, 8), "OMPI_COMM_WORLD_RANK=9 is not below OMPI_COMM_WORLD_SIZE=8"),
        (ompi(0, 2, 0, 2) | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set although WORLD_SIZE=2"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not a port: set a number from 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "-1"}, "MASTER_PORT='-1' is not a port"),
        (slurm(5, 8, MASTER_PORT="abc"), "MASTER_PORT='abc' is not a port"),
        (ompi(1, 2, 1, 2, MASTER_PORT="0"), "MASTER_PORT='0' is not a port"),
    ],
)
def test_what_is_missing_is_named(env: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        read_environment(env)


def test_two_processes_of_mpirun_are_one_training(tmp_path: Path) -> None:
    """The variables of Open MPI on two plain processes: the losses are those of two local ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = [*SMALL, "--train-iters", "2", "--device", "cpu", "--hidden-dropout", "0"]
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--save"]
    clean = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith(("SLURM", "PMI", "OMPI"))}
    started = []
    for rank in range(2):
        env = clean | ompi(rank, 2, rank, 2, MASTER_PORT=port, OMP_NUM_THREADS="1")
        started.append(programs.Popen([*words, str(tmp_path / "mpi")], env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert "dp 2 x cp 1 x tp 1 = 2 ranks" in said[0] and said[1] == ""
    programs.run([*words, str(tmp_path / "local"), "--nproc", "2"], env=clean, ok=True, timeout=100)
    one, two = (
        [json.loads(line)["train/loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()[:2]]
        for name in ("mpi", "local")
    )
    assert one == two and len(one) == 2
