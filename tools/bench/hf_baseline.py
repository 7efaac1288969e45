"""The peer of tools/benchmark.py: transformers' Llama or Mixtral and torch's AdamW, alone, with DDP or with FSDP2.

The same shape, sequence, micro-batches and clipping; random tokens. Nothing is tuned and nothing is held back:
attention (SDPA) and experts (grouped_mm) are those that transformers chooses, the loss its own. `bf16`: weights and
moments in bf16, which is less exact than megalite's fp32 main weights; `autocast`: fp32 weights, matmuls in bf16.
"""

import contextlib
import datetime
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from megalite.config import cli
from megalite.launch.rank_info import RankInfo, process_group
from megalite.models.families import PRESETS
from megalite.training.job.preflight import choose_device
from tools.bench.systems import limit_memory, peak_memory, time_steps, write


def peer_rank(ranks: RankInfo, task: dict[str, Any]) -> None:
    config, _ = cli.read(task["flags"], PRESETS)
    limit_memory(task.get("memory_bytes"))
    m, t = config.model, config.train
    assert m.seq_length and t.micro_batch_size and t.global_batch_size and config.data.vocab_size
    _, kind, *way = task["contender"].split()
    timeout = datetime.timedelta(minutes=5)
    with process_group(ranks, device=choose_device(config.parallel.device), startup_timeout=timeout) as device:
        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(hidden_size=m.hidden_size, intermediate_size=m.expert_ffn_size or m.ffn_size)
        sizes |= dict(num_hidden_layers=m.num_layers, num_attention_heads=m.num_attention_heads)
        sizes |= dict(num_key_value_heads=m.num_kv_groups, max_position_embeddings=m.seq_length)
        sizes |= dict(vocab_size=config.data.vocab_size, tie_word_embeddings=not m.untie_embeddings_and_output_weights)
        if m.num_experts:
            sizes |= dict(num_local_experts=m.num_experts, num_experts_per_tok=m.moe_router_topk)
        shape = (MixtralConfig if m.num_experts else LlamaConfig)(**sizes, use_cache=False)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        model: Any = AutoModelForCausalLM.from_config(shape).to(device, dtype)
        if way == ["ddp"]:
            model = nn.parallel.DistributedDataParallel(model)
        elif way == ["fsdp2"]:
            mesh = init_device_mesh(device.type, (ranks.world_size,))
            for part in (*model.model.layers, model):  # each block, then the rest, as torch's guide to FSDP2 does
                fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
        count = t.global_batch_size // t.micro_batch_size // ranks.world_size
        generator = torch.Generator().manual_seed(ranks.rank)
        size = (count, t.micro_batch_size, m.seq_length)

        def step() -> None:
            tokens = torch.randint(0, shape.vocab_size, size, generator=generator).to(device)
            for n, micro in enumerate(tokens):
                last = n == count - 1
                if way == ["fsdp2"]:
                    model.set_requires_gradient_sync(last)
                quiet = model.no_sync() if way == ["ddp"] and not last else contextlib.nullcontext()
                with quiet, torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
                    (model(input_ids=micro, labels=micro).loss / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        steps = time_steps(step, device, task["warmup"], task["steps"])
        write(task, ranks.rank, steps=steps, memory=peak_memory(device))
