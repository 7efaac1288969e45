"""The parts of tools/gpu_report.py: the commands, the time limit and the results of each.

A part is a few commands, each in a process of its own, that write files to a directory. The results of a part that is
killed still count. Parts are sorted by their value, so that the last ones are cut off if time runs out.
"""

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.training.logging.event_log import read_jsonl
from tools.bench import gpu_report_tests
from tools.bench.gpu_report_runs import LAYOUT_FLAGS, LEVERS, TIMING, TRAINING_RUNS, Lever, TrainingRun
from tools.cli_common import read_json

ROOT = Path(__file__).resolve().parent.parent.parent
FUSED_KERNELS = "layer_norm,rms_norm,rope,swiglu,bias_gelu,dropout_add,cross_entropy,linear_cross_entropy"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "message")
TINY_SLOWDOWN = 4  # of time limits, because times do not matter and machines for tests may be slow
TINY_TIMING = "--repeats 1 --warmup 1 --steps 2"
Command = list[str]
Result = dict[str, Any]


@dataclass(frozen=True)
class ReportSetting:
    """The machine and the sizes of the parts.

    Attributes:
        cpu: True for a dry run without a GPU.
        plans: the flags and the memory estimate of each training run, by gpu_report_probe.py.
        num_gpus: the number of GPUs.
        tiny: True for tiny sizes.
        shares_gpu: True if a GPU takes several processes at once.
        missing: the packages that are not installed.
    """

    cpu: bool
    plans: dict[str, Any]
    num_gpus: int = 1
    tiny: bool = False
    shares_gpu: bool = True
    missing: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The type of the device, as in --device."""
        return "cpu" if self.cpu else "cuda"

    def num_jobs(self, max_jobs: int) -> int:
        """Return the number of processes to run at once."""
        if not self.shares_gpu:
            return 1
        cores = os.cpu_count() or 1
        return max(1, min(max_jobs, cores if self.tiny else cores // 2))

    def skip_without(self, package: str) -> str | None:
        """Return the reason to skip a part that needs a package, if it is not installed."""
        return f"{package} is not installed: pip install {package}" if package in self.missing else None


@dataclass(frozen=True)
class ReportPart:
    """One part of the report.

    Attributes:
        name: its name.
        group: a name for several parts, in --only.
        limit_s: its time limit in seconds.
        commands: returns the commands for a directory and a number of seconds; the first that fails is the last.
        read: returns the results in the directory, {} if there are none yet.
        skip: the reason why it cannot run here, if there is one.
    """

    name: str
    group: str
    limit_s: float
    commands: Callable[[Path, float], list[Command]]
    read: Callable[[Path], Result]
    skip: str | None = None


def python_command(program: str, *args: object) -> Command:
    """Return the command line of a program of the repository."""
    return [sys.executable, str(ROOT / program), *map(str, args)]


def json_reader(name: str) -> Callable[[Path], Result]:
    """Return a function that reads this JSON file of a part's directory."""
    return lambda directory: read_json(directory / name)


def tests_part(limit_s: float, setting: ReportSetting) -> ReportPart:
    """Return a part that runs the GPU tests."""
    num_jobs = 1 if setting.tiny else setting.num_jobs(8)

    def commands(directory: Path, seconds: float) -> list[Command]:
        return [python_command("tools/bench/gpu_report_tests.py", directory, "--jobs", num_jobs)]

    skip = setting.skip_without("pytest")
    return ReportPart("tests", "tests", limit_s, commands, gpu_report_tests.read, skip)


# --- training


def benchmark_command(
    directory: Path, seconds: float, setting: ReportSetting, *args: str, num_gpus: int = 1
) -> Command:
    """Return a command that times steps, and writes bench.json and pictures to the directory."""
    options = ["--timeout", seconds - 10, "--nproc", num_gpus, "--out", directory]
    return python_command("tools/benchmark.py", *options, *args, "--device", setting.device)


def training_part(run: TrainingRun, setting: ReportSetting) -> ReportPart:
    """Return a part that times the steps of a training run with as many layers as fit on the GPU."""
    plan = setting.plans.get(run.name)

    def commands(directory: Path, seconds: float) -> list[Command]:
        assert plan is not None
        timing = TINY_TIMING if setting.tiny else run.timing
        return [benchmark_command(directory, seconds, setting, *timing.split(), *plan["flags"])]

    def read(directory: Path) -> Result:
        return training_result(read_json(directory / "bench.json"), plan or {})

    skip = "no plan for its memory could be made" if plan is None else None
    return ReportPart(f"train {run.name}", "training", run.limit_s, commands, read, skip)


def speed_of(run: Result) -> Result:
    """Return the rates of a measured run of tools/benchmark.py."""
    tflops = run["flops_per_step"] / run["step_s"] / 1e12 / run["devices"]
    return {
        "tokens_per_s": run["tokens_per_step"] / run["step_s"],
        "tflops": tflops,
        "mfu": tflops / run["peak_tflops"] if run["peak_tflops"] else None,
        "memory": run["memory"],
    }


