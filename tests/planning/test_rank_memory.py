"""The memory that is planned is what the ranks of a run allocate."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from cover import rarely

from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.plan.arrangement import Arrangement, arrange
from megalite.plan.memory import ACTIVATIONS_ERROR, by_stage, memory

ROOT = Path(__file__).resolve().parents[2]
GPT = (
    "--mock-data --train-iters 5 --lr 1e-4 --eval-iters 0 --hidden-size 64 --num-attention-heads 4 --bf16 --device cpu "
    "--seq-length 32 --micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --vocab-size 128 "
)
LLAMA = GPT + (
    "--ffn-hidden-size 192 --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
)
WIDE = LLAMA + "--hidden-size 256 --ffn-hidden-size 512 --num-query-groups 4 --micro-batch-size 1"  # the update is most
ODD = LLAMA.replace("--swiglu", "--squared-relu --parallel-residual")
FEW = LLAMA + "--num-experts 4 --moe-ffn-hidden-size 192 --moe-router-topk "  # 4: all get every token, as is planned
WORDS = {"gpt": GPT, "llama": LLAMA, "wide": WIDE, "odd": ODD, "experts": FEW}
TABLE = tomllib.loads(Path(__file__).with_name("rank_memory.toml").read_text("utf-8"))
LAYOUTS = [(world, flags.format_map(WORDS)) for world, flags in TABLE["layouts"]]


def made(flags: Iterable[str], world: int, vocab_size: int | None = None) -> Arrangement:
    config = cli.parse([*flags], PRESETS)
    return arrange(config, world, vocab_size or config.data.vocab_size or 0)


WAYS = {"some": LAYOUTS[4::5], "all": LAYOUTS}  # these: selective, gpipe, whole layers, a window, full, Muon, experts


@pytest.mark.parametrize("which", rarely([*WAYS], ["some"], str, guards=("megalite/plan", "megalite/optim")))
def test_the_memory_of_a_rank_is_what_it_allocates(which: str) -> None:
    """State to the byte, all else within 2 %, on every rank."""
    environment, layouts = {**os.environ, "TRITON_INTERPRET": "1", "MEGALITE_KERNELS": "triton"}, WAYS[which]
    command = [sys.executable, str(Path(__file__).with_name("measured_memory.py")), json.dumps(layouts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(layouts)
    for world, flags, ranks in lines:
        assert len(ranks) == world
        planned = memory(made(flags.split(), world))
        for position, state, most in ranks:
            found = planned[position]
            assert state == found.weights + found.gradients + found.optimizer, flags
            assert found.activations + found.buffers == pytest.approx(most, rel=ACTIVATIONS_ERROR), (flags, position)


@pytest.mark.parametrize("more", ["", "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"])
def test_what_each_stage_would_hold_is_what_a_run_of_that_stage_holds(more: str) -> None:
    flags = f"{LLAMA} --global-batch-size 16 --pp 2 {more}".split()
    told = by_stage(made([*flags, "--zero-stage", "1"], 8))
    sizes = [held.state for held in told]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    for stage, held in enumerate(told):
        of = made([*flags, "--zero-stage", str(stage)], 8)
        assert held in of.holdings, stage
