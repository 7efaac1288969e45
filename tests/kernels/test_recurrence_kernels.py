"""The Triton kernels of recurrences: precision, isolation of documents, groups and spans of chunks, and their cost.

test_triton.py compares them with the definition for random inputs, documents and memory.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from cases import normal
from torch import Tensor

from megalite.kernels import delta_rule_triton, recurrence_inputs
from megalite.kernels.delta_rule import (
    Recurrence,
    RecurrenceInputs,
    apply_map,
    delta_rule,
    delta_rule_reference,
    map_columns,
    recurrence_map,
    recurrence_state_grad,
)
from megalite.kernels.dispatch import runs_triton
from megalite.planning.layer_cost import CostRecorder, Matmul

Call = Callable[..., Any]
KINDS = ("gdn", "kda", "mamba2")
MAX_ERROR = 1e-5  # of any result, relative to its largest element


def inputs_of(kind: str, S: int, B: int = 1, H: int = 1, K: int = 5, V: int = 4) -> RecurrenceInputs:
    """Return inputs in fp64, with decays of exp(-1) to 1."""
    q, k, v = (normal(S, B, H, n, seed=i) for i, n in enumerate((K, K, V)))
    log_decay = -normal(S, B, H, *([K] if kind == "kda" else []), seed=3).sigmoid()
    beta = None if kind == "mamba2" else normal(S, B, H, seed=4).sigmoid()
    return RecurrenceInputs(q, k, v, log_decay, beta)


def cast(inputs: RecurrenceInputs, dtype: torch.dtype, device: str = "cpu") -> RecurrenceInputs:
    return RecurrenceInputs(*(None if x is None else x.to(device, dtype) for x in inputs))  # type: ignore[arg-type]


def results_of(
    function: Call, inputs: RecurrenceInputs, recurrence: Recurrence, has_state: bool = True
) -> list[Tensor]:
    """Return the output, the last state, and the gradients of all inputs and of the initial state."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs if x is not None]
    state = None
    if has_state:
        state = normal(*inputs.state_shape, seed=5).to(inputs.v.device, inputs.v.dtype).requires_grad_()
    all_inputs = RecurrenceInputs(*leaves, *([None] if inputs.beta is None else []))
    outputs = function(all_inputs, recurrence, state)
    grads = [normal(*x.shape, seed=6 + i).to(x.device, x.dtype) for i, x in enumerate(outputs)]
    differentiated = leaves if state is None else [*leaves, state]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, differentiated, grads)]


def max_error(inputs: RecurrenceInputs, recurrence: Recurrence, device: str = "cpu") -> float:
    """Return the largest error of the kernels in fp32, relative to the largest element of each result."""
    assert runs_triton(device), "the dispatcher does not select Triton here"
    actual = results_of(delta_rule, cast(inputs, torch.float32, device), recurrence)
    rounded = cast(cast(inputs, torch.float32), torch.float64)
    expected = results_of(delta_rule_reference, rounded, recurrence)
    pairs = zip(actual, expected, strict=True)
    return max(float((a.cpu().double() - e).abs().max() / e.abs().max().clamp_min(1e-300)) for a, e in pairs)


def hard_inputs(kind: str, case: str) -> RecurrenceInputs:
    """Return inputs of more than a chunk with equal keys, with strong decays, or with nearly none after strong ones."""
    inputs = inputs_of(kind, 70 if kind == "gdn" else 18)
    if case == "equal keys":  # entries of the powers of L are binomials, up to 1e18
        assert inputs.beta is not None
        equal = inputs.k[:1].expand_as(inputs.k).contiguous()
        return inputs._replace(k=equal, log_decay=inputs.log_decay * 1e-6, beta=1 - 1e-3 * inputs.beta)
    if case == "strong decays":
        return inputs._replace(log_decay=inputs.log_decay * 80)
    log_decay = torch.full_like(inputs.log_decay, -60.0)
    log_decay[len(log_decay) // 2 :] = -1e-4
    return inputs._replace(log_decay=log_decay)


def error_of_hard_inputs(kind: str, case: str, device: str = "cpu") -> float:
    return max_error(hard_inputs(kind, case), Recurrence(0.4, normalize_qk=True), device)


HARD = [(kind, case) for kind in ("gdn", "kda") for case in ("equal keys", "strong decays", "weak after strong decays")]


@pytest.mark.parametrize("kind,case", HARD)
def test_hard_inputs_keep_fp32_precision(interpreter: Call, kind: str, case: str) -> None:
    assert interpreter(error_of_hard_inputs, kind, case) < MAX_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("kind,case", HARD)
def test_hard_inputs_keep_fp32_precision_on_a_gpu(kind: str, case: str) -> None:
    assert error_of_hard_inputs(kind, case, "cuda") < MAX_ERROR


def changed_by_another_document(kind: str, device: str = "cpu") -> tuple[bool, bool]:
    """Return whether numbers of a document change a bit of others' results, and whether they change its own."""
    assert runs_triton(device)
    lengths = (9, 70, 11) if kind == "gdn" else (5, 20, 7)
    numbers = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None].to(device)
    recurrence = Recurrence(0.4, kind != "mamba2", numbers)
    inputs = cast(inputs_of(kind, sum(lengths)), torch.float32, device)
    other = slice(lengths[0], lengths[0] + lengths[1])
    changed = RecurrenceInputs(*(None if x is None else x.clone() for x in inputs))  # type: ignore[arg-type]
    for x, factor in zip(changed, (7.0, -3.0, 100.0, 40.0, 0.3), strict=True):
        if x is not None:
            x[other] *= factor
    before, after = (results_of(delta_rule, x, recurrence, has_state=False) for x in (inputs, changed))
    is_leaking = not torch.equal(before.pop(1), after.pop(1))
    is_changed = True
    for a, b in zip(before, after, strict=True):
        is_changed &= not torch.equal(a[other], b[other])
        is_leaking |= not torch.equal(a[: other.start], b[: other.start])
        is_leaking |= not torch.equal(a[other.stop :], b[other.stop :])
    return is_leaking, is_changed


