"""Experts train under every layout as one process does.

Losses, gradient norms and weights are equal in fp64 to 1e-10, auxiliary losses to 1e-10, and the routers' assignment
counts and biases bit for bit.

So a gradient norm counts all experts where ep meets tp, which it did not in NVIDIA/Megatron-LM#5916 (rows tp2 dp2 ep2).
Gradients under ep are those of ep 1; in pytorch/pytorch#160285 they were twice as large (all rows with ep).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_loads import replace_manifest
from full_tensors import assemble, owned_shards
from layout_cases import BF16_TOLERANCE, COMMON, FP64_TOLERANCE, Row, expand, read_rows, row_name
from pairwise import nightly_except
from ranks import run_ranks
from token_files import write_documents
from train_cases import DOCUMENT_FLAGS, config_from, run_from

from megalite.checkpoint.storage.location import CheckpointError
from megalite.config.config_file import dump_config
from megalite.config.layer_spec import ROUTER_LOSSES
from megalite.training.checkpointing.initial_state import load_initial_state
from megalite.training.checkpointing.save import open_saver, save
from megalite.training.evaluation import evaluate
from megalite.training.setup import SetupError
from megalite.training.train_step import train_step

STEPS = 3
MIXTRAL, QWEN, DEEPSEEK, EP2, EP4 = map(expand, "MIXTRAL QWEN_MOE DEEPSEEK ep2 ep4".split())
ROWS = read_rows("experts")
PADDED = read_rows("padded")
FIRST = ("oss tp2", "olmoe 1p", "sinkhorn", "mixtral ep2", "deepseek tp2", "qwen tp2 dp2", "deepseek cp2")
OFTEN_PADDED = [r for r in PADDED if r.name.startswith(("mixtral tp2 cp2", "qwen pp4", "qwen dp2", "sinkhorn"))]
OFTEN = [r for r in ROWS if r.name.startswith((*FIRST, "deepseek split"))]


def _train(flags: str, evaluates: bool = False, common: str = COMMON) -> tuple:
    """Train on this rank, which may evaluate before each step.

    Returns:
        (loss, gradient norm, MoE metrics) of every step; the pieces of the weights that this rank owns; the assignment
        counts and the auxiliary losses of all layers, of every step; the biases of this rank's routers.
    """
    run = run_from(f"{common} {flags}", dtype=torch.float64)
    counts, losses, results = [], [], []
    for _ in range(STEPS):
        if evaluates:
            evaluate(run, run.train_loader, 1)
        results.append(train_step(run))
        counts.append(run.expert_balancer.counts_LE.tolist())
        losses.append([*results[-1].layer_losses.values()])
    run.sync.wait_param_sync()
    biases = {
        router.name: router.expert_bias.tolist()
        for router in run.expert_balancer.routers
        if router.expert_bias is not None
    }
    numbers = [(r.loss, r.grad_norm, *(r.losses.get(name, 0) for name in ROUTER_LOSSES.values())) for r in results]
    return numbers, owned_shards(run.optimizer, "model/"), counts, losses, biases


@cache
def train_alone(flags: str, common: str = COMMON) -> tuple:
    return _train(flags, common=common)


def _weights(ranks: list[tuple]) -> dict[str, np.ndarray]:
    return {name: values.numpy() for name, values in assemble(piece for rank in ranks for piece in rank[1]).items()}


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_evaluation_changes_nothing(model: str) -> None:
    assert repr(_train(model, evaluates=True)) == repr(train_alone(model))


@pytest.mark.nightly(guards=("megalite/nn/moe.py", "megalite/nn/router.py", "megalite/nn/token_dispatch.py"))
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 1024"])
def test_experts_in_half_precision_train_like_one_process(precision: str) -> None:
    flags = f"{MIXTRAL} {precision} --train-iters 5 --global-batch-size 8"
    reference_losses = _load_train_save(flags, 5)[2]
    for *_, losses in run_ranks(4, _load_train_save, f"{flags} {EP2} --tp 2", 5):
        assert losses == pytest.approx(reference_losses, rel=BF16_TOLERANCE) and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("item", nightly_except(ROWS, OFTEN, row_name, guards=("megalite/nn", "megalite/kernels")))
def test_experts_train_like_one_process(item: Row) -> None:
    ranks = run_ranks(item.world, _train, f"{item.model} {item.layout}")
    layout_argv = item.layout.split()
    micro = "--micro-batch-size 1" * ("--micro-batch-size" in layout_argv)
    numbers, pieces, counts, losses, biases = train_alone(f"{item.model} {micro}")
    for results, _, *others in ranks:
        np.testing.assert_allclose(
            results, numbers, rtol=FP64_TOLERANCE, err_msg=f"{item.name}: loss, gradient norm, metrics"
        )
        np.testing.assert_allclose(others[1], losses, rtol=FP64_TOLERANCE, err_msg=item.name)
        assert others[0] == counts and others[2].items() <= biases.items(), item.name
    assert {name for rank in ranks for name in rank[4]} == biases.keys()
    actual, expected = _weights(ranks), _weights([(numbers, pieces)])
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=0, atol=1e-9 * np.abs(values).max(), err_msg=name)
    tokens, topk = 16 * 16, int(item.model.partition("--moe-router-topk ")[2].split()[0]) if "topk" in item.model else 2
    assert all(sum(layer) == tokens * topk for step in counts for layer in step)


# ---- padding and masked labels
@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return COMMON on packed documents of 3 to 24 tokens, several in a sample of 24, which end with token 93."""
    rng = np.random.default_rng(5)
    documents = [[*rng.integers(0, 93, length - 1), 93] for length in rng.integers(3, 25, 300)]
    return _on_token_files(write_documents(tmp_path_factory.mktemp("packed") / "a", documents), 24) + DOCUMENT_FLAGS


