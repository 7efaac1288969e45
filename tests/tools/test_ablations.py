"""tools/bench/ablations.py at tiny sizes: a row reports what was switched, and a failing ablation stops no other."""

import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import pytest

from megalite.kernels import cross_entropy
from megalite.kernels.dispatch import kernel_option, set_kernel_options
from megalite.launch.rank_info import RankInfo
from tools.bench import gpu_report_goals
from tools.bench.ablations import AblationRun, run_ablations
from tools.bench.gpu_report_runs import ABLATION_RUN_FLAGS, ABLATIONS, TINY_LLAMA, Ablation, VariantOptions
from tools.bench.systems import build_run_from_task

FLAGS = f"{ABLATION_RUN_FLAGS} {TINY_LLAMA} --num-layers 2 --global-batch-size 4 --device cpu".split()
PLAN = {"layers": 2, "of_layers": 2, "seq_length": 32, "moments": "fp32"}
Row = dict[str, Any]


def run_group(directory: Path, ablations: list[Ablation], flags: str = "", seconds: float = 200) -> tuple[int, Row]:
    """Run a group of these ablations and return the exit code and the contents of its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ABLATIONS, "mine", tuple(ablations))
        task = {"group": "mine", "flags": [*FLAGS, *flags.split()], "output_dir": str(directory), "plan": PLAN}
        code = run_ablations(RankInfo(), task | {"seconds": seconds, "tiny": True})
    return code, json.loads((directory / "ablations.json").read_text())


def test_ablation_is_measured_in_pairs_and_a_failure_is_a_row(tmp_path: Path) -> None:
    window = Ablation("window", on=VariantOptions("--window-size {quarter},0"))
    breaks = Ablation("breaks", on=VariantOptions("--micro-batch-size 3"))
    ablations = [Ablation("nothing"), breaks, Ablation("on a GPU", gpu_only_reason="no GPU is here"), window]
    set_kernel_options("auto", "auto")  # another test of this process may have set others
    before = dict(cross_entropy.CHUNK_BYTES), kernel_option("attention_kernel")
    code, results = run_group(tmp_path, ablations)
    nothing, broken, gpu_only, good = results["rows"]
    assert nothing["status"].startswith("not measured: both sides are the same here")
    assert broken["status"].startswith("failed: ValueError: global_batch_size=4 is not a multiple") and code == 1
    assert gpu_only["status"] == "not measured: no GPU is here" and good["status"] == "ok"
    off, on = good["sides"]
    assert good["ratios"] == [a / b for a, b in zip(off["seconds"], on["seconds"], strict=True)]
    assert good["ratio"] == statistics.median(good["ratios"]) and len(good["ratios"]) == 2
    assert on["losses"][0] != off["losses"][0] == pytest.approx(on["losses"][0], rel=0.05)  # it was switched
    assert on["mfu"] / on["tokens_per_s"] < off["mfu"] / off["tokens_per_s"]  # what a window hides is not computed
    assert (dict(cross_entropy.CHUNK_BYTES), kernel_option("attention_kernel")) == before
    table_rows = list(gpu_report_goals.ablation_rows({"ablations": results}))
    assert [row[0] for row in table_rows] == ["nothing", "breaks", "on a GPU", "window"] and {
        len(row) for row in table_rows
    } == {6}
    assert table_rows[2][1] == "not measured: no GPU is here" and "2 of 2 layers, sequence 32" in table_rows[3][-1]


def test_rows_without_time_are_marked(tmp_path: Path) -> None:
    code, results = run_group(tmp_path, [Ablation("chunk", on=VariantOptions(chunk_mib=1))], seconds=0)
    assert code == 0 and results["rows"][0]["status"] == "not measured: no time was left" and results["warm_up"]


def test_side_has_the_properties_of_its_flags() -> None:
    """Its FLOPs are its own too: documents cost as much as samples of their length."""
    with build_run_from_task(RankInfo(), {"flags": FLAGS}) as (_, run):
        ablation_run = AblationRun(FLAGS, run)
        flags = "--reset-attention-mask --reset-position-ids --tokenizer-type NullTokenizer --micro-batch-size 2"
        plain, packed = ablation_run.variant(), ablation_run.variant(VariantOptions(flags, chunk_mib=3))
        first, *rest = packed.data.get(0, 4)[0]
        assert [end - begin for row, begin, end in first.documents.spans if row == 1] == [16, 8, 4, 2, 1, 1]
        assert first.positions_SB[:, 0].tolist() == [*range(16), *range(8), *range(4), 0, 1, 0, 0] and len(rest) == 1
        assert plain.data.get(0, 4)[0][0].documents is None and len(plain.data.get(0, 4)[0]) == 4
        ablation_run.activate(packed)
        assert cross_entropy.CHUNK_BYTES["cpu"] == 3 << 20 and packed.properties != plain.properties
        windowed = ablation_run.variant(VariantOptions("--window-size {quarter},0"))
        ablation_run.activate(windowed)
        assert {block.mixer.window for stage in run.pipeline.stages for block in stage.blocks} == {8}
        ablation_run.activate(plain)
        assert {block.mixer.window for stage in run.pipeline.stages for block in stage.blocks} == {None}
        assert plain.flops > windowed.flops > packed.flops > 0.5 * plain.flops
        for side in (plain, packed, windowed):
            side.data.close()


def _measure_attention_kernels(directory: Path) -> tuple[int, Row]:
    on, off = VariantOptions("--attention-kernel triton"), VariantOptions("--attention-kernel torch")
    return run_group(
        directory, [Ablation("attention", on=on, off=off)], "--kernels triton --seq-length 16 --num-layers 1"
    )


def test_attention_kernel_is_switched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a new process, since Triton reads TRITON_INTERPRET when it is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        code, results = pool.apply(_measure_attention_kernels, (tmp_path,))
    (row,) = results["rows"]
    off, on = row["sides"]
    assert code == 0 and row["status"] == "ok" and (off["attention"], on["attention"]) == ("torch", "triton")
    assert off["losses"] != on["losses"] and off["losses"] == pytest.approx(on["losses"], rel=0.02)