def training_result(bench: Result, plan: Result) -> Result:
    """Return the values of the report from the results of tools/benchmark.py and the plan of the run."""
    runs = [run for row in bench.get("rows", []) for run in row["runs"]]
    if not runs:  # the output of the part has the reason
        return {}
    run = runs[-1]
    parts = {name: statistics.mean(rank[name] for rank in run["parts"]) for name in run["parts"][0]}
    total = sum(parts.values())
    return {
        **{key: plan[key] for key in ("layers", "of_layers", "moments", "seq_length", "estimate")},
        "flags": " ".join(plan["flags"]),
        **speed_of(run),
        "parts": {name: seconds / total for name, seconds in parts.items()},
        "overhead": 1 - (parts["forward"] + parts["backward"]) / total,
        **{key: run.get(key) for key in ("tokens_per_step", "step_s", "peak_tflops", "losses", "timeline")},
    }


def sweep_result(bench: Result) -> Result:
    """Return the rates and the first loss of each combination of a sweep."""
    rows = []
    for row in bench.get("rows", []):
        result = {"values": row["values"], "status": row["status"], "reason": row["reason"]}
        if row["runs"]:
            run = row["runs"][-1]
            result |= {**speed_of(run), "first_loss": run["losses"][0]}
        rows.append(result)
    return {"rows": rows} if any("mfu" in row for row in rows) else {}


def sweep_part(
    lever: Lever, setting: ReportSetting, group: str = "levers", num_gpus: int = 1, skip: str | None = None
) -> ReportPart:
    """Return a part that times the steps of a run with each value of some flags."""

    def commands(directory: Path, seconds: float) -> list[Command]:
        timing, flags = (TINY_TIMING, lever.tiny_flags) if setting.tiny else (TIMING, lever.flags)
        sweeps = [arg for sweep in lever.sweeps for arg in ("--sweep", sweep)]
        return [
            benchmark_command(directory, seconds, setting, *timing.split(), *sweeps, *flags.split(), num_gpus=num_gpus)
        ]

    def read(directory: Path) -> Result:
        return sweep_result(read_json(directory / "bench.json"))

    return ReportPart(f"lever {lever.name}", group, lever.limit_s, commands, read, skip)


# --- GPT-2

GPT2_SETUP_S = 60.0  # of the part, for the corpus, the tokenizer, the checkpoint and the samples
GPT2_FLAGS = (
    "--preset gpt2 --bf16 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 32 --global-batch-size 64"
    " --lr 6e-4 --lr-warmup-iters 100 --weight-decay 0.1 --adam-beta2 0.95 --train-iters 100000"
    # the size of GPT-2's vocabulary, which makes it the model of 124 M parameters; this tokenizer uses 8192 of it
    " --make-vocab-size-divisible-by 50304"
)
TINY_GPT2_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 4"
    " --lr 1e-3 --train-iters 10"
)
PROMPTS = ("import os\n", "class Parser:\n    def __init__(self", "def test_")


def gpt2_part(limit_s: float, setting: ReportSetting) -> ReportPart:
    """Return a part that trains GPT-2 124M on Python's standard library for most of its time, and continues prompts."""

    def commands(directory: Path, seconds: float) -> list[Command]:
        corpus, prefix, run_dir = directory / "corpus", directory / "spm", directory / "run"
        text = corpus / ("valid.jsonl" if setting.tiny else "train.jsonl")
        vocab_size, model_flags = (512, TINY_GPT2_FLAGS) if setting.tiny else (8192, GPT2_FLAGS)
        tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{prefix}.model"]
        data = ["--data-path", directory / "data_text_document", "--split", "98,2,0", *tokenizer]
        minutes = max(0.1, (seconds - GPT2_SETUP_S) / 60)
        end = ["--exit-duration-in-mins", f"{minutes:.2f}", "--save", run_dir, "--run-dir", run_dir]
        flags = [*model_flags.split(), "--lr-decay-style", "constant", "--eval-interval", 100, "--eval-iters", 4]
        flags += ["--log-interval", 5, "--device", setting.device]
        prompts = [arg for prompt in PROMPTS for arg in ("--prompt", prompt)]
        sampling = ["--temperature", 0.8, "--max-new-tokens", 4 if setting.tiny else 100, "--device", setting.device]
        return [
            python_command("tools/python_corpus.py", "--out", corpus),
            python_command(
                "tools/train_tokenizer.py", "--input", text, "--vocab-size", vocab_size, "--model-prefix", prefix
            ),
            python_command(
                "tools/preprocess_data.py", "--input", text, "--output-prefix", directory / "data", *tokenizer,
                "--append-eod",
            ),
            python_command("pretrain_gpt.py", *flags, *data, *end),
            python_command("tools/generate.py", "--load", run_dir, *prompts, *sampling, "--json"),
        ]  # fmt: skip

    return ReportPart("gpt2", "gpt2", limit_s, commands, gpt2_result, setting.skip_without("sentencepiece"))


