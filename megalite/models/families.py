"""The presets: option values of published models by name, from families.toml. Imports no torch.

The rest of families.toml, tensor names and the meaning of config.json, is read by interop/name_mapping.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megalite.common.tables import load_table
from megalite.config.hybrid_pattern import num_pattern_layers

TABLES = load_table(__file__, "families")


def _expand_preset(kind: str, row: list[Any]) -> dict[str, Any]:
    """Return the option values of a row of the table of presets."""
    shared = dict(TABLES["kinds"][kind])
    sizes = shared.pop("sizes").split()
    values = dict(zip(sizes, row, strict=False)) | shared
    for more in row[len(sizes) :]:
        values |= more
    if "hybrid_layer_pattern" in values:
        values["num_layers"] = num_pattern_layers(values["hybrid_layer_pattern"])
    values["max_position_embeddings"] = values["seq_length"]
    if values.pop("scaled_embedding", False):
        values["embedding_multiplier"] = values["hidden_size"] ** 0.5
    if "num_query_groups" in values:
        values["group_query_attention"] = values["num_query_groups"] != values["num_attention_heads"]
        if not values["group_query_attention"]:
            del values["num_query_groups"]
    return values


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: _expand_preset(kind, row) for kind, rows in TABLES["presets"].items() for name, row in rows.items()}
)
