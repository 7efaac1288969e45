"""The search for layouts of a model that fit a cluster, and for the fastest and simplest of them.

candidates   tp within a node, pp, cp for sequences from LONG_SEQUENCE, ep, chunks, micro-batch size, recompute, split
             backward; layouts that a run would refuse are counted with its reason
ZeRO         stage 1; layouts that are too large for it, and may be faster than all that fit, at stage 2, then 3
bound        a time and a memory that no distribution of layers over stages is below (lower_bounds.py)
simulation   the plan of a run with its memory and its simulated step: in the order of their bounds, until the
             fastest is certain; then the simplest that may be as good, until the best is certain; then the lowest
             bounds of other rows
best         the simplest of those that are within TOLERANCE, the error of predictions, of the fastest; if it leaves
             less than MIN_FREE_MEMORY free, the simplest that leaves more and is about as fast
row          the best and the fastest layout of one combination of tp, pp, cp, ep and ZeRO stage
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megalite.config.options import Config, replace_options
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.config.problems import divisors
from megalite.planning.cluster import DeviceProfile, default_profile
from megalite.planning.comm_time import CommGroup
from megalite.planning.layer_kinds import StageCosts
from megalite.planning.memory import USABLE_MEMORY, RankMemory, rank_memory
from megalite.planning.model_state import MinModelState
from megalite.planning.run_plan import RunPlan
from megalite.planning.run_shape import RunShape
from megalite.planning.stage_time import TimeModel
from megalite.planning.step_time import StepTime, predict_step
from tools.planning.lower_bounds import min_dp_time, min_memory, min_step_time
from tools.planning.plan_request import ZERO_OPTIONS, Request, plan_problems
from tools.planning.published_runs import TOLERANCE

MICRO_BATCHES = (1, 2, 4, 8)
MAX_UNEVEN_CHUNKS = 8  # numbers of chunks up to this are tried even if they do not divide the layers
MAX_CHUNKS = 16
LONG_SEQUENCE = 32_768  # tokens from which sequences may be sharded over cp
CP_SIZES = (1, 2, 4, 8, 16)
RECOMPUTE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
DDP_VARIANTS = 3  # rows that are also planned without a sharded optimizer
SIMILAR = 0.02  # relative difference of two times that count as equal
MAX_SIMULATED = 60  # plans that are simulated, which takes a few tenths of a second each
MIN_FREE_MEMORY = 0.05  # fraction of the planned memory; with less free, a layout may not fit, or not for the whole run


@dataclass(frozen=True)
class Layout:
    """The choices of the search; plans in JSON have the same keys.

    Attributes:
        vpp: Chunks per pipeline rank.
        recompute: A key of RECOMPUTE_OPTIONS.
        split: Split backward into gradients of activations and of weights.
        zero: The ZeRO stage; 0 is plain data parallelism.
        ends: Embedding and head each count as a layer when layers are assigned to stages.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    split: bool = False
    zero: int = 1
    ends: bool = False
    cp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}"]
        for name, size in (("vpp", self.vpp), ("cp", self.cp), ("ep", self.ep)):
            if size > 1:
                parts.append(f"{name} {size}")
        parts.append(f"mb {self.micro_batch}")
        if self.recompute != "none":
            parts.append(self.recompute)
        if self.split:
            parts.append("split")
        if self.ends:
            parts.append("ends")
        if self.zero != 1:
            parts.append(f"zero {self.zero}" if self.zero else "ddp")
        return " ".join(parts)

    def complexity(self, layers: int) -> int:
        """Return the number of features beyond plain data parallelism; stages of unequal size count as one."""
        is_uneven = (layers + 2 * self.ends) % (self.pp * self.vpp) > 0
        features = (
            self.tp > 1,
            self.pp > 1,
            self.cp > 1,
            self.ep > 1,
            self.vpp > 1,
            self.recompute != "none",
            is_uneven,
            self.split,
            self.ends,
            self.zero != 1,
        )
        return sum(features)

    @property
    def row(self) -> tuple[int, ...]:
        """The combination of sizes that has one row in the table of layouts."""
        return self.tp, self.pp, self.zero, self.cp, self.ep


