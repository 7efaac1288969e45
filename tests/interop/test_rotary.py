"""The rotary positions of config.json: the same angles and magnitude as in transformers, or a refusal that names the key.

transformers is the reference: it reads the same JSON, builds its own rotary module from it, and computes the cosines.
"""

import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import MODELS, SEQ_LENGTH, copy_model, create_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_convert_hugging_face import load_transformers, megalite_logits, save_run, transformers_logits
from test_convert_megatron import tool
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.options import build
from megalite.interop.huggingface import config_json
from megalite.interop.huggingface.config_json import choose_family, incompatibilities, read_config, write_config
from megalite.interop.huggingface.rotary import read_rope as real_read_rope
from megalite.interop.name_mapping import FAMILIES as NAMED
from megalite.kernels.rope import rope_tables as kernel_rope_tables
from megalite.models.gpt import Stage
from megalite.nn.parameter import ParamFactory
from megalite.parallel.mesh import Mesh
from tools.convert_checkpoint import saved_model

Json = dict[str, Any]
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "gpt_oss",
    "gemma2",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "gpt_neox",
)
ROTARY_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "layer_types")


def plain(family: str) -> Json:
    """Return a config.json of the family as transformers writes it, without the keys of its positions.

    A null head_dim, with which transformers itself fails at YaRN, is replaced by its value.
    """
    import transformers

    cls, values = MODELS[family]
    config = getattr(transformers, cls)(**{**values, "sliding_window": None} if family == "mistral" else values)
    written = {key: value for key, value in config.to_dict().items() if key not in ROTARY_KEYS}
    if written.get("head_dim", 0) is None:
        written["head_dim"] = written["hidden_size"] // written["num_attention_heads"]
    return written


PLAIN = {family: plain(family) for family in FAMILIES}


