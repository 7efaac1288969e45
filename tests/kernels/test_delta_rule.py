"""Linear recurrences, short convolutions and the gated norm: each against its definition, token by token, in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.kernels.delta_rule import (
    L2_NORM_EPS,
    Recurrence,
    RecurrenceInputs,
    apply_map,
    delta_rule,
    delta_rule_reference,
    map_columns,
    recurrence_map,
    recurrence_state_grad,
)
from megalite.kernels.gated_norm import gated_norm
from megalite.kernels.short_conv import short_conv, short_conv_reference

KINDS = ("gated_delta_net", "kda", "mamba2")
B, H, K, V = 2, 4, 5, 6


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _inputs(kind: str, length: int, decay: float = 1.0, dtype: torch.dtype = torch.float64) -> RecurrenceInputs:
    """Return random inputs, with decays of exp(-decay) to 1."""
    is_kda = kind == "kda"
    q, k = _random(2, length, B, H if is_kda else H // 2, K, seed=1, dtype=dtype)
    v = _random(length, B, H, V, seed=2, dtype=dtype)
    log_decay = -decay * _random(length, B, H, *([K] if is_kda else []), seed=3).sigmoid().to(dtype)
    beta = None if kind == "mamba2" else _random(length, B, H, seed=4).sigmoid().to(dtype)
    return RecurrenceInputs(q, k, v, log_decay, beta)


def _documents(lengths: list[int]) -> Tensor:
    """Return the first position of each token's document, [B, S]; the second sample has the documents in reverse."""
    rows = []
    for row in (lengths, lengths[::-1]):
        starts = torch.tensor([0, *row[:-1]]).cumsum(0)
        rows.append(starts.repeat_interleave(torch.tensor(row)))
    return torch.stack(rows)


def _run(function: Any, inputs: RecurrenceInputs, recurrence: Recurrence, has_state: bool = True) -> list[Tensor]:
    """Return the output, the last state, and the gradients of all inputs and of the initial state."""
    leaves = [x.clone().requires_grad_() for x in inputs if x is not None]
    state = _random(B, H, K, V, seed=5).to(inputs.v.dtype).requires_grad_() if has_state else None
    all_inputs = RecurrenceInputs(*leaves, *([None] if inputs.beta is None else []))
    o, last = function(all_inputs, recurrence, state)
    do, dlast = _random(*o.shape, seed=6).to(o.dtype), _random(*last.shape, seed=7).to(last.dtype)
    differentiated = leaves if state is None else [*leaves, state]
    grads = torch.autograd.grad([o, last], differentiated, [do, dlast])
    return [o.detach(), last.detach(), *grads]


def _max_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error of any result, relative to its largest element."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.abs().max().clamp_min(1e-300)) for a, b in pairs)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    chunk_size=st.integers(1, 40),
    has_documents=st.booleans(),
    continues=st.booleans(),
    normalize_qk=st.booleans(),
)
def test_chunks_equal_the_definition(
    kind: str, lengths: list[int], chunk_size: int, has_documents: bool, continues: bool, normalize_qk: bool
) -> None:
    """Also if the initial state is of another document than the first token."""
    documents_BS = _documents(lengths) if has_documents else None
    previous_B = None if continues or documents_BS is None else torch.tensor([-1, 0])
    recurrence = Recurrence(0.3, normalize_qk, documents_BS, previous_B, chunk_size)
    inputs = _inputs(kind, sum(lengths))
    expected = _run(delta_rule_reference, inputs, recurrence)
    assert _max_error(_run(delta_rule, inputs, recurrence), expected) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[2], [1, 2, 7, 13, 1, 1, 40, 31, 54], [3, 90, 3], [1] * 9, [700, 129]])
def test_default_chunks_equal_the_definition(kind: str, lengths: list[int]) -> None:
    """More than one group of chunks, whose states backward starts from, is in the last case."""
    recurrence = Recurrence(documents_BS=_documents(lengths), normalize_qk=True)
    inputs = _inputs(kind, sum(lengths))
    expected = _run(delta_rule_reference, inputs, recurrence)
    assert _max_error(_run(delta_rule, inputs, recurrence), expected) < 1e-12