def _on_token_files(prefix: Path, seq_length: int) -> str:
    """Return COMMON on packed token files."""
    lengths = f"--seq-length {seq_length} --max-position-embeddings {seq_length}"
    data = f"--data-path {prefix} --split 1,0,0 --document-packing best-fit"
    return f"{COMMON.replace('--mock-data', '')} {lengths} {data}"


@pytest.mark.parametrize("model", ["MIXTRAL", "MIXTRAL GLOBAL", "QWEN_MOE", "DEEPSEEK --hidden-dropout 0", "SINKHORN"])
def test_padding_changes_nothing(tmp_path: Path, model: str) -> None:
    """Documents of 16 tokens are one sample each: without padding, and with 4 or 14 tokens of it."""
    rng = np.random.default_rng(3)
    prefix = write_documents(tmp_path / "a", [[*rng.integers(0, 93, 15), 93] for _ in range(60)])
    model_flags = f"{expand(model)} --attention-dropout 0"
    numbers, pieces, counts, losses, biases = _train(model_flags, common=_on_token_files(prefix, 16))
    for seq_length in (20, 30):
        padded = _train(model_flags, common=_on_token_files(prefix, seq_length))
        np.testing.assert_allclose(padded[0], numbers, rtol=FP64_TOLERANCE)
        np.testing.assert_allclose(padded[3], losses, rtol=FP64_TOLERANCE)
        assert padded[2] == counts and padded[4] == biases
        actual, expected = _weights([padded]), _weights([(numbers, pieces)])
        for name, values in expected.items():
            np.testing.assert_allclose(actual[name], values, rtol=0, atol=1e-9 * np.abs(values).max(), err_msg=name)
    topk = 3 if "QWEN" in model else 1 if "SINKHORN" in model else 2
    assert all(sum(layer) == 16 * 16 * topk for step in counts for layer in step)


@pytest.mark.parametrize(
    "item", nightly_except(PADDED, OFTEN_PADDED, row_name, guards=("megalite/nn", "megalite/training"))
)
def test_padded_documents_train_like_one_process(packed: str, item: Row) -> None:
    ranks = run_ranks(item.world, _train, f"{item.model} {item.layout}", False, packed)
    micro = "--micro-batch-size 1" * ("--micro-batch-size" in item.layout.split())
    numbers, pieces, counts, losses, biases = train_alone(f"{item.model} {micro}", packed)
    for results, _, *others in ranks:
        np.testing.assert_allclose(
            results, numbers, rtol=FP64_TOLERANCE, err_msg=f"{item.name}: loss, gradient norm, metrics"
        )
        np.testing.assert_allclose(others[1], losses, rtol=FP64_TOLERANCE, err_msg=item.name)
        assert others[0] == counts and others[2].items() <= biases.items(), item.name
    actual, expected = _weights(ranks), _weights([(numbers, pieces)])
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=0, atol=1e-9 * np.abs(values).max(), err_msg=name)


def _token_counts(flags: str, common: str) -> tuple[list[int], list[int]]:
    """Train on this rank; return the consumed tokens of the run after each step, and the tokens of each step."""
    run = run_from(f"{common} {flags}", dtype=torch.float64)
    steps = [(train_step(run), run.progress.consumed_tokens) for _ in range(2)]
    return [tokens for _, tokens in steps], [result.tokens for result, _ in steps]


