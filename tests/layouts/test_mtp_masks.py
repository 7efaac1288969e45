"""The labels of multi-token prediction: which ones count, and that their loss does not depend on who has them."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from full_tensors import assemble, owned_shards
from layout_cases import COMMON, FP64_TOLERANCE, expand
from numpy.typing import NDArray
from ranks import run_ranks
from token_files import write_documents
from train_cases import DOCUMENT_FLAGS, run_from

from megalite.data.datasets.batches import DocumentBoundaries, MicroBatch
from megalite.parallel.mesh import ABSTRACT, Axis
from megalite.training.batch import _mtp_arrays, to_host_batch
from megalite.training.train_step import train_step

S = 16
SGD = f"{COMMON} {expand('LLAMA')} --global-batch-size 8 --optimizer sgd --sgd-momentum 0 --lr 1 --weight-decay 0 --clip-grad 0"
MASKS = {  # positions whose label counts; those of NVIDIA/Megatron-LM#7498
    "all": range(S),
    "first half": range(S // 2),
    "second half": range(S // 2, S),
    "every second": range(0, S, 2),
    "one in the first chunk": [2],
    "the last one": [S - 1],
    "none": [],
}
Gradients = dict[str, torch.Tensor]


# ---- the arrays of the loader
@pytest.mark.parametrize("cp", [1, 4])
def test_label_counts_within_its_sample_document_and_mask(cp: int) -> None:
    """Every element of the loader's tensors is compared with the definition, label by label."""
    rng = np.random.default_rng(0)
    num_depths, eod = 3, 9
    tokens = rng.integers(0, 10, (2, S + 1))
    pieces = [np.array([5, 3, 6], np.int32), np.array([9, 1, 7], np.int32)]
    padding = np.array([[False] * 14 + [True] * 2, [False] * 16])
    prompt = np.arange(S) % 5 > 0  # the model's loss masks some labels, as that of instructions
    for layout in (None, pieces):
        boundaries = DocumentBoundaries(eod, mask_loss=layout is None, documents=True, ids=True)
        mask, starts, ids = boundaries.of_samples(tokens, layout)
        assert mask is not None
        mask = mask * prompt.astype(np.float32)
        micro = MicroBatch(tokens, np.arange(2), mask, starts, padding, ids)
        new_documents = [
            {i + 1 for i in range(S) if row[i] == eod} if layout is None else set(np.cumsum(layout[b]).tolist())
            for b, row in enumerate(tokens)
        ]
        for rank in range(cp):
            axis = Axis("cp", cp, rank, ABSTRACT if cp > 1 else None, tuple(range(cp)))
            batch = to_host_batch(
                micro, pin=False, positions=True, documents=True, cp=axis, windows=[None], padding=True,
                num_mtp_depths=num_depths,
            )  # fmt: skip
            positions = range(S) if batch.cp_positions_S is None else batch.cp_positions_S.tolist()
            for (s, i), b, k in itertools.product(enumerate(positions), range(2), range(1, num_depths + 1)):
                depth = batch.mtp_batch(k)
                assert depth.labels_SB is not None and depth.mask_SB is not None and depth.padding_SB is not None
                label = i + k + 1
                crosses = any(i < start <= label for start in new_documents[b])
                counts = label <= S and bool(mask[b, i + k]) and not crosses
                assert bool(depth.mask_SB[s, b]) == counts, (i, b, k)
                if counts:
                    assert int(depth.labels_SB[s, b]) == tokens[b, label]
                if i + k < S:
                    inputs = batch.mtp_input(k)
                    assert inputs.positions_SB is not None and starts is not None
                    assert int(inputs.tokens_SB[s, b]) == tokens[b, i + k]
                    assert int(inputs.positions_SB[s, b]) == i + k - starts[b, i + k]
                assert bool(depth.padding_SB[s, b]) == (i + k >= S or bool(padding[b, i + k]))


