"""The baseline of tools/benchmark.py: transformers with torch's AdamW, alone, with DDP or with FSDP2.

The model is of the first family of transformers that can express it (`systems.transformers_config`). Shape, sequence
length, micro-batches and gradient clipping are those of the megalite run; tokens are random. Nothing is tuned or
disabled: transformers chooses the attention (SDPA), the experts (grouped_mm) and the loss. `bf16` has weights and
moments in bf16, which is less exact than the fp32 main weights of megalite; `autocast` has fp32 weights and bf16
matmuls.
"""

import contextlib
import datetime
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from megalite.common.optional_packages import KERNEL_PACKAGES_OF_TRANSFORMERS, hidden_packages
from megalite.config import cli
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.training.job.preflight import choose_device
from tools.bench.systems import limit_memory, peak_memory, time_steps, transformers_config, write


def model_config(config: Any) -> PreTrainedConfig:
    """Return transformers' configuration of a megalite model, without dropout, which some families have by default."""
    written = transformers_config(config)
    hf_config = AutoConfig.for_model(written.pop("model_type"), **written)
    for name in vars(hf_config):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(hf_config, name, 0.0)
    return hf_config


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
        hidden = KERNEL_PACKAGES_OF_TRANSFORMERS if device.type == "cpu" else ()
        with hidden_packages(*hidden):
            model: Any = AutoModelForCausalLM.from_config(hf_config).to(device, dtype)
        if wrapper == ["ddp"]:
            model = nn.parallel.DistributedDataParallel(model)
        elif wrapper == ["fsdp2"]:
            mesh = init_device_mesh(device.type, (ranks.world_size,))
            base = model.base_model
            blocks = base.h if hasattr(base, "h") else base.layers
            for module in (*blocks, model):  # each block, then the rest, as torch's guide to FSDP2 does
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
