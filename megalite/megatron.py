"""What Megatron-LM's command lines may hold that megalite has no option for. Data only.

IGNORED    accepted with a note: already so here, only speed or logging, or gone from Megatron-LM itself
UNSUPPORTED  would change the result: refused with a line that says so
The number is how many values follow the flag (-1: any number). Names as in Megatron-LM at d98e8a64 (2026-08-22).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _table(text: str) -> Mapping[str, tuple[int, str]]:
    rows: dict[str, tuple[int, str]] = {}
    for block in text.strip().split("\n\n"):
        reason, *lines = block.split("\n")
        for word in " ".join(lines).split():
            name, _, count = word.partition("=")
            rows["--" + name] = (int(count or 0), reason)
    return MappingProxyType(rows)


IGNORED = _table(
    """
always so here
sequence-parallel use-mcore-models transformer-impl=1 use-flash-attn attention-backend=1 attention-softmax-in-fp32
accumulate-allreduce-grads-in-fp32 calculate-per-token-loss no-create-attention-mask-in-dataloader ckpt-format=1
auto-detect-ckpt-format use-dist-ckpt dist-ckpt-format=1 ckpt-fully-parallel-save ckpt-fully-parallel-load
no-ckpt-fully-parallel-save ckpt-assume-constant-structure dist-ckpt-strictness=1 dist-ckpt-optim-fully-reshardable
deterministic-mode no-overlap-p2p-communication account-for-embedding-in-pipeline-split
account-for-loss-in-pipeline-split disable-gloo-process-groups use-checkpoint-opt-param-scheduler
use-precision-aware-optimizer override-opt-param-scheduler init-model-with-meta-device verify-integrity
distribute-saved-activations

randomness is computed from the seed and the step, there is no state of it
no-load-rng no-save-rng

a choice of kernels, made by megalite itself
no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-rope-fusion
no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl=1 no-persist-layer-norm
tp-comm-overlap use-nccl-ub openai-gelu moe-permute-fusion moe-grouped-gemm

of no effect on the result
num-workers=1 dataloader-type=1 num-dataset-builder-threads=1 local-rank=1 local_rank=1
use-persistent-ckpt-worker spec=2 no-weight-decay-cond-type=1 ddp-num-buckets=1
microbatch-group-size-per-virtual-pipeline-stage=1
use-tp-pp-dp-mapping num-distributed-optimizer-instances=1 vocab-extra-ids=1

gone from Megatron-LM
no-async-tensor-model-parallel-allreduce no-scatter-gather-tensors-in-pipeline standalone-embedding-stage
DDP-impl=1 no-query-key-layer-scaling log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard
use-legacy-models override-lr-scheduler data-impl=1 mmap-warmup delay-param-gather s3-cache-path=1
"""
)

UNSUPPORTED = _table(
    """
use --recompute-granularity full --recompute-method uniform instead
checkpoint-activations activations-checkpoint-method=1

use --micro-batch-size and --global-batch-size instead
batch-size=1

use --lr-warmup-fraction instead
warmup=1

use --tensor-model-parallel-size instead
model-parallel-size=1

experts are not supported (yet); train a dense model
num-experts=1 moe-layer-freq=1 moe-router-topk=1 moe-router-load-balancing-type=-1 moe-aux-loss-coeff=-1
moe-token-dispatcher-type=1 moe-ffn-hidden-size=1 moe-shared-expert-intermediate-size=1 moe-router-dtype=1
moe-router-score-function=1 moe-router-topk-scaling-factor=1 moe-router-enable-expert-bias moe-token-drop-policy=1
moe-z-loss-coeff=1 moe-router-bias-update-rate=1 moe-router-pre-softmax moe-expert-capacity-factor=1
expert-model-parallel-size=1 expert-tensor-parallel-size=1

this architecture is not supported (yet); leave it away
multi-latent-attention q-lora-rank=1 kv-lora-rank=1 qk-head-dim=1 qk-pos-emb-head-dim=1 v-head-dim=1 mtp-num-layers=1
rotary-interleaved rotary-seq-len-interpolation-factor=1
apply-query-key-layer-scaling hybrid-attention-ratio=1 encoder-tensor-model-parallel-size=1
pipeline-model-parallel-split-rank=1

this precision is not supported (yet); use --bf16
fp8-format=1 fp8-e4m3 fp8-hybrid fp8-param-gather fp8-recipe=1 fp8-amax-history-len=1 fp8-amax-compute-algo=1
grad-reduce-in-bf16 main-grads-dtype=1

this sharding is not supported (yet); the distributed optimizer (ZeRO-1) is on by default
use-megatron-fsdp use-torch-fsdp2 use-custom-fsdp data-parallel-sharding-strategy=1 optimizer-cpu-offload
optimizer-offload-fraction=1 cp-comm-type=-1

use --pipeline-model-parallel-layout instead
decoder-first-pipeline-num-layers=1 decoder-last-pipeline-num-layers=1

this part of training is not supported (yet); leave it away
step-batch-size-schedule=1 iterations-to-skip=-1 decoupled-lr=1 decoupled-min-lr=1 start-weight-decay=1
end-weight-decay=1 weight-decay-incr-style=1 recompute-modules=-1

this part of the data path is not supported (yet); use --data-path
full-validation padded-vocab-size=1 skip-train

this part of checkpoints is not supported (yet); leave it away
ckpt-convert-format=1 ckpt-convert-save=1 non-persistent-save-interval=1 non-persistent-ckpt-type=1 replication
replication-jump=1 replication-factor=1 override-ckpt-iteration=1

refused: nothing that megalite loads may run code
trust-remote-code

use --config FILE.toml instead
yaml-cfg=1
"""
)