def test_counted_labels_see_only_inputs_of_their_document() -> None:
    """A position attends to those before it in its document, whose inputs are k tokens ahead."""
    tokens = np.random.default_rng(1).integers(0, 5, (4, S + 1))
    mask, starts, ids = DocumentBoundaries(0, documents=True, ids=True).of_samples(tokens, None)
    micro = MicroBatch(tokens, np.arange(4), mask, starts, None, ids)
    batch = to_host_batch(micro, pin=False, positions=True, documents=True, cp=Axis("cp"), windows=[], num_mtp_depths=3)
    assert ids is not None and starts is not None and batch.mtp_mask_JSB is not None
    counted = batch.mtp_mask_JSB.nonzero().tolist()
    for j, i, b in counted:
        inputs = range(starts[b, i] + j + 1, i + j + 2)
        assert {ids[b, t] for t in inputs} == {ids[b, i]}
    assert len(counted) > 20


def test_arrays_of_one_sample_are_writable() -> None:
    """A broadcast array of one sample is contiguous, so it would not be copied, and torch would warn of it in the log."""
    micro = MicroBatch(np.arange(S + 1)[None], np.arange(1), None)
    arrays = _mtp_arrays(micro, num_depths=2, positions=False, padding=False)
    assert {name: array.flags.writeable for name, array in arrays.items()} == dict.fromkeys(arrays, True)


# ---- gradients
def _mask_of(name: str) -> NDArray[np.float32]:
    mask = np.zeros(S, np.float32)
    mask[list(MASKS[name])] = 1
    return mask


