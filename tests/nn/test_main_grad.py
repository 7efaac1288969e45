"""A model whose parameters lie in buckets gets the gradients that autograd gives, without their temporaries."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_cases import stage_from

from megalite.models.gpt import Stage
from megalite.nn.loss import linear_cross_entropy
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import ParamSpec

S, B, VOCAB = 8, 2, 61
WEIGHT = 2.0**-6  # a power of two: multiplying by it is exact, wherever it happens
COMMON = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {S} --max-position-embeddings {S}
 --micro-batch-size {B} --train-iters 1 --lr 1 --mock-data --hidden-dropout 0 --attention-dropout 0
 --vocab-size {VOCAB} --make-vocab-size-divisible-by 8"""
GPT = ""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --ffn-hidden-size 48"""
FULL = "--recompute-granularity full --recompute-method uniform"


def stage(flags: str, dtype: torch.dtype) -> Stage:
    return stage_from(f"{COMMON} {flags}", dtype)


def batch(seed: int) -> Batch:
    """Return a batch in which no token is repeated, since autograd adds repeated ones in another order."""
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[: S * B].view(S, B)
    return Batch(tokens, tokens.roll(-1), None, torch.arange(B))


def by_autograd(flags: str, dtype: torch.dtype, seeds: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the sums that a hook gets that adds each `.grad` to an fp32 sum."""
    model = stage(flags, dtype)
    sums: dict[str, Tensor] = {}
    for seed in seeds:
        loss = model(None, batch(seed), ForwardContext(step=1))
        loss.backward(torch.tensor(WEIGHT, dtype=torch.promote_types(dtype, torch.float32)))
        for spec, p in params_with_specs(model):
            assert p.grad is not None
            grad = p.grad.to(torch.promote_types(dtype, torch.float32))
            sums[spec.name] = sums[spec.name] + grad if spec.name in sums else grad
            p.grad = None
    return sums


def backward(model: Stage, seed: int, loss_grad: float | None = WEIGHT, actual_grad: float = WEIGHT) -> None:
    loss = model(None, batch(seed), ForwardContext(1, loss_grad))
    loss.backward(loss.new_full((), actual_grad))


def in_buckets(flags: str, dtype: torch.dtype, seeds: tuple[int, ...], loss_grad: float | None) -> dict[str, Tensor]:
    model = stage(flags, dtype)
    sync = BucketSync([model], Mesh.single_process(), bucket_size=3000)
    for flat in [bucket.full for bucket in sync.grad_buckets]:
        flat.fill_(torch.nan)  # from an earlier step: nothing of it may remain
    for seed in seeds:
        if seed == seeds[-1]:
            sync.set_last_backward(0)
        backward(model, seed, loss_grad)
    sync.finish_grad_sync()
    assert all(p.grad is None for p in model.parameters())
    return {name: main_grad.accumulator()[0] for name, main_grad in sync.main_grads.items()}


@pytest.mark.parametrize("loss_grad", [WEIGHT, None], ids=["promised", "not"])
@pytest.mark.parametrize(
    "flags", [GPT, LLAMA, f"{GPT} {FULL}", f"{LLAMA} {FULL}"], ids=["gpt", "llama", "gpt full", "llama full"]
)
def test_main_grad_in_fp64_is_bit_exact(flags: str, loss_grad: float | None) -> None:
    expected = by_autograd(flags, torch.float64, (1,))
    actual = in_buckets(flags, torch.float64, (1,), loss_grad)
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name


@pytest.mark.parametrize("flags", [GPT, LLAMA], ids=["gpt", "llama"])
def test_main_grad_sums_micro_batches(flags: str) -> None:
    seeds = (1, 2, 3)
    expected = by_autograd(flags, torch.float64, seeds)
    actual = in_buckets(flags, torch.float64, seeds, WEIGHT)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("flags", [GPT, LLAMA], ids=["gpt", "llama"])
def test_main_grad_in_bf16_is_as_exact_as_autograd(flags: str) -> None:
    seeds = (1, 2, 3, 4)
    exact = by_autograd(flags, torch.float64, seeds)
    autograd_grads = by_autograd(flags, torch.bfloat16, seeds)
    actual = in_buckets(flags, torch.bfloat16, seeds, WEIGHT)

    def error(grads: dict[str, Tensor]) -> float:
        return sum(float((g.double() - exact[n]).square().sum()) for n, g in grads.items()) ** 0.5

    assert all(g.dtype == torch.float32 for g in actual.values())
    assert error(actual) <= 1.02 * error(autograd_grads)


