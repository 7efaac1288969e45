"""Which layouts of a model fit on a cluster, and how fast a step of each would be, the fastest first.

candidates   tp within a node, pp, chunks, micro-batch, recompute, split backward; what check() refuses is counted
bound        a time and a memory that no balance of its stages is below
estimate     the arrangement with the stages that its run will have, its memory and its simulated step, for the
             lowest bounds first, until `wanted` are found and no bound is below the SURE best of them
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tools.planning.bounds import least_memory, least_time
from tools.planning.memory import RankMemory, memory
from tools.planning.request import Request, problems_of, with_options

if TYPE_CHECKING:
    from megalite.config.options import Config
    from megalite.train.arrangement import Arrangement
    from megalite.train.holding import ModuleBytes
    from tools.planning.profile import Profile
    from tools.planning.step_time import StepTime

MICRO_BATCHES = (1, 2, 4, 8)
FEW_CHUNKS, MOST_CHUNKS = 8, 16
HOW_AGAIN: Mapping[str, Mapping[str, Any]] = MappingProxyType(  # options of what is recomputed
    {
        "none": {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
)
SURE = 3  # plans that nothing is faster than but what is shown; those behind them are the best that were simulated
MOST = 60  # plans that are simulated: a few tenths of a second each
USABLE = 0.9  # of a device's memory: CUDA's context, NCCL's buffers and what lies in pieces take the rest


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    split: bool = False
    sharded: bool = True
    ends: bool = False  # embedding and head each take the place of a layer

    def __str__(self) -> str:
        chunks = f" vpp {self.vpp}" if self.vpp > 1 else ""
        more = [self.recompute] * (self.recompute != "none") + ["split"] * self.split + ["ends"] * self.ends
        more += [] if self.sharded else ["ddp"]
        return " ".join([f"tp {self.tp} pp {self.pp}{chunks} mb {self.micro_batch}", *more])


def applied(layout: Layout, config: Config) -> Config:
    """`config` with this layout; as it is, where it has it already: options that a Layout does not know stay."""
    if layout == layout_of(config):
        return config
    kept = layout.recompute == (config.train.recompute_granularity or "none")
    return with_options(
        config,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        num_virtual_stages_per_pipeline_rank=layout.vpp if layout.vpp > 1 else None,
        account_for_embedding_in_pipeline_split=layout.ends,
        account_for_loss_in_pipeline_split=layout.ends,
        micro_batch_size=layout.micro_batch,
        split_backward=layout.split,
        use_distributed_optimizer=layout.sharded,
        **({} if kept else HOW_AGAIN[layout.recompute]),
    )


def layout_of(config: Config) -> Layout:
    """Of a configuration that names one."""
    from megalite.config.stage_layers import given_stages

    p, t = config.parallel, config.train
    pp = p.pipeline_model_parallel_size
    given = given_stages(config.model.num_layers, p)
    vpp = len(given) // pp if given is not None else p.num_virtual_stages_per_pipeline_rank or 1
    how = (t.recompute_granularity or "none", p.split_backward, p.use_distributed_optimizer)
    ends = p.account_for_embedding_in_pipeline_split and p.account_for_loss_in_pipeline_split
    return Layout(p.tensor_model_parallel_size, pp, vpp, t.micro_batch_size, *how, ends)


@dataclass(frozen=True)
class Planned:
    """`made`: with the stages that a run would have."""

    layout: Layout
    made: Arrangement
    memory: list[RankMemory]
    time: StepTime

    @property
    def fullest(self) -> int:
        """The pipeline rank that takes the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].peak)

    @property
    def peak(self) -> int:
        return self.memory[self.fullest].peak


