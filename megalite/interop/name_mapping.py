"""The tensor names of other programs, and the meaning of their config.json.

The rules and keys come from models/families.toml, and are read in both directions, for import and export. A new family
is an entry in that table.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megalite.config.options import ModelConfig
from megalite.config.registry import REGISTRIES
from megalite.models.families import TABLES

# entries that are merged with the entries of the family given by `like`
_MERGED = ("keys", "fixed_options", "supported_values", "optional")
_PART_OF_LAYER = re.compile(r"layers\.\{n\}\.(\w+)\.")


LAYER = "model.layers.{n}."  # the usual prefix of the names of a layer


@dataclass(frozen=True)
class TensorRule:
    """One tensor of an external checkpoint, and the megalite parameters that it consists of.

    Attributes:
        external: Its name. {n} is the number of the layer, {e} that of the expert.
        params: The parameters in the order of its rows. NAME[i] is the i-th half of a stacked parameter (kv, gate_up),
            NAME[{e}] is one expert of all, and NAME[{e},i] the i-th half of this expert.
        form: The layout of the parameters in the tensor:
            "rows": the parameters one below the other;
            "columns": the same, transposed ([in, out] instead of [out, in]);
            "groups": the rows of q, kv[0] and kv[1] by key/value group, [G, H/G + 2, K]: the queries of a group, its
            key, and its value;
            "heads", "key heads": the same by attention head, and by key head of a gated delta net;
            "filters": a filter for each channel, [rows, 1, W];
            "heads of four dims": a number for each head, [1, 1, heads, 1];
            "experts": a matrix for each expert, [E, rows, in];
            "reversed": the same, transposed, with gate and up interleaved: [E, in, rows], [E, F 2];
            "row": a vector as a matrix of one row.
        duplicates: The parameter that it repeats in a model without `params`, as a tied head repeats the embedding.
            Files may omit the tensor then.
        copied_for: The tensor is a copy of the parameter, in models that have the parameter of this name, as each depth
            of multi-token prediction has a copy of the embedding. Files may omit copies, and exports write them.
    """

    external: str
    params: tuple[str, ...]
    form: str = "rows"
    duplicates: tuple[str, ...] = ()
    copied_for: str = ""


def parse_rules(text: str, layer: str) -> tuple[TensorRule, ...]:
    """Parse rules, one per line: `EXTERNAL = PARAM + PARAM (FORM)` or `EXTERNAL = PARAM | DUPLICATED`.

    `EXTERNAL = PARAM copied for OTHER` is a copy of PARAM in models that have the parameter OTHER.

    The prefixes `layer.` and `our.` stand for the names of layer n. A line with stars is two rules, one for the weight
    and one for the bias: .* stands for .weight and .bias, and any other * for the empty string and _bias.
    """
    tensor_rules = []
    for line in text.strip().splitlines():
        for kind in ("weight", "bias") if "*" in line else ("",):
            is_bias = kind == "bias"
            rule = line.strip().replace(".*", f".{kind}").replace("*", "_bias" if is_bias else "")
            external, _, right = rule.partition(" = ")
            right, _, copied_for = right.partition(" copied for ")
            right, _, duplicates = right.partition(" | ")
            params, _, form = right.partition(" (")
            names = tuple(re.sub(r"^our\.", "layers.{n}.", name) for name in params.split(" + "))
            copied_for = re.sub(r"^our\.", "layers.{n}.", copied_for)
            if not form or (is_bias and form == "columns)"):  # a vector has no columns
                form = "rows"
            form = form.strip(")")
            external = re.sub(r"^layer\.", layer, external)
            tensor_rules.append(TensorRule(external, names, form, (duplicates,) if duplicates else (), copied_for))
    return tuple(tensor_rules)


def same_layer(param: str, layer: int) -> int:
    """Return the number of the layer, which is the same in both programs."""
    return layer


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """The tensor names of a family.

    A rule applies if the model has its parameters, for example a bias or an untied head.

    Attributes:
        name: The name of the family.
        rules: The rules of all tensors.
        alternatives: Rules that replace those for the same parameters if a file has their names.
        prefix: The prefix of the names, which some files omit.
        ignored: Suffixes of the names of tensors that are not weights, such as computed tables.
        ignored_prefixes: Prefixes of the names of tensors that transformers does not read either.
        external_layer: Returns the number {n} in the external name, of a parameter of layer n: (parameter, n) -> {n}.
        depth_prefix: The prefix of the names of the only depth of multi-token prediction; "": depths are the layers
            after the last one, if there are any.
        depth_layer: The prefix of its layer, in place of LAYER.
    """

    name: str
    rules: tuple[TensorRule, ...]
    alternatives: tuple[TensorRule, ...] = ()
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    external_layer: Callable[[str, int], int] = same_layer
    depth_prefix: str = ""
    depth_layer: str = ""

    @property
    def has_depths(self) -> bool:
        """True if the family has names for depths of multi-token prediction."""
        return any("mtp." in param for rule in self.rules for param in rule.params)

    def external_name(self, rule: TensorRule, n: int, e: int, params: Container[str]) -> str:
        """Return the name of the tensor of a rule for layer n and expert e of a model with these parameters."""
        name = rule.external.format(n=self.external_layer(rule.params[0], n), e=e)
        layer = LAYER.format(n=n)
        is_in_depth = self.depth_prefix and any(
            other.external.startswith(self.depth_prefix) and other.params[0].format(n=n) in params
            for other in self.rules
        )
        if is_in_depth and name.startswith(layer):
            return self.depth_layer + name.removeprefix(layer)
        return name


@dataclass(frozen=True, kw_only=True)
class ModelFamily(TensorNames):
    """A `model_type` of config.json.

    The defaults are those of its class in transformers, because old files omit keys.

    Attributes:
        architecture: The name of the model's class in transformers.
        keys: Option -> key, or several keys separated by spaces; the first is written.
        fixed_options: Option -> value, which is set on import and required on export.
        activation_key: The key of the activation.
        activations: Value of `activation_key` -> activation. If several have one activation, the first is written.
            Empty: the family has no MLP.
        optional: Key -> default value, for keys that files may omit.
        supported_values: Key -> supported values, the default first.
        derived_keys: Key -> attribute of ModelConfig, for keys that are written in addition to `keys` and read by
            separate code. With num_key_value_heads and head_dim, heads may be grouped and of any size; with rotary_pct,
            only a part of the channels may be rotated; all keys of add_bias_linear must agree.
        tied_by_default: The head is tied to the embedding if the file does not say.
        scalings: Supported values of rope_type for scaled rotary frequencies, in addition to "default".
        window_layout: The layers that may have a sliding window. "all": all or none of them; "by layer": each one;
            "alternate": every second one, unless the file says otherwise; "period": all but every n-th one, unless the
            file says otherwise; "": none.
        sparse_layers: The layers that have experts. "": all or none; "by step": those of decoder_sparse_step and
            mlp_only_layers, and the probabilities of the chosen experts need not add up to 1; "after the first": all
            but the first first_k_dense_replace; "by layer": those of mlp_layer_types, or all but the first.
        reads_num_dense: Without mlp_layer_types, the layers before first_k_dense_replace are dense, not only the first.
        group_score_topk: Experts may be in n_group groups, each ranked by the scores of its best experts. This is their
            number. 0: there are no groups.
        query_scale_beta: Queries at position i are multiplied by 1 + this * log(1 + floor(i / n)), where YaRN extends a
            context of n tokens. megalite does not do that, so that only the first n positions can be used. 0: they are
            not multiplied.
        recurrent_mixer: The mixer of the layers that layer_types names linear_attention, or without it those before
            every full_attention_interval-th, or, if it is no key of the family, all but layers 4, 8, ...; "": none.
        mixes_layers: A model has both layers of `recurrent_mixer` and layers with attention. Without layer_types, the
            last layer has attention if no other one has.
        rotates_by_base: Attention has rotary positions only if the base of their wavelengths is not null.
        layer_letters: Kind of a layer -> its letter in a hybrid_layer_pattern, for families whose layers are each a
            mixer or an MLP, with one norm. layer_types has the kinds of all layers, or hybrid_override_pattern their
            letters. With a single kind, all num_hidden_layers are of it. Empty: each layer is a mixer and an MLP.
        linear_attn_keys: Key -> its name in the table linear_attn_config, where files may have it instead, together
            with the numbers of the layers of each kind from 1.
        spellings: Key -> its name in the files of this family, which may have either.
        even_heads: hidden_size must be a multiple of the number of heads.
        zero_centered_norms: Norm weights are stored as their difference from 1.
        scaled_embedding: The word embedding is multiplied by the square root of hidden_size.
        nullable_keys: Option -> key, for options that null turns off. A default of 0 in `optional` means null.
        null_keys: Keys that must be null or missing.
        written_keys: Key -> value that an export writes, and that transformers has to use for the same function.
    """

    architecture: str
    keys: Mapping[str, str]
    fixed_options: Mapping[str, Any]
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)
    supported_values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    derived_keys: Mapping[str, str] = field(default_factory=dict)
    tied_by_default: bool = False
    scalings: tuple[str, ...] = ()
    window_layout: Literal["", "all", "by layer", "alternate", "period"] = ""
    sparse_layers: Literal["", "by step", "after the first", "by layer"] = ""
    reads_num_dense: bool = False
    group_score_topk: int = 0
    query_scale_beta: float = 0.0
    recurrent_mixer: str = ""
    mixes_layers: bool = False
    rotates_by_base: bool = False
    layer_letters: Mapping[str, str] = field(default_factory=dict)
    linear_attn_keys: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    even_heads: bool = False
    zero_centered_norms: bool = False
    scaled_embedding: bool = False
    nullable_keys: Mapping[str, str] = field(default_factory=dict)
    null_keys: tuple[str, ...] = ()
    written_keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_latent_attention(self) -> bool:
        """True if the family has multi-head latent attention."""
        return self.fixed_options.get("multi_latent_attention", False)

    @property
    def has_attention(self) -> bool:
        """True if the family has layers with attention."""
        return "num_attention_heads" in self.keys

    @property
    def has_mamba2(self) -> bool:
        """True if the family has Mamba-2 mixers."""
        return "mamba_state_dim" in self.keys

    @property
    def supports_gqa(self) -> bool:
        """True if the family supports grouped-query attention."""
        return "num_key_value_heads" in self.derived_keys and not self.has_latent_attention


def number_by_letter(naming: TensorNames, model: ModelConfig) -> TensorNames:
    """Return names in which each mixer and each MLP of `model` is a layer with its own number.

    Megatron-LM's HybridModel and the families with `layer_letters` number layers in this way.
    """
    numbers: dict[tuple[int, str], int] = {}
    for layer_number, layer in zip(model.layer_numbers, model.layers, strict=True):
        for part, name in ((layer.mixer, layer.mixer), (layer.mlp, "mlp")):
            if part is not None:
                numbers[layer_number, name or ""] = len(numbers)

    def external_layer(param: str, layer: int) -> int:
        match = _PART_OF_LAYER.match(param)
        # a layer without this part has no such tensor
        return layer if match is None else numbers.get((layer, match[1]), layer)

    return replace(naming, external_layer=external_layer)


def family_names(family: str, model: ModelConfig) -> TensorNames:
    """Return the tensor names of a model of `family`."""
    naming: ModelFamily = FAMILIES.get(family)
    return number_by_letter(naming, model) if naming.layer_letters else naming


def _families() -> dict[str, ModelFamily]:
    """Return the families of models/families.toml. A family with `like` starts from a copy of another one."""
    families: dict[str, ModelFamily] = {}
    for name, table in TABLES["families"].items():
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        for key in ("rules", "alternatives"):
            if key in values:
                rule_sets = [TABLES["rules"][rule_set] for rule_set in values[key]]
                values[key] = tuple(
                    rule for rule_set in rule_sets for rule in parse_rules(rule_set["lines"], rule_set["layer"])
                )
        base = families[values.pop("like")] if "like" in values else None
        values["name"] = name
        if base:
            values |= {key: getattr(base, key) | values[key] for key in _MERGED if key in values}
        families[name] = replace(base, **values) if base else ModelFamily(**values)
    return families


FAMILIES = REGISTRIES["family"]  # in the order in which an export tries them; the families of plugins come last
FAMILIES.built_in |= _families()
