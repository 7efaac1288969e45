"""A context that ranks share: labels and documents anywhere, what is moved and what is kept, and the lines for wrong
options."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from full_tensors import owned, whole_of
from layout_cases import BORDERS, COMMON, GPT
from ranks import run_ranks
from train_cases import config_from, run_from

from megalite.config import cli
from megalite.config.validation import find_problems
from megalite.data.datasets.batches import MicroBatch
from megalite.models.families import PRESETS
from megalite.planning.layer_cost import CommStart
from megalite.planning.layer_kinds import LayerSetting, layer_kinds, layers_cost, single_document_sharding
from megalite.training.batch import to_host_batch
from megalite.training.setup import host_batch_options
from megalite.training.train_step import train_step
from megalite.training.trainer import evaluate

T, B = 16, 2
SGD = " --optimizer sgd --sgd-momentum 0 --lr 1 --clip-grad 0 --weight-decay 0 --global-batch-size 4 --train-iters 1"
RANK_0 = np.r_[0:4, 12:16]  # its positions in zigzag over 2


def _only(*positions: Any) -> np.ndarray:
    mask = np.zeros((B, T), np.float32)
    mask[:, np.r_[positions]] = 1
    return mask


MASKS = {
    "all": np.ones((B, T), np.float32),
    "none": _only(slice(0, 0)),
    "rank 0 alone": _only(RANK_0),
    "rank 1 alone": 1 - _only(RANK_0),
    "one label, rank 0": _only(15),
    "one label, rank 1": _only(4),
    "every other": _only(slice(0, T, 2)),
}
DOCUMENTS = [[16], [8, 8], [4, 4, 4, 4], [11, 5], [1, 2, 7, 6], [5, 3, 7, 1], [1] * 16, [2, 13, 1]]
# of each micro-batch the mask, and lengths of each sample's documents
Samples = list[tuple[np.ndarray, list[list[int]]]]


def _first(lengths: list[list[int]]) -> np.ndarray:
    return np.stack([np.repeat(np.cumsum([0, *row[:-1]]), row) for row in lengths]).astype(np.int32)


def _updated(flags: str, cases: list[Samples]) -> list[tuple[tuple[float, float], list[tuple]]]:
    """On a rank: of each case the loss, that of an evaluation after one step, and the pieces of the weights, which this
    step has moved by the gradient."""
    config, done = config_from(f"{COMMON} {SGD} {flags}"), []
    for number, case in enumerate(cases):
        run = run_from(config, dtype=torch.float64)
        tokens = np.random.default_rng(number).integers(0, 94, (len(case), B, T + 1))
        parts, marks = zip(tokens, case, strict=True), host_batch_options(config, run.mesh)
        batches = (MicroBatch(ids, np.arange(B) + B * m, one[0], _first(one[1])) for m, (ids, one) in enumerate(parts))
        hosts = [to_host_batch(batch, pin=False, **marks) for batch in batches]
        run.train_loader.get = lambda consumed, size, hosts=hosts: (hosts, 0.0)  # type: ignore[method-assign]
        losses = train_step(run).loss, evaluate(run, run.train_loader, 1)
        run.buffer.wait_param_sync()
        done.append((losses, owned(run.optimizer, "model/")))
        run.close()
    return done


@pytest.mark.parametrize("flags", [GPT + BORDERS, GPT + BORDERS + " --cp-comm-type a2a"], ids=["allgather", "a2a"])
def test_context_parallel_with_labels_and_documents_at_any_position(flags: str) -> None:
    """Megatron-LM#7498: the gradient of a rank without a label was lost. Every gradient is that of one process."""
    whole, masks = [[T]] * B, list(MASKS.values())
    cases: list[Samples] = [[(mask, whole), (masks[n - 3], whole)] for n, mask in enumerate(masks)]
    cases += [
        [(MASKS["all"], [one, other]), (MASKS["every other"], [other, one])]
        for one, other in zip(DOCUMENTS, DOCUMENTS[3:] + DOCUMENTS[:3], strict=True)
    ]
    want = _updated(flags, cases)
    got = run_ranks(2, _updated, f"{flags} --cp 2", cases, timeout=200)
    for case, (losses, pieces) in enumerate(want):
        alone, shared = whole_of(pieces), whole_of(piece for rank in got for piece in rank[case][1])
        assert all(rank[case][0] == pytest.approx(losses, rel=1e-10) for rank in got)
        for name, weight in alone.items():
            torch.testing.assert_close(shared[name], weight, rtol=1e-10, atol=1e-12, msg=f"case {case}: {name}")