@dataclass
class Found:
    """plans: those that fit, the fastest first. too_large: (bytes, layout) of the least that does not fit."""

    limit: float
    plans: list[Planned] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    candidates: int = 0
    simulated: int = 0
    too_large: int = 0
    least: tuple[float, Layout] | None = None
    left: int = 0  # bounds below the best that were not looked at

    def refuse(self, problems: list[str]) -> None:
        for problem in problems:
            kind = re.sub(r"\d[\d, ]*", "N ", problem)
            self.refused[kind] += 1
            self.examples.setdefault(kind, problem)

    def over(self, size: float, layout: Layout) -> None:
        self.too_large += 1
        if self.least is None or size < self.least[0]:
            self.least = (size, layout)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def grid(request: Request) -> Iterator[Layout]:
    """Every (tp, pp, chunks, micro-batch), the wrong ones included: check() says why."""
    c, m = request.cluster, request.config.model
    fixed = layout_of(request.config)
    pick = lambda name, values, one: (one,) if name in request.fixed else values  # noqa: E731
    batches = pick("micro_batch_size", MICRO_BATCHES, fixed.micro_batch)
    for tp in divisors(c.per_node):
        for pp in divisors(c.world // tp):
            if pp > 2 * m.num_layers:  # one size too many tells the reason
                break
            cuts = [(vpp, False) for vpp in (_chunks(m.num_layers, pp) if pp > 1 else [1])]
            if pp > 1 and (m.num_layers + 2) % pp == 0:
                cuts += [(vpp, True) for vpp in _chunks(m.num_layers + 2, pp) if (m.num_layers + 2) // pp % vpp == 0]
            for (vpp, ends), micro in itertools.product(cuts, batches):
                if vpp == fixed.vpp or "num_virtual_stages_per_pipeline_rank" not in request.fixed:
                    yield Layout(tp, pp, vpp, micro, sharded=fixed.sharded, ends=ends)


def _chunks(layers: int, pp: int) -> list[int]:
    """Of each pipeline rank: any few, and more where they divide its layers."""
    each = layers // pp
    return [n for n in range(1, each + 1) if n <= FEW_CHUNKS or (n <= MOST_CHUNKS and layers % (pp * n) == 0)] or [1]


def variants(layout: Layout, request: Request) -> Iterator[Layout]:
    """Of one that holds: how much is recomputed, whether backward is split."""
    fixed = layout_of(request.config)
    kinds = (fixed.recompute,) if "recompute_granularity" in request.fixed else tuple(HOW_AGAIN)
    splits = (fixed.split,) if "split_backward" in request.fixed else (False, True) if layout.pp > 1 else (False,)
    for kind, split in itertools.product(kinds, splits):
        yield replace(layout, recompute=kind, split=split)


def arranged(layout: Layout, request: Request) -> Arrangement:
    from megalite.train.arrangement import Arrangement

    return Arrangement(applied(layout, request.config), request.cluster.world, request.vocab_size)


def search(
    request: Request,
    profile: Profile | None = None,
    *,
    wanted: int = 10,
    usable: float = USABLE,
    most: int = MOST,
    tell: Callable[[int, float], None] = lambda done, best: None,
) -> Found:
    """`wanted`: plans to be found. `usable`: share of a device's memory. `most`: plans to be simulated. `tell`: how
    many have been, and the least seconds."""
    found = Found(limit=usable * request.cluster.device.memory_bytes)
    bounds = _bounded(request, profile, found)
    while bounds and found.simulated < most:
        bound, _, layout = heapq.heappop(bounds)
        if len(found.plans) >= wanted and bound > found.plans[min(SURE, wanted) - 1].time.seconds:
            bounds = []
            break
        _estimate(layout, request, profile, found)
        tell(found.simulated, found.plans[0].time.seconds if found.plans else 0.0)
    if not request.is_layout and "use_distributed_optimizer" not in request.fixed:
        for plan in found.plans[:SURE]:  # what does not share out the optimizer's state takes more memory
            if plan.made.dp > 1:
                _estimate(replace(plan.layout, sharded=False), request, profile, found)
    found.left = sum(bound < found.plans[0].time.seconds for bound, *_ in bounds) if found.plans else len(bounds)
    return found


def _bounded(request: Request, profile: Profile | None, found: Found) -> list[tuple[float, int, Layout]]:
    """A heap of (seconds, number, layout) of what can be built and may fit."""
    from tools.planning.cost import Costs
    from tools.planning.profile import default_profile

    used = profile or default_profile(request.cluster.device.name)
    bounds: list[tuple[float, int, Layout]] = []
    states: dict[tuple[int, int, bool], ModuleBytes] = {}
    for layout in [layout_of(request.config)] if request.is_layout else grid(request):
        found.candidates += 1
        problems = problems_of(applied(layout, request.config), request.cluster.world)
        if problems:
            found.refuse(problems)
            continue
        for one in [layout] if request.is_layout else variants(layout, request):
            made = arranged(one, request)
            key = (one.tp, made.dp, one.sharded)
            if key not in states:
                states[key] = made.module_bytes
            size = least_memory(made, states[key])
            if size > found.limit and not request.is_layout:
                found.over(size, one)
                continue
            bounds.append((least_time(made, Costs(made, request.cluster, used)), len(bounds), one))
    heapq.heapify(bounds)
    return bounds


def _estimate(layout: Layout, request: Request, profile: Profile | None, found: Found) -> None:
    if problems := problems_of(applied(layout, request.config), request.cluster.world):
        found.refuse(problems)
        return
    limit = float("inf") if request.is_layout else found.limit
    plan = planned(layout, request, profile, limit)
    if isinstance(plan, int):
        found.over(plan, layout)
        return
    found.simulated += 1
    found.plans.append(plan)
    found.plans.sort(key=lambda one: (one.time.seconds, one.peak))


def planned(layout: Layout, request: Request, profile: Profile | None, limit: float = float("inf")) -> Planned | int:
    """One layout, with the stages that a run would have; bytes of its fullest rank where these are above the limit."""
    from tools.planning.step_time import step_time

    made = arranged(layout, request)
    held = memory(made)
    peak = max(one.peak for one in held)
    if peak > limit:
        return peak
    return Planned(layout, made, held, step_time(made, request.cluster, profile))
