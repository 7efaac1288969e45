"""Multi-token prediction: every layout trains as one process does, and one process as a reference in plain torch.

The reference (`depth_losses`) follows arXiv:2412.19437, sec. 2.2, label by label. It is built on the parts of
tests/support/reference_model.py, which imports nothing from megalite.
"""

import functools
from pathlib import Path

import numpy as np
import pytest
import reference_model as reference
import torch
import torch.nn.functional as F
from full_tensors import assemble, owned_shards
from layout_cases import COMMON, FP64_TOLERANCE, Row, expand, read_rows, row_name
from pairwise import nightly_except
from ranks import run_ranks
from reference_model import Model, Rotary, Weights, is_matrix
from token_files import write_documents
from torch import Tensor
from train_cases import run_from

from megalite.training.evaluation import evaluation_losses
from megalite.training.train_step import train_step

STEPS = 3
ROWS = read_rows("mtp")
OFTEN = {  # each feature of the depths once: tp, cp, a copy of the embedding, shared weights, sharded weights, experts
    "one depth, tp2",
    "three depths, tied, documents, cp2 pp2",
    "one depth, pp2, a copy of the embedding",
    "repeated, split pp2 vpp2",
    "three depths, tied, dp2 ZeRO-3",
    "repeated, ZeRO-3, recompute full",
    "experts, one depth, ep2 tp2",
    "mla of experts, three depths, tied, cp2 ep2, documents",
}


def train_rank(flags: str, dtype: str | None = "float64", steps: int = STEPS) -> tuple[list[dict], list[float], list]:
    """Train on this rank; return the losses by name, the gradient norms and the pieces of the weights that it owns."""
    common = COMMON.replace("--mock-data", "") if "--data-path" in flags else COMMON
    run = run_from(f"{common} {flags}", dtype=None if dtype is None else getattr(torch, dtype))
    results = [train_step(run) for _ in range(steps)]
    run.sync.wait_param_sync()
    return [dict(r.losses) for r in results], [r.grad_norm for r in results], owned_shards(run.optimizer, "model/")


@functools.cache
def train_alone(flags: str) -> tuple[list[dict], list[float], dict[str, Tensor]]:
    losses, norms, pieces = train_rank(flags)
    return losses, norms, assemble(pieces)


def assert_equals_one_process(
    ranks: list[tuple[list[dict], list[float], list]], expected: tuple[list[dict], list[float], dict[str, Tensor]]
) -> None:
    """Compare the losses and gradient norms of each step, and the weights after the last one."""
    expected_losses, expected_norms, expected_weights = expected
    for losses, norms, _ in ranks:
        np.testing.assert_allclose(norms, expected_norms, rtol=FP64_TOLERANCE, err_msg="gradient norm")
        for step_losses, expected_step in zip(losses, expected_losses, strict=True):
            assert step_losses == pytest.approx(expected_step, rel=FP64_TOLERANCE)
    weights = assemble(piece for _, _, pieces in ranks for piece in pieces)
    assert weights.keys() == expected_weights.keys()
    for name, values in expected_weights.items():
        error = float((weights[name] - values).abs().max() / values.abs().max())
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize(
    "item",
    nightly_except(
        ROWS,
        [row for row in ROWS if row.name in OFTEN],
        row_name,
        guards=("megalite/models/mtp.py", "megalite/models/gpt.py", "megalite/training/batch.py"),
    ),
)
def test_depths_train_like_one_process(item: Row) -> None:
    ranks = run_ranks(item.world, train_rank, f"{item.model} {item.layout}")
    assert_equals_one_process(ranks, train_alone(item.model))
    expected_losses, *_ = train_alone(item.model)
    assert expected_losses[0]["mtp_1_loss"] != expected_losses[-1]["mtp_1_loss"]


DOCUMENT_LAYOUTS = ["A2A cp2", "cp4 tp2", "SPLIT UP pp2 cp2"]


