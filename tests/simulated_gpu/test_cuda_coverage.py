"""What CUDA's branches do on a simulated card, by cases that together pass every place of the source that speaks of one
(cuda_coverage.py), each in a process of its own; and that there is no place that none passes."""

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
from pairwise import rarely
from ranks import run_ranks
from train_cases import SMALL, config_from, pretrain, run_from

from examples import quickstart
from megalite.config.validation import find_problems
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import LaunchError, RankInfo
from simulated_gpu.cuda_coverage import Mention, Watch, mentions, of_text
from simulated_gpu.simulator import cuda
from simulated_gpu.simulator.device import Card, simulated
from simulated_gpu.simulator.graphs import CUDAGraph
from simulated_gpu.test_trainer import LLAMA as UNGROUPED

ROOT = Path(__file__).resolve().parents[2]
# the parts of the report on a card: processes of their own, which its rehearsal starts (test_gpu_report_parts.py)
REHEARSED = ("tools/bench/gpu_report_", "tools/bench/kernels.py")
LLAMA = f"{UNGROUPED} --group-query-attention --num-query-groups 2"
ON_CARD = "--device cuda --kernels torch --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --num-layers 1 --global-batch-size 4"
FLAGS = [*SMALL, *f"{ON_CARD} --train-iters 9 {LLAMA}".split()]
NAME = "NVIDIA H100 80GB HBM3"
RANK, INDEX = 0, 1  # INDEX: of the card: not the one that CUDA takes by itself


def run(flags: str, folder: Path) -> str:
    """A run as its rank does it, to its end: what it printed."""
    config = config_from([*SMALL, *f"{ON_CARD} {flags} --run-dir {folder}".split()])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert pretrain(config, RankInfo(RANK, 1, INDEX, INDEX + 1)) == 0, said.getvalue()
    return said.getvalue()


def losses(said: str) -> list[str]:
    return re.findall(r"step +\d+/\d+  loss ([0-9.]+)", said)


def everything_on(card: Card, folder: Path) -> None:
    """A run in bf16 with all that looks on: memory of the rank's own card, profiler, history, timers and peak."""
    flags = f"{LLAMA} --bf16 --train-iters 2 --save {folder} --save-interval 1 --eval-interval 1 --timing-log-level 2"
    flags += " --log-memory-interval 1 --log-device-memory-used --empty-unused-memory-level 2 --profile-pipeline 2"
    flags += f" --profile --profile-step-start 0 --profile-step-end 2 --tensorboard-dir {folder}/board"
    flags += f" --log-memory-to-tensorboard --record-memory-history --memory-snapshot-path {folder}/history.pickle"
    empty = mock.patch.object(torch.cuda, "empty_cache", wraps=torch.cuda.empty_cache)
    with (
        mock.patch("megalite.training.logging.metrics_logger.MetricsLogger.log_step", autospec=True) as point,
        empty as given_back,
    ):
        said = run(flags, folder)
    line = r"\[Rank 0\] \(after \d iterations\) memory \(MB\) \| allocated: ([0-9.]+) \| max allocated: ([0-9.]+) \| "
    line += r"reserved: ([0-9.]+) \| max reserved: ([0-9.]+) \| total device memory used: ([0-9.]+)"
    rows = [[float(x) for x in row] for row in re.findall(line, said)]
    assert len(rows) == 2
    for allocated, most, reserved, most_reserved, used in rows:
        assert 0 < allocated < most <= reserved <= most_reserved and used == reserved + 512
    memory = [call.args[-1] for call in point.call_args_list]
    names = ["mem-allocated-bytes", "mem-allocated-count", "mem-max-allocated-bytes", "mem-reserved-bytes"]
    assert [sorted(point) for point in memory] == [names] * 2
    assert all(value > 0 for point in memory for value in point.values())
    assert given_back.call_count == 2 * 2  # before and after each update
    assert cuda.machine().runtime_calls == ["cudaProfilerStart", "cudaProfilerStop"]
    assert (folder / f"history_{RANK}.pickle").read_bytes() == cuda.SNAPSHOT
    assert f"peak FLOP/s       989 TFLOP/s ({NAME} bf16 dense)" in said
    for name in ("forward-backward", "all-grads-sync", "optimizer", "forward-compute", "backward-compute", "evaluate"):
        assert f"    {name} ..." in said, name
    assert "scheduled an async checkpoint save at iteration       1" in said  # auto: in the background
    assert said.count(" in the background (") == 2


