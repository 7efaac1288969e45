"""The CUDA branches of the source on a simulated GPU.

Each case runs in its own process, and together they cover every mention of CUDA in the source (cuda_coverage.py).
"""

import contextlib
import datetime
import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pairwise import nightly_except
from ranks import run_ranks
from train_cases import SMALL_RUN, config_from, pretrain, run_from

from examples import quickstart
from megalite.config.validation import find_problems
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import LaunchError, RankInfo
from simulated_gpu.cuda_coverage import CoverageTracer, Mention, mentions, mentions_in
from simulated_gpu.simulator import cuda, triton_driver
from simulated_gpu.simulator.device import SimulatedGpu, simulated
from simulated_gpu.simulator.graphs import CUDAGraph
from simulated_gpu.test_trainer import LLAMA as UNGROUPED

ROOT = Path(__file__).resolve().parents[2]
# parts of the GPU report: separate processes, which test_gpu_report_parts.py runs
RUN_ELSEWHERE = ("tools/bench/gpu_report_", "tools/bench/kernels.py")
LLAMA = f"{UNGROUPED} --group-query-attention --num-query-groups 2"
ON_GPU = "--device cuda --kernels torch --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --num-layers 1 --global-batch-size 4"
FLAGS = [*SMALL_RUN, *f"{ON_GPU} --train-iters 9 {LLAMA}".split()]
NAME = "NVIDIA H100 80GB HBM3"
RANK, INDEX = 0, 1  # INDEX of the GPU, which is not CUDA's default one


def run(flags: str, directory: Path) -> str:
    """Run training to its end as a rank does, and return its output."""
    config = config_from([*SMALL_RUN, *f"{ON_GPU} {flags} --run-dir {directory}".split()])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        assert pretrain(config, RankInfo(RANK, 1, INDEX, INDEX + 1)) == 0, output.getvalue()
    return output.getvalue()


def losses(output: str) -> list[str]:
    return re.findall(r"step +\d+/\d+  loss ([0-9.]+)", output)


def everything_on(gpu: SimulatedGpu, directory: Path) -> None:
    """Run bf16 training with all monitoring: memory of the rank's own GPU, profiler, history, timers and peak."""
    flags = (
        f"{LLAMA} --bf16 --train-iters 2 --save {directory} --save-interval 1 --eval-interval 1 --timing-log-level 2"
    )
    flags += " --log-memory-interval 1 --log-device-memory-used --empty-unused-memory-level 2 --profile-pipeline 2"
    flags += f" --profile --profile-step-start 0 --profile-step-end 2 --tensorboard-dir {directory}/board"
    flags += f" --log-memory-to-tensorboard --record-memory-history --memory-snapshot-path {directory}/history.pickle"
    cache_patch = mock.patch.object(torch.cuda, "empty_cache", wraps=torch.cuda.empty_cache)
    with (
        mock.patch("megalite.training.logging.metrics_logger.MetricsLogger.log_step", autospec=True) as log_step,
        cache_patch as empty_cache,
    ):
        output = run(flags, directory)
    line = r"\[Rank 0\] \(after \d iterations\) memory \(MB\) \| allocated: ([0-9.]+) \| max allocated: ([0-9.]+) \| "
    line += r"reserved: ([0-9.]+) \| max reserved: ([0-9.]+) \| total device memory used: ([0-9.]+)"
    rows = [[float(x) for x in row] for row in re.findall(line, output)]
    assert len(rows) == 2
    for allocated, max_allocated, reserved, max_reserved, used in rows:
        assert 0 < allocated < max_allocated <= reserved <= max_reserved and used == reserved + 512
    memory = [call.args[-1] for call in log_step.call_args_list]
    names = ["mem-allocated-bytes", "mem-allocated-count", "mem-max-allocated-bytes", "mem-reserved-bytes"]
    assert [sorted(metrics) for metrics in memory] == [names] * 2
    assert all(value > 0 for metrics in memory for value in metrics.values())
    assert empty_cache.call_count == 2 * 2  # before and after each update
    assert cuda.machine().runtime_calls == ["cudaProfilerStart", "cudaProfilerStop"]
    assert (directory / f"history_{RANK}.pickle").read_bytes() == cuda.SNAPSHOT
    assert f"peak FLOP/s       989 TFLOP/s ({NAME} bf16 dense)" in output
    for name in ("forward-backward", "all-grads-sync", "optimizer", "forward-compute", "backward-compute", "evaluate"):
        assert f"    {name} ..." in output, name
    assert "scheduled an async checkpoint save at iteration       1" in output  # auto means in the background
    assert output.count(" in the background (") == 2


