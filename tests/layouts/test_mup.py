"""The maximal update parametrization (arXiv:2203.03466): its rates and initial weights, under every layout.

tests/layouts/test_reference.py compares four steps of more options with a model in plain torch. Rates are read off the
weights: with an epsilon of 0 and no weight decay, the first step of Adam moves every weight by its learning rate.
"""

import functools
import re
from collections.abc import Mapping

import numpy as np
import pytest
import reference_model as reference
import torch
from full_tensors import assemble, owned_shards
from layout_cases import COMMON, FP64_TOLERANCE, Row, expand, read_rows, row_name
from pairwise import nightly_except
from ranks import run_ranks
from reference_model import Model, Training, Weights
from torch import Tensor
from train_cases import run_from

from megalite.nn.parameter import params_with_specs
from megalite.training.state import Run
from megalite.training.train_step import train_step

STEPS = 3
ROWS = read_rows("mup")
OFTEN = {  # tp, pp and dp; sgd, sharded weights; Muon and experts; recurrent layers; host memory; depths
    "gpt tp2 pp2 dp2 tied",
    "qwen rates sgd ZeRO-3 tp2 dp2",
    "qwen of experts muon tp2 dp2 ep2",
    "mla of experts, three depths, tied, split pp2 ep2",
    "llama ZeRO-3 pp2 dp2 vpp2 chunks held, parameters offloaded",
    "kda tp2 pp2 split",
}
LR, MULT = 0.01, 4.0
# the parameters of a layer whose output (E experts, one gate, V channels) does not grow with the width
TO_FIXED = re.compile(r".*\.(mlp\.router|mlp\.shared_gate|kda\.[fz]_down)")
# those whose input is fixed, and those that multiply no channels
FROM_FIXED = re.compile(r".*(bias|norm\.(weight|bias)|\.sink|\.conv_\w+|\.A_log|\.dt_bias|\.D|norm|kda\.[fz]_up)")
MODELS = {
    "gpt": "GPT",
    "llama": "LLAMA",
    "neox": "NEOX",
    "qwen": "QWEN SINKS --attention-output-gate",
    "gemma": "GEMMA",
    "mla": "MLA",
    "queries from x, gated": "GATED",
    "experts": "QWEN_MOE",
    "experts with biases and sinks": "OSS --mtp-num-layers 1",
    "depths": "GPT MTP3",
    "gated delta net": "GDN",
    "kimi delta attention": "KDA",
    "mamba": "MAMBA",
}


def train_rank(flags: str) -> tuple[list[float], list[float], list]:
    """Train on this rank in fp64; return losses, gradient norms and the pieces of the weights that it owns."""
    run = run_from(f"{COMMON} {flags}", dtype=torch.float64)
    results = [train_step(run) for _ in range(STEPS)]
    run.sync.wait_param_sync()
    return [r.loss for r in results], [r.grad_norm for r in results], owned_shards(run.optimizer, "model/")