def test_expert_token_counts_exclude_padding(packed: str) -> None:
    model_flags = expand("MIXTRAL")
    run = run_from(f"{packed} {model_flags}", dtype=torch.float64)
    layout = run.ledger.blend.piece_lengths(np.arange(32)) if run.ledger else None
    assert layout is not None
    inputs = [min(int(pieces.sum()), 24) for pieces in layout]
    assert sum(inputs) < 32 * 24
    expected = [sum(inputs[:16]), sum(inputs)], [sum(inputs[:16]), sum(inputs[16:])]
    assert all(rank == expected for rank in run_ranks(4, _token_counts, f"{model_flags} {expand('tp2 pp2')}", packed))
    assert _token_counts(model_flags, packed) == expected
    dense_flags = expand("LLAMA")
    assert _token_counts(dense_flags, packed) == expected
    train_step(run)
    assert run.expert_balancer.counts_LE.sum(1).tolist() == [2 * expected[0][0]] * 4


def _weights_after_a_step(argv: str) -> dict[str, np.ndarray]:
    """Return the weights after one step of SGD at rate 1, which subtracts the gradient."""
    run = run_from(argv, dtype=torch.float64)
    train_step(run)
    run.sync.wait_param_sync()
    return _weights([((), owned_shards(run.optimizer, "model/"))])


SGD = "--optimizer sgd --sgd-momentum 0 --lr 1 --weight-decay 0 --clip-grad 0"


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"])
def test_router_loss_gradients_are_independent_of_the_number_of_labels(tmp_path: Path, kind: str) -> None:
    """Three of four tokens end a document, so that with --eod-mask-loss a quarter of the labels counts."""
    rng = np.random.default_rng(3)
    prefix = write_documents(tmp_path / "a", [[93] if i % 4 else [int(rng.integers(0, 93))] for i in range(900)])
    data = f"--data-path {prefix} --split 1,0,0"
    loss = "--moe-z-loss-coeff" if kind == "z_loss" else f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff"
    common = (
        f"{COMMON.replace('--mock-data', '')} {expand('LLAMA')} --num-experts 4 --moe-ffn-hidden-size 24 {SGD} {data}"
    )

    def gradient(mask_flags: str) -> dict[str, np.ndarray]:
        """Return the gradient of the loss, as the difference that it makes to the weights."""
        with_loss, without_loss = (_weights_after_a_step(f"{common} {mask_flags} {loss} {coeff}") for coeff in (0.1, 0))
        return {name: without_loss[name] - with_loss[name] for name in with_loss}

    unmasked, masked = gradient(""), gradient("--eod-mask-loss")
    router = next(values for name, values in unmasked.items() if name.endswith("layers.3.mlp.router"))
    assert np.abs(router).max() > 1e-6
    for name, values in unmasked.items():
        np.testing.assert_allclose(masked[name], values, rtol=0, atol=1e-9 * np.abs(router).max(), err_msg=name)


def _load_train_save(flags: str, steps: int) -> list:
    """Load, train and save on this rank; return the biases before and after, and the losses."""
    config = config_from(f"{COMMON} {flags}")
    run = run_from(config)
    saver = open_saver(run, config)
    if config.checkpoint.load:
        load_initial_state(run, config)

    def biases() -> dict[str, list[float]]:
        return {r.name: r.expert_bias.tolist() for r in run.expert_balancer.routers if r.expert_bias is not None}

    before = biases()
    losses = [train_step(run).loss for _ in range(steps)]
    if saver is not None:
        save(run, saver, dump_config(config))
        saver.close()
    return [before, biases(), losses]


def test_resume_may_change_expert_parallelism(tmp_path: Path) -> None:
    """Biases are state that no gradient trains: a checkpoint has them once under any layout."""
    save_flags = [f"--save {tmp_path / name}" for name in "ab"]
    first = run_ranks(4, _load_train_save, f"{DEEPSEEK} {EP4} {save_flags[0]}", 2)
    assert all(any(bias) for bias in first[0][1].values())
    load_flag = save_flags[0].replace("save", "load")
    ranks = run_ranks(4, _load_train_save, f"{DEEPSEEK} {EP2} {load_flag} {save_flags[1]} --tp 2", 1)
    resumed_alone = _load_train_save(f"{DEEPSEEK} {load_flag}", 1)
    for before, after, losses in ranks:
        assert (
            before == first[0][1] and after == resumed_alone[1] and losses == pytest.approx(resumed_alone[2], rel=1e-5)
        )
    without_biases = DEEPSEEK.replace("--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.003", "")
    with pytest.raises(SetupError, match="moe_router_enable_expert_bias"):
        _load_train_save(f"{without_biases} {load_flag}", 1)


