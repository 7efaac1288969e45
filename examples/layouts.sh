#!/usr/bin/env bash
# One model on one text under six layouts, and how far their losses are apart: docs/layouts.png. After examples/quickstart.sh,
# whose text, tokenizer and settings it takes; about 5 minutes on 2 CPU cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 # of every process alike: two threads would add in another order
python=python
[ -x .venv/bin/python ] && python=.venv/bin/python
train() { # NAME FLAGS...
  "$python" pretrain_gpt.py --config examples/quickstart.toml --name "$1" --train-iters 60 --eval-iters 0 --log-interval 1 \
    "${@:2}" | tail -n 1
}
rm -rf runs/one-process runs/tp2 runs/pp2* runs/dp2 runs/tp2-pp2
train one-process
train tp2 --nproc 2 --tp 2
train pp2-vpp2 --nproc 2 --pp 2 --num-virtual-stages-per-pipeline-rank 2
train pp2-split --nproc 2 --pp 2 --split-backward
train dp2 --nproc 2
train tp2-pp2 --nproc 4 --tp 2 --pp 2
"$python" tools/plot.py agreement runs/{one-process,tp2,pp2-vpp2,pp2-split,dp2,tp2-pp2} --out docs/layouts.png