def graphs(gpu: SimulatedGpu, directory: Path) -> None:
    """Compare replayed micro-batches with eager ones, bit by bit.

    The replayed run is in fp32 with torch's profiler and saves in the foreground; the eager one offloads activations.
    """
    from torch import profiler

    original, kinds = profiler.profile, list[Any]()

    def profile(activities: list[Any], **options: Any) -> Any:
        """Profile the CPU only: Kineto in a CPU build of torch cannot profile a GPU and warns at each operation."""
        kinds.extend(activities)
        return original(activities=activities[:1], **options)

    common, graph_dir = f"{LLAMA} --train-iters 3 --global-batch-size 8", directory / "graphs"
    flags = f"{common} --cuda-graph-impl local --profile --use-pytorch-profiler --profile-step-start 1"
    flags += f" --profile-step-end 2 --save {graph_dir} --save-interval 3 --no-async-save"
    replay = mock.patch.object(CUDAGraph, "replay", autospec=True, side_effect=CUDAGraph.replay)
    with mock.patch.object(profiler, "profile", profile), replay as replays:
        output = run(flags, graph_dir)
    eager_output = run(f"{common} --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 64", directory / "eager")
    assert replays.call_count == 3 * 4 - 1
    assert len(losses(output)) == 3 and losses(output) == losses(eager_output)
    assert [path.name for path in (graph_dir / "trace").iterdir()] == ["rank-000.json.gz"]
    assert kinds == [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    assert "saved iter_0000003" in output


def no_memory_for_a_copy(gpu: SimulatedGpu, directory: Path) -> None:
    """Save in the background without memory for a copy, through the small pinned buffer."""
    from megalite.checkpoint.manager.async_save import HostStager

    with mock.patch.object(HostStager, "_parts", side_effect=RuntimeError("cudaHostAlloc: out of memory\nmore")):
        output = run(f"--train-iters 2 --save {directory} --save-interval 1", directory)
    assert "rank 0 has no memory for a copy of what it saves (cudaHostAlloc: out of memory): the state" in output
    assert output.count(" in the background (") == 2


def two_ranks(gpu: SimulatedGpu, directory: Path) -> None:
    """Train on two ranks, with weights gathered and gradients reduced."""
    from megalite.training.train_step import train_step

    run = run_from([*SMALL_RUN, *f"{ON_GPU} --train-iters 2 --ddp-bucket-size 2000".split()], device=gpu.device)
    for _ in range(2):
        train_step(run)


def who_computes(gpu: SimulatedGpu, directory: Path) -> None:
    """Select kernels and backends by GPU and by the installed packages."""
    from megalite.kernels import attention, dispatch
    from megalite.optim.adamw import ApexAdamW
    from megalite.training.job import preflight

    dispatch.set_kernel_options("auto", "auto")
    assert dispatch.num_sms(gpu.device) == 132 and dispatch.sm_major(gpu.device) == 9
    assert not ApexAdamW.available()
    (directory / "amp_C.py").write_text("")
    with mock.patch.object(sys, "path", [str(directory), *sys.path]):
        assert ApexAdamW.available()
    attention.describe_backend("cuda")
    x = torch.zeros(4, 1, 2, 8, dtype=torch.bfloat16, device=gpu.device)
    backends = {(8, 0): "flash", (9, 0): "cudnn", (10, 0): "cudnn"}

    def chosen_backends() -> Iterator[str]:
        for capability in backends:
            cuda.machine().capability = capability
            yield attention.select_backend(x, x, has_documents=False)

    assert [*chosen_backends()] == [*backends.values()]
    dispatch.runs_triton.cache_clear()
    without_triton = [mock.patch.object(module, "triton_installed", lambda: False) for module in (dispatch, preflight)]
    with without_triton[0], without_triton[1]:
        assert [*chosen_backends()] == [*backends.values()]
        assert dispatch.describe_kernels("cuda") == "torch (triton is not installed)"
        with pytest.raises(preflight.MissingPackageError, match="pip install triton"):
            preflight.check_compile("cuda")
    dispatch.runs_triton.cache_clear()


def recurrences_of_a_package(gpu: SimulatedGpu, directory: Path) -> None:
    """Select flash-linear-attention: Hopper needs a newer Triton, and verify keeps the option in fp32."""
    from megalite.kernels import dispatch
    from tools import verify

    args, argv = verify.build_parser().parse_known_args(
        [
            *SMALL_RUN,
            *"--preset tiny-delta --vocab-size 64 --linear-attention-kernel fla --device cuda --train-iters 9".split(),
        ]
    )
    for dtype, kernel in {"float32": "fla", "float64": "auto"}.items():
        args.dtype = dtype
        assert verify.prepare_configs(args, argv)[0].config.parallel.linear_attention_kernel == kernel
    replaced: dict[str, Any] = {"fla_version": lambda: "0.6.0", "import_fla": lambda: None}
    with mock.patch.multiple(dispatch, **replaced, triton_version=lambda: "3.6.0"):
        dispatch.set_kernel_options("auto", "auto", "fla")
        cuda.machine().capability = (9, 0)
        with pytest.raises(dispatch.KernelError, match="no gradients on this GPU with Triton 3.6.0; upgrade to Triton"):
            dispatch.runs_fla("cuda")
        cuda.machine().capability = (10, 0)
        assert dispatch.runs_fla("cuda")
    dispatch.set_kernel_options("auto", "auto")


def refused(gpu: SimulatedGpu, directory: Path) -> None:
    """Start with something missing, and check the messages; test_start.py has more of them."""
    from megalite.training.job.preflight import SetupError, choose_device
    from tools.bench import kernels

    messages = {
        1: r"rank 1 of 4 on \S+ could not join the others on this machine",
        2: "local rank 2 has no GPU, 2 visible: use --nproc 2 or less",
    }
    options = dict(device="cuda", startup_timeout=datetime.timedelta(seconds=1))
    for rank, text in messages.items():
        with pytest.raises(LaunchError, match=f"^{text}"):
            with process_group(RankInfo(1, 4, rank, 4, f"file://{directory}/meet"), **options):  # type: ignore[arg-type]
                pass
    assert choose_device("auto") == "cuda"
    cuda.machine().num_gpus = 0
    assert choose_device("auto") == "cpu" and kernels.device_problems("cuda")[0].startswith(
        "torch sees no CUDA device;"
    )
    with pytest.raises(SetupError, match="^device=cuda but torch sees no GPU;"):
        choose_device("cuda")


def clock_and_probe(gpu: SimulatedGpu, directory: Path) -> None:
    """Use the timer of tools/bench, and its probe of the machine."""
    from tools.bench import gpu_report_probe, kernel_bench
    from tools.bench.kernel_cases import TINY_SIZES, list_cases

    bench = kernel_bench.KernelBench(gpu.device, 3, torch.float32, tiny=True)
    x = torch.zeros(1 << 14, device=gpu.device)
    case, sizes = list_cases(TINY_SIZES, torch.float32, gpu.device, ["rms_norm"], "forward")[0]
    with contextlib.redirect_stdout(io.StringIO()):
        row = bench.measure_one(case, sizes, "torch", lambda: lambda: (x * 2).sum())
    assert not bench.errors and min(bench.copy_gb_s, bench.matmul_tflops) > 0
    assert row is not None and row.us > 0 and row.extra_mib == pytest.approx(1 / 16, rel=0.1)  # x * 2, in addition to x
    facts = gpu_report_probe.facts()
    assert (facts["device"], facts["memory"]) == (NAME, 80 << 30)


def _rank_result(program: Any, directory: Path, *ranks: RankInfo, contender: str = "megalite") -> dict[str, Any]:
    """Return the result that one rank of tools/benchmark.py writes."""
    task = {"flags": FLAGS, "warmup": 1, "steps": 2, "output_dir": str(directory), "contender": contender, "nproc": 1}
    assert not program(*ranks, task)
    return json.loads((directory / f"rank{ranks[0].rank if ranks else 0:05d}.json").read_text())


def benchmark(gpu: SimulatedGpu, directory: Path) -> None:
    from tools import benchmark_rank

    result = _rank_result(benchmark_rank.main, directory)
    assert result["device"] == NAME and result["peak_tflops"] == 66.9
    assert result["memory"] > 100_000 and len(result["losses"]) == 3


class Profiler:
    """A substitute for torch's GPU profiler, which a CPU build lacks, with the trace of one step."""

    def __init__(self, activities: list[Any]):
        self.activities = activities
        self.start = self.stop = lambda: None

    def export_chrome_trace(self, path: str) -> None:
        kernel = {"cat": "kernel", "ts": 0.0}
        events = [{**kernel, "name": "ncclDevKernel_AllReduce", "dur": 4e6}, {**kernel, "name": "gemm", "dur": 1e6}]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def _patch_group(gpu: SimulatedGpu, where: str) -> Any:
    """Replace process_group, because the group exists already."""
    return mock.patch(f"{where}.process_group", lambda *a, **k: contextlib.nullcontext(gpu.device))


def timeline(gpu: SimulatedGpu, directory: Path) -> None:
    """Run two ranks of tools/benchmark.py with a profiler."""
    from torch import profiler

    from tools import benchmark_rank

    rank, kinds = dist.get_rank(), {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA}
    supported = mock.patch.object(profiler, "supported_activities", lambda: kinds)
    with _patch_group(gpu, "tools.bench.systems"), supported, mock.patch.object(profiler, "profile", Profiler):
        result = _rank_result(benchmark_rank.run_megalite, directory, RankInfo(rank, 2, rank, 2))
    assert rank or result["timeline"] == {"communication_s": 4.0, "hidden_s": 1.0}


def peer(gpu: SimulatedGpu, directory: Path) -> None:
    """Run the peer that tools/benchmark.py compares with."""
    from tools.bench.hf_baseline import run_baseline

    assert _rank_result(run_baseline, directory, RankInfo(), contender="peer fp32")["memory"] > 100_000


def layouts_of_the_quickstart(gpu: SimulatedGpu, directory: Path) -> None:
    """Choose a layout for every number of GPUs."""
    machine = cuda.machine()
    for num_gpus, world in ((0, 4), (1, 1), (2, 2), (3, 2), (4, 4), (8, 4)):
        machine.num_gpus = num_gpus
        file, flags, _ = quickstart.choose_layout()
        assert (int(flags[1]) if flags else 1) == world
        assert not find_problems(config_from(["--config", str(ROOT / file), *flags]), world)


def cluster(gpu: SimulatedGpu, directory: Path) -> None:
    """Run the measurements of tools/check_cluster.py between two ranks."""
    from tools import check_cluster

    argv = ["--sizes", "4096", "--times", "1", "--slow", "0", "--json", str(directory / "measured.json")]
    args = check_cluster.build_parser().parse_args(argv)
    with _patch_group(gpu, "tools.check_cluster"):
        assert check_cluster.check(RankInfo(dist.get_rank(), 2, dist.get_rank(), 2), args) == 0
    if dist.get_rank() == 0:
        kinds = {row["kind"] for row in json.loads((directory / "measured.json").read_text())["rows"]}
        assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "message"}


