"""The rotary positions of a config.json, read as transformers 5 reads them and written so that older releases do too.

    rope_scaling       a table; if it is not empty, it replaces rope_parameters as a whole
    rope_parameters    the newer form: the same table, with rope_theta in it
    keys at the top    rope_theta (GPT-NeoX: rotary_emb_base, rotary_pct) holds where the table has none;
                       original_max_position_embeddings comes before the table's, max_position_embeddings after both

A config.json whose two tables disagree is refused, as transformers drops one of them without a message.
"""

from collections.abc import Mapping
from typing import Any

from megalite.common.tables import load_table
from megalite.config.options import ModelConfig
from megalite.interop.name_mapping import ModelFamily
from megalite.kernels.rope import RopeScaling, Yarn
from megalite.models.gpt import rope_scaling

Json = dict[str, Any]
_FACTS = load_table(__file__, "constants")
_LLAMA3: Mapping[str, str] = _FACTS["llama3"]
_YARN: Mapping[str, str] = _FACTS["yarn"]
_YARN_USUAL = {"beta_fast": 32.0, "beta_slow": 1.0}  # where they are missing or 0
STRETCH = ("use_rope_scaling", "rope_scaling_factor", *_YARN.values())
_ORIGINAL = "original_max_position_embeddings"
# the base, and the share of the channels that are rotated
_KEYS = ("rope_theta", "partial_rotary_factor")
_NEOX_KEYS = ("rotary_emb_base", "rotary_pct")


