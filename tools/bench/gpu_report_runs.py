"""The training runs and levers of tools/gpu_report.py, with goals for one H100 or H200."""

from dataclasses import dataclass

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --hidden-dropout 0 --attention-dropout 0"
)
TINY_LLAMA = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --vocab-size 128 --seq-length 32"
    f" --micro-batch-size 1 --global-batch-size 4 --bf16 {LLAMA}"
)
TINY_MOE = f"{TINY_LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
GPT_1_3B = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50257"
    " --hidden-dropout 0 --attention-dropout 0 --bf16"
)
GPT_125M = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257"
    " --hidden-dropout 0 --attention-dropout 0 --bf16 --seq-length 1024 --micro-batch-size 4 --global-batch-size 64"
)
LLAMA3_8B = "--preset llama3-8b --seq-length 4096 --bf16"
QWEN3_30B = "--preset qwen3-30b-a3b --seq-length 4096 --micro-batch-size 4 --bf16"
TIMING = "--repeats 1 --warmup 2 --steps 4"


@dataclass(frozen=True)
class TrainingRun:
    """A run whose steps are timed. Layers are left out if the model does not fit on the GPU.

    Attributes:
        name: its name in the names of parts.
        limit_s: its time limit; most of it is needed to draw the weights, on one core.
        flags: the model and the batch, as flags of pretrain_gpt.py.
        mfu_goal: the MFU that an H100 or H200 should reach.
        timing: the flags of tools/benchmark.py for the number of steps.
    """

    name: str
    limit_s: float
    flags: str
    mfu_goal: float
    timing: str = TIMING


TRAINING_RUNS = (
    TrainingRun("llama3-8b-4096", 150, f"{LLAMA3_8B} --micro-batch-size 1 --global-batch-size 16", 0.62),
    TrainingRun("qwen3-30b-a3b-4096", 200, f"{QWEN3_30B} --global-batch-size 16", 0.42),
    # If dp shards the optimizer state, memory is left for larger micro-batches.
    TrainingRun("llama3-8b-4096-mb4", 150, f"{LLAMA3_8B} --micro-batch-size 4 --global-batch-size 16", 0.62),
    TrainingRun("gpt-1.3b-2048", 70, f"{GPT_1_3B} --seq-length 2048 --micro-batch-size 8 --global-batch-size 64", 0.60),
    TrainingRun("gpt-1.3b-4096", 70, f"{GPT_1_3B} --seq-length 4096 --micro-batch-size 4 --global-batch-size 32", 0.60),
    # Real runs have more micro-batches, so that the optimizer's share of a step is a quarter or an eighth of that with
    # 16.
    TrainingRun(
        "llama3-8b-4096-64",
        240,
        f"{LLAMA3_8B} --micro-batch-size 1 --global-batch-size 64",
        0.62,
        "--repeats 1 --warmup 1 --steps 3",
    ),
    TrainingRun(
        "llama3-8b-4096-128",
        300,
        f"{LLAMA3_8B} --micro-batch-size 1 --global-batch-size 128",
        0.62,
        "--repeats 1 --warmup 1 --steps 2",
    ),
)


@dataclass(frozen=True)
class Lever:
    """Flags whose worth is measured: one model with several values of each, by tools/benchmark.py --sweep.

    Attributes:
        name: its name in the names of parts.
        limit_s: its time limit, for all values together.
        sweeps: the values of --sweep, a flag and its values each.
        flags: the model and the batch, as flags of pretrain_gpt.py.
        tiny_flags: the same for --tiny.
    """

    name: str
    limit_s: float
    sweeps: tuple[str, ...]
    flags: str
    tiny_flags: str = TINY_LLAMA


# few layers and a small vocabulary, because every value of a flag draws the weights again
FOUR_LAYERS = f"{LLAMA3_8B} --num-layers 4 --vocab-size 32000 --global-batch-size 8"
TWO_EXPERT_LAYERS = f"{QWEN3_30B} --num-layers 2 --vocab-size 32000 --global-batch-size 8"
LEVERS = (
    Lever("attention", 55, ("attention-kernel=auto,triton",), f"{FOUR_LAYERS} --micro-batch-size 1"),
    Lever("experts", 60, ("micro-batch-size=4,1",), TWO_EXPERT_LAYERS, TINY_MOE),
    Lever("micro-batches", 90, ("micro-batch-size=1,2,4",), FOUR_LAYERS),
    Lever("windows", 90, ("window-size=default,1023 0,255 0",), f"{FOUR_LAYERS} --micro-batch-size 1"),
    Lever("cuda-graphs", 60, ("cuda-graph-impl=default,local",), GPT_125M),
)
LAYOUT_FLAGS = f"{LLAMA3_8B} --num-layers 8 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 32"
