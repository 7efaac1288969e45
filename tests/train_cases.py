"""Small command lines that tests share."""

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --mock-data --vocab-size 93 --make-vocab-size-divisible-by 8 "
    "--eval-iters 1 --log-interval 1"
).split()
TP2_PP2 = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
