"""tools/gpu_report.py without a GPU: its parts run, a failing one stops no other, its goals name what is measured."""

import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
import torch

from tools import gpu_report
from tools.bench import gpu_report_goals, gpu_report_parts, gpu_report_probe, gpu_report_tests
from tools.bench import timeout as limited
from tools.bench.gpu_report_parts import ReportPart, ReportSetting
from tools.bench.gpu_report_runs import TRAINING_RUNS
from tools.bench.kernel_cases import CASES, GPU_SIZES, list_cases
from tools.cli_common import read_json

# Hides the packages that only a developer's machine has. Python imports it when it starts, as sitecustomize, so it
# applies to every process of the report.
BLOCK = """
import sys
class Block:
    names = ("tyro", "rich", "tokenizers", "safetensors", "xxhash", "transformers", "hypothesis", "tensorboard", "wandb",
             "matplotlib", "xdist", "pytest_timeout", "tiktoken", "pyarrow", "zstandard", "moto", "boto3", "s3fs")
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named '{name}'")
sys.meta_path.insert(0, Block())
"""
# the quick kinds of part
KINDS = "llama3-8b-4096 nccl kernels tests attention cuda-graphs gpt2 tiles".split()


@pytest.mark.nightly(guards=("tools/gpu_report.py", "tools/bench"))
def test_report_dry_run_needs_no_further_package(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    argv = ["--out", str(tmp_path / "out"), "--cpu", "--only", *KINDS]
    programs.run_python("tools/gpu_report.py", *argv, env=env, timeout=400, check=True)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    page = (tmp_path / "out" / "report.md").read_text()
    states = {part["name"]: part["status"] for part in report["parts"]}
    assert set(states.values()) == {"ok"} and len(states) == len(KINDS)
    facts, results = report["facts"], report["results"]
    assert (facts["torch"], facts["device"]) == (torch.__version__, "CPU") and facts["date"] and facts["commit"]
    assert results["kernels"]["interpreted"] and results["kernels"]["complete"] and not results["kernels"]["errors"]
    assert {row["peer"] for row in results["kernels"]["rows"]} == {"megalite", "torch", "triton"}
    trained = results["train llama3-8b-4096"]
    assert sum(trained["parts"].values()) == pytest.approx(1)
    assert 0 < trained["overhead"] < 1 and trained["memory"] > 1 << 20 and trained["mfu"] > 0
    tests = results["tests"]
    assert tests["skipped"] > 200 and tests["passed"] == tests["failed"] == tests["did_not_end"] == 0
    assert tests["without_their_packages"] == []
    rows = results["lever attention"]["rows"] + results["lever cuda-graphs"]["rows"]
    assert [row["values"] for row in rows if row["status"] != "ok"] == [{"cuda-graph-impl": "local"}]
    assert len(rows) == 4 and all(row["mfu"] > 0 for row in rows if row["status"] == "ok")
    gpt2 = results["gpt2"]
    curve = gpt2["curves"]["train/loss"]
    assert curve[-1][0] == 10 and curve[-1][1] < curve[0][1] and gpt2["curves"]["val/valid/loss"]
    assert [sample["prompt"] for sample in gpt2["samples"]] == list(gpu_report_parts.PROMPTS)
    assert all(sample["prompt"] in page for sample in gpt2["samples"]) and f"| 10 | {curve[-1][1]:.4f} |" in page
    assert results["tiles"]["best"][0]["kernel"] == "rms_norm backward" and "| rms_norm backward, " in page
    assert "| attention | attention-kernel triton | " in page and "cuda-graph-impl local | refused: " in page
    assert {figure["met"] for figure in report["figures"]} == {"not judged", "not measured"}
    assert "dry run" in page and "rms_norm forward " in page and f"| {facts['torch']} |" in page


def test_report_without_a_gpu_says_why(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_report.main(["--out", str(tmp_path / "out")]) == 3
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and re.fullmatch(
        r"gpu_report.py: torch sees no CUDA device \(.+\); use a machine with one, or --cpu .*", line
    )


def test_report_directory_that_cannot_be_created_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        gpu_report.main(["--cpu", "--out", "/dev/null/x"])
    assert stop.value.code == 2 and "--out /dev/null/x cannot be made" in capsys.readouterr().err


ROWS = "import json, os, subprocess, sys, time\nopen(sys.argv[1], 'w').write('{\"rows\": []}')\n"


def part(name: str, *codes: str, limit_s: float = 60) -> ReportPart:
    """Return a part that runs each of `codes`, with the file of its results as its first argument."""

    def commands(directory: Path, seconds: float) -> list[list[str]]:
        return [[sys.executable, "-c", code, str(directory / "kernels.json")] for code in codes]

    return ReportPart(name, name, limit_s, commands, lambda f: read_json(f / "kernels.json"))


def report_of(directory: Path, parts: list[ReportPart], cpu: bool = True) -> tuple[dict[str, Any], str]:
    """Run `parts` and a healthy one after them; return report.json and report.md."""
    parts = [*parts, part("last", ROWS)]
    report = gpu_report.Report(directory, {"device": "none"}, parts, ReportSetting(cpu, {}))
    gpu_report.run_all(parts, report, time.monotonic() + 100)
    return json.loads((directory / "report.json").read_text()), (directory / "report.md").read_text()


WRITE = "import sys; open(sys.argv[1], 'w').write"


@pytest.mark.parametrize(
    "code, status, message",
    [
        ("import os; print('last words', flush=True); os.abort()", "failed (exit code -6)", "last words"),
        (f"{ROWS}time.sleep(60)", "out of time", "in <module>"),
        (f"{WRITE}('{{\"rows\"')", "results cannot be read: JSONDecodeError", "Traceback"),
        (f"{WRITE}('{{\"rows\": [{{}}]}}')", "results cannot be read: KeyError", "Traceback"),
        ("", "failed (no results)", ""),
        ("raise SystemExit('triton.compiler.errors.CompilationError: at 3:4')", "failed (exit code 1)", "at 3:4"),
    ],
    ids=["crash", "hang", "cut", "rows", "silent", "compiler"],
)
def test_failing_part_is_named_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, status: str, message: str
) -> None:
    monkeypatch.setattr(gpu_report, "MIN_PART_S", 0.5)
    report, text = report_of(tmp_path, [part("kernels", code, limit_s=2 if "sleep" in code else 60)])
    bad, last = report["parts"]
    assert status in bad["status"] and bad["status"] in text and message in text
    assert last["status"] == "ok" and report["results"]["last"] == {"rows": []}
    assert ("kernels" in report["results"]) == (bad["status"] == "out of time")  # its partial results count


def test_part_that_cannot_start_is_reported(tmp_path: Path) -> None:
    def broken(directory: Path, seconds: float) -> list[list[str]]:
        raise LookupError("no command")

    odd = ReportPart("odd", "odd", 60, broken, lambda f: {})
    report, text = report_of(tmp_path, [odd, part("short", ROWS, limit_s=0.4)])
    assert [p["status"] for p in report["parts"]] == ["failed (it could not be run)", "not run: no time was left", "ok"]
    assert "LookupError: no command" in text and "in broken" in text


def test_failing_command_is_the_last_of_its_part(tmp_path: Path) -> None:
    stopped = "import sys; sys.exit(75)"  # a run that stopped when it was told to
    report, text = report_of(tmp_path, [part("chain", ROWS, stopped, "1 / 0", "print('not run')")])
    assert report["parts"][0]["status"] == "failed (exit code 1)" and "1 / 0" in report["parts"][0]["command"]
    assert report["results"]["chain"] == {"rows": []} and "ZeroDivisionError" in text and "not run" not in text


def test_unwritable_report_does_not_stop_the_parts(tmp_path: Path, capsys) -> None:
    (tmp_path / "report.json").mkdir()
    second = part("kernels", "import sys, os; os.rmdir(os.path.dirname(sys.argv[1]) + '/../report.json')")
    report, _ = report_of(tmp_path, [part("first", ROWS), second])  # it can be written again after the second
    assert [p["status"] for p in report["parts"]] == ["ok", "failed (no results)", "ok"]
    assert "cannot be written: Is a directory" in capsys.readouterr().err


def test_parts_wait_for_a_driver_that_is_down(tmp_path: Path, monkeypatch) -> None:
    """A file stands for the driver: it holds the number of probes that will still fail."""
    down = tmp_path / "down"
    probe = f"import pathlib; p = pathlib.Path({str(down)!r}); n = int(p.read_text()) if p.exists() else 0\n"
    probe += "p.write_text(str(n - 1))\nif n > 0: raise RuntimeError('CUDA error: unspecified launch failure')"
    monkeypatch.setattr(gpu_report, "PROBE", [sys.executable, "-c", probe])
    crash = part("crash", f"open({str(down)!r}, 'w').write('3'); exit('Xid 79')")
    report, text = report_of(tmp_path, [crash, part("a", ROWS), part("b", ROWS)], cpu=False)
    states = ["failed (exit code 1)", *["not run: the GPU does not respond"] * 2, "ok"]
    assert [p["status"] for p in report["parts"]] == states
    warnings = report["facts"]["warnings"]
    assert (
        len(warnings) == 2 and "does not respond after crash" in warnings[0] and "responds before last" in warnings[1]
    )
    assert "unspecified launch failure" in text


def test_interrupted_report_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that it has started end with it, as tests/tools/test_timeout.py shows."""
    real = limited.run
    monkeypatch.setattr(
        limited, "run", lambda *args: gpu_report.on_sigterm() if "long" in str(args[1]) else real(*args)
    )
    with pytest.raises(SystemExit, match="143"):
        report_of(tmp_path, [part("first", ROWS), part("long", "")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["results"] == {"first": {"rows": []}}
    assert [p["status"] for p in report["parts"]] == ["ok", "interrupted", "waiting"]


NVIDIA_SMI = """#!/bin/sh
echo 'NVIDIA H200, 580.159.04, Exclusive_Process, Enabled, 3, 97, 1000, 50, 500.00, 700.00'
echo 'NVIDIA H200, 580.159.04, Default, Disabled, 0, 0, 0, 40, 700.00, 700.00'
"""


def test_busy_partitioned_or_damaged_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = gpu_report_probe.query_gpus()
    assert [gpu["driver_version"] for gpu in gpus] == ["580.159.04"] * 2 and len(gpus[0]) == 10
    facts = {"triton": None, "free": 50 << 30, "memory": 100 << 30, "gpu_status": gpus}
    expected = ["triton is not installed", "others hold 50.0 GiB", "GPU 0 is divided"]
    expected += ["GPU 0 has uncorrected memory errors", "GPU 0 is 97 % busy"]
    expected += ["GPU 0 takes one process at a time", "GPU 0 may take 500.00 W of"]
    warnings = gpu_report_probe.warnings_of(facts)
    assert len(warnings) == len(expected) and all(
        fragment in text for fragment, text in zip(expected, warnings, strict=True)
    )
    assert gpu_report_probe.warnings_of({"triton": "3.6.0", "memory": 1, "gpu_status": gpus[1:]}) == []
    fails = "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{fails}")
    assert gpu_report_probe.query_gpus() == []


def test_parts_without_triton_or_several_gpus_are_skipped() -> None:
    parts = gpu_report_parts.list_parts(ReportSetting(False, {}, missing=("triton", "pytest")))
    states = {part.name: part.skip for part in parts}
    assert "triton is not installed" in str(states["kernels"]) and "triton is not installed" in str(states["peers"])
    assert "pytest is not installed" in str(states["tests"]) and states["gpt2"] is None
    assert states["nccl"] == states["layouts"] == "needs 2 GPUs; torch sees 1" and states["lever attention"] is None
    by_name = {part.name: part for part in gpu_report_parts.list_parts(ReportSetting(False, {}, 4))}
    assert by_name["nccl"].skip is by_name["layouts"].skip is None
    (argv,) = by_name["layouts"].commands(Path("x"), 60)
    assert argv[argv.index("--nproc") + 1] == "4" and "tensor-model-parallel-size=1,2,4" in argv


def test_missing_packages_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("triton", "pytest") else real(name))
    monkeypatch.setattr(gpu_report, "probe_machine", lambda *_: ({}, "it ends here"))
    assert gpu_report.main(["--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err.splitlines()[0].startswith("gpu_report.py: not installed: triton, pytest; ")


def test_every_kernel_goal_names_a_measured_row() -> None:
    """With every row that a run on a GPU measures, each goal has a value."""
    measurements = {"us": 1.0, "of_copy": 0.95, "gb_s": 4000.0, "tflops": 700.0, "extra_mib": 10.0}
    peers = ("megalite", "torch", "compile", "liger", "cudnn", "triton")
    rows = [
        {"kernel": case.name, "shape": case.shape(s), "peer": peer, **measurements}
        for case, s in list_cases(GPU_SIZES, torch.bfloat16, torch.device("cpu"))
        for peer in peers
        if peer in ("megalite", "torch", "compile", *case.peers)
    ]
    results = {"kernels": {"rows": rows}, "peers": {"rows": rows}}
    goals = list(gpu_report_goals.kernel_goals(results))
    assert len(goals) > 40
    for goal, unmeasured in zip(goals, gpu_report_goals.kernel_goals({}), strict=True):
        assert goal.to_json(judge=True)["met"] == "yes", goal.name
        assert unmeasured.to_json(judge=True)["met"] == "not measured"
    ops = set(gpu_report_parts.FUSED_KERNELS.split(","))
    assert {goal.name.split()[0] for goal in goals if "Liger" in goal.name} < ops <= {case.op for case in CASES}


def test_goals_are_compared_in_their_direction() -> None:
    trained = {"mfu": 0.61, "memory": 104.0, "estimate": 100.0, "overhead": 0.031, "tokens_per_s": 1.0}
    tests = {"passed": 3, "failed": 0, "did_not_end": 1}
    results = {"train llama3-8b-4096": trained, "train gpt-1.3b-2048": trained, "tests": tests}
    met = {goal.name: goal.to_json(judge=True)["met"] for goal in gpu_report_goals.goals(results)}
    assert met["training llama3-8b-4096: MFU"] == "NO" and met["training gpt-1.3b-2048: MFU"] == "yes"
    assert met["training llama3-8b-4096: peak memory off the estimate"] == "yes"
    assert met["training llama3-8b-4096: step outside forward and backward"] == "NO"
    assert met["GPU tests that fail"] == "NO"


def test_killed_tests_report_the_last_one(tmp_path: Path) -> None:
    rows = [{"test": "a", "outcome": "began"}, {"test": "a", "outcome": "passed", "text": ""}]
    rows += [{"test": "b", "outcome": "began"}]
    rows += [{"test": "c.py", "outcome": "skipped", "text": "No module named 'hypothesis'"}]
    (tmp_path / "share0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"test": "b", "ou')
    results = gpu_report_tests.read(tmp_path)
    assert (results["passed"], results["did_not_end"], results["failures"][0]["test"]) == (1, 1, "b")
    assert (results["skipped"], results["without_their_packages"]) == (1, ["c.py"])


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_important_parts_get_their_time(num_gpus: int) -> None:
    """The parts after them get the remaining time. GPT-2 needs at least 100 s."""
    plans = {run.name: {} for run in TRAINING_RUNS}
    parts = [p for p in gpu_report_parts.list_parts(ReportSetting(False, plans, num_gpus)) if p.skip is None]
    names = [part.name for part in parts]
    assert names[:4] == ["tests", "train llama3-8b-4096", "lever attention", "lever experts"]
    important = parts[: names.index("gpt2")]
    total_s = gpu_report.TOTAL_S if num_gpus == 1 else gpu_report.MULTI_GPU_TOTAL_S
    assert sum(part.limit_s for part in important) + 100 < total_s < (480 if num_gpus == 1 else 600)


GPU_TESTS = """
import ctypes, os, signal, sys
import pytest
pytestmark = pytest.mark.gpu
def test_a(): pass
def test_b_hangs():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).sleep(1000)
def test_c_crashes(): os.abort()
def test_d_breaks_the_gpu():
    import torch
    def synchronize(): raise RuntimeError("CUDA error")
    torch.cuda.synchronize = synchronize
    raise RuntimeError("CUDA error: misaligned address")
