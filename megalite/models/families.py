"""Published models as settings of models/gpt.py, and the names in their files: the tables in families.toml. No torch.

PRESETS map a model's name to values of options. A `Family` (family.py) says how the tensors of a `model_type` are named
and what its config.json means: a new family is an entry of FAMILIES.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megalite.config.tables import table_beside
from megalite.models.family import Family, rules

_TABLES = table_beside(__file__, "families")
_ADDED = ("keys", "fixed", "only", "optional")  # to those of the family that another is like


def _preset(kind: str, row: list[Any]) -> dict[str, Any]:
    shared = dict(_TABLES["kinds"][kind])
    sizes = shared.pop("sizes").split()
    values = dict(zip(sizes, row, strict=False)) | shared
    for more in row[len(sizes) :]:
        values |= more
    values["max_position_embeddings"] = values["seq_length"]
    if "num_query_groups" in values:
        values["group_query_attention"] = values["num_query_groups"] != values["num_attention_heads"]
        if not values["group_query_attention"]:
            del values["num_query_groups"]
    return values


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: _preset(kind, row) for kind, rows in _TABLES["presets"].items() for name, row in rows.items()}
)


def _families() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for name, table in _TABLES["families"].items():
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        for key in ("rules", "others"):
            if key in values:
                parts = [_TABLES["rules"][part] for part in values[key]]
                values[key] = tuple(rule for part in parts for rule in rules(part["lines"], part["layer"]))
        base = families[values.pop("like")] if "like" in values else None
        values |= {key: {**getattr(base, key), **values[key]} for key in _ADDED if base and key in values}
        values["name"] = name
        families[name] = replace(base, **values) if base else Family(**values)
    return families


# in the order in which an export tries them
FAMILIES: Mapping[str, Family] = MappingProxyType(_families())
