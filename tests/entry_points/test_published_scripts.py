"""Published scripts, run as published: torchrun, tp 2 x pp 2 on gloo, a vocabulary and merges, preprocessed text."""

import json
import math
import os
import re
import shlex
from pathlib import Path

import programs
import pytest
import toml_tables
from pairwise import nightly_except
from token_files import byte_level_bpe

ROOT = Path(__file__).resolve().parents[2]
TABLES = toml_tables.read_table("entry_points/published_scripts")
LINES, SMALLER = TABLES["lines"], TABLES["smaller"]


def argv_of(name: str, paths: dict[str, str]) -> list[str]:
    """Return a line's arguments as the shell would pass them, with small sizes, and with pp 2 if it has no pp.

    `paths` has the path of each $NAME.
    """
    argv = [paths.get(word, word) for word in shlex.split(LINES[name])]
    for flag, value in (SMALLER["all"] | SMALLER[name]).items():
        for i in reversed([i for i, word in enumerate(argv) if word == flag]):
            argv[i + 1] = value
    if "--pipeline-model-parallel-size" not in argv:
        argv += ["--pipeline-model-parallel-size", "2"]
    if "--fp16" in argv:
        argv += ["--initial-loss-scale", "65536"]  # from 2^32, all six steps would only halve it
    return argv


def docs() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]


def byte_level_vocabulary(directory: Path, size: int = 384) -> dict[str, str]:
    """Train a small byte-level BPE like GPT-2's on docs/; return its vocab.json, merges.txt and tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    bpe = byte_level_bpe(docs(), size)
    bpe.model.save(str(directory))
    bpe.save(str(directory / "tokenizer.json"))
    names = {"$VOCAB": "vocab.json", "$MERGES": "merges.txt", "$TOKENIZER": "tokenizer.json"}
    return {name: str(directory / file) for name, file in names.items()}


def preprocess_docs(directory: Path, paths: dict[str, str], *kind: str) -> str:
    """Preprocess the docs into a dataset and return its prefix."""
    parts = [part for page in docs() for part in page.split("\n## ")]
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    gpt2 = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", paths["$VOCAB"], "--merge-file", paths["$MERGES"])
    files = ("--input", str(directory / "text.jsonl"), "--output-prefix", str(directory / "docs"), "--append-eod")
    programs.run_python("tools/preprocess_data.py", *files, *(kind or gpt2), check=True)
    return str(directory / "docs_text_document")


def _losses(log: str) -> list[float]:
    return [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+) \|", log)]


@pytest.mark.parametrize("name", nightly_except(sorted(LINES), sorted(LINES)[:1], str, guards=("megalite/config",)))
@pytest.mark.timeout(240)
def test_published_script_trains_and_resumes(name: str, tmp_path: Path) -> None:
    paths = byte_level_vocabulary(tmp_path)
    hugging_face = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", paths["$TOKENIZER"])
    kind = () if name == "gpt3" else hugging_face
    paths |= {"$DATA": preprocess_docs(tmp_path, paths, *kind), "$CHECKPOINTS": str(tmp_path / "checkpoints")}
    paths |= {"$LOGS": str(tmp_path / "logs"), "$CACHE": str(tmp_path / "cache")}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = ["-m", "torch.distributed.run", "--nproc_per_node", "4", "--standalone", "pretrain_gpt.py"]
    run = programs.run_python(*start, *argv_of(name, paths), timeout=200, env=env, check=True)
    losses = _losses(run.stdout)
    assert len(losses) == 6 and all(math.isfinite(x) for x in losses), run.stdout
    assert len(re.findall(r"elapsed time per iteration \(ms\): [0-9.]+ \|", run.stdout)) == 6
    if "--log-throughput" in LINES[name]:
        assert len(re.findall(r"throughput per GPU \(TFLOP/s/GPU\): [0-9.]+ \|", run.stdout)) == 6
    assert json.loads((tmp_path / "checkpoints/status.json").read_text())["outcome"] == "done"
