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
from megalite.planning.layer_cost import CommStart
from megalite.planning.layer_kinds import LayerSetting, embedding_cost, head_cost, layer_kinds, layers_cost

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


def test_first_cost_with_recompute_equals_later_ones() -> None:
    """A search runs without garbage collection, so a reference cycle would keep tensors of the first cost allocated."""
    code = """import gc, sys
sys.path[:0] = ["tests/support", "tests/planning"]
from test_layer_cost import KINDS, layer_kinds, layers_cost, model_of, setting
gc.disable()
kinds = layer_kinds(model_of(KINDS["llama"]))[:1]
first, second = (layers_cost(kinds * n, setting(2), full_recompute=True) for n in (1, 2))
assert first.saved_bytes == second.saved_bytes  # the input of the first layer"""
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
