"""Comparisons of recurrent mixers: with transformers' modules, of generation with the full sequence, and their costs."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from train_cases import config_from, stage_from

from megalite.generate.generation import KVCache
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.planning.layer_cost import CommStart, LayerCost
from megalite.planning.layer_kinds import LayerSetting, layer_kinds, layers_cost, single_document_sharding

S, B = 70, 3
LINE = f"""--num-layers 1 --num-attention-heads 4 --seq-length {S} --micro-batch-size {B} --train-iters 1 --lr 1
 --mock-data --vocab-size 64 --init-method-std 0.3 --hidden-dropout 0 --attention-dropout 0 --normalization RMSNorm
 --norm-epsilon 1e-2 --position-embedding-type rope"""


def mixer_of(flags: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the mixer of the only layer of a model."""
    return stage_from(f"{LINE} {flags}", dtype).blocks[0].mixer


def disturb(mixer: Any) -> dict[str, Tensor]:
    """Add noise to all weights, so that none is like another, and return them."""
    weights = dict(mixer.named_parameters())
    for number, weight in enumerate(weights.values()):
        weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return weights


def random_x_and_dy(hidden_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return the input of a mixer and the gradient of its output, [S, B, D]."""
    x, dy = torch.randn(2, S, B, hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype).unbind(0)
    return x, dy


def full_batch() -> Batch:
    """Return a micro-batch of whole samples."""
    return Batch(torch.zeros(S, B, dtype=torch.int64), None, None, torch.arange(B))


def assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float) -> None:
    """Compare relative to the largest element; sums have different orders."""
    scale = expected.abs().max()
    error = ((actual - expected) / scale).abs().max().item()
    assert error <= tolerance, f"{name}: {error}"


def compare_with_transformers(
    mixer: Any, reference: Any, reference_weights: dict[str, Tensor], hf_y: Tensor, hf_x: Tensor, tolerance: Any
) -> None:
    """Compare the output and all gradients with those of transformers.

    Args:
        mixer: The mixer.
        reference: The module of transformers.
        reference_weights: Its weights by name, as functions of the mixer's.
        hf_y: Its output, [B, S, D].
        hf_x: Its input, whose transpose is the input of the mixer.
        tolerance: A function from the name of a gradient, or x or y, to the largest relative error.
    """
    weights = dict(mixer.named_parameters())
    x = hf_x.detach().transpose(0, 1).clone().requires_grad_()
    _, dy = random_x_and_dy(x.shape[-1], x.dtype)
    y = mixer(x, full_batch(), ForwardContext())
    dx, *grads = torch.autograd.grad(y, [x, *weights.values()], dy)
    hf_weights = [dict(reference.named_parameters())[name] for name in reference_weights]
    hf_dx, *hf_grads = torch.autograd.grad(hf_y, [hf_x, *hf_weights], dy.transpose(0, 1))
    assert hf_y.dtype == y.dtype
    assert_close(y, hf_y.transpose(0, 1), "y", tolerance("y"))
    assert_close(dx, hf_dx.transpose(0, 1), "x", tolerance("x"))
    # the gradients of the same function of the weights: those of transformers' layout, through the reordering
    expected = torch.autograd.grad([*reference_weights.values()], [*weights.values()], hf_grads)
    for name, grad, hf_grad in zip(weights, grads, expected, strict=True):
        assert_close(grad, hf_grad, name, tolerance(name))


def assert_gradients_in_fp32_are_close(flags: str, hidden_size: int, tolerance: float) -> None:
    """Compare the gradients of all weights in fp32 with those in fp64."""
    mixers = {dtype: mixer_of(flags, dtype) for dtype in (torch.float32, torch.float64)}
    grads = []
    for dtype, mixer in mixers.items():
        mixer.load_state_dict(mixers[torch.float32].state_dict())
        x, dy = random_x_and_dy(hidden_size, dtype)
        y = mixer(x, full_batch(), ForwardContext())
        grads.append(torch.autograd.grad(y, [*mixer.parameters()], dy))
    for (name, _), grad, expected in zip(mixer.named_parameters(), *grads, strict=True):
        assert_close(grad.double(), expected, name, tolerance)


def generate_in_passes(mixer: Any, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Compare passes of a few tokens with the full sequence, and return the state and the last inputs after them.

    Samples continue from different lengths, and the rest of a pass is padding.
    """
    mixer.eval()
    generator = torch.Generator().manual_seed(2)
    x_SBD = torch.randn(S, B, hidden_size, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        expected = mixer(x_SBD, full_batch(), ForwardContext())
        cache = KVCache(S)
        starts_B = torch.zeros(B, dtype=torch.int64)
        samples_B = torch.arange(B)
        for length, num_new in ((21, [21, 20, 2]), (1, [1, 1, 1]), (3, [3, 1, 0]), (4, [0, 4, 4]), (1, [1, 1, 1])):
            num_new_B = torch.tensor(num_new)
            positions_SB = starts_B + torch.arange(length)[:, None]
            cache.set_positions(positions_SB, torch.device("cpu"), num_new_B)
            is_new = torch.arange(length)[:, None] < num_new_B
            x = x_SBD[positions_SB, samples_B].where(is_new[..., None], 1e3)  # padding has other numbers
            y = mixer(x, full_batch(), ForwardContext(cache=cache))
            torch.testing.assert_close(y[is_new], expected[positions_SB, samples_B][is_new], rtol=1e-10, atol=1e-10)
            starts_B = starts_B + num_new_B
    return cache.states[0]


def layer_cost(flags: str, tp: int = 1, cp: int = 1, **options: Any) -> LayerCost:
    """Return the cost of the only layer of a model in bf16."""
    model = config_from(flags).model
    sharding = single_document_sharding(model, cp)
    setting = LayerSetting(tp, 1, torch.bfloat16, cp_sharding=sharding, **options)
    return layers_cost(layer_kinds(model), setting)


def collectives(cost: LayerCost, axis: str) -> Counter[Any]:
    """Return how often each (phase, collective, bytes) starts on an axis."""
    events = [event for event in cost.trace if isinstance(event, CommStart) and event.axis == axis]
    return Counter((event.phase, event.op, event.num_bytes) for event in events)


def collectives_of_one_gather(num_bytes: int) -> dict[Any, int]:
    """Return the collectives over tp of a layer that gathers its input once in forward, and twice in backward."""
    return {
        ("F", "all-gather", num_bytes): 1,
        ("F", "reduce-scatter", num_bytes): 1,
        ("B", "all-gather", num_bytes): 2,
        ("B", "reduce-scatter", num_bytes): 1,
    }


def collectives_of_maps(cp: int, map_bytes: int, state_bytes: int, borders: int) -> dict[Any, int]:
    """Return the collectives over cp of a layer that scans maps of states and gathers border tokens of these bytes.

    Each rank has one range, and cp is a power of two. A rank in the middle exchanges maps, and in the last round a
    state.
    """
    num_rounds = cp.bit_length() - 1
    expected = {("F", "all-gather", borders): 1, ("B", "reduce-scatter", borders): 1}
    for phase in "FB":
        expected[phase, "all-to-all", state_bytes] = 1
        if num_rounds > 1:
            expected[phase, "all-to-all", map_bytes] = num_rounds - 1
    return expected


def collectives_of_heads(to_heads: int, to_tokens: int) -> dict[Any, int]:
    """Return the collectives over cp of a layer that exchanges tokens for heads, and outputs for tokens."""
    return {(phase, "all-to-all", num_bytes): 1 for phase in "FB" for num_bytes in (to_heads, to_tokens)}
