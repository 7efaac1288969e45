"""The rotary positions of a config.json, read as transformers 5 reads them, and written so that older releases agree.

    rope_scaling       a table; if it is not empty, it replaces rope_parameters entirely
    rope_parameters    the newer form: the same table, with rope_theta in it
    top-level keys     rope_theta (GPT-NeoX: rotary_emb_base, rotary_pct) applies if the table has none;
                       original_max_position_embeddings precedes the table's, max_position_embeddings follows both

Families whose layers with a window have their own positions (Gemma 3) have two tables in rope_parameters, by the names
of layer_types. rope_scaling and rope_theta belong to full_attention, and rope_local_base_freq to sliding_attention.

A config.json whose two tables disagree is refused, because transformers ignores one of them without a message.
"""

from collections.abc import Mapping
from typing import Any

from megalite.common.tables import load_table
from megalite.config.options import ModelConfig
from megalite.config.rope_spec import RopeScaling, Yarn
from megalite.interop.name_mapping import ModelFamily

Json = dict[str, Any]
_CONSTANTS = load_table(__file__, "constants")
_LLAMA3: Mapping[str, str] = _CONSTANTS["llama3"]
_YARN: Mapping[str, str] = _CONSTANTS["yarn"]
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}  # if they are missing or 0
STRETCH = ("use_rope_scaling", "rope_scaling_factor", *_YARN.values())
_ORIGINAL = "original_max_position_embeddings"
# keys of the base, and of the fraction of the channels that are rotated
_KEYS = ("rope_theta", "partial_rotary_factor")
_NEOX_KEYS = ("rotary_emb_base", "rotary_pct")
_LOCAL_BASE = "rope_local_base_freq"
_QUERY_SCALE = "llama_4_scaling_beta"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


