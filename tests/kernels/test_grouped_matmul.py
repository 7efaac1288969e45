"""Experts' matmuls and the way of rows to them and back, against their definitions in fp64; what a plan counts of them.
Their Triton kernels are rows of tests/kernels/cases.py."""

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
from megalite.nn.micro_batch import Batch
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
    """The same values with dimensions in memory in this order, and gaps between."""
    there = torch.full([2 * x_EFD.shape[dim] for dim in order], torch.nan, dtype=x_EFD.dtype)
    view = there[tuple(slice(None, None, 2) for _ in order)].permute([order.index(dim) for dim in range(3)])
    return view.copy_(x_EFD)


def picked(M: int, R: int, seed: int) -> Tensor:
    return torch.randint(R, (M,), generator=torch.Generator().manual_seed(seed))


@given(sizes_of_groups, st.integers(0, 3), small, small, st.booleans(), st.permutations([0, 1, 2]))
def test_grouped_matmul_uses_the_expert_of_each_row(
    sizes: list[int], none: int, F: int, D: int, indexed: bool, order: list[int]
) -> None:
    M, E = sum(sizes) + none, len(sizes)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    rows = picked(M, 4, 1) if indexed else None
    x, w = normal(4 if indexed else M, D), normal(E, F, D, seed=1)
    expert_M = torch.repeat_interleave(torch.arange(E + 1), torch.tensor([*sizes, none]))
    weights = torch.cat([w, torch.zeros(1, F, D, dtype=w.dtype)])[expert_M]
    want = torch.einsum("mfd,md->mf", weights, x if rows is None else x[rows])
    got = grouped_matmul(x, strided(w, order), offsets.to(torch.int32 if indexed else torch.int64), rows)
    torch.testing.assert_close(got, want, **EXACT)


@given(sizes_of_groups, st.integers(0, 3), small, small, *[st.booleans()] * 3, st.permutations([0, 1, 2]))
def test_grouped_weight_grad_adds_or_starts(
    sizes: list[int], none: int, F: int, D: int, begin: bool, indexed: bool, dy_indexed: bool, order: list[int]
) -> None:
    M, E = sum(sizes) + none, len(sizes)
    rows, dy_rows = (picked(M, 4, seed) if some else None for seed, some in ((1, indexed), (2, dy_indexed)))
    x, dy = normal(4 if indexed else M, D), normal(4 if dy_indexed else M, F, seed=1)
    sums = torch.full((E, F, D), torch.nan, dtype=torch.float64) if begin else normal(E, F, D, seed=2)
    want, first = torch.zeros_like(sums) if begin else sums.clone(), 0
    for e, size in enumerate(sizes):
        for m in range(first, first + size):
            want[e] += torch.outer(dy[m if dy_rows is None else dy_rows[m]], x[m if rows is None else rows[m]])
        first += size
    got, offsets = strided(sums, order), torch.tensor([0, *sizes]).cumsum(0)
    grouped_weight_grad_(got, dy, x, offsets, rows, dy_rows=dy_rows, overwrite=begin)
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_grouped_weight_grads_are_fp32(dtype: torch.dtype) -> None:
    """1 and then 2^-12, which half precision would lose."""
    ones, sums = torch.ones(2, 1, dtype=dtype), torch.full((2, 1, 1), torch.nan)
    offsets = torch.tensor([0, 1, 2])
    grouped_weight_grad_(sums, ones, ones, offsets, overwrite=True)
    grouped_weight_grad_(sums, ones, ones * 2.0**-12, offsets, overwrite=False)
    assert sums.flatten().tolist() == [1 + 2.0**-12] * 2


def with_one_that_is_lost() -> list[Tensor]:
    """Of two experts, of which the first has row 0 alone."""
    x, w, sums = normal(71, 3).float(), normal(2, 4, 3).float(), torch.zeros(2, 4, 3)
    x[0] = torch.nan
    offsets = torch.tensor([0, 1, 71], dtype=torch.int32)
    y = grouped_matmul(x, w, offsets)
    grouped_weight_grad_(sums, y, x, offsets, overwrite=True)
    return [y, sums]


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_nan_row_stays_with_its_expert(kind: str, interpreter: Callable[..., Any]) -> None:
    y, sums = interpreter(with_one_that_is_lost) if kind == "triton" else with_one_that_is_lost()
    assert y[0].isnan().all() and sums[0].isnan().all() and not y[1:].isnan().any() and not sums[1].isnan().any()


