"""tools/benchmark.py: every outcome of a row, refused command lines, the breakdown of a step, files and pictures."""

import csv
import json
from pathlib import Path
from typing import Any

import documents
import pytest
from formulas import head_flops, layer_flops
from toml_tables import MESSAGES
from train_cases import config_from

from megalite.config.options import ConfigError
from megalite.planning.bottleneck import min_memory_traffic
from megalite.planning.run_plan import RunPlan, make_run_plan
from tools import benchmark, plot
from tools.bench import format_results as tables
from tools.bench import systems as contender
from tools.bench.breakdown import LOSSES, advise, full_breakdown, mfu_losses, time_shares
from tools.bench.results import BenchResult, ResultsFile, combinations_of, read
from tools.plots import bench

TINY = """--num-layers 4 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --vocab-size 60 --seq-length 8
 --micro-batch-size 1 --device cpu --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --hidden-dropout 0 --attention-dropout 0""".split()
FLAGS = [*benchmark.RUN.split(), "--global-batch-size", "8", *TINY]
PNG = b"\x89PNG\r\n\x1a\n"


def plan(world: int, *flags: str) -> RunPlan:
    return make_run_plan(config_from([*FLAGS, *flags]), world, 60)


def run(parts: dict[str, float], axes: dict[str, float] | None = None, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Return a result like one of contender.measure, with the same values on all ranks."""
    all_parts = (
        dict.fromkeys(("data", "forward", "backward", "optimizer", "communication", "idle", "other"), 0.0) | parts
    )
    result: dict[str, Any] = dict(parts=[all_parts] * ranks, axes=[axes or {}] * ranks, step_s=2.0, samples_per_step=8)
    result |= dict(flops_per_step=4e12, peak_tflops=4.0, devices=ranks, device="CPU", memory=2 << 30, vocab_size=60)
    return result | dict(memory_there=8 << 30, copy_bytes_per_s=1e10) | more


# ---- what is measured


def test_benchmark_lists_make_every_combination() -> None:
    sweeps = ["micro_batch_size=1,2", "recompute-granularity=default,full --recompute-method uniform"]
    combinations = list(combinations_of(sweeps, [2]))
    assert [flags for _, flags, _ in combinations] == [
        ["--micro-batch-size=1"],
        ["--micro-batch-size=1", "--recompute-granularity=full", "--recompute-method", "uniform"],
        ["--micro-batch-size=2"],
        ["--micro-batch-size=2", "--recompute-granularity=full", "--recompute-method", "uniform"],
    ]
    assert BenchResult(combinations[1][0], "megalite", [], 2).label == "micro-batch 1, recompute full"
    assert [(values["ranks"], nproc) for values, _, nproc in combinations_of([], [1, 2])] == [("1", 1), ("2", 2)]
    with pytest.raises(ConfigError, match="--lr is given twice"):
        list(combinations_of(["lr=1", "lr=2"], [1]))


@pytest.mark.parametrize("flags", MESSAGES["benchmark"])
def test_benchmark_refuses_impossible_measurements(flags: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(contender, "measure", None)  # must not be reached
    monkeypatch.setattr("torch.cuda.is_available", lambda: "--memory-gib" in flags and "cuda" in flags)
    assert documents.run_script("tools/benchmark.py", [*TINY, *flags.split()], monkeypatch) == 2
    assert MESSAGES["benchmark"][flags] in capsys.readouterr().err


MIXTRAL = "--num-experts 4 --moe-ffn-hidden-size 12"
SHARED_EXPERT = "--moe-shared-expert-intermediate-size 24"
MLA = """--multi-latent-attention --q-lora-rank 10 --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5
 --qk-layernorm --qk-norm-epsilon 1e-6"""
DEEPSEEK = f"""{MLA} {MIXTRAL} --moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid
 --moe-router-enable-expert-bias {SHARED_EXPERT}"""


PEERS = {
    "": "llama",
    "--qk-layernorm": "qwen3",
    MIXTRAL: "mixtral",
    DEEPSEEK: "deepseek_v3",
    DEEPSEEK.replace("--q-lora-rank 10", ""): "deepseek_v3",
    f"--preset tiny-delta --num-attention-heads 4 {MIXTRAL} {SHARED_EXPERT} --moe-shared-expert-gate": "qwen3_next",
}


@pytest.mark.parametrize("flags", PEERS)
def test_peer_is_the_same_model_without_dropout(flags: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tools.bench.hf_baseline import model_config

    arguments = f"{flags} --untie-embeddings-and-output-weights".split()
    hf_config = model_config(config_from([*FLAGS, *arguments]))
    assert hf_config.model_type == PEERS[flags]
    assert not any(value for name, value in vars(hf_config).items() if "dropout" in name or "pdrop" in name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    assert sum(parameter.numel() for parameter in model.parameters()) == plan(1, *arguments).model_states.num_parameters


NO_PEER = {
    "--mtp-num-layers 1": "mtp_num_layers=1: transformers drops these depths",
    "--attention-dropout 0.1": "attention_dropout=0.1 and hidden_dropout=0: transformers runs without dropout",
    "--hidden-dropout 0.1": "attention_dropout=0 and hidden_dropout=0.1: transformers runs without dropout",
    f"{DEEPSEEK} --attention-output-gate": "the most similar model is deepseek_v3, but attention_output_gate=True",
    DEEPSEEK.replace("--qk-norm-epsilon 1e-6", ""): "is deepseek_v3, but qk_norm_epsilon=None is not 1e-06",
    f"{DEEPSEEK} --moe-shared-expert-intermediate-size 18": "moe_shared_expert_intermediate_size=18 is not a multiple",
    f"{MIXTRAL} --moe-router-score-function sigmoid": "moe_router_score_function=sigmoid is not softmax",
}


@pytest.mark.parametrize("flags", NO_PEER)
def test_peer_without_the_model_is_refused(flags: str, monkeypatch, capsys) -> None:
    argv = [*TINY, *flags.split(), "--peer", "transformers"]
    assert documents.run_script("tools/benchmark.py", argv, monkeypatch) == 2
    error = capsys.readouterr().err
    assert "peer=transformers: " in error and NO_PEER[flags] in error


def test_weak_and_strong_scaling_batch_sizes() -> None:
    from tools.bench.matrix import plan_results

    def batches(scaling: str) -> list[int | None]:
        options, rest = benchmark.parse(["--nproc", "1,2,4", "--scaling", scaling, *FLAGS])
        return [config_from(row.flags).train.global_batch_size for row in plan_results(options, rest)]

    assert batches("weak") == [8, 16, 32] and batches("strong") == [8, 8, 8]


# ---- outcomes


@pytest.mark.parametrize("kind,stderr,status", MESSAGES["failures"])
def test_every_outcome_of_a_run_is_a_row(kind: str, stderr: str, status: str) -> None:
    row = BenchResult({}, "megalite", [], 1)
    row.record({"error": "x", "stderr": stderr, "status": status}, 7.0)
    assert (row.status, row.reason, row.needs_run(0), row.needs_run(1)) == (kind, "x", False, False)


def test_finished_rows_are_reused(tmp_path: Path) -> None:
    facts = {"flags": ["a"], "steps": 2, "warmup": 1, "memory_gib": None, "machine": "m", "torch": "t"}

    def rows() -> list[BenchResult]:
        return [BenchResult({"x": str(n)}, "megalite", ["a", str(n)], 1) for n in range(6)]

    file = tmp_path / "bench.json"
    first = ResultsFile(facts, rows(), file)
    first.rows[0].record(run({"forward": 1.0}), 5.0)
    for n, status in enumerate(("failed", "out of memory", "out of time", "refused"), 1):
        first.rows[n].status, first.rows[n].seconds = status, 5.0
    first.save(False)
    second = ResultsFile(facts, rows()[1:], file)
    assert second.resume(timeout=5.0) == 2  # out of memory, or out of as much time
    assert [row.status for row in second.rows] == [
        "waiting",
        "out of memory",
        "out of time",
        "waiting",
        "waiting",
        "ok",
    ]
    assert not second.rows[5].needs_run(0) and second.rows[5].needs_run(1)  # one more repeat is one more run
    third = ResultsFile(facts, rows(), file)
    third.resume(timeout=6.0)
    assert third.rows[3].status == "waiting"
    with pytest.raises(ConfigError, match=r"another steps, torch of the figures in .*; give another --out"):
        ResultsFile({**facts, "steps": 3, "torch": "u"}, rows(), file).resume(5.0)
    file.write_text('{"rows": [{"no": 1}]}')
    with pytest.raises(ConfigError, match="is damaged"):
        second.resume(5.0)


# ---- the breakdown of a step


def test_breakdown_sums_to_1() -> None:
    times = (0.1, 0.5, 0.9, 0.1, 0.3, 0.05, 0.05)
    names = ("data", "forward", "backward", "optimizer", "communication", "idle", "other")
    parts = dict(zip(names, times, strict=True))
    result = run(parts, {"tp": 0.2, "dp": 0.1}, ranks=2)
    shares = time_shares(result)
    assert (
        sum(shares.values()) == pytest.approx(1)
        and shares["tp"] == pytest.approx(0.1)
        and "communication" not in shares
    )
    breakdown = full_breakdown(result, plan(2, "--tensor-model-parallel-size", "2"), 4.0, price_per_hour=3.6)
    assert breakdown["mfu"] == pytest.approx(4e12 / 2.0 / 4e12 / 2)
    assert breakdown["mfu"] + sum(breakdown["lost"].values()) == pytest.approx(1) and set(breakdown["lost"]) == set(
        LOSSES
    )
    assert breakdown["lost"]["ranks"] == pytest.approx(0.025) and breakdown["lost"]["kernels"] == pytest.approx(
        0.7 - 0.25
    )
    kinds = "gpu_utilization memory_utilization samples_per_s cost_per_sample data_time forward_time backward_time"
    values = (0.75, 0.25, 4.0, 0.0005, 0.05, 0.25, 0.45, 0.15)
    efficiency = dict(zip([*kinds.split(), "communication_time"], values, strict=True))
    assert breakdown["efficiency"] == pytest.approx(efficiency)
    # an MFU above what the step computed in that time
    assert mfu_losses(shares, 0.71, plan(2, "--tensor-model-parallel-size", "2")) is None
    assert full_breakdown(result, plan(2), None)["lost"] is None  # no peak is known


def test_idle_time_is_bubble_then_messages() -> None:
    run_plan = plan(2, "--pipeline-model-parallel-size", "2")
    assert 0.05 < run_plan.balance.bubble < 0.3
    for idle in (0.04, 0.6):
        shares = time_shares(run({"forward": 0.5 - idle / 2, "backward": 0.5 - idle / 2, "idle": idle}, ranks=2))
        losses = mfu_losses(shares, 0.01, run_plan)
        assert losses is not None and losses["bubble"] == pytest.approx(min(idle, run_plan.balance.bubble))
        assert losses["bubble"] + losses["pp"] == pytest.approx(idle)


def test_recompute_is_not_a_kernel_loss() -> None:
    run_plan = plan(1, "--recompute-granularity", "full", "--recompute-method", "uniform")
    m = run_plan.config.model
    layers, head = m.num_layers * layer_flops(m, 8), head_flops(m, run_plan.shape.padded_vocab)
    expected = layers / (3 * (layers + head) + layers)  # one more forward of all layers, of all that is computed
    losses = mfu_losses(time_shares(run({"forward": 0.3, "backward": 0.7})), 0.2, run_plan)
    assert losses is not None and losses["recompute"] == pytest.approx(expected)
    assert losses["kernels"] == pytest.approx(0.8 - expected)


def test_bottleneck_has_evidence() -> None:
    run_plan, computing = plan(1), {"forward": 0.4, "backward": 0.6}
    assert full_breakdown(run(computing), run_plan, 4.0)["bound"]["by"] == "compute"
    cp1, cp2 = (plan(cp, "--cp", str(cp), "--no-use-distributed-optimizer") for cp in (1, 2))
    # the padding of weights differs
    saved_bytes = (
        2 * cp1.shape.num_microbatches * (cp1.balance.memory_of_stages[0][0] - cp2.balance.memory_of_stages[0][0])
    )
    assert min_memory_traffic(cp1) - min_memory_traffic(cp2) == pytest.approx(saved_bytes, rel=0.05)
    # bytes/s at which memory takes 90 % of 2 s, where matmuls take half of it
    slow = min_memory_traffic(run_plan) / 1.8
    bound = full_breakdown(run(computing, copy_bytes_per_s=slow), run_plan, 4.0)["bound"]
    assert bound["by"] == "memory" and "90.0%" in bound["evidence"] and "50.0% at the peak" in bound["evidence"]
    assert full_breakdown(run({"forward": 0.3, "data": 0.7}), run_plan, 40.0)["bound"]["by"] == "data"
    communicating = run({"forward": 0.3, "communication": 0.7}, {"dp": 0.7}, ranks=2)
    assert full_breakdown(communicating, plan(2), 40.0)["bound"]["by"] == "network"


def test_advice_has_computed_values() -> None:
    no_losses = dict.fromkeys(LOSSES, 0.0)
    result = run({"forward": 0.5, "backward": 0.5}, ranks=2)
    advice = advise(no_losses | {"dp": 0.25, "kernels": 0.5}, result, plan(2))
    assert "takes 25.0% of a step (14.3% with twice the micro-batches, --global-batch-size 16): " in advice
    pp_flags = ["--pipeline-model-parallel-size", "2"]
    twice, split = plan(2, *pp_flags, "--global-batch-size", "16"), plan(2, *pp_flags, "--split-backward")
    advice = advise(no_losses | {"bubble": 0.2}, result, plan(2, *pp_flags))
    assert f"{twice.balance.bubble:.1%} with twice the micro-batches (--global-batch-size 16)" in advice
    assert (
        f"{split.balance.bubble:.1%} with --split-backward" in advice
        and "--num-virtual-stages-per-pipeline-rank 2)" in advice
    )
    tp_plan = plan(2, "--tensor-model-parallel-size", "2")
    advice = advise(no_losses | {"tp": 0.5}, result, tp_plan)
    assert advice.startswith("exposed communication of tp takes 50.0% of a step (with tp 1 and dp 2 a rank holds")
    assert "does not fit" not in advice and "of 4.0 GiB" in advice
    assert "does not fit" in advise(no_losses | {"tp": 0.5}, result | {"memory_there": 100}, tp_plan)
    assert "(1000 of 2000 ms without it)" in advise(no_losses | {"data": 0.5}, result, plan(2))
    slow = {**result, "parts": [result["parts"][0], {**result["parts"][0], "forward": 1.5}]}
    assert "rank 1 computes 33.3% longer" in advise(no_losses | {"ranks": 0.5}, slow, plan(2))  # 2 s; the mean is 1.5 s
    oversubscribed = advise(no_losses | {"tp": 0.5}, result | {"threads": 1, "cores": 1}, plan(2))
    assert oversubscribed.startswith("none: 2 ranks of 1 thread share 1 core, so a wait for other ranks")
    recompute_plan = plan(1, "--recompute-granularity", "full", "--recompute-method", "uniform")
    assert "without it a rank holds" in advise(no_losses | {"recompute": 0.2}, run({"forward": 1.0}), recompute_plan)
    assert "with --micro-batch-size 2" in advise(no_losses | {"kernels": 0.9}, run({"forward": 1.0}), plan(1))


# ---- files and pictures


def write_results(directory: Path) -> ResultsFile:
    small, large = ({"ranks": "2", "micro-batch-size": n} for n in ("1", "64"))
    peers = ("megalite", "transformers fp32")
    rows = [BenchResult(small | {"ranks": str(n)}, name, FLAGS, n) for name in peers for n in (1, 2)]
    for row in rows:
        for step in (2.0, 1.0, 1.5):
            row.record(run({"forward": 0.6, "backward": 0.4}, ranks=row.nproc, step_s=step), 9.0)
    rows[3].record({"error": "no room", "stderr": "MemoryError", "status": "failed"}, 9.0)
    rows.append(BenchResult(large, "megalite", FLAGS, 2, status="refused", reason="too large"))
    results = ResultsFile({"scaling": "strong"}, rows, directory / "bench.json")
    results.save(True)
    return results


def test_values_are_medians_with_spread_and_efficiency(tmp_path: Path) -> None:
    written, read_back = write_results(tmp_path), read(tmp_path / "bench.json")
    assert [row.identity for row in read_back.rows] == [row.identity for row in written.rows]
    summaries = tables.add_scaling_efficiency(tables.summarize(read_back.rows))
    first, second, *_, last = summaries
    tokens = 8 * 8
    assert [first[f"tokens_per_s{end}"] for end in tables.SPREAD] == [tokens / 1.5, tokens / 2.0, tokens / 1.0]
    assert first["efficiency"] == 1.0 and second["efficiency"] == pytest.approx(0.5)  # as fast, with twice the ranks
    # the MFU of the peer, by the same peak FLOP/s
    assert summaries[2]["mfu"] == first["mfu"] and "breakdown" not in summaries[2]
    assert last["status"] == "refused" and "tokens_per_s" not in last
    text = tables.text_table(summaries)
    assert "ranks 2, micro-batch 64, megalite: refused: too large" in text and "out of memory: no room" in text
    tables.write_csv(summaries, tmp_path / "bench.csv")
    lines = list(csv.DictReader((tmp_path / "bench.csv").read_text().splitlines()))
    assert [line["micro-batch-size"] for line in lines] == ["1"] * 4 + ["64"] and lines[4]["status"] == "refused"
    step_shares = [float(lines[0][name]) for name in lines[0] if name.startswith("share_")]
    lost_shares = [float(lines[0][name]) for name in lines[0] if name.startswith("lost_") and lines[0][name]]
    assert sum(step_shares) == pytest.approx(1) and sum(lost_shares) == pytest.approx(1 - first["breakdown"]["mfu"])


def test_every_benchmark_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path)
    for show in ("mfu", "breakdown", "scaling"):
        for options in ([], ["--narrow"]):
            plot.main(["bench", str(tmp_path), "--show", show, "--out", str(tmp_path / "x.png"), *options])
            assert (tmp_path / "x.png").read_bytes().startswith(PNG)
    plot.main(["bench", str(tmp_path), "--out", str(tmp_path / "x.svg")])
    drawn = (tmp_path / "x.svg").read_text()
    assert "tokens/s" in drawn and "refused" in drawn and "then out of memory" in drawn
    empty = tables.summarize([BenchResult({}, "megalite", FLAGS, 1)])
    assert bench.pictures(empty) == []
    capsys.readouterr()
    with pytest.raises(SystemExit, match="^3$"):
        plot.main(["bench", str(tmp_path / "none")])
    (tmp_path / "bench.json").write_text("[]")
    with pytest.raises(SystemExit, match="^3$"):
        plot.main(["bench", str(tmp_path)])
    missing, damaged = capsys.readouterr().err.splitlines()
    assert "No such file" in missing and missing.endswith("; give what tools/benchmark.py had as --out")
    assert "is not a benchmark" in damaged


def test_peer_is_compared_with_the_adjacent_measurement() -> None:
    rows = [BenchResult({}, name, ["--bf16"], 1, {}) for name in ("megalite", "transformers bf16")]
    for own, peer in ((2.0, 1.0), (1.0, 2.0), (1.0, 1.0)):
        rows[0].runs.append({"step_s": own, "memory": 4})
        rows[1].runs.append({"step_s": peer, "memory": 2})
    assert tables.compare_to_megalite(rows[1], rows[0]) == {"speed": 1.0, "memory": 0.5}
    assert (
        tables.compare_to_megalite(rows[1], None)
        == tables.compare_to_megalite(rows[1], BenchResult({}, "megalite", [], 1))
        == {}
    )


# ---- whole benchmarks, in processes


ONCE = ["--steps", "2", "--warmup", "1"]


def test_interrupted_benchmark_keeps_its_rows(tmp_path: Path, monkeypatch, capsys) -> None:
    file, real, calls = tmp_path / "out.json", contender.measure, []

    def measure(name: str, *rest: Any) -> dict[str, Any]:
        calls.append(name)
        saved = json.loads(file.read_text())
        assert len(saved["rows"][0]["runs"]) == len(calls) - 1 and not saved["complete"]
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(contender, "measure", measure)
    assert benchmark.main(["--repeats", "3", "--json", str(file), *TINY, *ONCE]) == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "benchmark.py: interrupted"
    written = json.loads(file.read_text())
    [good], [figures] = written["rows"][0]["runs"], written["figures"]
    assert len(good["steps"]) == 2 and len(good["losses"]) == 3 and good["memory"] > 1 << 20
    breakdown = figures["breakdown"]
    assert sum(breakdown["shares"].values()) == pytest.approx(1) and f"bound: {breakdown['bound']['by']}: " in out


def test_late_run_reports_its_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert benchmark.main(["--repeats", "2", "--timeout", "0.01", "--json", str(file), *TINY, *ONCE]) == 1
    _, late, *stack = capsys.readouterr().err.splitlines()  # there is a stack if the run had started
    assert late == "megalite: not done after 0.01 s; give more with --timeout"
    assert not stack or stack[0].startswith("Fatal Python error: Aborted")
    [row] = json.loads(file.read_text())["rows"]
    assert row["status"] == "out of time" and row["runs"] == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_benchmark_sweep_has_a_row_per_outcome_and_repeats_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    real, calls = contender.measure, []

    def measure(name: str, *rest: Any) -> dict[str, Any]:
        calls.append(name)
        return real(name, *rest)

    monkeypatch.setattr(contender, "measure", measure)
    huge = "2 --hidden-size 8192 --ffn-hidden-size 65536 --num-attention-heads 2"
    argv = ["--steps", "2", "--warmup", "1", "--repeats", "2", "--out", str(tmp_path), "--memory-gib", "4"]
    argv += ["--sweep", f"micro-batch-size=1,3,{huge}", *TINY]
    assert benchmark.main(argv) == 0
    assert len(calls) == 3  # twice what fits, once what does not, never what is refused
    rows = read(tmp_path / "bench.json").rows
    assert [row.status for row in rows] == ["ok", "refused", "out of memory"] and len(rows[0].runs) == 2
    results = json.loads((tmp_path / "bench.json").read_text())
    assert results["complete"] and sum(results["figures"][0]["breakdown"]["shares"].values()) == pytest.approx(1)
    for name in ("mfu", "breakdown"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    calls.clear()
    assert benchmark.main(argv) == 0 and calls == []
    assert benchmark.main([word if word != "2" else "3" for word in argv[:6]] + argv[6:]) == 2  # other steps
    assert "another steps of the figures" in capsys.readouterr().err
    argv[argv.index("--repeats") + 1] = "3"
    assert benchmark.main(argv) == 0 and calls == ["megalite"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_scaling_in_processes_reports_ranks_and_efficiency(tmp_path: Path) -> None:
    argv = ["--steps", "2", "--warmup", "1", "--repeats", "1", "--nproc", "1,2", "--scaling", "weak"]
    assert benchmark.main([*argv, "--out", str(tmp_path), "--peer", "transformers", *TINY]) == 0
    results = json.loads((tmp_path / "bench.json").read_text())
    summaries = {(summary["contender"], summary["ranks"]): summary for summary in results["figures"]}
    assert [*summaries] == [
        *(("megalite", 1), ("transformers fp32", 1), ("megalite", 2)),
        *((f"transformers fp32 {parallelism}", 2) for parallelism in ("ddp", "fsdp2")),
    ]
    assert summaries["megalite", 1]["efficiency"] == 1.0
    one_rank, ddp = summaries["transformers fp32", 1], summaries["transformers fp32 ddp", 2]
    assert ddp["efficiency"] == pytest.approx(ddp["tokens_per_s"] / 2 / one_rank["tokens_per_s"])
    shares = summaries["megalite", 2]["breakdown"]["shares"]
    assert shares["dp"] > 0 and "tp" not in shares and sum(shares.values()) == pytest.approx(1)
    assert {row["environment"].get("OMP_NUM_THREADS") for row in results["rows"]} <= {"1", "2", "4", None}
    assert (tmp_path / "scaling.png").read_bytes().startswith(PNG)
