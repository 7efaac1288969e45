"""A run made small enough to be trained twice in seconds, with everything that its layout is about left in it. Pure.

    kept      every kind of layer, norm, position, activation, loss and dropout; ties; windows and patterns by layer;
              shards, schedule, chunks, uneven stages, split backward, recomputation, precision, overlap
    smaller   hidden, heads, groups, feed-forward, layers, experts and how many a token goes to, sequence, vocabulary,
              batch, buckets, the axes of the layout: one that is above 1 stays above 1 as long as the ranks suffice
    other     generated data; one learning rate for all steps, and Adam's eps at least 1e-3: the first update is
              g / (|g| + eps), which makes of a gradient that is rounding alone a whole step

Where tp ranks share groups of keys and values, a rank's group is a function of its number, and on few ranks a wrong one
may be the right one: on 2 with one group all are, on 4 with two `rank // groups` is. Where the small layout hides one
that is wrong at full size, `of_groups` is a second run, of tp alone.

`twin` is the same training in one process by the plainest path: all that is how a step is computed is at its default,
kernels are torch's, and the vocabulary has no padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from megalite.config.option import EXECUTION, option_spec
from megalite.config.option_parsers import parse_layer_pattern
from megalite.config.options import (
    SECTIONS,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    ModelConfig,
    OperationsConfig,
    ParallelConfig,
)
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.config.problems import divisors
from tools.verification.reference_sharding import Layout

HEAD, LENGTH, VOCABULARY, BUCKET = 4, 16, 97, 2000  # channels, tokens, ids (a prime: it is padded), elements
RATE, EPS = 0.01, 1e-3
EVALUATED = 2  # batches of an evaluation
AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")  # of a layout


class Smaller(NamedTuple):
    """`wanted`: the layout that was asked for; `layout`: the verified one. `notes`: what is other than asked."""

    config: Config
    wanted: Layout
    layout: Layout
    notes: list[str]


def layout_of(config: Config) -> tuple[Layout, str]:
    """The layout that a command line means, and what is worth telling about it. Without --nproc and --dp a launcher
    decides how many ranks there are: dp 2 then, where the batch lets it."""
    p, t = config.parallel, config.train
    tp, pp, cp, note = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size, ""
    experts = (p.expert_model_parallel_size, p.expert_tensor_parallel_size) if config.model.num_experts else (1, 1)
    dp = p.data_parallel_size
    if dp is None and p.nproc is not None:
        if p.nproc % (each := tp * pp * cp):
            of = f"tp {tp} x pp {pp} x cp {cp}"
            raise ConfigError([f"nproc={p.nproc} is not a multiple of {of}; give a multiple of {each}"])
        dp = p.nproc // each
    elif dp is None:
        parts = (t.global_batch_size or 2 * t.micro_batch_size) // max(1, t.micro_batch_size)
        dp = 2 if parts % 2 == 0 else 1
        note = f"neither --nproc nor --dp is given: dp {dp}"
    return Layout(tp, pp, dp, p.use_tp_pp_dp_mapping, cp, *experts), note


def fewer_ranks(wanted: Layout, most: int) -> Layout:
    """The layout of at most `most` ranks that keeps most of the axes above 1, then a stage between the first and the
    last, then most ranks, tp first.

    >>> [str(fewer_ranks(Layout(*sizes), 8)) for sizes in ((8, 16, 32), (1, 16, 4), (2, 1, 2))]
    ['tp 2, pp 2, dp 2', 'tp 1, pp 4, dp 2', 'tp 2, pp 1, dp 2']
    """
    if wanted.world <= most:
        return wanted
    ranges = [range(1, min(size, most) + 1) for size in (wanted.pp, wanted.dp)]
    parts = [divisors(size) for size in (wanted.tp, wanted.cp, wanted.ep, wanted.etp)]
    tried = [
        Layout(tp, pp, dp, wanted.dp_outermost, cp, ep, etp)
        for pp, dp, tp, cp, ep, etp in product(*ranges, *parts)
        if tp * pp * dp * cp <= most and dp * cp * tp % (ep * etp) == 0
    ]

    def worth(one: Layout) -> tuple[int, ...]:
        kept = sum(getattr(one, axis) > 1 for axis in AXES if getattr(wanted, axis) > 1)
        return kept, one.edp == wanted.edp == 1, one.pp > 2, one.world, one.tp, one.cp, one.dp, one.ep

    return max(tried, key=worth)


def smaller(config: Config, most: int, steps: int, whole: bool = False) -> Smaller:
    """A small version of a checked configuration. `whole`: sizes, data and layout stay. Raises ValueError,
    `name=value breaks rule; remedy`."""
    wanted, note = layout_of(config)
    notes = [note] if note else []
    if whole:
        if wanted.world > most:
            raise ValueError(f"world={wanted.world} ({wanted}) is above --most-ranks {most}; raise it, or drop --whole")
        return Smaller(_short(config, wanted, steps), wanted, wanted, notes)
    layout = fewer_ranks(wanted, most)
    if layout.world == 1 < wanted.world:
        raise ValueError(f"most_ranks={most} leaves nothing of {wanted}; give {wanted.least} or more")
    sizes = {axis: (getattr(wanted, axis), getattr(layout, axis)) for axis in AXES}
    if lost := [f"{axis} {size}" for axis, (size, left) in sizes.items() if size > 1 and left == 1]:
        notes.append(f"not verified, for want of ranks: {' and '.join(lost)}; give --most-ranks {wanted.least} or more")
    return Smaller(_made(config, wanted, layout, steps), wanted, layout, notes)


def _made(config: Config, wanted: Layout, layout: Layout, steps: int) -> Config:
    chosen, d = _stages(config, wanted, layout), config.data
    parallel, train = _parallel(config, wanted, layout, chosen), _batch(config, wanted, layout, len(chosen.layers))
    marks = {name: getattr(d, name) for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")}
    data = DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCABULARY, **marks)
    model = _model(config, wanted, layout, chosen)
    return _short(replace(config, model=model, parallel=parallel, train=train, data=data), layout, steps)


def of_groups(config: Config, first: Smaller, most: int) -> Smaller | None:
    """One step on tp ranks alone that a wrong group differs in, where it does not in `first`; None: it does. Without
    ranks for that, `first` says so in its notes."""
    wanted, full = first.wanted, Shared.of(config, first.wanted.tp)
    if full is None or full.groups == 1 or not full.hidden_in(Shared.of(first.config, first.layout.tp)):
        return None
    fitting = (tp for tp in divisors(wanted.tp) if not full.hidden_in(full.on(tp)))
    tp = next(fitting, wanted.tp)
    if tp > most:
        first.notes.append(
            f"not verified, for want of ranks: which of {full.groups} groups each of {wanted.tp} tp ranks takes; give "
            f"--most-ranks {tp} or more"
        )
        return None
    note = f"a second run, as which of {full.groups} groups a rank of tp {wanted.tp} takes does not show in the first"
    return Smaller(_made(config, wanted, Layout(tp), 1), wanted, Layout(tp), [note])


class Shared(NamedTuple):
    """tp ranks with `heads` query heads each that share fewer groups of keys and values."""

    tp: int
    groups: int
    heads: int

    @classmethod
    def of(cls, config: Config, tp: int) -> Shared | None:
        m = config.model
        return cls(tp, m.num_kv_groups, m.num_attention_heads // tp) if m.num_kv_groups < tp else None

    @property
    def wrong(self) -> set[str]:
        """Maps from a rank to its group that are not the right one: of remainders and quotients by each size."""
        each, ranks = self.tp // self.groups, range(self.tp)
        sizes = dict(groups=self.groups, each=each, heads=self.heads, group_heads=each * self.heads, tp=self.tp)
        maps = {f"% {name}": [rank % n for rank in ranks] for name, n in sizes.items()}
        maps |= {f"// {name}": [rank // n for rank in ranks] for name, n in sizes.items()}
        maps |= {"first": [0 for _ in ranks], "reversed": [(self.tp - 1 - rank) // each for rank in ranks]}
        return {name for name, groups in maps.items() if groups != maps["// each"]}

    def hidden_in(self, small: Shared | None) -> set[str]:
        """Wrong maps that are right there."""
        return self.wrong - (small.wrong if small else set())

    def on(self, tp: int) -> Shared:
        """On so many ranks, small: what hides least, then with as many ranks per group, then of other sizes each."""
        if tp < 4 or self.groups == 1:
            return Shared(tp, 1, min(self.heads, 2))
        groups = [self.groups] if tp == self.tp else [n for n in divisors(tp) if 2 <= n < tp] or [1]
        tried = [Shared(tp, some, heads) for some in groups for heads in ([1] if self.heads == 1 else [2, 3, 4])]

        def cost(one: Shared) -> tuple[int, ...]:
            each = one.tp // one.groups
            other = each != self.tp // self.groups
            return len(self.hidden_in(one)), other, -len({one.groups, each, one.heads}), one.heads

        return min(tried, key=cost)


class _Stages(NamedTuple):
    """`counts`: layers of every stage, where the options give them. `layers`: of the real model that are left."""

    counts: list[int] | None
    layers: list[int]
    chunks: int


def _stages(config: Config, wanted: Layout, layout: Layout) -> _Stages:
    """The first, the last and some between them, of ranks and of their chunks; the fullest of these has 2 layers (1
    where there are many stages), the others as many or 1, and what has none stays without."""
    given = explicit_stage_layers(config.model.num_layers, config.parallel)
    chunks = len(given) // wanted.pp if given else config.parallel.num_virtual_stages_per_pipeline_rank or 1
    left = min(chunks, 2)
    number, total = left * layout.pp, config.model.num_layers
    most = 2 if number <= 4 else 1
    if given is None:
        uneven = total % (chunks * wanted.pp) > 0
        count = min(total, most * number + (uneven and number > 1))
        return _Stages(None, _spread(total, count), left)
    ranks, rounds = _spread(wanted.pp, layout.pp), _spread(chunks, left)
    real = [given[c * wanted.pp + r] for c in rounds for r in ranks]
    counts = [0 if n == 0 else most if n == max(real) else 1 for n in real]
    counts = counts if sum(counts) <= total else real
    return _Stages(counts, _spread(total, sum(counts)), left)


def _spread(of: int, count: int) -> list[int]:
    """`count` of range(of), the first and the last among them, where there are two.

    >>> _spread(16, 4), _spread(5, 1), _spread(3, 3)
    ([0, 5, 10, 15], [0], [0, 1, 2])
    """
    if count < 2:
        return [0] * count
    return [round(i * (of - 1) / (count - 1)) for i in range(count)]


def _model(config: Config, wanted: Layout, layout: Layout, stages: _Stages) -> ModelConfig:
    m, tp = config.model, layout.tp
    if shared := Shared.of(config, wanted.tp):
        small = shared.on(tp)
        groups, each = small.groups, small.heads * tp
    else:
        groups = tp * (1 if m.num_kv_groups == wanted.tp else 2)
        each = min(m.num_attention_heads // m.num_kv_groups, 4) * groups
    unit = 1 if m.kv_channels else math.gcd(m.hidden_size, 16)  # torch draws normal numbers by sixteens
    turned = lambda k: int(k * m.rotary_percent)  # noqa: E731  channels of a head, an even number
    heads = (k for k in range(HEAD, m.head_size) if turned(k) and not turned(k) % 2 and not each * k % unit)
    if "a2a" in m.cp_comm_type:  # each rank of cp gets heads
        groups, each = (n * (layout.cp // math.gcd(layout.cp, each // tp)) for n in (groups, each))
    head = next(heads, m.head_size)
    hidden = 8 * HEAD if m.kv_channels else each * head
    ffn = tp * max(3, round(m.ffn_size / m.hidden_size * hidden / tp))
    unit = 2 * layout.cp * tp if layout.cp > 1 else tp
    length = min(m.seq_length, _up(LENGTH, unit))
    windowed = m.window_size is not None and 0 < m.window_size[0] < m.seq_length - 1
    changes: dict[str, Any] = dict(
        num_layers=len(stages.layers),
        hidden_size=hidden,
        num_attention_heads=each,
        kv_channels=head if m.kv_channels else None,
        num_query_groups=groups if m.group_query_attention else None,
        ffn_hidden_size=ffn,
        seq_length=length,
        max_position_embeddings=length if m.max_positions == m.seq_length else 2 * length,
        make_vocab_size_divisible_by=min(m.make_vocab_size_divisible_by, 8),
        window_size=(max(1, min(m.window_size[0], length // 4)), m.window_size[1]) if windowed else m.window_size,  # type: ignore[index]
        window_attn_skip_freq=_pattern(m.window_attn_skip_freq, m.num_layers, stages.layers),
        no_rope_freq=_pattern(m.no_rope_freq, m.num_layers, stages.layers),
        cp_comm_type=tuple(m.layer_cp_comm[i] for i in stages.layers) if layout.cp > 1 else ("allgather",),
        yarn_original_max_position_embeddings=min(m.yarn_original_max_position_embeddings, length // 2),
        init_method_std=max(m.init_method_std, hidden**-0.5),
    )
    if m.num_experts:
        width = lambda size, by: by * max(3, round(size / m.hidden_size * hidden / by))  # noqa: E731
        common = m.moe_shared_expert_intermediate_size
        changes |= dict(
            moe_layer_freq=_pattern(str([*map(int, m.moe_layers)]), m.num_layers, stages.layers),
            moe_ffn_hidden_size=width(m.expert_ffn_size, layout.etp),
            moe_shared_expert_intermediate_size=None if common is None else width(common, tp),
            **_experts(m, wanted, layout),
        )
    return replace(m, **changes)


def _experts(m: ModelConfig, wanted: Layout, layout: Layout) -> dict[str, int]:
    """As few as let a token choose: all, one or some of the experts, of all, one or some groups, on ranks that have one
    or several."""
    E, k, G, best = m.num_experts or 0, m.moe_router_topk, m.moe_router_num_groups, m.moe_router_group_topk
    if G is None or best is None:
        experts = _up(max(min(E, 4), (1 + (wanted.ep < E)) * layout.ep), layout.ep)
        return dict(num_experts=experts, moe_router_topk=experts if k == E else min(k, 3))
    left, each = min(best, 2), min(k // best, 2)
    groups = left if best == G else min(2 * left, G)
    experts = _up(groups * (each + (k // best < E // G)), math.lcm(groups, layout.ep))
    of_groups = dict(moe_router_num_groups=groups, moe_router_group_topk=left)
    return dict(num_experts=experts, moe_router_topk=each * left, **of_groups)


def _up(least: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `least`."""
    return -(-least // unit) * unit


def _pattern(pattern: str | None, of: int, layers: Sequence[int]) -> str | None:
    """The pattern of the remaining layers, with both kinds where there were two."""
    if pattern is None or len(layers) == of:
        return pattern
    if pattern.strip().isdigit():
        return str(min(int(pattern), len(layers)))
    bits = parse_layer_pattern(pattern, of)
    left = [int(bits[layer]) for layer in layers]
    if len(set(bits)) == 2 and len(set(left)) == 1 and len(left) > 1:
        left[-2] = 1 - left[-2]
    return str(left).replace(" ", "")


def _parallel(config: Config, wanted: Layout, layout: Layout, stages: _Stages) -> ParallelConfig:
    p, pp = config.parallel, layout.pp
    chunks, spelt = (stages.chunks if stages.chunks > 1 and pp > 1 else None), None
    if stages.counts is not None and pp > 1:
        chunks, spelt = None, "E" + "|".join("t" * n for n in stages.counts) + "L"
    size = p.microbatch_group_size_per_virtual_pipeline_stage
    other = ("num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers")  # ways to say the same
    changes: dict[str, Any] = dict.fromkeys((*other, "decoder_last_pipeline_num_layers"))
    changes |= dict(pipeline_model_parallel_layout=spelt, num_virtual_stages_per_pipeline_rank=chunks)
    changes |= dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), False)
    changes |= dict(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=pp, ddp_bucket_size=BUCKET)
    changes |= dict(expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp)
    group = None if size is None else pp + (size > wanted.pp)
    return replace(p, **changes, microbatch_group_size_per_virtual_pipeline_stage=group)