def apply_layout(layout: Layout, config: Config) -> Config:
    """Return `config` with this layout.

    A configuration that has the layout already is returned unchanged, with the options that a Layout does not have.
    The borders of its pattern stay if they describe as many stages as the layout has.
    """
    if layout == layout_of(config):
        return config
    model = config.model
    has_borders = len(model.pattern_stages) > 1 and layout.pp > 1
    if not has_borders or len(model.pattern_stages) != layout.pp * layout.vpp:
        has_borders, model = False, model.for_any_pipeline()
    options: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "num_virtual_stages_per_pipeline_rank": layout.vpp if layout.vpp > 1 and not has_borders else None,
        "account_for_embedding_in_pipeline_split": layout.ends,
        "account_for_loss_in_pipeline_split": layout.ends,
        "micro_batch_size": layout.micro_batch,
        "split_backward": layout.split,
        "use_distributed_optimizer": layout.zero > 0,
        "zero_stage": layout.zero if layout.zero > 1 else None,
        "use_megatron_fsdp": False,
        "data_parallel_sharding_strategy": None,
    }
    if layout.recompute != (config.train.recompute_granularity or "none"):
        options.update(RECOMPUTE_OPTIONS[layout.recompute])
    return replace(replace_options(config, **options), model=model)


def layout_of(config: Config) -> Layout:
    """Return the layout of a configuration."""
    parallel, train = config.parallel, config.train
    pp = parallel.pipeline_model_parallel_size
    stages = explicit_stage_layers(config.model, parallel)
    vpp = parallel.num_virtual_stages_per_pipeline_rank or 1
    if stages is not None:
        vpp = len(stages) // pp
    return Layout(
        tp=parallel.tensor_model_parallel_size,
        pp=pp,
        vpp=vpp,
        micro_batch=train.micro_batch_size,
        recompute=train.recompute_granularity or "none",
        split=parallel.split_backward,
        zero=parallel.effective_zero_stage,
        ends=parallel.account_for_embedding_in_pipeline_split and parallel.account_for_loss_in_pipeline_split,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
    )


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its memory, by pipeline rank, and its predicted step."""

    layout: Layout
    plan: RunPlan
    memory: list[RankMemory]
    time: StepTime

    @property
    def fullest(self) -> int:
        """The pipeline rank with the largest peak memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].peak)

    @property
    def complexity(self) -> int:
        return self.layout.complexity(self.plan.config.model.num_layers)

    @property
    def peak(self) -> int:
        """The peak memory of the fullest rank, in bytes."""
        return self.memory[self.fullest].peak


@dataclass(frozen=True)
class LowerBound:
    """Seconds of a step and bytes of the fullest rank that no distribution of the layers over stages is below."""

    seconds: float
    memory: float
    layout: Layout

    def order(self, layers: int) -> tuple[int, float]:
        """Return the sort key that corresponds to SearchResult.order for layouts within its threshold."""
        return self.layout.complexity(layers), self.seconds


@dataclass(frozen=True)
class RowChoice:
    """The plans that represent one row of the table of layouts."""

    best: PlannedLayout
    fastest: PlannedLayout


