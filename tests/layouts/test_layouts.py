"""The specification of parallelism: one table of layouts, and every one trains exactly as one process does.

The tests compare the loss and the gradient norm of each step and, at the end, every weight, gathered from the pieces
that the ranks own. The bound is a relative 1e-10 in float64, where no mistake can hide behind rounding, and in fp32 1e-5
for pp and dp and 1e-4 for tp. bf16 stays within BF16 of its own one-process twin.
"""

import functools
import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from full_tensors import assemble, owned_shards
from layout_cases import (
    BF16_TOLERANCE,
    COMMON,
    COVERING_LATENT_ROWS,
    COVERING_RECURRENT_ROWS,
    COVERING_ROWS,
    CP_ROWS,
    FP64_TOLERANCE,
    GPT,
    LATENT_ROWS,
    LLAMA,
    PARAMETERS,
    PRESUBMIT_CP_ROWS,
    RECURRENT_ROWS,
    ROWS,
    TABLES,
    ZERO3,
    ZLOSS,
    Row,
    expand,
    read_rows,
    row_name,
)
from pairwise import nightly_except
from ranks import run_ranks
from train_cases import DOCUMENT_FLAGS, run_from

from megalite.kernels.dispatch import runs_triton
from megalite.training.train_step import train_step

STEPS = 3
DTYPES = ("float64", None)


@dataclass
class Trained:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, np.ndarray]


def _parts(flags: str, dtype: str | None) -> tuple[list[float], list[float], list[tuple]]:
    """Train on this rank; return the losses, the gradient norms and the pieces of the weights that it owns."""
    run = run_from(f"{COMMON} {flags}", dtype=None if dtype is None else getattr(torch, dtype))
    results = [train_step(run) for _ in range(STEPS)]
    run.sync.wait_param_sync()
    run.close()
    return [r.loss for r in results], [r.grad_norm for r in results], owned_shards(run.optimizer, "model/")


def _assemble(parts: list[tuple]) -> Trained:
    weights = assemble(piece for _, _, pieces in parts for piece in pieces)
    return Trained(parts[0][0], parts[0][1], {name: values.numpy() for name, values in weights.items()})


def _both(flags: str) -> list[tuple]:
    return [_parts(flags, dtype) for dtype in DTYPES]


def _in_triton(flags: str) -> list[tuple]:
    """Train with interpreted Triton kernels, on a rank in a process of its own that has not chosen its kernels yet."""
    os.environ.update(TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    assert runs_triton("cpu")
    return _both(flags)


@functools.cache
def train_ranks(world: int, flags: str) -> dict[str | None, list[tuple]]:
    """Return the results of every rank, in fp64 and in fp32, from one start of the ranks."""
    ranks = run_ranks(world, _both, flags) if world > 1 else [_both(flags)]
    return {dtype: [rank[i] for rank in ranks] for i, dtype in enumerate(DTYPES)}


@functools.cache
def train_alone(flags: str, dtype: str | None) -> Trained:
    return _assemble([_parts(flags, dtype)])


def _twin(item: Row) -> str:
    """Return the flags of the one-process run: the model and what changes the batch or the update, not the layout."""
    layout_argv, twin_argv = item.layout.split(), []
    for flag in ("--global-batch-size", "--optimizer"):
        if flag in layout_argv:
            twin_argv += [flag, layout_argv[layout_argv.index(flag) + 1]]
    return f"{item.model} {' '.join(twin_argv)}"


def _relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def _compare(item: Row, dtype: str | None, bound: float, weights_bound: float) -> None:
    run_flags = f"{item.model} {item.layout}"
    parts = (
        train_ranks(item.world, run_flags)[dtype]
        if "bf16" not in run_flags
        else run_ranks(item.world, _parts, run_flags, dtype)
    )
    _assert_equals_twin(item, parts, dtype, bound, weights_bound)


def _assert_equals_twin(item: Row, parts: list[tuple], dtype: str | None, bound: float, weights_bound: float) -> None:
    """Assert that the results of the ranks of a layout equal the one-process twin."""
    actual, expected = _assemble(parts), train_alone(_twin(item), dtype)
    for losses, norms, _ in parts:
        assert (losses, norms) == (actual.losses, actual.grad_norms), "ranks disagree"
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=bound, err_msg=f"{item.name}: loss")
    np.testing.assert_allclose(actual.grad_norms, expected.grad_norms, rtol=bound, err_msg=f"{item.name}: grad norm")
    assert actual.weights.keys() == expected.weights.keys()
    worst = max(expected.weights, key=lambda n: _relative_error(actual.weights[n], expected.weights[n]))
    assert _relative_error(actual.weights[worst], expected.weights[worst]) <= weights_bound, (
        f"{item.name}: {worst} differs most"
    )
    assert expected.losses[0] != expected.losses[-1]