def _batch(config: Config, wanted: Layout, layout: Layout, layers: int) -> Any:
    """Fewer micro-batches than stages, as many, or no multiple, as they were."""
    t, pp = config.train, layout.pp

    def fewer(batch: int, micro: int) -> tuple[int, int]:
        real, size = batch // max(1, micro * wanted.dp), min(micro, 2)
        multiple = 2 * pp if real % wanted.pp == 0 else pp + 1
        number = min(real, 3) if pp == 1 else pp - 1 if real < wanted.pp else multiple
        return max(1, number) * size * layout.dp, size

    batch, size = fewer(t.batch_size(wanted.dp), t.micro_batch_size)
    evaluated, eval_size = fewer(t.eval_batch_size(wanted.dp), t.eval_micro_batch_size or t.micro_batch_size)
    again = t.recompute_num_layers
    return replace(
        t,
        micro_batch_size=size,
        global_batch_size=batch,
        eval_micro_batch_size=eval_size,
        eval_global_batch_size=evaluated,
        recompute_num_layers=None if again is None else min(again, max(1, layers // pp - 1)),
    )


def _short(config: Config, layout: Layout, steps: int) -> Config:
    """Some steps of it that leave nothing behind."""
    t, o, p = config.train, config.optim, config.parallel
    unset = ("exit_interval", "exit_duration_in_mins", "iterations_to_skip", "eval_interval", "train_samples")
    off = ("check_for_spiky_loss", "check_for_large_grads", "dry_run", "skip_train", "compile")
    plain: dict[str, Any] = {**dict.fromkeys(unset), **dict.fromkeys(off, False), "rerun_mode": "disabled"}
    plain |= dict(rampup_batch_size=None, step_batch_size_schedule=None, spike_action="log", train_iters=steps)
    plain |= dict(global_batch_size=t.global_batch_size or t.batch_size(layout.dp))
    train = replace(t, **plain, eval_iters=max(0, min(t.eval_iters, EVALUATED)))
    rate: dict[str, Any] = {f.name: f.default for f in fields(o) if f.name.startswith(("lr_", "min_lr"))}
    rate |= dict(lr=RATE, lr_decay_style="constant", adam_eps=max(o.adam_eps, EPS), decoupled_min_lr=None)
    rate |= dict(decoupled_lr=None if o.decoupled_lr is None else 3 * RATE)
    cpu = p.device != "cuda"
    device: dict[str, Any] = dict(device="cpu", distributed_backend=None) if cpu else {}
    if cpu and p.attention_kernel not in ("blocked", "torch"):
        device |= dict(attention_kernel="auto")
    train = replace(train, cuda_graph_impl="none") if cpu else train
    parallel = replace(p, **device, nproc=layout.world, data_parallel_size=None, context_parallel_size=layout.cp)
    silent: dict[str, Any] = dict(checkpoint=CheckpointConfig(), log=LogConfig(), operations=OperationsConfig())
    return replace(config, train=train, optim=replace(o, **rate), parallel=parallel, **silent)


def twin(config: Config) -> Config:
    """The same training in one process."""
    parts: dict[str, Any] = {section: getattr(config, section) for section in SECTIONS}
    for section, part in parts.items():
        parts[section] = replace(
            part, **{f.name: f.default for f in fields(part) if option_spec(f).resume == EXECUTION}
        )
    parallel = replace(parts["parallel"], nproc=1, device=config.parallel.device, kernels="torch")
    parts["parallel"] = replace(parallel, attention_kernel="torch")
    parts["model"] = replace(parts["model"], make_vocab_size_divisible_by=1)
    return Config(**parts)