@pytest.mark.parametrize(
    "layout",
    nightly_except(
        DOCUMENT_LAYOUTS, ["A2A cp2"], str, guards=("megalite/training/batch.py", "megalite/nn/context_parallel.py")
    ),
)
def test_documents_of_any_length_train_like_one_process(layout: str, tmp_path: Path) -> None:
    """Documents are shorter than a depth, than a rank's chunk of a sample, and than a sample, or longer than it."""
    rng = np.random.default_rng(5)
    lengths = [1, 2, 7, 1, 1, 13, 2, 3, 5, 29, 7, 11, 17] * 12
    prefix = write_documents(tmp_path / "a", [rng.integers(0, 93, length).tolist() for length in lengths])
    flags = f"{expand('MLA MTP3 BORDERS')} --data-path {prefix} --split 1,0,0"
    world = 8 if "tp2" in layout else 2 * ("pp2" in layout) + 2
    ranks = run_ranks(world, train_rank, f"{flags} {expand(layout)}")
    assert_equals_one_process(ranks, train_alone(flags))


def test_depths_change_the_model_and_each_other() -> None:
    """The rows prove nothing about depths that train nothing."""
    flags = expand("LLAMA")
    runs = [train_alone(f"{flags} {expand(name)}") for name in ("MTP", "MTP3", "REPEATED")]
    last_losses = [train_alone(f"{flags} ")[0][-1]["loss"], *(losses[-1]["loss"] for losses, *_ in runs)]
    assert len(set(last_losses)) == 4
    assert len({runs[1][0][-1][f"mtp_{depth}_loss"] for depth in (1, 2, 3)}) == 3


