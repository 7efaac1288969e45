"""The cost of a layer, measured from one run of it, equals the formulas of the literature and is additive."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from formulas import head_flops, layer_flops_by_part, layer_saved_bytes, layer_wgrad_bytes
from train_cases import config_from

from megalite.config.options import ModelConfig
from megalite.kernels.dispatch import repeatable
from megalite.planning import meta_mode
from megalite.planning.layer_cost import CommStart, CostRecorder, LayerCost, Matmul, MemoryOp
from megalite.planning.layer_kinds import LayerKind, LayerSetting, embedding_cost, head_cost, layer_kinds, layers_cost
from megalite.planning.layer_kinds import _layers_cost as measure_layers

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention"
GROUPS = "--num-query-groups"
KINDS = {
    "llama": f"{LLAMA} {GROUPS} 4",
    "gpt": "--disable-bias-linear",
    "biases": "",
    "qk-norm, window": f"{LLAMA} {GROUPS} 4 --qk-layernorm --window-size 63,0",
    "qk-norm over heads": f"{LLAMA} {GROUPS} 4 --qk-layernorm --qk-layernorm-over-heads",
    "squared ReLU, parallel": f"{LLAMA} {GROUPS} 4 --squared-relu --parallel-residual".replace("--swiglu ", ""),
}


BASE = """--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --bf16
 --micro-batch-size 2 --lr 1 --train-iters 1 --mock-data --hidden-dropout 0 --attention-dropout 0 --vocab-size 1000"""


def model_of(flags: str) -> ModelConfig:
    return config_from(f"{BASE} {flags}").model


def setting(tp: int, split: bool = False, recompute: tuple[str, ...] = ()) -> LayerSetting:
    return LayerSetting(tp, 2, torch.bfloat16, split, recompute)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layer_flops_and_bytes_equal_the_literature(name: str, tp: int) -> None:
    model = model_of(KINDS[name])
    tokens, (kind, *_) = 2 * model.seq_length, layer_kinds(model)
    plain, split = layers_cost((kind,), setting(tp)), layers_cost((kind,), setting(tp, split=True))
    projections, mlp, scores = (n * tokens / tp for n in layer_flops_by_part(model, model.seq_length))
    expected = (projections + mlp + scores, projections + mlp + 2 * scores, projections + mlp)
    assert plain.flops == split.flops == pytest.approx(expected, rel=1e-9)
    assert plain.saved_bytes == pytest.approx(layer_saved_bytes(model, 2, tp) * tokens, rel=2e-3)
    assert split.saved_bytes == plain.saved_bytes and plain.wgrad_bytes == 0
    # with squared ReLU on one rank the deferred weight gradients also hold a result of the reference
    tolerance = 0.1 if name.startswith("squared") and tp == 1 else 2e-3
    assert split.wgrad_bytes == pytest.approx(layer_wgrad_bytes(model, 2, tp) * tokens, rel=tolerance)


def test_replicated_kv_heads_are_computed_on_each_rank() -> None:
    """The formula for one rank has a quarter of the single group that each of four ranks computes."""
    model = model_of(f"{LLAMA} {GROUPS} 1")
    D, K, tokens = 512, 64, 2 * 256
    extra_flops = 2 * D * 2 * K * (1 - 1 / 4) * tokens
    projections, mlp, scores = (n * tokens / 4 for n in layer_flops_by_part(model, 256))
    cost = layers_cost(layer_kinds(model)[:1], setting(4))
    assert cost.flops[0] == pytest.approx(projections + mlp + scores + extra_flops)


@pytest.mark.parametrize("modules", [(), ("core_attn",), ("mlp",), ("layernorm", "mlp")])
def test_recompute_saves_memory_and_doubles_the_forward(modules: tuple[str, ...]) -> None:
    model = model_of(KINDS["llama"])
    kind, tokens = layer_kinds(model)[0], 2 * 256
    plain, selective = layers_cost((kind,), setting(2)), layers_cost((kind,), setting(2, recompute=modules))
    _, mlp, scores = (n * tokens / 2 for n in layer_flops_by_part(model, 256))
    extra_flops = scores * ("core_attn" in modules) + mlp * ("mlp" in modules)
    assert selective.flops == (plain.flops[0], pytest.approx(plain.flops[1] + extra_flops), plain.flops[2])
    assert selective.saved_bytes == pytest.approx(layer_saved_bytes(model, 2, 2, modules) * tokens, rel=4e-3)
    full = layers_cost((kind,), setting(2), True)
    assert full.saved_bytes == 256 // 2 * 2 * 512 * 2  # the input alone
    assert full.flops[1] == pytest.approx(plain.flops[0] + plain.flops[1])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_layer_costs_are_additive(name: str, tp: int) -> None:
    """Neighbouring layers share storages; a forgotten reference would count one too many in each."""
    kind = layer_kinds(model_of(KINDS[name]))[0]
    single, *several = (layers_cost((kind,) * n, setting(tp, split=True)) for n in (1, 2, 3))
    for n, cost in enumerate(several, 2):
        assert cost.flops == pytest.approx([n * f for f in single.flops])
        assert cost.saved_bytes == n * single.saved_bytes
        assert cost.wgrad_bytes == n * single.wgrad_bytes


def test_layer_collectives_equal_a_counted_run() -> None:
    """F has two all-gathers and two reduce-scatters, B four and two; split B has two and two, and W two all-gathers.

    test_dry_run_rank.py counts those of runs.
    """
    kind = layer_kinds(model_of(KINDS["llama"]))[0]

    def calls(split: bool) -> Counter[tuple[str, str]]:
        trace = layers_cost((kind,), setting(2, split)).trace
        return Counter((event.phase, event.op) for event in trace if isinstance(event, CommStart))

    gather, scatter = "all-gather", "reduce-scatter"
    assert calls(False) == {("F", gather): 2, ("F", scatter): 2, ("B", gather): 4, ("B", scatter): 2}
    split = {("F", gather): 2, ("F", scatter): 2, ("B", gather): 2, ("B", scatter): 2, ("W", gather): 2}
    assert calls(True) == split
    for event in layers_cost((kind,), setting(2)).trace:
        if isinstance(event, CommStart):
            assert event.num_bytes == 256 * 2 * 512 * 2  # of the full sequence


def test_head_and_embedding_cost() -> None:
    model = model_of(KINDS["llama"])
    head = head_cost(model, setting(2), 1000, 1024, 0.0)
    assert head.flops == (3 * head_flops(model, 1024) * 2 * 256 / 2, 0.0, 0.0)
    edge = 256 // 2 * 2 * 512 * 2
    assert 2 * edge <= head.saved_bytes < 2.05 * edge  # x, and its gradient
    embedding = embedding_cost(model, setting(2), 1000, 1024)
    assert embedding.flops == (0.0, 0.0, 0.0) and embedding.peak_bytes["F"] >= edge


def test_equal_layers_are_one_kind() -> None:
    model = model_of(f"{KINDS['llama']} --num-layers 6 --window-size 31,0 --window-attn-skip-freq [1,1,0]*2")
    kinds = layer_kinds(model)
    assert len(kinds) == 6 and len(set(kinds)) == 2 and kinds[0] == kinds[1] == kinds[3] != kinds[2]
    assert {kind.spec.window for kind in kinds} == {32, None}
    assert layer_kinds(replace(model, seq_length=128))[0] != kinds[0]


def test_layer_cost_imports_no_compiler() -> None:
    """Importing one takes seconds on every rank that balances its stages."""
    code = """import sys
