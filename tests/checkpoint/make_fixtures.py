#!/usr/bin/env python
"""Make the stored checkpoints of this release.

    python tests/checkpoint/make_fixtures.py

    fixtures/RELEASE/CASE/iter_0000002/   as four or two ranks wrote it
    fixtures/RELEASE/CASE/expected.json   flags, dtype, the losses of the steps after it, a hash of every tensor

test_releases.py loads those of all releases. A release's fixtures are made once, before it is published, and never
again. Before it is published, delete its directory to make them again.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "support")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402

import megalite  # noqa: E402
from megalite.checkpoint import offline  # noqa: E402
from megalite.config import cli  # noqa: E402
from megalite.config.config_file import dump_config  # noqa: E402
from megalite.launch.rank_info import RankInfo  # noqa: E402
from megalite.models.families import PRESETS  # noqa: E402
from megalite.training.checkpointing.save import open_saver, save  # noqa: E402
from megalite.training.setup import build_run  # noqa: E402
from megalite.training.train_step import train_step  # noqa: E402
from tools.preprocess.indexed_writer import IndexedWriter  # noqa: E402

FIXTURES = Path(__file__).resolve().parent / "fixtures"
PREFIX = "tokens"  # relative: where the data was does not matter
FLAGS = (
    "--hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 12 --seq-length 8 "
    "--max-position-embeddings 8 --vocab-size 21 --make-vocab-size-divisible-by 4 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 6 --lr 0.01 --lr-decay-style cosine --weight-decay 0.1 --adam-eps 1e-3 "
    "--hidden-dropout 0.1 --init-method-std 0.2 --seed 11 --eval-iters 0 --data-path tokens --split 1,0,0"
)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CASES: dict[str, dict[str, Any]] = {
    "fp64": {"world": 4, "layout": TP2, "flags": f"--num-layers 1 {FLAGS}", "dtype": "float64"},
    "fp16": {
        "world": 2,
        "layout": f"{PP2} --no-use-distributed-optimizer",
        "flags": f"--num-layers 2 {FLAGS} --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type "
        "rope --fp16 --initial-loss-scale 1024 --loss-scale-window 3",
        "dtype": "float16",
    },
}


def write_tokens(directory: Path) -> None:
    """Write the data of all cases to `directory`."""
    writer = IndexedWriter(directory / PREFIX, np.uint16)
    for n in range(40):
        writer.add([(n * 7 + t * t) % 20 for t in range(5 + n % 11)])
    writer.finish()


def hashes(directory: Path) -> dict[str, str]:
    """Return the sha256 of every full tensor's bytes, with its dtype and shape."""
    checkpoint = offline.open_checkpoint(directory)
    result = {}
    for name in sorted(checkpoint.manifest.tensors):
        values = checkpoint.read(name)
        head = f"{values.dtype} {tuple(values.shape)} ".encode()
        content = head + values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        result[name] = hashlib.sha256(content).hexdigest()[:16]
    return result


def _train(directory: str, case: dict[str, Any]) -> list[float]:
    """Train two steps, save a checkpoint, train four more; return the losses of these four."""
    os.chdir(directory)
    argv = [*case["flags"].split(), *case["layout"].split(), "--save", "run", "--save-interval", "2"]
    config = cli.parse_config_or_exit(argv, PRESETS).config
    rank_info = RankInfo(dist.get_rank(), dist.get_world_size())
    run = build_run(config, rank_info, torch.device("cpu"), dtype=getattr(torch, case["dtype"]))
    saver = open_saver(run, config)
    for _ in range(2):
        train_step(run)
    save(run, saver, dump_config(config))
    saver.close()
    losses = [train_step(run).loss for _ in range(4)]
    run.close()
    return losses


def main() -> None:
    target = FIXTURES / megalite.__version__
    if target.exists():
        sys.exit(f"{target} is there: the fixtures of a release are made once (see the head of this file)")
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as work_dir:
            write_tokens(Path(work_dir))
            losses = run_ranks(case["world"], _train, work_dir, case)[0]
            shutil.copytree(Path(work_dir) / "run" / "iter_0000002", target / name / "iter_0000002")
        facts = {**case, "losses": losses, "tensors": hashes(target / name)}
        (target / name / "expected.json").write_text(json.dumps(facts, indent=0) + "\n")
        print(target / name, sum(path.stat().st_size for path in (target / name).rglob("*") if path.is_file()), "bytes")


if __name__ == "__main__":
    main()