@pytest.mark.parametrize("kind", KINDS)
def test_another_document_changes_no_bit(interpreter: Call, kind: str) -> None:
    assert interpreter(changed_by_another_document, kind) == (False, True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_another_document_changes_no_bit_on_a_gpu(kind: str) -> None:
    assert changed_by_another_document(kind, "cuda") == (False, True)


def error_over_spans(kind: str) -> tuple[float, int]:
    """Return the largest error over spans of two groups, of one or two chunks, and the launches of the scan."""
    group_size = 64 if kind == "gdn" else 32
    inputs = inputs_of(kind, 5 * group_size - 3, K=2, V=2)
    documents = (torch.arange(len(inputs.v)) // 41)[None]
    with (
        mock.patch.object(recurrence_inputs, "GROUP_CHUNKS", {"cpu": group_size // 32}),
        mock.patch.object(delta_rule_triton, "SPAN_TOKENS", 2 * group_size),
        mock.patch.object(delta_rule_triton, "_scan", side_effect=delta_rule_triton._scan) as scan,
    ):
        return max_error(inputs, Recurrence(documents_BS=documents, normalize_qk=True)), scan.call_count


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_groups_and_spans_continue_each_other(interpreter: Call, kind: str) -> None:
    error, scans = interpreter(error_over_spans, kind)
    assert error < MAX_ERROR and scans == 2 * 3


def errors_of_state_maps(kind: str) -> list[float]:
    """Return the errors of the state after the tokens by their map, and of the gradient of the state before them."""
    inputs = inputs_of(kind, 67 if kind == "gdn" else 18)
    inputs = cast(inputs, torch.float32)
    recurrence = Recurrence(normalize_qk=kind != "mamba2")
    state = normal(*inputs.state_shape, seed=5).requires_grad_()
    o, last = delta_rule_reference(cast(inputs, torch.float64), recurrence, state)
    do = normal(*o.shape, seed=6)
    columns = map_columns(inputs)
    A, U = recurrence_map(inputs, recurrence).split([columns, inputs.v.shape[3]], -1)
    actual = [apply_map(A, U, state.detach().float()), recurrence_state_grad(inputs, recurrence, do.float())]
    expected = [last.detach(), *torch.autograd.grad(o, state, do)]
    return [float((a - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_states_equal_the_definition(interpreter: Call, kind: str) -> None:
    assert max(interpreter(errors_of_state_maps, kind)) < MAX_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_are_deterministic(kind: str, dtype: torch.dtype) -> None:
    """At the sizes of Qwen3-Next, Kimi-Linear and Mamba-2, over several spans."""
    inputs = inputs_of(kind, 5000, 2, 8, 128, 64 if kind == "mamba2" else 128)
    inputs = cast(inputs, dtype, "cuda")
    recurrence = Recurrence(0.1, normalize_qk=kind != "mamba2")
    first, *others = (results_of(delta_rule, inputs, recurrence) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K,V", [(64, 64), (128, 128), (96, 256), (128, 64)])
def test_kernels_equal_the_torch_form_at_usual_sizes(kind: str, K: int, V: int) -> None:
    """Compare fp32 on a GPU with the torch form in fp64, for lengths that are no multiple of a chunk."""
    inputs = inputs_of(kind, 1067, 2, 4, K, V)
    documents = torch.stack([torch.arange(1067) // 190, torch.arange(1067) // 333]).cuda()
    recurrence = Recurrence(0.1, kind != "mamba2", documents)
    actual = results_of(delta_rule, cast(inputs, torch.float32, "cuda"), recurrence)
    exact = cast(cast(inputs, torch.float32), torch.float64, "cuda")
    expected = results_of(delta_rule, exact, recurrence)
    for a, e in zip(actual, expected, strict=True):
        assert float((a.double() - e).abs().max() / e.abs().max()) < MAX_ERROR


@pytest.mark.parametrize("kind", KINDS)
def test_planned_flops_are_those_of_the_formula(kind: str) -> None:
    """Count the products of forward on the meta device, without the inverse and the elementwise scores of KDA."""
    S, B, H, K, V = 4096, 2, 4, 128, 64
    C = 16 if kind == "kda" else 64
    shapes = [(S, B, H, K), (S, B, H, K), (S, B, H, V), (S, B, H, K) if kind == "kda" else (S, B, H), (S, B, H)]
    q, k, v, log_decay, beta = (torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes)
    inputs = RecurrenceInputs(q, k, v, log_decay, None if kind == "mamba2" else beta)
    with CostRecorder() as recorder:
        recorder.phase = "F"
        delta_rule(inputs, Recurrence())
    per_token = 2 * K * V + C * V  # states and outputs
    if kind != "mamba2":
        per_token += K * V + C * (K + V)  # what is subtracted from the values, u and w
    if kind != "kda":
        per_token += C * K * (1 if kind == "mamba2" else 2)  # q k^T, and k k^T
    flops = sum(event.flops for event in recorder.trace if isinstance(event, Matmul))
    assert flops == 2 * S * B * H * per_token
