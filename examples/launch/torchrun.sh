#!/usr/bin/env bash
# The same line on every node; FIRST is the name of one of them, as the others know it.
#
#   FIRST=node-a NNODES=2 bash examples/launch/torchrun.sh DIR FLAGS
#   FIRST=node-a NNODES=1:4 ...      elastic: goes on with the nodes that are left, grows when one comes back
#   bash examples/launch/torchrun.sh DIR FLAGS       one node
#
# DIR is --save and --load; FLAGS are pretrain_gpt.py's. Exit code: AGAIN (75) if it is worth starting again, else torchrun's.
# The first node keeps the others' meeting place: without it the run ends on all of them, to be started again as a whole.
# Kubernetes' PET_ variables are understood as well. A trusted network only: torchrun listens on every interface.
set -uo pipefail
dir=${1:?the run directory}
shift
source "$(dirname "${BASH_SOURCE[0]}")/outcome.sh"

nodes=${NNODES:-${PET_NNODES:-1}}
address=${FIRST:-127.0.0.1}:${PORT:-29500}
if [ -z "${FIRST:-}" ] && [ -n "${PET_RDZV_ENDPOINT:-}" ]; then address=$PET_RDZV_ENDPOINT; fi

# a store per attempt: with torchrun's own, a node that comes back is not told where the others are
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# seconds for a save after a signal; --shutdown-timeout is the same, but not before torch 2.12, where 30 is fixed
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE:-540}
begin "$dir"
torchrun --nnodes="$nodes" --nproc-per-node="${NPROC:-gpu}" --max-restarts="${RESTARTS:-10}" \
  --rdzv-backend=c10d --rdzv-endpoint="$address" --rdzv-id="${JOB:-megalite}" \
  --rdzv-conf="last_call_timeout=${LAST_CALL:-30},join_timeout=${START_WITHIN:-900}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  pretrain_gpt.py --save "$dir" --load "$dir" "$@" &
torchrun=$!
for name in TERM INT HUP USR1; do trap "kill -$name $torchrun" "$name"; done
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun"
  code=$?
done
worth_another "$dir" && exit "${AGAIN:-75}"
exit "$code"
