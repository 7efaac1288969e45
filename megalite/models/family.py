"""What a family of published models is: how its files name the tensors, and what its config.json means. Pure data.

Rules and keys are tables that are read in both directions, from theirs to ours and from ours to theirs. The families
themselves are in families.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a foreign checkpoint and the parameters of ours that it is made of.

    theirs  its name; {n} is the layer's number
    ours    our parameters in the order of its rows; NAME[i] is the i-th half of a stacked one (kv, gate_up)
    form    "rows": our parameters one below the other
            "columns": that, transposed ([in, out] instead of [out, in])
            "groups": of q, kv[0], kv[1]; rows by key/value group [G, H/G + 2, K]: the queries of a group, its key,
            its value
    copied  what it repeats in a model without `ours`: the embedding, of a head tied to it. Files may lack it then
    """

    theirs: str
    ours: tuple[str, ...]
    form: str = "rows"
    copied: tuple[str, ...] = ()


def rules(text: str, layer: str) -> tuple[TensorRule, ...]:
    """`THEIRS = OURS + OURS (FORM)` or `THEIRS = OURS | COPIED` per line; `layer.` and `our.` stand for the names of
    layer n. A line with stars is two rules: .* is .weight and .bias, another * nothing and _bias."""
    found = []
    for line in text.strip().splitlines():
        for kind in ("weight", "bias") if "*" in line else ("",):
            bias = kind == "bias"
            one = line.strip().replace(".*", f".{kind}").replace("*", "_bias" if bias else "")
            theirs, _, right = one.partition(" = ")
            right, _, copied = right.partition(" | ")
            ours, _, form = right.partition(" (")
            names = tuple(re.sub(r"^our\.", "layers.{n}.", name) for name in ours.split(" + "))
            form = "rows" if not form or (bias and form == "columns)") else form.strip(")")  # a vector has no columns
            found.append(TensorRule(re.sub(r"^layer\.", layer, theirs), names, form, (copied,) if copied else ()))
    return tuple(found)


QKV = "our.attention.q* + our.attention.kv*[0] + our.attention.kv*[1]"  # in one tensor


@dataclass(frozen=True, kw_only=True)
class Naming:
    """`rules`: a rule counts where the model has its parameters (a bias, a head of its own).

    prefix    of the names, which some files leave out
    ignored   names beside the weights: tables that are computed, ends of names
    """

    name: str
    rules: tuple[TensorRule, ...]
    prefix: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Family(Naming):
    """A `model_type` of config.json. Defaults are those of the family's class in transformers, since old files leave
    keys out.

    keys        option -> key; `optional`: key -> default
    fixed       option -> value: set on import, required on export
    only        key -> allowed values, the first being the default: the model knows no other
    activations value of `activation_key` -> ours; the first of a kind is written
    written     key -> attribute of ModelConfig, for keys that are written beside `keys` and read in a way of their own.
                With num_key_value_heads and head_dim, heads may be grouped and of any size; with rotary_pct, a part of
                the channels may turn; all keys of add_bias_linear must agree
    scalings    rope_type of its stretched rotary waves, beside "default"
    windows     how it says which layers have a sliding window: they all or none do, or layer by layer; "": none has
    even_heads  hidden_size must be a multiple of the number of heads
    """

    architecture: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    activation_key: str = "hidden_act"
    activations: Mapping[str, str]
    optional: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    tied_by_default: bool = False
    scalings: tuple[str, ...] = ()
    windows: Literal["", "all", "by layer"] = ""
    even_heads: bool = False

    @property
    def grouped(self) -> bool:
        return "num_key_value_heads" in self.written
