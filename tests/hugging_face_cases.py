"""Tiny models of transformers' families, with weights far from their initial values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

V, S = 93, 48
SHAPE = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
SHAPE["max_position_embeddings"] = S
SCALED = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.1}
YARN["original_max_position_embeddings"] = 12
MAGNITUDES = {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": S}
# name -> (class of the configuration, its values); the name begins with the model type
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SHAPE, "num_key_value_heads": 2, "rope_parameters": SCALED}),
    "llama yarn": (
        "LlamaConfig",
        {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": {**YARN, "mscale": 0.8}},
    ),
    "llama yarn of both magnitudes": ("LlamaConfig", {**SHAPE, "rope_parameters": {**YARN, **MAGNITUDES}}),
    "llama linear": (
        "LlamaConfig",
        {**SHAPE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama tied biases": (
        "LlamaConfig",
        {**SHAPE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralConfig", {**SHAPE, "num_key_value_heads": 2, "sliding_window": None, "head_dim": 16}),
    "mistral window": ("MistralConfig", {**SHAPE, "num_key_value_heads": 2, "sliding_window": 7, "head_dim": 16}),
    "qwen2 window": (
        "Qwen2Config",
        {**SHAPE, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2": ("Qwen2Config", {**SHAPE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**SHAPE, "num_key_value_heads": 2, "num_local_experts": 5, "sliding_window": 9}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**SHAPE, **SPARSE, "num_key_value_heads": 2, "shared_expert_intermediate_size": 28, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**SHAPE, **SPARSE, "num_hidden_layers": 3, "decoder_sparse_step": 2, "head_dim": 16, "norm_topk_prob": True},
    ),
    "gpt_neox": ("GPTNeoXConfig", SHAPE),
    "gpt_neox one after the other": (
        "GPTNeoXConfig",
        {**SHAPE, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 untied exact gelu": ("GPT2Config", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}),
}


def make(name: str, folder: Path, **changes: Any) -> Any:
    """The model of that name, with `changes` of its configuration; it is saved in `folder`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # what tests capture should be ours
    cls, values = MODELS[name]
    config = getattr(transformers, cls)(**{**values, **changes}, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def with_tokenizer(folder: Path, words: int) -> None:
    """A word-level tokenizer of `words` tokens beside the model, with what else is usually there."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", "the", "in", "of", "was", "."]
    vocab = {name: i for i, name in enumerate(names + [f"w{i}" for i in range(words - len(names))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "max_length": 17}))
    (folder / "modeling_evil.py").write_text("raise SystemExit")


def collection(base: Path, tokenizer: bool = False, layers: int | None = None) -> Callable[[str], tuple[Any, Path]]:
    """name -> (model of transformers, the directory below `base` it is saved in), each made once. `tokenizer`: with one
    of as many tokens as the model has rows."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            folder = base / name.replace(" ", "_") / "model"
            changes = {} if layers is None else {"n_layer" if name.startswith("gpt2") else "num_hidden_layers": layers}
            made[name] = make(name, folder, **changes), folder
            if tokenizer:
                with_tokenizer(folder, V)
        return made[name]

    return get
