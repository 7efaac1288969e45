"""What a run will look like on its ranks, before there are any: layers, memory, bubble, groups.

A pure function of the configuration, the number of ranks and the vocabulary. Stages are built without memory (on the
meta device) and laid out as optim/buffer.py does it, so weights, gradients and optimizer are the bytes that the run
takes. Activations are what the schedule has in flight of what a stage saves (models/flops.py); not counted: the buffers
of one layer's computation and of the loss's chunk, messages, CUDA and NCCL.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megalite.config.options import Config, OptimConfig, padded_vocab_size
from megalite.models.flops import head_flops, layer_flops, stage_saved
from megalite.optim.buffer import lay_out_chunks
from megalite.optim.flat_storage import main_dtype
from megalite.parallel.mesh import PLANNED, Axis, Mesh, rank_grid
from megalite.parallel.spec import ParamSpec
from megalite.pipeline.schedule import group_sizes, plan
from megalite.pipeline.simulate import in_flight, simulate
from megalite.train.setup import batch_sizes, build_stages, layers_of_stages, params_dtype, recompute_of

LONG = 3  # groups of micro-batches that are simulated; of more the rest is like the last
MOST_ROWS = 16  # of the table of memory


@dataclass(frozen=True)
class Holding:
    """What each rank of one pipeline position has, in bytes. `in_flight`: forwards of a chunk that wait for their
    backward, at most."""

    layers: tuple[range, ...]
    parameters: int  # local ones
    weights: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations


@dataclass(frozen=True)
class Arrangement:
    """`parameters`: of the whole model, each once, without padding. `bubble`: share of the time that ranks idle, equal
    layers taken as equally fast. `holdings`: one per pipeline rank."""

    world: int
    tp: int
    pp: int
    dp: int
    stages: tuple[range, ...]
    microbatches: int
    parameters: int
    padded_vocab: int
    bubble: float
    holdings: tuple[Holding, ...]
    groups: dict[str, tuple[int, ...]]  # of rank 0, by axis

    @property
    def worst(self) -> int:
        """The pipeline rank that holds the most weights, gradients and optimizer."""
        return max(range(self.pp), key=lambda r: self.holdings[r].state)

    @property
    def largest(self) -> int:
        """The pipeline rank that takes the most memory."""
        return max(range(self.pp), key=lambda r: self.holdings[r].total)


def arrange(config: Config, world: int, vocab_size: int) -> Arrangement:
    """The arrangement of `world` ranks, a multiple of tp x pp."""
    m, p, t = config.model, config.parallel, config.train
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    dp = world // (tp * pp)
    microbatches = batch_sizes(config, dp).final // (t.micro_batch_size * dp)
    padded = padded_vocab_size(vocab_size, m.make_vocab_size_divisible_by, tp)
    stages = layers_of_stages(config, padded)
    size = params_dtype(config).itemsize
    tokens = m.seq_length * t.micro_batch_size
    saved = [stage_saved(m, len(s), i == len(stages) - 1, recompute_of(config), size, tp) for i, s in enumerate(stages)]
    head = head_flops(m, padded) / layer_flops(m, m.seq_length)
    costs = [len(layers) + (head if i == len(stages) - 1 else 0.0) for i, layers in enumerate(stages)]
    bubble, alive = _run_schedule(config, microbatches, costs, [round(kept * tokens) for kept, _ in saved])
    names: dict[str, int] = {}
    holdings = []
    for rank in range(pp):
        mesh = Mesh(pp=Axis("pp", pp, rank, PLANNED), dp=Axis("dp", dp, 0, PLANNED), tp=Axis("tp", tp, 0, PLANNED))
        specs, elements, owned = _stage_elements(config, mesh, vocab_size)
        names |= {spec.name: math.prod(spec.stored_shape) for spec, _ in specs}
        wide = main_dtype(params_dtype(config)).itemsize
        main = 0 if wide == size else wide
        again = max(more for _, more in saved[rank::pp])
        holdings.append(
            Holding(
                layers=tuple(stages[rank::pp]),
                parameters=sum(numel for _, numel in specs),
                weights=elements * size,
                gradients=elements * wide,
                optimizer=owned * (main + state_bytes(config.optim)),
                activations=alive[rank][1] + round(again * tokens),
                in_flight=alive[rank][0],
            )
        )
    grid = rank_grid(world, tp, pp, dp_outermost=p.use_tp_pp_dp_mapping)
    groups = {
        "tp": tuple(grid[0][0][0]),
        "dp": tuple(column[0][0] for column in grid[0]),
        "pp": tuple(plane[0][0][0] for plane in grid),
    }
    total = sum(names.values())
    return Arrangement(world, tp, pp, dp, tuple(stages), microbatches, total, padded, bubble, tuple(holdings), groups)


def runs(counts: Iterable[int]) -> str:
    """Equal neighbours together.

    >>> runs([4, 4, 4, 5, 2])
    '3 x 4, 5, 2'
    """
    same = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in same)


def groups_of(plan: Arrangement, local_world: int) -> dict[str, str]:
    """Lines about the groups that rank 0 is in, on nodes of `local_world` ranks; {} where there is one node."""
    if plan.world <= local_world:
        return {}

    def where(ranks: Sequence[int]) -> str:
        nodes = len({rank // local_world for rank in ranks})
        shown = list(map(str, ranks)) if len(ranks) <= 4 else [*map(str, ranks[:2]), "..", str(ranks[-1])]
        return f"{' '.join(shown)} ({f'{nodes} nodes' if nodes > 1 else 'node 0'})"

    said = ", ".join(f"{name} {where(ranks)}" for name, ranks in plan.groups.items() if len(ranks) > 1)
    lines = {"groups of rank 0": f"{said}; nodes of {local_world} ranks" if said else ""}
    if local_world % plan.tp:
        fits = max(n for n in range(1, min(plan.tp, local_world) + 1) if local_world % n == 0)
        lines["warning"] = (
            f"tensor_model_parallel_size={plan.tp} crosses nodes of {local_world} ranks: each layer waits for the "
            f"network four times; use {fits}, or start {plan.tp} ranks per node"
        )
    return lines


def memory_rows(plan: Arrangement) -> list[tuple[str, ...]]:
    """A table of GiB per pipeline rank, its head first; of more than MOST_ROWS the largest, and the least and the most
    of all."""
    head = ("GiB per rank", "layers", "weights", "gradients", "optimizer", "activations", "in flight", "all")

    def row(name: str, layers: str, some: Sequence[Holding]) -> tuple[str, ...]:
        cells = []
        for kind in ("weights", "gradients", "optimizer", "activations", "in_flight", "total"):
            values = [getattr(holding, kind) for holding in some]
            ends = [values[0]] if len(some) == 1 else [min(values), max(values)]
            cells.append(" - ".join(str(v) if kind == "in_flight" else f"{v / 2**30:.2f}" for v in ends))
        return name, layers, *cells

    def of_rank(i: int) -> tuple[str, ...]:
        holding = plan.holdings[i]
        return row(f"pipeline rank {i}" if plan.pp > 1 else "", runs(map(len, holding.layers)), [holding])

    if plan.pp <= MOST_ROWS:
        return [head, *(of_rank(i) for i in range(plan.pp))]
    return [head, of_rank(plan.largest), row(f"all {plan.pp}", "", plan.holdings)]


def state_bytes(optim: OptimConfig) -> int:
    """Of the optimizer's states, per parameter."""
    if optim.optimizer == "sgd":
        return 4
    return sum(2 if dtype == "bf16" else 4 for dtype in (optim.exp_avg_dtype, optim.exp_avg_sq_dtype))


