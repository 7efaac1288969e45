"""tools/plan.py as users type it."""

import argparse
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import programs
import pytest
from programs import run_python
from toml_tables import MESSAGES
from train_cases import config_from

from megalite.config.validation import find_problems
from megalite.planning.cluster import default_profile
from megalite.planning.cluster import make_cluster as plan_cluster
from megalite.planning.run_plan import RunPlan
from megalite.planning.run_shape import RunShape
from tools import plan, plot
from tools.planning import wizard
from tools.plots.plan import picture as plan_picture
from tools.plots.style import WIDE

SHAPE = "--num-layers 6 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000".split()
BATCH = "--global-batch-size 32 --num-gpus 16".split()
ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDERS = "--lr 1e-4 --train-iters 10 --micro-batch-size 1".split()


def test_plan_prints_layouts_memory_budget_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed command parses and is valid on these devices."""
    file, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    argv = [*SHAPE, *BATCH, "--top", "3", "--tokens", "2B", "--data-tokens", "200M", "--json", str(file)]
    assert plan.main([*argv, "--out", str(picture)]) == 0
    text = capsys.readouterr().out
    for part in ("16 x h100 (2 nodes of 8)", "sizing by hand:", "layout", "GiB per rank", "bound by", "epochs",
                 "10.00 over 200,000,000 tokens", "minutes at", "8.2 times", "NCCL_SOCKET_IFNAME", "#SBATCH --nodes=2"):  # fmt: skip
        assert part in text, part
    command = text.partition("slurm.sh RUN_DIR")[2].partition("\n(")[0].replace("\\\n", " ").split()
    result = json.loads(file.read_text())
    for flags in (result["command"], command):
        config = config_from(flags)
        assert not find_problems(config, 16)
    assert len(result["plans"]) == 3 and result["plans"][0]["world"] == 16
    assert len({(row["layout"]["tp"], row["layout"]["pp"], row["layout"]["zero"]) for row in result["plans"]}) == 3
    assert re.search(r"layouts: [\d,]+ cannot be built, .* here 3 of \d", " ".join(text.split()))
    assert re.search(r"time +\S+ minutes at \S+ tokens/s \(.* minutes to .* minutes by an error of 15%\)", text)
    for row in result["plans"]:
        min_seconds = min(p["fastest"]["seconds"] for p in result["plans"])
        assert row["fastest"]["seconds"] <= row["seconds"] <= 1.15 * min_seconds
        low, high = row["about_seconds"]
        assert low == pytest.approx(row["seconds"] / 1.15) and high == pytest.approx(row["seconds"] / 0.85)
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"])
        assert (
            row["peak"] == max(sum(stage_memory.values()) for stage_memory in row["memory"]) <= result["usable_memory"]
        )
    assert result["command"][-1] == str(-(-2 * 10**9 // (32 * 1024)))
    svg = picture.read_text()
    assert svg.startswith("<?xml") and "parameters on 16 h100" in svg and "Planned memory of each pipeline rank" in svg
    plot.main(["plan", str(file), "--out", str(tmp_path / "again.png"), "--narrow"])
    assert (tmp_path / "again.png").read_bytes()[:4] == b"\x89PNG"
    plot.main(["plan", str(file), "--show", "layout", "--out", str(tmp_path / "layout.svg")])
    assert "<svg" in (tmp_path / "layout.svg").read_text("utf-8")
    for damage in ({"layers": []}, {"world": float("inf")}, {"first_ranks": [0, 1, 2]}, {"layout": {"tp": 1, "pp": 0}}):
        file.write_text(json.dumps(result | {"plans": [result["plans"][0] | damage]}))
        with pytest.raises(SystemExit, match="^3$"):
            plot.main(["plan", str(file), "--show", "layout"])
        assert "not a plan of tools/plan.py --json" in capsys.readouterr().err


@pytest.mark.parametrize("cp_s", [0.0, 0.5])
def test_plan_picture_shows_all_parts_of_a_step(cp_s: float) -> None:
    """The bar is as long as the step; cp has an entry in the legend only if a layout has it."""
    parts = {"compute": 2.0, "bubble": 0.5, "tp": 0.25, "cp": cp_s, "pp": 0.125, "dp": 0.125, "optimizer": 0.5}
    memory = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "buffers"), 2**30)
    layout = {"name": "cp 2", "parts": parts, "memory": [memory], "world": 8, "mfu": 0.5, "tokens_per_s": 1.0}
    layout |= {"seconds": sum(parts.values()), "about_seconds": [3.0, 5.0]}
    data = {"plans": [layout], "device_memory": 80 * 2**30, "usable_memory": 72 * 2**30, "parameters": 8e9}
    axis = plan_picture({**data, "cluster": {"device": "h100"}}).draw(WIDE).axes[1]
    assert max(bar.get_x() + bar.get_width() for bar in axis.patches) == pytest.approx(sum(parts.values()))
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert ("exposed cp" in labels) == (cp_s > 0)


def test_wizard_answers_give_the_same_plan_as_flags(tmp_path: Path, monkeypatch, capsys) -> None:
    """A wrong answer repeats the question with a rule; the end of stdin selects defaults; the TOML starts the plan."""
    wizard_json, flags_json, toml = tmp_path / "asked.json", tmp_path / "plain.json", tmp_path / "run.toml"
    answers = ["4" * 300, *"gpt 4x256x4 h1000 cpu 0 2".split()]  # the first is too long for the name of a file
    answers += ["", "x", "4", "1M", "soon", "0 days", "0.001 days", "/no/x", str(toml)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(answers)))
    options = ["--precision", "fp32", "--top", "1", "--json"]
    assert plan.main(["--ask", *options, str(wizard_json)]) == 0
    text = capsys.readouterr().out
    for rule in ("gpt is not a file or a preset", "device=h1000 is not in the table", "'0' is not a number above 0",
                 "'x' is not a number above 0", "soon is not a limit", "0 days is not a limit", "/no is not a directory"):  # fmt: skip
        assert text.count(rule) == 1, rule
    assert re.search(
        r"why this one:\n  tp \d: .+\n  pp \d: .+\n  zero \d: .+\n  limit 0.001 days: .* needs about \d+ dev", text
    )
    shape = "--preset llama3-8b --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 896"
    flags = (
        f"{shape} --num-query-groups 4 --seq-length 8192 --global-batch-size 4 --device cpu --num-gpus 2 --tokens 1M"
    )
    assert plan.main([*flags.split(), *options, str(flags_json)]) == 0
    from_wizard, from_flags = (json.loads(file.read_text()) for file in (wizard_json, flags_json))
    assert from_wizard["command"] == from_flags["command"] and from_wizard["parameters"] == from_flags["parameters"]
    assert config_from(["--config", str(toml)]) == config_from(from_wizard["command"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("tiny\ncpu\n1\n"))
    assert plan.main(["--ask", *options, str(wizard_json)]) == 0 and "on 1 devices" in capsys.readouterr().out


def run_wizard(directory: Path, *answers: str, terminal: bool = False) -> tuple[str, dict[str, Any]]:
    """Run `plan.py --ask` with these answers and defaults for the rest; return its output and the plan."""
    argv = ["tools/plan.py", "--ask", "--precision", "bf16", "--top", "1", "--json", str(directory / "plan.json")]
    text = "".join(f"{answer}\n" for answer in answers)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT}
    if not terminal:
        finished = programs.run([sys.executable, *argv], input=text.encode(), timeout=200, **pipes)
        out = finished.stdout
    else:
        controller_fd, terminal_fd = pty.openpty()
        process = programs.Popen([sys.executable, *argv], stdin=terminal_fd, **pipes)
        os.close(terminal_fd)
        os.write(controller_fd, text.encode() + b"\n" * 8)
        out, _ = process.communicate(timeout=200)
        os.close(controller_fd)
        finished = process
    output = out.decode()
    assert finished.returncode == 0, output
    return output, json.loads((directory / "plan.json").read_text())


SMALL_ANSWERS = ("4x512x4", "2xh100", "1K", "64")  # model, device, sequence, batch


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_wizard_accepts_common_spellings(tmp_path: Path, terminal: bool) -> None:
    output, result = run_wizard(tmp_path, "4x512x4", "16xh100", "1K", "1M", "100B", "16", terminal=terminal)
    assert result["cluster"] == {"device": "h100", "nodes": 2, "per_node": 8}
    assert result["tokens"] == 100 * 10**9 and "How many of them" not in output and "limit 16 days" in output
    command = result["command"]
    assert (
        command[command.index("--seq-length") + 1] == "1024"
        and command[command.index("--global-batch-size") + 1] == "976"
    )
    for line in (
        "a Llama of 4x512x4",
        "16 x h100",
        "1,024 tokens",
        "976 sequences",
        "100,000,000,000 tokens",
        "16 days",
    ):
        assert f"  that is {line}\n" in output, line


def test_wizard_repeats_only_interpreted_answers(tmp_path: Path) -> None:
    output, result = run_wizard(tmp_path, "tiny", "h100", "8", "512", "1,024", "x", "2000000000", "30 days")
    assert "that is" not in output and "'x' is not a number of tokens; write it as 300B or 15.6T" in output
    assert result["cluster"]["nodes"] == 1 and result["tokens"] == 2 * 10**9
    command = result["command"]  # the preset tiny has 256
    assert (
        command[command.index("--max-position-embeddings") + 1] == command[command.index("--seq-length") + 1] == "512"
    )


@pytest.mark.parametrize(
    ("answers", "cluster"),
    {
        ("16",): ("h100", 2, 8),  # the default device
        ("2x8xH100",): ("h100", 2, 8),
        ("h100:8",): ("h100", 1, 8),
        ("4 a100s",): ("a100", 1, 4),
        ("H100", "16xh200"): ("h200", 2, 8),
        ("b200", "4x4"): ("b200", 4, 4),
        ("b200", "12", "b200", "16"): ("b200", 2, 8),
    }.items(),
)
def test_wizard_devices(answers: Sequence[str], cluster: tuple[str, int, int], monkeypatch, capsys) -> None:
    args = argparse.Namespace()
    lines = [*SMALL_ANSWERS[:1], *answers, *SMALL_ANSWERS[2:]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    flags = wizard.ask_all(args)
    planned_cluster = plan_cluster(args.device, args.num_gpus, args.gpus_per_node)
    assert (planned_cluster.device.name, planned_cluster.num_nodes, planned_cluster.devices_per_node) == cluster
    assert flags[-4:] == ["--seq-length", "1024", "--global-batch-size", "64"]
    num_repeated_questions = capsys.readouterr().out.count("write it as") + ("12" in answers)
    assert num_repeated_questions == (2 if "12" in answers else 0)


@pytest.mark.parametrize(
    ("text", "read"),
    {
        "16": (16, "days"), "2 weeks": (14, "days"), "20k $": (20000, "$"), "$20,000": (20000, "$"), "none": None
    }.items(),
)  # fmt: skip
def test_wizard_limits(text: str, read: object) -> None:
    assert wizard.parse_limit(text) == read


def test_wizard_model_by_size() -> None:
    """A model of 8B, 70B and so on has about as many parameters as the trainer counts."""
    for text, expected_parameters in (("1B", 1e9), ("8b", 8e9), ("70B", 70e9), ("100 billion", 100e9), ("405B", 405e9)):
        config = config_from([*wizard.parse_model(text), *BATCH[:2], "--mock-data", *PLACEHOLDERS])
        run_plan = RunPlan(RunShape(config, 1, 128256))
        assert run_plan.model_states.num_parameters == pytest.approx(expected_parameters, rel=0.08), text
        model = config.model
        assert model.hidden_size == 128 * model.num_attention_heads and model.num_attention_heads % 8 == 0
    assert wizard.parse_model("Llama 3 8B") == wizard.parse_model("llama3-8b") == ["--preset", "llama3-8b"]
    for text, rule in (
        ("1M", "no usual shape"),
        ("llama-8b", "did you mean llama3-8b?"),
        ("16xh100", "not a file or a preset"),
    ):
        with pytest.raises(ValueError, match=re.escape(rule)):
            wizard.parse_model(text)


def test_plan_uses_the_final_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Layouts are compared at the final batch size; 62 steps of 16 samples come first, then 47 of 64."""
    argv = [*SHAPE, "--num-gpus", "16", "--step-batch-size-schedule", "0:16 1M:64", "--train-samples", "4000"]
    for layout in ([], ["--tp", "2", "--pp", "2"]):
        assert plan.main([*argv, *layout]) == 0
        text = capsys.readouterr().out
        assert "bfloat16, batch of 65,536 tokens" in text
        assert "109 of 65,536 tokens, once the batch has grown" in text and "4,096,000 (" in text
    assert plan.main([*argv[:-4], "--tp", "2", "--pp", "2", "--train-iters", "100"]) == 0
    assert "100 of 4,096 tokens\n" in capsys.readouterr().out  # a micro-batch for each of 4 ranks
    assert plan.main([*argv[:-4], "--train-iters", "100"]) == 2
    assert "global_batch_size is not set" in capsys.readouterr().err