choices = st.integers(1, 4).flatmap(
    lambda K: st.lists(st.lists(st.integers(-1, 3), min_size=K, max_size=K), max_size=9)
)


@given(choices, st.booleans())
def test_permute_round_trips(ids: list[list[int]], cut: bool) -> None:
    """Experts 0 to 2; -1 and 3 are left out. With the order `cut` there, and as it is."""
    E, N, K = 3, len(ids), len(ids[0]) if ids else 2
    order, offsets = sort_by_expert(torch.tensor(ids, dtype=torch.int64).view(N, K), E)
    flat = [e for row in ids for e in row]
    wanted = [[m for m, e in enumerate(flat) if e == expert] for expert in range(E)]
    assert offsets.tolist() == [sum(map(len, wanted[:e])) for e in range(E + 1)]
    assert order[: offsets[-1]].tolist() == sum(wanted, []) and sorted(order.tolist()) == list(range(N * K))
    order = order[: offsets[-1]] if cut else order
    slots = inverse_permutation(order, offsets, N, K)
    y = normal(len(order), 5)
    want = torch.zeros(N, 5, dtype=torch.float64)
    for m, at in enumerate(order[: offsets[-1]].tolist()):
        assert slots[at // K, at % K] == m
        want[at // K] += y[m]
    assert int((slots < 0).sum()) == N * K - int(offsets[-1])
    torch.testing.assert_close(unpermute(y, slots), want, **EXACT)


def test_unpermute_rounds_once() -> None:
    """256 and eight times 1: in bf16 one by one it would stay 256."""
    y = torch.tensor([[256.0]] + [[1.0]] * 8, dtype=torch.bfloat16)
    assert unpermute(y, torch.arange(9).view(1, 9)).item() == 264


def test_plan_counts_one_matmul_without_a_gpu() -> None:
    """On the meta device, where each read would be an error."""
    E, N, K, F, D = 4, 32, 2, 16, 8
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(E, F, D, dtype=torch.bfloat16, device="meta"))
    model.w.spec = ParamSpec("layers.0.mlp.experts.up", (E, F, D))  # type: ignore[union-attr]
    with torch.no_grad(), CostRecorder() as seen:
        w, grad = seen.exclude_params(model).w, model.w.main_grad.grad  # type: ignore[union-attr]
        ids, x = torch.empty(N, K, dtype=torch.int64, device="meta"), torch.empty(N, D, dtype=w.dtype, device="meta")
        seen.phase = "F"
        order, offsets = sort_by_expert(ids, E)
        rows = order // K
        y = grouped_matmul(x, w, offsets, rows)
        dx = grouped_matmul(y, w.transpose(1, 2), offsets)
        grouped_weight_grad_(grad, y, x, offsets, rows, overwrite=False)
        assert unpermute(dx, inverse_permutation(order, offsets, N, K)).shape == (N, D)
    M = N * K
    wanted = [("up", (M, F, D, False)), ("up", (M, D, F, False)), ("up", (E * F, D, M / E, True))]
    found = [event for event in seen.trace if isinstance(event, Matmul)]
    assert [(e.weight, (e.rows, e.columns, e.depth, e.is_weight_grad)) for e in found] == wanted
    assert [(e.groups, e.itemsize) for e in found] == [(E, 2), (E, 2), (1, 2)]
    moved = {event.name: event.num_bytes for event in seen.trace if isinstance(event, MemoryOp)}
    assert moved["permute_combine"] == 2 * (M * D + N * D) + 8 * N * K
    assert not any(name.startswith("grouped_matmul") for name in moved)
    with torch.no_grad(), MetaMode("cpu"):  # a rehearsal on a CPU
        y = grouped_matmul(x, w, offsets, rows)
        grouped_weight_grad_(grad, y, x, offsets, rows, overwrite=True)
        assert y.shape == (M, F) and unpermute(y, inverse_permutation(order, offsets, N, K)).shape == (N, F)


@pytest.mark.parametrize("fused,forward,backward", [(True, 2, 10), (False, 18, 56)])
def test_swiglu_epilogue_moves_the_minimum_of_bytes(fused: bool, forward: int, backward: int) -> None:
    """Bytes per element of a in bf16 that kernels and operations move beside plain matmuls, which write u forward and da
    backward. What a token's probability takes is left out: there are 4096 columns."""
    E, N, K, F, D = 4, 32, 2, 4096, 8
    activation = get_activation("swiglu") if fused else replace(get_activation("swiglu"), swiglu_constants=None)
    with torch.no_grad(), CostRecorder() as seen:
        x, w, down = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((N, D), (E, 2 * F, D), (E, D, F)))
        order, offsets = sort_by_expert(torch.empty(N, K, dtype=torch.int64, device="meta"), E)
        where = offsets, order // K
        p = torch.empty(N * K, device="meta")
        for seen.phase, wanted in (("F", forward), ("B", backward)):
            if seen.phase == "F":
                u, a = up_matmul(x, w, *where, p, activation)
            else:
                again, du, dp = down_gradients(x, down, *where, u, p, activation)
            events = [event for event in seen.trace if event.phase == seen.phase]
            moved = sum(event.num_bytes for event in events if isinstance(event, MemoryOp))
            moved += sum(event.epilogue_bytes for event in events if isinstance(event, Matmul))
            assert moved / a.numel() == pytest.approx(wanted, abs=0.05)
    assert (u.shape, du.shape, again.shape, dp.shape) == ((N * K, 2 * F), u.shape, a.shape, p.shape)
    matmuls = [event for event in seen.trace if isinstance(event, Matmul)]
    assert [(e.rows, e.columns, e.depth) for e in matmuls] == [(64, 2 * F, D), (64, F, D)]