# ---- the reference
LLAMA = Model(
    num_layers=4,
    width=32,
    num_heads=4,
    head_size=8,
    num_kv_groups=2,
    ffn=48,
    vocab_size=95,
    padded_vocab_size=96,
    max_positions=16,
    norm="RMSNorm",
    activation="swiglu",
    bias="none",
    rotary=Rotary(),
    learned_positions=False,
    tie_embeddings=False,
)
NUM_DEPTHS, FACTOR, BATCH, REFERENCE_STEPS = 2, 0.3, 16, 10
FLAGS = (
    f"--mtp-num-layers {NUM_DEPTHS} --mtp-loss-scaling-factor {FACTOR} --train-iters {REFERENCE_STEPS} --clip-grad 0"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2"


def run_layer(w: Weights, layer: int, x: Tensor, m: Model) -> Tensor:
    """Return x [B, S, D] after a layer of causal attention and an MLP, or the experts of arXiv:2401.04088."""
    name, S = f"layers.{layer}", x.shape[1]
    position_BS = torch.arange(S).expand(x.shape[:2])
    causal_BST = torch.ones(S, S, dtype=torch.bool).tril().expand(len(x), S, S)
    y = reference.normalize(w, f"{name}.attention.norm", x, m)
    x = x + reference.attend(w, layer, y, position_BS, causal_BST, m, reference.no_dropout)
    y = reference.normalize(w, f"{name}.mlp.norm", x, m)
    if f"{name}.mlp.router" not in w:
        return x + reference.activate(w, f"{name}.mlp", y, m) @ w[f"{name}.mlp.down"].T
    chosen, experts = (y @ w[f"{name}.mlp.router"].T).topk(2, -1)
    weights = torch.zeros(*y.shape[:2], 4, dtype=y.dtype).scatter(-1, experts, chosen.softmax(-1))
    for e in range(4):
        expert = {"up.gate_up": w[f"{name}.mlp.experts.gate_up"][e]}
        output = reference.activate(expert, "up", y, m) @ w[f"{name}.mlp.experts.down"][e].T
        x = x + weights[..., e : e + 1] * output
    return x


def depth_losses(w: Weights, tokens_BT: Tensor, m: Model, num_depths: int = NUM_DEPTHS) -> list[Tensor]:
    """Return the sum of the model's losses, and that of the losses of each depth, over the labels of tokens [B, S + 1]."""
    S = tokens_BT.shape[1] - 1
    x = w["embedding.word"][tokens_BT[:, :S]]
    for layer in range(m.num_layers):
        x = run_layer(w, layer, x, m)
    hidden = [reference.normalize(w, "final_norm", x, m)]
    for depth in range(1, num_depths + 1):
        layer = m.num_layers + depth - 1
        # the last `depth` positions have no label, so that the causal sequence may end before them
        h = reference.normalize(w, f"layers.{layer}.mtp.hnorm", hidden[-1][:, : S - depth], m)
        e = reference.normalize(w, f"layers.{layer}.mtp.enorm", w["embedding.word"][tokens_BT[:, depth:S]], m)
        x = run_layer(w, layer, torch.cat([e, h], -1) @ w[f"layers.{layer}.mtp.eh_proj"].T, m)
        hidden.append(reference.normalize(w, f"layers.{layer}.mtp.final_norm", x, m))
    head = w["head"][: m.vocab_size]
    return [
        F.cross_entropy((h @ head.T).flatten(0, 1), tokens_BT[:, depth + 1 :].flatten(), reduction="sum")
        for depth, h in enumerate(hidden)
    ]


@functools.cache
def train_reference(flags: str, dtype: str | None = None) -> tuple[list[dict[str, float]], Weights]:
    """Return the losses of each step and the final weights of the reference, in fp64 with torch's AdamW.

    `dtype` is that of the run whose initial weights it has.
    """
    run = run_from(f"{COMMON} {flags}", dtype=None if dtype is None else getattr(torch, dtype))
    w = {name.removeprefix("model/"): value for name, value in assemble(owned_shards(run.optimizer, "model/")).items()}
    w = {name: value.requires_grad_() for name, value in w.items()}
    decayed, others = ([value for name, value in w.items() if is_matrix(name) == decays] for decays in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-3)
    dataset = run.train_loader.batches.dataset
    losses = []
    for step in range(REFERENCE_STEPS):
        tokens_BT = torch.from_numpy(dataset.samples(np.arange(step * BATCH, (step + 1) * BATCH)))
        S = tokens_BT.shape[1] - 1
        main, *depths = depth_losses(w, tokens_BT, LLAMA)
        optimizer.zero_grad()
        ((main + FACTOR / NUM_DEPTHS * sum(depths)) / (BATCH * S)).backward()
        optimizer.step()
        means = {f"mtp_{k}_loss": loss.item() / (BATCH * (S - k)) for k, loss in enumerate(depths, 1)}
        losses.append({"loss": main.item() / (BATCH * S), **means})
    return losses, {name: value.detach() for name, value in w.items()}


def test_run_equals_the_reference_in_fp64() -> None:
    flags = f"{expand('LLAMA')} {FLAGS}"
    losses, _, pieces = train_rank(flags, "float64", REFERENCE_STEPS)
    expected_losses, expected_weights = train_reference(flags, "float64")
    for step_losses, expected in zip(losses, expected_losses, strict=True):
        assert step_losses == pytest.approx(expected, rel=FP64_TOLERANCE)
    weights = assemble(pieces)
    for name, values in expected_weights.items():
        assert float((weights[f"model/{name}"] - values).abs().max() / values.abs().max()) <= 1e-9, name


@pytest.mark.parametrize("layout", ["", "tp2", "pp2", "cp2", "ZERO3", "ep2"])
def test_ten_steps_equal_the_reference_in_fp32(layout: str) -> None:
    flags = f"{expand('LLAMA')} {FLAGS} {EXPERTS if layout == 'ep2' else ''}"
    args = (f"{flags} {expand(layout)}", None, REFERENCE_STEPS)
    losses = (run_ranks(2, train_rank, *args) if layout else [train_rank(*args)])[0][0]
    expected_losses, _ = train_reference(flags)
    for step_losses, expected in zip(losses, expected_losses, strict=True):
        assert step_losses == pytest.approx(expected, rel=1e-6)
    assert expected_losses[-1]["mtp_1_loss"] < expected_losses[0]["mtp_1_loss"] - 0.1


def evaluate_rank(flags: str) -> dict[str, float]:
    """Return the losses of a model that is not trained, on the first training batch."""
    run = run_from(f"{COMMON} {flags}", dtype=torch.float64)
    return evaluation_losses(run, run.train_loader, 1)


@pytest.mark.parametrize("layout", ["", "pp2", "cp2"])
def test_evaluation_has_the_losses_of_depths(layout: str) -> None:
    flags = f"{expand('LLAMA')} {FLAGS} --hidden-dropout 0.2"
    ranks = run_ranks(2, evaluate_rank, f"{flags} {expand(layout)}") if layout else [evaluate_rank(flags)]
    expected, _ = train_reference(f"{expand('LLAMA')} {FLAGS}", "float64")
    for losses in ranks:
        assert losses == pytest.approx(expected[0], rel=FP64_TOLERANCE)
