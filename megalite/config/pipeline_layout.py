"""The number of layers of each pipeline stage if options set it, computed as in Megatron-LM.

    rank 0 .. pp - 1     num_layers / pp each; or explicit numbers for the first and the last, and equal ones between
    chunk 0 .. vpp - 1   equal within a rank: stage c * pp + r is chunk c of rank r
    embedding, loss      count as one layer of their stage if the options account for them

Source: megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
"""

import itertools
import re

from megalite.config.hybrid_pattern import shown_pattern
from megalite.config.options import ModelConfig, ParallelConfig

STAGE_OPTIONS = (  # all options that affect the number of layers of a stage
    "num_layers",
    "hybrid_layer_pattern",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
LAYER_NAMES = re.compile(r"\w+(\.\w+)*\.\d+(,\w+(\.\w+)*\.\d+)*")  # names of layers, such as layers.4,layers.8
MAX_LAYOUT_CHARS = 100_000  # of a layout string after its repeats are expanded


def explicit_stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[int] | None:
    """Return the number of layers of every stage, in the order of the model.

    None means that no option sets it; planning/partition.py then balances the layers over
    pp x num_virtual_stages_per_pipeline_rank stages.

    Args:
        model: the model, whose layer pattern may have pipeline borders.
        parallel: options without the contradictions that validation/parallel.py reports.

    Raises:
        ValueError: if the layers cannot be split in this way, with the values, the rule and a remedy.
    """
    num_layers = model.num_layers
    pp = parallel.pipeline_model_parallel_size
    if len(model.pattern_stages) > 1:
        _check_num_stages(shown_pattern(model.hybrid_layer_pattern or ""), len(model.pattern_stages), pp)
        return [len(stage) for stage in model.pattern_stages]
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    embedding = parallel.account_for_embedding_in_pipeline_split
    loss = parallel.account_for_loss_in_pipeline_split
    even = embedding or loss or chunk is not None
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    uneven = first is not None or last is not None
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout, num_layers, pp, model.num_mtp_depths)
    num_units = num_layers + embedding + loss
    if num_units % pp and not uneven:
        if not even:
            return None
        layers = f"num_layers={num_layers}"
        if embedding:
            layers += " + embedding"
        if loss:
            layers += " + loss"
        raise ValueError(f"{layers} is not a multiple of pipeline_model_parallel_size={pp}; change one")
    per_rank = _uneven(num_layers, pp, first, last) if uneven else [num_units // pp] * pp
    if chunk is not None and per_rank[0] % chunk:
        raise ValueError(
            f"num_layers_per_virtual_pipeline_stage={chunk} does not divide the {per_rank[0]} layers of a pipeline rank"
            f" (num_layers={num_layers} over pp {pp}); change one"
        )
    vpp = per_rank[0] // chunk if chunk is not None else chunks or 1
    if pp == 1 and vpp > 1:
        raise ValueError(f"{vpp} virtual pipeline stages need pipeline_model_parallel_size above 1; drop or raise it")
    if not (uneven or even):
        return None
    if wrong := [n for n in per_rank if n % vpp]:
        name = f"num_virtual_stages_per_pipeline_rank={vpp}"
        raise ValueError(f"{name} does not divide the {wrong[0]} layers of a pipeline rank; change one")
    stages = [n // vpp for n in per_rank] * vpp
    stages[0] -= embedding
    stages[-1] -= loss
    return stages


def _uneven(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    """Return the number of layers of every pipeline rank: `first` and `last` unless None, and equal ones between."""
    num_middle = pp - (first is not None) - (last is not None)
    remaining = num_layers - (first or 0) - (last or 0)
    if num_middle < 0:
        raise ValueError(
            f"decoder_first_pipeline_num_layers={first} and decoder_last_pipeline_num_layers={last} are of two "
            f"pipeline ranks, pipeline_model_parallel_size={pp}; raise it, or drop them"
        )
    if remaining < 0 or (remaining > 0) != (num_middle > 0) or (num_middle and remaining % num_middle):
        explicit = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
        options = " and ".join(f"{name}={value}" for name, value in explicit.items() if value is not None)
        raise ValueError(
            f"{options} of num_layers={num_layers} leave {remaining} layers for {num_middle} other pipeline ranks, "
            "which must hold equal numbers, and at least one each; change one"
        )
    per_rank = [remaining // num_middle] * num_middle if num_middle else []
    if first is not None:
        per_rank.insert(0, first)
    if last is not None:
        per_rank.append(last)
    return per_rank


def parse_layout(text: str, num_layers: int, pp: int, num_mtp_depths: int = 0) -> list[int]:
    """Return the number of layers of every stage in a layout string, in the order of the model.

    In Megatron-LM's form, stages are separated by |. E is the embedding, t a layer, m a depth of multi-token prediction
    and L the loss; x*n and (..)*n repeat; commas are ignored. The other form has the names of the layers at which
    stages begin, except the first stage, as the split points of torch.distributed.pipelining: a name is anything that
    ends in a dot and the number of the layer, from 0. The number of stages must be a multiple of pp.

    Raises:
        ValueError: if the string is invalid or does not have `num_layers` layers and `num_mtp_depths` depths, with the
            reason and a remedy.

    >>> parse_layout("Et|(tt|)*2t,L", 6, 4)
    [1, 2, 2, 1]
    >>> parse_layout("layers.1,layers.3,layers.5", 6, 4)
    [1, 2, 2, 1]
    """
    where = f"pipeline_model_parallel_layout={text!r}"
    if LAYER_NAMES.fullmatch(text.replace(" ", "")):
        return _parse_layer_names(where, text, num_layers, pp)
    flat = text.replace(",", "").replace(" ", "")
    while (match := re.search(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)", flat)) is not None:
        unit, times = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        if len(flat) + len(unit) * int(times[:9]) > MAX_LAYOUT_CHARS:
            raise ValueError(f"{where} repeats too much; write num_layers={num_layers} t")
        flat = flat[: match.start()] + unit * int(times) + flat[match.end() :]
    if not re.fullmatch(r"[EtmL|]+", flat):
        raise ValueError(
            f"{where} has characters other than E, t, m, L, |, ( )*n; write it as in 'Et|(tt|)*2tL', or name layers as "
            "in 'layers.4,layers.8'"
        )
    if flat.count("m") != num_mtp_depths:
        raise ValueError(f"{where} holds {flat.count('m')} m, mtp_num_layers={num_mtp_depths}; make them equal")
    if not flat.endswith("m" * num_mtp_depths + "L"):
        raise ValueError(
            f"{where} has m elsewhere than before L; depths of multi-token prediction use the head and continue from "
            f"its input: end it with {'m' * num_mtp_depths}L"
        )
    stages = flat.replace("m", "").split("|")
    if not stages[0].startswith("E") or not stages[-1].endswith("L") or flat.count("E") != 1 or flat.count("L") != 1:
        raise ValueError(f"{where} must start with its only E and end with its only L")
    if flat.count("t") != num_layers:
        raise ValueError(f"{where} holds {flat.count('t')} layers, num_layers={num_layers}; make them equal")
    if any(stage == "" for stage in stages):
        raise ValueError(f"{where} has an empty stage; give each a layer, E or L")
    _check_num_stages(where, len(stages), pp)
    return [stage.count("t") for stage in stages]


def _parse_layer_names(where: str, text: str, num_layers: int, pp: int) -> list[int]:
    """Return the number of layers of every stage if `text` names the layers at which all but the first begin."""
    borders = [int(name.rpartition(".")[2][:9]) for name in text.replace(" ", "").split(",")]
    starts = [0, *borders, num_layers]
    layers = [end - start for start, end in itertools.pairwise(starts)]
    if min(layers) < 1:
        raise ValueError(
            f"{where} begins stages at layers {', '.join(map(str, borders))} of num_layers={num_layers}; name layers "
            f"from 1 to {num_layers - 1}, in increasing order"
        )
    _check_num_stages(where, len(layers), pp)
    return layers


def _check_num_stages(option: str, num_stages: int, pp: int) -> None:
    """Raise ValueError if an option (with its value) describes stages that `pp` pipeline ranks cannot hold."""
    if num_stages > 1 and pp == 1:
        raise ValueError(f"{option} has {num_stages} stages; drop it or raise pipeline_model_parallel_size above 1")
    if num_stages % pp:
        raise ValueError(f"{option} has {num_stages} stages, not a multiple of pipeline_model_parallel_size={pp}")
