"""The warnings of a run's start: variables that slow it down or break it, and what it leaves unused of its machine."""

import os
from pathlib import Path

import programs
import pytest
import torch
from train_cases import SMALL_RUN, config_from

from megalite.launch import system_checks
from megalite.launch.rank_info import RankInfo
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.job import preflight, startup, unused_resources

ONE_RANK = RankInfo(world_size=1, local_world_size=1)
ONE_NODE, TWO_NODES = (RankInfo(world_size=size, local_world_size=2) for size in (2, 4))
WRONG_VALUES = {
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_GID_INDEX": "x",
    "NCCL_ALGO": "Ring",
    "NCCL_TIMEOUT": "1800",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in system_checks.VARIABLES:
        for name in row["name"].split(", "):
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_variable_is_reported_where_it_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = f"{name}={WRONG_VALUES[name]}"
    monkeypatch.setenv(*setting.split("="))
    (warning,) = preflight.variable_warnings("cuda", TWO_NODES)
    assert warning.startswith(f"{setting}: ") and "; " in warning
    between_nodes = name.endswith("IFNAME") or name in ("NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE", "NCCL_NET")
    assert bool(preflight.variable_warnings("cuda", ONE_NODE)) == (not between_nodes)
    between_ranks = name.startswith(("NCCL", "TORCH_NCCL"))
    assert bool(preflight.variable_warnings("cuda", ONE_RANK)) == (not between_ranks and not between_nodes)
    without_gpu = name.startswith(("GLOO", "TORCH_DISTRIBUTED"))
    assert bool(preflight.variable_warnings("cpu", TWO_NODES)) == without_gpu


def test_good_values_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_P2P_DISABLE": "0"}.items():
        monkeypatch.setenv(name, value)
    assert preflight.variable_warnings("cuda", TWO_NODES) == []


def test_idle_gpus_are_reported() -> None:
    (warning,) = unused_resources.unused_gpus(ONE_NODE, 8)
    assert warning.startswith("6 of 8 GPUs of this machine are idle: start a rank for each, as with --nproc 8")
    assert unused_resources.unused_gpus(RankInfo(world_size=16, local_world_size=8), 8) == []
    assert unused_resources.unused_gpus(ONE_NODE, 1) == []  # a launcher shows each rank its GPU alone


def test_idle_cores_are_reported() -> None:
    (warning,) = unused_resources.unused_cores(ONE_NODE, num_threads=1, num_cores=64)
    assert warning == "2 ranks x 1 thread leave most of 64 cores idle: set OMP_NUM_THREADS=32"
    assert unused_resources.unused_cores(ONE_NODE, num_threads=16, num_cores=64) == []  # a thread for each core of two
    assert unused_resources.unused_cores(ONE_RANK, num_threads=1, num_cores=2) == []


def test_unused_tensor_cores_are_reported() -> None:
    (warning,) = unused_resources.unused_matmul_units(torch.float32, "NVIDIA H100 80GB HBM3")
    assert warning.endswith("its data sheet has 66.9 TFLOP/s, and 989.4 with --bf16")
    (warning,) = unused_resources.unused_matmul_units(torch.float32, "Tesla V100-SXM2-16GB")
    assert warning.endswith("and 125 with --fp16")
    assert unused_resources.unused_matmul_units(torch.bfloat16, "NVIDIA H100 80GB HBM3") == []
    assert unused_resources.unused_matmul_units(torch.float32, "an unknown GPU") == []


def plan_with(flags: str) -> RunPlan:
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 96 --seq-length 1024 --bf16"
    run = "--hidden-dropout 0 --attention-dropout 0 --mock-data --train-iters 1 --lr 1"
    return make_run_plan(config_from(f"{model} {run} {flags}"), 1, 96)


def test_recomputation_without_need_is_reported() -> None:
    full = plan_with("--micro-batch-size 1 --recompute-granularity full --recompute-method uniform")
    needed = unused_resources.planned_peak(plan_with("--micro-batch-size 1"))
    (warning,) = unused_resources.unused_memory(full, needed / 0.89)
    assert warning.startswith("recomputation of 33% of the FLOPs is not needed: without --recompute-granularity and ")
    assert "--recompute-method a rank has " in warning
    assert unused_resources.planned_peak(full) < needed
    assert unused_resources.unused_memory(full, needed / 0.91) == []
    few_flops = plan_with("--micro-batch-size 1 --recompute-granularity selective --recompute-modules layernorm")
    assert unused_resources.unused_memory(few_flops, 1e15) == []


def test_memory_for_larger_micro_batches_is_reported() -> None:
    plan = plan_with("--micro-batch-size 2 --global-batch-size 8")
    needed = unused_resources.planned_peak(plan_with("--micro-batch-size 4 --global-batch-size 8"))
    (warning,) = unused_resources.unused_memory(plan, 2.1 * needed)
    assert "a step has 4 micro-batches: with --micro-batch-size 4 it has 2, and a rank has " in warning
    assert unused_resources.unused_memory(plan, 1.9 * needed) == []
    one_microbatch = plan_with("--micro-batch-size 8 --global-batch-size 8")
    assert unused_resources.unused_memory(one_microbatch, 1e15) == []
    long_microbatches = plan_with("--micro-batch-size 8 --global-batch-size 64")
    assert unused_resources.unused_memory(long_microbatches, 1e15) == []  # 8,192 tokens already


def test_a_run_reports_what_its_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(unused_resources, "total_memory", lambda device: 80 * 2**30)
    plan = plan_with("--micro-batch-size 1 --global-batch-size 8 --no-bf16")
    warnings = unused_resources.unused_resources(plan, ONE_RANK, "cuda")
    for text in ("7 of 8 GPUs", "leaves the tensor cores", "more than half of the GPU's memory"):
        assert sum(text in warning for warning in warnings) == 1, warnings
    no_training = plan_with("--micro-batch-size 1 --global-batch-size 8 --skip-train")
    assert not any("memory" in text for text in unused_resources.unused_resources(no_training, ONE_RANK, "cuda"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(unused_resources, "cpu_count", lambda: 64)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    (warning,) = unused_resources.unused_resources(plan, ONE_NODE, "cpu")
    assert "leave most of 64 cores idle" in warning
    monkeypatch.setattr("os.cpu_count", lambda: 128)  # each rank may have 64 of them for itself
    assert unused_resources.unused_resources(plan, ONE_NODE, "cpu") == []


def test_log_has_the_variables_of_nccl_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(startup.COLLECTIVE_PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # megalite sets it, too
    monkeypatch.setenv("MEGALITE_ATTENTION", "auto")
    names = [setting.partition("=")[0] for setting in startup.variables_of_run(is_cuda=True).split()]
    assert names.count("TORCH_NCCL_DUMP_ON_TIMEOUT") == 1 and names[-2:] == ["NCCL_DEBUG", "NCCL_SOCKET_IFNAME"]
    without_gpus = startup.variables_of_run(is_cuda=False)
    assert "MEGALITE_ATTENTION=auto" in without_gpus and "NCCL" not in without_gpus


def test_run_logs_its_warnings(tmp_path: Path) -> None:
    flags = [*SMALL_RUN, "--train-iters", "1", "--device", "cpu", "--run-dir", str(tmp_path)]
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_TIMEOUT": "1800"}
    result = programs.run_python("pretrain_gpt.py", *flags, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING: TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks compare every collective before they do it" in log
    assert "NCCL_TIMEOUT" not in log.partition("WARNING")[2]  # it means nothing without a GPU