S8 = """--num-layers 1 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --bf16
 --micro-batch-size 2 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0
 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention"""


def _moved(flags: str, cp: int, tp: int = 1, again: tuple[str, ...] = (), **more: Any) -> tuple[Counter, Any]:
    """Collectives over cp of a layer, by phase, name and bytes given; its bill."""
    (kind,) = layer_kinds(config_from(f"{S8} {flags}").model)
    bill = layers_cost(
        (kind,),
        LayerSetting(tp, B, torch.bfloat16, recompute_modules=again, cp_sharding=single_document_sharding(kind, cp)),
        **more,
    )
    events = [e for e in bill.trace if isinstance(e, CommStart) and e.axis == "cp"]
    return Counter((e.phase, e.op, e.num_bytes) for e in events), bill


@pytest.mark.parametrize("cp,tp,groups", [(2, 1, 4), (4, 1, 4), (4, 2, 2), (4, 1, 1), (8, 1, 8)])
def test_context_parallel_bytes_equal_the_formulas(cp: int, tp: int, groups: int) -> None:
    """nn/context_parallel.py. The bill's bytes are those of the whole tensor, of which f = (cp - 1) / cp crosses."""
    length, K, g, h = 256, 64, max(1, groups // tp), 8 // tp
    flags = f"--num-query-groups {groups}"
    kv = 2 * length * B * g * K
    gathered, bill = _moved(flags, cp, tp)
    assert gathered == {
        ("F", "all-gather", 2 * kv): 1,
        ("B", "all-gather", 2 * kv): 1,
        ("B", "reduce-scatter", 4 * kv): 1,
    }
    swapped, swap = _moved(f"{flags} --cp-comm-type a2a", cp, tp) if h % cp == 0 else (None, None)
    if swapped is not None:
        q, keys = (2 * length // cp * B * K * n for n in (h, 2 * max(g, cp)))
        assert swapped == {(p, "all-to-all", n): 1 + (p + str(n) == f"B{q}") for p in "FB" for n in (q + keys, q)}
    one, alone = _moved(flags, 1, tp)
    assert not one
    assert alone.flops[0] == pytest.approx(cp * bill.flops[0]) and alone.flops[1] == pytest.approx(cp * bill.flops[1])
    head = 2 * length // cp * B * K
    part = alone.saved_bytes / cp - g * head  # without what is beside v in one tensor, the keys before their rotation
    assert bill.saved_bytes == pytest.approx(part, rel=0.01)
    if swap is not None:  # keys of each rank's heads, and o once
        assert swap.saved_bytes == pytest.approx(part + head * (2 * max(g, cp) - 2 * g), rel=0.01)
    for way in ("allgather", "a2a")[: 1 + (swap is not None)]:  # its own hooks do not keep it from the host
        lent = _moved(f"{flags} --cp-comm-type {way}", cp, tp, offload_min_numel=1)[1]
        assert lent.offloaded_bytes > 0.99 * lent.saved_bytes


def test_windowed_context_parallel_moves_only_visible_chunks() -> None:
    """Work is equal in a window, so a rank holds neighboring blocks; of 16 blocks of 16 tokens it gives its last one
    and gets one, where a gather would move 14, and sends back the gradients of that in fp32."""
    moved, _ = _moved("--num-query-groups 4 --window-size 16,0", 8)
    block = 2 * 2 * 16 * B * 4 * 64
    assert moved == {("F", "all-to-all", block): 1, ("B", "all-to-all", block): 1, ("B", "all-to-all", 2 * block): 1}


def test_recompute_gathers_once_more() -> None:
    for options in (dict(again=("core_attn",)), dict(full_recompute=True)):
        moved, bill = _moved("--num-query-groups 4", 4, **options)  # type: ignore[arg-type]
        assert sum(n for (phase, name, _), n in moved.items() if name == "all-gather") == 2, options
        assert bill.saved_bytes == _moved("--num-query-groups 4", 1, **options)[1].saved_bytes / 4 + 2, (
            options
        )  # its dtype


def test_p2p_is_accepted_as_allgather_with_a_note() -> None:
    config, notes = cli.read([*COMMON.split(), *"--cp 2 --cp-comm-type p2p".split()], PRESETS)
    assert config.model.layer_cp_comm == ("allgather",) * 4 and not find_problems(config, 4)
    assert any(note.startswith("cp_comm_type=p2p is replaced by allgather") for note in notes)
