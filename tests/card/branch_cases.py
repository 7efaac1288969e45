"""Runs that together pass every place of the source that speaks of a card, each in a process of its own
(test_branches.py). A case returns what it found; `watched` runs one and adds which places (card/mentions.py) it has
passed."""

import contextlib
import datetime
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from train_cases import SMALL, config_from, run_from

from card.mentions import Mention, Watch, mentions
from card.simulator import cuda
from card.simulator.device import Card, simulated
from card.simulator.graphs import CUDAGraph
from card.test_trainer import LLAMA as UNGROUPED
from megalite.launch.ranks import Ranks

LLAMA = f"{UNGROUPED} --group-query-attention --num-query-groups 2"
ON_CARD = "--device cuda --kernels torch --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --num-layers 1 --global-batch-size 4"
CAPABILITIES = ((8, 0), (9, 0), (10, 0))
RANK, INDEX = 0, 1  # INDEX: of the card: not the one that CUDA takes by itself

Found = dict[str, Any]


def run(flags: str, folder: Path) -> tuple[int, str]:
    """A run as its rank does it: the exit code, and what it printed."""
    from train_cases import pretrain

    config = config_from([*SMALL, *f"{ON_CARD} {flags} --run-dir {folder}".split()])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pretrain(config, Ranks(RANK, 1, INDEX, INDEX + 1))
    return code, said.getvalue()


def everything_on(card: Card, folder: Path) -> Found:
    """A run in bf16 with all that looks on."""
    flags = f"{LLAMA} --bf16 --train-iters 2 --save {folder} --save-interval 1 --eval-interval 1 --timing-log-level 2"
    flags += " --log-memory-interval 1 --log-device-memory-used --empty-unused-memory-level 2 --profile-pipeline 2"
    flags += f" --profile --profile-step-start 0 --profile-step-end 2 --tensorboard-dir {folder}/board"
    flags += f" --log-memory-to-tensorboard --record-memory-history --memory-snapshot-path {folder}/history.pickle"
    empty = mock.patch.object(torch.cuda, "empty_cache", wraps=torch.cuda.empty_cache)
    with mock.patch("megalite.train.tell.metrics.Reporter.step", autospec=True) as point, empty as given_back:
        code, said = run(flags, folder)
    calls, history = cuda.machine().runtime_calls, (folder / f"history_{RANK}.pickle").read_bytes()
    memory = [call.args[-1] for call in point.call_args_list]
    found = {"code": code, "said": said, "calls": calls, "history": history, "memory": memory}
    return {**found, "given_back": given_back.call_count}


def graphs(card: Card, folder: Path) -> Found:
    """Replayed micro-batches in fp32 with torch's profiler, saved in the foreground."""
    from torch import profiler

    real, kinds = profiler.profile, list[Any]()

    def profile(activities: list[Any], **more: Any) -> Any:
        """Kineto of a CPU's torch cannot look at a card, and says so at each operation."""
        kinds.extend(activities)
        return real(activities=activities[:1], **more)

    flags = f"{LLAMA} --train-iters 3 --cuda-graph-impl local --profile --use-pytorch-profiler --profile-step-start 1"
    flags += f" --profile-step-end 2 --save {folder} --save-interval 3 --no-async-save --global-batch-size 8"
    replay = mock.patch.object(CUDAGraph, "replay", autospec=True, side_effect=CUDAGraph.replay)
    with mock.patch.object(profiler, "profile", profile), replay as replays:
        code, said = run(flags, folder)
    made = sorted(path.name for path in (folder / "trace").iterdir())
    return {"code": code, "said": said, "trace": made, "kinds": [str(kind) for kind in kinds]} | {
        "replays": replays.call_count
    }


def eager(card: Card, folder: Path) -> Found:
    """The twin of `graphs`, with activations on the host, which change no bit."""
    offload = "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 64"
    return {"said": run(f"{LLAMA} --train-iters 3 --global-batch-size 8 {offload}", folder)[1]}


def no_memory_for_a_copy(card: Card, folder: Path) -> Found:
    """The background save writes the state itself, through the small pinned buffer."""
    from megalite.checkpoint.run.background_save import HostCopy

    with mock.patch.object(HostCopy, "_parts", side_effect=RuntimeError("cudaHostAlloc: out of memory\nmore")):
        code, said = run(f"--train-iters 2 --save {folder} --save-interval 1", folder)
    return {"code": code, "said": said}