def graphs(card: Card, folder: Path) -> None:
    """Replayed micro-batches in fp32 with torch's profiler, saved in the foreground, train as eager ones with activations
    on the host, which change no bit."""
    from torch import profiler

    real, kinds = profiler.profile, list[Any]()

    def profile(activities: list[Any], **more: Any) -> Any:
        """Kineto of a CPU's torch cannot look at a card, and says so at each operation."""
        kinds.extend(activities)
        return real(activities=activities[:1], **more)

    common, made = f"{LLAMA} --train-iters 3 --global-batch-size 8", folder / "graphs"
    flags = f"{common} --cuda-graph-impl local --profile --use-pytorch-profiler --profile-step-start 1"
    flags += f" --profile-step-end 2 --save {made} --save-interval 3 --no-async-save"
    replay = mock.patch.object(CUDAGraph, "replay", autospec=True, side_effect=CUDAGraph.replay)
    with mock.patch.object(profiler, "profile", profile), replay as replays:
        said = run(flags, made)
    twin = run(f"{common} --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 64", folder / "eager")
    assert replays.call_count == 3 * 4 - 1
    assert len(losses(said)) == 3 and losses(said) == losses(twin)
    assert [path.name for path in (made / "trace").iterdir()] == ["rank-000.json.gz"]
    assert kinds == [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    assert "saved iter_0000003" in said


def no_memory_for_a_copy(card: Card, folder: Path) -> None:
    """The background save writes the state itself, through the small pinned buffer."""
    from megalite.checkpoint.manager.async_save import HostStager

    with mock.patch.object(HostStager, "_parts", side_effect=RuntimeError("cudaHostAlloc: out of memory\nmore")):
        said = run(f"--train-iters 2 --save {folder} --save-interval 1", folder)
    assert "rank 0 has no memory for a copy of what it saves (cudaHostAlloc: out of memory): the state" in said
    assert said.count(" in the background (") == 2


def two_ranks(card: Card, folder: Path) -> None:
    """Weights gathered, gradients reduced."""
    from megalite.training.train_step import train_step

    run = run_from([*SMALL, *f"{ON_CARD} --train-iters 2 --ddp-bucket-size 2000".split()], device=card.device)
    for _ in range(2):
        train_step(run)


def who_computes(card: Card, folder: Path) -> None:
    """Choices by card, and by what is installed."""
    from megalite.kernels import attention, dispatch
    from megalite.models import torch_compile as compiled
    from megalite.optim.adamw import ApexAdamW

    dispatch.set_kernel_options("auto", "auto")
    assert dispatch.num_sms(card.device) == 132 and dispatch.sm_major(card.device) == 9
    assert not ApexAdamW.available()
    (folder / "amp_C.py").write_text("")
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        assert ApexAdamW.available()
    attention.describe_backend("cuda")
    x = torch.zeros(4, 1, 2, 8, dtype=torch.bfloat16, device=card.device)
    ways = {(8, 0): "flash", (9, 0): "cudnn", (10, 0): "cudnn"}

    def chosen() -> Iterator[str]:
        for capability in ways:
            cuda.machine().capability = capability
            yield attention.select_backend(x, x, has_documents=False)

    assert [*chosen()] == [*ways.values()]
    dispatch.runs_triton.cache_clear()
    absent = [mock.patch.object(module, "triton_installed", lambda: False) for module in (dispatch, compiled)]
    with absent[0], absent[1]:
        assert [*chosen()] == [*ways.values()]
        assert dispatch.describe_kernels("cuda") == "torch (triton is not installed)"
        with pytest.raises(compiled.MissingPackageError, match="pip install triton"):
            compiled.check_compile("cuda")
    dispatch.runs_triton.cache_clear()


def refused(card: Card, folder: Path) -> None:
    """What a start says where something is missing; more of it in test_start.py."""
    from megalite.training.job.preflight import SetupError, choose_device
    from tools.bench import kernels

    told = {
        1: r"rank 1 of 4 on \S+ could not join the others on this machine",
        2: "local rank 2 has no GPU, 2 visible: use --nproc 2 or less",
    }
    how = dict(device="cuda", startup_timeout=datetime.timedelta(seconds=1))
    for rank, text in told.items():
        with pytest.raises(LaunchError, match=f"^{text}"):
            with process_group(RankInfo(1, 4, rank, 4, f"file://{folder}/meet"), **how):  # type: ignore[arg-type]
                pass
    assert choose_device("auto") == "cuda"
    cuda.machine().cards = 0
    assert choose_device("auto") == "cpu" and kernels.device_problems("cuda")[0].startswith(
        "torch sees no CUDA device;"
    )
    with pytest.raises(SetupError, match="^device=cuda but torch sees no GPU;"):
        choose_device("cuda")


def clock_and_probe(card: Card, folder: Path) -> None:
    """What tools/bench measures with, and the machine as it tells it."""
    from tools.bench import gpu_report_probe, kernel_bench
    from tools.bench.kernel_case import ProblemSizes
    from tools.bench.kernels import CASES

    kernel_bench.WARMUP_S = 0.0
    bench = kernel_bench.KernelBench(card.device, 3, torch.float32, tiny=True)
    x = torch.zeros(1 << 14, device=card.device)
    case, sizes = (
        next(case for case in CASES if case.op == "rms_norm"),
        ProblemSizes(16, 128, torch.float32, card.device),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        row = bench.measure_one(case, sizes, "torch", lambda: lambda: (x * 2).sum())
    assert not bench.errors and min(bench.copy_gb_s, bench.matmul_tflops) > 0
    assert row is not None and row.us > 0 and row.extra_mib == pytest.approx(1 / 16, rel=0.1)  # x * 2, beside x
    facts = gpu_report_probe.facts()
    assert (facts["device"], facts["memory"]) == (NAME, 80 << 30)


def _of_rank(program: Any, folder: Path, *ranks: RankInfo, contender: str = "megalite") -> dict[str, Any]:
    """What one rank of tools/benchmark.py leaves."""
    task = {"flags": FLAGS, "warmup": 1, "steps": 2, "output_dir": str(folder), "contender": contender, "nproc": 1}
    assert not program(*ranks, task)
    return json.loads((folder / f"rank{ranks[0].rank if ranks else 0:05d}.json").read_text())


def benchmark(card: Card, folder: Path) -> None:
    from tools import benchmark_rank

    made = _of_rank(benchmark_rank.main, folder)
    assert made["device"] == NAME and made["peak_tflops"] == 66.9
    assert made["memory"] > 100_000 and len(made["losses"]) == 3


class Profiler:
    """In the place of torch's, which a CPU's build has not for cards: what it would write of a step."""

    def __init__(self, activities: list[Any]):
        self.activities = activities
        self.start = self.stop = lambda: None

    def export_chrome_trace(self, path: str) -> None:
        kernel = {"cat": "kernel", "ts": 0.0}
        events = [{**kernel, "name": "ncclDevKernel_AllReduce", "dur": 4e6}, {**kernel, "name": "gemm", "dur": 1e6}]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def _group_of(card: Card, where: str) -> Any:
    """The group is there already."""
    return mock.patch(f"{where}.process_group", lambda *a, **k: contextlib.nullcontext(card.device))


def timeline(card: Card, folder: Path) -> None:
    """Two ranks of tools/benchmark.py, and what a profiler tells of them."""
    from torch import profiler

    from tools import benchmark_rank

    rank, kinds = dist.get_rank(), {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA}
    supported = mock.patch.object(profiler, "supported_activities", lambda: kinds)
    with _group_of(card, "tools.bench.systems"), supported, mock.patch.object(profiler, "profile", Profiler):
        made = _of_rank(benchmark_rank.run_megalite, folder, RankInfo(rank, 2, rank, 2))
    assert rank or made["timeline"] == {"communication_s": 4.0, "hidden_s": 1.0}


def peer(card: Card, folder: Path) -> None:
    """What tools/benchmark.py compares with."""
    from tools.bench.hf_baseline import run_baseline

    assert _of_rank(run_baseline, folder, RankInfo(), contender="peer fp32")["memory"] > 100_000


def layouts_of_the_quickstart(card: Card, folder: Path) -> None:
    """One for every number of cards."""
    machine = cuda.machine()
    for cards, world in ((0, 4), (1, 1), (2, 2), (3, 2), (4, 4), (8, 4)):
        machine.cards = cards
        file, flags, _ = quickstart.choose_layout()
        assert (int(flags[1]) if flags else 1) == world
        assert not find_problems(config_from(["--config", str(ROOT / file), *flags]), world)


def cluster(card: Card, folder: Path) -> None:
    """What tools/check_cluster.py measures between two."""
    from tools import check_cluster

    words = ["--sizes", "4096", "--times", "1", "--slow", "0", "--json", str(folder / "found.json")]
    args = check_cluster.build_parser().parse_args(words)
    with _group_of(card, "tools.check_cluster"):
        assert check_cluster.check(RankInfo(dist.get_rank(), 2, dist.get_rank(), 2), args) == 0
    if dist.get_rank() == 0:
        kinds = {row["kind"] for row in json.loads((folder / "found.json").read_text())["rows"]}
        assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "message"}


def planned(card: Card, folder: Path) -> None:
    """The card as a plan measures it and as a run told of it; what a verification keeps, and a benchmark refuses there."""
    from tools.bench.systems import read_config
    from tools.planning.calibrate import measure
    from tools.planning.compare import cluster_of_run
    from tools.plots.run_data import RunData
    from tools.verification.shrink import shrink

    config = config_from(FLAGS)
    with _group_of(card, "tools.planning.calibrate"):
        measure(RankInfo(), {"config": config, "vocab_size": 93, "seconds": 0.1, "result_dir": str(folder)})
    measured = json.loads((folder / "rank00000.json").read_text())
    assert measured["kind"] == "h100" and "H100" in measured["device"]
    assert all(time > 0 for time in measured["blocks"]["layer"][:2])
    about = {"device": "cuda", "machine": {"card": torch.cuda.get_device_name(INDEX)}}
    told = RunData(folder, "run", events=[{"event": "started", "run_info": about}])
    assert cluster_of_run(told, SimpleNamespace(world=1)).device.name == "h100"  # type: ignore[arg-type]
    assert shrink(config, 2, 1).config.parallel.device == "cuda"
    options: Any = SimpleNamespace(nproc=1, memory_gib=4.0, peer=None)
    assert read_config(FLAGS, options)[1] == ["memory_gib=4 is for a CPU; drop it, or use --device cpu"]


def ablations(card: Card, folder: Path) -> None:
    """Each variant of a step runs on the card, with its memory."""
    from tools.bench.ablations import run_ablations
    from tools.bench.gpu_report_runs import ABLATIONS, Ablation, VariantOptions

    task = {"group": "mine", "flags": FLAGS, "output_dir": str(folder), "plan": {}, "seconds": 60, "tiny": True}
    chunk = Ablation("chunk", on=VariantOptions(chunk_mib=1), gpu_only_reason="no card is here")
    with mock.patch.dict(ABLATIONS, {"mine": (chunk,)}):
        assert run_ablations(RankInfo(), task) == 0
    (made,) = json.loads((folder / "ablations.json").read_text())["rows"]
    assert made["status"] == "ok" and all(side["memory"] > 100_000 for side in made["sides"])


OFTEN = (everything_on, graphs, no_memory_for_a_copy, who_computes, refused, clock_and_probe, benchmark, cluster)
OFTEN += (planned, layouts_of_the_quickstart, ablations)
CASES = {case.__name__: case for case in (*OFTEN, two_ranks, peer, timeline)}
WORLD = {"two_ranks": 2, "timeline": 2, "cluster": 2}


def tried(name: str, folder: str) -> None:
    """In a rank's process."""
    with simulated(index=INDEX, cards=2) as card:
        CASES[name](card, Path(folder))


def watched(name: str, folder: str) -> set[Mention]:
    watch = Watch(mentions())
    with watch.watching():
        tried(name, folder)
    return watch.visited()


@pytest.mark.parametrize("name", rarely([*CASES], [case.__name__ for case in OFTEN], str))
def test_cuda_branches_on_a_simulated_gpu(name: str, tmp_path: Path) -> None:
    run_ranks(WORLD.get(name, 1), tried, name, str(tmp_path), timeout=110)


@pytest.mark.parametrize(("cards", "ranks"), [(0, 4), (1, 1), (2, 2), (4, 4)])
def test_quickstart_counts_its_ranks(
    cards: int, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The speed is of all ranks together; a pipeline of two stages need not be of four ranks."""
    log = {"train/loss": 1.0, "tokens": 5, "perf/mfu": None, "perf/tokens_per_s_per_gpu": 10.0}
    log |= {"perf/tflops_per_gpu": 2.0, "val/valid/loss": 1.5}
    monkeypatch.setattr(quickstart, "RUN", tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"outcome": "done"}))
    monkeypatch.setattr(quickstart, "read_metrics", lambda folder: [log])
    for name, value in (("prepare_data", None), ("compare_with_one_process", (0.0, 1)), ("run_command", "")):
        monkeypatch.setattr(quickstart, name, lambda *a, value=value, **k: value)
    monkeypatch.setattr("sys.argv", ["quickstart.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with cuda.installed([], cards=cards):
        assert quickstart.main() == 0
    said = capsys.readouterr().out
    assert f"{10 * ranks} tokens/s, {2 * ranks:.3f} TFLOP/s, MFU n/a ({ranks} ranks together)" in " ".join(said.split())


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_cuda_branch_is_covered(tmp_path: Path) -> None:
    seen = set()
    for name in CASES:
        (tmp_path / name).mkdir()
        for rank in run_ranks(WORLD.get(name, 1), watched, name, str(tmp_path / name), timeout=400):
            seen |= rank
    left = [str(place) for place in mentions() if place not in seen and not place.file.startswith(REHEARSED)]
    assert not left and len(seen) > 100


# ---- what that check sees, and what it must not take for seen

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
    assert [(place.begin[0], place.text) for place in sorted(of_text(TEXT, "text.py"))] == PLACES


@pytest.mark.parametrize(("call", "seen"), [("turned(X, 'cpu')", [5]), ("in_thread(X, 'cuda')", [5, 8, 9, 10, 12])])
def test_coverage_sees_only_executed_branches(call: str, seen: list[int], tmp_path: Path) -> None:
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    space: dict[str, object] = {"Thread": threading.Thread}
    exec(compile(TEXT, str(path), "exec"), space)  # noqa: S102
    exec("X = SimpleNamespace(is_cuda=True)", space)  # noqa: S102
    watch = Watch([*of_text(TEXT, "text.py")], tmp_path)
    with watch.watching():
        eval(call, space)  # noqa: S307
    assert [place.begin[0] for place in sorted(watch.visited())] == seen