sys.path[:0] = ["tests/support", "tests/planning"]
from test_layer_cost import KINDS, head_cost, layer_kinds, layers_cost, model_of, setting
for flags in KINDS.values():
    layers_cost(layer_kinds(model_of(flags))[:1], setting(2, True))
head_cost(model_of(flags), setting(2), 1000, 1024, 0.0)
assert "torch._dynamo" not in sys.modules and "triton" not in sys.modules"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32"


@pytest.mark.parametrize(
    "flags,full", [(KINDS["llama"], True), (f"--disable-bias-linear {LATENT}", False)], ids=["recompute", "latent"]
)
def test_first_cost_equals_later_ones(flags: str, full: bool) -> None:
    """A search runs without garbage collection, so a reference cycle would keep tensors of the first cost allocated.

    Latent attention recomputes parts of itself in any case.
    """
    code = f"""import gc, sys
sys.path[:0] = ["tests/support", "tests/planning"]
from test_layer_cost import layer_kinds, layers_cost, measure_layers, model_of, setting
gc.disable()
kinds = layer_kinds(model_of({flags!r}))[:1]
first = layers_cost(kinds, setting(2), full_recompute={full})
measure_layers.cache_clear()
assert first == layers_cost(kinds, setting(2), full_recompute={full})"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


def test_launches_are_counted_with_recompute() -> None:
    """A layer launches 12 kernels: two norms, five matmuls, two rotations, attention, the activation, a residual sum.

    Tensor parallelism adds four collectives.
    """
    kind = layer_kinds(model_of(KINDS["llama"]))[0]
    plain, recomputed, split = (
        layers_cost((kind,), setting(tp), full_recompute) for tp, full_recompute in ((1, False), (1, True), (2, False))
    )
    assert plain.num_launches("F") == recomputed.num_launches("F") == 12 == split.num_launches("F") - 4
    assert recomputed.num_launches("BW") == plain.num_launches("BW") + 11  # no gradient needs the last sum


def full_trace(kind: LayerKind, setting: LayerSetting, full_recompute: bool) -> LayerCost:
    """Return the cost of a layer without anything that is reused: runs, results of operations, costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostRecorder, "run_repeatable", lambda self, fn, args: fn(*args))
        patch.setattr(meta_mode, "_cached_results", {})
        patch.setattr(meta_mode, "MAX_CACHED_RESULTS", 0)
        return measure_layers.__wrapped__((kind,), setting, full_recompute, None, False)


