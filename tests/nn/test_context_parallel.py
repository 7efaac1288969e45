"""Context parallelism: labels and documents at any position, communicated and saved bytes, and the options."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from full_tensors import assemble, owned_shards
from layout_cases import COMMON, GPT, expand
from ranks import run_ranks
from train_cases import DOCUMENT_FLAGS, config_from, run_from

from megalite.config import cli
from megalite.config.validation import find_problems
from megalite.data.datasets.batches import MicroBatch
from megalite.models.families import PRESETS
from megalite.planning.layer_cost import CommStart
from megalite.planning.layer_kinds import LayerSetting, layer_kinds, layers_cost, single_document_sharding
from megalite.training.batch import to_host_batch
from megalite.training.evaluation import evaluate
from megalite.training.setup import host_batch_options
from megalite.training.train_step import train_step

T, B = 16, 2
SGD = " --optimizer sgd --sgd-momentum 0 --lr 1 --clip-grad 0 --weight-decay 0 --global-batch-size 4 --train-iters 1"
RANK_0 = np.r_[0:4, 12:16]  # the positions of rank 0 of 2 in zigzag order


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
# for each micro-batch: the loss mask, and the lengths of each sample's documents
Samples = list[tuple[np.ndarray, list[list[int]]]]


def _first(lengths: list[list[int]]) -> np.ndarray:
    return np.stack([np.repeat(np.cumsum([0, *row[:-1]]), row) for row in lengths]).astype(np.int32)


def _updated(flags: str, cases: list[Samples]) -> list[tuple[tuple[float, float], list[tuple]]]:
    """Run one training step per case on this rank.

    Returns:
        For each case: the loss of the step and of an evaluation after it, and the owned pieces of the weights, which
        the step has moved by the gradient.
    """
    config = config_from(f"{COMMON} {SGD} {flags}")
    results = []
    for number, case in enumerate(cases):
        run = run_from(config, dtype=torch.float64)
        tokens = np.random.default_rng(number).integers(0, 94, (len(case), B, T + 1))
        micro_batches, options = zip(tokens, case, strict=True), host_batch_options(config, run.mesh)
        batches = (
            MicroBatch(ids, np.arange(B) + B * m, sample[0], _first(sample[1]))
            for m, (ids, sample) in enumerate(micro_batches)
        )
        hosts = [to_host_batch(batch, pin=False, **options) for batch in batches]
        run.train_loader.get = lambda consumed, size, hosts=hosts: (hosts, 0.0)  # type: ignore[method-assign]
        losses = train_step(run).loss, evaluate(run, run.train_loader, 1)
        run.sync.wait_param_sync()
        results.append((losses, owned_shards(run.optimizer, "model/")))
        run.close()
    return results


A2A = " --cp-comm-type a2a"


@pytest.mark.parametrize(
    "flags",
    [model + DOCUMENT_FLAGS + comm_type for model in (GPT, expand("MLA")) for comm_type in ("", A2A)],
    ids=["allgather", "a2a", "latents, allgather", "latents, a2a"],
)
def test_context_parallel_with_labels_and_documents_at_any_position(flags: str) -> None:
    """Every gradient equals that of one process. In Megatron-LM#7498 a rank without a label lost its gradient."""
    one_document, masks = [[T]] * B, list(MASKS.values())
    cases: list[Samples] = [[(mask, one_document), (masks[n - 3], one_document)] for n, mask in enumerate(masks)]
    cases += [
        [(MASKS["all"], [first, second]), (MASKS["every other"], [second, first])]
        for first, second in zip(DOCUMENTS, DOCUMENTS[3:] + DOCUMENTS[:3], strict=True)
    ]
    expected = _updated(flags, cases)
    results = run_ranks(2, _updated, f"{flags} --cp 2", cases, timeout=200)
    for case, (losses, pieces) in enumerate(expected):
        single_process, sharded = assemble(pieces), assemble(piece for rank in results for piece in rank[case][1])
        assert all(rank[case][0] == pytest.approx(losses, rel=1e-10) for rank in results)
        for name, weight in single_process.items():
            torch.testing.assert_close(sharded[name], weight, rtol=1e-10, atol=1e-12, msg=f"case {case}: {name}")


S8 = """--num-layers 1 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --bf16
 --micro-batch-size 2 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0
 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention"""