def read_rope(config: Json, options: Json, family: ModelFamily) -> list[str]:
    """Add the options of rotary positions to `options`, and return the problems: what megalite cannot express."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name, {}), dict | None):
            return [f"{name}={config[name]!r} is not a table"]
    if _has_local_positions(family):
        config, problems = _read_local_base(config, options, family)
        if problems:
            return problems
    name, table = _table_in_use(config, family)
    nested = [key for key, value in table.items() if isinstance(value, dict) or key.endswith("_attention")]
    if nested:
        kinds = ", ".join(sorted(nested))
        return [f"{name} has a table for each kind of layer ({kinds}), but {family.name} takes one for all layers"]
    used = _complete_table(table, config, family)
    if problems := _conflicts(config, family, name, used) + _ignored_keys(config, family, used):
        return problems
    if family.rotates_by_base and used["rope_theta"] is None:
        options["position_embedding_type"] = "none"
        return []
    base, fraction = (used[key] for key in _KEYS)
    if base is None or (fraction is None and _supports_partial_rotation(family)):
        key = _rotary_keys(family)[0 if base is None else 1]
        return [f"{key}=None is not a number"]
    if family.query_scale_beta:
        return _read_scaled_queries(used, options, family)
    if (
        not _supports_partial_rotation(family)
        and fraction != 1
        and (fraction is not None or used["rope_type"] != "default")
    ):
        return [f"partial_rotary_factor={fraction!r} is not 1"]
    options |= {"rotary_base": base, "rotary_percent": 1.0 if fraction is None else fraction}
    return _read_kind(used, options, family)


def _read_scaled_queries(table: Json, options: Json, family: ModelFamily) -> list[str]:
    """Add the options of YaRN without the scale of queries at later positions, and return the problems.

    The scale is 1 at the positions of the original context, so that the options have only these.
    """
    content, rotated = options["qk_head_dim"], options["qk_pos_emb_head_dim"]
    if type(content) is not int or type(rotated) is not int:
        return []  # refused as sizes of heads
    fraction = table["partial_rotary_factor"]
    if fraction not in (1.0, _rotated_fraction(content, rotated)):  # 1: the key is missing
        return [f"partial_rotary_factor={fraction!r} is not qk_rope_head_dim / {content + rotated}"]
    if table["rope_type"] != "yarn":
        return [f"rope scaling of type {table['rope_type']!r} is not yarn"]
    if table.get(_QUERY_SCALE) != family.query_scale_beta:
        return [f"rope scaling with {_QUERY_SCALE}={table.get(_QUERY_SCALE)!r} is not {family.query_scale_beta}"]
    options |= {"rotary_base": table["rope_theta"], "rotary_percent": 1.0}
    if problems := _read_kind(table, options, family):
        return problems
    original, factor = table[_ORIGINAL], table["factor"]
    positions = options["max_position_embeddings"]
    if positions != factor * original:
        rule = f"factor x {_ORIGINAL} = {factor * original:g}"
        return [f"max_position_embeddings={positions!r} is not {rule}"]
    options["max_position_embeddings"] = original
    return []


def _rotated_fraction(content: int, rotated: int) -> float:
    """Return the rotated fraction of the channels of a head with latent attention."""
    return rotated / (content + rotated)


def unscaled_query_problem(model: ModelConfig, family: ModelFamily) -> str | None:
    """Return why a family that scales queries at later positions cannot express `model`, or None."""
    if model.position_embedding_type != "yarn":
        return f"position_embedding_type={model.position_embedding_type} is not yarn"
    original = model.yarn_original_max_position_embeddings
    if model.max_positions > original:
        reason = f"{family.name} scales queries after the first {original} positions"
        return f"max_position_embeddings={model.max_positions}, but {reason}"
    return None


def _has_local_positions(family: ModelFamily) -> bool:
    """Return True if the layers of the family with a window have their own rotary positions."""
    return _LOCAL_BASE in family.optional


def _read_local_base(config: Json, options: Json, family: ModelFamily) -> tuple[Json, list[str]]:
    """Set the base of layers with a window; return the configuration of the other layers' positions, and the problems.

    As in transformers, rope_scaling is added to the table of full_attention, and its values take precedence.
    """
    tables = config.get("rope_parameters") or {}
    if other_keys := sorted(tables.keys() - {FULL_ATTENTION, SLIDING_ATTENTION}):
        rule = f"{family.name} has a table for {FULL_ATTENTION} and one for {SLIDING_ATTENTION}"
        return config, [f"rope_parameters has {', '.join(other_keys)}, but {rule}"]
    local, full = (tables.get(kind) or {} for kind in (SLIDING_ATTENTION, FULL_ATTENTION))
    if not isinstance(local, dict) or not isinstance(full, dict):
        return config, [f"rope_parameters={tables!r} is not a table of tables"]
    default_base = config.get(_LOCAL_BASE, family.optional[_LOCAL_BASE])
    base = options["rotary_local_base"] = local.get("rope_theta", default_base)
    if base is None:
        return config, [f"{_LOCAL_BASE}=None is not a number"]
    kind = local.get("rope_type", local.get("type", "default"))
    if kind != "default":
        return config, [f"rope scaling of type {kind!r} in layers with a window is not default"]
    scaling = config.get("rope_scaling") or {}
    if nested := sorted(scaling.keys() & {FULL_ATTENTION, SLIDING_ATTENTION}):
        rule = f"it is the table of {FULL_ATTENTION}; tables by kind of layer are in rope_parameters"
        return config, [f"rope_scaling has {', '.join(nested)}, but {rule}"]
    others = {key: value for key, value in config.items() if key not in ("rope_scaling", _ORIGINAL)}
    return {**others, "rope_parameters": full | scaling}, []


def write_rope(model: ModelConfig, family: ModelFamily) -> Json:
    """Return the keys of scaled frequencies and of layers with a window, which all releases of transformers read."""
    keys: Json = {}
    if family.query_scale_beta:
        # rope_scaling would replace the whole default of transformers' class
        scaling = write_scaling(model, family) or {}
        fraction = _rotated_fraction(model.qk_head_dim, model.qk_pos_emb_head_dim)
        scaling |= {"rope_theta": model.rotary_base, "partial_rotary_factor": fraction}
        keys["rope_parameters"] = {**scaling, _QUERY_SCALE: family.query_scale_beta}
        keys["max_position_embeddings"] = int(model.rotary_scaling_factor * model.yarn_original_max_position_embeddings)
    elif family.scalings:
        keys["rope_scaling"] = write_scaling(model, family)
    if family.rotates_by_base and not model.uses_rope:
        base: Json = {"rope_theta": None}
        keys = {**base, "rope_scaling": None, "rope_parameters": {"rope_type": "default", **base}}
    if _has_local_positions(family):
        keys[_LOCAL_BASE] = model.rotary_base if model.rotary_local_base is None else model.rotary_local_base
    return keys


def _supports_partial_rotation(family: ModelFamily) -> bool:
    """Return True if the family may rotate only a part of the channels."""
    return _rotary_keys(family)[1] in family.derived_keys


def _rotary_keys(family: ModelFamily) -> tuple[str, str]:
    """Return the family's top-level keys of the base and the rotated fraction."""
    return _NEOX_KEYS if _NEOX_KEYS[0] in family.derived_keys else _KEYS