def test_e(): assert "torch" not in sys.modules
def test_f(): pass
"""


def test_hang_crash_and_broken_gpu_cost_one_test_each(tmp_path: Path) -> None:
    """Real processes: a hang in C that ignores SIGTERM, an abort, and a fault after which every test would fail."""
    (tmp_path / "test_gpu.py").write_text(GPU_TESTS)
    argv = [str(tmp_path), "--tests", str(tmp_path), "--test-seconds", "4"]
    done = programs.run_python("tools/bench/gpu_report_tests.py", *argv, timeout=200)
    results = gpu_report_tests.read(tmp_path)
    assert done.returncode == 1 and (results["passed"], results["failed"], results["did_not_end"]) == (3, 1, 2)
    failed = [failure["test"].rpartition("::")[2] for failure in results["failures"]]
    assert failed == ["test_b_hangs", "test_c_crashes", "test_d_breaks_the_gpu"]
    assert "in test_b_hangs" in done.stderr  # the stack of the hanging test


def test_process_that_starts_no_test_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "test_gpu.py").write_text("import os, pytest\npytest.mark.gpu\nos._exit(7)")
    done = programs.run_python("tools/bench/gpu_report_tests.py", str(tmp_path), "--tests", str(tmp_path))
    assert done.returncode == 1 and gpu_report_tests.read(tmp_path) == {}
