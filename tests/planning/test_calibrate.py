"""Profiles: written to and read from JSON, and measured on this machine."""

import dataclasses
import json
from pathlib import Path

import pytest
from train_cases import config_from

from megalite.planning.cluster import DEFAULTS, DEVICES, Link, default_profile, make_cluster, read_profile
from megalite.planning.run_plan import make_run_plan
from megalite.planning.stage_time import calibration_key
from megalite.planning.step_time import predict_step
from tools.planning.calibrate import calibrate

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --seq-length 32 --micro-batch-size 2 "
    "--hidden-dropout 0 --attention-dropout 0 --mock-data --train-iters 1 --lr 1 --device cpu --global-batch-size 8"
)


def test_profile_round_trips_through_json(tmp_path: Path) -> None:
    known = {"blocks": {"layer": (1.0, 2.0, 0.0)}, "shape": "some", "message": Link(1e-6, 2e9)}
    measured = dataclasses.replace(default_profile("h100"), **known)
    for profile in (*DEFAULTS.values(), measured):
        profile.save(tmp_path / "p.json")
        assert read_profile(tmp_path / "p.json") == profile
    assert DEFAULTS.keys() == DEVICES.keys()


def test_profile_keys_are_stable(tmp_path: Path) -> None:
    keys = {"source", "matmul", "head", "attention", "memory", "attention_half", "fused", "tiles", "sums", "kernel_s"}
    keys |= {"dispatch_s", "contention", "step_s", "shape", "device", "blocks", "message", "collective"}
    links = {"message": Link(1e-6, 2e9, 3e9), "collective": Link(4e-6, 5e9)}
    profile = dataclasses.replace(default_profile("h100"), **links)
    profile.save(tmp_path / "p.json")
    written = json.loads((tmp_path / "p.json").read_text())
    assert written.keys() == keys
    assert written["message"] == {"latency_s": 1e-6, "bytes_per_s": 2e9, "label": 3e9}
    assert written["collective"] == {"latency_s": 4e-6, "bytes_per_s": 5e9, "label": 0.0}
    del written["collective"]["label"]  # the key has a default
    (tmp_path / "p.json").write_text(json.dumps(written))
    assert read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": "x", "blocks": {}}'])
def test_invalid_profile_is_refused_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match="is not a profile .*tools/plan.py calibrate --out"):
        read_profile(tmp_path / "p.json")


ODD = [(name, value) for name in ("matmul", "memory", "kernel_s") for value in (0, -1, float("nan"), "abc", None)]


@pytest.mark.parametrize("name,value", [*ODD, ("blocks", {"layer": [1.0, 2.0]})])
def test_invalid_share_is_refused(tmp_path: Path, name: str, value: object) -> None:
    default_profile("h100").save(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps(json.loads((tmp_path / "p.json").read_text()) | {name: value}))
    if (name, value) == ("kernel_s", 0):
        assert read_profile(tmp_path / "p.json").kernel_s == 0
        return
    with pytest.raises(ValueError, match="wrong length" if name == "blocks" else "is not a profile"):
        read_profile(tmp_path / "p.json")


@pytest.mark.nightly
def test_calibration_on_two_ranks_is_used_by_the_plan(tmp_path: Path) -> None:
    config = config_from(f"{TINY} --pp 2")
    profile = calibrate(config, 128, ranks=2, seconds=1.0)
    plan = make_run_plan(config, 2, 128)
    assert profile.shape == calibration_key(plan)
    assert {"layer", "layer, split", "embedding", "head", "update"} == profile.blocks.keys()
    assert all(f > 0 and b > 0 for f, b, _ in profile.blocks.values())
    assert profile.blocks["layer"][2] == 0 and profile.blocks["layer, split"][2] > 0
    assert profile.message and profile.collective and profile.message.latency_s > 0
    assert min(profile.matmul, profile.memory, *profile.attention) > 0
    profile.save(tmp_path / "p.json")
    step = predict_step(plan, make_cluster("cpu", 2), read_profile(tmp_path / "p.json"))
    f, b, _ = profile.blocks["layer"]
    (f0, b0, _), (f1, b1, _) = profile.blocks["embedding"], profile.blocks["head"]
    assert step.parts["compute"] == pytest.approx(plan.shape.num_microbatches * (4 * (f + b) + f0 + b0 + f1 + b1) / 2)