def _table_in_use(config: Json, family: ModelFamily) -> tuple[str, Json]:
    """Return (name, table) of the table that transformers uses.

    An empty rope_scaling does not count. An empty rope_parameters counts as no scaling.
    """
    if config.get("rope_scaling"):
        return "rope_scaling", config["rope_scaling"]
    if config.get("rope_parameters") is not None:
        return "rope_parameters", config["rope_parameters"]
    return "rope_parameters", family.optional.get("rope_parameters", {})


def _complete_table(table: Json, config: Json, family: ModelFamily) -> Json:
    """Return the table with rope_type, and with the top-level values of `config` that it lacks."""
    base_key, fraction_key = _rotary_keys(family)
    fraction = config.get(fraction_key, family.optional.get(fraction_key, 1.0))
    complete: Json = {
        "rope_type": table.get("type", "default"),
        "rope_theta": config.get(base_key, family.optional.get("rope_theta", 10000.0)),
        "partial_rotary_factor": 1.0 if fraction is None and not _supports_partial_rotation(family) else fraction,
        _ORIGINAL: config.get("max_position_embeddings"),
        **table,
    }
    if _ORIGINAL in config:  # takes precedence over the table's
        complete[_ORIGINAL] = config[_ORIGINAL]
    return {key: value for key, value in complete.items() if key != "type"}


def _conflicts(config: Json, family: ModelFamily, name: str, used: Json) -> list[str]:
    """Return the problem if rope_parameters is present beside rope_scaling and has other values."""
    if name != "rope_scaling" or not config.get("rope_parameters"):
        return []
    other = _complete_table(config["rope_parameters"], config, family)
    keys = _KEYS if other["rope_type"] == "default" else {*other, *used}
    differing = sorted(key for key in keys if other.get(key) != used.get(key))
    if not differing:
        return []
    values = ", ".join(f"{key}={other.get(key)!r} instead of {used.get(key)!r}" for key in differing)
    problem = f"rope_parameters differs from rope_scaling, with {values}"
    return [f"{problem}; transformers reads only the latter: write all values into one table, and delete the other"]


def _ignored_keys(config: Json, family: ModelFamily, used: Json) -> list[str]:
    """Return the problems of keys for the base and the fraction that only other families read."""
    problems = []
    others = _KEYS if _rotary_keys(family) == _NEOX_KEYS else _NEOX_KEYS
    for own_key, other_key, key in zip(_rotary_keys(family), others, _KEYS, strict=True):
        if config.get(other_key) not in (None, used[key]):
            problems.append(
                f"{other_key}={config[other_key]!r} is not read in a {family.name}, which has {own_key}={used[key]!r}"
            )
    return problems