@dataclass
class SearchResult:
    """The plans of a search, and the layouts that were left out.

    Attributes:
        limit: The bytes of a device's memory to plan with.
        plans: The plans that fit, fastest first.
        refused: The number of layouts that each kind of problem excludes.
        examples: One problem of each kind.
        num_impossible: Candidates that a run would refuse.
        num_too_large: Candidates that do not fit.
        too_large: These candidates.
        smallest_too_large: The least memory of a candidate that does not fit, in bytes, and its layout.
        num_unexplored: Bounds below the fastest plan that were not simulated.
    """

    limit: float
    plans: list[PlannedLayout] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    num_candidates: int = 0
    num_impossible: int = 0
    num_simulated: int = 0
    num_too_large: int = 0
    too_large: list[Layout] = field(default_factory=list)
    smallest_too_large: tuple[float, Layout] | None = None
    num_unexplored: int = 0

    @property
    def tie_threshold_s(self) -> float:
        """The step time up to which a prediction does not differ from the fastest within its error."""
        return (1 + TOLERANCE) * self.plans[0].time.seconds

    def order(self, plan: PlannedLayout) -> tuple[bool, int, float]:
        """Return a sort key: up to the threshold by complexity, above it by time alone."""
        is_slow = plan.time.seconds > self.tie_threshold_s
        return is_slow, 0 if is_slow else plan.complexity, plan.time.seconds

    @property
    def simplest(self) -> PlannedLayout:
        """The first plan in this order."""
        return min(self.plans, key=self.order)

    def is_tight(self, peak: float) -> bool:
        """Return True if a peak leaves less than MIN_FREE_MEMORY free."""
        return peak > (1 - MIN_FREE_MEMORY) * self.limit

    def pick(self, plans: Sequence[PlannedLayout]) -> PlannedLayout:
        """Return the best plan: the first in order, or if that is tight, the first about as fast one that is not."""
        first, *others = sorted(plans, key=self.order)
        if not self.is_tight(first.peak):
            return first
        max_seconds = (1 + SIMILAR) * first.time.seconds
        for plan in others:
            if plan.time.seconds <= max_seconds and not self.is_tight(plan.peak):
                return plan
        return first

    def choices(self) -> list[RowChoice]:
        """Return the rows of the table: the best first, then the others in order."""
        rows: dict[tuple[int, ...], list[PlannedLayout]] = defaultdict(list)
        for plan in self.plans:
            rows[plan.layout.row].append(plan)
        choices = [RowChoice(self.pick(plans), plans[0]) for plans in rows.values()]
        best = self.pick([choice.best for choice in choices])
        return sorted(choices, key=lambda choice: (choice.best is not best, self.order(choice.best)))

    def add_refused(self, problems: list[str], layouts: int = 1) -> None:
        """Count layouts that a run would refuse with these problems."""
        self.num_impossible += layouts
        for problem in problems:
            kind = re.sub(r"\d[\d, ]*", "N ", problem)
            self.refused[kind] += layouts
            self.examples.setdefault(kind, problem)

    def add_too_large(self, size: float, layout: Layout) -> None:
        """Count a layout that needs `size` bytes, more than the limit."""
        self.num_too_large += 1
        self.too_large.append(layout)
        if self.smallest_too_large is None or size < self.smallest_too_large[0]:
            self.smallest_too_large = (size, layout)


