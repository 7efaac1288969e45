"""Which layouts of a model fit on a cluster, and how fast a step of each would be, the fastest first.

candidates   tp in a node, pp, cp if LONG, ep, chunks, micro-batch, recompute, split backward; what is refused is told
ZeRO         stage 1; what is too large for it and may be faster than all that fits, at stage 2, or if need be 3
bound        a time and a memory that no balance of its stages is below
estimate     the arrangement with the stages that its run will have, its memory and its simulated step: of the lowest
             bounds, until the fastest is sure; then of the plainest that may be as good, until the best is sure; then
             of the lowest bound of other rows
best         the plainest of those that cannot be told from the fastest, as published steps are off by TOLERANCE; where
             it leaves less than ROOM of the memory free, the plainest that leaves more and takes no longer
row          of one tp, pp, cp, ep and sharding the best, and the fastest
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalite.config.options import Config
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.config.problems import divisors
from megalite.planning.cluster import DeviceProfile, default_profile
from megalite.planning.memory import RankMemory, rank_memory
from megalite.planning.model_state import ModuleStateBytes
from megalite.planning.run_plan import RunPlan
from megalite.planning.stage_time import TimeModel
from megalite.planning.step_time import StepTime, predict_step
from tools.planning.lower_bounds import least_exchange, least_memory, least_time
from tools.planning.plan_request import SHARING, Request, problems_of, with_options
from tools.planning.published_runs import TOLERANCE

MICRO_BATCHES = (1, 2, 4, 8)
FEW_CHUNKS, MOST_CHUNKS = 8, 16
LONG, CONTEXTS = 32_768, (1, 2, 4, 8, 16)  # tokens of a sequence that ranks of cp may share, and how many
HOW_AGAIN: Mapping[str, Mapping[str, Any]] = {  # options of what is recomputed
    "none": {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
TWINS = 3  # rows that are looked at without a sharded optimizer, too
ALIKE = 0.02  # between seconds that are taken as equal: of bounds of a row so close the plainest is simulated for it
MOST = 60  # plans that are simulated: a few tenths of a second each
ROOM = 0.05  # of the memory that is planned with: with less left free, a layout may not fit, or not for the whole run
USABLE = 0.9  # of a device's memory: CUDA's context, NCCL's buffers and what lies in pieces take the rest


States = dict[tuple[int, int, int, int], ModuleStateBytes]  # by tp, dp x cp, ep and ZeRO stage


class Layout(NamedTuple):
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    split: bool = False
    zero: int = 1
    ends: bool = False  # embedding and head each take the place of a layer
    cp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        sizes = {"vpp": self.vpp, "cp": self.cp, "ep": self.ep}
        chunks = "".join(f" {name} {size}" for name, size in sizes.items() if size > 1)
        words = [f"tp {self.tp} pp {self.pp}{chunks} mb {self.micro_batch}"]
        if self.recompute != "none":
            words.append(self.recompute)
        if self.split:
            words.append("split")
        if self.ends:
            words.append("ends")
        if self.zero != 1:
            words.append(f"zero {self.zero}" if self.zero else "ddp")
        return " ".join(words)

    def moving_parts(self, layers: int) -> int:
        """How many features it has beyond plain data parallelism; stages of unlike size count as one."""
        uneven = (layers + 2 * self.ends) % (self.pp * self.vpp) > 0
        several = (self.tp > 1, self.pp > 1, self.cp > 1, self.ep > 1, self.vpp > 1, self.recompute != "none")
        return sum((*several, uneven, self.split, self.ends, self.zero != 1))

    @property
    def row(self) -> tuple[int, ...]:
        return self.tp, self.pp, self.zero, self.cp, self.ep


def applied(layout: Layout, config: Config) -> Config:
    """`config` with this layout; as it is, where it has it already: options that a Layout does not know stay."""
    if layout == layout_of(config):
        return config
    kept = layout.recompute == (config.train.recompute_granularity or "none")
    return with_options(
        config,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        num_virtual_stages_per_pipeline_rank=layout.vpp if layout.vpp > 1 else None,
        account_for_embedding_in_pipeline_split=layout.ends,
        account_for_loss_in_pipeline_split=layout.ends,
        micro_batch_size=layout.micro_batch,
        split_backward=layout.split,
        use_distributed_optimizer=layout.zero > 0,
        zero_stage=layout.zero if layout.zero > 1 else None,
        use_megatron_fsdp=False,
        data_parallel_sharding_strategy=None,
        **({} if kept else HOW_AGAIN[layout.recompute]),
    )


def layout_of(config: Config) -> Layout:
    """The layout that a configuration names."""
    p, t = config.parallel, config.train
    pp = p.pipeline_model_parallel_size
    given = explicit_stage_layers(config.model.num_layers, p)
    vpp = len(given) // pp if given is not None else p.num_virtual_stages_per_pipeline_rank or 1
    how = (t.recompute_granularity or "none", p.split_backward, p.effective_zero_stage)
    ends = p.account_for_embedding_in_pipeline_split and p.account_for_loss_in_pipeline_split
    more = p.context_parallel_size, p.expert_model_parallel_size
    return Layout(p.tensor_model_parallel_size, pp, vpp, t.micro_batch_size, *how, ends, *more)


class Planned(NamedTuple):
    """`made`: with the stages that a run would have."""

    layout: Layout
    made: RunPlan
    memory: list[RankMemory]
    time: StepTime

    @property
    def fullest(self) -> int:
        """The pipeline rank that takes the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].peak)

    @property
    def moving_parts(self) -> int:
        return self.layout.moving_parts(self.made.config.model.num_layers)

    @property
    def peak(self) -> int:
        return self.memory[self.fullest].peak


