"""tools/verify.py: how it shrinks a run, what counts as a difference, and layouts without one."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import toml_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import nightly_except
from train_cases import config_from

from megalite.config.hybrid_pattern import BORDER
from megalite.config.options import Config, ModelConfig
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.config.validation import find_problems
from megalite.models.families import PRESETS
from tools import verify as verify_tool
from tools.verification.compare_ranks import Reference, Tolerance, compare, reference_loss_problems
from tools.verification.first_difference import Finding, first_difference
from tools.verification.record import RecordedTensor, Recording, read_all, write
from tools.verification.reference_sharding import Layout, expected_slices
from tools.verification.shrink import ShrunkConfig, kv_group_check, shrink, single_process_config

ROOT = Path(__file__).resolve().parents[2]
RUN = """--micro-batch-size 2 --global-batch-size 1024 --train-iters 1000 --lr 3e-4 --mock-data
 --tokenizer-type NullTokenizer --lr-warmup-iters 10 --lr-decay-style cosine --clip-grad 0.7"""
CASES = toml_tables.read_table("tools/verify")
expand = toml_tables.expander(CASES["abbreviations"])
GPT = expand("GPT")


def shrink_flags(flags: str, max_ranks: int = 8, keep_sizes: bool = False) -> tuple[Config, ShrunkConfig]:
    config = config_from(f"{RUN} {flags}")
    return config, shrink(config, max_ranks, 3, keep_sizes)


# ---- shrunk runs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("**--E"), min_size=8, max_size=30), st.sampled_from([1, 2, 4]), st.data())
def test_shrunk_pattern_keeps_letters_and_a_border_inside_a_layer(letters: list[str], pp: int, data: Any) -> None:
    positions = st.lists(st.integers(1, len(letters) - 1), min_size=pp - 1, max_size=pp - 1, unique=True)
    for position in sorted(data.draw(positions), reverse=True):
        letters.insert(position, BORDER)
    pattern = "".join(letters)
    experts = "--num-experts 4 --moe-ffn-hidden-size 24" if "E" in pattern else ""
    sizes = GPT.replace("--num-layers 24", "")
    config, shrunk = shrink_flags(f"{sizes} --hybrid-layer-pattern={pattern} --pp {pp} --dp 1 {experts}")
    assert find_problems(shrunk.config, shrunk.layout.world_size) == []
    assert find_problems(single_process_config(shrunk.config), 1) == []
    small = shrunk.config.model.hybrid_layer_pattern or ""
    assert set(pattern) - {BORDER} <= set(small)
    if shrunk.layout.pp > 1 and re.search(r"\*\|[-E]", pattern):
        assert re.search(r"\*\|[-E]", small)
    assert len(shrunk.config.model.layers) <= max(12, len(config.model.layers))


def test_shrink_keeps_each_kind_of_mixer_in_a_pattern() -> None:
    sizes = (
        GPT.replace("--num-layers 24", "") + " --position-embedding-type rope --window-size 256,0 --dp 1 --cp 2 --pp 2"
    )
    lists = "--no-rope-freq [0,0,0,0,0,1]*4 --window-attn-skip-freq 6 --cp-comm-type " + "a2a allgather " * 12
    config, shrunk = shrink_flags(f"{sizes} --hybrid-layer-pattern={'*-**-*' * 4} {lists}")
    assert find_problems(shrunk.config, shrunk.layout.world_size) == []

    def kinds(model: ModelConfig) -> set[tuple[bool, bool, str]]:
        return {(x.window is None, x.rope is None, x.cp_comm_type) for x in model.layers if x.mixer is not None}

    assert kinds(shrunk.config.model) == kinds(config.model) and len(kinds(config.model)) == 3
    assert len(shrunk.config.model.layers) < len(config.model.layers)


AXES = [(8, 16, 32), (1, 1, 8), (4, 1, 2), (1, 2, 1), (2, 4, 1), (1, 8, 2), (1, 1, 1)]


def fits(preset: str, tp: int, pp: int) -> bool:
    sizes = PRESETS[preset]
    split = [sizes["num_attention_heads"], sizes.get("ffn_hidden_size", 0), sizes.get("mamba_num_groups", 0)]
    return not any(size % tp for size in split) and sizes["num_layers"] >= pp


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_shrink_makes_every_preset_small(preset: str, axes: tuple[int, int, int]) -> None:
    tp, pp, dp = axes if fits(preset, *axes[:2]) else (2, 2, axes[2])
    axes = (tp, pp, dp) if fits(preset, tp, pp) else (1, 2, dp)
    tp, pp, dp = axes
    config, shrunk = shrink_flags(f"--preset {preset} --tp {tp} --pp {pp} --dp {dp}")
    a, b = config.model, shrunk.config.model
    assert not find_problems(shrunk.config, shrunk.layout.world_size) and not find_problems(
        single_process_config(shrunk.config), 1
    )
    assert shrunk.layout.world_size <= 8
    for size, shrunk_size in zip(axes, (shrunk.layout.tp, shrunk.layout.pp, shrunk.layout.dp), strict=True):
        assert (size > 1) == (shrunk_size > 1) and shrunk_size <= size
    assert b.hidden_size <= 128 and b.num_layers <= 9 and b.seq_length == 16
    if a.multi_latent_attention:
        sizes = (b.q_lora_rank, b.kv_lora_rank, b.qk_head_dim, b.qk_pos_emb_head_dim, b.v_head_dim)
        assert sizes == (10 if a.q_lora_rank else None, 12, 6, 4, 5)
    assert (a.num_kv_groups < a.num_attention_heads) == (b.num_kv_groups < b.num_attention_heads)
    fields = (
        "activation",
        "normalization",
        "position_embedding_type",
        "add_bias_linear",
        "qk_layernorm",
        "add_qkv_bias",
    )
    for name in (*fields, "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout", "rotary_base"):
        assert getattr(a, name) == getattr(b, name), name
    assert shrunk.config.optim.clip_grad == 0.7 and shrunk.config.train.train_iters == 3


def test_shrink_keeps_groups_and_layer_patterns() -> None:
    config, shrunk = shrink_flags("--preset llama3-8b --tp 32 --dp 1 --global-batch-size 64 --num-query-groups 4", 4)
    assert config.model.num_kv_groups < 32 and 1 < shrunk.config.model.num_kv_groups < shrunk.layout.tp
    _, shrunk = shrink_flags(f"{GPT} --window-size 256,0 --window-attn-skip-freq [1]*23+[0] --tp 2 --dp 1")
    windows = shrunk.config.model.layer_windows
    assert None in windows and 5 in windows and len(windows) < 24


@pytest.mark.parametrize("flags,second,groups", CASES["groups"])
def test_second_config_covers_groups_that_the_first_hides(flags: str, second: int, groups: int) -> None:
    config, first = shrink_flags(expand(flags))
    check = kv_group_check(config, first, 8)
    assert (check and check.layout) == (Layout(second) if second else None)
    if check is not None:
        assert check.config.model.num_kv_groups == groups and not find_problems(check.config, check.layout.world_size)
        assert check.config.train.train_iters == 1 and not find_problems(single_process_config(check.config), 1)


def test_too_few_ranks_for_groups_are_reported() -> None:
    config, first = shrink_flags("--preset llama2-70b --tp 16 --dp 2", 4)
    assert kv_group_check(config, first, 4) is None
    assert first.notes[-1].startswith(
        "not verified, because there are too few ranks: which of 8 groups each of 16 tp ranks takes"
    )
    assert first.notes[-1].endswith("give --max-ranks 8 or more")


@pytest.mark.parametrize("flags,counts", CASES["stages"])
def test_shrink_keeps_uneven_stages(flags: str, counts: list[int]) -> None:
    _, shrunk = shrink_flags(expand(f"GPT {flags}"))
    assert explicit_stage_layers(shrunk.config.model, shrunk.config.parallel) == counts


@pytest.mark.parametrize("batch,pp,number", [(64, 4, 8), (6, 4, 3), (20, 4, 5), (64, 1, 3), (2, 1, 1)])
def test_shrink_keeps_micro_batches_per_stage(batch: int, pp: int, number: int) -> None:
    _, shrunk = shrink_flags(f"{GPT} --global-batch-size {batch} --pp {pp} --dp 1")
    train = shrunk.config.train
    assert train.global_batch_size == number * train.micro_batch_size


def test_reference_run_uses_the_simplest_path() -> None:
    flags = f"{GPT} --pp 2 --tp 2 --dp 2 --num-virtual-stages-per-pipeline-rank 2 --split-backward --bf16"
    _, shrunk = shrink_flags(
        f"{flags} --recompute-granularity selective --no-use-distributed-optimizer --z-loss-coeff 0.1"
    )
    reference = single_process_config(shrunk.config)
    assert reference.parallel == replace(
        Config().parallel, nproc=1, device="cpu", kernels="torch", attention_kernel="torch"
    )
    assert (
        reference.train.recompute_granularity is None
        and reference.train.z_loss_coeff == 0.1
        and reference.precision.bf16
    )
    assert (
        reference.train.global_batch_size == shrunk.config.train.global_batch_size
        and reference.optim == shrunk.config.optim
    )


def test_shrink_keeps_unsharded_sizes() -> None:
    config, shrunk = shrink_flags("--preset tiny --tp 2 --dp 2", keep_sizes=True)
    assert shrunk.config.model == config.model and shrunk.config.data == config.data
    with pytest.raises(ValueError, match=r"world=16 .*--max-ranks 8"):
        shrink_flags("--preset tiny --dp 16", keep_sizes=True)


# ---- what counts as a difference: a matrix split over tp, a norm that tp ranks copy, ZeRO shards over dp

SHAPES = {"word": (12, 4), "up": (8, 4), "norm": (4,)}
TOLERANCE = Tolerance("float64", 64, 2)
LAYOUT = Layout(tp=2, dp=2)


def numbers(name: str, step: int, kind: str) -> Any:
    seed = [*map(ord, name), step, ord(kind[0])]
    return np.random.default_rng(seed).standard_normal(SHAPES[name])


def key_of(item: RecordedTensor) -> tuple[float, str, str]:
    return item.step, item.kind, item.name


def _shard(full: Any, name: str, tp: int) -> Any:
    rows = len(full) // 2
    return full if name == "norm" else full[tp * rows : (tp + 1) * rows]


def recordings(steps: int = 2) -> tuple[Reference, list[Recording]]:
    """Return the recordings of a reference run and of the ranks of a correct run."""
    names = [*SHAPES]
    reference: list[tuple[RecordedTensor, Any]] = []
    ranks: list[list[tuple[RecordedTensor, Any]]] = [[] for _ in range(LAYOUT.world_size)]
    for step in range(steps + 1):
        for kind in ("weight", "gradient")[: 1 + bool(step)]:
            for name in names:
                full = numbers(name, step, kind)
                reference.append((RecordedTensor(step, kind, name, -1, full.shape, 0), full.reshape(-1)))
                for rank, items in enumerate(ranks):
                    dp, tp = divmod(rank, 2)
                    shard = _shard(full, name, tp)
                    half = shard.size // 2
                    cut = slice(dp * half, dp * half + half) if kind == "gradient" else slice(0, shard.size)
                    items.append(
                        (RecordedTensor(step, kind, name, -1, shard.shape, cut.start), shard.reshape(-1)[cut].copy())
                    )
    return Reference(Recording(names, ["word"], reference)), [Recording(names, ["word"], items) for items in ranks]


def first_finding(reference: Reference, ranks: list[Recording]) -> Finding | None:
    return first_difference(compare(reference, ranks, LAYOUT, TOLERANCE), LAYOUT, num_microbatches=3)


def change(ranks: list[Recording], step: int, kind: str, name: str, edit: Any, rank_ids: Any = range(4)) -> None:
    for rank in rank_ids:
        for data in (data for item, data in ranks[rank].tensors if key_of(item) == (step, kind, name)):
            data[...] = edit(data)


def test_equal_tensors_match_within_rounding() -> None:
    reference, ranks = recordings()
    assert first_finding(reference, ranks) is None
    change(ranks, 2, "gradient", "up", lambda data: data * (1 + 4 * 2.0**-52))
    assert first_finding(reference, ranks) is None
    change(ranks, 2, "gradient", "up", lambda data: data * (1 + 1e-10))
    assert first_finding(reference, ranks) is not None


def test_one_wrong_element_of_a_replica_is_named() -> None:
    reference, ranks = recordings()
    data = next(data for item, data in ranks[3].tensors if key_of(item) == (1, "weight", "up"))
    data[6] += 1e-6  # tp rank 1 has 4 x 4 elements: its row 1 is row 5; column 2
    finding = first_finding(reference, ranks)
    assert finding is not None and (finding.step, finding.kind, finding.name) == (1, "weight", "up")
    assert finding.ranks == {"rank": [3], "pp": [0], "dp": [1], "tp": [1]}
    assert finding.location == "[5, 2], 1 of 16 elements" and finding.ratio is None


@pytest.mark.parametrize(
    "names,factor,sizes",
    [([*SHAPES], 2.0, ["dp", "tp"]), ([*SHAPES], 1 / 3, ["1/micro-batches"]), (["word"], 0.0, []), (["up"], 1.25, [])],
)
def test_ratio_of_a_difference(names: list[str], factor: float, sizes: list[str]) -> None:
    reference, ranks = recordings()
    for name in names:
        change(ranks, 1, "gradient", name, lambda data: factor * data)
    finding = first_finding(reference, ranks)
    assert finding is not None and finding.kind == "gradient" and {*finding.differing} == {*names}
    assert finding.ratio == pytest.approx(factor, rel=1e-9) and finding.ratio_sizes == sizes


def test_replicas_of_a_weight_must_be_bit_equal() -> None:
    reference, ranks = recordings()
    # one of 4 replicas over dp and tp
    change(ranks, 1, "weight", "norm", lambda data: data + [0, 0, 2.0**-50, 0], (1,))
    finding = first_finding(reference, ranks)
    assert finding is not None and (finding.kind, finding.name, finding.ranks["rank"]) == ("weight", "norm", [1])
    assert finding.location == "[2], 1 of 4 elements" and finding.distance < finding.tolerance


def test_missing_and_extra_tensors_are_reported() -> None:
    reference, ranks = recordings()
    for rank in ranks[2:]:  # the shards of dp rank 1
        rank.tensors[:] = [(item, data) for item, data in rank.tensors if key_of(item) != (1, "gradient", "up")]
    finding = first_finding(reference, ranks)
    assert finding is not None and finding.location == "16 of 32 elements are on no rank"
    reference, ranks = recordings()
    ranks[1].tensors.append((RecordedTensor(1, "input", "tokens", 7, (4, 1), 0), np.zeros(4)))
    finding = first_finding(reference, ranks)
    assert finding is not None and "which one process does not have" in finding.location


def test_nan_is_a_difference() -> None:
    reference, ranks = recordings()
    change(ranks, 1, "gradient", "up", lambda data: math.nan * data)
    finding = first_finding(reference, ranks)
    assert finding is not None and finding.distance == math.inf
    diffs = compare(reference, ranks, LAYOUT, TOLERANCE)
    actual, expected = np.array([1.0, math.nan, 3.0]), np.array([1.0, 2.0, 4.0])
    piece = replace(diffs[0].parts[0], actual=actual, expected=expected, deviates=None)
    assert piece.wrong_elements(1e-6).tolist() == [False, True, True]


def test_shards_are_assembled_in_order_without_padding() -> None:
    full_shape = (97, 6)  # two ranks of 52 rows each
    rows = [expected_slices((52, 6), full_shape, Layout(tp=2).coordinates(tp), Layout(tp=2)) for tp in (0, 1)]
    assert rows == [(slice(0, 52), slice(0, 6)), (slice(52, 97), slice(0, 6))]
    ranks = [Layout(tp=2).coordinates(tp) for tp in (0, 1)]
    padding = [expected_slices((128, 6), full_shape, rank, Layout(tp=2), has_token_rows=True) for rank in ranks]
    assert padding == [(slice(0, 97), slice(0, 6)), (slice(97, 97), slice(0, 6))]
    with pytest.raises(ValueError, match="less than"):
        expected_slices((40, 6), full_shape, Layout().coordinates(0), Layout(tp=2))


def test_experts_are_sharded_over_the_ranks_of_a_stage() -> None:
    layout = Layout(tp=2, pp=2, dp=2, cp=2, ep=2, etp=2)
    slices = [
        expected_slices((2, 3, 4), (4, 6, 4), layout.coordinates(rank), layout, is_expert=True) for rank in range(16)
    ]
    one_replica = [(slice(e, e + 2), slice(f, f + 3), slice(0, 4)) for e in (0, 2) for f in (0, 3)]
    assert slices == 4 * one_replica and layout.edp == 2 and layout.min_ranks == 16


@pytest.mark.parametrize("flags,layout,edp,routing", CASES["experts"])
def test_shrink_keeps_routing_and_expert_layout(flags: str, layout: str, edp: int, routing: list[int]) -> None:
    config, shrunk = shrink_flags(expand(flags))
    m = shrunk.config.model
    sizes = (m.num_experts, m.moe_router_topk, m.moe_router_num_groups, m.moe_router_group_topk)
    assert (str(shrunk.layout), shrunk.layout.edp, sizes[: len(routing)]) == (layout, edp, tuple(routing))
    assert not find_problems(shrunk.config, shrunk.layout.world_size) and not find_problems(
        single_process_config(shrunk.config), 1
    )
    assert set(m.moe_layers) == set(config.model.moe_layers) and m.expert_ffn_size < 64


FULL, MIXER, MLP = (True, True), (True, False), (False, True)  # a layer, and its halves on two stages


@pytest.mark.parametrize(
    "parts,expected",
    [
        ((([FULL] * 2, [FULL]), ([], [FULL] * 3)), ([0, 1, 2], [3, 4, 5])),
        ((([FULL] * 2, [MIXER]), ([], [MLP, FULL, FULL])), ([0, 1, 2], [2, 3, 4])),
        ((([MLP, MIXER], [MIXER]), ([MIXER], [MLP])), ([0, 1, 3], [2, 3])),
    ],
)
def test_layers_are_numbered_by_pipeline_position(parts: Any, expected: Any, tmp_path: Path) -> None:
    """Two chunks on each of two pipeline ranks."""
    layout = Layout(pp=2, dp=2)
    for rank in range(layout.world_size):
        chunks = parts[layout.coordinates(rank).pp]
        names = [f"layers.{chunk}:{i}.mlp.up" for chunk, layers in enumerate(chunks) for i in range(len(layers))]
        items = [(RecordedTensor(0, "weight", name, -1, (1,), 0), np.zeros(1)) for name in names]
        write(tmp_path / f"rank-{rank:05d}.npz", Recording([*names, "head"], ["head"], items, chunks))
    numbers = [
        [int(name.split(".")[1]) for name in recording.parameters[:-1]] for recording in read_all(tmp_path, layout)
    ]
    assert numbers == [expected[0], expected[0], expected[1], expected[1]]


# ---- the loss by its definition


def _loss_problems(
    scale: float = 1.0, masked: bool = True, count: float | None = None, cap: float = math.inf, softcap: Any = None
) -> list[str]:
    """Return the problems of a recorded step with one micro-batch of 3 tokens, 2 of them with a loss.

    The recorded logits are bounded by `cap`, the expected ones by `softcap`.
    """
    rng = np.random.default_rng(3)
    hidden, head = rng.standard_normal((3, 1, 4)), rng.standard_normal((5, 4))
    labels, mask = np.array([[1], [4], [2]]), np.array([[1.0], [0.0], [1.0]])
    losses = []
    for position in range(3):
        logits = [math.fsum(hidden[position, 0] * row) for row in head]
        if cap < math.inf:
            logits = [cap * math.tanh(logit / cap) for logit in logits]
        losses.append(math.log(math.fsum(map(math.exp, logits))) - logits[labels[position, 0]])
    total = scale * (losses[0] + losses[2] + (0.0 if masked else losses[1]))
    arrays = [
        (RecordedTensor(0, "weight", "head", -1, (5, 4), 0), head),
        (RecordedTensor(1, "input", "labels", 0, (3, 1), 0), labels),
        (RecordedTensor(1, "input", "loss mask", 0, (3, 1), 0), mask),
        (RecordedTensor(1, "forward", "final_norm", 0, (3, 1, 4), 0), hidden),
        (RecordedTensor(1, "loss", "micro-batch", 0, (), 0), np.array(total)),
        (RecordedTensor(1, "loss", "step", -1, (), 0), np.array(total / (count or 2.0))),
    ]
    return [*reference_loss_problems(Reference(Recording(["head"], ["head"], arrays)), TOLERANCE, softcap)]


def test_losses_are_verified_independently() -> None:
    assert _loss_problems() == []
    assert "2 of 3 labels count" in _loss_problems(masked=False)[0]
    assert "by its definition" in _loss_problems(scale=1.0001)[0]
    assert "over the 2 labels that count" in _loss_problems(count=3.0)[0]
    assert _loss_problems(cap=1.5, softcap=1.5) == []
    assert "by its definition" in _loss_problems(cap=1.5)[0] and "by its definition" in _loss_problems(softcap=1.5)[0]


# ---- command lines


def verify(flags: str, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return programs.run_python("tools/verify.py", *flags.split(), *more, timeout=170, env=environment)


BAD: dict[str, list[str]] = toml_tables.MESSAGES["verify"]


@pytest.mark.parametrize("flags", BAD)
def test_bad_command_line_is_refused_at_once(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_tool.main(f"{GPT} {RUN} {flags}".split()) == 2
    stderr = capsys.readouterr().err
    assert all(part in stderr for part in BAD[flags]) and "Traceback" not in stderr


def test_kernels_that_do_not_run_here_are_replaced_with_a_note() -> None:
    flags = f"{RUN} --preset tiny-delta --linear-attention-kernel fla --vocab-size 64 --tp 2 --nproc 2"
    args, run_argv = verify_tool.build_parser().parse_known_args(flags.split())
    (shrunk,) = verify_tool.prepare_configs(args, run_argv)
    assert shrunk.config.parallel.linear_attention_kernel == "auto"
    assert "linear_attention_kernel=fla is not verified but auto" in " ".join(shrunk.notes)


HEALTHY = {name: expand(flags) for name, flags in CASES["healthy"].items()}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name",
    nightly_except(
        [*HEALTHY], ["gpt", "qwen", "ZeRO-3", "cp", "experts"], str, guards=("tools/verify.py", "tools/verification")
    ),
)
def test_healthy_layout_matches(name: str, tmp_path: Path) -> None:
    result_path = tmp_path / "result.json"
    done = verify(f"{RUN} {HEALTHY[name]}", "--json", str(result_path), "--out", str(tmp_path / "agreement.svg"))
    assert done.returncode == 0 and "agreed: tp" in done.stdout, done.stdout + done.stderr
    result = json.loads(result_path.read_text("utf-8"))
    assert result["agrees"] and not result["one_process"] and result["first"] is None
    assert {row["step"] for row in result["rows"] if row["kind"] == "gradient"} == {1, 2, 3}
    assert any(row["distance"] > 0 for row in result["rows"] if row["kind"] == "gradient")  # it compares two runs
    assert "<svg" in (tmp_path / "agreement.svg").read_text("utf-8")


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_rank_with_padding_alone_matches() -> None:
    """64 tokens, padded to 128 rows: tp rank 1 has no row of a token."""
    flags = "--full-size --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --tp 2"
    run = "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --mock-data"
    done = verify(f"{flags} {run} --untie-embeddings-and-output-weights")
    assert done.returncode == 0 and "agreed: tp 2" in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_crashed_layout_is_reported() -> None:
    done = verify(f"{RUN} {GPT} --tp 2 --dp 1 --timeout 0.01")
    assert done.returncode == 1 and "it has not ended after 0.01 s" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_verify_with_one_line(number: int, code: int, tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "verify.py"), *f"{RUN} {GPT} --tp 2 --steps 100000".split()]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with programs.Popen(argv, cwd=ROOT, start_new_session=True, **pipes) as process:
        while not list(tmp_path.glob("megalite-verify-*")):
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(4)  # the rank has started, or is about to: both must work
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in out + err, out + err
    assert "verify.py: interrupted" in err


def test_missing_gpu_is_reported_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = verify(f"{GPT} {RUN} --tp 2 --device cuda")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "cuda" in done.stderr.lower()
