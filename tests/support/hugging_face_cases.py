"""Tiny transformers models of each family, with weights far from their initial values."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import toml_tables
import torch
from safetensors.torch import load_file, save_file

CASES = toml_tables.read_table("support/hugging_face_cases")
SHAPE, GPT2 = CASES["shape"], CASES["gpt2"]
VOCAB_SIZE, SEQ_LENGTH = SHAPE["vocab_size"], SHAPE["max_position_embeddings"]
# name -> (class of the configuration, its values); the name begins with the model type
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (cls, {**(GPT2 if cls == "GPT2Config" else SHAPE), **values})
    for name, (cls, values) in CASES["models"].items()
}
MODELS["mistral"][1]["sliding_window"] = None  # TOML has no null
MODELS["gemma2 of one cap"][1]["final_logit_softcapping"] = None
for name in ("deepseek_v2 lite", "deepseek_v3 moonlight", "youtu of full queries"):
    MODELS[name][1]["q_lora_rank"] = None
MODELS["olmo_hybrid"][1]["rope_parameters"] = {"rope_type": "default", "rope_theta": None}


def causal_lm_class(model_type: str) -> Any:
    """Return the class of a language model; AutoModelForCausalLM does not know that of Mistral 4."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "Mistral4ForCausalLM"))


def create_model(name: str, directory: Path, **changes: Any) -> Any:
    """Create the model of that name, with changes of its configuration, and save it in `directory`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # tests should capture only what megalite prints
    cls, values = MODELS[name]
    config = getattr(transformers, cls)(**{**values, **changes}, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(len(name))
    model = causal_lm_class(config.model_type)._from_config(config).eval()
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in (*model.parameters(), *biases):
            parameter.add_(0.2 * torch.randn_like(parameter))
    if config.model_type == "olmo_hybrid":
        # the epsilon of the norm of heads is fixed, and larger heads would magnify the rounding of fp32
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.v_proj.weight"):
                parameter.data.mul_(0.02)
        save_olmo_hybrid(model, directory)
        return model
    model.save_pretrained(directory)
    if config.model_type == "kimi_linear":
        tensors = load_file(directory / "model.safetensors")
        save_file({published_name(name): x for name, x in tensors.items()}, directory / "model.safetensors")
    return model


def save_olmo_hybrid(model: Any, directory: Path) -> None:
    """Save a model as it is published.

    transformers cuts the convolution of queries, keys and values in three equal parts, whatever their sizes, and also
    renames the norms of layers with attention as it does those of the others.
    """
    config = model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    model.save_pretrained(directory, save_original_format=False)
    tensors = load_file(directory / "model.safetensors")
    for n, kind in enumerate(config.layer_types):
        if kind != "linear_attention":
            continue
        layer = f"model.layers.{n}."
        filters = tensors.pop(f"{layer}linear_attn.conv1d.weight")
        for part, rows in zip("qkv", filters.split([keys, keys, len(filters) - 2 * keys]), strict=True):
            tensors[f"{layer}linear_attn.{part}_conv1d.weight"] = rows.clone()
        tensors[f"{layer}attention_layer_norm.weight"] = tensors.pop(f"{layer}input_layernorm.weight")
        tensors[f"{layer}feedforward_layer_norm.weight"] = tensors.pop(f"{layer}post_attention_layernorm.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def olmo_hybrid_in_memory(published: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a published model by the names that they have in transformers."""
    weights: dict[str, Any] = {}
    for name, values in published.items():
        if match := re.fullmatch(r"(.*linear_attn\.)([qkv])_conv1d\.weight", name):
            filters = [published[f"{match[1]}{part}_conv1d.weight"] for part in "qkv"]
            weights[f"{match[1]}conv1d.weight"] = torch.cat(filters)
        else:
            name = name.replace("attention_layer_norm", "input_layernorm")
            weights[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = values
    return weights


def published_name(name: str) -> str:
    """Return a name as in published files: transformers also renames the dense layers as it does experts."""
    return re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)


NUM_DEPTHS = 2  # of multi-token prediction, in `with_depths`