def _cp_collectives(
    flags: str, cp: int, tp: int = 1, recompute_modules: tuple[str, ...] = (), **options: Any
) -> tuple[Counter, Any]:
    """Return the number of collectives over cp in a layer by (phase, name, bytes), and the cost of the layer."""
    model = config_from(f"{S8} {flags}").model
    (kind,) = layer_kinds(model)
    cost = layers_cost(
        (kind,),
        LayerSetting(
            tp, B, torch.bfloat16, recompute_modules=recompute_modules, cp_sharding=single_document_sharding(model, cp)
        ),
        **options,
    )
    events = [event for event in cost.trace if isinstance(event, CommStart) and event.axis == "cp"]
    return Counter((event.phase, event.op, event.num_bytes) for event in events), cost


@pytest.mark.parametrize("cp,tp,groups", [(2, 1, 4), (4, 1, 4), (4, 2, 2), (4, 1, 1), (8, 1, 8)])
def test_context_parallel_bytes_equal_the_formulas(cp: int, tp: int, groups: int) -> None:
    """The formulas are in nn/context_parallel.py.

    The cost counts the bytes of the full tensor; the fraction f = (cp - 1) / cp of them is communicated.
    """
    length, K, g, h = 256, 64, max(1, groups // tp), 8 // tp
    flags = f"--num-query-groups {groups}"
    kv = 2 * length * B * g * K
    gathered, cost = _cp_collectives(flags, cp, tp)
    assert gathered == {
        ("F", "all-gather", 2 * kv): 1,
        ("B", "all-gather", 2 * kv): 1,
        ("B", "reduce-scatter", 4 * kv): 1,
    }
    a2a_collectives, a2a_cost = _cp_collectives(f"{flags} --cp-comm-type a2a", cp, tp) if h % cp == 0 else (None, None)
    if a2a_collectives is not None:
        q, keys = (2 * length // cp * B * K * n for n in (h, 2 * max(g, cp)))
        assert a2a_collectives == {
            (p, "all-to-all", n): 1 + (p + str(n) == f"B{q}") for p in "FB" for n in (q + keys, q)
        }
    cp1_collectives, cp1_cost = _cp_collectives(flags, 1, tp)
    assert not cp1_collectives
    assert cp1_cost.flops[0] == pytest.approx(cp * cost.flops[0]) and cp1_cost.flops[1] == pytest.approx(
        cp * cost.flops[1]
    )
    head_bytes = 2 * length // cp * B * K
    # without the keys before their rotation, which share a tensor with v
    expected_bytes = cp1_cost.saved_bytes / cp - g * head_bytes
    assert cost.saved_bytes == pytest.approx(expected_bytes, rel=0.01)
    if a2a_cost is not None:  # the keys of each rank's heads, and the attention output once
        assert a2a_cost.saved_bytes == pytest.approx(expected_bytes + head_bytes * (2 * max(g, cp) - 2 * g), rel=0.01)
    for comm_type in ("allgather", "a2a")[: 1 + (a2a_cost is not None)]:  # the hooks of cp do not prevent offloading
        offloading_cost = _cp_collectives(f"{flags} --cp-comm-type {comm_type}", cp, tp, offload_min_numel=1)[1]
        assert offloading_cost.offloaded_bytes > 0.99 * offloading_cost.saved_bytes


def test_windowed_context_parallel_moves_only_visible_chunks() -> None:
    """Each rank exchanges one chunk with its neighbors.

    The work is equal in a window, so a rank holds neighboring chunks. It sends the last of its 2 of 16 chunks and
    receives one, where an all-gather would move 14, and sends back the gradients of the received chunk in fp32.
    """
    collectives, _ = _cp_collectives("--num-query-groups 4 --window-size 16,0", 8)
    chunk_bytes = 2 * 2 * 16 * B * 4 * 64
    assert collectives == {
        ("F", "all-to-all", chunk_bytes): 1,
        ("B", "all-to-all", chunk_bytes): 1,
        ("B", "all-to-all", 2 * chunk_bytes): 1,
    }


def test_recompute_gathers_once_more() -> None:
    for options in (dict(recompute_modules=("core_attn",)), dict(full_recompute=True)):
        collectives, cost = _cp_collectives("--num-query-groups 4", 4, **options)  # type: ignore[arg-type]
        assert sum(n for (phase, name, _), n in collectives.items() if name == "all-gather") == 2, options
        cp1_cost = _cp_collectives("--num-query-groups 4", 1, **options)[1]
        assert cost.saved_bytes == cp1_cost.saved_bytes / 4 + 2, options  # 2 bytes for its dtype


def test_p2p_is_accepted_as_allgather_with_a_note() -> None:
    config, notes = cli.read([*COMMON.split(), *"--cp 2 --cp-comm-type p2p".split()], PRESETS)
    assert [layer.cp_comm_type for layer in config.model.layers] == ["allgather"] * 4 and not find_problems(config, 4)
    assert any(note.startswith("cp_comm_type=p2p is replaced by allgather") for note in notes)