def gradients(flags: str, names: Sequence[str], masks_of_samples: Sequence[str] = ()) -> list[tuple[float, list]]:
    """Return the loss and the pieces of the weights that this rank owns after a step, for each mask.

    SGD with a rate of 1 subtracts the gradient. Each micro-batch has another rotation of the mask, or sample i has the
    i-th of `masks_of_samples`.
    """
    results = []
    for name in names:
        run = run_from(f"{SGD} {flags}", dtype=torch.float64)
        read = run.train_loader.batches.at

        def masked(consumed: int, size: int, read=read, name: str = name) -> list[MicroBatch]:  # noqa: ANN001
            def mask_of(sample: int) -> NDArray[np.float32]:
                if masks_of_samples:
                    return _mask_of(masks_of_samples[sample])
                return np.roll(_mask_of(name), sample // 2 % 2)

            return [
                replace(micro, loss_mask=np.stack([mask_of(int(i)) for i in micro.sample_ids]))
                for micro in read(consumed, size)
            ]

        run.train_loader.batches.at = masked
        result = train_step(run)
        run.sync.wait_param_sync()
        results.append((result.losses, owned_shards(run.optimizer, "model/")))
    return results


def _assert_equal(ranks: list, expected: list, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        losses, pieces = expected[i]
        weights = assemble(pieces)
        actual = assemble(piece for rank in ranks for piece in rank[i][1])
        assert ranks[0][i][0] == pytest.approx(losses, rel=FP64_TOLERANCE), name
        for parameter, values in weights.items():
            error = float((actual[parameter] - values).abs().max() / values.abs().max())
            assert error <= FP64_TOLERANCE, f"{name}: {parameter} differs by {error:.1e}"


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize("layout", ["cp2", "cp2 tp2"])
def test_gradients_do_not_depend_on_where_labels_are(depths: int, layout: str) -> None:
    """NVIDIA/Megatron-LM#7498: a rank without a label of the model lost the gradient of the depths."""
    flags, names = f"--mtp-num-layers {depths}", list(MASKS)
    expected = gradients(flags, names)
    _assert_equal(run_ranks(2 * len(layout.split()), gradients, f"{flags} {expand(layout)}", names), expected, names)
    initial = assemble(owned_shards(run_from(f"{SGD} {flags}", dtype=torch.float64).optimizer, "model/"))
    changed = {
        name: any(not torch.equal(values, initial[parameter]) for parameter, values in assemble(pieces).items())
        for name, (_, pieces) in zip(names, expected, strict=True)
    }
    assert changed == {name: name != "none" for name in names}


def test_every_token_weighs_the_same_whatever_its_rank_has() -> None:
    """NVIDIA/Megatron-LM#7452: ranks with unequal numbers of labels gave a gradient of 14/3 instead of 4.

    The eight samples of the batch are on four ranks. One rank has all labels of its samples, one has one, and one none.
    """
    masks = ["all", "all", "first half", "one in the first chunk", "none", "none", "every second", "the last one"]
    args = ("--mtp-num-layers 2", ["all"], masks)
    expected = gradients(*args)
    for layout in ("--micro-batch-size 1", "--micro-batch-size 2"):
        ranks = run_ranks(4, gradients, f"{args[0]} {layout}", *args[1:])
        _assert_equal(ranks, expected, ["all"])


def test_depth_loss_is_weighted_by_the_labels_of_the_model() -> None:
    """The gradient is linear in the factor, and that of depth k is the sum over its labels over the model's labels."""
    names = ["all", "second half"]
    by_factor = [
        [assemble(pieces) for _, pieces in gradients(f"--mtp-num-layers 1 --mtp-loss-scaling-factor {factor}", names)]
        for factor in (0.1, 0.2, 0.3)
    ]
    for low, middle, high in zip(*by_factor, strict=True):
        for parameter, values in middle.items():
            torch.testing.assert_close(high[parameter] - values, values - low[parameter], rtol=1e-9, atol=1e-12)
        assert not torch.equal(high["model/head"], low["model/head"])


@pytest.mark.parametrize("model", ["LLAMA MTP3", "MIXTRAL MTP", "DEEPSEEK REPEATED --hidden-dropout 0"])
def test_padding_changes_nothing(tmp_path: Path, model: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#6103: the loss of depths went over padding.

    Documents of 16 tokens are one sample each: without padding, and with 4 or 14 tokens of it.
    """
    rng = np.random.default_rng(3)
    prefix = write_documents(tmp_path / "a", [[*rng.integers(0, 93, 15), 93] for _ in range(60)])
    flags = f"{expand(model)} --attention-dropout 0 {DOCUMENT_FLAGS}"

    def train(seq_length: int) -> tuple[list, dict[str, torch.Tensor]]:
        lengths = f"--seq-length {seq_length} --max-position-embeddings {seq_length}"
        data = f"--data-path {prefix} --split 1,0,0 --document-packing best-fit"
        run = run_from(f"{COMMON.replace('--mock-data', '')} {flags} {lengths} {data}", dtype=torch.float64)
        results = [train_step(run) for _ in range(3)]
        run.sync.wait_param_sync()
        counts = run.expert_balancer.counts_LE.tolist()
        return [(r.losses, r.grad_norm, counts) for r in results], assemble(owned_shards(run.optimizer, "model/"))

    expected, expected_weights = train(16)
    for seq_length in (20, 30):
        steps, weights = train(seq_length)
        for (losses, norm, counts), (expected_losses, expected_norm, expected_counts) in zip(
            steps, expected, strict=True
        ):
            assert counts == expected_counts
            assert norm == pytest.approx(expected_norm, rel=FP64_TOLERANCE)
            assert losses == pytest.approx(expected_losses, rel=FP64_TOLERANCE)
        for name, values in expected_weights.items():
            assert float((weights[name] - values).abs().max() / values.abs().max()) <= 1e-9, name


def _cp_collectives(flags: str) -> int:
    run = run_from(f"{COMMON} {flags}", dtype=torch.float64)
    train_step(run)
    before = run.mesh.cp.comm_log.seq_ids["", -1]
    train_step(run)
    return run.mesh.cp.comm_log.seq_ids["", -1] - before


def test_depths_send_no_message_besides_those_of_a_layer() -> None:
    layers, depths = (
        run_ranks(2, _cp_collectives, f"{expand('LLAMA cp2')} {flags}")
        for flags in ("--num-layers 7", "--mtp-num-layers 3")
    )
    assert layers == depths