def transformers_angles(config: Json) -> tuple[Tensor, Tensor]:
    """Return cos and sin [S, R / 2] of transformers, and raise whatever it raises."""
    import transformers

    family = config["model_type"]
    hf_config = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (rotary,) = (cls for name, cls in vars(module).items() if name.endswith("RotaryEmbedding"))
    cos, sin = rotary(hf_config)(torch.zeros(1, dtype=torch.float32), torch.arange(SEQ_LENGTH)[None])
    half = cos.shape[-1] if family == "gpt_oss" else cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def megalite_angles(config: Json) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the stage that a run would train, or raise CheckpointError."""
    model = build(read_config(copy.deepcopy(config), None, "config.json")[1]).model
    stage = Stage(
        ParamFactory(Mesh.single_process(), torch.float32, seed=0),
        model,
        [range(1)],
        0,
        vocab_size=3,
        padded_vocab_size=3,
    )
    (tables,) = stage.rope_tables.values()
    return tables


def compare(config: Json) -> str | None:
    """Assert that the angles agree; return the reason if the config is refused, otherwise None."""
    try:
        angles = megalite_angles(config)
    except CheckpointError as error:
        return str(error)
    for actual, expected in zip(angles, transformers_angles(config), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    return None


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 1.5, "beta_slow": 0.1}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
LEGACY = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def without(table: Json, *keys: str) -> Json:
    return {key: value for key, value in table.items() if key not in keys}


READ: dict[str, Json] = {
    "nothing": {},
    "base at the top": {"rope_theta": 100.0},
    "base in the table": {"rope_parameters": DEFAULT},
    "base in both, the table's holds": {"rope_theta": 500.0, "rope_parameters": DEFAULT},
    "table without a base": {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}},
    "empty tables": {"rope_theta": 100.0, "rope_scaling": {}, "rope_parameters": {}},
    "null tables": {"rope_theta": 100.0, "rope_scaling": None, "rope_parameters": None},
    "yarn, the older form": {"rope_theta": 100.0, "rope_scaling": LEGACY},
    "yarn, the newer form": {"rope_parameters": {**YARN, "rope_theta": 100.0}},
    "yarn beside the same base": {"rope_scaling": {**LEGACY, "rope_theta": 100.0}, "rope_parameters": DEFAULT},
    "yarn in both tables": {"rope_scaling": YARN, "rope_parameters": YARN, "rope_theta": 100.0},
    "rope_type before type": {"rope_theta": 100.0, "rope_scaling": {**YARN, "type": "linear"}},
    "original length at the top": {
        "rope_theta": 100.0,
        "original_max_position_embeddings": 16,
        "rope_scaling": without(YARN, "original_max_position_embeddings"),
    },
    "original length at the top, which holds": {
        "rope_theta": 100.0,
        "original_max_position_embeddings": 32,
        "rope_scaling": YARN,
    },
    "original length as a float": {
        "rope_theta": 100.0,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 16.0},
    },
    "original length nowhere": {"rope_theta": 100.0, "rope_scaling": without(YARN, "original_max_position_embeddings")},
    "original length without scaling": {"rope_theta": 100.0, "original_max_position_embeddings": 16},
    "truncate false": {"rope_theta": 100.0, "rope_scaling": {**YARN, "truncate": False}},
    "truncate null": {"rope_theta": 100.0, "rope_scaling": {**YARN, "truncate": None}},
    "betas of 0 and null": {"rope_theta": 100.0, "rope_scaling": {**YARN, "beta_fast": 0, "beta_slow": None}},
    "mscale alone": {"rope_theta": 100.0, "rope_scaling": {**YARN, "mscale": 0.5}},
    "both mscales": {"rope_theta": 100.0, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "one mscale is 0": {"rope_theta": 100.0, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}},
    "attention_factor": {"rope_theta": 100.0, "rope_scaling": {**YARN, "attention_factor": 1.1386294361119891}},
    "attention_factor beside mscale": {
        "rope_theta": 100.0,
        "rope_scaling": {**YARN, "attention_factor": 1.1386294361119891, "mscale": 0.3, "mscale_all_dim": 0.2},
    },
    "linear": {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3 with its length at the top": {
        "rope_theta": 5e5,
        "original_max_position_embeddings": 8192,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16},
    },
    "unknown keys": {"rope_parameters": {**DEFAULT, "mrope_section": [1, 2], "factor": 8.0}},
    "the whole of the channels": {"partial_rotary_factor": 1.0, "rope_parameters": DEFAULT},
}
# case -> (changes, what the message of the refusal must contain)
REFUSED: dict[str, tuple[Json, tuple[str, ...]]] = {
    "yarn added beside a written default": (
        {"rope_parameters": DEFAULT, "rope_scaling": LEGACY},
        ("rope_parameters", "rope_scaling", "rope_theta=100.0"),
    ),
    "default beside a written yarn": (
        {"rope_parameters": {**YARN, "rope_theta": 100.0}, "rope_scaling": DEFAULT},
        ("rope_parameters", "rope_scaling", "rope_type='yarn'"),
    ),
    "two factors": (
        {"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 2.0}},
        ("rope_parameters", "rope_scaling", "factor=4.0 instead of 2.0"),
    ),
    "a table for each kind of layer": (
        {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": {**DEFAULT, "rope_theta": 1e4}}},
        ("rope_parameters", "full_attention", "sliding_attention"),
    ),
    "a table for one kind of layer, with no others": (
        {"rope_scaling": {"full_attention": YARN, "sliding_attention": None}},
        ("rope_scaling", "full_attention"),
    ),
    "not a table": ({"rope_scaling": "yarn"}, ("rope_scaling='yarn' is not a table",)),
    "no base": ({"rope_parameters": {"rope_theta": None}}, ("None is not a number",)),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, ("without factor",)),
    "llama3 without factor": ({"rope_scaling": without(LLAMA3, "factor")}, ("without factor",)),
    "a type of others": ({"rope_scaling": {"type": "longrope"}}, ("'longrope' is not default",)),
    "no type": ({"rope_scaling": {"rope_type": None, "type": "yarn"}}, ("type None is not default",)),
    "another magnitude": (
        {"rope_scaling": {**YARN, "attention_factor": 2.0}},
        ("attention_factor=2.0 is not 1.13863",),
    ),
}
OTHERS = [family for family in FAMILIES if family != "gpt_neox"]


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize("family", OTHERS)
def test_rotary_angles_equal_transformers(family: str, case: str) -> None:
    assert compare({**PLAIN[family], **READ[case]}) is None


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("family", OTHERS)
def test_refusal_names_the_conflicting_keys(family: str, case: str) -> None:
    changes, fragments = REFUSED[case]
    with pytest.raises(CheckpointError) as error:
        megalite_angles({**PLAIN[family], **changes})
    assert all(fragment in str(error.value) for fragment in fragments), error.value


NEOX: dict[str, Json] = {
    "nothing": {},
    "keys at the top": {"rotary_emb_base": 100.0, "rotary_pct": 0.5},
    "a table": {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    "the table's hold": {"rope_parameters": DEFAULT, "rotary_emb_base": 500.0, "rotary_pct": 1.0},
    "the other families' keys beside them": {
        **{"rotary_emb_base": 100.0, "rotary_pct": 0.5},
        **{"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
}


@pytest.mark.parametrize("case", NEOX)
def test_neox_angles_equal_transformers(case: str) -> None:
    assert compare({**PLAIN["gpt_neox"], **NEOX[case]}) is None


@pytest.mark.parametrize(
    "family,key,value",
    [
        ("gpt_neox", "rope_theta", 100.0),
        ("gpt_neox", "partial_rotary_factor", 0.5),
        ("gpt_neox", "head_dim", 16),
        ("llama", "rotary_emb_base", 100.0),
        ("llama", "rotary_pct", 0.5),
        ("llama", "partial_rotary_factor", 0.5),
    ],
)
def test_key_of_other_families_is_refused(family: str, key: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=f"{key}={value}"):
        megalite_angles({**PLAIN[family], key: value})


TWO_TABLES: Json = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": DEFAULT,
}
GEMMA3: dict[str, Json] = {
    "nothing": {},
    "bases at the top": {"rope_theta": 500.0, "rope_local_base_freq": 100.0},
    "scaling, the older form": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "two tables": {"rope_parameters": TWO_TABLES},
    "the tables hold": {"rope_parameters": TWO_TABLES, "rope_theta": 7.0, "rope_local_base_freq": 8.0},
    "scaling added to a table": {"rope_parameters": {"full_attention": DEFAULT}, "rope_scaling": LEGACY},
    "scaling in place of a table's": {"rope_parameters": TWO_TABLES, "rope_scaling": {"factor": 2.0}},
    "one table is null": {"rope_parameters": {"full_attention": None, "sliding_attention": DEFAULT}},
    "no table": {"rope_parameters": {}, "rope_local_base_freq": 100.0},
    "yarn": {"rope_theta": 100.0, "rope_scaling": YARN},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "original length at the top, which does not count": {"original_max_position_embeddings": 32, "rope_scaling": YARN},
}


def gemma3_angles_of_transformers(config: Json, kind: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin [S, R / 2] of the layers of a kind."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig

    separate = json.loads(
        json.dumps(config)
    )  # a copy would share tables that are one object, which transformers changes
    rotary = modeling_gemma3.Gemma3RotaryEmbedding(Gemma3TextConfig(**separate))
    tables = rotary(torch.zeros(1), torch.arange(SEQ_LENGTH)[None], kind)
    cos, sin = (table[0].chunk(2, -1)[0] for table in tables)
    return cos, sin


PLAIN_GEMMA3 = {**plain("gemma3_text"), "num_hidden_layers": 6}
GEMMA3_LAYERS = {0: "sliding_attention", 5: "full_attention"}  # one of each kind


def compare_gemma3(config: Json) -> None:
    """Assert that megalite has the angles of transformers. Raises CheckpointError if it is refused."""
    model = build(read_config(copy.deepcopy(config), None, "config.json")[1]).model
    for layer, kind in GEMMA3_LAYERS.items():
        expected = gemma3_angles_of_transformers(config, kind)
        rope = model.layers[layer].rope
        assert rope is not None
        for actual, expected_table in zip(kernel_rope_tables(SEQ_LENGTH, rope), expected, strict=True):
            torch.testing.assert_close(actual.float(), expected_table, rtol=0, atol=1e-5)


def test_tables_by_kind_of_layer_do_not_belong_in_rope_scaling() -> None:
    scaling = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    with pytest.raises(CheckpointError, match="rope_scaling has full_attention, but it is the table of full_attention"):
        read_config({**PLAIN_GEMMA3, "rope_scaling": scaling}, None, "config.json")


@pytest.mark.parametrize("case", GEMMA3)
def test_gemma3_angles_equal_transformers(case: str) -> None:
    compare_gemma3({**PLAIN_GEMMA3, **GEMMA3[case]})


def rope_tables() -> st.SearchStrategy[Json | None]:
    """Return a strategy of tables with any of the keys that transformers reads."""
    values = {
        "rope_type": ["default", "linear", "yarn", "llama3", "yarn"],
        "type": ["default", "linear", "yarn"],
        "rope_theta": [100.0, 10000.0, 10000],
        "factor": [4.0, 1.0, 2],
        "original_max_position_embeddings": [16, 8192, None],
        "low_freq_factor": [1.0],
        "high_freq_factor": [4.0],
        "attention_factor": [None, 1.0],
        "mscale": [1.0, 0.7, 0, None],
        "mscale_all_dim": [0.4, 0.0, None],
        "beta_fast": [1.5, 0, None],
        "beta_slow": [0.1, None],
        "truncate": [True, False, None, 0],
        "partial_rotary_factor": [1.0, None, 0.5],
    }
    optional = {key: st.sampled_from(choices) for key, choices in values.items()}
    return st.one_of(st.none(), st.just({}), st.fixed_dictionaries({}, optional=optional))


AT_THE_TOP = {
    "rope_scaling": rope_tables(),
    "rope_parameters": rope_tables(),
    "rope_theta": st.sampled_from([100.0, 10000.0, None]),
    "rotary_emb_base": st.sampled_from([100.0, 10000.0]),
    "rotary_pct": st.sampled_from([0.5, 1.0]),
    "original_max_position_embeddings": st.sampled_from([16, 8192]),
    "partial_rotary_factor": st.sampled_from([1.0, 0.5]),
}


@settings(max_examples=200)
@given(family=st.sampled_from(FAMILIES), changes=st.fixed_dictionaries({}, optional=AT_THE_TOP))
def test_random_rope_keys_equal_transformers_or_are_refused(family: str, changes: Json) -> None:
    config = {**PLAIN[family], **changes}
    try:
        transformers_angles(config)
    except Exception:  # transformers cannot build this model, so there are no angles to compare
        assume(False)
    reason = compare(config)
    assert reason is None or any(key in reason for key in ("rope", "rotary", "yarn", "mscale"))


GEMMA3_AT_THE_TOP = {
    "rope_parameters": st.fixed_dictionaries({}, optional=dict.fromkeys(GEMMA3_LAYERS.values(), rope_tables())),
    "rope_local_base_freq": st.sampled_from([100.0, 10000.0, None]),
    **{key: AT_THE_TOP[key] for key in ("rope_scaling", "rope_theta", "original_max_position_embeddings")},
}


@settings(max_examples=100)
@given(changes=st.fixed_dictionaries({}, optional=GEMMA3_AT_THE_TOP))
def test_random_rope_keys_of_gemma3_equal_transformers_or_are_refused(changes: Json) -> None:
    config = {**PLAIN_GEMMA3, **changes}
    try:
        for kind in GEMMA3_LAYERS.values():
            gemma3_angles_of_transformers(config, kind)
    except Exception:  # transformers cannot build this model
        assume(False)
    try:
        compare_gemma3(config)
    except CheckpointError as error:
        assert any(key in str(error) for key in ("rope", "rotary", "yarn", "mscale"))


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gpt_oss"])
def test_rope_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """The model is as a user has it: written by transformers, with YaRN put into its config.json by hand."""
    create_model(family, tmp_path / "model", rope_parameters=DEFAULT)
    path = tmp_path / "model" / "config.json"
    written = json.loads(path.read_text())
    length = {"original_max_position_embeddings": 16}  # at the top, where transformers looks first
    written |= {"rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 100.0}, **length}
    path.write_text(json.dumps(written))
    assert tool("--from-hf", tmp_path / "model", "--save", tmp_path / "ours", "--check-bits") == 0
    expected = transformers_logits(load_transformers(tmp_path / "model"))
    torch.testing.assert_close(megalite_logits(tmp_path / "ours"), expected, rtol=0, atol=1e-4)


GPT_OSS: Json = {
    **{"normalization": "RMSNorm", "activation": "clamped_swiglu", "softmax_type": "learnable", "num_experts": 4},
    **{"add_bias_linear": True, "hidden_dropout": 0.0, "moe_ffn_hidden_size": 8, "qk_layernorm": False},
    "untie_embeddings_and_output_weights": True,
}
SCALINGS: dict[str, Json] = {
    "plain": {"position_embedding_type": "rope"},
    "linear": {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 3.0},
    "llama3": {"position_embedding_type": "rope", "use_rope_scaling": True, "seq_length": 32},
    "yarn": {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 16,
    },
}
WINDOWS: dict[str, Json] = {"none": {}, "all": {"window_size": (6, 0)}}
WINDOWS["some"] = {"window_size": (6, 0), "window_attn_skip_freq": "2"}


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", OTHERS)
def test_exported_rope_config_runs_in_transformers(family: str, scaling: str, windows: str) -> None:
    """Every family exports each kind of positions and windows that it has to a config.json that transformers reads."""
    import transformers

    base = build(read_config({**PLAIN[family], "rope_parameters": DEFAULT}, None, "")[1]).model
    model = replace(base, window_size=None, window_attn_skip_freq=None)
    model = replace(model, rotary_base=100.0, **{**SCALINGS[scaling], **WINDOWS[windows]})
    allowed = NAMED.get(family).window_layout
    if windows != "none" and (allowed == "" or (allowed == "all" and windows == "some")):
        assert any("window" in line for line in incompatibilities(model, NAMED.get(family)))
        return
    assert choose_family(model, family, None) == family
    written = json.loads(json.dumps(write_config(model, family, 93, "float32", {"eos_token_id": 2})))
    assert compare(written) is None
    hf_model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**copy.deepcopy(written))
    )
    assert hf_model(torch.arange(20)[None]).logits.isfinite().all()  # builds a mask of every kind that it asks for


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_exported_gemma3_config_runs_in_transformers(scaling: str, windows: str) -> None:
    import transformers

    base = build(read_config(PLAIN_GEMMA3, None, "")[1]).model
    model = replace(base, window_size=None, window_attn_skip_freq=None)
    model = replace(model, rotary_base=100.0, rotary_local_base=50.0, **{**SCALINGS[scaling], **WINDOWS[windows]})
    assert choose_family(model, None, None) == "gemma3_text"
    written = json.loads(json.dumps(write_config(model, "gemma3_text", 93, "float32", {})))
    for keys in (written, without(written, "layer_types")):  # older releases read sliding_window_pattern
        assert build(read_config(keys, None, "")[1]).model.layers == model.layers
        assert transformers.Gemma3TextConfig(**copy.deepcopy(keys)).layer_types == written["layer_types"]
    for layer, kind in zip(model.layers, written["layer_types"], strict=True):
        assert layer.rope is not None and (kind == "sliding_attention") == (layer.window is not None)
        expected = gemma3_angles_of_transformers(written, kind)
        for actual, expected_table in zip(kernel_rope_tables(SEQ_LENGTH, layer.rope), expected, strict=True):
            torch.testing.assert_close(actual, expected_table, rtol=0, atol=1e-5)
    hf_model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**written))
    assert hf_model(torch.arange(20)[None]).logits.isfinite().all()


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("scaling", ["plain", "yarn"])
def test_gpt_oss_export_with_any_windows_and_positions(scaling: str, windows: str, tmp_path: Path) -> None:
    flags = {**SCALINGS[scaling], **WINDOWS[windows]}
    model = save_run(tmp_path / "ours", {**GPT_OSS, **flags, "rotary_base": 100.0}, one_plus=False)
    argv = ["--load", tmp_path / "ours", "--to-hf", tmp_path / "hf", "--family", "gpt_oss", "--check"]
    assert tool(*argv) == 0  # compares the logits of transformers too
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "again", "--check-bits") == 0
    reimported = saved_model(open_checkpoint(tmp_path / "again"))
    assert (reimported.position_embedding_type, reimported.layer_windows) == (
        model.position_embedding_type,
        model.layer_windows,
    )


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("family", FAMILIES)
def test_missing_head_keys_have_transformers_defaults(family: str, key: str) -> None:
    import transformers

    config = without({**PLAIN[family], "num_attention_heads": 32, "hidden_size": 256}, key)
    hf_config = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    model = build(read_config(config, None, "")[1]).model
    size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    assert (model.num_kv_groups, model.head_size) == (getattr(hf_config, "num_key_value_heads", 32), size)


def _drop_scaling(config: Json, options: Json, family: Any) -> list[str]:
    """Read the tables by the former rule, which merged the two so that the default type won."""
    return real_read_rope({key: value for key, value in config.items() if key != "rope_scaling"}, options, family)


def _other_window(config: Json, family: Any, layers: int) -> tuple[Json, list[str]]:
    return {"window_size": (4, 0)}, []


WRONG = {  # a rule of the importer -> (wrong rule, the model that shows it, its positions)
    "read_rope": (_drop_scaling, "mistral", {"rope_scaling": {**YARN, "rope_theta": 1e4}}),
    "_read_window": (_other_window, "mistral window", {}),
}


@pytest.mark.parametrize("rule", WRONG)
def test_check_detects_a_misread_config(models, rule: str, tmp_path: Path, monkeypatch, capsys) -> None:
    wrong, name, changes = WRONG[rule]
    hf_dir = copy_model(models(name)[1], tmp_path / "hf")
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps({**without(config, "rope_parameters"), **changes}))
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "right", "--check") == 0
    monkeypatch.setattr(config_json, rule, wrong)
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "wrong", "--check") == 1
    out = capsys.readouterr().out
    assert "all bits equal" in out and "logits of 96 random tokens differ by" in out
