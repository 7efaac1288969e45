"""The baseline of tools/benchmark.py: transformers with torch's AdamW, alone, with DDP or with FSDP2.

The model is a Llama, a Mixtral or a DeepSeek-V3 (`systems.transformers_family`).

Shape, sequence length, micro-batches and gradient clipping are those of the megalite run; tokens are random. Nothing is
tuned or disabled: transformers chooses the attention (SDPA), the experts (grouped_mm) and the loss. `bf16` has weights
and moments in bf16, which is less exact than the fp32 main weights of megalite; `autocast` has fp32 weights and bf16
matmuls.
"""

import contextlib
import datetime
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig

from megalite.config import cli
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.training.job.preflight import choose_device
from tools.bench.systems import limit_memory, peak_memory, time_steps, transformers_family, write


def model_config(config: Any) -> LlamaConfig | MixtralConfig | DeepseekV3Config:
    """Return transformers' configuration of a megalite model."""
    model = config.model
    family = transformers_family(config)
    assert family is not None
    options: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.expert_ffn_size if family == "mixtral" else model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_groups,
        "max_position_embeddings": model.seq_length,
        "vocab_size": config.data.vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": False,
    }
    if family == "llama":
        return LlamaConfig(**options)
    experts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.moe_router_topk}
    if family == "mixtral":
        return MixtralConfig(**options, **experts)
    options |= {
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "first_k_dense_replace": model.moe_layers.count(False),
    }
    if model.num_experts:
        options |= experts
        options |= {
            "moe_intermediate_size": model.expert_ffn_size,
            "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size,
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor,
        }
    return DeepseekV3Config(**options)


def run_baseline(ranks: RankInfo, task: dict[str, Any]) -> None:
    """Time the steps of one rank, and write its result.

    task["contender"] is "transformers PRECISION" or "transformers PRECISION WRAPPER".
    """
    config, _ = cli.read(task["flags"], PRESETS)
    limit_memory(task.get("memory_bytes"))
    seq_length, train = config.model.seq_length, config.train
    assert seq_length and train.micro_batch_size and train.global_batch_size and config.data.vocab_size
    _, precision, *wrapper = task["contender"].split()
    timeout = datetime.timedelta(minutes=5)
    with process_group(ranks, device=choose_device(config.parallel.device), startup_timeout=timeout) as device:
        torch.manual_seed(0)
        hf_config = model_config(config)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model: Any = AutoModelForCausalLM.from_config(hf_config).to(device, dtype)
        if wrapper == ["ddp"]:
            model = nn.parallel.DistributedDataParallel(model)
        elif wrapper == ["fsdp2"]:
            mesh = init_device_mesh(device.type, (ranks.world_size,))
            for module in (*model.model.layers, model):  # each block, then the rest, as torch's guide to FSDP2 does
                fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
        num_microbatches = train.global_batch_size // train.micro_batch_size // ranks.world_size
        generator = torch.Generator().manual_seed(ranks.rank)
        batch_shape = (num_microbatches, train.micro_batch_size, seq_length)

        def step() -> None:
            batch = torch.randint(0, hf_config.vocab_size, batch_shape, generator=generator).to(device)
            for n, tokens in enumerate(batch):
                is_last = n == num_microbatches - 1
                if wrapper == ["fsdp2"]:
                    model.set_requires_gradient_sync(is_last)
                no_sync = model.no_sync() if wrapper == ["ddp"] and not is_last else contextlib.nullcontext()
                with no_sync, torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
                    (model(input_ids=tokens, labels=tokens).loss / num_microbatches).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        steps = time_steps(step, device, task["warmup"], task["steps"])
        write(task, ranks.rank, steps=steps, memory=peak_memory(device))