def with_depths(name: str, directory: Path) -> tuple[Path, Path]:
    """Write a model with depths as they are published; return its directory, and that of a model of all its layers."""
    num_layers = 3
    deep_dir = directory / "deep"
    create_model(name, deep_dir, num_hidden_layers=num_layers + NUM_DEPTHS, first_k_dense_replace=1)
    tensors, generator = load_file(deep_dir / "model.safetensors"), torch.Generator().manual_seed(7)
    D = SHAPE["hidden_size"]
    embedding = tensors["model.embed_tokens.weight"]
    for n in range(num_layers, num_layers + NUM_DEPTHS):
        layer = f"model.layers.{n}."
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{layer}{norm}.weight"] = 1 + 0.3 * torch.randn(D, generator=generator)
        tensors[f"{layer}eh_proj.weight"] = 0.3 * torch.randn(D, 2 * D, generator=generator)
        tensors[f"{layer}embed_tokens.weight"] = embedding.clone()
        tensors[f"{layer}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    model_dir = directory / "model"
    model_dir.mkdir()
    save_file(tensors, model_dir / "model.safetensors")
    config = json.loads((deep_dir / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": NUM_DEPTHS}
    config.pop("num_mtp_layers", None)
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir, deep_dir


@contextmanager
def in_fp64() -> Iterator[None]:
    """Compute in fp64 what transformers computes in fp32 whatever the dtype: norms, softmax and rotary positions.

    A model that is created and used in this context equals its definition to the rounding of fp64.
    """
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        yield


def load_in_fp64(model_dir: Path) -> Any:
    """Return a model of transformers in fp64 with eager attention, for use within `in_fp64`."""
    import transformers

    weights = load_file(model_dir / "model.safetensors")  # would have a wrong dtype within `in_fp64`
    if json.loads((model_dir / "config.json").read_text())["model_type"] == "olmo_hybrid":
        weights = olmo_hybrid_in_memory(weights)
    config = transformers.AutoConfig.from_pretrained(model_dir)
    config._experts_implementation = "eager"  # others do not multiply in fp64
    with in_fp64():
        model_class = causal_lm_class(config.model_type)
        model = model_class._from_config(config, dtype=torch.float64, attn_implementation="eager")
        state = {name: values.double() for name, values in stack_experts(weights).items()}
        if config.model_type == "nemotron_h":
            state = {re.sub(r"^backbone\.", "model.", name): values for name, values in state.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)  # a tied head
    return model.eval()


def stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with the matrices of all experts of a layer as one, as transformers 5 has them in memory."""
    stacked: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, values in weights.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = values
        else:
            stacked[name] = values
    for name, matrices in experts.items():
        ordered = [matrices[e] for e in sorted(matrices)]
        if "gate" in ordered[0]:
            stacked[f"{name}.gate_up_proj"] = torch.stack([torch.cat((m["gate"], m["up"])) for m in ordered])
        else:
            stacked[f"{name}.up_proj"] = torch.stack([m["up"] for m in ordered])
        stacked[f"{name}.down_proj"] = torch.stack([m["down"] for m in ordered])
    return stacked


def copy_model(directory: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((directory / name).read_bytes())
    return target


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a word-level tokenizer of `vocab_size` tokens next to the model, with the other files that a model usually has."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", "the", "in", "of", "was", "."]
    vocab = {name: i for i, name in enumerate(names + [f"w{i}" for i in range(vocab_size - len(names))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "max_length": 17}))
    (directory / "modeling_evil.py").write_text("raise SystemExit")


def model_cache(
    base: Path, with_tokenizer: bool = False, num_layers: int | None = None
) -> Callable[[str], tuple[Any, Path]]:
    """Return a cached function: name -> (transformers model, its directory below `base`).

    With `with_tokenizer`, the directory has a tokenizer with as many tokens as the model has rows.
    """
    models: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in models:
            directory = base / name.replace(" ", "_") / "model"
            changes = (
                {}
                if num_layers is None
                else {"n_layer" if name.startswith("gpt2") else "num_hidden_layers": num_layers}
            )
            models[name] = create_model(name, directory, **changes), directory
            if with_tokenizer:
                write_tokenizer(directory, VOCAB_SIZE)
        return models[name]

    return get