def planned(gpu: SimulatedGpu, directory: Path) -> None:
    """Calibrate a plan on the GPU, read a run's GPU, shrink a config for verification, refuse memory_gib on a GPU."""
    from tools.bench.systems import read_config
    from tools.planning.calibrate import measure
    from tools.planning.compare import cluster_of_run
    from tools.plots.run_data import RunData
    from tools.verification.shrink import shrink

    config = config_from(FLAGS)
    with _patch_group(gpu, "tools.planning.calibrate"):
        measure(RankInfo(), {"config": config, "vocab_size": 93, "seconds": 0.1, "result_dir": str(directory)})
    measured = json.loads((directory / "rank00000.json").read_text())
    assert measured["kind"] == "h100" and "H100" in measured["device"]
    assert all(time > 0 for time in measured["blocks"]["layer"][:2])
    run_info = {"device": "cuda", "machine": {"gpu": torch.cuda.get_device_name(INDEX)}}
    run_data = RunData(directory, "run", events=[{"event": "started", "run_info": run_info}])
    assert cluster_of_run(run_data, SimpleNamespace(shape=SimpleNamespace(world=1))).device.name == "h100"  # type: ignore[arg-type]
    assert shrink(config, 2, 1).config.parallel.device == "cuda"
    options: Any = SimpleNamespace(nproc=1, memory_gib=4.0, peer=None)
    assert read_config(FLAGS, options)[1] == ["memory_gib=4 is for a CPU; drop it, or use --device cpu"]