def two_ranks(card: Card, folder: Path) -> Found:
    """Weights gathered, gradients reduced."""
    from megalite.train.step import train_step

    run = run_from([*SMALL, *f"{ON_CARD} --train-iters 2 --ddp-bucket-size 2000".split()], device=card.device)
    losses = [train_step(run).loss for _ in range(2)]
    run.close()
    return {"losses": losses}


def who_computes(card: Card, folder: Path) -> Found:
    """Choices by card, and by what is installed."""
    from megalite.kernels import attention, dispatch
    from megalite.models import compiled
    from megalite.optim.adamw import ApexAdamW

    dispatch.choose("auto", "auto")
    found: Found = {"processors": dispatch.processors(card.device), "apex": ApexAdamW.available()}
    found["generation"] = dispatch.generation(card.device)
    (folder / "amp_C.py").write_text("")
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        found["with apex"] = ApexAdamW.available()
    found["plan"] = attention.describe_attention("cuda")
    x = torch.zeros(4, 1, 2, 8, dtype=torch.bfloat16, device=card.device)
    found["attention"] = [_chosen(capability, x) for capability in CAPABILITIES]
    dispatch.runs_triton.cache_clear()
    with (
        mock.patch.object(dispatch, "installed", lambda: False),
        mock.patch.object(compiled, "installed", lambda: False),
    ):
        found["attention without triton"] = [_chosen(capability, x) for capability in CAPABILITIES]
        found["without triton"] = dispatch.describe_kernels("cuda")
        try:
            compiled.check_compile("cuda")
        except compiled.MissingPackage as error:
            found["compile"] = str(error)
    dispatch.runs_triton.cache_clear()
    return found


def refused(card: Card, folder: Path) -> Found:
    """What a start says where something is missing; more of it in test_start.py."""
    from megalite.launch.ranks import LaunchError, process_group
    from megalite.train.life.preflight import SetupError, choose_device
    from tools.bench import kernels

    found, soon = Found(), datetime.timedelta(seconds=1)
    for rank in (1, 2):  # no NCCL here, or nobody to meet; no card
        try:
            with process_group(Ranks(1, 4, rank, 4, f"file://{folder}/meet"), device="cuda", startup_timeout=soon):
                pass
        except LaunchError as error:
            found[f"local rank {rank}"] = str(error)
    found["auto"] = [choose_device("auto")]
    cuda.machine().cards = 0
    found["auto"] += [choose_device("auto")]
    try:
        choose_device("cuda")
    except SetupError as error:
        found["no card"] = [str(error), *kernels.missing("cuda")]
    return found


def _chosen(capability: tuple[int, int], x: torch.Tensor) -> str:
    from megalite.kernels import attention

    cuda.machine().capability = capability
    return attention.backend(x, x, masked=False)


def clock_and_probe(card: Card, folder: Path) -> Found:
    """What tools/bench measures with, and the machine as it tells it."""
    from tools.bench import gpu_report_probe, kernel_bench
    from tools.bench.kernel_case import Sizes
    from tools.bench.kernels import CASES

    kernel_bench.WARM_UP_S = 0.0
    bench = kernel_bench.Bench(card.device, 3, torch.float32, tiny=True)
    x = torch.zeros(1 << 14, device=card.device)
    case, sizes = next(case for case in CASES if case.op == "rms_norm"), Sizes(16, 128, torch.float32, card.device)
    with contextlib.redirect_stdout(io.StringIO()):
        row = bench.row(case, sizes, "torch", lambda: lambda: (x * 2).sum())
    return {"rates": [bench.copy_gb_s, bench.matmul_tflops], "row": row, "errors": bench.errors} | {
        "facts": gpu_report_probe.facts()
    }


def _task(folder: Path) -> dict[str, Any]:
    flags = [*SMALL, *f"{ON_CARD} --train-iters 9 {LLAMA}".split()]
    return {"flags": flags, "warmup": 1, "steps": 2, "folder": str(folder), "contender": "megalite", "nproc": 1}


def benchmark(card: Card, folder: Path) -> Found:
    """One rank of tools/benchmark.py."""
    from tools import benchmark_rank

    return {"code": benchmark_rank.main(_task(folder)), **json.loads((folder / "rank00000.json").read_text())}


