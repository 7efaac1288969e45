"""Weight gradients that wait: the same sums, and each bucket reduced behind the last of them. Their bytes:
planning/test_layer_cost.py, and of ranks planning/test_rank_memory.py."""

import pytest
import torch
from layout_cases import COMMON, GPT, LLAMA
from ranks import run_ranks
from train_cases import config_from

from megalite.models.gpt import Stage
from megalite.nn.linear import column_parallel_linear
from megalite.nn.micro_batch import Batch
from megalite.nn.parameter import ParamFactory
from megalite.nn.wgrad_store import WeightGradStore
from megalite.optim.buffer import ParamAndGradBuffer
from megalite.parallel.mesh import Mesh, build_mesh

S, B, V = 16, 2, 96


def built(flags: str, mesh: Mesh, **how: int) -> tuple[Stage, ParamAndGradBuffer]:
    model = config_from(f"{COMMON} --num-layers 2 {flags}").model
    stage = Stage(ParamFactory(mesh, torch.float64, seed=3), model, [range(2)], 0, vocab_size=94, padded_vocab_size=V)
    return stage, ParamAndGradBuffer([stage], mesh, **how)


def backward(stage: Stage, seed: int, later: WeightGradStore | None) -> None:
    ids = torch.randint(0, 94, (S, B), generator=torch.Generator().manual_seed(seed))
    batch = Batch(ids, ids.flip(0), None, torch.arange(B), step=seed, loss_grad=1.0, wgrad_store=later)
    stage(None, batch).backward()


@pytest.mark.parametrize("flags", [GPT, LLAMA, f"{LLAMA} --recompute-granularity full --recompute-method uniform"])
def test_deferred_sums_are_bit_equal_in_equal_order(flags: str) -> None:
    (stage, buffer), (other, split) = built(flags, Mesh.single_process()), built(flags, Mesh.single_process())
    for seed in (1, 2):
        backward(stage, seed, None)
        later = WeightGradStore()
        backward(other, seed, later)
        names = {main_grad._name for main_grad in later.main_grads}  # type: ignore[attr-defined]
        matrices = {
            n
            for n, s in split.main_grads.items()
            if n.startswith("layers.") and s._main_grad.dim() > 1 and "bias" not in n
        }
        assert names == matrices
        later.compute_all()
        assert not list(later.main_grads)
    for b in (buffer, split):
        b.zero_unwritten_grads()
    whole, apart = (torch.cat(b.grads.tensors) for b in (buffer, split))
    assert torch.equal(whole, apart) and whole.any()


def _order() -> list[str]:
    """Reductions and landings of the last backward, on two dp ranks with a bucket per matrix."""
    mesh = build_mesh(tp=1, pp=1, device=torch.device("cpu"))
    (stage, buffer), events = built(f"{LLAMA} --num-query-groups 4", mesh, bucket_size=1), list[str]()
    reduce = buffer.grad_reduce
    start, landed = reduce._start_reduce, reduce.mark_ready
    entries = buffer.layout.entries

    def starts(b: int) -> None:
        events.append("reduce " + entries[buffer.layout.buckets[b].slots[0].entry].spec.name)
        start(b)

    def lands(b: int, entry: int) -> None:
        events.append(entries[entry].spec.name)
        landed(b, entry)

    reduce._start_reduce, reduce.mark_ready = starts, lands  # type: ignore[method-assign]
    first, last = WeightGradStore(), WeightGradStore()
    backward(stage, 1, first)
    backward(stage, 2, last)
    first.compute_all()
    assert not any(event.startswith("reduce") for event in events)
    events.clear()
    buffer.set_last_backward(0, last.main_grads)
    last.compute_all()
    buffer.finish_grad_sync()
    return events


def test_bucket_is_reduced_after_its_last_weight_gradient() -> None:
    one, other = run_ranks(2, _order)
    assert one == other
    waited = [e for e in one if e.startswith("layers.") and "norm" not in e]
    assert len(waited) == 2 * 5 and waited[0] == "layers.1.mlp.down" and waited[-1] == "layers.0.attention.kv"
    for name in waited:
        assert one.index(f"reduce {name}") > one.index(name)
    begins = [i for i, event in enumerate(one) if event.startswith("reduce")]
    assert sum(i < one.index(waited[-1]) for i in begins) > 8, "most are on their way before the last has landed"
    assert one[0].startswith("reduce"), "of what was there already: the head's came in forward"


def test_gradient_without_main_grad_goes_to_autograd() -> None:
    x = torch.randn(S, B, 8, requires_grad=True)
    weight, later = torch.randn(6, 8, requires_grad=True), WeightGradStore()
    column_parallel_linear(x, [weight], Mesh.single_process().tp, later)[0].sum().backward()
    assert weight.grad is not None and not list(later.main_grads)
