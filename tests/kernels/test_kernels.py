"""Every kernel against its definition: gradients in fp64, the error in bf16, saved tensors, and dropout masks."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import activation_run, attention_definition, normal, normals, results
from torch import Tensor

from megalite.config.registry import REGISTRIES
from megalite.config.rope_spec import RopeSpec
from megalite.kernels.activation import get_activation
from megalite.kernels.attention import aligned_for_kernel, attention, is_16_byte_aligned
from megalite.kernels.dropout import dropout, dropout_reference, fold_in, keep_mask
from megalite.kernels.norms import norm
from megalite.kernels.rope import apply_rope, rope_tables
from megalite.nn.linear import column_parallel_linear, row_parallel_linear
from megalite.parallel.mesh import Mesh

TP = Mesh.single_process().tp
SIZES = [(3, 8), (5, 7), (1, 1), (2, 129)]


def plain_rope(x: Tensor) -> Tensor:
    cos, sin = rope_tables(x.shape[0], RopeSpec(x.shape[-1], 10000.0), dtype=torch.float64)
    cos, sin = (torch.cat([t, t], -1)[:, None, None].to(x.dtype) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def fused_rope(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return apply_rope(x, *rope_tables(x.shape[0], RopeSpec(x.shape[-1], 10000.0), dtype=wide))


def plain_swiglu(u: Tensor) -> Tensor:
    gate, up = u.chunk(2, -1)
    return F.silu(gate) * up


def plain_clamped_swiglu(u: Tensor) -> Tensor:
    gate, up = u.chunk(2, -1)
    gate = gate.clamp(max=7)
    return gate / (1 + (-1.702 * gate).exp()) * (up.clamp(-7, 7) + 1)


def act_linear(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda u, w: row_parallel_linear(u, w, TP, get_activation(name))


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[list[tuple[int, ...]]]]] = {
    "rms_norm": (
        lambda x, w: norm(x, w, None, 1e-5),
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,
        [[s, s[-1:]] for s in SIZES],
    ),
    "layer_norm": (
        lambda x, w, b: norm(x, w, b, 1e-5),
        lambda x, w, b: (
            (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * w + b
        ),
        [[s, s[-1:], s[-1:]] for s in SIZES if s[-1] > 1],
    ),
    "rope": (fused_rope, plain_rope, [[(5, 2, 3, 8)], [(3, 1, 1, 2)]]),
    "attention": (
        lambda q, k, v: attention(q, k, v, scale=8**-0.5),
        lambda q, k, v: attention_definition(q, k, v, scale=8**-0.5),
        [[(7, 2, 4, 8)] + [(7, 2, g, 8)] * 2 for g in (1, 2, 4)],
    ),
    "swiglu linear": (act_linear("swiglu"), lambda u, w: plain_swiglu(u) @ w.T, [[(3, 2, 10), (4, 5)]]),
    "clamped_swiglu linear": (
        lambda u, w: act_linear("clamped_swiglu")(8 * u, w),
        lambda u, w: plain_clamped_swiglu(8 * u) @ w.T,
        [[(3, 2, 10), (4, 5)]],
    ),
    "geglu linear": (
        act_linear("geglu"),
        lambda u, w: (F.gelu(u.chunk(2, -1)[0], approximate="tanh") * u.chunk(2, -1)[1]) @ w.T,
        [[(3, 2, 10), (4, 5)]],
    ),
    "gelu linear": (act_linear("gelu"), lambda u, w: F.gelu(u, approximate="tanh") @ w.T, [[(3, 2, 5), (4, 5)]]),
    "gelu_erf linear": (
        act_linear("gelu_erf"),
        lambda u, w: (u / 2 * (1 + torch.erf(u / math.sqrt(2)))) @ w.T,
        [[(3, 2, 5), (4, 5)]],
    ),
    "squared_relu linear": (act_linear("squared_relu"), lambda u, w: F.relu(u) ** 2 @ w.T, [[(3, 2, 5), (4, 5)]]),
    "gather_linear": (
        lambda x, a, b: torch.cat(column_parallel_linear(x, [a, b], TP), -1),
        lambda x, a, b: torch.cat([x @ a.T, x @ b.flatten(0, 1).T], -1),
        [[(3, 2, 5), (4, 5), (2, 3, 5)]],
    ),
}
results_of = functools.partial(results, seed=99)
ROWS = [(name, i) for name, case in CASES.items() for i in range(len(case[2]))]


@pytest.mark.parametrize("name,i", ROWS)
def test_kernel_equals_its_definition_in_fp64(name: str, i: int) -> None:
    op, reference, shapes = CASES[name]
    inputs = normals(*shapes[i])()
    torch.testing.assert_close(results_of(op, inputs), results_of(reference, inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name,i", ROWS)
def test_kernel_bf16_error_is_at_most_twice_plain_torch(name: str, i: int) -> None:
    op, reference, shapes = CASES[name]
    inputs = [x.bfloat16() for x in normals(*shapes[i])()]
    exact = results_of(reference, [x.double() for x in inputs])
    actual, plain = results_of(op, inputs), results_of(reference, inputs)
    for key, expected in exact.items():
        assert actual[key].dtype == torch.bfloat16
        floor = 2.0**-8 * expected.abs().max()  # one rounding of the result
        errors = ((x[key].double() - expected).abs().max() for x in (actual, plain))
        assert next(errors) <= 2 * max(next(errors), floor)


def test_dropout_depends_only_on_coordinates() -> None:
    key, p = fold_in(1, 2, 3, 4), 0.25
    x, ids = torch.ones(8, 3, 16, dtype=torch.float64), torch.tensor([5, 70, 2**33])
    full = dropout(x, p, key, ids)
    assert torch.equal(dropout(x[4:], p, key, ids, 4), full[4:])  # another tp rank's positions
    positions = torch.tensor([0, 1, 6, 7])  # the positions of a rank with context parallelism
    assert torch.equal(dropout(x[positions], p, key, ids, positions), full[positions])
    compiled = torch.compile(dropout_reference, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x[positions], None, p, torch.tensor(key), ids, positions), full[positions])
    assert torch.equal(dropout(x[:, 1:2], p, key, ids[1:2]), full[:, 1:2])  # another micro-batch
    assert not torch.equal(dropout(x, p, fold_in(1, 2, 3, 5), ids), full)
    assert set(full.unique().tolist()) == {0.0, 1 / 0.75}


def test_dropout_has_its_probability_and_no_pattern() -> None:
    axes = torch.arange(300).view(-1, 1), torch.arange(400)
    keep = keep_mask(fold_in(7), 0.1, *axes).double()
    assert abs(keep.mean() - 0.9) < 4 * math.sqrt(0.09 / keep.numel())
    assert (keep.mean(0) - 0.9).abs().max() < 6 * math.sqrt(0.09 / 300)
    assert (keep.mean(1) - 0.9).abs().max() < 6 * math.sqrt(0.09 / 400)
    centred = keep - keep.mean()
    for other in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs((centred * other).mean() / 0.09) < 0.02


def test_dropout_backward_uses_the_same_mask_and_saves_nothing() -> None:
    saved: list[Tensor] = []
    x, residual = normal(4, 2, 8).requires_grad_(), normal(4, 2, 8, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = dropout(x, 0.5, fold_in(3), torch.tensor([1, 2]), 0, residual)
    y.sum().backward()
    assert x.grad is not None and residual.grad is not None and not saved
    torch.testing.assert_close(x.grad * x.detach() + residual.detach(), y.detach())
    assert (residual.grad == 1).all()


@pytest.mark.parametrize("name", REGISTRIES["activation"])
def test_activation_backward_equals_autograd(name: str) -> None:
    """Compare backward's gradients and `a` of every file in kernels/activations/ with differences in fp64."""
    activation = get_activation(name)
    u, v, bias = normal(2, 3, 4 * activation.width), normal(2, 3, 4, seed=1), normal(4 * activation.width, seed=2)
    assert activation.forward(u).shape == v.shape
    for biases in [(), (bias,)][: 1 + activation.takes_bias]:
        assert torch.autograd.gradcheck(activation_run(name), [x.requires_grad_() for x in (u, v, *biases)])
    half = [x.detach().bfloat16() for x in (u, v)]
    assert [x.dtype for x in (activation.forward(half[0]), *activation.backward(*half))] == [torch.bfloat16] * 3


