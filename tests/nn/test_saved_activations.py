"""What a backward is given that was not kept on the device. A part that is computed again gives the same gradients, bit
for bit, and is computed as often as it says. Activations in host memory: what moves, how often, and what the device is
spared; that no bit changes is in tests/layouts/test_layouts.py, that every copy is waited for in tests/simulated_gpu/test_removed_waits.py."""

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
from megalite.nn.micro_batch import Batch
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
}
MODULES = ("core_attn", "layernorm", "mlp", "layernorm mlp", "core_attn layernorm mlp")


def gradients(flags: str, dtype: torch.dtype) -> dict[str, Tensor]:
    stage = stage_from(f"{LINE} {flags}", dtype)
    tokens = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
    stage(None, Batch(tokens, tokens, None, torch.arange(B), 1)).backward()
    found = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    assert len(found) == len(list(stage.parameters()))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_recomputed_gradients_keep_every_bit(style: str, dtype: torch.dtype) -> None:
    want = gradients(STYLES[style], dtype)
    for modules in MODULES:
        got = gradients(f"{STYLES[style]} --recompute-granularity selective --recompute-modules {modules}", dtype)
        assert [name for name in want if not torch.equal(got[name], want[name])] == [], modules


def test_dropped_activation_is_recomputed_once() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    made, used = [], []

    def make() -> Tensor:
        made.append(torch.is_grad_enabled())
        return x.exp()

    def use(y: Tensor) -> Tensor:
        used.append(y)
        return (y @ w).sum()

    checkpoint_without_output(make, use).backward()
    assert made == [True, False] and len(used) == 1
    torch.testing.assert_close(w.grad, x.detach().exp().T @ torch.ones(3, 4, dtype=torch.float64))


LAYERS = 4
SMALL = f"""--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --lr 0.01
 --global-batch-size 2 --train-iters 9 --mock-data --vocab-size 94 --hidden-dropout 0 --attention-dropout 0 --bf16
 --eval-iters 0 --kernels torch --attention-kernel torch --swiglu --normalization RMSNorm --disable-bias-linear
 --position-embedding-type rope --untie-embeddings-and-output-weights"""
FILE = "megalite/nn/activation_offload.py"


def _step(layers: int) -> tuple[float, int, dict[str, Counter[int]]]:
    """Of one micro-batch on a simulated card: loss, most bytes allocated, and bytes to how many copies, each way."""
    flags = f"{SMALL} --cpu-offloading-num-layers {layers} --min-offloaded-tensor-size 1024"
    with simulated() as card:
        run = run_from(flags, device=card.device)
        train_step(run)
        begin = len(card.trace)
        torch.cuda.reset_peak_memory_stats()
        loss = train_step(run).loss
        most = torch.cuda.max_memory_allocated()
        run.close()
        assert not card.mixed
        copies = [f for f in card.trace[begin:] if isinstance(f, Launch) and f.where.startswith(FILE)]
        sizes = {"copy to the host": Counter[int](), "copy to the card": Counter[int]()}
        for copy in copies:
            sizes[copy.name][copy.reads[0].stop - copy.reads[0].start] += 1
        read = [span for copy in copies if copy.name == "copy to the host" for span in copy.reads]
        assert len(set(read)) == len(read)  # who shares a storage shares its copy
        return loss, most, sizes


def test_each_storage_is_offloaded_and_restored_once() -> None:
    (loss, most, none), (same, less, two), (alike, least, all_) = (_step(layers) for layers in (0, 2, LAYERS))
    assert loss == same == alike and not any(map(len, none.values()))
    assert two["copy to the host"] == two["copy to the card"] and all_["copy to the host"] == all_["copy to the card"]
    moved = sum(size * times for size, times in two["copy to the host"].items())
    x = 2 * 2 * 64 * 64  # the input of the stage stays
    assert sum(size * times for size, times in all_["copy to the host"].items()) == 2 * moved + x
    layer = (moved + x) / 2
    assert most - less > 0.5 * layer and least < less  # at the peak the head's loss is computed, or a layer's backward
    assert most - least > layer


def test_weights_and_shared_inputs_are_not_offloaded() -> None:
    weight, table, small = torch.nn.Linear(60, 60, bias=False), torch.ones(60, 60), torch.ones(9, requires_grad=True)
    x = torch.ones(60, 60, requires_grad=True)
    use: Any = lambda block, x: (block(x * table) * small.sum()).relu()  # noqa: E731
    with mock.patch.object(
        _SavedStorage, "copy_to_host", autospec=True, side_effect=_SavedStorage.copy_to_host
    ) as down:
        y = ActivationOffload(1, 60 * 60, torch.device("cpu"))(use, 1, [table])(weight, x)
    stored = [call.args[0] for call in down.call_args_list]
    assert len(stored) == 3 and all(one.device_bytes is None for one in stored)  # two products and what is positive
    y.sum().backward()
    assert x.grad is not None and all(one.device_bytes is not None for one in stored)
