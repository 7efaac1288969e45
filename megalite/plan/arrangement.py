"""A run on its ranks before it starts: batch sizes, steps, layers, memory, bubble, groups.

It is a pure function of the configuration, the number of ranks and the vocabulary, made once per start: the check makes
it, the start and a dry run print it, train/setup.py builds from it. Expensive parts are computed when first needed.

Stages are built without memory (on the meta device) and laid out as optim/buffer.py does it, so the bytes of weights,
gradients and optimizer are those of the run. The FLOPs and bytes of a stage are sums over its layers, from the bill of
each kind (plan/kinds.py). Activations are the bytes that the schedule has in flight. plan/memory.py adds what lives for
a moment; memory of CUDA and NCCL is not counted.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from megalite.config.options import Config, padded_vocab_size
from megalite.config.pattern import read_batch_schedule
from megalite.config.registry import KINDS
from megalite.config.stage_layers import given_stages
from megalite.models.gpt import Block, Recompute, Stage
from megalite.models.specs import specs_of
from megalite.nn.parameter import Maker, named_specs
from megalite.parallel.mesh import Mesh, Sizes, plan_mesh
from megalite.parallel.spec import HOMES, ParamSpec
from megalite.pipeline.schedule import Action, Cost, Held, Placement, Sharing, Split, group_sizes, in_flight, plan
from megalite.pipeline.simulate import Simulation, simulate
from megalite.plan.batch_size import BatchSizes
from megalite.plan.holding import Holding, ModuleBytes, Shares, element_bytes, kept_of, sharing
from megalite.plan.kinds import Kind, Setting, StageCosts, Sums, cut, stage_costs
from megalite.plan.partition import evenly, fastest, ranges, splits

TRIED_ACTIONS = 200_000  # simulated in all to balance the stages: about a second
LONG = 3  # groups of micro-batches that are simulated to compare splits; later groups are like the last
TOLD_ACTIONS = 10_000  # simulated at least for the figures, because waiting gradients may take long to settle


@dataclass(frozen=True)
class Arrangement:
    """`world`: number of ranks, a multiple of tp x cp x pp. `vocab_size`: without padding."""

    config: Config
    world: int
    vocab_size: int

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        return self.config.parallel.context_parallel_size

    @property
    def pp(self) -> int:
        return self.config.parallel.pipeline_model_parallel_size

    @cached_property
    def has_experts(self) -> bool:
        return any(self.config.model.experts)

    @property
    def ep(self) -> int:
        return self.config.parallel.expert_model_parallel_size if self.has_experts else 1

    @property
    def etp(self) -> int:
        return self.config.parallel.expert_tensor_parallel_size if self.has_experts else 1

    @property
    def dp(self) -> int:
        return self.world // self.config.parallel.model_parallel_size

    @property
    def sizes(self) -> Sizes:
        """The sizes that parallel/mesh.py makes a mesh of."""
        p = self.config.parallel
        instances = p.num_distributed_optimizer_instances if p.shared_out else None
        more = dict(dp_outermost=p.use_tp_pp_dp_mapping, stage=self.config.optim.sees_whole_tensors)
        sizes = Sizes(tp=self.tp, pp=self.pp, cp=self.cp, instances=instances, **more)
        return sizes | Sizes(ep=self.ep, etp=self.etp) if self.has_experts else sizes

    @property
    def sharing(self) -> Sharing:
        return sharing(self.config.parallel, self.chunks)

    @property
    def padded_vocab(self) -> int:
        return padded_vocab_size(self.vocab_size, self.config.model.make_vocab_size_divisible_by, self.tp)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        if self.config.precision.bf16:
            return torch.bfloat16
        return torch.float16 if self.config.precision.fp16 else torch.float32

    @cached_property
    def recompute(self) -> Recompute:
        t = self.config.train
        method, layers = t.recompute_method or "uniform", t.recompute_num_layers or 1
        return Recompute(t.recompute_granularity, method, layers, t.recompute_modules)

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size(self.dp)

    @property
    def eval_batch_size(self) -> int:
        return self.config.train.eval_batch_size(self.dp)

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        """Raises ValueError if a ramp does not lead to the global batch size."""
        t = self.config.train
        if t.step_batch_size_schedule is not None:
            steps = read_batch_schedule(t.step_batch_size_schedule, self.config.model.seq_length)
            return BatchSizes(steps, last_whole=True)
        if t.rampup_batch_size is None:
            return BatchSizes.constant(self.batch_size)
        start, increment, samples = t.rampup_batch_size
        return BatchSizes.ramp(self.batch_size, start, increment, samples)

    @cached_property
    def steps(self) -> int:
        """The number of steps. Raises ValueError if it is 0, and as `batch_sizes` does."""
        t, sizes = self.config.train, self.batch_sizes
        if not (steps := t.train_iters or sizes.steps_for(t.train_samples or 0)):
            raise ValueError(f"train_samples={t.train_samples} is below one batch of {sizes.at(0)}; give more")
        return steps

    @cached_property
    def samples(self) -> int:
        return self.batch_sizes.consumed_at(self.steps)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step, once its batch has its final size."""
        return self.batch_sizes.final // (self.config.train.micro_batch_size * self.dp)

    @cached_property
    def stages(self) -> list[range]:
        """The layers of every stage: given by the options, or balanced by simulated time and memory."""
        if self.given_or_even:
            return ranges(self.given_or_even)
        layers, stages = self.config.model.num_layers, self.placement.num_stages
        actions = sum(map(len, self.rows(self._split_of(evenly(layers, stages)), LONG)[1]))
        least_time = lambda split: self.microbatches * self._slowest(self.layers.costs_of(split))  # noqa: E731
        return ranges(fastest(self.choices, least_time, self._rate, max(1, TRIED_ACTIONS // actions)))

    @property
    def choices(self) -> Sequence[tuple[int, ...]]:
        """The splits of the layers that the run chooses from."""
        return splits(self.placement.num_stages, self.layers.flops)

    @property
    def given_or_even(self) -> Sequence[int]:
        """The layers of every stage if there is no choice: given by the options, or at most one each; else empty."""
        layers, stages = self.config.model.num_layers, self.placement.num_stages
        even = evenly(layers, stages) if layers <= stages or stages == 1 else ()
        return even if self._given is None else self._given

    @cached_property
    def counts(self) -> list[int]:
        """The number of layers of every stage."""
        return [len(layers) for layers in self.stages]

    @cached_property
    def _given(self) -> list[int] | None:
        return given_stages(self.config.model.num_layers, self.config.parallel)

    @property
    def chunks(self) -> int:
        """The number of stages of each pipeline rank."""
        if self._given is not None:
            return len(self._given) // self.pp
        return self.config.parallel.num_virtual_stages_per_pipeline_rank or 1

    @property
    def placement(self) -> Placement:
        return Placement(self.pp, self.chunks)

    @cached_property
    def layers(self) -> StageCosts:
        m, t, again = self.config.model, self.config.train, self.recompute
        split, places = self.splits_backward, cut(m, self.cp)
        setting = Setting(self.tp, t.micro_batch_size, self.dtype, split, again.parts, places, self.ep, self.etp)
        offload = t.cpu_offloading_num_layers, t.min_offloaded_tensor_size
        return stage_costs(m, again, setting, self.vocab_size, self.padded_vocab, t.z_loss_coeff, offload)

    @property
    def edge(self) -> int:
        """Bytes of x_sBD, which is also the size of a message."""
        return self.tokens * self.config.model.hidden_size * self.dtype.itemsize // self.tp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank of cp."""
        return self.config.model.seq_length // self.cp * self.config.train.micro_batch_size

    def build_stages(self, mesh: Mesh, dtype: torch.dtype, meta: bool = False, deferred: bool = False) -> list[Stage]:
        """The chunks of the model on this rank; `meta`, `deferred`: as a Maker has it."""
        make = Maker(mesh, dtype, self.config.train.seed, meta, deferred)
        return [self.build_stage(make, self.stages, s) for s in self.placement.stages(mesh.pp.rank)]

    def build_stage(self, make: Maker, layers: Sequence[range], number: int) -> Stage:
        rows = dict(vocab_size=self.vocab_size, padded_vocab_size=self.padded_vocab)
        more: dict[str, Any] = dict(recompute=self.recompute, z_loss=self.config.train.z_loss_coeff)
        return Stage(make, self.config.model, layers, number, **rows, **more)

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        return self.layers.costs_of(self.counts)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        return self.layers.held_of(self.counts)

    @cached_property
    def holdings(self) -> list[Holding]:
        """The holding of every pipeline rank, built once for ranks with equal layers and the same end of the model."""
        kinds = []
        for rank in range(self.pp):
            layers = (self.stages[stage] for stage in self.placement.stages(rank))
            kinds.append((rank == 0, rank == self.pp - 1, *(self.elements[n.start : n.stop] for n in layers)))
        built = {kind: self._holding(kinds.index(kind)) for kind in dict.fromkeys(kinds)}
        return [built[kind] for kind in kinds]

    @property
    def worst(self) -> int:
        """The pipeline rank with the most bytes of weights, gradients and optimizer."""
        return max(range(self.pp), key=lambda r: self.holdings[r].state)

    @cached_property
    def of_homes(self) -> Counter[str]:
        """The number of parameters of the whole model by their home, each counted once, without padding."""
        specs = specs_of(self.config.model, self.vocab_size, padded=self.padded_vocab).values()
        return sum((Counter({spec.home: math.prod(spec.stored_shape)}) for spec in specs), Counter())

    @property
    def parameters(self) -> int:
        return self.of_homes.total()

    @property
    def active(self) -> int:
        """Of these, how many a token goes through."""
        m = self.config.model
        return self.of_homes["dense"] + self.of_homes["expert"] * m.moe_router_topk // (m.num_experts or 1)

    @property
    def splits_backward(self) -> bool:
        return self.config.parallel.split_backward and self.pp > 1

    @cached_property
    def split(self) -> Split | None:
        """How backward is split, if it is."""
        return self._split_of(self.counts)

    def _split_of(self, split: Sequence[int]) -> Split | None:
        if not self.splits_backward:
            return None
        costs, most = self.layers.costs_of(split), self.config.parallel.zero_bubble_max_pending_backward
        return Split(costs, self.layers.staying.held_of(split)) if most is None else Split(costs, most=most)

    @cached_property
    def in_flight(self) -> list[int]:
        """The most forwards of a chunk that wait for their backward, for every pipeline rank."""
        return [round(most) for most in self.most_alive(None, self.split, self.told)]

    @cached_property
    def activations(self) -> list[int]:
        """The most bytes that the forwards in flight keep on the device, for every pipeline rank."""
        return [round(kept) for kept in self.most_alive(self.held, self.split, self.told)]

    @cached_property
    def bubble(self) -> float:
        """The share of the time for which ranks are idle, by FLOPs."""
        times = sum(map(sum, self.costs))
        idle = 1.0 - self.microbatches * times / (self.pp * self.run(self.costs, self.split, self.told)[0])
        return max(0.0, idle)  # rounding: not -0.0%

    def run(self, costs: Sequence[Cost], split: Split | None, groups: int, **more: Any) -> tuple[float, Simulation]:
        """(time of a step in units of the costs, simulation of it or of its first groups). `more`: of simulate()."""
        run, rows = self.rows(split, groups)
        simulation = simulate(rows, costs, **more)
        if run == self.microbatches:
            return simulation.end, simulation
        each = self._slowest(costs)
        if more or self.config.parallel.pipeline_schedule != "1f1b":  # a message, or F and B of different ranks, may be
            fewer, rows = self.rows(split, groups - 1)  # the slowest
            each = max(each, (simulation.end - simulate(rows, costs, **more).end) / (run - fewer))
        return simulation.end + (self.microbatches - run) * each, simulation

    def _slowest(self, costs: Sequence[Cost]) -> float:
        """The time of the busiest rank for one micro-batch."""
        return max(sum(sum(costs[s]) for s in self.placement.stages(rank)) for rank in range(self.pp))

    def _rate(self, split: Sequence[int]) -> tuple[float, float]:
        """(time of a step, bytes of the fullest rank: layers, embedding, head and activations in flight)."""
        backward = self._split_of(split)
        alive = self.most_alive(self.layers.held_of(split), backward)
        held = [self.module_bytes.of(np.array(split), rank, self.placement) + alive[rank] for rank in range(self.pp)]
        return self.run(self.layers.costs_of(split), backward, LONG)[0], max(held)

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The groups of rank 0, by axis."""
        mesh = self.mesh_of(0)
        return {name: mesh.axis(name).ranks for name in ("tp", "cp", "dp", "pp")}

    def mesh_of(self, rank: int) -> Mesh:
        """The mesh of the first rank of a pipeline position, without groups."""
        first = plan_mesh(self.world, 0, **self.sizes)
        return plan_mesh(self.world, first.pp.ranks[rank], **self.sizes) if rank else first

    def bytes_of_element(self, matrix: bool = True) -> tuple[int, int, int]:
        """Of a matrix, as most are, or not of one."""
        return element_bytes(self.dtype, kept_of(self.config.optim, matrix))

    def _holding(self, rank: int) -> Holding:
        mesh = self.mesh_of(rank)
        return Holding.of(self.build_stages(mesh, self.dtype, meta=True), mesh, self.bytes_of_element, self.config)

    @cached_property
    def elements(self) -> tuple[tuple[int, ...], ...]:
        """The number of elements of each layer's parameters on a rank, by home in the order of HOMES."""
        make = Maker(self.mesh_of(0), self.dtype, 0, meta=True)

        def of(kind: Kind) -> tuple[int, ...]:
            specs = list(named_specs(Block(make, kind, 0)))
            return tuple(sum(p.numel() for spec, p in specs if spec.home == home) for home in HOMES)

        return tuple(self.layers.each(of))

    @cached_property
    def module_bytes(self) -> ModuleBytes:
        """Without the layout's padding, which `holdings` has."""
        make = Maker(self.mesh_of(0), self.dtype, 0, meta=True)
        first, last = (self.build_stage(make, [range(0), range(0)], number) for number in (0, 1))
        shares = Shares.of(self.config.parallel, make.mesh)

        def each(spec: ParamSpec) -> float:
            weight, gradient, state = self.bytes_of_element(spec.is_matrix)
            weight *= not (self.config.parallel.param_cpu_offload and spec.is_2d)
            return shares[spec.home].bytes_of(weight, gradient, state * (1 - self.config.optim.offloaded))

        def of(module: nn.Module | None) -> float:
            return sum(each(spec) * p.numel() for spec, p in named_specs(module)) if module else 0.0

        layers = Sums([[n] for n in self.layers.each(lambda kind: of(Block(make, kind, 0)))])
        return ModuleBytes(layers, of(first.embedding), of(last.head))

    @property
    def group_size(self) -> int:
        """The number of micro-batches of the first group."""
        p = self.config.parallel
        return group_sizes(self.microbatches, self.pp, p.microbatch_group_size_per_virtual_pipeline_stage)[0]

    @property
    def told(self) -> int:
        """The number of groups of micro-batches that the figures describe: all of a short step."""
        return max(LONG, TOLD_ACTIONS // (3 * self.placement.num_stages * self.group_size))

    def rows(self, split: Split | None, groups: int) -> tuple[int, tuple[tuple[Action, ...], ...]]:
        """(micro-batches, the actions of each pipeline rank for them) of a step, or of its first `groups` groups."""
        p, m, group = self.config.parallel, self.microbatches, self.group_size
        size = p.microbatch_group_size_per_virtual_pipeline_stage
        if m > groups * group:
            m, size = groups * group, group
        return m, plan(p.pipeline_schedule, self.pp, m, self.chunks, size, split)

    def most_alive(self, held: Sequence[Held] | None, split: Split | None, groups: int = LONG) -> list[float]:
        """The most that is in flight on every pipeline rank: each forward counts `held` of its stage, or 1."""
        run, rows = self.rows(split, groups)
        now = [in_flight(row, held) for row in rows]
        if run == self.microbatches:
            return now
        # each further group adds as much as one group without a split adds, because what waits is limited
        (run_2, two), (run_3, three) = self.rows(None, LONG - 1), self.rows(None, LONG)
        more = (self.microbatches - run) / (run_3 - run_2)
        grown = (in_flight(b, held) - in_flight(a, held) for a, b in zip(two, three, strict=True))
        return [most + each * more for most, each in zip(now, grown, strict=True)]


def arrange(config: Config, world: int, vocab_size: int) -> Arrangement:
    """Make it. Raises ValueError, `name=value breaks rule; remedy`, for all that config/validation cannot check."""
    made = Arrangement(config, world, vocab_size)
    _ = made.steps, made.stages, kept_of(config.optim, matrix=False)  # these raise
    if (name := config.parallel.pipeline_schedule) in KINDS["pipeline_schedule"].added:  # others are proven by tests
        by, unit = config.parallel.microbatch_group_size_per_virtual_pipeline_stage, made.microbatches
        for m in {unit * size // made.batch_sizes.final for _, size in made.batch_sizes.steps}:
            plan(name, made.pp, m, made.chunks, by, Split() if config.parallel.split_backward else None)
    return made
