"""The distributed optimizer equals torch's or the papers' on one process: updates, global norm, saved pieces."""

import datetime
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from full_tensors import OwnedShard, assemble, box_view, owned_shards
from ranks import run_ranks
from torch import Tensor, nn

from megalite.kernels.newton_schulz import coefficients
from megalite.optim.adamw import AdamW
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.lamb import Lamb, Lars
from megalite.optim.muon import Muon
from megalite.optim.sgd import SGD
from megalite.optim.update_rule import UpdateRule
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.parallel.spec import ParamSpec

# ---- Muon, LAMB and LARS on full tensors in one process, as defined in their papers
TWO_MOMENTS = ("exp_avg", "exp_avg_sq")


def orthogonalised(u: Tensor, rule: Muon) -> Tensor:
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficients(rule.coefficient_type, rule.steps):
        s = a * s + b * s**3 + c * s**5
    m, n = u.shape
    scales = {"spectral": max(m, n), "shape_scaling": max(1, m / n), "unit_rms_norm": m / n}
    return left @ torch.diag(s) @ right * scales[rule.scale_mode] ** 0.5 * rule.extra_scale


def update_(
    rule: UpdateRule, w: Tensor, g: Tensor, state: dict[str, Tensor], *, lr: float, decay: float, step: int
) -> None:
    """Update one tensor by the rule's definition; the first step fills `state`."""
    if isinstance(rule, Muon):
        m = state["momentum_buffer"] = rule.momentum * state.get("momentum_buffer", 0) + (1 - rule.momentum) * g
        u = (1 - rule.momentum) * g + rule.momentum * m if rule.nesterov else m
        w -= lr * decay * w + lr * orthogonalised(u, rule)
    elif isinstance(rule, Lars):
        norms = w.norm(), g.norm()
        ratio = rule.trust_coefficient * norms[0] / (norms[1] + decay * norms[0]) if min(norms) > 0 else 1
        v = state["velocity"] = rule.momentum * state.get("velocity", 0) + lr * ratio * (g + decay * w)
        w -= v
    else:
        betas, powers = rule.betas, (g, g * g)  # type: ignore[attr-defined]
        for name, b, power in zip(TWO_MOMENTS, betas, powers, strict=True):
            state[name] = b * state.get(name, 0) + (1 - b) * power
        first, second = (state[name] / (1 - b**step) for name, b in zip(TWO_MOMENTS, betas, strict=True))
        u = first / (second.sqrt() + rule.eps) + decay * w  # type: ignore[attr-defined]
        norms = w.norm(), u.norm()
        w -= lr * u * (norms[0] / norms[1] if isinstance(rule, Lamb) and min(norms) > 0 else 1)


# ---- the optimizer
ADAMW = AdamW((0.8, 0.95), 1e-6)
RULES: dict[str, tuple[UpdateRule, UpdateRule | None]] = {  # the second is for matrices
    "adamw": (ADAMW, None),
    "sgd": (SGD(0.9), None),
    "plain sgd": (SGD(0.0), None),
    "muon": (ADAMW, Muon(steps=8, coefficient_type="polar_express")),
    "muon, nesterov": (ADAMW, Muon(0.9, True, 10, "quintic", "unit_rms_norm", 0.3)),
    "muon, shape": (ADAMW, Muon(0.8, False, 3, "simple", "shape_scaling")),
    "lamb": (Lamb((0.8, 0.95), 1e-6), None),
    "lars": (Lars(0.9, 0.1), None),
}
FULL_TENSOR_RULES = [
    name for name, (rule, _) in RULES.items() if name.startswith("muon") or not isinstance(rule, AdamW | SGD)
]
LR, DECAY, SCALE, STEPS = 0.05, 0.3, 0.25, 5
SHAPES = {"word": (12, 11), "norm": (11,), "up": (18, 11), "up_bias": (18,), "down": (11, 18)}
TP_FACTS: dict[str, Any] = dict.fromkeys(("word", "up", "up_bias"), {"shards": ((0, "tp"),)})
TP_FACTS |= {"norm": {"partial_grad_axes": ("tp",)}, "down": {"shards": ((1, "tp"),)}}
STAGES = [["word", "norm", "up"], ["up_bias", "down", "word"]]  # of a pipeline of 2 with a tied word embedding


