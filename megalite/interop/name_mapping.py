"""The names of tensors in other programs' files, and what their config.json means: rules and keys that are read in both
directions, from their names to ours and back, from models/families.toml. A new family is an entry there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megalite.config.registry import REGISTRIES
from megalite.models.families import TABLES

_ADDED = ("keys", "fixed_options", "supported_values", "optional")  # to those of the family that another is like


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a foreign checkpoint and our parameters that it is made of.

    theirs  its name; {n} is the layer's number, {e} the expert's
    ours    our parameters in the order of its rows; NAME[i] is the i-th half of a stacked one (kv, gate_up), NAME[{e}]
            one expert of all, NAME[{e},i] its i-th half
    form    "rows": our parameters one below the other
            "columns": the same, transposed ([in, out] instead of [out, in])
            "groups": the rows of q, kv[0], kv[1] by key/value group [G, H/G + 2, K]: the queries of a group, its key,
            its value
            "experts": a matrix for each expert, [E, rows, in]
            "reversed": the same, transposed, and gate and up in turns: [E, in, rows], [E, F 2]
            "row": a vector as a matrix of one row
    copied  the parameter that it repeats in a model without `ours`, as a tied head the embedding; files may lack it
    """

    external: str
    params: tuple[str, ...]
    form: str = "rows"
    duplicates: tuple[str, ...] = ()


def rules(text: str, layer: str) -> tuple[TensorRule, ...]:
    """Read rules: `THEIRS = OURS + OURS (FORM)` or `THEIRS = OURS | COPIED` per line. `layer.` and `our.` stand for the
    names of layer n. A line with stars is two rules, of the weight and of the bias: .* stands for .weight and .bias,
    any other * for nothing and _bias."""
    tensor_rules = []
    for line in text.strip().splitlines():
        for kind in ("weight", "bias") if "*" in line else ("",):
            bias = kind == "bias"
            rule = line.strip().replace(".*", f".{kind}").replace("*", "_bias" if bias else "")
            theirs, _, right = rule.partition(" = ")
            right, _, duplicates = right.partition(" | ")
            params, _, form = right.partition(" (")
            names = tuple(re.sub(r"^our\.", "layers.{n}.", name) for name in params.split(" + "))
            form = "rows" if not form or (bias and form == "columns)") else form.strip(")")  # a vector has no columns
            theirs = re.sub(r"^layer\.", layer, theirs)
            tensor_rules.append(TensorRule(theirs, names, form, (duplicates,) if duplicates else ()))
    return tuple(tensor_rules)


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """The tensor names of a family. A rule applies if the model has its parameters (a bias, a head of its own).

    others    rules that take the place of those for the same parameters where a file has their names
    prefix    start of the names, which some files leave out
    ignored   ends of the names of tensors that are no weights, such as computed tables
    """

    name: str
    rules: tuple[TensorRule, ...]
    alternatives: tuple[TensorRule, ...] = ()
    prefix: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFamily(TensorNames):
    """A `model_type` of config.json. Defaults are those of its class in transformers, as old files leave keys out.

    keys        option -> key, or several, of which the first is written; `optional`: key -> default
    fixed       option -> value: set on import, required on export
    only        key -> values that are supported, the default first
    activations value of `activation_key` -> our name; of several with one name the first is written
    written     key -> attribute of ModelConfig, for keys that are written in addition to `keys` and read in a way of
                their own. With num_key_value_heads and head_dim, heads may be grouped and of any size; with rotary_pct,
                only a part of the channels may be rotated; all keys of add_bias_linear must agree
    scalings    values of rope_type for stretched rotary waves, in addition to "default"
    window_layout   which layers may have a sliding window: "all" or none of them, or each "by layer"; "alternate": every
                second one, if nothing is said; "": none
    sparse_layers   some layers may have experts and the others none, and the probabilities of the chosen experts need
                not add up to 1
    even_heads  hidden_size must be a multiple of the number of heads
    """

    architecture: str
    keys: Mapping[str, str]
    fixed_options: Mapping[str, Any]
    activation_key: str = "hidden_act"
    activations: Mapping[str, str]
    optional: Mapping[str, Any] = field(default_factory=dict)
    supported_values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    derived_keys: Mapping[str, str] = field(default_factory=dict)
    tied_by_default: bool = False
    scalings: tuple[str, ...] = ()
    window_layout: Literal["", "all", "by layer", "alternate"] = ""
    sparse_layers: bool = False
    even_heads: bool = False

    @property
    def grouped(self) -> bool:
        return "num_key_value_heads" in self.derived_keys


def _families() -> dict[str, ModelFamily]:
    families: dict[str, ModelFamily] = {}
    for name, table in TABLES["families"].items():
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        for key in ("rules", "alternatives"):
            if key in values:
                parts = [TABLES["rules"][part] for part in values[key]]
                values[key] = tuple(rule for part in parts for rule in rules(part["lines"], part["layer"]))
        base = families[values.pop("like")] if "like" in values else None
        values |= {"name": name} | {key: getattr(base, key) | values[key] for key in _ADDED if base and key in values}
        families[name] = replace(base, **values) if base else ModelFamily(**values)
    return families


FAMILIES = REGISTRIES["family"]  # in the order in which an export tries them, those of plugins at last
FAMILIES.built_in |= _families()
