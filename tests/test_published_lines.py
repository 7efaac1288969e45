"""Published scripts, started as they start: torchrun, tp 2 x pp 2 on gloo, a vocabulary and merges, preprocessed text."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import programs
import pytest
from cover import rarely
from published_lines import LINES, words

ROOT = Path(__file__).resolve().parents[1]


def byte_level_vocabulary(folder: Path, size: int = 384) -> dict[str, str]:
    """vocab.json, merges.txt and tokenizer.json of a small byte-level BPE, as GPT-2's, made of this repository's text."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer.train_from_iterator(texts, vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save_model(str(folder))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"$VOCAB": "vocab.json", "$MERGES": "merges.txt", "$TOKENIZER": "tokenizer.json"}
    return {name: str(folder / file) for name, file in names.items()}


def preprocessed(folder: Path, places: dict[str, str], *kind: str) -> str:
    """The docs as a dataset; returns its prefix."""
    text = folder / "text.jsonl"
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    parts = [part for one in texts for part in one.split("\n## ")]
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", places["$VOCAB"]]
    flags += ["--merge-file", places["$MERGES"], "--append-eod"]
    if kind:
        flags = [*kind, "--append-eod"]
    made = programs.run(
        [
            sys.executable,
            "tools/preprocess_data.py",
            "--input",
            str(text),
            "--output-prefix",
            str(folder / "docs"),
            *flags,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert made.returncode == 0, made.stderr
    return str(folder / "docs_text_document")


def _losses(log: str) -> list[float]:
    return [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+) \|", log)]


@pytest.mark.parametrize("name", rarely(sorted(LINES), sorted(LINES)[:1], str, guards=("megalite/config",)))
@pytest.mark.timeout(240)
def test_a_published_script_trains_and_goes_on(name: str, tmp_path: Path) -> None:
    places = byte_level_vocabulary(tmp_path)
    kind = (
        ()
        if name == "gpt3"
        else ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", places["$TOKENIZER"])
    )
    places |= {"$DATA": preprocessed(tmp_path, places, *kind), "$CHECKPOINTS": str(tmp_path / "checkpoints")}
    places |= {"$LOGS": str(tmp_path / "logs"), "$CACHE": str(tmp_path / "cache")}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = programs.run(
        [*start, "pretrain_gpt.py", *words(name, places)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    losses = _losses(run.stdout)
    assert len(losses) == 6 and all(math.isfinite(x) for x in losses), run.stdout
    assert len(re.findall(r"elapsed time per iteration \(ms\): [0-9.]+ \|", run.stdout)) == 6
    if "--log-throughput" in LINES[name]:
        assert len(re.findall(r"throughput per GPU \(TFLOP/s/GPU\): [0-9.]+ \|", run.stdout)) == 6
    assert json.loads((tmp_path / "checkpoints/status.json").read_text())["outcome"] == "done"
