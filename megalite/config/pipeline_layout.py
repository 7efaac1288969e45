"""The number of layers of each pipeline stage, where options give it: the same as in Megatron-LM. Pure.

    rank 0 .. pp - 1     num_layers / pp each; or the first and the last as given, and the others equal
    chunk 0 .. vpp - 1   equal within a rank: stage c * pp + r is chunk c of rank r
    embedding, loss      where they are accounted for, each takes the place of one layer on its stage

Source: megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
"""

import re

from megalite.config.options import ParallelConfig

STAGE_OPTIONS = (  # the options that give it
    *("num_layers", "pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
MAX_LAYOUT_CHARS = 100_000  # characters, once repeats are written out


def explicit_stage_layers(num_layers: int, p: ParallelConfig) -> list[int] | None:
    """Layers of every stage, in order of the model; None: not given, so the layers are to be balanced over
    pp x num_virtual_stages_per_pipeline_rank stages (planning/partition.py).

    Options that exclude each other are not given together. Raises ValueError: `name=value breaks rule; remedy`.
    """
    pp, chunk = p.pipeline_model_parallel_size, p.num_layers_per_virtual_pipeline_stage
    chunks = p.num_virtual_stages_per_pipeline_rank
    embedding, loss = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
    even = embedding or loss or chunk is not None
    first, last = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    uneven = first is not None or last is not None
    if p.pipeline_model_parallel_layout is not None:
        return parse_layout(p.pipeline_model_parallel_layout, num_layers, pp)
    places = num_layers + embedding + loss  # for layers, on all pipeline ranks
    if places % pp and not uneven:
        if not even:
            return None
        layers = f"num_layers={num_layers}{' + embedding' * embedding}{' + loss' * loss}"
        raise ValueError(f"{layers} is not a multiple of pipeline_model_parallel_size={pp}; change one")
    per_rank = _uneven(num_layers, pp, first, last) if uneven else [places // pp] * pp
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
    """Layers of every pipeline rank: `first` and `last` where given, the others equal."""
    middle = pp - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if middle < 0:
        raise ValueError(
            f"decoder_first_pipeline_num_layers={first} and decoder_last_pipeline_num_layers={last} are of two "
            f"pipeline ranks, pipeline_model_parallel_size={pp}; raise it, or drop them"
        )
    if left < 0 or (left > 0) != (middle > 0) or (middle and left % middle):
        given = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
        said = " and ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ValueError(
            f"{said} of num_layers={num_layers} leave {left} layers for {middle} other pipeline ranks, which must hold "
            "equal numbers, and at least one each; change one"
        )
    each = [left // middle] * middle if middle else []
    return [first] * (first is not None) + each + [last] * (last is not None)  # pyright: ignore[reportReturnType]


def parse_layout(text: str, num_layers: int, pp: int) -> list[int]:
    """Layers of every stage by Megatron-LM's layout string: stages separated by |, E embedding, t layer, L loss,
    x*n and (..)*n repeat, commas are ignored. Stages are in order of the model; their number is a multiple of pp.

    >>> parse_layout("Et|(tt|)*2t,L", 6, 4)
    [1, 2, 2, 1]
    """
    flat, where = text.replace(",", "").replace(" ", ""), f"pipeline_model_parallel_layout={text!r}"
    while (match := re.search(r"\(([^()]*)\)\*(\d+)|([EtL|])\*(\d+)", flat)) is not None:
        unit, times = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        if len(flat) + len(unit) * int(times[:9]) > MAX_LAYOUT_CHARS:
            raise ValueError(f"{where} repeats too much; write num_layers={num_layers} t")
        flat = flat[: match.start()] + unit * int(times) + flat[match.end() :]
    if not re.fullmatch(r"[EtL|]+", flat):
        raise ValueError(f"{where} has characters other than E, t, L, |, ( )*n; write it as in 'Et|(tt|)*2tL'")
    stages = flat.split("|")
    if not stages[0].startswith("E") or not stages[-1].endswith("L") or flat.count("E") != 1 or flat.count("L") != 1:
        raise ValueError(f"{where} must begin with the one E and end with the one L")
    if flat.count("t") != num_layers:
        raise ValueError(f"{where} holds {flat.count('t')} layers, num_layers={num_layers}; make them equal")
    if len(stages) > 1 and pp == 1:
        raise ValueError(f"{where} has {len(stages)} stages; drop it or raise pipeline_model_parallel_size above 1")
    if any(stage == "" for stage in stages):
        raise ValueError(f"{where} has an empty stage; give each a layer, E or L")
    if len(stages) % pp:
        raise ValueError(f"{where} has {len(stages)} stages, not a multiple of pipeline_model_parallel_size={pp}")
    return [stage.count("t") for stage in stages]
