"""The example of docs/architecture.md: an activation is one new file, and everything trains, plans and prices it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import documents
import pytest

PAGE = documents.ROOT / "docs/architecture.md"
GUARDED = (
    "docs/architecture.md",
    "megalite/config/registry.py",
    "megalite/kernels",
    "megalite/nn",
    "megalite/planning",
)
SHAPE = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
 --micro-batch-size 2 --global-batch-size 4 --vocab-size 100 --mock-data --train-iters 4 --eval-iters 0
 --log-interval 1 --lr 1e-3 --activation"""
# in the copy: train with the activation, plan a run with it, and print both exit codes and the planned costs
PRICED = """import json, sys
from dataclasses import replace
import pretrain_gpt
from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.planning.cluster import default_profile, make_cluster
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.memory import rank_memory
from megalite.planning.run_plan import make_run_plan
from megalite.planning.step_time import predict_step
from tools import plan

trained = pretrain_gpt.main([*sys.argv[1:], "mish", "--save", "run"])
planned = plan.main([*sys.argv[1:], "mish", "--device", "h100", "--num-gpus", "1"])
figures = {}
for name in ("gelu", "mish"):
    one = make_run_plan(cli.parse_config_or_exit([*sys.argv[1:], name], PRESETS).config, 1, 100)
    gpu_only = replace(default_profile("h100"), dispatch_s=0.0)  # or so small a layer waits for the host
    flops = flops_per_token(one.config.model, one.shape.padded_vocab)
    shared = [flops, one.model_states.num_parameters, one.balance.costs_of_stages, one.balance.memory_of_stages]
    compute_s = predict_step(one, make_cluster("h100", 1), gpu_only).parts["compute"]
    figures[name] = [shared, compute_s, rank_memory(one)[0].peak]
print(json.dumps([trained, planned, figures]))"""


def run_in_copy(argv: list[str], directory: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *argv], cwd=directory, env=env, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.nightly(guards=GUARDED)
@pytest.mark.timeout(500)
def test_new_activation_is_one_file(tmp_path: Path) -> None:
    copy = documents.copy_paths(("megalite", "tools", "pretrain_gpt.py"), tmp_path)
    (example,) = [text for language, text in documents.fenced_blocks(PAGE) if language == "python" and "mish" in text]
    (copy / "megalite/kernels/activations/mish.py").write_text(example)

    trained, planned, figures = json.loads(run_in_copy(["-c", PRICED, *SHAPE.split()], copy).splitlines()[-1])
    steps = [json.loads(line) for line in (copy / "run/metrics.jsonl").read_text().splitlines()]
    assert trained == planned == 0 and len(steps) == 4 and steps[-1]["train/loss"] < steps[0]["train/loss"]
    (shared, seconds, peak), (shared_of_gelu, seconds_of_gelu, peak_of_gelu) = figures["mish"], figures["gelu"]
    assert shared == shared_of_gelu  # only matmuls count as FLOPs, and only the input is saved
    logged = [step["perf/tflops_per_gpu"] / step["perf/tokens_per_s_per_gpu"] for step in steps]
    assert logged == pytest.approx([shared[0] / 1e12] * 4)
    assert seconds > seconds_of_gelu and peak > peak_of_gelu  # no kernel of its own: more memory traffic, a higher peak
    bench = ["tools/benchmark.py", "--steps", "1", "--warmup", "1", "--repeats", "1", "--json", "bench.json"]
    run_in_copy([*bench, *SHAPE.split(), "mish"], copy)
    ((run,),) = [row["runs"] for row in json.loads((copy / "bench.json").read_text())["rows"]]
    assert run["losses"][0] == steps[0]["train/loss"] and run["flops_per_step"] == 4 * 64 * shared[0]
