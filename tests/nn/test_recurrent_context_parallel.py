"""Recurrences over samples that are sharded over context-parallel ranks: each equals the definition on one process.

Ranks are threads, so that any number of them takes milliseconds. Layouts of complete runs are rows of
tests/layouts/layouts.toml.
"""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import run_threads
from torch import Tensor
from train_cases import stage_from

from megalite.kernels.attention import Documents
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs, delta_rule, delta_rule_reference
from megalite.nn import map_composition
from megalite.nn.map_composition import count_exchange, states_before
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.recurrent_context_parallel import context_parallel_delta_rule
from megalite.nn.sequence_sharding import SequenceSharding, shard_sequence
from megalite.parallel.mesh import Axis

KINDS = ("gated_delta_net", "kda", "mamba2")
B, H, K, V = 2, 4, 5, 6


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _inputs(kind: str, length: int, decay: float = 0.1) -> RecurrenceInputs:
    """Return random inputs, with decays of exp(-decay) to 1; heads share keys, except in Kimi delta attention."""
    is_kda = kind == "kda"
    q, k = _random(2, length, B, H if is_kda else H // 2, K, seed=1)
    log_decay = -decay * _random(length, B, H, *([K] if is_kda else []), seed=3).sigmoid()
    beta = None if kind == "mamba2" else _random(length, B, H, seed=4).sigmoid()
    return RecurrenceInputs(q, k, _random(length, B, H, V, seed=2), log_decay, beta)


def _documents(lengths: list[int]) -> Tensor:
    """Return the first position of each token's document, [B, T]; the second sample has the documents in reverse."""
    rows = []
    for row in (lengths, lengths[::-1]):
        starts = torch.tensor([0, *row[:-1]]).cumsum(0)
        rows.append(starts.repeat_interleave(torch.tensor(row)))
    return torch.stack(rows)


def _with_grads(function: Any, inputs: RecurrenceInputs, do: Tensor) -> list[Tensor]:
    """Return the output of a function of inputs, and their gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs if x is not None]
    o = function(RecurrenceInputs(*leaves, *([None] if inputs.beta is None else [])))
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def _max_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error of any result, relative to its largest element."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))


def _sharded(
    sharding: SequenceSharding,
    inputs: RecurrenceInputs,
    recurrence: Recurrence,
    documents_BT: Tensor | None,
    do: Tensor,
) -> list[Tensor]:
    """Return the output and the gradients of all ranks, in order of positions."""
    positions = [torch.from_numpy(sharding.positions(rank)) for rank in range(len(sharding.seq_chunks_by_rank))]

    def run(cp: Axis) -> list[Tensor]:
        own = positions[cp.rank]
        local = RecurrenceInputs(*(None if x is None else x[own] for x in inputs))  # type: ignore[arg-type]
        return _with_grads(
            lambda x: context_parallel_delta_rule(x, recurrence, documents_BT, cp, sharding), local, do[own]
        )

    order = torch.cat(positions).argsort()
    return [torch.cat(parts)[order] for parts in zip(*run_threads(len(positions), run), strict=True)]


def _assert_equals_definition(
    kind: str, sharding: SequenceSharding, lengths: list[int] | None, chunk_size: int | None = None
) -> None:
    inputs = _inputs(kind, sharding.seq_chunk_size * len(sharding.first_visible))
    do = _random(*inputs.v.shape, seed=5)
    documents_BT = None if lengths is None else _documents(lengths)
    recurrence = Recurrence(K**-0.5, kind != "mamba2", chunk_size=chunk_size)
    actual = _sharded(sharding, inputs, recurrence, documents_BT, do)
    definition = Recurrence(K**-0.5, kind != "mamba2", documents_BT)
    expected = _with_grads(lambda x: delta_rule_reference(x, definition)[0], inputs, do)
    assert _max_error(actual, expected) < 1e-12


def _random_sharding(cp: int, chunks_per_rank: int, chunk_size: int, seed: int) -> SequenceSharding:
    """Return a sharding whose chunks are on any rank."""
    chunks = random.Random(seed).sample(range(cp * chunks_per_rank), cp * chunks_per_rank)
    by_rank = tuple(tuple(sorted(chunks[rank::cp])) for rank in range(cp))
    return SequenceSharding(by_rank, chunk_size, (0,) * len(chunks))


@settings(max_examples=30, deadline=None)
@given(
    num_ranks=st.integers(1, 9),
    per_rank=st.integers(1, 4),
    is_diagonal=st.booleans(),
    method=st.sampled_from(["_gather", "_scan"]),
    seed=st.integers(0, 1000),
)
def test_states_of_any_order_of_ranges_equal_a_loop_over_them(
    num_ranks: int, per_rank: int, is_diagonal: bool, method: str, seed: int
) -> None:
    """Also with one rank that has fewer ranges than the others."""
    ranks = [*range(num_ranks)] * per_rank
    random.Random(seed).shuffle(ranks)
    if per_rank > 1:
        ranks.remove(0)
    columns = 1 if is_diagonal else K
    A, U = _random(len(ranks), 2, H, K, columns, seed=seed), _random(len(ranks), 2, H, K, V, seed=seed + 1)
    A = A / K  # contracts, like the products of a recurrence
    expected, state = [], torch.zeros_like(U[0])
    for a, u in zip(A, U, strict=True):
        expected.append(state)
        state = (a * state if is_diagonal else a @ state) + u

    def run(cp: Axis) -> dict[int, Tensor]:
        own = [torch.cat([A[i], U[i]], -1) for i, rank in enumerate(ranks) if rank == cp.rank]
        return getattr(map_composition, method)(own, columns, ranks, cp)

    results = run_threads(num_ranks, run)
    for number, rank in enumerate(ranks):
        if number:
            torch.testing.assert_close(results[rank].pop(number), expected[number], rtol=1e-12, atol=1e-12)
    assert not any(results)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    num_ranks=st.integers(1, 8),
    chunks_per_rank=st.sampled_from([1, 2, 3]),
    borders=st.none() | st.sets(st.integers(1, 95), max_size=9),
    seed=st.integers(0, 1000),
)
def test_recurrence_over_any_sharding_equals_the_definition(
    kind: str, num_ranks: int, chunks_per_rank: int, borders: set[int] | None, seed: int
) -> None:
    """Documents end anywhere, and chunks of the sequence are on any rank."""
    sharding = _random_sharding(num_ranks, chunks_per_rank, 4, seed)
    length = 4 * num_ranks * chunks_per_rank
    lengths = None
    if borders is not None:
        ends = [0, *sorted(border for border in borders if border < length), length]
        lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    _assert_equals_definition(kind, sharding, lengths, chunk_size=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("windows", [[None], []], ids=["zigzag", "in order"])
@pytest.mark.parametrize("lengths", [None, [32] * 2, [16] * 4, [1] * 64, [33, 31], [15, 1, 32, 16]], ids=str)
def test_documents_that_end_at_the_edges_of_ranks(kind: str, windows: list[None], lengths: list[int] | None) -> None:
    """Documents over all ranks, of a rank's range each, of one token, and that end one token beside an edge."""
    sharding = shard_sequence(64, 4, windows)
    assert sharding.range_ranks() == (_zigzag(4) if windows else _in_order(4))
    _assert_equals_definition(kind, sharding, lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [513, 544, 575])
def test_ranges_beyond_a_group_of_chunks_equal_one_process(kind: str, chunk_size: int) -> None:
    """After a group of 512 tokens follow one token, half a chunk, and all but one token of a chunk."""
    sharding = SequenceSharding(((0, 3), (1, 2)), chunk_size, (0,) * 4)
    inputs = _inputs(kind, 4 * chunk_size, decay=0.01)
    do = _random(*inputs.v.shape, seed=5)
    documents_BT = _documents([chunk_size, 700, 1, 3 * chunk_size - 701])
    recurrence = Recurrence(K**-0.5, kind != "mamba2")
    actual = _sharded(sharding, inputs, recurrence, documents_BT, do)
    full = replace(recurrence, documents_BS=documents_BT)
    assert _max_error(actual, _with_grads(lambda x: delta_rule(x, full)[0], inputs, do)) < 1e-12


def _received(ranks: list[int], columns: int) -> list[int]:
    """Return the channels that each rank receives, from the collectives that ran."""
    U = _random(1, 1, K, V, seed=0)
    maps = torch.cat([_random(1, 1, K, columns, seed=1), U], -1)

    def run(cp: Axis) -> int:
        received = 0
        start = cp.custom_backend.start_all_to_all, cp.custom_backend.start_all_gather  # type: ignore[union-attr]

        def count_all_to_all(out: Tensor, *args: Any) -> Any:
            nonlocal received
            received += out.numel()
            return start[0](out, *args)

        def count_all_gather(out: Tensor, x: Tensor) -> Any:
            nonlocal received
            received += out.numel() - x.numel()
            return start[1](out, x)

        cp.custom_backend.start_all_to_all = count_all_to_all  # type: ignore[union-attr, method-assign]
        cp.custom_backend.start_all_gather = count_all_gather  # type: ignore[union-attr, method-assign]
        states_before([maps] * ranks.count(cp.rank), columns, ranks, cp)
        return received // K

    return run_threads(max(ranks) + 1, run)


def _in_order(cp: int) -> list[int]:
    return [*range(cp)]


def _zigzag(cp: int) -> list[int]:
    """Return the ranks of ranges in zigzag order; the last rank has neighboring chunks, which are one range."""
    return [*range(cp), *reversed(range(cp - 1))]


@pytest.mark.parametrize(
    "ranks,num_collectives,maps",
    [
        (_in_order(2), 1, 0.5),
        (_in_order(3), 1, 2),  # a gather
        (_in_order(4), 2, 1.5),
        (_in_order(8), 3, 2.5),
        (_in_order(16), 4, 3.5),
        (_zigzag(2), 1, 2),  # a gather
        (_zigzag(3), 1, 4),  # a gather
        (_zigzag(4), 3, 3),
        (_zigzag(8), 4, 6),
        (_zigzag(16), 5, 8),
    ],
    ids=str,
)
def test_received_maps_equal_the_counts(ranks: list[int], num_collectives: int, maps: float) -> None:
    """The numbers are in maps with K = V; those of other sizes are compared with the collectives that run."""
    assert count_exchange(tuple(ranks), V, V)[1:] == (maps * 2 * V, num_collectives)
    assert count_exchange(tuple(ranks), V, V).is_scan == (max(ranks) not in (1, 2) or len(ranks) == 2)
    for columns in (1, K):
        assert max(_received(ranks, columns)) == count_exchange(tuple(ranks), columns, V).received


T = 48
LINE = f"""--num-layers 1 --hidden-size 24 --num-attention-heads 4 --seq-length {T} --micro-batch-size {B} --train-iters 1
 --lr 1 --mock-data --vocab-size 64 --init-method-std 0.3 --hidden-dropout 0 --attention-dropout 0
 --normalization RMSNorm --norm-epsilon 1e-2 --position-embedding-type rope"""
DELTA = "--linear-key-head-dim 3 --linear-value-head-dim 5 --linear-num-value-heads"
MIXERS = {
    "two key heads of four ranks": (4, f"--hybrid-layer-pattern G {DELTA} 8 --linear-num-key-heads 2"),
    "key heads for each rank": (2, f"--hybrid-layer-pattern G {DELTA} 8 --linear-num-key-heads 4"),
    "three key heads of two ranks": (2, f"--hybrid-layer-pattern G {DELTA} 6 --linear-num-key-heads 3"),
    "three key heads of four ranks": (4, f"--hybrid-layer-pattern G {DELTA} 12 --linear-num-key-heads 3"),
    "no convolution": (2, f"--hybrid-layer-pattern G {DELTA} 4 --linear-num-key-heads 2 --linear-conv-kernel-dim 1"),
    "a decay for each channel": (3, f"--hybrid-layer-pattern K {DELTA} 6 --linear-num-key-heads 6"),
    "two groups of three ranks": (
        3,
        "--hybrid-layer-pattern M --mamba-num-groups 2 --mamba-num-heads 6 --mamba-head-dim 5 --mamba-state-dim 3",
    ),
    "four groups of two ranks": (
        2,
        "--hybrid-layer-pattern M --mamba-num-groups 4 --mamba-num-heads 4 --mamba-head-dim 5 --mamba-state-dim 3",
    ),
}


def _gradients(mixer: Any, batch: Batch, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the output of a mixer, and the gradients of its input and its weights."""
    x = x.clone().requires_grad_()
    y = mixer(x, batch, ForwardContext())
    return [y.detach(), *torch.autograd.grad(y, [x, *mixer.parameters()], dy)]


def _sharded_gradients(mixer: Any, num_ranks: int, comm_type: str, batch: Batch, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the output of a mixer, and the gradients of its input and its weights, summed over cp ranks."""
    sharding = shard_sequence(T, num_ranks, [None])
    positions = [torch.from_numpy(sharding.positions(rank)) for rank in range(num_ranks)]

    def run(cp: Axis) -> list[Tensor]:
        local_mixer = copy.copy(mixer)
        local_mixer.cp, local_mixer.cp_comm_type = cp, comm_type
        own = positions[cp.rank]
        return _gradients(local_mixer, replace(batch, cp_sharding=sharding), x[own], dy[own])

    order = torch.cat(positions).argsort()
    y, dx, *weights = zip(*run_threads(num_ranks, run), strict=True)
    return [torch.cat(y)[order], torch.cat(dx)[order], *(torch.stack(parts).sum(0) for parts in weights)]


def _mixer_and_batch(flags: str, lengths: list[int] | None) -> tuple[Any, Batch]:
    """Return a mixer in fp64 whose heads all differ, and a batch for it."""
    mixer = stage_from(f"{LINE} {flags}", torch.float64).blocks[0].mixer
    for number, weight in enumerate(mixer.parameters()):
        weight.data += 0.1 * _random(*weight.shape, seed=number)
    documents = None if lengths is None else Documents((), _documents(lengths))
    return mixer, Batch(torch.zeros(T, B, dtype=torch.int64), None, None, torch.arange(B), documents=documents)


@pytest.mark.parametrize("recomputes_core", [False, True])
@pytest.mark.parametrize("lengths", [None, [13, 11, 24]], ids=["one document", "documents"])
@pytest.mark.parametrize("comm_type", ["allgather", "a2a"])
@pytest.mark.parametrize("name", MIXERS)
def test_mixer_equals_that_of_one_process(
    name: str, comm_type: str, lengths: list[int] | None, recomputes_core: bool
) -> None:
    num_ranks, flags = MIXERS[name]
    mixer, batch = _mixer_and_batch(flags, lengths)
    mixer.recompute_core = recomputes_core
    x, dy = _random(2, T, B, 24, seed=50)
    actual = _sharded_gradients(mixer, num_ranks, comm_type, batch, x, dy)
    expected = _gradients(mixer, batch, x, dy)
    for weight_name, a, b in zip(["y", "x", *dict(mixer.named_parameters())], actual, expected, strict=True):
        assert _max_error([a], [b]) < 1e-12, weight_name


@pytest.mark.parametrize("comm_type", ["allgather", "a2a"])
@pytest.mark.parametrize("name", ["key heads for each rank", "a decay for each channel", "four groups of two ranks"])
def test_gradients_of_strong_decays_with_a_packed_tail_are_accurate(name: str, comm_type: str) -> None:
    """A rate of 16 forgets a token by a factor of e^-21; short documents follow a long one. Compare fp32 with fp64."""
    num_ranks, flags = MIXERS[name]
    mixer, batch = _mixer_and_batch(flags, [33, 1, 2, 5, 1, 3, 2, 1])
    with torch.no_grad():
        mixer.A_log.copy_(torch.full_like(mixer.A_log, 16.0).log())
        mixer.dt_bias.fill_(1.0)
    mixer.float()
    mixer_in_fp64 = copy.deepcopy(mixer).double()
    x, dy = _random(2, T, B, 24, seed=50).float()
    actual = _sharded_gradients(mixer, num_ranks, comm_type, batch, x, dy)
    expected = _gradients(mixer_in_fp64, batch, x.double(), dy.double())
    names = ["y", "x", *dict(mixer.named_parameters())]
    errors = {name: _max_error([a.double()], [b]) for name, a, b in zip(names, actual, expected, strict=True)}
    assert max(errors.values()) < 4e-6, errors


def _loop(inputs: RecurrenceInputs, scale: float, normalize_qk: bool) -> Tensor:
    """Return the output of the recurrence by its formula, token by token, for B = 1 and any number of tokens."""
    q, k = inputs.q * scale, inputs.k
    if normalize_qk:
        q = scale * inputs.q / (inputs.q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        k = inputs.k / (inputs.k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k = (x.repeat_interleave(H // x.shape[2], 2).squeeze(1).unbind(0) for x in (q, k))
    decay = inputs.log_decay.exp().squeeze(1)
    decays = (decay if decay.dim() == 3 else decay.unsqueeze(-1)).unsqueeze(-1).unbind(0)
    values = inputs.v.squeeze(1).unbind(0)
    betas = [None] * len(values) if inputs.beta is None else inputs.beta.squeeze(1).unsqueeze(-1).unbind(0)
    state = inputs.v.new_zeros(H, K, V)
    outputs = []
    for q_HK, k_HK, v_HV, decay_HK1, beta_H1 in zip(q, k, values, decays, betas, strict=True):
        state = decay_HK1 * state
        if beta_H1 is not None:
            v_HV = beta_H1 * (v_HV - (k_HK.unsqueeze(-2) @ state).squeeze(-2))
        state = state + k_HK.unsqueeze(-1) * v_HV.unsqueeze(-2)
        outputs.append((q_HK.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs).unsqueeze(1)


@pytest.mark.parametrize("decay", [1e-4, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_within_a_millionth_after_many_tokens(kind: str, decay: float, num_tokens: int = 1024) -> None:
    """The states pass through the ranges of four ranks; decays are near 1, and near 0."""
    inputs = RecurrenceInputs(*(None if x is None else x[:, :1].float() for x in _inputs(kind, num_tokens, decay)))  # type: ignore[arg-type]
    do = _random(num_tokens, 1, H, V, seed=5).float()
    normalize_qk = kind != "mamba2"
    sharding = shard_sequence(num_tokens, 4, [None])
    actual = _sharded(sharding, inputs, Recurrence(K**-0.5, normalize_qk), None, do)
    exact = RecurrenceInputs(*(None if x is None else x.double() for x in inputs))  # type: ignore[arg-type]
    expected = _with_grads(lambda x: _loop(x, K**-0.5, normalize_qk), exact, do.double())
    errors = [_max_error([a.double()], [b]) for a, b in zip(actual, expected, strict=True)]
    assert max(errors) < 1e-6, errors


@pytest.mark.nightly(guards=("megalite/nn/map_composition.py", "megalite/nn/recurrent_context_parallel.py"))
@pytest.mark.parametrize("decay", [1e-4, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_within_a_millionth_after_16_thousand_tokens(kind: str, decay: float) -> None:
    test_fp32_is_within_a_millionth_after_many_tokens(kind, decay, 16384)
