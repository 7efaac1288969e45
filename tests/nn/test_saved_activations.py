"""Recomputed and offloaded activations.

A recomputed part gives bit-equal gradients and is computed as often as it should be. For offloaded activations, the
tests count the copies and the device memory that is saved. tests/layouts/test_layouts.py tests that no bit changes, and
tests/simulated_gpu/test_removed_waits.py that every copy is waited for.
"""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from simulated_gpu.simulator.device import simulated
from simulated_gpu.simulator.trace import Launch
from torch import Tensor
from train_cases import run_from, stage_from

from megalite.nn.activation_offload import ActivationOffload, _SavedStorage
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.recompute import checkpoint_without_output
from megalite.training.train_step import train_step

S, B, V = 12, 2, 64
LINE = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {S} --micro-batch-size {B} --train-iters 1
 --lr 1 --mock-data --vocab-size {V} --init-method-std 0.2"""
STYLES = {
    "gpt": "--hidden-dropout 0.2 --attention-dropout 0.1",
    "llama": """--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope
     --disable-bias-linear --qk-layernorm --apply-layernorm-1p""",
    "neox": "--hidden-dropout 0 --attention-dropout 0 --parallel-residual",
    "gemma": """--hidden-dropout 0.1 --attention-dropout 0 --activation geglu --normalization RMSNorm --sandwich-norm
     --position-embedding-type rope --disable-bias-linear --embedding-multiplier 5.5""",
}
MODULES = ("core_attn", "layernorm", "mlp", "layernorm mlp", "core_attn layernorm mlp")


def gradients(flags: str, dtype: torch.dtype) -> dict[str, Tensor]:
    stage = stage_from(f"{LINE} {flags}", dtype)
    tokens = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
    stage(None, Batch(tokens, tokens, None, torch.arange(B)), ForwardContext(step=1)).backward()
    grads = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(stage.parameters()))
    return grads


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_recomputed_gradients_keep_every_bit(style: str, dtype: torch.dtype) -> None:
    expected = gradients(STYLES[style], dtype)
    for modules in MODULES:
        actual = gradients(f"{STYLES[style]} --recompute-granularity selective --recompute-modules {modules}", dtype)
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == [], modules


def test_dropped_activation_is_recomputed_once() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    grad_modes, inputs = [], []

    def compute() -> Tensor:
        grad_modes.append(torch.is_grad_enabled())
        return x.exp()

    def consume(y: Tensor) -> Tensor:
        inputs.append(y)
        return (y @ w).sum()

    checkpoint_without_output(compute, consume).backward()
    assert grad_modes == [True, False] and len(inputs) == 1
    torch.testing.assert_close(w.grad, x.detach().exp().T @ torch.ones(3, 4, dtype=torch.float64))


LAYERS = 4
SMALL = f"""--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --lr 0.01
 --global-batch-size 2 --train-iters 9 --mock-data --vocab-size 94 --hidden-dropout 0 --attention-dropout 0 --bf16
 --eval-iters 0 --kernels torch --attention-kernel torch --swiglu --normalization RMSNorm --disable-bias-linear
 --position-embedding-type rope --untie-embeddings-and-output-weights"""
FILE = "megalite/nn/activation_offload.py"


def _step(layers: int) -> tuple[float, int, dict[str, Counter[int]]]:
    """Train one micro-batch on a simulated GPU with `layers` offloaded layers.

    Returns:
        The loss, the peak of allocated bytes, and for each direction the number of copies by their size in bytes.
    """
    flags = f"{SMALL} --cpu-offloading-num-layers {layers} --min-offloaded-tensor-size 1024"
    with simulated() as gpu:
        run = run_from(flags, device=gpu.device)
        train_step(run)
        start = len(gpu.trace)
        torch.cuda.reset_peak_memory_stats()
        loss = train_step(run).loss
        peak_bytes = torch.cuda.max_memory_allocated()
        run.close()
        assert not gpu.mixed
        copies = [f for f in gpu.trace[start:] if isinstance(f, Launch) and f.where.startswith(FILE)]
        sizes = {"to host": Counter[int](), "to GPU": Counter[int]()}
        for copy in copies:
            direction = "to host" if copy.name == "copy to the host" else "to GPU"
            sizes[direction][copy.reads[0].stop - copy.reads[0].start] += 1
        downloaded = [span for copy in copies if copy.name == "copy to the host" for span in copy.reads]
        assert len(set(downloaded)) == len(downloaded)  # tensors of one storage share its copy
        return loss, peak_bytes, sizes


def test_each_storage_is_offloaded_and_restored_once() -> None:
    loss_0, peak_0, copies_0 = _step(0)
    loss_2, peak_2, copies_2 = _step(2)
    loss_all, peak_all, copies_all = _step(LAYERS)
    assert loss_0 == loss_2 == loss_all and not any(map(len, copies_0.values()))
    assert copies_2["to host"] == copies_2["to GPU"] and copies_all["to host"] == copies_all["to GPU"]
    moved_bytes = sum(size * times for size, times in copies_2["to host"].items())
    x_bytes = 2 * 2 * 64 * 64  # the input of the stage, which is not offloaded with 2 layers
    assert sum(size * times for size, times in copies_all["to host"].items()) == 2 * moved_bytes + x_bytes
    layer_bytes = (moved_bytes + x_bytes) / 2
    # the peak is in the loss of the head, or in the backward of a layer
    assert peak_0 - peak_2 > 0.5 * layer_bytes and peak_all < peak_2
    assert peak_0 - peak_all > layer_bytes


def test_weights_and_shared_inputs_are_not_offloaded() -> None:
    weight, table, small = torch.nn.Linear(60, 60, bias=False), torch.ones(60, 60), torch.ones(9, requires_grad=True)
    x = torch.ones(60, 60, requires_grad=True)
    run_block: Any = lambda block, x: (block(x * table) * small.sum()).relu()  # noqa: E731
    with mock.patch.object(
        _SavedStorage, "copy_to_host", autospec=True, side_effect=_SavedStorage.copy_to_host
    ) as copy_to_host:
        y = ActivationOffload(1, 60 * 60, torch.device("cpu"))(run_block, 1, [table])(weight, x)
    storages = [call.args[0] for call in copy_to_host.call_args_list]
    assert len(storages) == 3 and all(
        storage.device_bytes is None for storage in storages
    )  # two products, and the mask of relu
    y.sum().backward()
    assert x.grad is not None and all(storage.device_bytes is not None for storage in storages)