@pytest.mark.parametrize("suffix", ["experts.down", "router.bias"])
def test_checkpoint_without_an_expert_or_bias_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    run_ranks(2, _load_train_save, f"{DEEPSEEK} {EP2} --save {tmp_path}", 1)
    (path,) = tmp_path.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    name = next(name for name in manifest["tensors"] if name.endswith(suffix))
    parts = manifest["tensors"][name]["parts"]
    if len(parts) > 1:
        del parts[0]
    else:
        del manifest["tensors"][name]
    replace_manifest(path.parent, manifest)
    with pytest.raises((CheckpointError, SetupError), match=name.partition("/")[2]):
        _load_train_save(f"{DEEPSEEK} --load {tmp_path}", 1)


def _update(flags: str) -> tuple[list, list]:
    """Train one step on this rank; return the weights that it owns before and after."""
    run = run_from(f"{COMMON} {flags}", dtype=torch.float64)
    before = owned_shards(run.optimizer, "model/")
    train_step(run)
    run.sync.wait_param_sync()
    return before, owned_shards(run.optimizer, "model/")


def _matrices(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what other programs store separately: gate, up and down of each expert with their biases; keys; values."""
    lead = name.endswith((".kv", ".kv_bias", ".gate_up", ".gate_up_bias")) + (".experts." in name)
    return list(tensor.flatten(0, lead - 1)) if lead else [tensor]


def _lamb(w: torch.Tensor, g: torch.Tensor, decay: float) -> torch.Tensor:
    """Apply the first step of arXiv:1904.00962, algorithm 2, to one tensor: the moments are g and its square."""
    u = g / (g.abs() + 1e-3) + decay * w
    return w - 0.01 * u * (w.norm() / u.norm() if w.norm() > 0 and u.norm() > 0 else 1)


def _lars(w: torch.Tensor, g: torch.Tensor, decay: float) -> torch.Tensor:
    """Apply the first step of arXiv:1708.03888, algorithm 1, to one tensor."""
    v = g + decay * w
    return w - 0.01 * v * (0.1 * w.norm() / (g.norm() + decay * w.norm()) if w.norm() > 0 and g.norm() > 0 else 1)


def _muon(w: torch.Tensor, g: torch.Tensor, decay: float) -> torch.Tensor:
    """Apply the first step of K. Jordan, Muon (2024), to one matrix, by its singular values."""
    left, s, right = torch.linalg.svd(g, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return w * (1 - 0.01 * decay) - 0.01 * max(w.shape) ** 0.5 * left @ torch.diag(s) @ right


@cache
def _gradients(model: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the initial value and the gradient of every weight: SGD with a rate of 1 subtracts the gradient."""
    flags = "--optimizer sgd --sgd-momentum 0 --lr 1 --weight-decay 0 --clip-grad 0 --make-vocab-size-divisible-by 1"
    before, after = map(assemble, _update(f"{model} {flags}"))
    return {name: (initial, initial - after[name]) for name, initial in before.items()}


@pytest.mark.parametrize(
    ("model", "rule", "layout"),
    [("OSS", _lamb, layout) for layout in ("", "ep2 etp2 tp2", "ep4 ZERO3 TINY", "ZERO3 SETS OUTER")]
    + [("QWEN_MOE", _lars, layout) for layout in ("", "ep2 ZERO2 tp2")]
    + [("QWEN_MOE", _muon, layout) for layout in ("", "ep2 ZERO2 tp2")],
)
def test_each_expert_matrix_is_updated_separately(model: str, rule: Any, layout: str) -> None:
    run_flags = f"{expand(model)} --clip-grad 0 --make-vocab-size-divisible-by 1 --lars-trust-coefficient 0.1"
    run_flags += f" --adam-eps 1e-3 --muon-coefficient-type simple --optimizer {rule.__name__[1:]}"
    ranks = run_ranks(4, _update, f"{run_flags} {expand(layout)}") if layout else [_update(run_flags)]
    actual = assemble(piece for _, after in ranks for piece in after)
    assert actual.keys() == _gradients(expand(model)).keys()
    for name, (initial, gradient) in _gradients(expand(model)).items():
        decay = 0.0 if any(word in name for word in ("bias", "norm", "sink")) else 0.1
        parts = [_matrices(name, x) for x in (initial, gradient, actual[name])]
        if rule is _muon and (decay == 0 or parts[0][0].dim() != 2 or name.endswith((".word", "/head"))):
            continue  # AdamW's
        for i, (w, g, updated) in enumerate(zip(*parts, strict=True)):
            error = float((updated - rule(w, g, decay)).abs().max() / w.abs().max().clamp_min(1))
            assert error <= 1e-10, f"{name} {i}: {error}"