WITH_EACH_COMMIT = (
    everything_on,
    graphs,
    no_memory_for_a_copy,
    who_computes,
    recurrences_of_a_package,
    refused,
    clock_and_probe,
    benchmark,
    cluster,
)
WITH_EACH_COMMIT += (planned, layouts_of_the_quickstart)
CASES = {case.__name__: case for case in (*WITH_EACH_COMMIT, two_ranks, peer, timeline)}
WORLD = {"two_ranks": 2, "timeline": 2, "cluster": 2}


def run_case(name: str, directory: str) -> None:
    """Run a case in the process of a rank."""
    triton_driver.install()
    with simulated(index=INDEX, num_gpus=2) as gpu:
        CASES[name](gpu, Path(directory))


def run_traced(name: str, directory: str) -> set[Mention]:
    tracer = CoverageTracer(mentions())
    with tracer.tracing():
        run_case(name, directory)
    return tracer.visited()


@pytest.mark.parametrize("name", nightly_except([*CASES], [case.__name__ for case in WITH_EACH_COMMIT], str))
def test_cuda_branches_on_a_simulated_gpu(name: str, tmp_path: Path) -> None:
    run_ranks(WORLD.get(name, 1), run_case, name, str(tmp_path), timeout=110)


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, 4), (1, 1), (2, 2), (4, 4)])
def test_quickstart_counts_its_ranks(
    num_gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The speed is that of all ranks together, and a pipeline of two stages need not have four ranks."""
    log = {"train/loss": 1.0, "tokens": 5, "perf/mfu": None, "perf/tokens_per_s_per_gpu": 10.0}
    log |= {"perf/tflops_per_gpu": 2.0, "val/valid/loss": 1.5}
    monkeypatch.setattr(quickstart, "RUN", tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"outcome": "done"}))
    monkeypatch.setattr(quickstart, "read_metrics", lambda directory: [log])
    for name, value in (("prepare_data", None), ("compare_with_one_process", (0.0, 1)), ("run_command", "")):
        monkeypatch.setattr(quickstart, name, lambda *a, value=value, **k: value)
    monkeypatch.setattr("sys.argv", ["quickstart.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with cuda.installed([], num_gpus=num_gpus):
        assert quickstart.main() == 0
    output = capsys.readouterr().out
    assert f"{10 * ranks} tokens/s, {2 * ranks:.3f} TFLOP/s, MFU n/a ({ranks} ranks together)" in " ".join(
        output.split()
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_cuda_branch_is_covered(tmp_path: Path) -> None:
    covered = set()
    for name in CASES:
        (tmp_path / name).mkdir()
        for mentions_of_rank in run_ranks(WORLD.get(name, 1), run_traced, name, str(tmp_path / name), timeout=400):
            covered |= mentions_of_rank
    missing = [str(place) for place in mentions() if place not in covered and not place.file.startswith(RUN_ELSEWHERE)]
    assert not missing and len(covered) > 100


# ---- the mentions and branches that the coverage check must and must not report

TEXT = """from types import SimpleNamespace
torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))
Stream = torch.cuda.synchronize
def turned(x, device: torch.cuda.synchronize):
    if device != "cuda" and turned:
        return 0
    else:
        device = 1
    torch.cuda.synchronize()
    if not x.is_cuda:
        return 5
    return 7 if device == "cuda" else 6
def in_thread(*args):
    thread = Thread(target=turned, args=args)
    thread.start(), thread.join()
"""
PLACES = [(5, "device != 'cuda'"), (8, "device = 1"), (9, "torch.cuda.synchronize"), (10, "x.is_cuda")]
PLACES += [(12, "7"), (12, "device == 'cuda'")]


def test_cuda_mentions_of_a_text() -> None:
    assert [(place.begin[0], place.text) for place in sorted(mentions_in(TEXT, "text.py"))] == PLACES


@pytest.mark.parametrize(("call", "seen"), [("turned(X, 'cpu')", [5]), ("in_thread(X, 'cuda')", [5, 8, 9, 10, 12])])
def test_coverage_sees_only_executed_branches(call: str, seen: list[int], tmp_path: Path) -> None:
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    space: dict[str, object] = {"Thread": threading.Thread}
    exec(compile(TEXT, str(path), "exec"), space)  # noqa: S102
    exec("X = SimpleNamespace(is_cuda=True)", space)  # noqa: S102
    tracer = CoverageTracer([*mentions_in(TEXT, "text.py")], tmp_path)
    with tracer.tracing():
        eval(call, space)  # noqa: S307
    assert [place.begin[0] for place in sorted(tracer.visited())] == seen