def test_plan_reports_shortage_in_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SHAPE, *BATCH, "--tp", "2", "--pp", "2", "--tokens"]
    for tokens, unit in (("1M", " s at "), ("100M", " minutes at "), ("10B", " hours at "), ("400B", " days at ")):
        assert plan.main([*argv, tokens]) == 0
        rows = dict(re.findall(r"^  (time|cost|device hours) +(.*)$", capsys.readouterr().out, re.MULTILINE))
        assert unit in rows["time"] and not any(text.startswith("0 ") for text in rows.values()), rows


def test_overlap_replaces_the_batch_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[train]\nglobal_batch_size = 24\nrampup_batch_size = [8, 8, 1000]\n")
    flags = (
        "overlap --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 64 --num-gpus 2"
    )
    assert plan.main([*flags.split(), "--config", str(tmp_path / "run.toml")]) == 0
    from_file = capsys.readouterr()
    for text in ("global_batch_size=24", "rampup_batch_size=8,8,1000"):
        assert f"note: {text} is replaced by the batches that are compared" in from_file.err
    assert plan.main(flags.split()) == 0
    assert capsys.readouterr().out == from_file.out


def test_overlap_checks_its_files_before_it_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["overlap", "--preset", "llama3-8b", "--out", str(tmp_path / "overlap.xyz")]
    assert plan.main(flags) == 2
    captured = capsys.readouterr()
    assert "overlap.xyz" in captured.err and not captured.out