def _stage_elements(config: Config, mesh: Mesh, vocab_size: int) -> tuple[list[tuple[ParamSpec, int]], int, int]:
    """Of the rank at `mesh`: its parameters and their local elements; elements of the flat tensors, padding included;
    how many of these it updates."""
    chunks = build_stages(config, mesh, vocab_size, params_dtype(config), meta=True)
    decoupled = config.optim.decoupled_lr is not None
    _, layout = lay_out_chunks(chunks, mesh, config.parallel.ddp_bucket_size, decoupled)
    share = mesh.dp.size if config.parallel.use_distributed_optimizer else 1
    return [(e.spec, e.numel) for e in layout.entries], layout.size, layout.size // share


def _run_schedule(
    config: Config, microbatches: int, costs: Sequence[float], saved: Sequence[int]
) -> tuple[float, list[tuple[int, int]]]:
    """The bubble; and per pipeline rank how many forwards are in flight, and their bytes."""
    p = config.parallel
    pp, vpp = p.pipeline_model_parallel_size, len(costs) // p.pipeline_model_parallel_size
    group = group_sizes(microbatches, pp, p.microbatch_group_size_per_virtual_pipeline_stage)[0]

    def run(m: int) -> tuple[float, list[tuple[int, int]]]:
        size = p.microbatch_group_size_per_virtual_pipeline_stage if m == microbatches else group
        rows = plan(p.pipeline_schedule, pp, m, vpp, size)
        sizes = dict(enumerate(saved))
        return simulate(rows, costs=costs).end, [(in_flight(row), in_flight(row, sizes)) for row in rows]

    m = microbatches if microbatches <= LONG * group else LONG * group
    end, alive = run(m)
    if m < microbatches:  # what one more group adds is what all the others add
        _, before = run(m - group)
        more = (microbatches - m) / group
        alive = [
            (round(now[0] + (now[0] - then[0]) * more), round(now[1] + (now[1] - then[1]) * more))
            for now, then in zip(alive, before, strict=True)
        ]
        end += (microbatches - m) * 3.0 * max(sum(costs[rank::pp]) for rank in range(pp))
    return max(0.0, 1.0 - microbatches * 3.0 * sum(costs) / (pp * end)), alive  # rounding: not -0.0%