class Writes(TorchDispatchMode):
    """A recorder of the sizes of newly allocated results, and of the operations that wrote to `watched`."""

    def __init__(self, watched: list[Tensor]):
        super().__init__()
        self.watched = {flat.untyped_storage().data_ptr() for flat in watched}
        self.allocated, self.written = [0], [""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            if func._schema.is_mutable and out.untyped_storage().data_ptr() in self.watched:
                self.written.append(f"{func.overloadpacket.__name__} {out.numel()}")
            elif out.untyped_storage().data_ptr() not in known:
                self.allocated.append(out.numel())
        return out


def test_main_grad_needs_no_temporary() -> None:
    """A micro-batch takes one operation per matrix. With four tokens, no activation is as large as a matrix."""
    model = stage(LLAMA, torch.float32)
    sync = BucketSync([model], Mesh.single_process())
    matrices = {spec.name: p.numel() for spec, p in params_with_specs(model) if p.dim() > 1}
    tokens = torch.tensor([[3], [1], [4], [1]])
    for is_first in (True, False):
        writes = Writes([bucket.full for bucket in sync.grad_buckets])
        with writes:
            loss = model(None, Batch(tokens, tokens, None, torch.arange(1)), ForwardContext(1, WEIGHT))
            loss.backward(loss.new_full((), WEIGHT))
        assert max(writes.allocated) < min(matrices.values())
        large = [w for w in writes.written[1:] if int(w.split()[1]) in matrices.values()]
        expected = [f"addmm {n}" for name, n in matrices.items() if name != "embedding.word"]
        rows = matrices["embedding.word"]
        assert sorted(large) == sorted([*expected, f"index_add_ {rows}", *([f"zero_ {rows}"] if is_first else [])])


def test_main_grad_is_untouched_by_an_unregistered_forward() -> None:
    model = stage(LLAMA, torch.float32)
    sync = BucketSync([model], Mesh.single_process())
    model(None, batch(1), ForwardContext(1))
    with torch.no_grad():
        model(None, batch(1), ForwardContext(1, WEIGHT))
    assert not any(flat.any() for flat in [bucket.full for bucket in sync.grad_buckets]) and all(
        main_grad.accumulator()[1] for main_grad in sync.main_grads.values()
    )


def test_missing_or_second_backward_is_refused() -> None:
    model = stage(LLAMA, torch.float32)
    BucketSync([model], Mesh.single_process())
    with pytest.raises(RuntimeError, match="gradient of the loss is not loss_grad=0.015625"):
        backward(model, 1, actual_grad=1.0)
    loss = model(None, batch(1), ForwardContext(1, WEIGHT))
    loss.backward(loss.new_full((), WEIGHT), retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward(loss.new_full((), WEIGHT))


def test_late_weight_gradient_is_refused() -> None:
    model = stage(LLAMA, torch.float32)
    sync = BucketSync([model], Mesh.single_process())
    sync.set_last_backward(0)
    backward(model, 1)
    before = torch.cat([bucket.full for bucket in sync.grad_buckets])
    with pytest.raises(RuntimeError, match=r"head: got a gradient after its gradients were declared complete"):
        backward(model, 2)
    assert torch.equal(torch.cat([bucket.full for bucket in sync.grad_buckets]), before)


def test_unreferenced_main_grad_is_freed() -> None:
    model = stage(GPT, torch.float32)
    sync = BucketSync([model], Mesh.single_process())
    backward(model, 1)
    sync_ref, weights_ref = weakref.ref(sync), weakref.ref(sync.param_buckets[0].full)
    del sync
    assert sync_ref() is None
    del model
    gc.collect()
    assert weights_ref() is None


@pytest.mark.gpu
def test_head_needs_less_than_a_gib_on_a_gpu() -> None:
    """Logits alone would be 4 GiB: 16 thousand tokens, a vocabulary of 128 thousand, hidden size 4096."""
    mesh, tokens, vocab, hidden = Mesh.single_process("cuda"), 16384, 128256, 4096
    module = torch.nn.ParameterList([ParamFactory(mesh, torch.bfloat16, seed=1)(ParamSpec("head", (vocab, hidden)))])
    sync = BucketSync([module], mesh)
    x_sBD = torch.randn(tokens, 1, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels_SB = torch.randint(vocab, (tokens, 1), device="cuda")
    peaks = []
    for _ in range(2):  # cuBLAS allocates its workspace in the first iteration
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, _ = linear_cross_entropy(x_sBD, module[0], labels_SB, None, mesh.tp, vocab, loss_grad=1.0)
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        x_sBD.grad = None
    assert peaks[1] < 2**30
    [grads] = [bucket.full for bucket in sync.grad_buckets]
    assert grads.isfinite().all() and grads.any()
