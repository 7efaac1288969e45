"""config.json of Hugging Face <-> options of the model. What cannot be expressed exactly is refused by name.

The tables are in forms.py; what is here is what they cannot say: groups, rotary positions; windows are
in windows.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.config.options import ModelConfig
from megalite.interop.hugging_face.forms import FORMS, LLAMA_LIKE, TRAINING
from megalite.interop.hugging_face.windows import read_window, window_misfits, write_window
from megalite.kernels.rope import RopeScaling, Yarn
from megalite.models.gpt import rope_scaling

Json = dict[str, Any]
_LLAMA3: Mapping[str, Any] = MappingProxyType(
    {"low_freq_factor": "low_factor", "high_freq_factor": "high_factor"}
    | {"original_max_position_embeddings": "original_length"}
)

# key of rope_scaling -> (option, value where the key is missing; None: it must be there)
_YARN: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "factor": ("rotary_scaling_factor", None),
        "original_max_position_embeddings": ("yarn_original_max_position_embeddings", None),
        "beta_fast": ("yarn_beta_fast", 32.0),
        "beta_slow": ("yarn_beta_slow", 1.0),
        "truncate": ("yarn_correction_range_round_to_int", True),
        "mscale": ("mscale", 1.0),
        "mscale_all_dim": ("mscale_all_dim", 0.0),
    }
)


def read_config(config: Json, seq_length: int | None, where: str) -> tuple[str, Json]:
    """(family, option names to values, vocab_size among them). Raises CheckpointError listing all that does not fit.

    seq_length: tokens per sequence to be trained on; default: as many as the model has positions for.
    """
    problems: list[str] = []
    family = config.get("model_type")
    form = FORMS.get(family) if isinstance(family, str) else None
    if form is None or not isinstance(family, str):
        raise CheckpointError(f"{where}: model_type={family!r} is not one of {', '.join(FORMS)}; it is another model")
    options: Json = dict(form.fixed)

    def get(key: str, default: Any = ...) -> Any:
        value = config.get(key, form.optional.get(key, default))
        if value is ... or (value is None and key != "n_inner"):  # there, null is 4 times the width
            problems.append(f"{key} is missing")
            return None
        return value

    for option, key in form.keys.items():
        options[option] = get(key)
    options["vocab_size"] = get("vocab_size")
    if options["ffn_hidden_size"] is None and isinstance(options["hidden_size"], int):
        options["ffn_hidden_size"] = 4 * options["hidden_size"]
    activation = config.get(form.activation_key, next(iter(form.activations)))
    options["activation"] = form.activations.get(activation if isinstance(activation, str) else "")
    if options["activation"] is None:
        problems.append(f"{form.activation_key}={activation!r} is not {', '.join(form.activations)}")
    options["untie_embeddings_and_output_weights"] = not config.get("tie_word_embeddings", form.tied_by_default)
    for key, allowed in form.only.items():
        if config.get(key, allowed[0]) not in allowed:
            problems.append(f"{key}={config[key]!r} is not {' or '.join(map(repr, allowed))}")
    if config.get("quantization_config") is not None:
        problems.append("quantization_config: the weights are quantised")
    if family in LLAMA_LIKE:
        _read_groups(config, options)
    if family == "llama":
        biases = [config.get("attention_bias", False), config.get("mlp_bias", False)]
        if biases[0] != biases[1]:
            problems.append(f"attention_bias={biases[0]} with mlp_bias={biases[1]}: there is one option for both")
        options["add_bias_linear"] = biases[0]
    if options["position_embedding_type"] == "rope":
        problems += _read_rope(config, options, family)
    problems += _read_positions(options, seq_length)
    window, wrong = read_window(config, family, options["num_layers"])
    options |= window
    problems += wrong
    if problems:
        raise CheckpointError(f"{where} is a model that megalite does not have:\n  " + "\n  ".join(problems))
    return family, {name: value for name, value in options.items() if value is not None}


def _read_groups(config: Json, options: Json) -> None:
    groups = config.get("num_key_value_heads")
    if groups is not None and groups != options["num_attention_heads"]:
        options |= {"group_query_attention": True, "num_query_groups": groups}
    options["kv_channels"] = config.get("head_dim")


def _read_rope(config: Json, options: Json, family: str) -> list[str]:
    """rope_parameters is the newer form of rope_theta (rotary_emb_base) with rope_scaling."""
    rope: Json = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            rope |= config[key]
    kind = rope.get("rope_type", rope.get("type", "default"))
    options["rotary_base"] = rope.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    part = rope.get("partial_rotary_factor", config.get("rotary_pct", config.get("partial_rotary_factor")))
    if family == "gpt_neox":
        options["rotary_percent"] = 0.25 if part is None else part
    elif part not in (None, 1, 1.0):
        return [f"partial_rotary_factor={part!r} is not 1"]
    if kind == "default":
        return []
    if family == "gpt_neox" or kind not in ("linear", "llama3", "yarn"):
        others = "" if family == "gpt_neox" else ", linear, llama3 or yarn"
        return [f"rope scaling of type {kind!r} is not default{others}"]
    if kind == "linear":
        options["rotary_seq_len_interpolation_factor"] = rope.get("factor")
        return []
    if kind == "yarn":
        return _read_yarn({"original_max_position_embeddings": config.get("max_position_embeddings"), **rope}, options)
    options |= {"use_rope_scaling": True, "rope_scaling_factor": rope.get("factor")}
    known = RopeScaling()
    pairs = [(key, rope.get(key), getattr(known, name)) for key, name in _LLAMA3.items()]
    return [f"rope scaling with {key}={value!r} is not {want}" for key, value, want in pairs if value != want]


def _read_yarn(rope: Json, options: Json) -> list[str]:
    """There, without attention_factor, mscale counts only beside mscale_all_dim."""
    options["position_embedding_type"] = "yarn"
    for key, (option, default) in _YARN.items():
        value = rope.get(key)
        options[option] = default if value is None else value
    missing = [f"rope scaling without {key}" for key, (option, _) in _YARN.items() if options[option] is None]
    magnitude = rope.get("attention_factor")
    if magnitude is None and not (rope.get("mscale") and rope.get("mscale_all_dim")):
        options |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    if missing or magnitude is None:
        return missing
    try:
        own = Yarn(options["rotary_scaling_factor"], mscale=options["mscale"], mscale_all_dim=options["mscale_all_dim"])
        same = abs(magnitude - own.magnitude) <= 1e-6
    except TypeError:
        return [f"rope scaling with {rope!r} is not numbers"]
    return [] if same else [f"rope scaling with attention_factor={magnitude!r} is not {own.magnitude:.6g}"]


def _read_positions(options: Json, seq_length: int | None) -> list[str]:
    positions = options["max_position_embeddings"]
    options["seq_length"] = seq_length or positions
    if isinstance(positions, int) and seq_length is not None and seq_length > positions:
        return [f"seq_length={seq_length} is above the model's {positions} positions"]
    return []


def misfits(model: ModelConfig, family: str) -> list[str]:
    """Why `family` cannot express `model`; empty where it can."""
    form = FORMS[family]
    implied: Json = {"add_qkv_bias": model.add_qkv_bias and not model.add_bias_linear}  # all biases are those too
    if family in LLAMA_LIKE and model.position_embedding_type == "yarn":
        implied["position_embedding_type"] = "rope"
    have = {option: implied.get(option, getattr(model, option)) for option in form.fixed if option not in TRAINING}
    lines = [
        f"{option}={value} is not {form.fixed[option]}" for option, value in have.items() if value != form.fixed[option]
    ]
    lines += _rotary_misfits(model, family)
    if model.activation not in form.activations.values():
        lines.append(f"activation={model.activation} is not {' or '.join(sorted(set(form.activations.values())))}")
    usual_heads = model.head_size * model.num_attention_heads == model.hidden_size
    if family in ("gpt2", "gpt_neox") and model.groups != model.num_attention_heads:
        lines.append(f"num_query_groups={model.groups} is not num_attention_heads={model.num_attention_heads}")
    if family in ("gpt2", "gpt_neox") and not usual_heads:
        lines.append(f"kv_channels={model.kv_channels} is not hidden_size / num_attention_heads")
    if family == "llama" and model.hidden_size % model.num_attention_heads:
        lines.append(f"hidden_size={model.hidden_size} is not a multiple of {model.num_attention_heads} heads")
    return lines + window_misfits(model, family)


def _rotary_misfits(model: ModelConfig, family: str) -> list[str]:
    if model.position_embedding_type not in ("rope", "yarn"):
        return []
    lines = []
    if not all(model.rotary):
        lines.append(f"no_rope_freq={model.no_rope_freq}: every layer has rotary positions there")
    if model.rotary_interleaved:
        lines.append("rotary_interleaved=True: a pair is channels i and i + half there")
    stretched = model.rotary_seq_len_interpolation_factor
    if stretched != 1 and (family not in LLAMA_LIKE or model.use_rope_scaling):
        lines.append(f"rotary_seq_len_interpolation_factor={stretched:g} has no key there")
    return lines


def choose_family(model: ModelConfig, wanted: str | None, usual: str | None) -> str:
    """`wanted`, or `usual` if it fits, or the first that does. Raises CheckpointError with what is in the way."""
    if wanted is not None and (lines := misfits(model, wanted)):
        raise CheckpointError(f"family={wanted} cannot express this model:\n  " + "\n  ".join(lines))
    for family in (*(name for name in (wanted, usual) if name is not None and name in FORMS), *FORMS):
        if not misfits(model, family):
            return family
    every = [f"{family}: {'; '.join(misfits(model, family))}" for family in FORMS]
    raise CheckpointError("no family of Hugging Face has this model:\n  " + "\n  ".join(every))


def write_config(model: ModelConfig, family: str, vocab_size: int, dtype: str, tokens: Mapping[str, Any]) -> Json:
    """config.json with keys that old and new releases of transformers know. `tokens`: bos_token_id and the like."""
    form = FORMS[family]
    activation = next(key for key, ours in form.activations.items() if ours == model.activation)
    config: Json = {"architectures": [form.architecture], "model_type": family, "vocab_size": vocab_size}
    values = {**{option: getattr(model, option) for option in form.keys}, "ffn_hidden_size": model.ffn_size}
    values["max_position_embeddings"] = model.positions
    config |= {key: values[option] for option, key in form.keys.items()}
    config |= {key: allowed[0] for key, allowed in form.only.items()}
    config[form.activation_key] = activation
    config["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    if family in LLAMA_LIKE:
        config |= {"num_key_value_heads": model.groups, "head_dim": model.head_size, "rope_theta": model.rotary_base}
        config["rope_scaling"] = _write_scaling(model)
    if family == "llama":
        config |= {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    config |= write_window(model, family)
    if family == "gpt_neox":
        config |= {"rotary_emb_base": model.rotary_base, "rotary_pct": model.rotary_percent}
    if family == "gpt2":
        config["embd_pdrop"] = model.hidden_dropout
    return config | {"bos_token_id": None, "eos_token_id": None} | dict(tokens) | {"torch_dtype": dtype}


def _write_scaling(model: ModelConfig) -> Json | None:
    if model.position_embedding_type == "yarn":
        values = {key: getattr(model, option) for key, (option, _) in _YARN.items()}
        scaling = rope_scaling(model)
        assert isinstance(scaling, Yarn)
        return {"rope_type": "yarn", **values, "attention_factor": scaling.magnitude}
    if model.rotary_seq_len_interpolation_factor != 1:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if not model.use_rope_scaling:
        return None
    known = RopeScaling()
    constants = {key: getattr(known, name) for key, name in _LLAMA3.items()}
    return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **constants}