class Bound(NamedTuple):
    """What no balance of a layout's stages is below."""

    seconds: float
    peak: float
    layout: Layout

    def order(self, layers: int) -> tuple[int, float]:
        """That of Found.order, of those that cannot be told from the fastest."""
        return self.layout.moving_parts(layers), self.seconds


class Choice(NamedTuple):
    """The plans that stand for one row."""

    best: Planned
    fastest: Planned


@dataclass
class Found:
    """plans: those that fit, the fastest first. refused: how many layouts each reason keeps out. least: (bytes, layout)
    of what does not fit."""

    limit: float
    plans: list[Planned] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    candidates: int = 0
    impossible: int = 0  # of these, as are the next two
    simulated: int = 0
    too_large: int = 0
    least: tuple[float, Layout] | None = None
    large: list[Layout] = field(default_factory=list)  # by what is counted or by its bound
    left: int = 0  # bounds below the fastest that were not looked at

    @property
    def equal_s(self) -> float:
        """Seconds up to which a step cannot be told from the fastest."""
        return (1 + TOLERANCE) * self.plans[0].time.seconds

    def order(self, plan: Planned) -> tuple[bool, int, float]:
        """By moving parts up to `equal_s`, beyond by time alone."""
        slow = plan.time.seconds > self.equal_s
        return slow, 0 if slow else plan.moving_parts, plan.time.seconds

    @property
    def plainest(self) -> Planned:
        return min(self.plans, key=self.order)

    def is_tight(self, peak: float) -> bool:
        return peak > (1 - ROOM) * self.limit

    def pick(self, plans: Sequence[Planned]) -> Planned:
        """The best: the first in `order`, or if it is a tight fit the first that is none and takes no longer."""
        first, *others = sorted(plans, key=self.order)
        if not self.is_tight(first.peak):
            return first
        longest = (1 + ALIKE) * first.time.seconds
        as_fast = (one for one in others if one.time.seconds <= longest and not self.is_tight(one.peak))
        return next(as_fast, first)

    def choices(self) -> list[Choice]:
        """The best first, the others in order."""
        rows: dict[tuple[int, ...], list[Planned]] = defaultdict(list)
        for plan in self.plans:
            rows[plan.layout.row].append(plan)
        found = [Choice(self.pick(some), some[0]) for some in rows.values()]
        best = self.pick([one.best for one in found])
        return sorted(found, key=lambda one: (one.best is not best, self.order(one.best)))

    def refuse(self, problems: list[str], layouts: int = 1) -> None:
        self.impossible += layouts
        for problem in problems:
            kind = re.sub(r"\d[\d, ]*", "N ", problem)
            self.refused[kind] += layouts
            self.examples.setdefault(kind, problem)

    def over(self, size: float, layout: Layout) -> None:
        self.too_large += 1
        self.large.append(layout)
        if self.least is None or size < self.least[0]:
            self.least = (size, layout)