def gpt2_result(directory: Path) -> Result:
    """Return the loss curves, the speed and the continued prompts of the run in the directory."""
    rows = [row for _, row in read_jsonl(directory / "run" / "metrics.jsonl")]
    curves = {
        name: [(row["step"], row[name]) for row in rows if name in row] for name in ("train/loss", "val/valid/loss")
    }
    if not curves["train/loss"]:
        return {}
    speeds = [row["perf/tokens_per_s_per_gpu"] for row in rows if row.get("perf/tokens_per_s_per_gpu")]
    mfus = [row["perf/mfu"] for row in rows if row.get("perf/mfu")]
    samples = [row for _, row in read_jsonl(directory / "generate.txt") if "prompt" in row]
    return {
        "curves": curves,
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "mfu": statistics.median(mfus) if mfus else None,
        "samples": [{"prompt": row["prompt"], "text": row["text"]} for row in samples],
    }


# --- kernels and collectives


def kernels_part(name: str, limit_s: float, flags: str, setting: ReportSetting) -> ReportPart:
    """Return a part that runs kernels.py with `flags`."""

    def commands(directory: Path, seconds: float) -> list[Command]:
        args = [*flags.split(), "--device", setting.device]
        if setting.tiny:
            args += ["--tiny", "--repeats", "1"]
        args += ["--seconds", str(max(5, seconds - 10)), "--json", str(directory / "kernels.json")]
        return [python_command("tools/bench/kernels.py", *args)]

    skip = None if setting.cpu else setting.skip_without("triton")
    return ReportPart(name, name, limit_s, commands, json_reader("kernels.json"), skip)


def nccl_part(limit_s: float, setting: ReportSetting, skip: str | None) -> ReportPart:
    """Return a part that times collectives over all GPUs."""

    def commands(directory: Path, seconds: float) -> list[Command]:
        min_bytes, max_bytes = (1 << 12, 1 << 12) if setting.tiny else (1 << 20, 1 << 28)
        ranks = ["--device", setting.device, "--nproc", setting.num_gpus, "--json", directory / "nccl.json"]
        sizes = ["--min-bytes", min_bytes, "--max-bytes", max_bytes, "--factor", 16, "--kinds", *COLLECTIVES]
        return [python_command("tools/benchmark_comm.py", *ranks, *sizes)]

    return ReportPart("nccl", "nccl", limit_s, commands, json_reader("nccl.json"), skip)


def layouts_part(limit_s: float, setting: ReportSetting, skip: str | None) -> ReportPart:
    """Return a part that trains under every layout of tp and pp in (1, 2, all GPUs); dp takes the other GPUs."""
    num_gpus = min(8, 1 << (setting.num_gpus.bit_length() - 1))
    sizes = ",".join(str(size) for size in sorted({1, 2, num_gpus}))
    sweeps = (f"tensor-model-parallel-size={sizes}", f"pipeline-model-parallel-size={sizes}")
    layouts = Lever("layouts", limit_s, sweeps, LAYOUT_FLAGS)
    part = sweep_part(layouts, setting, group="layouts", num_gpus=max(2, num_gpus), skip=skip)
    return replace(part, name="layouts")


def list_parts(setting: ReportSetting) -> list[ReportPart]:
    """Return all parts, most valuable first."""
    kernel_flags = "--peers megalite triton cudnn flash"
    peer_flags = (
        f"--hidden-sizes 4096 --peers megalite torch compile liger --only {FUSED_KERNELS},grouped_matmul,gated_matmul"
    )
    tile_flags = (
        "--sweep --half backward --only rms_norm,add_rms_norm,layer_norm,add_layer_norm,bias_gelu --hidden-sizes 4096"
    )
    training_runs, levers = TRAINING_RUNS, LEVERS
    if setting.tiny:
        kernel_flags = "--peers megalite torch triton --only rms_norm,attention,adamw"
        peer_flags = "--only swiglu --peers megalite torch"
        tile_flags = "--sweep --half backward --only rms_norm --tiles 2"
        training_runs = TRAINING_RUNS[:1]
    several_gpus = f"needs 2 GPUs; torch sees {setting.num_gpus}" if setting.num_gpus < 2 else None
    first_run, *other_runs = [training_part(run, setting) for run in training_runs]
    attention, experts, *other_levers = [sweep_part(lever, setting) for lever in levers]
    parts = [
        tests_part(90, setting),
        first_run,
        attention,
        experts,
        layouts_part(80, setting, several_gpus),
        nccl_part(40, setting, several_gpus),
        gpt2_part(300, setting),
        kernels_part("kernels", 100, kernel_flags, setting),
        *other_runs,
        kernels_part("peers", 150, peer_flags, setting),
        *other_levers,
        kernels_part("tiles", 560, tile_flags, setting),
    ]
    if setting.tiny:
        parts = [replace(part, limit_s=TINY_SLOWDOWN * part.limit_s) for part in parts]
    return parts