@dataclass(frozen=True)
class Case:
    world: int
    tp: int = 1
    pp: int = 1
    num_optimizer_instances: int | None = 1


CASES = {
    "alone": Case(1),
    "dp3": Case(3),
    "dp2 ddp": Case(2, num_optimizer_instances=None),
    "dp4 in 2 instances": Case(4, num_optimizer_instances=2),
    "tp2 dp2": Case(4, tp=2),
    "pp2 dp2 tied": Case(4, pp=2),
    "tp2 pp2 ddp": Case(4, tp=2, pp=2, num_optimizer_instances=None),
}


def _values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return values if seed else values | {"up_bias": torch.zeros(SHAPES["up_bias"], dtype=torch.float64)}


def _local(full: Tensor, spec: ParamSpec, mesh: Mesh) -> Tensor:
    return box_view(full, spec.box(mesh.sizes, mesh.coordinates))


def _optimizer(case: Case, rule: str, dtype: torch.dtype) -> DistributedOptimizer:
    sizes, limit = (
        dict(tp=case.tp, pp=case.pp, num_optimizer_instances=case.num_optimizer_instances),
        datetime.timedelta(seconds=20),
    )
    mesh = build_mesh(**sizes, dp_cp_tp=rule in FULL_TENSOR_RULES, device=torch.device("cpu"), timeout=limit)
    stage = nn.Module()
    for name in STAGES[mesh.pp.rank] if case.pp > 1 else SHAPES:
        facts = TP_FACTS[name] if case.tp > 1 else {}
        spec = ParamSpec(
            name, SHAPES[name], weight_decay=len(SHAPES[name]) > 1, tied=case.pp > 1 and name == "word", **facts
        )
        parameter = nn.Parameter(_local(_values(0)[name], spec, mesh).to(dtype).contiguous())
        parameter.spec = spec  # type: ignore[attr-defined]
        stage.register_parameter(name, parameter)
    sync = BucketSync([stage], mesh, bucket_size=100, matrices=RULES[rule][1] is not None)
    return DistributedOptimizer(sync, *RULES[rule])


def _step(optimizer: DistributedOptimizer, step: int) -> float:
    """Take one step, in which each rank adds its summand of the full gradient, and return the squared norm."""
    sync, mesh = optimizer.sync, optimizer.sync.mesh
    for bucket in sync.layout.buckets:
        summands = mesh.dp.size * (2 if bucket.key.tied else 1) * (mesh.tp.size if bucket.key.partial_grad_axes else 1)
        for slot in bucket.slots:
            spec = sync.layout.entries[slot.entry].spec
            part = _local(_values(100 + step)[spec.name], spec, mesh)
            grad, _ = sync.main_grads[spec.name].accumulator()
            grad.copy_(part / summands)
    sync.finish_grad_sync()
    norm_sq = float(all_reduce_(optimizer.local_norm_sq(), mesh.world))
    optimizer.step(lr=LR, weight_decay=DECAY, scale=SCALE)
    sync.start_param_sync()
    return norm_sq


def _run(case: Case, rule: str, dtype: torch.dtype) -> tuple[list[float], list[OwnedShard], dict[str, np.ndarray]]:
    """Return squared norms, the owned pieces, and this rank's full weights as the modules see them."""
    optimizer = _optimizer(case, rule, dtype)
    norms = [_step(optimizer, step) for step in range(STEPS)]
    optimizer.sync.wait_param_sync()
    weights = {}
    for bucket in optimizer.sync.param_buckets:
        for name, slot in zip(bucket.names, bucket.layout.slots, strict=True):
            weights[name] = bucket.param_view(slot).double().numpy()
    return norms, owned_shards(optimizer), weights


def _runs(case: Case, rule: str, dtype: torch.dtype) -> list[Any]:
    return run_ranks(case.world, _run, case, rule, dtype) if case.world > 1 else [_run(case, rule, dtype)]


