"""The parts of tools/gpu_report.py: what each runs, for how long at most, and how its results are read.

A part is a command in a process of its own that leaves files in a folder; what it has left when it is killed counts.
They come in the order of their worth: what the clock cuts off is what one can do without.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.bench import gpu_report_goals, gpu_report_tests
from tools.cli_common import read_json

TOOLS = Path(__file__).resolve().parent.parent
TABLE = gpu_report_goals.TABLE
SHAPES, TINY_SHAPES = ({name: flags.format_map(TABLE["words"]) for name, flags in TABLE[table].items()}
                       for table in ("shapes", "tiny_shapes"))  # fmt: skip
ELEMENTWISE = "layer_norm,rms_norm,rope,swiglu,bias_gelu,dropout_add,cross_entropy,linear_cross_entropy"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "message")
FORWARD_AND_BACKWARD = ("forward", "backward")
Result = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The machine and sizes of the parts. `plans`: flags and estimate of each shape, from gpu_report_probe.py."""

    cpu: bool
    plans: dict[str, Any]
    cards: int = 1
    tiny: bool = False
    together: bool = True  # whether a card takes several processes at once
    triton: bool = True

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"

    def jobs(self, most: int) -> int:
        cores = os.cpu_count() or 1
        return max(1, min(most, cores if self.tiny else cores // 2)) if self.together else 1


@dataclass(frozen=True)
class Part:
    """`command` gets the part's folder and the seconds it has. `read` gives {} where there is nothing yet. `skip`: why
    it cannot run here."""

    name: str
    limit_s: float
    command: Callable[[Path, float], list[str]]
    read: Callable[[Path], Result]
    skip: str | None = None


def started(program: str, *words: object) -> list[str]:
    """The command line of a program of tools/."""
    return [sys.executable, str(TOOLS / program), *map(str, words)]


def kernels(name: str, limit_s: float, flags: str, setting: Setting) -> Part:
    def command(folder: Path, seconds: float) -> list[str]:
        options = [*flags.split(), "--device", setting.device]
        if setting.tiny:
            options += ["--tiny", "--repeats", "1"]
        options += ["--seconds", str(max(5, seconds - 10)), "--json", str(folder / "kernels.json")]
        return started("bench/kernels.py", *options)

    skip = None if setting.triton or setting.cpu else "triton is not installed: all of it runs torch's kernels here"
    return Part(name, limit_s, command, lambda folder: read_json(folder / "kernels.json"), skip)


def smoke(name: str, limit_s: float, setting: Setting, cards: int = 1) -> Part:
    def command(folder: Path, seconds: float) -> list[str]:
        jobs = setting.jobs(6 if cards == 1 else 3)
        options = ["--device", setting.device, "--cards", cards, "--jobs", jobs]
        if setting.tiny:
            options.append("--tiny")
        return started("bench/gpu_report_smoke.py", folder, *options, "--seconds", seconds - 3)

    return Part(name, limit_s, command, lambda folder: read_json(folder / "smoke.json"))


def nccl(limit_s: float, setting: Setting) -> Part:
    def command(folder: Path, seconds: float) -> list[str]:
        least, most = (1 << 12, 1 << 12) if setting.tiny else (1 << 20, 1 << 28)
        sizes = ["--min-bytes", least, "--max-bytes", most, "--factor", 16, "--kinds", *KINDS]
        where = ["--device", setting.device, "--nproc", setting.cards, "--json", folder / "nccl.json"]
        return started("benchmark_comm.py", *where, *sizes)

    return Part("nccl", limit_s, command, lambda folder: read_json(folder / "nccl.json"))


def training(shape: str, limit_s: float, setting: Setting, layout: str = "", cards: int = 1) -> Part:
    """`limit_s` is mostly the time to draw the weights, on one core. `layout`: flags, on `cards` cards."""
    plan = setting.plans.get(shape)

    def command(folder: Path, seconds: float) -> list[str]:
        assert plan is not None
        usual = "--repeats 1 --warmup 1 --steps 2" if setting.tiny else "--repeats 1 --warmup 2 --steps 4"
        steps = usual if setting.tiny else TABLE["steps"].get(shape, usual)
        file = ["--timeout", seconds - 10, "--json", folder / "training.json", "--nproc", cards]
        where = ["--device", setting.device, *layout.split()]
        return started("benchmark.py", *steps.split(), *file, *plan["flags"], *where)

    def read(folder: Path) -> Result:
        return training_result(read_json(folder / "training.json"), plan or {})

    skip = None if plan is not None else "no plan for its memory could be made"
    name = "-".join([shape, *(word.removeprefix("--").partition("-")[0] for word in layout.split()[::2])])
    return Part(f"train {name}", limit_s, command, read, skip)


def training_result(written: Result, plan: Result) -> Result:
    """The figures of tools/benchmark.py's file that the report has."""
    runs = [run for row in written.get("rows", []) for run in row["runs"]]
    if not runs:  # why stands in what the part has said
        return {}
    run = runs[-1]
    parts = {name: statistics.mean(rank[name] for rank in run["parts"]) for name in run["parts"][0]}
    total = sum(parts.values())
    tflops = run["flops_per_step"] / run["step_s"] / 1e12 / run["devices"]
    return {
        **{key: plan[key] for key in ("layers", "of_layers", "moments", "seq_length")},
        "flags": " ".join(plan["flags"]),
        "tokens_per_s": run["tokens_per_step"] / run["step_s"],
        "tflops": tflops,
        "mfu": tflops / run["peak_tflops"] if run["peak_tflops"] else None,
        "estimate": plan["estimate"],
        "parts": {name: seconds / total for name, seconds in parts.items()},
        "overhead": 1 - sum(parts[name] for name in FORWARD_AND_BACKWARD) / total,
        **{key: run.get(key) for key in ("tokens_per_step", "step_s", "peak_tflops", "memory", "losses", "timeline")},
    }


def levers(name: str, limit_s: float, setting: Setting) -> Part:
    """A group of levers.py on a run of the shape of this name."""
    plan = setting.plans.get(name)

    def command(folder: Path, seconds: float) -> list[str]:
        assert plan is not None
        flags = [*TABLE["levers"]["run"].split(), *plan["flags"], "--device", setting.device]
        task = {"contender": "levers", "nproc": 1, "group": name, "flags": flags, "tiny": setting.tiny}
        task |= {"folder": str(folder), "seconds": seconds - 20, "plan": plan}
        return started("benchmark_rank.py", json.dumps(task))

    skip = None if plan is not None else "no plan for its memory could be made"
    return Part(name, limit_s, command, lambda folder: read_json(folder / "levers.json"), skip)


def tests(limit_s: float, setting: Setting) -> Part:
    jobs = 1 if setting.tiny else setting.jobs(8)

    def command(folder: Path, seconds: float) -> list[str]:
        return started("bench/gpu_report_tests.py", folder, "--jobs", jobs)

    return Part("tests", limit_s, command, gpu_report_tests.read)


def several(setting: Setting) -> tuple[Part, Part, list[Part]]:
    """Losses, messages and speed over several cards; skipped on one."""
    cards = min(8, 1 << (setting.cards.bit_length() - 1))
    tp, pp = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    ways = [(f"{tp} {cards}", 2), (f"{pp} {cards}", 2), (f"--dp {cards}", 2), (f"{tp} 2 {pp} 2 --dp {cards // 4}", 4)]
    parts = [(smoke("layouts", 70, setting, max(2, cards)), 2), (nccl(40, setting), 2)]
    ways = ways[::2] if setting.tiny else ways
    parts += [(training("llama-2b", 75, setting, layout, cards), least) for layout, least in ways]
    reason = f"needs {{}} cards; torch sees {setting.cards}"
    few = [replace(part, skip=reason.format(least)) if setting.cards < least else part for part, least in parts]
    return few[0], few[1], few[2:]


def parts_of(setting: Setting) -> list[Part]:
    peers = f"--hidden-sizes 4096 --peers megalite torch compile liger --only {ELEMENTWISE},grouped_matmul,gated_matmul"
    own = "--peers megalite triton cudnn flash"
    tiles = "--sweep --half backward --only rms_norm"
    tiles += " --tiles 2" if setting.tiny else ",add_rms_norm,layer_norm,add_layer_norm,bias_gelu --hidden-sizes 4096"
    if setting.tiny:
        peers = "--only swiglu --peers megalite torch"
        own = "--peers megalite torch triton --only rms_norm,attention,adamw"
    layouts, messages, trained = several(setting)
    shapes = {"gpt-1.3b-2048": 70, "gpt-1.3b-4096": 70, "llama3-8b-4096-mb4": 150}
    shapes |= {"gpt-125m-1024": 40, "gpt-125m-1024-graphs": 40, "qwen3-30b-a3b-4096": 200}
    shapes |= {"llama3-8b-4096-64": 240, "llama3-8b-4096-128": 300}
    other_shapes = [training(shape, limit_s, setting) for shape, limit_s in shapes.items() if not setting.tiny]
    parts = [
        smoke("smoke", 60, setting),
        layouts,
        training("llama3-8b-4096", 170, setting),
        messages,
        *trained,
        tests(120, setting),
        kernels("kernels", 100, own, setting),
        *other_shapes[:2],
        kernels("peers", 150, peers, setting),
        *other_shapes[2:],
        levers("levers", 560, setting),
        levers("levers-mb4", 330, setting),
        levers("levers-moe", 330, setting),
        kernels("tiles", 560, tiles, setting),
    ]
    slow = 4 if setting.tiny else 1  # a machine may be, and figures do not count
    return [replace(part, limit_s=slow * part.limit_s) for part in parts]