def read_rope(config: Json, options: Json, family: ModelFamily) -> list[str]:
    """Add the options of rotary positions to `options`; returns what megalite cannot express."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name, {}), dict | None):
            return [f"{name}={config[name]!r} is not a table"]
    name, table = _table_in_use(config, family)
    nested = [key for key, value in table.items() if isinstance(value, dict) or key.endswith("_attention")]
    if nested:
        kinds = ", ".join(sorted(nested))
        return [f"{name} has a table for each kind of layer ({kinds}), but {family.name} takes one for all layers"]
    used = _filled(table, config, family)
    if problems := _lost(config, family, name, used) + _unread(config, family, used):
        return problems
    base, share = (used[key] for key in _KEYS)
    if base is None or (share is None and _partial(family)):
        key = _keys_of(family)[0 if base is None else 1]
        return [f"{key}=None is not a number"]
    if not _partial(family) and share != 1 and (share is not None or used["rope_type"] != "default"):
        return [f"partial_rotary_factor={share!r} is not 1"]
    options |= {"rotary_base": base, "rotary_percent": 1.0 if share is None else share}
    return _read_kind(used, options, family)


def _partial(family: ModelFamily) -> bool:
    """Whether the family may rotate only a part of the channels."""
    return "rotary_pct" in family.derived_keys


def _keys_of(family: ModelFamily) -> tuple[str, str]:
    return _NEOX_KEYS if _partial(family) else _KEYS


def _table_in_use(config: Json, family: ModelFamily) -> tuple[str, Json]:
    """(name, table). An empty rope_scaling does not count; an empty rope_parameters does, as no scaling."""
    if config.get("rope_scaling"):
        return "rope_scaling", config["rope_scaling"]
    if config.get("rope_parameters") is not None:
        return "rope_parameters", config["rope_parameters"]
    return "rope_parameters", family.optional.get("rope_parameters", {})


def _filled(table: Json, config: Json, family: ModelFamily) -> Json:
    """The table with rope_type, and with what stands at the top of `config` where it has nothing itself."""
    base_key, share_key = _keys_of(family)
    share = config.get(share_key, family.optional.get("rotary_pct", 1.0))
    filled: Json = {
        "rope_type": table.get("type", "default"),
        "rope_theta": config.get(base_key, family.optional.get("rope_theta", 10000.0)),
        "partial_rotary_factor": 1.0 if share is None and not _partial(family) else share,
        _ORIGINAL: config.get("max_position_embeddings"),
        **table,
    }
    if _ORIGINAL in config:  # before the table's
        filled[_ORIGINAL] = config[_ORIGINAL]
    return {key: value for key, value in filled.items() if key != "type"}


def _lost(config: Json, family: ModelFamily, name: str, used: Json) -> list[str]:
    """The problem of a rope_parameters beside a rope_scaling that says something else."""
    if name != "rope_scaling" or not config.get("rope_parameters"):
        return []
    other = _filled(config["rope_parameters"], config, family)
    keys = _KEYS if other["rope_type"] == "default" else {*other, *used}
    differing = sorted(key for key in keys if other.get(key) != used.get(key))
    if not differing:
        return []
    values = ", ".join(f"{key}={other.get(key)!r} instead of {used.get(key)!r}" for key in differing)
    both = f"rope_parameters beside rope_scaling, with {values}"
    return [f"{both}; transformers reads only the latter: write all values into one table, and delete the other"]


def _unread(config: Json, family: ModelFamily, used: Json) -> list[str]:
    """The problems of keys for the base and the share that only other families read."""
    problems = []
    others = _KEYS if _partial(family) else _NEOX_KEYS
    for own, other, key in zip(_keys_of(family), others, _KEYS, strict=True):
        if config.get(other) not in (None, used[key]):
            problems.append(f"{other}={config[other]!r} is not read in a {family.name}, which has {own}={used[key]!r}")
    return problems


def _read_kind(table: Json, options: Json, family: ModelFamily) -> list[str]:
    kind = table["rope_type"]
    if kind == "default":
        return []
    if kind not in family.scalings:
        return [f"rope scaling of type {kind!r} is not {' or '.join(('default', *family.scalings))}"]
    if table.get("factor") is None:
        return ["rope scaling without factor"]
    if kind == "linear":
        options["rotary_seq_len_interpolation_factor"] = table["factor"]
        return []
    if table[_ORIGINAL] is None:
        return [f"rope scaling without {_ORIGINAL}"]
    if kind == "yarn":
        return _read_yarn(table, options)
    options |= {"use_rope_scaling": True, "rope_scaling_factor": table["factor"]}
    known = RopeScaling()
    pairs = [(key, table.get(key), getattr(known, name)) for key, name in _LLAMA3.items()]
    return [f"rope scaling with {key}={value!r} is not {want}" for key, value, want in pairs if value != want]


def _read_yarn(table: Json, options: Json) -> list[str]:
    options["position_embedding_type"] = "yarn"
    given = {**table, "truncate": bool(table.get("truncate", True))}  # null is false
    if isinstance(length := given[_ORIGINAL], float) and length.is_integer():
        given[_ORIGINAL] = int(length)
    for key in ("beta_fast", "beta_slow"):
        given[key] = table.get(key) or _YARN_USUAL[key]  # 0 counts as not given
    wanted, mscale, mscale_all_dim = (table.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    options |= {option: given[key] for key, option in _YARN.items() if not key.startswith("mscale")}
    usual = (1.0, 0.0)
    pair = usual if mscale is None else (mscale, mscale_all_dim or 0.0)
    if wanted is None:  # mscale counts only beside mscale_all_dim
        options["mscale"], options["mscale_all_dim"] = pair if mscale and mscale_all_dim else usual
        return []
    try:
        for one, other in (pair, usual):
            own = Yarn(given["factor"], mscale=one, mscale_all_dim=other).magnitude
            if abs(wanted - own) <= 1e-6:
                options["mscale"], options["mscale_all_dim"] = one, other
                return []
    except (TypeError, ArithmeticError):
        return [f"rope scaling with {table!r} is not numbers"]
    return [f"rope scaling with attention_factor={wanted!r} is not {own:.6g}"]


def write_scaling(model: ModelConfig, family: ModelFamily) -> Json | None:
    """The value of rope_scaling, which all releases of transformers read."""
    if model.position_embedding_type == "yarn":
        values = {key: getattr(model, option) for key, option in _YARN.items()}
        scaling = rope_scaling(model)
        assert isinstance(scaling, Yarn)
        return {"rope_type": "yarn", **values, "attention_factor": scaling.magnitude}
    if model.rotary_seq_len_interpolation_factor != 1:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if model.use_rope_scaling:
        known = RopeScaling()
        constants = {key: getattr(known, name) for key, name in _LLAMA3.items()}
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **constants}
    if "rope_parameters" in family.optional:  # null would be the family's own scaling
        return {"rope_type": "default"}
    return None