def _assemble(runs: list[Any], prefix: str) -> dict[str, np.ndarray]:
    """Return the full tensors, assembled from the pieces that the ranks own."""
    pieces = [piece for _, owned_pieces, _ in runs for piece in owned_pieces if piece[0].startswith(prefix + "/")]
    return {name.removeprefix(prefix + "/"): full.numpy() for name, full in assemble(pieces).items()}


def _paper_reference(rule: str, main: torch.dtype) -> dict[str, dict[str, np.ndarray]]:
    """Return the same as `_reference`, by the rules' definitions on full tensors."""
    weights, states = {name: value.to(main) for name, value in _values(0).items()}, {name: {} for name in SHAPES}
    for step in range(STEPS):
        for name, w in weights.items():
            update_rule, g = RULES[rule][w.dim() > 1] or RULES[rule][0], _values(100 + step)[name].to(main) * SCALE
            update_(update_rule, w, g, states[name], lr=LR, decay=DECAY * (w.dim() > 1), step=step + 1)
    result = {"model": {name: w.numpy() for name, w in weights.items()}}
    for name, kind, values in ((name, *item) for name, state in states.items() for item in state.items()):
        result.setdefault(f"optimizer.{kind}", {})[name] = values.numpy()
    return result


def _reference(rule: str, start: torch.dtype, main: torch.dtype) -> dict[str, dict[str, np.ndarray]]:
    """Run torch's optimizer in `main` from weights rounded to `start`: {"model": ..., "optimizer.STATE": ...}."""
    if rule in FULL_TENSOR_RULES:
        return _paper_reference(rule, main)
    weights = {name: nn.Parameter(value.to(start).to(main)) for name, value in _values(0).items()}
    groups = [
        {"params": [p for p in weights.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in weights.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference: torch.optim.Optimizer
    if rule == "adamw":
        reference = torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.95), eps=1e-6)
    else:
        reference = torch.optim.SGD(groups, lr=LR, momentum=0.9 if rule == "sgd" else 0.0)
    for step in range(STEPS):
        for name, p in weights.items():
            p.grad = _values(100 + step)[name].to(main) * SCALE
        reference.step()
    result = {"model": {name: p.detach().numpy() for name, p in weights.items()}}
    for state in RULES[rule][0].state_dtypes:
        result[f"optimizer.{state}"] = {name: reference.state[p][state].numpy() for name, p in weights.items()}
    return result


def _close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=bound, atol=bound, err_msg=name)


@pytest.mark.parametrize(
    ("rule", "name"),  # all layouts for a rule of each sort, two for the others
    [(rule, name) for rule in ("adamw", "muon", "lamb", "lars") for name in CASES]
    + [(rule, name) for rule in RULES if rule not in ("adamw", "muon", "lamb", "lars") for name in ("alone", "dp3")],
)
def test_update_equals_torch_or_the_papers_in_fp64(rule: str, name: str) -> None:
    runs = _runs(CASES[name], rule, torch.float64)
    for step in range(STEPS):
        expected = sum(float(g.square().sum()) for g in _values(100 + step).values())
        for norms, _, _ in runs:
            assert norms[step] == pytest.approx(expected, rel=1e-13)
    for prefix, expected in _reference(rule, torch.float64, torch.float64).items():
        _close(_assemble(runs, prefix), expected, 1e-10 if rule in FULL_TENSOR_RULES else 1e-13)


def test_bf16_weights_are_rounded_main_weights() -> None:
    """Five steps of AdamW in fp32 are sharded over 3 ranks; an update in bf16 would miss by 1e-2."""
    runs = _runs(CASES["dp3"], "adamw", torch.bfloat16)
    expected = _reference("adamw", torch.bfloat16, torch.float32)
    main = _assemble(runs, "optimizer.main")
    _close(main, expected["model"], 1e-5)
    for name, values in main.items():
        rounded = torch.from_numpy(values).float().bfloat16().double().numpy()
        for _, _, weights in runs:  # gathered: every rank has full weights
            np.testing.assert_array_equal(weights[name], rounded.ravel(), err_msg=name)
