"""Megatron-LM command lines of ten published recipes, with their usual switches, sizes made small."""

_RUN = """--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --seed 42
 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --eval-interval 1000 --eval-iters 1 --log-interval 1
 --distributed-backend gloo --use-mcore-models --transformer-impl local"""
_GPT = (
    f"""{_RUN} --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"""
)
_ROPE = f"""{_GPT} --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope
 --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --ffn-hidden-size 192
 --no-masked-softmax-fusion --attention-softmax-in-fp32 --no-position-embedding --position-embedding-type rope"""

LINES: dict[str, tuple[int, str]] = {
    "gpt3 175b tp2 pp2": (
        4,
        f"""{_GPT} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
 --overlap-grad-reduce --overlap-param-gather --no-gradient-accumulation-fusion --lr-warmup-fraction .001 --lr-decay-iters 430000
 --rampup-batch-size 2 2 4 --split 949,50,1 --distributed-timeout-minutes 5 --attention-backend unfused""",
    ),
    "gpt3 345m dp2": (
        2,
        f"{_GPT} --lr-decay-iters 320 --lr-warmup-fraction .01 --data-impl mmap --DDP-impl local --num-workers 2",
    ),
    "gpt3 recompute": (
        1,
        f"{_GPT} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --no-bias-gelu-fusion",
    ),
    "gpt3 interleaved": (
        2,
        f"""{_GPT} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --recompute-activations
 --log-params-norm --log-num-zeros-in-grad --timing-log-level 0 --no-query-key-layer-scaling""",
    ),
    "llama2 7b tp2": (
        2,
        f"""{_ROPE} --tensor-model-parallel-size 2 --sequence-parallel --use-flash-attn --rotary-percent 1.0 --no-rope-fusion
 --make-vocab-size-divisible-by 1 --norm-epsilon 1e-05 --lr-warmup-iters 1 --bf16""",
    ),
    "llama2 70b tp2 pp2": (
        4,
        f"""{_ROPE} --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion --manual-gc --no-load-opt""".replace(
            " --no-load-opt", ""
        ),
    ),
    "llama3 8b": (
        2,
        f"""{_ROPE} --group-query-attention --num-query-groups 2 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0
 --tensor-model-parallel-size 2 --kv-channels 16 --ckpt-format torch_dist --dist-ckpt-strictness log_all --log-throughput
 --attention-backend fused --calculate-per-token-loss --manual-gc-interval 10 --log-timers-to-tensorboard""",
    ),
    "mistral 7b": (
        1,
        f"{_ROPE} --group-query-attention --num-query-groups 2 --rotary-base 1000000 --layernorm-epsilon 1e-5 --bf16",
    ),
    "qwen2.5 7b": (
        2,
        f"""{_ROPE} --group-query-attention --num-query-groups 1 --add-qkv-bias --rotary-base 1000000 --norm-epsilon 1e-6
 --tensor-model-parallel-size 2 --use-distributed-optimizer --no-bias-swiglu-fusion""",
    ),
    "qwen3 8b": (
        2,
        f"""{_ROPE} --group-query-attention --num-query-groups 2 --qk-layernorm --kv-channels 32 --rotary-base 1000000
 --pipeline-model-parallel-size 2 --accumulate-allreduce-grads-in-fp32 --no-create-attention-mask-in-dataloader --dataloader-type single""",
    ),
}