@pytest.mark.presubmit
def test_overlap_has_the_exposed_communication_of_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is the plan with its batch, and larger batches hide more."""
    layout = "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 32000".split()
    layout += "--num-gpus 32 --pp 2 --zero-stage 2".split()
    files = ["--json", str(tmp_path / "overlap.json"), "--out", str(tmp_path / "overlap.svg")]
    assert plan.main(["overlap", *layout, *files]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    exposed = [float(row[row.index("%") - 1]) for row in rows]
    assert len(rows) == 10 and exposed[:5] == sorted(exposed[:5], reverse=True) and exposed[0] > exposed[4]
    assert exposed[5:] == sorted(exposed[5:], reverse=True) and exposed[0] == exposed[5]
    curves = json.loads((tmp_path / "overlap.json").read_text())["curves"]
    points = [point for name in curves for point in curves[name]]
    assert [f"{100 * point['exposed']:.1f}" for point in points] == [f"{share:.1f}" for share in exposed]
    assert all(point["fits"] == ("too much" not in " ".join(row)) for point, row in zip(points, rows, strict=True))
    drawn = (tmp_path / "overlap.svg").read_text()
    assert all(name in drawn for name in curves)
    for row, share in [*zip(rows, exposed, strict=True)][1:7:5]:
        batch = ["--micro-batch-size", row[0], "--global-batch-size", row[2].replace(",", "")]
        plan.main([*layout, *batch, "--json", str(tmp_path / "plan.json")])
        [planned] = json.loads((tmp_path / "plan.json").read_text())["plans"]
        parts = planned["parts"]
        shares = sum(parts[axis] for axis in ("tp", "cp", "pp", "dp")) / sum(parts.values())
        assert share == pytest.approx(100 * shares, abs=0.06)


def test_plan_of_a_given_layout(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SHAPE, *BATCH, "--tp", "2", "--pp", "2", "--micro-batch-size", "2"]
    assert plan.main(argv) == 0
    assert "as given: tp 2 pp 2 mb 2" in capsys.readouterr().out
    assert plan.main(["memory", *argv]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tp 2 pp 2 mb 2, dp 4, 4 micro-batches") and "pipeline rank 1" in text
    assert plan.main([*argv, "--optimizer-cpu-offload"]) == 0
    assert "its copies and updates are not in the time" in capsys.readouterr().out
    assert plan.main(["--preset", "llama3-70b", "--tp", "2", "--num-gpus", "8"]) == 1
    text = capsys.readouterr().out
    assert "does not fit into 71.7 GiB" in text and "layouts:" not in text


def test_plan_proposes_offload_if_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--preset", "llama3-70b", "--num-gpus", "8", "--global-batch-size", "8", "--micro-batch-size", "1"]
    assert plan.main([*argv, "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Nothing fits without --optimizer-cpu-offload") and "of host memory per rank" in text
    assert "--optimizer-cpu-offload" in text[text.rindex("sbatch") :]
    for more in (["--no-optimizer-cpu-offload"], ["--optimizer", "muon"], ["--device", "v100"]):
        assert plan.main([*argv, *more]) == 2
        assert "Nothing fits without" not in capsys.readouterr().out


def test_plan_with_hugging_face_model_and_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "silu", "rope_theta": 500000.0}))
    (tmp_path / "cluster.toml").write_text('device = "a100"\nnodes = 2\nper_node = 4\n')
    argv = ["--hf", str(tmp_path), "--cluster", str(tmp_path / "cluster.toml"), "--global-batch-size", "16"]
    assert plan.main([*argv, "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "8 x a100 (2 nodes of 4)" in text and "--num-query-groups 4" in text and "--rotary-base 500000.0" in text
    command = text.partition("slurm.sh RUN_DIR")[2].partition("\n(")[0].replace("\\\n", " ").split()
    printed_config = config_from(command)
    model = printed_config.model
    assert (model.num_layers, model.num_kv_groups, model.ffn_size, model.max_positions, model.activation) == (
        4,
        4,
        704,
        2048,
        "swiglu",
    )
    assert not find_problems(printed_config, 8)


def test_plan_with_sizes_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["sizes", "--dp", "4", "--parameters", "7B"]) == 0  # in fp32 arXiv:1910.02054's K = 12 is 8
    text = capsys.readouterr().out
    assert all(size in text for size in ("112.0", "70.0", "49.0", "28.0", "126.0", "63.0", "42.0", "31.5"))
    assert plan.main(["tokens", "--preset", "llama3-8b", "--num-gpus", "64", "--mfu", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "160,605,224,960 (20.0 per parameter)" in text and "64 devices" in text


@pytest.mark.parametrize("flags,message", MESSAGES["plan"].items())
def test_plan_refuses_invalid_questions(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert documents.run_script("tools/plan.py", flags.split(), monkeypatch) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and not captured.out


def test_plan_keeps_options_of_file_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that the search has placeholders for are kept too; an explicit number of steps is the budget."""
    file = tmp_path / "run.toml"
    file.write_text("lr = 3e-4\nmicro_batch_size = 4\ntrain_iters = 5000\nglobal_batch_size = 32\nbf16 = true\n")
    json_path = tmp_path / "plan.json"
    for flags in (["--tp", "2"], ["--top", "1"]):
        assert plan.main([*SHAPE, "--config", str(file), "--num-gpus", "8", *flags, "--json", str(json_path)]) == 0
        assert "of 32,768 tokens" in capsys.readouterr().out
        command = json.loads(json_path.read_text())["command"]
        config = config_from(command)
        assert (config.optim.lr, config.train.micro_batch_size, config.train.train_iters) == (3e-4, 4, 5000)
    flags = [*SHAPE, *BATCH, "--top", "1", "--train-iters=700", "--json", str(json_path)]
    assert plan.main(flags) == 0
    assert "22,937,600 (" in capsys.readouterr().out  # 700 x 32 x 1024
    assert json.loads(json_path.read_text())["command"][-2:] == ["--train-iters", "700"]


