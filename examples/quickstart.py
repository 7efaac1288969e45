#!/usr/bin/env python
"""The main job from end to end, with the commands a user would type: tokenizer, tokens, training with TP 2 x PP 2
interleaved, a stop and a resume, the same run on one process, text from the model, pictures, a summary.

The text is examples/text.jsonl.gz: megalite's own source and documents, as they were on 2026-11-23, so that everybody
sees the same losses. On CUDA devices the model is larger, and learns from Python's standard library.

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
TWIN_STEPS = 20


def command(*words: str | Path, quiet: bool = False, accept: tuple[int, ...] = (0,)) -> str:
    """Run a command of this repository, show it and its output, and return the output."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a shell may ignore it, and the exit code would be lost
    print(f"\n$ {' '.join(str(w) for w in words)}", flush=True)
    process = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if not quiet:
            print("  " + line, end="", flush=True)
    if process.wait() not in accept:
        raise SystemExit(process.returncode)
    return "".join(lines)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def prepare_data(cards: bool) -> None:
    text = Path("examples/text.jsonl.gz")
    if cards:
        text = DATA / "corpus/train.jsonl"
        if not (ROOT / text).is_file():
            command("tools/python_corpus.py", "--out", text.parent)
    if not (ROOT / DATA / "spm.model").is_file():
        train = ("--input", text, "--vocab-size", "8000", "--model-prefix", DATA / "spm")
        command("tools/train_tokenizer.py", *train)
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", DATA / "spm.model", "--append-eod")
    if not (ROOT / DATA / "quickstart_text_document.idx").is_file():
        source = ("--input", text, "--output-prefix", DATA / "quickstart")
        command("tools/preprocess_data.py", *source, *tokenizer)


def layout() -> tuple[str, list[str], int]:
    """(configuration, flags of the layout, steps): a larger model where there are CUDA devices."""
    import torch

    cards = torch.cuda.device_count()
    config, steps = ("examples/quickstart_gpu.toml", 600) if cards else ("examples/quickstart.toml", 240)
    ranks = 4 if cards == 0 or cards >= 4 else cards
    if ranks < 2:
        return config, [], steps
    pipeline = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
    tensor = ["--tensor-model-parallel-size", "2"] if ranks == 4 else []
    return config, ["--nproc", str(ranks // 2 * 2), *tensor, *pipeline], steps


def train(config: str, ranks: list[str], steps: int) -> None:
    """Stop half way, resume, and keep both parts in one log."""
    run = ["pretrain_gpt.py", "--config", config, *ranks]
    keep = ["--save", str(RUN), "--load", str(RUN), "--tensorboard-dir", str(RUN / "tensorboard")]
    if not (ROOT / RUN / f"iter_{steps // 2:07d}").is_dir():
        command(*run, *keep, "--exit-interval", str(steps // 2), "--profile-pipeline", "10", accept=(0, 75))
    command(*run, *keep)


def twin_difference(config: str) -> tuple[float, int]:
    """The first steps again on one process: (largest loss difference, steps compared)."""
    folder = Path("runs/quickstart-one-process")
    if not (ROOT / folder / "metrics.jsonl").is_file():
        stop = ["--exit-interval", str(TWIN_STEPS), "--run-dir", str(folder)]
        command("pretrain_gpt.py", "--config", config, *stop, accept=(0, 75))
    ours = {r["step"]: r["train/loss"] for r in rows(RUN) if "train/loss" in r}
    theirs = {r["step"]: r["train/loss"] for r in rows(folder) if "train/loss" in r}
    both = sorted(ours.keys() & theirs.keys())
    return max(abs(ours[s] - theirs[s]) for s in both), both[-1]


def main() -> int:
    os.chdir(ROOT)
    if "--fresh" in sys.argv:
        for folder in (RUN, Path("runs/quickstart-one-process"), DATA):
            shutil.rmtree(folder, ignore_errors=True)
    begin = time.perf_counter()
    config, ranks, steps = layout()
    prepare_data(config.endswith("gpu.toml"))
    status = RUN / "status.json"
    if not (status.is_file() and json.loads(status.read_text())["outcome"] == "done"):
        train(config, ranks, steps)
    difference, compared = twin_difference(config)
    generate = ("tools/generate.py", "--load", RUN, "--max-new-tokens", "60", "--prompt")
    prompts = ("def __init__(self", "import os\n", "class Test")
    samples = [re.sub(r"^\[step \d+\] ", "", command(*generate, p, quiet=True)) for p in prompts]
    command("tools/report.py", RUN)
    alike = f"largest loss difference {difference:.2e} over {compared} steps"
    summary(int(ranks[1]) if ranks else 1, alike, samples, time.perf_counter() - begin)
    return 0


def summary(ranks: int, alike: str, samples: list[str], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    log = rows(RUN)
    last = [r for r in log if "train/loss" in r][-1]
    valid = [r for r in log if "val/valid/loss" in r][-1]["val/valid/loss"]
    mfu = last["perf/mfu"]
    table = Table(title="megalite quickstart", show_header=False, title_justify="left")
    table.add_row("training loss", f"{last['train/loss']:.3f} nats per token after {last['tokens']:,} tokens")
    table.add_row("validation loss", f"{valid:.3f} nats per token")
    speed = (
        f"{last['perf/tokens_per_s_per_gpu'] * ranks:,.0f} tokens/s, {last['perf/tflops_per_gpu'] * ranks:.3f} TFLOP/s"
    )
    table.add_row("speed", f"{speed}, MFU {'n/a' if mfu is None else f'{100 * mfu:.1f} %'} ({ranks} ranks together)")
    table.add_row("the same run on one process", alike)
    table.add_row("log, metrics", f"{RUN}/log.txt, {RUN}/metrics.jsonl")
    table.add_row("TensorBoard", f".venv/bin/tensorboard --logdir {RUN}/tensorboard")
    table.add_row("page and pictures", f"{RUN}/report/index.html")
    table.add_row("checkpoints", f"{RUN}/iter_*, the newest named in {RUN}/latest_checkpointed_iteration.txt")
    table.add_row("time", f"{seconds:.0f} s")
    console = Console()
    console.print(table)
    for sample in samples:
        console.print(Text("--- sampled ---", style="bold"))
        console.print(Text(sample.strip()))


if __name__ == "__main__":
    sys.exit(main())