def test_unaligned_rows_are_detected() -> None:
    """Unaligned rows make a GPU's fused attention fault or read wrong values."""
    aligned = torch.zeros(4, 2, 3, 16, dtype=torch.bfloat16)
    assert (
        is_16_byte_aligned(aligned)
        and is_16_byte_aligned(aligned.transpose(0, 1))
        and is_16_byte_aligned(aligned[..., 8:])
    )
    assert not is_16_byte_aligned(aligned[..., 1:9]) and not is_16_byte_aligned(aligned.transpose(2, 3))
    assert not is_16_byte_aligned(torch.zeros(4, 2, 3, 19, dtype=torch.bfloat16)[..., :16])


def test_gradient_has_the_strides_of_its_kernel() -> None:
    strides = torch.empty(2, 3, 4, 16).transpose(0, 2).stride()
    other = torch.randn(4, 3, 2, 16)
    converted = aligned_for_kernel(other, strides)
    assert converted.stride() == strides and torch.equal(converted, other)
    assert aligned_for_kernel(converted, strides) is converted and aligned_for_kernel(other) is other
    assert is_16_byte_aligned(aligned_for_kernel(torch.randn(4, 3, 2, 19)[..., :16]))
    single = torch.randn(4, 3, 1, 16)  # the stride of a dimension of size 1 does not matter
    assert aligned_for_kernel(single, (48, 16, 777, 1)) is single