RECURRENT = f"""{LLAMA} {GROUPS} 4 --hybrid-layer-pattern LETTER-LETTERE --linear-num-key-heads 4 --num-experts 4
 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16 --mamba-num-groups 4"""


@pytest.mark.parametrize("letter", ["G", "K", "M"])
def test_a_cost_from_repeated_runs_equals_the_full_trace(letter: str) -> None:
    """Runs of a recurrence are replayed in layers that differ in other respects, and after them."""
    model = model_of(f"{RECURRENT.replace('LETTER', letter)} --seq-length 1024 --max-position-embeddings 1024")
    kinds = list(dict.fromkeys(layer_kinds(model)))
    assert [kind.spec.has_experts for kind in kinds] == [False, True]
    settings = [setting(tp, split) for tp, split in ((1, False), (2, True))]
    settings.append(replace(setting(1, recompute=("gdn", "kda", "mamba", "layernorm")), ep=2))
    for layer_setting, full_recompute in [(settings[0], True), *((each, False) for each in settings)]:
        for kind in kinds:
            replayed = measure_layers.__wrapped__((kind,), layer_setting, full_recompute, None, False)
            assert replayed == full_trace(kind, layer_setting, full_recompute)
            assert layers_cost((kind,), layer_setting, full_recompute) == replayed


def test_a_run_is_replayed_with_arguments_of_the_same_shapes_only() -> None:
    runs = []

    @repeatable
    def double(x: torch.Tensor, y: torch.Tensor, factor: int) -> tuple[torch.Tensor, None]:
        runs.append(factor)
        return (x * y) * factor, None

    def total(*shapes: int, factor: int = 2, share: bool = False) -> tuple[int, int, int]:
        recorder = CostRecorder()
        with recorder:
            x, y = (torch.empty(n, 8, device="meta") for n in shapes)
            result, none = recorder.run_phase("F", lambda: double(x, x if share else y, factor))
        assert none is None and result.shape == (max(shapes), 8)
        return (
            sum(event.num_bytes for event in recorder.trace if isinstance(event, MemoryOp)),
            recorder.peaks["F"][""],
            recorder.live,
        )

    first = total(4, 4)
    assert total(4, 4) == first and runs == [2]
    assert first == (5 * 4 * 8 * 4, 2 * 4 * 8 * 4, 3 * 4 * 8 * 4)
    assert total(4, 4, share=True)[0] == 4 * 4 * 8 * 4 and len(runs) == 2  # an argument twice counts once
    assert total(4, 1) != first and len(runs) == 3
    assert total(4, 4, factor=3) == first and len(runs) == 4


def test_a_run_that_keeps_or_shares_memory_is_not_replayed() -> None:
    runs = []

    @repeatable
    def keep(x: torch.Tensor) -> torch.Tensor:
        runs.append(x + 1)
        return x * 2

    @repeatable
    def view(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        return x[:2]

    with CostRecorder() as recorder:
        x = torch.empty(4, device="meta")
        for n in (1, 2):
            recorder.run_phase("F", lambda: (keep(x), view(x)))
            assert len(runs) == 2 * n


def test_products_of_a_batch_count_together() -> None:
    """The time of a product depends on the tiles of its result, and each product of a batch has tiles of its own."""
    recorder = CostRecorder()
    with recorder:
        a, b = torch.empty(30, 64, 16, device="meta"), torch.empty(30, 16, 128, device="meta")
        recorder.run_phase("F", lambda: a @ b)
    (event,) = recorder.trace
    assert isinstance(event, Matmul)
    assert (event.rows, event.columns, event.depth) == (30 * 64, 128, 16)
    assert event.flops == 30 * 2 * 64 * 128 * 16