@pytest.mark.parametrize("length", [5, 513, 520, 576])  # a last group of less than a chunk, and none
@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
def test_maps_of_states_equal_the_definition(kind: str, length: int) -> None:
    inputs, recurrence = _inputs(kind, length, decay=0.01), Recurrence(normalize_qk=kind != "mamba2")
    state = _random(B, H, K, V, seed=5).requires_grad_()
    o, last = delta_rule_reference(inputs, recurrence, state)
    do = _random(*o.shape, seed=6)
    columns = map_columns(inputs)
    A, U = recurrence_map(inputs, recurrence).split([columns, V], dim=-1)
    (dstate,) = torch.autograd.grad(o, state, do)
    actual = [apply_map(A, U, state.detach()), recurrence_state_grad(inputs, recurrence, do)]
    assert _max_error(actual, [last.detach(), dstate]) < 1e-12


def test_an_initial_state_of_zeros_is_the_default() -> None:
    inputs, recurrence = _inputs("gated_delta_net", 20), Recurrence(chunk_size=8)
    without = _run(delta_rule, inputs, recurrence, has_state=False)
    expected = _run(delta_rule_reference, inputs, recurrence, has_state=False)
    assert _max_error(without, expected) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_another_document_changes_no_bit(kind: str) -> None:
    """Change all numbers of the second document; results of the others keep their bits, in fp32."""
    lengths = [21, 50, 19, 44]
    recurrence = Recurrence(documents_BS=_documents(lengths).expand(B, -1)[:1].expand(B, -1), normalize_qk=True)
    inputs = _inputs(kind, sum(lengths), dtype=torch.float32)
    other = slice(21, 71)
    changed = RecurrenceInputs(*(None if x is None else x.clone() for x in inputs))  # type: ignore[arg-type]
    for x, factor in zip(changed, (7.0, -3.0, 100.0, 40.0, 0.3), strict=True):
        if x is not None:
            x[other] *= factor
    before, after = (_run(delta_rule, x, recurrence, has_state=False) for x in (inputs, changed))
    assert torch.equal(before.pop(1), after.pop(1))
    for a, b in zip(before, after, strict=True):
        assert not torch.equal(a[other], b[other])
        assert torch.equal(a[:21], b[:21]) and torch.equal(a[71:], b[71:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [1e-4, 0.1, 3.0, 60.0])
def test_fp32_is_accurate_at_every_decay(kind: str, decay: float) -> None:
    """Long documents and a packed tail; the gradient of the decay is the one that peers lose (FlashQLA#28)."""
    lengths = [300, 1, 2, 40, 3, 150, 1, 1]
    recurrence = Recurrence(K**-0.5, documents_BS=_documents(lengths), normalize_qk=True)
    inputs = _inputs(kind, sum(lengths), decay, dtype=torch.float32)
    exact = RecurrenceInputs(*(None if x is None else x.double() for x in inputs))  # type: ignore[arg-type]
    expected = _run(delta_rule_reference, exact, recurrence)
    errors = [_max_error([a], [b]) for a, b in zip(_run(delta_rule, inputs, recurrence), expected, strict=True)]
    assert max(errors) < 2e-6, errors


def test_decays_of_single_tokens_keep_their_precision_in_a_chunk_of_strong_ones() -> None:
    """Token 40 has a decay of 0.9999 after 40 decays of exp(-60); a running sum over the chunk would round it off."""
    inputs = _inputs("gated_delta_net", 60, dtype=torch.float32)
    log_decay = torch.full_like(inputs.log_decay, -60.0)
    log_decay[40:] = -1e-4
    inputs = inputs._replace(log_decay=log_decay)
    exact = RecurrenceInputs(*(x.double() for x in inputs))  # type: ignore[union-attr]
    recurrence = Recurrence(normalize_qk=True)
    actual, expected = _run(delta_rule, inputs, recurrence), _run(delta_rule_reference, exact, recurrence)
    dlog_decay, expected_dlog_decay = actual[5][40:], expected[5][40:]
    assert _max_error([dlog_decay], [expected_dlog_decay]) < 2e-6


def test_half_precision_is_computed_in_fp32() -> None:
    inputs = _inputs("gated_delta_net", 70, dtype=torch.bfloat16)
    inputs = inputs._replace(log_decay=inputs.log_decay.float(), beta=None if inputs.beta is None else inputs.beta)
    o, last = delta_rule(inputs, Recurrence())
    exact = RecurrenceInputs(*(x.double() for x in inputs))  # type: ignore[union-attr]
    expected, expected_last = delta_rule_reference(exact, Recurrence())
    assert o.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert _max_error([o], [expected]) < 2**-8 and _max_error([last], [expected_last]) < 1e-5


def _saved_bytes(length: int, **options: Any) -> int:
    """Return the bytes that the recurrence saves for backward besides its inputs."""
    inputs = _inputs("gated_delta_net", length, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs if x is not None]
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if all(x is not leaf for leaf in leaves):
            saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        delta_rule(RecurrenceInputs(*leaves), Recurrence(**options))
    return sum(x.nbytes for x in saved.values())


def test_only_states_of_groups_are_saved() -> None:
    """One state for 512 tokens, or 16 chunks."""
    assert _saved_bytes(512) == 4 * B * H * K * V
    assert _saved_bytes(1025) == 3 * 4 * B * H * K * V
    assert _saved_bytes(65, chunk_size=4) == 2 * 4 * B * H * K * V


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    width=st.integers(1, 5),
    has_documents=st.booleans(),
    has_earlier=st.booleans(),
    has_bias=st.booleans(),
)
def test_short_conv_equals_the_definition(
    lengths: list[int], width: int, has_documents: bool, has_earlier: bool, has_bias: bool
) -> None:
    """Documents also end among the tokens before the first one."""
    C, S = 3, sum(lengths)
    documents_BS = _documents(lengths) if has_documents else None
    x_SBC, weight_CW = (_random(*shape, seed=8).requires_grad_() for shape in ((S, B, C), (C, width)))
    differentiated, earlier_TBC, bias_C = [x_SBC, weight_CW], None, None
    if has_bias:
        bias_C = _random(C, seed=17).requires_grad_()
        differentiated.append(bias_C)
    if has_earlier:
        earlier_TBC = _random(width - 1, B, C, seed=9).requires_grad_()
        if width > 1:
            differentiated.append(earlier_TBC)
        if documents_BS is not None:
            before = torch.stack([torch.zeros(width - 1), torch.arange(width - 1) - width]).long()
            documents_BS = torch.cat([before, documents_BS], 1)
    actual, expected = (
        function(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C) for function in (short_conv, short_conv_reference)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    dy = _random(*actual.shape, seed=10)
    options: Any = dict(allow_unused=True, materialize_grads=True)
    grads = [torch.autograd.grad(y, differentiated, dy, **options) for y in (actual, expected)]
    for grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_short_conv_of_another_document_changes_no_bit() -> None:
    documents_BS = _documents([5, 6, 5])
    x_SBC, weight_CW = _random(16, B, 3, seed=11).float(), _random(3, 4, seed=12).float()
    changed = x_SBC.clone()
    changed[5:11] *= 1e3
    before, after = (short_conv(x, weight_CW, documents_BS) for x in (x_SBC, changed))
    assert torch.equal(before[:5], after[:5]) and torch.equal(before[11:], after[11:])


@pytest.mark.parametrize("sigmoid_gate", [False, True])
@pytest.mark.parametrize("gate_first,weight_shape", [(False, (V,)), (True, (V,)), (True, (H, V))])
def test_gated_norm_equals_the_definition(gate_first: bool, weight_shape: tuple[int, ...], sigmoid_gate: bool) -> None:
    o, z = (_random(7, B, H, V, seed=seed).requires_grad_() for seed in (13, 14))
    weight = _random(*weight_shape, seed=15).requires_grad_()
    gate = torch.sigmoid(z) if sigmoid_gate else z * torch.sigmoid(z)
    expected = F.rms_norm(o * gate, (V,), None, 1e-5) if gate_first else F.rms_norm(o, (V,), None, 1e-5) * gate
    expected = expected * weight
    actual = gated_norm(o, z, weight, 1e-5, gate_first=gate_first, sigmoid_gate=sigmoid_gate)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    dy = _random(*o.shape, seed=16)
    for grad, expected_grad in zip(
        *(torch.autograd.grad(y, [o, z, weight], dy) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_recurrence_equals_that_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    assert L2_NORM_EPS == 1e-6
    inputs = _inputs("gated_delta_net", 33, dtype=torch.float32)
    q, k, v, log_decay, beta = (x.transpose(0, 1) for x in inputs)  # type: ignore[union-attr]
    expected, last = torch_recurrent_gated_delta_rule(
        q, k, v, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    o, state = delta_rule(inputs, Recurrence(K**-0.5, normalize_qk=True))
    assert _max_error([o.transpose(0, 1), state], [expected, last]) < 1e-6
