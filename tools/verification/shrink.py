"""Shrink a run until it trains twice within seconds, and keep everything that depends on its layout.

    kept       kinds of layers, norms, positions, activations, losses and dropout; ties; window and layer patterns;
               sharding, schedule, chunks, uneven stages, split backward, recomputation, precision, overlap
    smaller    hidden size, heads, groups, feed-forward, layers, experts and experts per token, sequence, vocabulary,
               batch, buckets, and the axes of the layout; an axis above 1 stays above 1 if the ranks suffice
    replaced   the data are generated; the learning rate is constant, and Adam's eps is at least 1e-3. The first update
               is g / (|g| + eps), so a smaller eps turns a gradient that consists of rounding errors into a full step.

If tp ranks share groups of keys and values, the group of a rank is a function of its number. On few ranks a wrong
function can give the right groups: with one group all functions do, on 4 ranks with two groups `rank // groups` does.
If the small layout hides such a mistake, `kv_group_check` returns a second run that has only tp.

`single_process_config` is the same training in one process with the simplest code: every option that only changes how a
step is computed has its default, kernels are torch's, and the vocabulary has no padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, product
from typing import Any

from megalite.config.hybrid_pattern import (
    BORDER,
    MLP_LETTERS,
    num_pattern_layers,
    parse_hybrid_pattern,
    without_borders,
)
from megalite.config.option import EXECUTION, option_spec
from megalite.config.option_parsers import format_layer_pattern, parse_layer_pattern
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
    TrainConfig,
)
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.config.problems import divisors
from tools.verification.reference_sharding import Layout

MIN_HEAD_SIZE = 4
SEQ_LENGTH = 16
VOCAB_SIZE = 97  # a prime number, so it is padded
BUCKET_SIZE = 2000  # elements
LEARNING_RATE, MIN_ADAM_EPS = 0.01, 1e-3
MAX_EVAL_ITERS = 2
AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")  # of a Layout


@dataclass(frozen=True)
class ShrunkConfig:
    """A small run.

    Attributes:
        requested: the layout of the command line.
        layout: the layout that is verified.
        notes: what differs from the request.
    """

    config: Config
    requested: Layout
    layout: Layout
    notes: list[str]


def requested_layout(config: Config) -> tuple[Layout, str]:
    """Return the layout of a command line, and a note on it or an empty string.

    Without --nproc and --dp the launcher decides the number of ranks; dp is 2 then if the batch can be split.

    Raises:
        ConfigError: if --nproc does not fit.
    """
    parallel, train = config.parallel, config.train
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    ep, etp = 1, 1
    if config.model.num_experts:
        ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    dp = parallel.data_parallel_size
    note = ""
    if dp is None and parallel.nproc is not None:
        ranks_per_replica = tp * pp * cp
        if parallel.nproc % ranks_per_replica:
            raise ConfigError(
                [
                    f"nproc={parallel.nproc} is not a multiple of tp {tp} x pp {pp} x cp {cp}; give a multiple of "
                    f"{ranks_per_replica}"
                ]
            )
        dp = parallel.nproc // ranks_per_replica
    elif dp is None:
        batch_size = train.global_batch_size or 2 * train.micro_batch_size
        num_microbatches = batch_size // max(1, train.micro_batch_size)
        dp = 2 if num_microbatches % 2 == 0 else 1
        note = f"neither --nproc nor --dp is given: dp {dp}"
    return Layout(tp, pp, dp, parallel.use_tp_pp_dp_mapping, cp, ep, etp), note


def shrink_layout(requested: Layout, max_ranks: int) -> Layout:
    """Return the best layout on at most `max_ranks` ranks.

    The best layout has most of the axes above 1, then more than two pipeline ranks, then most ranks, tp first.

    >>> [str(shrink_layout(Layout(*sizes), 8)) for sizes in ((8, 16, 32), (1, 16, 4), (2, 1, 2))]
    ['tp 2, pp 2, dp 2', 'tp 1, pp 4, dp 2', 'tp 2, pp 1, dp 2']
    """
    if requested.world_size <= max_ranks:
        return requested
    sizes = product(
        range(1, min(requested.pp, max_ranks) + 1),
        range(1, min(requested.dp, max_ranks) + 1),
        divisors(requested.tp),
        divisors(requested.cp),
        divisors(requested.ep),
        divisors(requested.etp),
    )
    candidates = [
        Layout(tp, pp, dp, requested.dp_outermost, cp, ep, etp)
        for pp, dp, tp, cp, ep, etp in sizes
        if tp * pp * dp * cp <= max_ranks and dp * cp * tp % (ep * etp) == 0
    ]

    def preference(layout: Layout) -> tuple[int, ...]:
        num_axes = sum(getattr(layout, axis) > 1 for axis in AXES if getattr(requested, axis) > 1)
        same_edp = layout.edp == requested.edp == 1
        return num_axes, same_edp, layout.pp > 2, layout.world_size, layout.tp, layout.cp, layout.dp, layout.ep

    return max(candidates, key=preference)


def shrink(config: Config, max_ranks: int, steps: int, keep_sizes: bool = False) -> ShrunkConfig:
    """Return a small version of a valid configuration.

    Args:
        keep_sizes: keep the sizes of the model, the data and the layout.

    Raises:
        ConfigError: if --nproc does not fit the layout.
        ValueError: if `max_ranks` do not suffice; the message has the form `name=value breaks rule; remedy`.
    """
    requested, note = requested_layout(config)
    notes = [note] if note else []
    if keep_sizes:
        if requested.world_size > max_ranks:
            raise ValueError(
                f"world={requested.world_size} ({requested}) is above --max-ranks {max_ranks}; raise it, or drop "
                "--full-size"
            )
        return ShrunkConfig(_limit_steps(config, requested, steps), requested, requested, notes)
    layout = shrink_layout(requested, max_ranks)
    if layout.world_size == 1 < requested.world_size:
        raise ValueError(f"max_ranks={max_ranks} leaves nothing of {requested}; give {requested.min_ranks} or more")
    lost_axes = [
        f"{axis} {getattr(requested, axis)}"
        for axis in AXES
        if getattr(requested, axis) > 1 and getattr(layout, axis) == 1
    ]
    if lost_axes:
        notes.append(
            f"not verified, because there are too few ranks: {' and '.join(lost_axes)}; give --max-ranks "
            f"{requested.min_ranks} or more"
        )
    return ShrunkConfig(_shrink_config(config, requested, layout, steps), requested, layout, notes)


def kv_group_check(config: Config, first: ShrunkConfig, max_ranks: int) -> ShrunkConfig | None:
    """Return a run of one step with only tp, in which a rank with a wrong group of keys and values differs.

    Returns None if `first` shows that already. If it needs more than `max_ranks` ranks, returns None too, and adds a
    note to `first`.
    """
    requested = first.requested
    sharing = KVSharing.from_config(config, requested.tp)
    if sharing is None or sharing.groups == 1:
        return None
    if not sharing.mistakes_hidden_in(KVSharing.from_config(first.config, first.layout.tp)):
        return None
    tp = next((tp for tp in divisors(requested.tp) if not sharing.mistakes_hidden_in(sharing.shrink(tp))), requested.tp)
    if tp > max_ranks:
        first.notes.append(
            f"not verified, because there are too few ranks: which of {sharing.groups} groups each of {requested.tp} "
            f"tp ranks takes; give --max-ranks {tp} or more"
        )
        return None
    note = (
        f"this second run checks which of {sharing.groups} groups a rank of tp {requested.tp} takes; the first run "
        "does not show it"
    )
    layout = Layout(tp)
    return ShrunkConfig(_shrink_config(config, requested, layout, 1), requested, layout, [note])


@dataclass(frozen=True)
class KVSharing:
    """tp ranks that share groups of keys and values, because there are fewer groups than ranks."""

    tp: int
    groups: int
    heads: int  # query heads per rank

    @classmethod
    def from_config(cls, config: Config, tp: int) -> KVSharing | None:
        """Return the sharing with `tp` ranks, or None if each rank has groups of its own."""
        model = config.model
        if model.num_kv_groups >= tp:
            return None
        return cls(tp, model.num_kv_groups, model.num_attention_heads // tp)

    @property
    def wrong_maps(self) -> set[str]:
        """The wrong functions from a rank to its group that differ from the right one: remainders and quotients."""
        ranks = range(self.tp)
        ranks_per_group = self.tp // self.groups
        sizes = {
            "groups": self.groups,
            "each": ranks_per_group,
            "heads": self.heads,
            "group_heads": ranks_per_group * self.heads,
            "tp": self.tp,
        }
        maps: dict[str, list[int]] = {}
        for name, size in sizes.items():
            maps[f"% {name}"] = [rank % size for rank in ranks]
            maps[f"// {name}"] = [rank // size for rank in ranks]
        maps["first"] = [0 for _ in ranks]
        maps["reversed"] = [(self.tp - 1 - rank) // ranks_per_group for rank in ranks]
        right_map = maps["// each"]
        return {name for name, groups in maps.items() if groups != right_map}

    def mistakes_hidden_in(self, small: KVSharing | None) -> set[str]:
        """Return the functions that are wrong here, but right in a small run."""
        return self.wrong_maps - (small.wrong_maps if small else set())

    def shrink(self, tp: int) -> KVSharing:
        """Return a small sharing on `tp` ranks.

        It hides as few mistakes as possible, then has as many ranks per group, and then as many different sizes.
        """
        if tp < 4 or self.groups == 1:
            return KVSharing(tp, 1, min(self.heads, 2))
        groups = [self.groups]
        if tp != self.tp:
            groups = [n for n in divisors(tp) if 2 <= n < tp] or [1]
        heads = [1] if self.heads == 1 else [2, 3, 4]

        def cost(sharing: KVSharing) -> tuple[int, ...]:
            ranks_per_group = sharing.tp // sharing.groups
            num_hidden = len(self.mistakes_hidden_in(sharing))
            has_other_ratio = ranks_per_group != self.tp // self.groups
            num_sizes = len({sharing.groups, ranks_per_group, sharing.heads})
            return num_hidden, has_other_ratio, -num_sizes, sharing.heads

        return min((KVSharing(tp, n, h) for n in groups for h in heads), key=cost)


def single_process_config(config: Config) -> Config:
    """Return the configuration of the same training in one process."""
    sections: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        defaults = {
            option.name: option.default for option in fields(section) if option_spec(option).resume == EXECUTION
        }
        sections[name] = replace(section, **defaults)
    sections["parallel"] = replace(
        sections["parallel"], nproc=1, device=config.parallel.device, kernels="torch", attention_kernel="torch"
    )
    sections["model"] = replace(sections["model"].for_any_pipeline(), make_vocab_size_divisible_by=1)
    return Config(**sections)


def _shrink_config(config: Config, requested: Layout, layout: Layout, steps: int) -> Config:
    stages = _shrink_stages(config, requested, layout)
    data = DataConfig(
        mock_data=True,
        tokenizer_type="NullTokenizer",
        vocab_size=VOCAB_SIZE,
        eod_mask_loss=config.data.eod_mask_loss,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
    )
    small = replace(
        config,
        model=_shrink_model(config, requested, layout, stages),
        parallel=_shrink_parallel(config, requested, layout, stages),
        train=_shrink_batch(config, requested, layout, len(stages.layers)),
        data=data,
    )
    return _limit_steps(small, layout, steps)


@dataclass(frozen=True)
class _Stages:
    """The stages of a small run.

    Attributes:
        layers_per_stage: number of layers of every stage; None if the options of the run do not state them.
        layers: numbers of the layers of the run that are kept.
        num_chunks: chunks per pipeline rank.
        pattern: the layer pattern, with borders if the stages are stated; None if the run has none.
    """

    layers_per_stage: list[int] | None
    layers: list[int]
    num_chunks: int
    pattern: str | None = None


def _shrink_stages(config: Config, requested: Layout, layout: Layout) -> _Stages:
    """Keep the first, the last and some other pipeline ranks, and the same of their chunks.

    The stages with most layers have 2 layers, or 1 if there are more than 4 stages. The others have 1 layer, or none if
    they had none.
    """
    num_layers = config.model.num_layers
    stage_layers = explicit_stage_layers(config.model, config.parallel)
    all_chunks = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    if stage_layers:
        all_chunks = len(stage_layers) // requested.pp
    num_chunks = min(all_chunks, 2)
    num_stages = num_chunks * layout.pp
    max_layers = 2 if num_stages <= 4 else 1
    has_pattern = config.model.hybrid_layer_pattern is not None
    if has_pattern and (stage_layers is None or layout.pp == 1):
        min_layers = max_layers * num_stages
        if num_stages > 1:
            min_layers += 1
        pattern = _shrink_letters(_letters_of_layers(config.model), min_layers)
        return _Stages(None, [*range(num_pattern_layers(pattern))], num_chunks, pattern)
    if stage_layers is None:
        is_uneven = num_layers % (all_chunks * requested.pp) > 0
        count = max_layers * num_stages
        if is_uneven and num_stages > 1:
            count += 1
        return _Stages(None, _spread(num_layers, min(num_layers, count)), num_chunks)
    pp_ranks, chunks = _spread(requested.pp, layout.pp), _spread(all_chunks, num_chunks)
    indices = [chunk * requested.pp + rank for chunk in chunks for rank in pp_ranks]
    if has_pattern:
        pattern = _shrink_pattern_stages(config.model, stage_layers, indices, max_layers)
        counts = [len(stage) for stage in parse_hybrid_pattern(pattern)]
        return _Stages(counts, [*range(num_pattern_layers(pattern))], num_chunks, pattern)
    kept_stages = [stage_layers[index] for index in indices]
    largest = max(kept_stages)
    counts = []
    for count in kept_stages:
        if count == 0:
            counts.append(0)
        else:
            counts.append(max_layers if count == largest else 1)
    if sum(counts) > num_layers:
        counts = kept_stages
    return _Stages(counts, _spread(num_layers, sum(counts)), num_chunks)


def _letters_of_layers(model: ModelConfig) -> list[str]:
    return [layer.letters for stage in model.pattern_stages for layer in stage]


def _shrink_pattern_stages(
    model: ModelConfig, stage_layers: Sequence[int], indices: Sequence[int], max_layers: int
) -> str:
    """Return a pattern of the first layers of some stages, with borders.

    It has each letter of the run's pattern, and a border that splits a layer if the run's has one.

    Args:
        stage_layers: number of layers of every stage of the run.
        indices: the stages that are kept.
        max_layers: maximum number of layers that are kept of a stage, before others are added.
    """
    layers = _letters_of_layers(model)
    letters_per_stage = []
    for count in stage_layers:
        letters_per_stage.append(layers[:count] or layers[:1])
        layers = layers[count:] or layers
    stages = ["".join(letters_per_stage[index][:max_layers]) for index in indices]
    split = re.search(r"([^-E|])\|([-E])", model.hybrid_layer_pattern or "")
    if split is not None and not re.search(r"[^-E|]\|[-E]", BORDER.join(stages)):
        stages[0] += split[1]
        stages[1] = split[2] + stages[1]
    for letter in _missing_letters(model.hybrid_layer_pattern or "", "".join(stages)):
        stages[-1] += letter
    return BORDER.join(stages)


def _shrink_letters(layers: Sequence[str], min_layers: int) -> str:
    """Return a pattern without borders that has each kind of layer and, unless `layers` are fewer, `min_layers`."""
    pattern = "".join(dict.fromkeys(layers))
    for letters in [*layers] * min_layers:
        if num_pattern_layers(pattern) >= min(min_layers, len(layers)):
            break
        pattern += letters
    for letter in _missing_letters("".join(layers), pattern):
        pattern += letter
    return pattern


def _missing_letters(pattern: str, small: str) -> list[str]:
    return [letter for letter in dict.fromkeys(pattern) if letter not in (*small, BORDER)]


def _spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced numbers of range(total), with the first and the last if count is at least 2.

    >>> _spread(16, 4), _spread(5, 1), _spread(3, 3)
    ([0, 5, 10, 15], [0], [0, 1, 2])
    """
    if count < 2:
        return [0] * count
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def _shrink_model(config: Config, requested: Layout, layout: Layout, stages: _Stages) -> ModelConfig:
    model, tp, cp = config.model, layout.tp, layout.cp
    num_heads, num_groups = _shrink_heads(config, requested, layout)
    head_size = _shrink_head_size(model, num_heads)
    hidden_size = 8 * MIN_HEAD_SIZE if model.kv_channels else num_heads * head_size

    def width(size: int, multiple: int) -> int:
        """Scale a feed-forward size with the hidden size; at least 3 columns per rank."""
        return multiple * max(3, round(size / model.hidden_size * hidden_size / multiple))

    seq_length = min(model.seq_length, _round_up(SEQ_LENGTH, 2 * cp * tp if cp > 1 else tp))
    window_size = model.window_size
    if window_size is not None and 0 < window_size[0] < model.seq_length - 1:
        window_size = (max(1, min(window_size[0], seq_length // 4)), window_size[1])
    changes: dict[str, Any] = dict(
        num_layers=len(stages.layers),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        kv_channels=head_size if model.kv_channels else None,
        num_query_groups=num_groups if model.group_query_attention else None,
        ffn_hidden_size=width(model.ffn_size, tp),
        seq_length=seq_length,
        max_position_embeddings=seq_length if model.max_positions == model.seq_length else 2 * seq_length,
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 8),
        window_size=window_size,
        cp_comm_type=("allgather",),
        yarn_original_max_position_embeddings=min(model.yarn_original_max_position_embeddings, seq_length // 2),
        init_method_std=max(model.init_method_std, hidden_size**-0.5),
    )
    if stages.pattern is not None:
        changes["hybrid_layer_pattern"] = stages.pattern
        changes |= _shrink_letter_options(model, stages.pattern)
    else:
        for name in ("window_attn_skip_freq", "no_rope_freq"):
            changes[name] = _shrink_pattern(getattr(model, name), model.num_layers, stages.layers)
        if cp > 1:
            changes["cp_comm_type"] = tuple(model.layers[i].cp_comm_type for i in stages.layers)
    if cp == 1:
        changes["cp_comm_type"] = ("allgather",)
    if model.num_experts:
        moe_layers = str([int(layer.has_experts) for layer in model.layers])
        if model.hybrid_layer_pattern is None:
            changes["moe_layer_freq"] = _shrink_pattern(moe_layers, model.num_layers, stages.layers)
        changes["moe_ffn_hidden_size"] = width(model.expert_ffn_size, layout.etp)
        if model.moe_shared_expert_intermediate_size is not None:
            changes["moe_shared_expert_intermediate_size"] = width(model.moe_shared_expert_intermediate_size, tp)
        changes |= _shrink_experts(model, requested, layout)
    return replace(model, **changes)


def _shrink_letter_options(model: ModelConfig, pattern: str) -> dict[str, Any]:
    """Return the options with a value for each letter of the small pattern.

    Each combination of the run's mixers occurs, as far as the small pattern has mixers for them.
    """
    mixers = [layer for layer in model.layers if layer.mixer is not None]
    kinds = {(layer.window is not None, layer.rope is None, layer.cp_comm_type) for layer in mixers}
    kinds_in_turn = cycle(sorted(kinds, reverse=True))  # with a window first: one mixer alone has it
    letters = [
        (False, False, "allgather") if letter in MLP_LETTERS else next(kinds_in_turn)
        for letter in without_borders(pattern)
    ]
    changes: dict[str, Any] = {"window_attn_skip_freq": None, "no_rope_freq": None, "cp_comm_type": ("allgather",)}
    windows, without_rope, comm_types = zip(*letters, strict=True)
    small_mixers = [
        kind for kind, letter in zip(letters, without_borders(pattern), strict=True) if letter not in MLP_LETTERS
    ]
    if len({has_window for has_window, *_ in small_mixers}) == 2:
        changes["window_attn_skip_freq"] = format_layer_pattern(windows, periods=False)
    if model.no_rope_freq is not None and any(without_rope):
        changes["no_rope_freq"] = format_layer_pattern(without_rope, periods=False)
    if "a2a" in comm_types:
        changes["cp_comm_type"] = comm_types
    return changes


def _shrink_heads(config: Config, requested: Layout, layout: Layout) -> tuple[int, int]:
    """Return (number of attention heads, number of groups)."""
    model, tp = config.model, layout.tp
    sharing = KVSharing.from_config(config, requested.tp)
    if sharing is not None:
        small = sharing.shrink(tp)
        num_groups, num_heads = small.groups, small.heads * tp
    else:
        num_groups = tp if model.num_kv_groups == requested.tp else 2 * tp
        num_heads = min(model.num_attention_heads // model.num_kv_groups, 4) * num_groups
    if "a2a" in model.cp_comm_type:  # every cp rank gets heads
        factor = layout.cp // math.gcd(layout.cp, num_heads // tp)
        num_groups *= factor
        num_heads *= factor
    return num_heads, num_groups


def _shrink_head_size(model: ModelConfig, num_heads: int) -> int:
    """Return the smallest head size with an even number of rotated channels, above 0.

    If the hidden size follows from it, that is a multiple of 16 like the original, because torch draws normal numbers
    in groups of 16.
    """
    multiple = 1 if model.kv_channels else math.gcd(model.hidden_size, 16)
    for head_size in range(MIN_HEAD_SIZE, model.head_size):
        num_rotated = int(head_size * model.rotary_percent)
        if num_rotated and num_rotated % 2 == 0 and num_heads * head_size % multiple == 0:
            return head_size
    return model.head_size


def _shrink_experts(model: ModelConfig, requested: Layout, layout: Layout) -> dict[str, int]:
    """Return as few experts as keep the routing.

    Kept is whether a token goes to one, some or all of the experts and of the groups of experts, and whether a rank has
    one or several experts.
    """
    num_experts, topk = model.num_experts or 0, model.moe_router_topk
    num_groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    if num_groups is None or group_topk is None:
        experts_per_rank = 2 if requested.ep < num_experts else 1
        small_experts = _round_up(max(min(num_experts, 4), experts_per_rank * layout.ep), layout.ep)
        small_topk = small_experts if topk == num_experts else min(topk, 3)
        return {"num_experts": small_experts, "moe_router_topk": small_topk}
    small_group_topk = min(group_topk, 2)
    small_groups = small_group_topk if group_topk == num_groups else min(2 * small_group_topk, num_groups)
    topk_per_group = topk // group_topk
    small_topk_per_group = min(topk_per_group, 2)
    experts_per_group = small_topk_per_group + (topk_per_group < num_experts // num_groups)
    return {
        "num_experts": _round_up(small_groups * experts_per_group, math.lcm(small_groups, layout.ep)),
        "moe_router_topk": small_topk_per_group * small_group_topk,
        "moe_router_num_groups": small_groups,
        "moe_router_group_topk": small_group_topk,
    }


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _shrink_pattern(pattern: str | None, num_layers: int, layers: Sequence[int]) -> str | None:
    """Return the pattern of the layers that are kept; if it has both kinds of layers, the result has both too."""
    if pattern is None or len(layers) == num_layers:
        return pattern
    if pattern.strip().isdigit():
        return str(min(int(pattern), len(layers)))
    flags = parse_layer_pattern(pattern, num_layers)
    small = [int(flags[layer]) for layer in layers]
    if len(set(flags)) == 2 and len(set(small)) == 1 and len(small) > 1:
        small[-2] = 1 - small[-2]
    return str(small).replace(" ", "")


def _shrink_parallel(config: Config, requested: Layout, layout: Layout, stages: _Stages) -> ParallelConfig:
    parallel, pp = config.parallel, layout.pp
    num_chunks = stages.num_chunks if stages.num_chunks > 1 and pp > 1 else None
    pipeline_layout = None
    if stages.layers_per_stage is not None and pp > 1:
        num_chunks = None
    if stages.layers_per_stage is not None and pp > 1 and stages.pattern is None:
        pipeline_layout = "E" + "|".join("t" * count for count in stages.layers_per_stage) + "L"
    microbatch_group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if microbatch_group is not None:
        microbatch_group = pp + 1 if microbatch_group > requested.pp else pp
    return replace(
        parallel,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        pipeline_model_parallel_layout=pipeline_layout,
        num_virtual_stages_per_pipeline_rank=num_chunks,
        # other options that would set the layers of the stages
        num_layers_per_virtual_pipeline_stage=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        microbatch_group_size_per_virtual_pipeline_stage=microbatch_group,
        ddp_bucket_size=BUCKET_SIZE,
    )


def _shrink_batch(config: Config, requested: Layout, layout: Layout, num_layers: int) -> TrainConfig:
    """Keep the relation of micro-batches to stages: fewer, a multiple, or more but not a multiple."""
    train, pp = config.train, layout.pp

    def shrink_batch(batch_size: int, micro_batch_size: int) -> tuple[int, int]:
        """Return (batch size, micro-batch size)."""
        num_microbatches = batch_size // max(1, micro_batch_size * requested.dp)
        if pp == 1:
            count = min(num_microbatches, 3)
        elif num_microbatches < requested.pp:
            count = pp - 1
        elif num_microbatches % requested.pp == 0:
            count = 2 * pp
        else:
            count = pp + 1
        size = min(micro_batch_size, 2)
        return max(1, count) * size * layout.dp, size

    batch_size, micro_batch_size = shrink_batch(train.batch_size(requested.dp), train.micro_batch_size)
    eval_batch_size, eval_micro_batch_size = shrink_batch(
        train.eval_batch_size(requested.dp), train.eval_micro_batch_size or train.micro_batch_size
    )
    recompute_num_layers = train.recompute_num_layers
    if recompute_num_layers is not None:
        recompute_num_layers = min(recompute_num_layers, max(1, num_layers // pp - 1))
    return replace(
        train,
        micro_batch_size=micro_batch_size,
        global_batch_size=batch_size,
        eval_micro_batch_size=eval_micro_batch_size,
        eval_global_batch_size=eval_batch_size,
        recompute_num_layers=recompute_num_layers,
    )


def _limit_steps(config: Config, layout: Layout, steps: int) -> Config:
    """Return a run of a few plain steps that writes no files, on the CPU unless it is for CUDA."""
    train, optim, parallel = config.train, config.optim, config.parallel
    is_cuda = parallel.device == "cuda"
    train = replace(
        train,
        train_iters=steps,
        global_batch_size=train.global_batch_size or train.batch_size(layout.dp),
        eval_iters=max(0, min(train.eval_iters, MAX_EVAL_ITERS)),
        eval_interval=None,
        train_samples=None,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
        exit_interval=None,
        exit_duration_in_mins=None,
        iterations_to_skip=None,
        spike_action="log",
        check_for_spiky_loss=False,
        check_for_large_grads=False,
        rerun_mode="disabled",
        dry_run=False,
        skip_train=False,
        compile=False,
        cuda_graph_impl=train.cuda_graph_impl if is_cuda else "none",
    )
    rates: dict[str, Any] = {
        option.name: option.default for option in fields(optim) if option.name.startswith(("lr_", "min_lr"))
    }
    rates |= {
        "lr": LEARNING_RATE,
        "lr_decay_style": "constant",
        "decoupled_lr": None if optim.decoupled_lr is None else 3 * LEARNING_RATE,
        "decoupled_min_lr": None,
        "adam_eps": max(optim.adam_eps, MIN_ADAM_EPS),
    }
    device: dict[str, Any] = {}
    if not is_cuda:
        device = {"device": "cpu", "distributed_backend": None}
        if parallel.attention_kernel not in ("blocked", "torch"):
            device["attention_kernel"] = "auto"
    return replace(
        config,
        train=train,
        optim=replace(optim, **rates),
        parallel=replace(
            parallel, **device, nproc=layout.world_size, data_parallel_size=None, context_parallel_size=layout.cp
        ),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
        operations=OperationsConfig(),
    )