@pytest.mark.parametrize("item", nightly_except(ROWS, COVERING_ROWS, row_name))
def test_layout_equals_one_process_in_fp64(item: Row) -> None:
    _compare(item, "float64", FP64_TOLERANCE, 1e-9)


@pytest.mark.parametrize("item", nightly_except(ROWS, COVERING_ROWS, row_name))
def test_layout_equals_one_process_in_fp32(item: Row) -> None:
    _compare(item, None, 1e-4 if item.has_tp else 1e-5, 1e-4)


@pytest.mark.parametrize("item", read_rows("bf16"), ids=row_name)
def test_bf16_layout_stays_close_to_one_process(item: Row) -> None:
    _compare(item, None, BF16_TOLERANCE, 0.1)


def test_bf16_moments_round_equally_under_every_layout() -> None:
    """This runs in fp64 only, because stochastic rounding magnifies the rounding of fp32."""
    model = LLAMA + " --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    _compare(Row(8, model, expand("tp2 pp2"), "llama bf16 moments"), "float64", FP64_TOLERANCE, 1e-9)
    assert train_alone(model + " ", "float64").losses[-1] != train_alone(LLAMA + " ", "float64").losses[-1]


@pytest.mark.parametrize("item", read_rows("offloaded"), ids=row_name)
def test_optimizer_offload_changes_no_bit(item: Row) -> None:
    run_flags = f"{item.model} {item.layout} --ddp-bucket-size 500"
    placements = [
        placement
        for placement in map(expand, TABLES["places"].values())
        if PARAMETERS not in placement or ZERO3 in run_flags
    ]
    resident, *offloaded = (
        _bits(run_ranks(item.world, _parts, f"{run_flags} {offload_flags}", None))
        for offload_flags in ("", *placements)
    )
    assert offloaded == [resident] * len(placements)


def _bits(ranks: list[tuple]) -> list[tuple[str, list[bytes]]]:
    """Return the results as bits, in which NaN is equal to itself."""
    return [(f"{losses} {norms}", [data.numpy().tobytes() for *_, data in pieces]) for losses, norms, pieces in ranks]


def test_split_backward_with_a_scaled_loss() -> None:
    """This runs in fp64 only, because fp16 weights differ by their rounding."""
    item = Row(2, GPT, expand("SPLIT --fp16 --initial-loss-scale 1024 pp2"), "gpt split pp2, scaled loss")
    _compare(item, "float64", FP64_TOLERANCE, 1e-9)


FULL_TENSOR = [
    replace(item, name=f"{name} {item.name}", model=f"{item.model} {rule}")
    for name, rule in TABLES["rules"].items()
    for item in read_rows("whole")
]


OFTEN_FULL_TENSOR = {  # matrices that ranks cut, that some ranks have copies of, and that no rank holds
    "muon tp2 dp2, a matrix cut by both",
    "muon tp4 groups 2 replicated",
    "muon ZeRO-3 hybrid 2x2 once more",
    "lamb ZeRO-3 tp2 dp2",
    "lars pp2 dp2, no layer but the embedding's",
}


@pytest.mark.parametrize(
    "item",
    nightly_except(
        FULL_TENSOR, [row for row in FULL_TENSOR if row.name in OFTEN_FULL_TENSOR], row_name, guards=("megalite/optim",)
    ),
)
def test_full_tensor_optimizers_equal_one_process(item: Row) -> None:
    """This runs in fp64 only, because Newton-Schulz magnifies the rounding of small singular values."""
    ranks = run_ranks(item.world, _parts, f"{item.model} {item.layout}", "float64")
    _assert_equals_twin(item, ranks, "float64", FP64_TOLERANCE, 1e-9)