@pytest.mark.timeout(120)
def test_plan_output_on_a_full_disk_is_one_line() -> None:
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), "--preset", "llama3-8b", *BATCH, "--tp", "2"]
    with open("/dev/full", "w") as full:
        result = programs.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
        assert result.returncode == 1 and result.stderr.count("\n") == 1 and "No space left on device" in result.stderr
        assert programs.run(command, stdout=full, stderr=full, timeout=100).returncode == 1


def test_plan_of_a_tiny_model_is_bound_by_step_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --vocab-size 512 --tp 1"
    flags += " --cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --global-batch-size 24"
    assert plan.main([*flags.split()]) == 0
    assert "bound by fixed costs" in capsys.readouterr().out


def test_plan_refuses_a_profile_of_another_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(default_profile("cpu"), device="cpu").save(tmp_path / "p.json")
    assert plan.main([*SHAPE, *BATCH, "--profile", str(tmp_path / "p.json")]) == 2
    assert "was measured on cpu, not on h100" in capsys.readouterr().err


def test_plan_command_keeps_preset_values(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, rate in (([], "1e-4"), (["--preset", "tiny"], None), (["--preset", "tiny", "--lr", "2e-3"], "2e-3")):
        shape = SHAPE if not flags else []
        assert plan.main([*shape, *flags, *BATCH, "--tp", "1"]) == 0
        command = capsys.readouterr().out.partition("slurm.sh RUN_DIR")[2]
        assert (f"--lr {rate} " in command) if rate else "--lr " not in command.partition("\n(")[0]


def test_plan_command_runs(tmp_path: Path) -> None:
    result = run_python("tools/plan.py", "--help", cwd=tmp_path)
    assert result.returncode == 0 and "--num-gpus" in result.stdout and "python tools/plan.py sizes" in result.stdout
