"""Experts' matmuls and the permutation of rows, against their definitions in fp64, and their cost in a plan.

Their Triton kernels are rows of tests/kernels/cases.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import normal
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megalite.config.options import ModelConfig
from megalite.kernels.activation import get_activation
from megalite.kernels.gated_matmul import down_gradients, up_matmul
from megalite.kernels.grouped_matmul import grouped_matmul, grouped_weight_grad_
from megalite.kernels.permute import expert_of_rows, inverse_permutation, sort_by_expert, unpermute
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.moe import MoELayer
from megalite.nn.parameter import ParamFactory
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import ParamSpec
from megalite.planning.layer_cost import CostRecorder, Matmul, MemoryOp
from megalite.planning.meta_mode import MetaMode

EXACT = dict(rtol=1e-12, atol=1e-12)
small = st.integers(1, 9)
sizes_of_groups = st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=1, max_size=5)


def strided(x_EFD: Tensor, order: list[int]) -> Tensor:
    """Return the same values with dimensions in this order in memory, and gaps between them."""
    storage = torch.full([2 * x_EFD.shape[dim] for dim in order], torch.nan, dtype=x_EFD.dtype)
    view = storage[tuple(slice(None, None, 2) for _ in order)].permute([order.index(dim) for dim in range(3)])
    return view.copy_(x_EFD)


def random_rows(M: int, R: int, seed: int) -> Tensor:
    return torch.randint(R, (M,), generator=torch.Generator().manual_seed(seed))


@given(sizes_of_groups, st.integers(0, 3), small, small, st.booleans(), st.permutations([0, 1, 2]))
def test_grouped_matmul_uses_the_expert_of_each_row(
    sizes: list[int], num_unassigned: int, F: int, D: int, indexed: bool, order: list[int]
) -> None:
    M, E = sum(sizes) + num_unassigned, len(sizes)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    rows = random_rows(M, 4, 1) if indexed else None
    x, w = normal(4 if indexed else M, D), normal(E, F, D, seed=1)
    expert_M = torch.repeat_interleave(torch.arange(E + 1), torch.tensor([*sizes, num_unassigned]))
    weights = torch.cat([w, torch.zeros(1, F, D, dtype=w.dtype)])[expert_M]
    expected = torch.einsum("mfd,md->mf", weights, x if rows is None else x[rows])
    actual = grouped_matmul(x, strided(w, order), offsets.to(torch.int32 if indexed else torch.int64), rows)
    torch.testing.assert_close(actual, expected, **EXACT)


@given(sizes_of_groups, st.integers(0, 3), small, small, *[st.booleans()] * 3, st.permutations([0, 1, 2]))
def test_grouped_weight_grad_adds_or_starts(
    sizes: list[int],
    num_unassigned: int,
    F: int,
    D: int,
    overwrite: bool,
    indexed: bool,
    dy_indexed: bool,
    order: list[int],
) -> None:
    M, E = sum(sizes) + num_unassigned, len(sizes)
    rows, dy_rows = (
        random_rows(M, 4, seed) if is_indexed else None for seed, is_indexed in ((1, indexed), (2, dy_indexed))
    )
    x, dy = normal(4 if indexed else M, D), normal(4 if dy_indexed else M, F, seed=1)
    sums = torch.full((E, F, D), torch.nan, dtype=torch.float64) if overwrite else normal(E, F, D, seed=2)
    expected, first = torch.zeros_like(sums) if overwrite else sums.clone(), 0
    for e, size in enumerate(sizes):
        for m in range(first, first + size):
            expected[e] += torch.outer(dy[m if dy_rows is None else dy_rows[m]], x[m if rows is None else rows[m]])
        first += size
    actual, offsets = strided(sums, order), torch.tensor([0, *sizes]).cumsum(0)
    grouped_weight_grad_(actual, dy, x, offsets, rows, dy_rows=dy_rows, overwrite=overwrite)
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_grouped_weight_grads_are_fp32(dtype: torch.dtype) -> None:
    """Add 2^-12 to 1, which half precision would lose."""
    ones, sums = torch.ones(2, 1, dtype=dtype), torch.full((2, 1, 1), torch.nan)
    offsets = torch.tensor([0, 1, 2])
    grouped_weight_grad_(sums, ones, ones, offsets, overwrite=True)
    grouped_weight_grad_(sums, ones, ones * 2.0**-12, offsets, overwrite=False)
    assert sums.flatten().tolist() == [1 + 2.0**-12] * 2


def outputs_with_nan_row() -> list[Tensor]:
    """Return the output and weight gradients of two experts; the first has only row 0, which is NaN."""
    x, w, sums = normal(71, 3).float(), normal(2, 4, 3).float(), torch.zeros(2, 4, 3)
    x[0] = torch.nan
    offsets = torch.tensor([0, 1, 71], dtype=torch.int32)
    y = grouped_matmul(x, w, offsets)
    grouped_weight_grad_(sums, y, x, offsets, overwrite=True)
    return [y, sums]


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_nan_row_stays_with_its_expert(kind: str, interpreter: Callable[..., Any]) -> None:
    y, sums = interpreter(outputs_with_nan_row) if kind == "triton" else outputs_with_nan_row()
    assert y[0].isnan().all() and sums[0].isnan().all() and not y[1:].isnan().any() and not sums[1].isnan().any()


choices = st.integers(1, 4).flatmap(
    lambda K: st.lists(st.lists(st.integers(-1, 3), min_size=K, max_size=K), max_size=9)
)


@given(choices, st.booleans())
def test_permute_round_trips(ids: list[list[int]], is_cut: bool) -> None:
    """Only experts 0 to 2 count, and -1 and 3 are dropped; the order may be cut off after the assigned rows."""
    E, N, K = 3, len(ids), len(ids[0]) if ids else 2
    order, offsets = sort_by_expert(torch.tensor(ids, dtype=torch.int64).view(N, K), E)
    flat = [e for row in ids for e in row]
    rows_of_expert = [[m for m, e in enumerate(flat) if e == expert] for expert in range(E)]
    assert offsets.tolist() == [sum(map(len, rows_of_expert[:e])) for e in range(E + 1)]
    assert order[: offsets[-1]].tolist() == sum(rows_of_expert, []) and sorted(order.tolist()) == list(range(N * K))
    order = order[: offsets[-1]] if is_cut else order
    slots = inverse_permutation(order, offsets, N, K)
    y = normal(len(order), 5)
    expected = torch.zeros(N, 5, dtype=torch.float64)
    for m, row in enumerate(order[: offsets[-1]].tolist()):
        assert slots[row // K, row % K] == m
        expected[row // K] += y[m]
    assert int((slots < 0).sum()) == N * K - int(offsets[-1])
    torch.testing.assert_close(unpermute(y, slots), expected, **EXACT)


def test_unpermute_rounds_once() -> None:
    """Add 1 to 256 eight times; with a rounding to bf16 after each addition, the sum would stay 256."""
    y = torch.tensor([[256.0]] + [[1.0]] * 8, dtype=torch.bfloat16)
    assert unpermute(y, torch.arange(9).view(1, 9)).item() == 264


def test_plan_counts_one_matmul_without_a_gpu() -> None:
    """Count on the meta device, where any read is an error."""
    E, N, K, F, D = 4, 32, 2, 16, 8
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(E, F, D, dtype=torch.bfloat16, device="meta"))
    model.w.spec = ParamSpec("layers.0.mlp.experts.up", (E, F, D))  # type: ignore[union-attr]
    with torch.no_grad(), CostRecorder() as recorder:
        w, grad = recorder.exclude_params(model).w, model.w.main_grad.grad  # type: ignore[union-attr]
        ids, x = torch.empty(N, K, dtype=torch.int64, device="meta"), torch.empty(N, D, dtype=w.dtype, device="meta")
        recorder.phase = "F"
        order, offsets = sort_by_expert(ids, E)
        rows = order // K
        y = grouped_matmul(x, w, offsets, rows)
        dx = grouped_matmul(y, w.transpose(1, 2), offsets)
        grouped_weight_grad_(grad, y, x, offsets, rows, overwrite=False)
        assert unpermute(dx, inverse_permutation(order, offsets, N, K)).shape == (N, D)
    M = N * K
    expected = [("up", (M, F, D, False)), ("up", (M, D, F, False)), ("up", (E * F, D, M / E, True))]
    matmuls = [event for event in recorder.trace if isinstance(event, Matmul)]
    assert [(e.weight, (e.rows, e.columns, e.depth, e.is_weight_grad)) for e in matmuls] == expected
    assert [(e.groups, e.itemsize) for e in matmuls] == [(E, 2), (E, 2), (1, 2)]
    num_bytes = {event.name: event.num_bytes for event in recorder.trace if isinstance(event, MemoryOp)}
    assert num_bytes["permute_combine"] == 2 * (M * D + N * D) + 8 * N * K
    assert not any(name.startswith("grouped_matmul") for name in num_bytes)
    with torch.no_grad(), MetaMode("cpu"):  # a dry run on a CPU
        y = grouped_matmul(x, w, offsets, rows)
        grouped_weight_grad_(grad, y, x, offsets, rows, overwrite=True)
        assert y.shape == (M, F) and unpermute(y, inverse_permutation(order, offsets, N, K)).shape == (N, F)


@pytest.mark.parametrize("fused,forward,backward", [(True, 2, 10), (False, 18, 56)])
def test_swiglu_epilogue_moves_the_minimum_of_bytes(fused: bool, forward: int, backward: int) -> None:
    """Count bytes per element of a in bf16 in addition to plain matmuls, which write u forward and da backward.

    The bytes of a token's probability are negligible with 4096 columns.
    """
    E, N, K, F, D = 4, 32, 2, 4096, 8
    activation = get_activation("swiglu") if fused else replace(get_activation("swiglu"), swiglu_constants=None)
    with torch.no_grad(), CostRecorder() as recorder:
        x, w, down = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((N, D), (E, 2 * F, D), (E, D, F)))
        order, offsets = sort_by_expert(torch.empty(N, K, dtype=torch.int64, device="meta"), E)
        assignments = offsets, order // K
        p = torch.empty(N * K, device="meta")
        for recorder.phase, expected in (("F", forward), ("B", backward)):
            if recorder.phase == "F":
                u, a = up_matmul(x, w, *assignments, p, activation)
            else:
                recomputed_a, du, dp = down_gradients(x, down, *assignments, u, p, activation)
            events = [event for event in recorder.trace if event.phase == recorder.phase]
            num_bytes = sum(event.num_bytes for event in events if isinstance(event, MemoryOp))
            num_bytes += sum(event.epilogue_bytes for event in events if isinstance(event, Matmul))
            assert num_bytes / a.numel() == pytest.approx(expected, abs=0.05)
    assert (u.shape, du.shape, recomputed_a.shape, dp.shape) == ((N * K, 2 * F), u.shape, a.shape, p.shape)
    matmuls = [event for event in recorder.trace if isinstance(event, Matmul)]
    assert [(e.rows, e.columns, e.depth) for e in matmuls] == [(64, 2 * F, D), (64, F, D)]


def moe_block_results(activation: str, biases: bool) -> list[Tensor]:
    """Return the output of an MoE block and all its gradients, in fp32."""
    model = ModelConfig(
        *(1, 24), activation=activation, num_experts=5, moe_router_topk=2, moe_ffn_hidden_size=20, init_method_std=0.5,
        add_bias_linear=biases,
    )  # fmt: skip
    experts = MoELayer(ParamFactory(Mesh.single_process(), torch.float32, seed=3), "e", model, 0, False)
    for bias in experts.biases:
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(bias.numel()))
    x = normal(6, 2, 24).float().requires_grad_()
    y = experts(x, Batch(torch.zeros(0), None, None, torch.arange(2)), ForwardContext(loss_grad=1.0))
    y.backward(normal(6, 2, 24, seed=1).float())
    return [y.detach(), *(t.grad for t in (x, *experts.parameters()))]  # type: ignore[misc]


@pytest.mark.parametrize("activation,biases", [("swiglu", False), ("clamped_swiglu", True), ("gelu", True)])
def test_triton_moe_block_equals_torch(activation: str, biases: bool, interpreter: Callable[..., Any]) -> None:
    for actual, expected in zip(
        interpreter(moe_block_results, activation, biases), moe_block_results(activation, biases), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


ASSIGNMENTS = torch.tensor([0, 30, 30, 70]), random_rows(70, 70, 3)


def operands(dtype: torch.dtype) -> list[Tensor]:
    """Return x (or dy) and the weights of up and down of 3 experts."""
    return [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(((70, 24), (3, 74, 24), (3, 24, 37)))]


def with_probabilities(dtype: torch.dtype, p_dtype: torch.dtype) -> list[Tensor]:
    """Return u and a of up, and a, du and dp of down, for rows in `dtype` and probabilities in `p_dtype`."""
    (x, w, down), p, swiglu = operands(dtype), normal(70, seed=4).sigmoid().to(p_dtype), get_activation("swiglu")
    u, a = up_matmul(x, w, *ASSIGNMENTS, p, swiglu)
    return [u, a, *down_gradients(x, down, *ASSIGNMENTS, u, p, swiglu)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p_dtype", [torch.float32, torch.float64], ids=str)
def test_probability_gradients_are_as_exact_as_sums(
    dtype: torch.dtype, p_dtype: torch.dtype, interpreter: Callable[..., Any]
) -> None:
    """Probabilities are in fp32 or fp64, as from a router.

    Their gradient is a sum in fp32, without a rounding to half precision between the stored u and the sum.
    """
    actual, expected = interpreter(with_probabilities, dtype, p_dtype), with_probabilities(torch.float64, p_dtype)
    for tensor, exact in zip(actual[:4], expected[:4], strict=True):
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor.double(), exact, rtol=0.03, atol=0.03 * exact.abs().max().item())
    (dy, _, down), (offsets, rows) = operands(dtype), ASSIGNMENTS
    da = torch.einsum("md,mdf->mf", dy[rows].double(), down[expert_of_rows(offsets, 70)].double())
    gate, up = actual[0].double().chunk(2, -1)
    dp = (da * torch.nn.functional.silu(gate) * up).sum(-1).float()
    torch.testing.assert_close(actual[4], dp, rtol=1e-5, atol=1e-5 * dp.abs().max().item())