@pytest.mark.parametrize(
    "item", nightly_except(CP_ROWS, PRESUBMIT_CP_ROWS, row_name, guards=("megalite/nn", "megalite/kernels"))
)
def test_context_parallel_equals_one_process(item: Row) -> None:
    ranks = run_ranks(item.world, _parts, f"{item.model} {item.layout}", "float64")
    _assert_equals_twin(item, ranks, "float64", FP64_TOLERANCE, 1e-9)


@pytest.mark.parametrize(
    "item", nightly_except(LATENT_ROWS, COVERING_LATENT_ROWS, row_name, guards=("megalite/nn/latent_attention.py",))
)
def test_latent_attention_equals_one_process(item: Row) -> None:
    """The key that all heads share has the gradient of all heads where these are split (rows with tp).

    In NVIDIA/Megatron-LM#6839 and NVIDIA/TransformerEngine#1975 it lacked that of the heads of other ranks.
    """
    ranks = run_ranks(item.world, _parts, f"{item.model} {item.layout}", "float64")
    _assert_equals_twin(item, ranks, "float64", FP64_TOLERANCE, 1e-9)


@pytest.mark.parametrize(
    "item",
    nightly_except(
        RECURRENT_ROWS,
        COVERING_RECURRENT_ROWS,
        row_name,
        guards=(
            "megalite/nn/gated_delta_net.py",
            "megalite/nn/kimi_delta_attention.py",
            "megalite/nn/mamba2.py",
            "megalite/nn/recurrent_mixer.py",
            "megalite/nn/recurrent_context_parallel.py",
        ),
    ),
)
def test_recurrent_layers_equal_one_process(item: Row) -> None:
    """The norm's weight has the gradient of all heads where these are split (rows with tp).

    In NVIDIA/Megatron-LM#7452 its copies drifted apart.
    """
    ranks = run_ranks(item.world, _parts, f"{item.model} {item.layout}", "float64")
    _assert_equals_twin(item, ranks, "float64", FP64_TOLERANCE, 1e-9)


INTERPRETED, MOVED = read_rows("interpreted"), read_rows("moved")


@pytest.mark.parametrize(
    "item",
    nightly_except(
        INTERPRETED, INTERPRETED[2:3], row_name, guards=("megalite/kernels", "megalite/nn/context_parallel.py")
    ),
)
def test_triton_kernels_train_like_torch(item: Row) -> None:
    ranks = run_ranks(item.world, _in_triton, f"{item.model} {item.layout}", timeout=110)
    for i, dtype in enumerate(DTYPES):
        bounds = (1e-10, 1e-9) if dtype == "float64" else (1e-4, 1e-4)
        _assert_equals_twin(item, [rank[i] for rank in ranks], dtype, *bounds)


@pytest.mark.parametrize(
    "item", nightly_except(MOVED, MOVED[:4], row_name, guards=("megalite/nn/activation_offload.py",))
)
def test_activation_offload_changes_no_bit(item: Row) -> None:
    run_flags, offload_flags = (
        f"{item.model} {item.layout}",
        "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1",
    )
    resident, offloaded = (
        _bits(run_ranks(item.world, _parts, f"{run_flags} {extra_flags}", None)) for extra_flags in ("", offload_flags)
    )
    assert offloaded == resident


def test_document_boundaries_change_the_result() -> None:
    """The rows with documents prove nothing unless the data has document boundaries."""
    assert train_alone(GPT + DOCUMENT_FLAGS + " ", "float64").losses[0] != train_alone(GPT + " ", "float64").losses[0]
    single_flag_losses = [
        train_alone(GPT + f" --{flag} ", "float64").losses[0] for flag in DOCUMENT_FLAGS.replace("--", "").split()
    ]
    assert len({*single_flag_losses, train_alone(GPT + " ", "float64").losses[0]}) == 4


def test_z_loss_changes_weights_but_not_the_reported_loss() -> None:
    with_z_loss, without_z_loss = train_alone(f"{LLAMA} {ZLOSS}", "float64"), train_alone(LLAMA + " ", "float64")
    assert with_z_loss.losses[0] == without_z_loss.losses[0] and with_z_loss.losses[1] != without_z_loss.losses[1]