def _read_kind(table: Json, options: Json, family: ModelFamily) -> list[str]:
    """Add the options of the table's rope_type to `options`, and return the problems."""
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
        problems = _read_yarn(table, options)
        if not problems and family.has_latent_attention:
            problems = _latent_scale_problems(table, options)
        return problems
    options |= {"use_rope_scaling": True, "rope_scaling_factor": table["factor"]}
    defaults = RopeScaling()
    pairs = [(key, table.get(key), getattr(defaults, name)) for key, name in _LLAMA3.items()]
    return [
        f"rope scaling with {key}={value!r} is not {expected}" for key, value, expected in pairs if value != expected
    ]


def _read_yarn(table: Json, options: Json) -> list[str]:
    """Add the options of YaRN to `options`, and return the problems."""
    options["position_embedding_type"] = "yarn"
    values = {**table, "truncate": bool(table.get("truncate", True))}  # null is false
    if isinstance(length := values[_ORIGINAL], float) and length.is_integer():
        values[_ORIGINAL] = int(length)
    for key in ("beta_fast", "beta_slow"):
        values[key] = table.get(key) or _YARN_DEFAULTS[key]  # 0 means missing
    attention_factor, mscale, mscale_all_dim = (
        table.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    options |= {option: values[key] for key, option in _YARN.items() if not key.startswith("mscale")}
    default_pair = (1.0, 0.0)
    pair = default_pair if mscale is None else (mscale, mscale_all_dim or 0.0)
    if attention_factor is None:  # mscale is only used together with mscale_all_dim
        options["mscale"], options["mscale_all_dim"] = pair if mscale and mscale_all_dim else default_pair
        return []
    try:
        for mscale_value, all_dim_value in (pair, default_pair):
            magnitude = Yarn(values["factor"], mscale=mscale_value, mscale_all_dim=all_dim_value).magnitude
            if abs(attention_factor - magnitude) <= 1e-6:
                options["mscale"], options["mscale_all_dim"] = mscale_value, all_dim_value
                return []
    except (TypeError, ArithmeticError):
        return [f"rope scaling with {table!r} has values that are not numbers"]
    return [f"rope scaling with attention_factor={attention_factor!r} is not {magnitude:.6g}"]


def _latent_scale_problems(table: Json, options: Json) -> list[str]:
    """Return the problem if latent attention scales scores and rotated channels by different rules.

    In transformers the scores have the factor of mscale_all_dim, even where the tables ignore it because mscale is
    missing.
    """
    all_dim = table.get("mscale_all_dim") or 0.0
    if all_dim == options["mscale_all_dim"]:
        return []
    used = ", ".join(f"{key}={table.get(key)!r}" for key in ("mscale", "attention_factor"))
    return [f"rope scaling with mscale_all_dim={all_dim!r} and {used} scales only the scores; give both mscale keys"]


def write_scaling(model: ModelConfig, family: ModelFamily) -> Json | None:
    """Return the value of rope_scaling, which all releases of transformers read; None if the family has no such."""
    scaling = _scaling_table(model, family)
    if scaling is None or scaling["rope_type"] not in ("default", *family.scalings):
        return None
    return scaling


def _scaling_table(model: ModelConfig, family: ModelFamily) -> Json | None:
    """Return the table of the model's scaling, or None without one."""
    if model.position_embedding_type == "yarn":
        values = {key: getattr(model, option) for key, option in _YARN.items()}
        scaling = model.rope_scaling
        assert isinstance(scaling, Yarn)
        keys: Json = {"rope_type": "yarn", **values, "attention_factor": scaling.magnitude}
        return {"type": "yarn", **keys} if family.has_latent_attention else keys  # read by the models' own code
    if model.rotary_seq_len_interpolation_factor != 1:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if model.use_rope_scaling:
        defaults = RopeScaling()
        constants = {key: getattr(defaults, name) for key, name in _LLAMA3.items()}
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **constants}
    if "rope_parameters" in family.optional:  # null would mean the family's default scaling
        return {"rope_type": "default"}
    return None