@functools.cache
def train_alone(flags: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    losses, norms, pieces = train_rank(flags)
    return losses, norms, assemble(pieces)


@pytest.mark.parametrize(
    "item",
    nightly_except(
        ROWS,
        [row for row in ROWS if row.name in OFTEN],
        row_name,
        guards=("megalite/config/width_scaling.py", "megalite/optim/zero/layout.py", "megalite/optim/muon.py"),
    ),
)
def test_mup_trains_like_one_process(item: Row) -> None:
    ranks = run_ranks(item.world, train_rank, f"{item.model} {item.layout}")
    batch = "--global-batch-size 4" if "--global-batch-size" in item.layout else ""
    expected_losses, expected_norms, expected = train_alone(f"{item.model} {batch}")
    for losses, norms, _ in ranks:
        np.testing.assert_allclose(losses, expected_losses, rtol=FP64_TOLERANCE)
        np.testing.assert_allclose(norms, expected_norms, rtol=FP64_TOLERANCE)
    weights = assemble(piece for _, _, pieces in ranks for piece in pieces)
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        error = float((weights[name] - values).abs().max() / values.abs().max())
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


def weights_of(run: Run) -> Weights:
    """Return copies of all weights by name."""
    run.sync.wait_param_sync()
    return {
        spec.name: parameter.detach().clone()
        for stage in run.pipeline.stages
        for spec, parameter in params_with_specs(stage)
    }


def step_sizes(flags: str) -> tuple[Weights, dict[str, float]]:
    """Return the initial weights, and for each parameter the median change of its elements that changed in one step."""
    run = run_from(f"{COMMON} {flags}", dtype=torch.float64)
    before = weights_of(run)
    train_step(run)
    after = weights_of(run)
    changes = {name: (after[name] - before[name]).abs() for name in before}
    return before, {name: float(change[change > 0].median()) for name, change in changes.items() if change.any()}


ONE_STEP = f"--lr {LR} --adam-eps 0 --weight-decay 0 --clip-grad 0"
WIDE = f"--use-mup --mup-base-hidden-size {int(32 / MULT)}"


def expected_factors(name: str, rate_of_matrix: float = 1 / MULT) -> tuple[float, float]:
    """Return the factors of the learning rate and of the initial standard deviation of a parameter."""
    if name in ("embedding.word", "embedding.position", "head") or FROM_FIXED.fullmatch(name):
        return 1.0, 1.0
    return rate_of_matrix, 1 / MULT if TO_FIXED.fullmatch(name) else MULT**-0.5


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_matrix_has_its_rate_and_initial_weights(model: str) -> None:
    """Every matrix of every kind of layer learns at lr / m: in EleutherAI/gpt-neox#956 and #1061 none did."""
    flags = f"{expand(model)} {ONE_STEP}"
    plain_weights, plain_sizes = step_sizes(flags)
    weights, sizes = step_sizes(f"{flags} {WIDE}")
    matrices = 0
    for name, values in weights.items():
        rate, std = expected_factors(name)
        torch.testing.assert_close(values, plain_weights[name] * std, rtol=1e-6, atol=0, msg=f"{name}: initial weights")
        if name in sizes and name in plain_sizes:  # a token that does not occur has no gradient
            assert plain_sizes[name] == pytest.approx(LR, rel=1e-6), f"{name}: rate without muP"
            assert sizes[name] == pytest.approx(LR * rate, rel=1e-6), f"{name}: rate"
            matrices += rate != 1
    assert matrices >= sum(".attention.q" in name or ".out" in name for name in weights) > 0


def relative_update_norms(hidden_size: int, flags: str) -> Mapping[str, float]:
    """Return for each matrix of the layers the spectral norm of its first update over sqrt(rows / columns)."""
    sizes = f"""--hidden-size {hidden_size} --ffn-hidden-size {2 * hidden_size} --moe-ffn-hidden-size {hidden_size}
     --moe-shared-expert-intermediate-size {hidden_size} --kv-channels {hidden_size // 4} --num-query-groups 4"""
    run = run_from(f"{COMMON} {expand('QWEN_MOE')} {sizes} {ONE_STEP} {flags}", dtype=torch.float64)
    before = weights_of(run)
    train_step(run)
    norms = {}
    for name, after in weights_of(run).items():
        if after.dim() > 1 and name.startswith("layers."):
            update = (after - before[name]).flatten(0, -2).unflatten(0, (-1, after.shape[-2]))[0]
            rows, columns = update.shape
            norms[name] = float(torch.linalg.matrix_norm(update, 2)) / (rows / columns) ** 0.5
    return norms


@pytest.mark.parametrize("scale_mode", ["spectral", "shape_scaling", "unit_rms_norm"])
def test_muon_updates_have_a_norm_that_follows_the_shape(scale_mode: str) -> None:
    """With every scale of Muon, the norm that muP wants (arXiv:2310.17813, condition 1) is that of the base model."""
    flags = f"--optimizer muon --muon-scale-mode {scale_mode} --muon-fp32-matmul-prec high"
    base = relative_update_norms(16, flags)
    wide = relative_update_norms(64, f"{flags} --use-mup --mup-base-hidden-size 16")
    assert base.keys() == wide.keys() and "layers.0.mlp.router" in wide
    for name, norm in wide.items():  # Newton-Schulz leaves singular values between about 0.7 and 1.2
        assert norm == pytest.approx(base[name], rel=0.4), name


SAME_WIDTH = "--use-mup --mup-base-head-dim {head_size}"


@pytest.mark.parametrize(
    "model, head_size, optimizer",
    [
        ("GPT", 8, "adam"),
        ("LLAMA BORDERS", 8, "sgd"),
        ("MLA_MOE TIED MTP", 10, "muon"),
        ("GDN_MOE --bf16", 8, "adam"),
        ("KDA DROP", 8, "dist_muon"),
    ],
)
def test_base_width_trains_bit_for_bit_as_without(model: str, head_size: int, optimizer: str) -> None:
    flags = f"{COMMON} {expand(model)} --optimizer {optimizer}"
    dtype = None if "bf16" in flags else torch.float64
    plain = run_from(flags, dtype=dtype)
    mup = run_from(f"{flags} {SAME_WIDTH.format(head_size=head_size)}", dtype=dtype)
    for _ in range(STEPS):
        plain_step, mup_step = train_step(plain), train_step(mup)
        assert (plain_step.loss, plain_step.grad_norm) == (mup_step.loss, mup_step.grad_norm)
        grads, mup_grads = ([bucket.grads.owned_sums for bucket in run.optimizer.buckets] for run in (plain, mup))
        assert all(torch.equal(a, b) for a, b in zip(grads, mup_grads, strict=True))
    expected, actual = weights_of(plain), weights_of(mup)
    assert all(torch.equal(values, actual[name]) for name, values in expected.items())


def test_ten_steps_equal_torch() -> None:
    """A plain torch model with the multipliers of the paper, and torch's AdamW with a group for each parameter."""
    steps, batch = 10, 4
    flags = f"""--num-layers 3 --hidden-size 48 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
     --micro-batch-size 2 --global-batch-size {batch} --lr 0.01 --lr-decay-style cosine --train-iters {steps} --seed 7
     --mock-data --tokenizer-type NullTokenizer --vocab-size 21 --make-vocab-size-divisible-by 8 --init-method-std 0.2
     --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --adam-eps 1e-5 --weight-decay 0.2
     --use-mup --mup-base-hidden-size 16 --mup-base-head-dim 4 --mup-embedding-mult 2"""
    model = Model(
        *(3, 48, 4, 12, 4, 192, 21, 24, 16),
        softmax_scale=4**0.5 / 12,
        embedding_sum_multiplier=2.0,
        logit_multiplier=1 / 3,
    )
    run = run_from(flags, dtype=torch.float64)
    initial = weights_of(run)
    dataset = run.train_loader.batches.dataset
    batches = [torch.from_numpy(dataset.samples(np.arange(s * batch, (s + 1) * batch))) for s in range(steps)]
    rates = tuple(0.005 * (1 + np.cos(np.pi * s / steps)) for s in range(steps))
    expected = reference.train(
        initial, batches, model, Training(rates, matrix_rate=1 / 3, weight_decay=0.2, eps=1e-5 / 3)
    )
    results = [train_step(run) for _ in range(steps)]
    np.testing.assert_allclose([r.loss for r in results], expected.losses, rtol=1e-10)
    np.testing.assert_allclose([r.grad_norm for r in results], expected.grad_norms, rtol=1e-10)
    for name, weight in weights_of(run).items():
        error = float((weight - expected.weights[name]).abs().max() / expected.weights[name].abs().max())
        assert error <= 1e-10, f"{name} differs by {error:.1e}"
