"""Head matmul and cross entropy in chunks of tokens: the logits of one chunk exist, those of a micro-batch never.

    l = x W^T;  loss = sum_n c_n (lse(l_n) - l_n[label_n]);   dl = c (softmax(l) - onehot)   (and z-loss)
    dx = dl W;  dW = dl^T x,  summed over chunks in fp32

Both gradients are computed in forward, while a chunk's logits are there. FLOPs 6 N D v, as with stored logits. Kept
from forward to backward: dx, which takes the place of x. Where forward knows the gradient of the loss, dl is
multiplied by it before it is rounded and dW is added to the flat gradient buffer at once; else dW [v, D] is kept too,
in fp32, and backward multiplies both. Rejected: keep x and the lse and compute the logits again in backward, 8 N D v,
which bounds the head at 3/4 of the matmul rate.

Each chunk reads and writes dW once (8 D v bytes against 6 D v c FLOPs), so a chunk is as large as its bytes allow.
nn/loss.py has the loop, because the vocabulary may be split over ranks.
"""

import torch

from megalite.kernels.dispatch import by_device

# bytes of one chunk's logits. CPU: measured, docs/performance.md; CUDA: 2048 tokens of 128k bf16 logits, at which
# dW's traffic is a tenth of the matmuls' time (8 D v bytes at 4 TB/s, 6 D v c FLOPs at 700 TFLOP/s)
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
MIN_TOKENS = 128  # below, matmuls are slow


def chunk_tokens(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens per chunk: chunks of nearly one size whose logits [chunk, columns] take about CHUNK_BYTES at most."""
    most = by_device(CHUNK_BYTES, device) // max(1, columns * dtype.itemsize)
    chunks = -(-tokens // max(MIN_TOKENS, most))
    return -(-tokens // max(1, chunks))
