"""Run directories of finished runs, for tests of the report page."""

import json
from pathlib import Path
from typing import Any

STAGE_LAYERS = [[0, 5], [5, 9], [9, 13], [13, 13]]  # the last stage has only the head
MESH_SIZES = {"world": 8, "pp": 4, "dp": 1, "cp": 1, "tp": 2}


def run_info(**overrides: Any) -> dict[str, Any]:
    """Return the facts of a run that its start event contains."""
    stage_memory = {"weights": 3 << 28, "gradients": 6 << 28, "optimizer": 9 << 28, "activations": 2 << 28}
    info = dict(
        mesh=MESH_SIZES,
        dp_outermost=False,
        layers=STAGE_LAYERS,
        memory=[stage_memory] * 4,
        parameters=7_000_000,
        steps=1000,
    )
    info["command"] = ["pretrain_gpt.py", "--preset", "tiny", "--lr", "1e-3"]
    info["data"] = "0.7000 of web: 900 documents\n0.3000 of code: 100 documents"
    info |= dict(hosts=["node-a", "node-b"], device="cuda")
    info["machine"] = {"torch": "2.13.0", "python": "3.11.7", "environment": "NCCL_DEBUG=WARN\nOMP_NUM_THREADS=1"}
    return {**info, **overrides}


def timeline() -> dict[str, Any]:
    """Return a timeline in the executor's order, with 10 ms per action and one clock per rank."""
    from megalite.pipeline.schedule import build_schedule

    ranks = []
    for rank, row in enumerate(build_schedule("1f1b", 4, 6)):
        spans = [{"action": str(a), "start_s": 0.01 * i, "end_s": 0.01 * (i + 1)} for i, a in enumerate(row)]
        ranks.append({"pp_rank": rank, "spans": spans})
    return {"schedule": "1f1b", "pp": 4, "vpp": 1, "microbatches": 6, "ranks": ranks}


def metric_rows(steps: int, every: int = 1, loss_shift: float = 0.0) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of a run, with validation losses in every 100th."""
    result: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        loss = 2.0 + 8.0 / (1 + step / 20) + 0.02 * (step * 7919 % 13) + loss_shift
        position = {"step": step, "tokens": 512 * step}
        training = {"train/loss": loss, "train/lr": 1e-3, "train/grad_norm": 100 / step, "train/skipped": 0}
        speed = {"perf/tokens_per_s_per_gpu": 1000.0, "perf/mfu": 0.41, "perf/step_s": 0.5, "perf/steps": every}
        result.append(position | training | speed | {"mem/max_allocated_gib": 5.5})
        if step % (100 * every) == 0:
            result += [position | {f"val/{name}/loss": loss + 0.1 + i} for i, name in enumerate(("web", "code"))]
    return result


def write_run(run_dir: Path, steps: int = 1000, loss_shift: float = 0.0, **overrides: Any) -> Path:
    """Write a run directory, with these values instead of those of `run_info`."""
    run_dir.mkdir(parents=True)
    info = run_info(**overrides)
    percent = {"forward": 30.0, "backward": 45.0, "communication": 12.5, "bubble": 9.0, "optimizer": 2.5, "data": 1.0}
    run = {"wall_s": 500.0, "productive_s": 450.0, "processes": 2, "tokens": 0, "goodput": 0.9, "gpu_hours": 1.1}
    report = {"time": "2026-11-22T10:00:00+00:00", "percent": percent, "devices": 8, "flops": 1e15, "steps": steps}
    report |= dict(bottleneck="communication", advice="ranks wait", tokens_per_s=8000.0, run=run, wall_s=400.0)
    events = [
        {"event": "started", "step": 0, "at": 0.0, "from_scratch": True, "run_info": info},
        {"event": "spike", "step": steps // 4, "text": "step 250: loss 9.3 is 12 deviations above"},
        {"event": "ended", "step": steps // 2, "at": 250.0, "outcome": "requeue"},
        {"event": "started", "step": steps // 2, "at": 260.0, "from_scratch": False, "run_info": info},
        {"event": "heartbeat", "step": steps - 5, "memory_gib": [5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7, 5.8]},
        {"event": "ended", "step": steps, "at": 510.0, "outcome": "done"},
    ]
    status = {"outcome": "done", "reason": "reached the last step", "step": steps, "tokens": 512 * steps}
    status |= {"host": "node-a", "time": "2026-11-22T10:00:00+00:00"}
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in metric_rows(steps, loss_shift=loss_shift))
    )
    (run_dir / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in events))
    for name, value in (("status", status), ("report", report), ("timeline", timeline())):
        (run_dir / f"{name}.json").write_text(json.dumps(value))
    model = 'num_layers = 13\nnormalization = "RMSNorm"'
    (run_dir / "run_config.toml").write_text(f"[model]\n{model}\n[optim]\nlr = 0.001\n")
    return run_dir