def candidate_grid(request: Request) -> Iterator[Layout]:
    """Yield every combination of tp, cp, pp, chunks, micro-batch size and ep, including those that a run refuses."""
    world, model = request.cluster.world, request.config.model
    current = layout_of(request.config)
    micro_batches = (current.micro_batch,) if "micro_batch_size" in request.fixed else MICRO_BATCHES
    cp_sizes = CP_SIZES if model.seq_length >= LONG_SEQUENCE else (1,)
    if "context_parallel_size" in request.fixed:
        cp_sizes = (current.cp,)
    fixed_vpp = "num_virtual_stages_per_pipeline_rank" in request.fixed
    for tp, cp in itertools.product(divisors(request.cluster.devices_per_node), cp_sizes):
        if world % (tp * cp):
            continue
        for pp in divisors(world // (tp * cp)):
            if pp > 2 * model.num_layers:  # one value that is too large suffices to show the reason
                break
            ep_sizes = [current.ep]
            if "expert_model_parallel_size" not in request.fixed:
                ranks = world // pp // request.config.parallel.expert_tensor_parallel_size
                ep_sizes = divisors(math.gcd(model.num_experts, ranks)) if model.num_experts else [1]
            splits = _layer_splits(model.num_layers, pp)
            for (vpp, ends), micro_batch, ep in itertools.product(splits, micro_batches, ep_sizes):
                if vpp == current.vpp or not fixed_vpp:
                    yield Layout(tp, pp, vpp, micro_batch, zero=current.zero, ends=ends, cp=cp, ep=ep)


def _layer_splits(layers: int, pp: int) -> list[tuple[int, bool]]:
    """Return the (chunks per rank, embedding and head count as layers) to try with `pp` pipeline ranks."""
    if pp == 1:
        return [(1, False)]
    splits = [(vpp, False) for vpp in _chunks(layers, pp)]
    if (layers + 2) % pp == 0:
        splits += [(vpp, True) for vpp in _chunks(layers + 2, pp) if (layers + 2) // pp % vpp == 0]
    return splits


def _chunks(layers: int, pp: int) -> list[int]:
    """Return the numbers of chunks per pipeline rank to try: all small ones, and larger ones that divide the layers."""
    chunks = [
        n for n in range(1, layers // pp + 1) if n <= MAX_UNEVEN_CHUNKS or (n <= MAX_CHUNKS and layers % (pp * n) == 0)
    ]
    return chunks or [1]


def variants(layout: Layout, request: Request) -> Iterator[Layout]:
    """Yield a valid layout with each recompute option, and with and without a split backward."""
    current = layout_of(request.config)
    recomputes = (current.recompute,) if "recompute_granularity" in request.fixed else tuple(RECOMPUTE_OPTIONS)
    splits = (False, True) if layout.pp > 1 else (False,)
    if "split_backward" in request.fixed:
        splits = (current.split,)
    for recompute, split in itertools.product(recomputes, splits):
        yield replace(layout, recompute=recompute, split=split)


def plan_for(layout: Layout, request: Request) -> RunPlan:
    return RunPlan(RunShape(apply_layout(layout, request.config), request.cluster.world, request.vocab_size))


def may_raise_zero_stage(request: Request) -> bool:
    """Return True if the search also chooses the ZeRO stage."""
    return not request.is_single_layout and request.fixed.isdisjoint(ZERO_OPTIONS)


def evaluate(
    layout: Layout, request: Request, profile: DeviceProfile | None, limit: float = float("inf")
) -> PlannedLayout | int:
    """Plan one layout with the stages that its run has.

    Returns:
        The plan; or the bytes of the fullest rank, if they exceed `limit`.
    """
    plan = plan_for(layout, request)
    memory = rank_memory(plan)
    peak = max(rank.peak for rank in memory)
    if peak > limit:
        return peak
    return PlannedLayout(layout, plan, memory, predict_step(plan, request.cluster, profile))


def search(
    request: Request,
    profile: DeviceProfile | None = None,
    *,
    min_rows: int = 10,
    usable_memory: float = USABLE_MEMORY,
    max_simulated: int = MAX_SIMULATED,
    on_progress: Callable[[int, float], None] = lambda num_simulated, best_s: None,
) -> SearchResult:
    """Search for the layouts of a request.

    Args:
        profile: The rates of a device; by default those of its kind.
        min_rows: The number of rows to find, if there are as many.
        usable_memory: The fraction of a device's memory to plan with.
        max_simulated: The largest number of plans to simulate.
        on_progress: Called with the number of simulated plans and the least time of a step so far.
    """
    result = SearchResult(limit=usable_memory * request.cluster.device.memory_bytes)
    return _Search(request, profile, result, max_simulated, on_progress).run(min_rows)


class _Search:
    """The state of one search."""

    def __init__(
        self,
        request: Request,
        profile: DeviceProfile | None,
        result: SearchResult,
        max_simulated: int,
        on_progress: Callable[[int, float], None],
    ):
        self.request, self.profile = request, profile
        self.rates = profile or default_profile(request.cluster.device.name)
        self.result = result
        self.max_simulated, self.on_progress = max_simulated, on_progress
        self.tried = set[Layout]()
        self.layers = request.config.model.num_layers
        # by tp, dp x cp, ep and ZeRO stage
        self._min_states: dict[tuple[int, int, int, int], MinModelState] = {}
        self._layer_times: dict[tuple[StageCosts, *tuple[CommGroup, ...]], TimeModel] = {}

    def run(self, min_rows: int) -> SearchResult:
        bounds, result = self._candidate_bounds(), self.result
        self._find_fastest(bounds)
        if may_raise_zero_stage(self.request):
            higher_zero = self._higher_zero_bounds()
            self._find_fastest(higher_zero)
            bounds = sorted([*bounds, *higher_zero], key=lambda bound: bound.seconds)
        if not result.plans:
            result.num_unexplored = len(bounds) - len(self.tried)
            return result
        fastest_s = result.plans[0].time.seconds
        unexplored = [bound for bound in bounds if bound.seconds < fastest_s and bound.layout not in self.tried]
        result.num_unexplored = len(unexplored)
        self._find_best(bounds)
        self._find_rows(bounds, min_rows)
        if may_raise_zero_stage(self.request):
            self._add_ddp_variants()
        return result

    @property
    def _is_over(self) -> bool:
        return self.result.num_simulated >= self.max_simulated

    def _try(self, layout: Layout) -> None:
        self.tried.add(layout)
        self._simulate(layout)
        plans = self.result.plans
        self.on_progress(self.result.num_simulated, plans[0].time.seconds if plans else 0.0)

    def _simulate(self, layout: Layout) -> None:
        """Add the plan of a layout to the result if it can be built and fits; from ZeRO stage 2, also try stage 3."""
        request, result = self.request, self.result
        if problems := plan_problems(apply_layout(layout, request.config), request.cluster.world):
            result.add_refused(problems)
            return
        limit = float("inf") if request.is_single_layout else result.limit
        plan = evaluate(layout, request, self.profile, limit)
        if isinstance(plan, int):
            result.add_too_large(plan, layout)
            if layout.zero == 2 and may_raise_zero_stage(request):
                result.num_candidates += 1
                self._simulate(replace(layout, zero=3))
            return
        result.num_simulated += 1
        result.plans.append(plan)
        result.plans.sort(key=lambda plan: (plan.time.seconds, plan.peak))

    def _find_fastest(self, bounds: Sequence[LowerBound]) -> None:
        """Simulate layouts in the order of their bounds until no remaining one can be the fastest."""
        plans = self.result.plans
        for bound in bounds:
            if self._is_over or (plans and bound.seconds >= plans[0].time.seconds):
                break
            self._try(bound.layout)

    def _find_best(self, bounds: Sequence[LowerBound]) -> None:
        """Simulate layouts within the threshold, simplest first, until no remaining one can be the best."""
        result = self.result
        ties = [bound for bound in bounds if bound.seconds <= result.tie_threshold_s]
        ties.sort(key=lambda bound: bound.order(self.layers))
        for bound in ties:
            if self._is_over or bound.order(self.layers) >= result.order(result.simplest)[1:]:
                break
            if bound.layout not in self.tried:
                self._try(bound.layout)
        simplest = result.simplest
        if not result.is_tight(simplest.peak):
            return
        if may_raise_zero_stage(self.request) and simplest.plan.shape.dp > 1 and simplest.layout.zero == 1:
            zero_2 = replace(simplest.layout, zero=2)
            if zero_2 not in [bound.layout for bound in bounds]:
                result.num_candidates += 1
            ties.insert(0, LowerBound(0.0, 0.0, zero_2))
        max_seconds = (1 + SIMILAR) * simplest.time.seconds
        for bound in ties:
            best = result.pick(result.plans)
            is_decided = best is not simplest and bound.order(self.layers) >= result.order(best)[1:]
            if self._is_over or is_decided:
                break
            may_be_better = bound.seconds <= max_seconds and not result.is_tight(bound.memory)
            if may_be_better and bound.layout not in self.tried:
                self._try(bound.layout)

    def _find_rows(self, bounds: Sequence[LowerBound], min_rows: int) -> None:
        """Simulate one layout of each row that has none, the row with the lowest bound first."""
        for bound in bounds:
            row = bound.layout.row
            rows = {plan.layout.row for plan in self.result.plans}
            if len(rows) >= min_rows or self._is_over:
                break
            if row in rows or bound.layout in self.tried:
                continue
            max_seconds = (1 + SIMILAR) * bound.seconds
            similar = [
                other.layout
                for other in bounds
                if other.layout.row == row and other.seconds <= max_seconds and other.layout not in self.tried
            ]
            self._try(min(similar, key=lambda layout: layout.complexity(self.layers)))

    def _add_ddp_variants(self) -> None:
        """Simulate the first rows without a sharded optimizer, which takes more memory."""
        for choice in self.result.choices()[:DDP_VARIANTS]:
            if choice.best.plan.shape.dp > 1 and choice.best.layout.zero == 1:
                self.result.num_candidates += 1
                self._try(replace(choice.best.layout, zero=0))

    def _candidate_bounds(self) -> list[LowerBound]:
        """Return the bounds of the candidates that can be built and may fit, fastest first."""
        request, result = self.request, self.result
        bounds: list[LowerBound] = []
        layouts = [layout_of(request.config)] if request.is_single_layout else candidate_grid(request)
        for layout in layouts:
            candidates = [layout] if request.is_single_layout else [*variants(layout, request)]
            result.num_candidates += len(candidates)
            if problems := plan_problems(apply_layout(layout, request.config), request.cluster.world):
                result.add_refused(problems, len(candidates))
                continue
            for candidate in candidates:
                plan = plan_for(candidate, request)
                memory = min_memory(plan, self._min_state(plan, candidate))
                if memory > result.limit and not request.is_single_layout:
                    result.add_too_large(memory, candidate)
                    continue
                seconds = min_step_time(plan, self._times_of_layers(plan))
                bounds.append(LowerBound(seconds, memory, candidate))
        return sorted(bounds, key=lambda bound: bound.seconds)

    def _min_state(self, plan: RunPlan, layout: Layout) -> MinModelState:
        key = (layout.tp, plan.shape.dp * plan.shape.cp, layout.ep, layout.zero)
        if key not in self._min_states:
            self._min_states[key] = plan.balance.min_model_state
        return self._min_states[key]

    def _times_of_layers(self, plan: RunPlan) -> TimeModel:
        """Return the times of a plan, or of another plan whose layers and ends take the same time as its own."""
        times = TimeModel(plan, self.request.cluster, self.rates)
        return self._layer_times.setdefault((plan.balance.stage_costs, *times.layer_groups.values()), times)

    def _higher_zero_bounds(self) -> list[LowerBound]:
        """Return bounds at ZeRO stages 2 and 3 of layouts that are too large at stage 1, if they may be the fastest.

        Backward is split only if the command line says so.
        """
        request, result = self.request, self.result
        fastest_s = result.plans[0].time.seconds if result.plans else float("inf")
        params_by_view = plan_for(Layout(), request).model_states.params_by_view
        dp_times = dict[Layout, float]()
        bounds: list[LowerBound] = []
        for layout in result.too_large:
            has_dp = layout.pp * layout.tp != request.cluster.world
            if not has_dp or (layout.split and "split_backward" not in request.fixed):
                continue
            bound = self._higher_zero_bound(layout, params_by_view, dp_times, fastest_s)
            if bound is not None:
                bounds.append(bound)
        result.num_candidates += len(bounds)
        return sorted(bounds, key=lambda bound: bound.seconds)

    def _higher_zero_bound(
        self, layout: Layout, params_by_view: Mapping[str, int], dp_times: dict[Layout, float], fastest_s: float
    ) -> LowerBound | None:
        """Return the bound of a layout at the lowest ZeRO stage above 1 that may fit; None if it cannot be the fastest.

        Stage 3 communicates more, so a layout that may fit at stage 2 is tried at stage 3 only once it is counted. At
        stage 3, weights are unsharded for one layer at a time unless the command line says otherwise.

        Args:
            dp_times: The time of collectives over dp that was computed so far, by layout without its recompute.
        """
        request = self.request
        for stage in (2, 3):
            candidate = replace(layout, zero=stage)
            key = replace(candidate, recompute="")
            if dp_times.get(key, 0.0) >= fastest_s:
                return None
            plan = plan_for(candidate, request)
            is_auto = request.config.parallel.reshard_after_forward == "auto"
            if stage == 3 and plan.shape.sharding_policy.unshard_by_chunk and is_auto:
                return None
            times = TimeModel(plan, request.cluster, self.rates)
            if key not in dp_times:
                dp_times[key] = min_dp_time(plan, times, params_by_view)
            if dp_times[key] >= fastest_s:
                return None
            memory = min_memory(plan, self._min_state(plan, candidate))
            if memory > self.result.limit:
                continue
            seconds = max(dp_times[key], min_step_time(plan, self._times_of_layers(plan)))
            return LowerBound(seconds, memory, candidate) if seconds < fastest_s else None
        return None