def grid(request: Request) -> Iterator[Layout]:
    """Every (tp, cp, pp, chunks, micro-batch, ep), the wrong ones included: check() says why."""
    c, m = request.cluster, request.config.model
    fixed = layout_of(request.config)
    pick = lambda name, values, one: (one,) if name in request.fixed else values  # noqa: E731
    batches = pick("micro_batch_size", MICRO_BATCHES, fixed.micro_batch)
    contexts = pick("context_parallel_size", CONTEXTS if m.seq_length >= LONG else (1,), fixed.cp)
    for tp, cp in itertools.product(divisors(c.devices_per_node), contexts):
        for pp in divisors(c.world // (tp * cp)) if c.world % (tp * cp) == 0 else ():
            if pp > 2 * m.num_layers:  # one size too many tells the reason
                break
            cuts = [(vpp, False) for vpp in (_chunks(m.num_layers, pp) if pp > 1 else [1])]
            if pp > 1 and (m.num_layers + 2) % pp == 0:
                cuts += [(vpp, True) for vpp in _chunks(m.num_layers + 2, pp) if (m.num_layers + 2) // pp % vpp == 0]
            ranks = c.world // pp // request.config.parallel.expert_tensor_parallel_size
            experts = divisors(math.gcd(m.num_experts, ranks)) if m.num_experts else [1]
            peers = pick("expert_model_parallel_size", experts, fixed.ep)
            for (vpp, ends), micro, ep in itertools.product(cuts, batches, peers):
                if vpp == fixed.vpp or "num_virtual_stages_per_pipeline_rank" not in request.fixed:
                    yield Layout(tp, pp, vpp, micro, zero=fixed.zero, ends=ends, cp=cp, ep=ep)


def _chunks(layers: int, pp: int) -> list[int]:
    """The numbers of chunks to try per pipeline rank: all small ones, and larger ones that divide its layers."""
    each = layers // pp
    return [n for n in range(1, each + 1) if n <= FEW_CHUNKS or (n <= MOST_CHUNKS and layers % (pp * n) == 0)] or [1]


def variants(layout: Layout, request: Request) -> Iterator[Layout]:
    """A valid layout with each choice of what is recomputed and of whether backward is split."""
    fixed = layout_of(request.config)
    kinds = (fixed.recompute,) if "recompute_granularity" in request.fixed else tuple(HOW_AGAIN)
    splits = (fixed.split,) if "split_backward" in request.fixed else (False, True) if layout.pp > 1 else (False,)
    for kind, split in itertools.product(kinds, splits):
        yield layout._replace(recompute=kind, split=split)


def arranged(layout: Layout, request: Request) -> RunPlan:
    return RunPlan(applied(layout, request.config), request.cluster.world, request.vocab_size)


def search(
    request: Request,
    profile: DeviceProfile | None = None,
    *,
    wanted: int = 10,
    usable: float = USABLE,
    most: int = MOST,
    tell: Callable[[int, float], None] = lambda done, best: None,
) -> Found:
    """`wanted`: rows to be found. `usable`: share of a device's memory. `most`: plans to be simulated. `tell`: how many
    have been, and the least seconds."""
    found = Found(limit=usable * request.cluster.device.memory_bytes)
    bounds, looked_at = _bounded(request, profile, found), set[Layout]()

    def estimate(layout: Layout) -> None:
        looked_at.add(layout)
        _estimate(layout, request, profile, found)
        tell(found.simulated, found.plans[0].time.seconds if found.plans else 0.0)

    def fastest(of: list[Bound]) -> None:
        for bound in of:
            if found.simulated >= most or found.plans and bound.seconds >= found.plans[0].time.seconds:
                break
            estimate(bound.layout)

    fastest(bounds)
    if proposes_stages(request):
        more = _shared_out(request, profile, found)
        fastest(more)
        bounds = sorted([*bounds, *more], key=lambda one: one.seconds)
    if not found.plans:
        found.left = len(bounds) - len(looked_at)
        return found
    found.left = sum(one.seconds < found.plans[0].time.seconds and one.layout not in looked_at for one in bounds)
    layers = request.config.model.num_layers
    equals = sorted((one for one in bounds if one.seconds <= found.equal_s), key=lambda one: one.order(layers))
    for one in equals:
        if found.simulated >= most or one.order(layers) >= found.order(found.plainest)[1:]:
            break
        if one.layout not in looked_at:
            estimate(one.layout)
    if found.is_tight((plainest := found.plainest).peak):
        if proposes_stages(request) and plainest.made.dp > 1 and plainest.layout.zero == 1:
            equals.insert(0, Bound(0.0, 0.0, plainest.layout._replace(zero=2)))
            found.candidates += equals[0].layout not in [one.layout for one in bounds]
        for one in equals:
            best = found.pick(found.plans)
            if found.simulated >= most or best is not plainest and one.order(layers) >= found.order(best)[1:]:
                break
            may_do = one.seconds <= (1 + ALIKE) * plainest.time.seconds and not found.is_tight(one.peak)
            if may_do and one.layout not in looked_at:
                estimate(one.layout)
    for bound in bounds:
        row = bound.layout.row
        rows = {plan.layout.row for plan in found.plans}
        if len(rows) >= wanted or found.simulated >= most:
            break
        if row not in rows and bound.layout not in looked_at:
            alike = [
                one.layout for one in bounds if one.layout.row == row and one.seconds <= (1 + ALIKE) * bound.seconds
            ]
            estimate(min((one for one in alike if one not in looked_at), key=lambda one: one.moving_parts(layers)))
    if proposes_stages(request):
        for choice in found.choices()[:TWINS]:  # what does not share out the optimizer's state takes more memory
            if choice.best.made.dp > 1 and choice.best.layout.zero == 1:
                found.candidates += 1
                estimate(choice.best.layout._replace(zero=0))
    return found


def _bounded(request: Request, profile: DeviceProfile | None, found: Found) -> list[Bound]:
    """Of what can be built and may fit, the fastest first."""
    used = profile or default_profile(request.cluster.device.name)
    bounds, states = list[Bound](), States()
    for layout in [layout_of(request.config)] if request.is_layout else grid(request):
        alike = [layout] if request.is_layout else [*variants(layout, request)]
        found.candidates += len(alike)
        if problems := problems_of(applied(layout, request.config), request.cluster.world):
            found.refuse(problems, len(alike))
            continue
        for one in alike:
            arrangement = arranged(one, request)
            size = least_memory(arrangement, _state_of(arrangement, one, states))
            if size > found.limit and not request.is_layout:
                found.over(size, one)
                continue
            bounds.append(Bound(least_time(arrangement, TimeModel(arrangement, request.cluster, used)), size, one))
    return sorted(bounds, key=lambda one: one.seconds)


def _state_of(arrangement: RunPlan, layout: Layout, known: States) -> ModuleStateBytes:
    key = (layout.tp, arrangement.dp * arrangement.cp, layout.ep, layout.zero)
    known[key] = known.get(key) or arrangement.module_state_bytes
    return known[key]


def proposes_stages(request: Request) -> bool:
    return not request.is_layout and request.fixed.isdisjoint(SHARING)


def _shared_out(request: Request, profile: DeviceProfile | None, found: Found) -> list[Bound]:
    """As `_bounded`, at ZeRO stages 2 and 3: of what is too large at stage 1 and may be faster than all that fits.
    Stage 3 moves more, so what may fit at stage 2 is not asked about at 3 before it is counted. The plain ones alone:
    backward is not split, and at stage 3 weights are whole for a layer, unless the command line says so."""
    used = profile or default_profile(request.cluster.device.name)
    best = found.plans[0].time.seconds if found.plans else float("inf")
    parameters, moves, states = arranged(Layout(), request).params_by_view, dict[Layout, float](), States()
    bounds: list[Bound] = []
    for layout in found.large[:]:
        if layout.pp * layout.tp == request.cluster.world or layout.split and "split_backward" not in request.fixed:
            continue
        for one in (layout._replace(zero=stage) for stage in (2, 3)):
            if moves.get(alike := one._replace(recompute=""), 0.0) >= best:
                break
            arrangement = arranged(one, request)
            costs = TimeModel(arrangement, request.cluster, used)
            if (
                one.zero == 3
                and arrangement.sharding_policy.unshard_by_chunk
                and request.config.parallel.reshard_after_forward == "auto"
            ):
                break
            if alike not in moves:
                moves[alike] = least_exchange(arrangement, costs, parameters)
                if moves[alike] >= best:
                    break
            size = least_memory(arrangement, _state_of(arrangement, one, states))
            if size > found.limit:
                continue
            if (seconds := max(moves[alike], least_time(arrangement, costs))) < best:
                bounds.append(Bound(seconds, size, one))
            break
    found.candidates += len(bounds)
    return sorted(bounds, key=lambda one: one.seconds)


def _estimate(layout: Layout, request: Request, profile: DeviceProfile | None, found: Found) -> None:
    if problems := problems_of(applied(layout, request.config), request.cluster.world):
        found.refuse(problems)
        return
    limit = float("inf") if request.is_layout else found.limit
    if isinstance(plan := planned(layout, request, profile, limit), int):
        found.over(plan, layout)
        if layout.zero == 2 and proposes_stages(request):
            found.candidates += 1
            _estimate(layout._replace(zero=3), request, profile, found)
        return
    found.simulated += 1
    found.plans.append(plan)
    found.plans.sort(key=lambda one: (one.time.seconds, one.peak))


def planned(
    layout: Layout, request: Request, profile: DeviceProfile | None, limit: float = float("inf")
) -> Planned | int:
    """One layout, with the stages that a run would have; bytes of its fullest rank where these are above the limit."""
    arrangement = arranged(layout, request)
    held = rank_memory(arrangement)
    peak = max(one.peak for one in held)
    if peak > limit:
        return peak
    return Planned(layout, arrangement, held, predict_step(arrangement, request.cluster, profile))
