#!/usr/bin/env python
"""Compare the torch form of the recurrent layers with that of transformers, on a CPU.

python tools/bench/recurrences.py                    one layer and its recurrence, 8 value heads, 4,096 tokens
python tools/bench/recurrences.py --dtype bfloat16   activations in bf16; the recurrence is computed in fp32

Both sides run alternately in one process, and the processor time of its threads is reported, which other processes
change less than the time that passes: medians of --repeats calls each, after one call without measurement. Forward is
without gradients, "both" is forward and backward. glibc keeps freed memory for both, as in a training run.

The layers are a gated delta net and transformers' Qwen3NextGatedDeltaNet of a quarter of Qwen3-Next's sizes: hidden
512, 4 key and 8 value heads of 128 channels. Exit code 0 when everything was measured, 2 for an invalid flag.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from megalite.config import cli
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs, delta_rule
from megalite.models.families import PRESETS
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.parallel.mesh import Mesh
from megalite.planning.run_plan import make_run_plan
from megalite.training.logging.device_memory import keep_freed_heap
from tools.cli_common import make_parser, number_in_range, run_program

HIDDEN, KEY_HEADS, VALUE_HEADS, CHANNELS = 512, 4, 8, 128
VOCAB_SIZE = 64
LINE = f"""--num-layers 1 --hidden-size {HIDDEN} --num-attention-heads 4 --micro-batch-size 1 --train-iters 1 --lr 1
 --mock-data --vocab-size {VOCAB_SIZE} --hidden-dropout 0 --attention-dropout 0 --normalization RMSNorm
 --position-embedding-type rope --hybrid-layer-pattern G --linear-num-key-heads {KEY_HEADS}
 --linear-num-value-heads {VALUE_HEADS} --linear-key-head-dim {CHANNELS} --linear-value-head-dim {CHANNELS}"""
Function = Callable[[], Tensor]


def recurrences(length: int, dtype: torch.dtype) -> tuple[list[Tensor], Function, Function]:
    """Return the inputs, and megalite's and transformers' recurrence of them, both [S, B, H, V]."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = torch.randn(2, length, 1, KEY_HEADS, CHANNELS).to(dtype).unbind(0)
    v = torch.randn(length, 1, VALUE_HEADS, CHANNELS).to(dtype)
    log_decay = -0.1 * torch.rand(length, 1, VALUE_HEADS)
    inputs = [q.clone(), k.clone(), v, log_decay, torch.rand(length, 1, VALUE_HEADS)]
    recurrence = Recurrence(CHANNELS**-0.5, normalize_qk=True)

    def hf() -> Tensor:
        o, _ = torch_chunk_gated_delta_rule(*(x.transpose(0, 1) for x in inputs), use_qk_l2norm_in_kernel=True)
        return o.transpose(0, 1)

    return inputs, lambda: delta_rule(RecurrenceInputs(*inputs), recurrence)[0], hf


def layers(length: int, dtype: torch.dtype) -> tuple[list[Tensor], Function, Function]:
    """Return the input and weights of both layers, and their outputs, both [S, B, D]."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config, _ = cli.read(f"{LINE} --seq-length {length}".split(), PRESETS)
    (stage,) = make_run_plan(config, 1, VOCAB_SIZE).balance.build_stages(Mesh.single_process(), dtype)
    mixer: Any = stage.blocks[0].mixer
    hf_config = Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_key_heads=KEY_HEADS, linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=CHANNELS, linear_value_head_dim=CHANNELS, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    reference = Qwen3NextGatedDeltaNet(hf_config, 0).to(dtype)
    x = torch.randn(length, 1, HIDDEN).to(dtype)
    batch = Batch(torch.zeros(length, 1, dtype=torch.int64), None, None, torch.arange(1))
    inputs = [x, *mixer.parameters(), *reference.parameters()]
    return (inputs, lambda: mixer(x, batch, ForwardContext()), lambda: reference(x.transpose(0, 1)).transpose(0, 1))


def measure(inputs: list[Tensor], functions: dict[str, Function], backward: bool, repeats: int) -> dict[str, float]:
    """Return the median seconds of processor time of each function."""
    for x in inputs:
        x.requires_grad_()

    def call(function: Function) -> float:
        start = time.process_time()
        with torch.set_grad_enabled(backward):
            y = function()
            if backward:
                torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
        return time.process_time() - start

    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            seconds = call(function)
            if repeat:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=number_in_range(int, "[1, 1e6]"), default=4096, metavar="N")
    parser.add_argument("--repeats", type=number_in_range(int, "[1, 1000]"), default=9, metavar="N")
    parser.add_argument("--threads", type=number_in_range(int, "[1, 256]"), default=1, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser


def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(int(args.threads))
    torch.manual_seed(0)
    keep_freed_heap()
    for name, build in (("recurrence", recurrences), ("layer", layers)):
        inputs, local, hf = build(int(args.tokens), getattr(torch, args.dtype))
        for backward in (False, True):
            times = measure(inputs, {"megalite": local, "transformers": hf}, backward, int(args.repeats))
            phase = "both" if backward else "forward"
            print(
                f"{name:10}  {args.dtype:8}  {phase:7}  megalite {times['megalite'] * 1e3:7.1f} ms  "
                f"transformers {times['transformers'] * 1e3:7.1f} ms  "
                f"{times['transformers'] / times['megalite']:5.2f} x"
            )
    return 0


if __name__ == "__main__":
    run_program(main)
