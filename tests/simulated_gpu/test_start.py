"""Starting on GPUs: the output of nvidia-smi, the GPU of each rank, and missing resources."""

import datetime
import os
import subprocess
from pathlib import Path

import programs
import pytest
import torch
from train_cases import SMALL_RUN, config_from, pretrain

from megalite.common.exit_codes import ExitCode
from megalite.config.options import Config
from megalite.launch.process_group import CUDA_VARIABLES, cuda_environment, process_group, set_cuda_environment
from megalite.launch.rank_info import LaunchError, RankInfo
from megalite.planning.run_plan import make_run_plan
from megalite.training.job.preflight import check_machine
from simulated_gpu.simulator import cuda
from simulated_gpu.simulator.device import simulated
from tools import generate


def config_of(flags: str = "") -> Config:
    return config_from([*SMALL_RUN, "--train-iters", "1", "--device", "cuda", "--kernels", "torch", *flags.split()])


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path at which a test may write an nvidia-smi, and restore the variables afterwards."""
    for name in (*CUDA_VARIABLES, *filter(None, CUDA_VARIABLES.values()), "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "nvidia-smi"


def write_script(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("script", "one_queue"),
    [
        ("echo 9.0", True),
        ("echo 8.0; echo 10.0", True),  # the older of two kinds decides
        ("echo 10.0; echo 12.0", False),
        ("echo 'No devices were found'; exit 6", True),  # its driver has lost the GPU: treated as an unknown one
        ("echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2", True),  # a driver of 2020
        (r"printf '\377\376 9.x\n\n[N/A]\n'", True),
        ("kill -9 $$", True),
    ],
)
def test_nvidia_smi_decides_the_number_of_queues(tool: Path, tmp_path: Path, script: str, one_queue: bool) -> None:
    write_script(tool, script)
    set_cuda_environment(2, tmp_path)
    assert (os.environ.get(ONE_QUEUE) == "1") is one_queue
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl_trace_rank_")


def test_without_nvidia_smi_only_deterministic_variables_are_set(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have GPUs and no nvidia-smi; without the variable torch refuses the first matmul there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    set_cuda_environment(2, tmp_path)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ and ONE_QUEUE not in cuda_environment(1, tmp_path, 9)
    set_cuda_environment(2, tmp_path, deterministic=True)
    assert not any(name in os.environ for name in CUDA_VARIABLES)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    tool.write_text("no program")
    tool.chmod(0o755)
    set_cuda_environment(1, tmp_path)
    assert ONE_QUEUE not in os.environ and "TORCH_FR_BUFFER_SIZE" in os.environ


def test_hanging_nvidia_smi_is_abandoned(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout also applies when a child process that has the pipe open continues."""
    write_script(tool, "sleep 1000; echo 10.0")
    original = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, timeout, **k: original(*a, timeout=timeout / 40, **k))
    set_cuda_environment(2, tmp_path)  # without a timeout, this test would not end
    assert os.environ[ONE_QUEUE] == "1"


@pytest.mark.parametrize("name", [*CUDA_VARIABLES, *filter(None, CUDA_VARIABLES.values())])
def test_user_variables_are_kept(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_script(tool, "echo 9.0")
    monkeypatch.setenv(name, "theirs")
    set_cuda_environment(2, tmp_path)
    assert os.environ[name] == "theirs"
    default = next((default for default, alternative in CUDA_VARIABLES.items() if alternative == name), None)
    assert default is None or default not in os.environ


def test_torch_accepts_the_variables(tool: Path, tmp_path: Path) -> None:
    """A process uses them all: the allocator's at once, and the flight recorder's with its first collective."""
    write_script(tool, "echo 9.0")
    set_cuda_environment(2, tmp_path)
    program = (
        "import torch, torch.distributed as dist; print(torch._C._accelerator_getAllocatorSettings());"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore());"
        "dist.all_reduce(torch.zeros(1)); dist.destroy_process_group()"  # a recorder that is still running aborts the process at its end
    )
    result = programs.run_python("-c", program)
    assert result.returncode == 0 and result.stdout.strip() == "expandable_segments:True"
    assert "deprecated" not in result.stderr


def test_local_rank_selects_the_gpu() -> None:
    with cuda.installed([], num_gpus=4) as machine:
        with process_group(
            RankInfo(9, 1, 3, 4), device="cuda", startup_timeout=datetime.timedelta(seconds=2)
        ) as device:
            assert device == torch.device("cuda", 3) and torch.cuda.current_device() == 3 == machine.traced_gpu


def test_more_ranks_than_gpus_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The first rank without a GPU reports it; the ranks with one wait for the others until the launcher ends them."""
    with simulated(num_gpus=2):
        codes = [pretrain(config_of(), RankInfo(rank, 4, rank, 4)) for rank in (3, 2)]
    assert codes == [ExitCode.PREFLIGHT, ExitCode.PREFLIGHT]
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and "local rank 2 has no GPU, 2 visible: use --nproc 2 or less" in stderr


def test_generation_reports_more_ranks_than_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    args = generate.build_parser().parse_args(["--load", "x", "--device", "cuda"])
    with cuda.installed([], num_gpus=1), pytest.raises(SystemExit, match="3"):
        generate.run(RankInfo(1, 2, 1, 2), args, [""])
    assert "generate.py: local rank 1 has no GPU, 1 visible" in capsys.readouterr().err


def test_plan_that_exceeds_the_ranks_gpu_is_refused() -> None:
    plan = make_run_plan(config_of(), 2, 93)
    with cuda.installed([], num_gpus=2, memory=1 << 30):
        check_machine(plan, "cuda", RankInfo(1, 2, 1, 2))
    with cuda.installed([], num_gpus=2, memory=1 << 18):
        with pytest.raises(LaunchError, match=r"take 0\.0 GiB per rank, the GPU's memory is 0\.0 GiB: use more ranks"):
            check_machine(plan, "cuda", RankInfo(1, 2, 1, 2))
