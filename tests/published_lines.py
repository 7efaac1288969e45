"""Three command lines as published scripts build them, word for word but for the names of files.

gpt3     Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh (d98e8a64)
llama3   Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh (d98e8a64) with DTYPE=bf16 and real data
rocm     ROCm/Megatron-LM, examples/llama/train_llama3.sh (32d5d428) with MODEL_SIZE=8 SAVE_CKPT_PATH=...
`SMALLER` puts small sizes in their place; the rest stays as it is.
"""

GPT3 = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto
--micro-batch-size 1 --global-batch-size 1536 --step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
--lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
--data-path $DATA --vocab-file $VOCAB --merge-file $MERGES --split 949,50,1
--log-interval 100 --save-interval 10000 --eval-interval 1000 --save $CHECKPOINTS --load $CHECKPOINTS --eval-iters 10
--tensorboard-dir $LOGS"""

LLAMA3 = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
--data-path $DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER --data-cache-path $CACHE
--split "'99,1,0'" --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --vocab-size 128256
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60
--save $CHECKPOINTS --load $CHECKPOINTS --tensorboard-dir $LOGS"""

ROCM = """--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --context-parallel-size 1 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 131072
--untie-embeddings-and-output-weights --position-embedding-type rope --no-position-embedding --swiglu
--use-te-activation-func --no-bias-swiglu-fusion --disable-bias-linear --init-method-std 0.02 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --micro-batch-size 1 --global-batch-size 8 --train-iters 12 --bf16
--no-masked-softmax-fusion --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --fused-single-qkv-rope
--grad-reduce-in-bf16
--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER --dataloader-type cyclic --save-interval 200000
--tensorboard-dir $LOGS --log-interval 1 --eval-interval 320000 --eval-iters 10 --num-workers 8 --data-path $DATA
--log-interval 1 --log-throughput --no-save-optim --no-save-rng --eval-iters -1
--save-interval 5000 --eval-interval 5000 --ckpt-format torch --save $CHECKPOINTS
--group-query-attention --num-query-groups 8 --distributed-backend nccl --distributed-timeout-minutes 120
--overlap-grad-reduce --rerun-mode disabled --use-distributed-optimizer --overlap-param-gather --attention-backend fused
--sequence-parallel --use-mcore-models --ddp-average-in-collective
--lr 1e-4 --min-lr 1e-5 --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 1.0e-1 --clip-grad 1.0
--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95"""

LINES = {"gpt3": GPT3, "llama3": LLAMA3, "rocm": ROCM}

# flag -> value in place of the published one; tp 2 x pp 2 on gloo
_SIZES = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --eval-iters 1 --log-interval 1
 --distributed-backend gloo""".split()
_ALL = dict(zip(_SIZES[::2], _SIZES[1::2], strict=True))
_LLAMA = {"--ffn-hidden-size": "192", "--num-query-groups": "2"}
SMALLER: dict[str, dict[str, str]] = {
    "gpt3": _ALL
    | {"--train-iters": "6", "--global-batch-size": "12", "--lr-decay-iters": "6", "--lr": "1e-3"}
    | {"--step-batch-size-schedule": "0:4 512:8 2K:12", "--lr-warmup-fraction": ".1"},
    "llama3": _ALL
    | _LLAMA
    | {"--kv-channels": "16", "--train-samples": "48", "--global-batch-size": "8"}
    | {"--lr-decay-samples": "48", "--lr-warmup-samples": "8", "--vocab-size": "512"},
    "rocm": _ALL | _LLAMA | {"--train-iters": "6", "--eval-iters": "-1", "--global-batch-size": "4"},
}


def words(name: str, places: dict[str, str], small: bool = True) -> list[str]:
    """The line as the shell would pass it; `places`: what $NAME stands for. pp 2 is added where the script has none."""
    import shlex

    found = [places.get(word, word) for word in shlex.split(LINES[name])]
    for flag, value in SMALLER[name].items() if small else ():
        for i in reversed([i for i, word in enumerate(found) if word == flag]):
            found[i + 1] = value
    if small and "--pipeline-model-parallel-size" not in found:
        found += ["--pipeline-model-parallel-size", "2"]
    if small and "--fp16" in found:
        found += ["--initial-loss-scale", "65536"]  # from 2^32 all six steps would only halve it
    return found
