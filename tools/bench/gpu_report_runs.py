"""The training runs of tools/gpu_report.py and the ablations of their steps, with goals for one H100 or H200."""

from dataclasses import dataclass

# A Llama without its sizes
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --hidden-dropout 0 --attention-dropout 0"
)
TINY_LLAMA = (
    "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --vocab-size 128 --seq-length 32"
    f" --micro-batch-size 1 --global-batch-size 2 --bf16 {LLAMA}"
)
TINY_MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
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
TINY_TIMING = "--repeats 1 --warmup 1 --steps 2"


@dataclass(frozen=True)
class TrainingRun:
    """A run whose steps are timed. Layers are left out if the model does not fit on the GPU.

    Attributes:
        name: its name in the names of parts.
        flags: the model and the batch, as flags of pretrain_gpt.py.
        tiny_flags: the same for --tiny, if it runs there.
        timing: the flags of tools/benchmark.py for the number of steps.
        mfu_goal: the MFU that an H100 or H200 should reach.
    """

    name: str
    flags: str
    tiny_flags: str | None = None
    timing: str = TIMING
    mfu_goal: float | None = None


TRAINING_RUNS = (
    TrainingRun(
        "llama3-8b-4096",
        f"{LLAMA3_8B} --micro-batch-size 1 --global-batch-size 16",
        tiny_flags=f"{TINY_LLAMA} --num-layers 2",
        mfu_goal=0.62,
    ),
    # If dp shards the optimizer state, memory is left for larger micro-batches.
    TrainingRun("llama3-8b-4096-mb4", f"{LLAMA3_8B} --micro-batch-size 4 --global-batch-size 16", mfu_goal=0.62),
    # Real runs have more micro-batches, so that the optimizer's share of a step is a quarter or an eighth of that with
    # 16. These take long, and run only if --only selects them or time is left.
    TrainingRun(
        "llama3-8b-4096-64",
        f"{LLAMA3_8B} --micro-batch-size 1 --global-batch-size 64",
        timing="--repeats 1 --warmup 1 --steps 3",
        mfu_goal=0.62,
    ),
    TrainingRun(
        "llama3-8b-4096-128",
        f"{LLAMA3_8B} --micro-batch-size 1 --global-batch-size 128",
        timing="--repeats 1 --warmup 1 --steps 2",
        mfu_goal=0.62,
    ),
    # Ablations compare pairs of steps, which are short.
    TrainingRun(
        "ablations",
        f"{LLAMA3_8B} --micro-batch-size 1 --global-batch-size 4",
        tiny_flags=f"{TINY_LLAMA} --num-layers 2",
    ),
    TrainingRun(
        "ablations-mb4",
        f"{LLAMA3_8B} --micro-batch-size 4 --global-batch-size 8",
        tiny_flags=f"{TINY_LLAMA} --num-layers 2 --global-batch-size 4",
    ),
    TrainingRun("qwen3-30b-a3b-4096", f"{QWEN3_30B} --global-batch-size 16", mfu_goal=0.42),
    TrainingRun(
        "ablations-moe",
        f"{QWEN3_30B} --global-batch-size 8",
        tiny_flags=f"{TINY_LLAMA} --num-layers 2 --global-batch-size 4 {TINY_MOE}",
    ),
    TrainingRun(
        "gpt-1.3b-2048", f"{GPT_1_3B} --seq-length 2048 --micro-batch-size 8 --global-batch-size 64", mfu_goal=0.60
    ),
    TrainingRun(
        "gpt-1.3b-4096", f"{GPT_1_3B} --seq-length 4096 --micro-batch-size 4 --global-batch-size 32", mfu_goal=0.60
    ),
    # For several GPUs; small, because every layout draws its weights again.
    TrainingRun(
        "llama-2b",
        f"{LLAMA3_8B} --num-layers 8 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 32",
        tiny_flags=f"{TINY_LLAMA} --num-layers 4",
    ),
    # Small models, for which the time to launch kernels matters.
    TrainingRun("gpt-125m-1024", GPT_125M),
    TrainingRun("gpt-125m-1024-graphs", f"{GPT_125M} --cuda-graph-impl local"),
)
FLAGS_BY_RUN = {run.name: run.flags for run in TRAINING_RUNS}
TINY_FLAGS_BY_RUN = {run.name: run.tiny_flags for run in TRAINING_RUNS if run.tiny_flags is not None}


@dataclass(frozen=True)
class VariantOptions:
    """The changes that a variant of a step makes to its run.

    Attributes:
        flags: additional flags, in which {quarter} and {sixteenth} stand for windows of such a part of the sequence.
        blas: the BLAS library; None: torch's choice.
        chunk_mib: the size of a chunk of the head's logits; None: the default.
        unfused: True to compute the experts' activation in kernels after their matmuls.
    """

    flags: str = ""
    blas: str | None = None
    chunk_mib: int | None = None
    unfused: bool = False


@dataclass(frozen=True)
class Ablation:
    """A comparison of two variants of a step (ablations.py).

    Attributes:
        name: its name in the report.
        on: the variant whose worth is measured.
        off: the variant to compare with.
        gpu_only_reason: the reason why a CPU has no such variants, or an empty string.
    """

    name: str
    on: VariantOptions = VariantOptions()
    off: VariantOptions = VariantOptions()
    gpu_only_reason: str = ""


ABLATION_RUN_FLAGS = "--mock-data --train-iters 1000000 --eval-iters 0 --lr 1e-5 --lr-decay-style constant"
DOCUMENT_FLAGS = "--reset-attention-mask --reset-position-ids --tokenizer-type NullTokenizer"
MICRO_BATCHES_OF_1 = VariantOptions("--micro-batch-size 1")
MICRO_BATCHES_OF_2 = VariantOptions("--micro-batch-size 2")
MICRO_BATCHES_OF_4 = VariantOptions("--micro-batch-size 4")
# by the name of their run, most valuable first
ABLATIONS: dict[str, tuple[Ablation, ...]] = {
    "ablations": (
        Ablation(
            "attention by the Triton kernel",
            on=VariantOptions("--attention-kernel triton"),
            gpu_only_reason="a CPU has neither cuDNN nor Triton",
        ),
        Ablation(
            "cuBLASLt in place of cuBLAS",
            on=VariantOptions(blas="cublaslt"),
            off=VariantOptions(blas="cublas"),
            gpu_only_reason="a CPU has neither",
        ),
        Ablation("separate documents", on=VariantOptions(DOCUMENT_FLAGS)),
        Ablation("window of a quarter of the sequence", on=VariantOptions("--window-size {quarter},0")),
        Ablation("window of a sixteenth of the sequence", on=VariantOptions("--window-size {sixteenth},0")),
        Ablation("chunks of the head of 1024 MiB", on=VariantOptions(chunk_mib=1024)),
        Ablation("chunks of the head of 256 MiB", on=VariantOptions(chunk_mib=256)),
    ),
    "ablations-mb4": (
        Ablation("micro-batches of 4", on=MICRO_BATCHES_OF_4, off=MICRO_BATCHES_OF_1),
        Ablation("micro-batches of 2", on=MICRO_BATCHES_OF_2, off=MICRO_BATCHES_OF_1),
    ),
    "ablations-moe": (
        Ablation(
            "SwiGLU and probabilities inside experts' matmuls",
            off=VariantOptions(unfused=True),
            gpu_only_reason="a CPU's experts are torch's",
        ),
        Ablation("micro-batches of 4", on=MICRO_BATCHES_OF_4, off=MICRO_BATCHES_OF_1),
    ),
}