class Profiler:
    """In the place of torch's, which a CPU's build has not for cards: what it would write of a step."""

    def __init__(self, activities: list[Any]):
        self.activities = activities
        self.start = self.stop = lambda: None

    def export_chrome_trace(self, path: str) -> None:
        kernel = {"cat": "kernel", "ts": 0.0}
        events = [{**kernel, "name": "ncclDevKernel_AllReduce", "dur": 4e6}, {**kernel, "name": "gemm", "dur": 1e6}]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def timeline(card: Card, folder: Path) -> Found:
    """Two ranks of tools/benchmark.py, and what a profiler tells of them."""
    from torch import profiler

    from tools import benchmark_rank

    rank, kinds = dist.get_rank(), {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA}
    with (
        mock.patch("megalite.launch.ranks.process_group", lambda *a, **k: contextlib.nullcontext(card.device)),
        mock.patch.object(profiler, "supported_activities", lambda: kinds),
        mock.patch.object(profiler, "profile", Profiler),
    ):
        benchmark_rank.megalite_rank(Ranks(rank, 2, rank, 2), _task(folder))
    return json.loads((folder / f"rank{rank:05d}.json").read_text())


def peer(card: Card, folder: Path) -> Found:
    """What tools/benchmark.py compares with."""
    from tools.bench.peer import peer_rank

    peer_rank(Ranks(), _task(folder) | {"contender": "peer fp32"})
    return json.loads((folder / "rank00000.json").read_text())


def quickstart(card: Card, folder: Path) -> Found:
    """What the example starts, by the number of cards."""
    from examples import quickstart

    found, machine = Found(), cuda.machine()
    for cards in (0, 1, 2, 3, 4, 8):
        machine.cards = cards
        found[str(cards)] = quickstart.layout()
    return found


def cluster(card: Card, folder: Path) -> Found:
    """What tools/check_cluster.py measures between two."""
    from tools import check_cluster

    args = check_cluster.parse(["--sizes", "4096", "--times", "1", "--slow", "0", "--json", str(folder / "found.json")])
    with mock.patch.object(check_cluster, "process_group", lambda *a, **k: contextlib.nullcontext(card.device)):
        code = check_cluster.check(Ranks(dist.get_rank(), 2, dist.get_rank(), 2), args)
    rows = json.loads((folder / "found.json").read_text())["rows"] if dist.get_rank() == 0 else []
    return {"code": code, "rows": rows}


def planned(card: Card, folder: Path) -> Found:
    """The card as a plan measures it and as a run told of it; what a verification keeps, and a benchmark refuses there."""
    from types import SimpleNamespace

    from tools.bench.contender import read_config
    from tools.checks.smaller import smaller
    from tools.pictures.run import Run
    from tools.planning.calibrate import measure
    from tools.planning.compare import cluster_of

    flags = [*SMALL, *f"{ON_CARD} --train-iters 9 {LLAMA}".split()]
    config = config_from(flags)
    about = {"device": "cuda", "machine": {"card": torch.cuda.get_device_name(INDEX)}}
    with mock.patch("megalite.launch.ranks.process_group", lambda *a, **k: contextlib.nullcontext(card.device)):
        measure(Ranks(), {"config": config, "vocab_size": 93, "seconds": 0.1, "folder": str(folder)})
    run = Run(folder, "run", events=[{"event": "started", "about": about}])
    options = SimpleNamespace(nproc=1, memory_gib=4.0, peer=None)
    return {
        "measured": json.loads((folder / "rank00000.json").read_text()),
        "told": cluster_of(run, SimpleNamespace(world=1)).device.name,  # type: ignore[arg-type]
        "verified": smaller(config, 2, 1).config.parallel.device,
        "refused": read_config(flags, options)[1],  # type: ignore[arg-type]
    }


RUNS = (everything_on, graphs, eager, no_memory_for_a_copy, two_ranks)
OTHERS = (who_computes, refused, clock_and_probe, benchmark, timeline, peer, quickstart, cluster, planned)
CASES = {case.__name__: case for case in RUNS + OTHERS}


def tried(name: str, folder: str) -> Found:
    """In a rank's process."""
    with simulated(index=INDEX, cards=2) as card:
        return CASES[name](card, Path(folder))


def watched(name: str, folder: str) -> set[Mention]:
    watch = Watch(mentions())
    with watch.watching():
        tried(name, folder)
    return watch.visited()
