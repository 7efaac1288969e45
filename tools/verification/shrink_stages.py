"""The stages of a small run: which layers of the run they keep, and how they are split."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.hybrid_pattern import BORDER, DEPTH, num_pattern_layers, parse_hybrid_pattern
from megalite.config.options import Config, ModelConfig
from megalite.config.pipeline_layout import explicit_stage_layers
from tools.verification.reference_sharding import Layout


@dataclass(frozen=True)
class SmallStages:
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


def shrink_stages(config: Config, requested: Layout, layout: Layout) -> SmallStages:
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
        return SmallStages(None, [*range(num_pattern_layers(pattern))], num_chunks, pattern)
    if stage_layers is None:
        is_uneven = num_layers % (all_chunks * requested.pp) > 0
        count = max_layers * num_stages
        if is_uneven and num_stages > 1:
            count += 1
        return SmallStages(None, _spread(num_layers, min(num_layers, count)), num_chunks)
    pp_ranks, chunks = _spread(requested.pp, layout.pp), _spread(all_chunks, num_chunks)
    indices = [chunk * requested.pp + rank for chunk in chunks for rank in pp_ranks]
    if has_pattern:
        pattern = _shrink_pattern_stages(config.model, stage_layers, indices, max_layers)
        counts = [len(stage) for stage in parse_hybrid_pattern(pattern)]
        return SmallStages(counts, [*range(num_pattern_layers(pattern))], num_chunks, pattern)
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
    return SmallStages(counts, _spread(num_layers, sum(counts)), num_chunks)


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
    letters_of_layers = (model.hybrid_layer_pattern or "").partition(DEPTH)[0]
    for letter in _missing_letters(letters_of_layers, "".join(stages)):
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