def of_a_block(activation: str, biases: bool) -> list[Tensor]:
    """A block's output and all its gradients, in fp32."""
    model = ModelConfig(
        *(1, 24), activation=activation, num_experts=5, moe_router_topk=2, moe_ffn_hidden_size=20, init_method_std=0.5,
        add_bias_linear=biases,
    )  # fmt: skip
    experts = MoELayer(ParamFactory(Mesh.single_process(), torch.float32, seed=3), "e", model, 0, False)
    for bias in experts.biases:
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(bias.numel()))
    x = normal(6, 2, 24).float().requires_grad_()
    y = experts(x, Batch(torch.zeros(0), None, None, torch.arange(2), 0, loss_grad=1.0))
    y.backward(normal(6, 2, 24, seed=1).float())
    return [y.detach(), *(t.grad for t in (x, *experts.parameters()))]  # type: ignore[misc]


@pytest.mark.parametrize("activation,biases", [("swiglu", False), ("clamped_swiglu", True), ("gelu", True)])
def test_triton_moe_block_equals_torch(activation: str, biases: bool, interpreter: Callable[..., Any]) -> None:
    for got, want in zip(interpreter(of_a_block, activation, biases), of_a_block(activation, biases), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


CHOICES = torch.tensor([0, 30, 30, 70]), picked(70, 70, 3)


def operands(dtype: torch.dtype) -> list[Tensor]:
    """x, or dy, and the weights of up and down of 3 experts."""
    return [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(((70, 24), (3, 74, 24), (3, 24, 37)))]


def with_probabilities(dtype: torch.dtype, of: torch.dtype) -> list[Tensor]:
    """u and a, and a, du and dp of down, of rows in `dtype` with probabilities in `of`."""
    (x, w, down), p, swiglu = operands(dtype), normal(70, seed=4).sigmoid().to(of), get_activation("swiglu")
    u, a = up_matmul(x, w, *CHOICES, p, swiglu)
    return [u, a, *down_gradients(x, down, *CHOICES, u, p, swiglu)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.float64], ids=str)
def test_probability_gradients_are_as_exact_as_sums(
    dtype: torch.dtype, of: torch.dtype, interpreter: Callable[..., Any]
) -> None:
    """As routers give them, in fp32 or fp64. Their gradient is a sum in fp32, without a rounding to half precision
    between u, as it is kept, and the sum."""
    got, want = interpreter(with_probabilities, dtype, of), with_probabilities(torch.float64, of)
    for one, other in zip(got[:4], want[:4], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.03, atol=0.03 * other.abs().max().item())
    (dy, _, down), (offsets, rows) = operands(dtype), CHOICES
    da = torch.einsum("md,mdf->mf", dy[rows].double(), down[expert_of_rows(offsets, 70)].double())
    gate, up = got[0].double().chunk(2, -1)
    dp = (da * torch.nn.functional.silu(gate) * up).sum(-1).float()
    torch.testing.assert_close(got[4], dp, rtol=1e-5, atol=1e-5 * dp.abs().max().item())
