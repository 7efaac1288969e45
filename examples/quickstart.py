#!/usr/bin/env python
"""The main job from end to end, with the commands that a user would type.

It trains a tokenizer, tokenizes a text, trains with tp 2 x pp 2 (interleaved), stops and resumes, repeats the first
steps on one process, generates text, and prints a summary.

The text is examples/text.jsonl.gz: megalite's own source and documents of 2026-11-23, so that everybody gets the same
losses. On CUDA devices the model is larger and the text is Python's standard library.

Run by examples/quickstart.sh; `--fresh` deletes an earlier run. Everything is written to runs/quickstart and runs/data.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUN, DATA = Path("runs/quickstart"), Path("runs/data")
ONE_PROCESS_RUN = Path("runs/quickstart-one-process")
COMPARED_STEPS = 20


def run_command(*argv: str | Path, quiet: bool = False, accept: tuple[int, ...] = (0,)) -> str:
    """Run a command of this repository, show it and its output, and return the output."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a shell may ignore it, and the exit code would be lost
    print(f"\n$ {' '.join(map(str, argv))}", flush=True)
    process = subprocess.Popen([sys.executable, *map(str, argv)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if not quiet:
            print("  " + line, end="", flush=True)
    if process.wait() not in accept:
        raise SystemExit(process.returncode)
    return "".join(lines)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    lines = (ROOT / run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prepare_data(on_gpu: bool) -> None:
    """Train a tokenizer and tokenize the text, unless that is done already."""
    text = Path("examples/text.jsonl.gz")
    if on_gpu:
        text = DATA / "corpus/train.jsonl"
        if not (ROOT / text).is_file():
            run_command("tools/python_corpus.py", "--out", text.parent)
    if not (ROOT / DATA / "spm.model").is_file():
        train = ("--input", text, "--vocab-size", "8000", "--model-prefix", DATA / "spm")
        run_command("tools/train_tokenizer.py", *train)
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", DATA / "spm.model", "--append-eod")
    if not (ROOT / DATA / "quickstart_text_document.idx").is_file():
        source = ("--input", text, "--output-prefix", DATA / "quickstart")
        run_command("tools/preprocess_data.py", *source, *tokenizer)


def choose_layout() -> tuple[str, list[str], int]:
    """Return the configuration, the flags of the layout and the number of steps for this machine."""
    import torch

    num_gpus = torch.cuda.device_count()
    config, steps = ("examples/quickstart_gpu.toml", 600) if num_gpus else ("examples/quickstart.toml", 240)
    ranks = 4 if num_gpus == 0 or num_gpus >= 4 else num_gpus
    if ranks < 2:
        return config, [], steps
    pipeline = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
    tensor = ["--tensor-model-parallel-size", "2"] if ranks == 4 else []
    return config, ["--nproc", str(ranks // 2 * 2), *tensor, *pipeline], steps


def train(config: str, layout_flags: list[str], steps: int) -> None:
    """Train half of the steps, stop, and resume."""
    run = ["pretrain_gpt.py", "--config", config, *layout_flags]
    keep = ["--save", str(RUN), "--load", str(RUN), "--tensorboard-dir", str(RUN / "tensorboard")]
    if not (ROOT / RUN / f"iter_{steps // 2:07d}").is_dir():
        run_command(*run, *keep, "--exit-interval", str(steps // 2), "--profile-pipeline", "10", accept=(0, 75))
    run_command(*run, *keep)


def compare_with_one_process(config: str) -> tuple[float, int]:
    """Repeat the first steps on one process; return the largest loss difference and the last step compared."""
    if not (ROOT / ONE_PROCESS_RUN / "metrics.jsonl").is_file():
        stop = ["--exit-interval", str(COMPARED_STEPS), "--run-dir", str(ONE_PROCESS_RUN)]
        run_command("pretrain_gpt.py", "--config", config, *stop, accept=(0, 75))
    losses, expected = (
        {row["step"]: row["train/loss"] for row in read_metrics(run_dir) if "train/loss" in row}
        for run_dir in (RUN, ONE_PROCESS_RUN)
    )
    steps = sorted(losses.keys() & expected.keys())
    return max(abs(losses[step] - expected[step]) for step in steps), steps[-1]


def main() -> int:
    os.chdir(ROOT)
    if "--fresh" in sys.argv:
        for directory in (RUN, ONE_PROCESS_RUN, DATA):
            shutil.rmtree(directory, ignore_errors=True)
    start = time.perf_counter()
    config, layout_flags, steps = choose_layout()
    prepare_data(config.endswith("gpu.toml"))
    status = RUN / "status.json"
    if not (status.is_file() and json.loads(status.read_text())["outcome"] == "done"):
        train(config, layout_flags, steps)
    difference, compared = compare_with_one_process(config)
    generate = ("tools/generate.py", "--load", RUN, "--max-new-tokens", "60", "--prompt")
    prompts = ("def __init__(self", "import os\n", "class Test")
    samples = [re.sub(r"^\[step \d+\] ", "", run_command(*generate, p, quiet=True)) for p in prompts]
    run_command("tools/report.py", RUN)
    comparison = f"largest loss difference {difference:.2e} over {compared} steps"
    num_ranks = int(layout_flags[1]) if layout_flags else 1
    print_summary(num_ranks, comparison, samples, time.perf_counter() - start)
    return 0


def print_summary(num_ranks: int, comparison: str, samples: list[str], seconds: float) -> None:
    """Print the results of the run as a table, and the samples."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    metrics = read_metrics(RUN)
    last = [row for row in metrics if "train/loss" in row][-1]
    valid = [row for row in metrics if "val/valid/loss" in row][-1]["val/valid/loss"]
    table = Table(title="megalite quickstart", show_header=False, title_justify="left")
    table.add_row("training loss", f"{last['train/loss']:.3f} nats per token after {last['tokens']:,} tokens")
    table.add_row("validation loss", f"{valid:.3f} nats per token")
    tokens_per_s = last["perf/tokens_per_s_per_gpu"] * num_ranks
    tflops = last["perf/tflops_per_gpu"] * num_ranks
    mfu = "n/a" if last["perf/mfu"] is None else f"{100 * last['perf/mfu']:.1f} %"
    speed = f"{tokens_per_s:,.0f} tokens/s, {tflops:.3f} TFLOP/s, MFU {mfu} ({num_ranks} ranks together)"
    table.add_row("speed", speed)
    table.add_row("the same run on one process", comparison)
    table.add_row("log, metrics", f"{RUN}/log.txt, {RUN}/metrics.jsonl")
    table.add_row("TensorBoard", f".venv/bin/tensorboard --logdir {RUN}/tensorboard")
    table.add_row("report with plots", f"{RUN}/report/index.html")
    table.add_row("checkpoints", f"{RUN}/iter_*, the newest named in {RUN}/latest_checkpointed_iteration.txt")
    table.add_row("time", f"{seconds:.0f} s")
    console = Console()
    console.print(table)
    for sample in samples:
        console.print(Text("--- sampled ---", style="bold"))
        console.print(Text(sample.strip()))


if __name__ == "__main__":
    sys.exit(main())
