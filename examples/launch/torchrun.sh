#!/usr/bin/env bash
# The same line on every node; FIRST is the name of one of them, as the others know it.
#
#   FIRST=node-a NNODES=2 bash examples/launch/torchrun.sh DIR FLAGS
#   FIRST=node-a NNODES=1:4 ...      elastic: goes on with the nodes that are left, grows when one comes back
#   bash examples/launch/torchrun.sh DIR FLAGS       one node
#
# DIR is --save and --load; FLAGS are pretrain_gpt.py's. Exit code: AGAIN (75) if it is worth starting again, else torchrun's.
# The first node keeps the others' meeting place: without it the run ends on all of them, to be started again as a whole.
# Kubeflow's PET_NNODES and PET_MASTER_ADDR are understood as well. A trusted network only: torchrun listens on every
# interface.
set -uo pipefail
dir=${1:?the run directory}
shift
source "$(dirname "${BASH_SOURCE[0]}")/outcome.sh"

nodes=${NNODES:-${PET_NNODES:-1}}
first=${FIRST:-${PET_MASTER_ADDR:-127.0.0.1}}
port=${PORT:-29500}

# The first node may come minutes after the others, as where an image has to be fetched, and a name that does not lead
# anywhere yet may soon be this node's; torchrun itself gives both a minute.
is_first() {
  [ "$first" = 127.0.0.1 ] || [ "$first" = "$(hostname)" ] ||
    getent ahosts "$first" | awk '{print $1}' | grep -qxF -e 127.0.0.1 -e ::1 -f <(hostname -I | tr ' ' '\n' | grep .)
}
listens() { timeout 5 bash -c ': <>"/dev/tcp/$0/$1"' "$first" "$port" 2>/dev/null; }
until is_first || listens || [ "$SECONDS" -ge "${START_WITHIN:-900}" ]; do
  [ -n "${waits:-}" ] || echo "torchrun.sh: waits up to ${START_WITHIN:-900} s for the first node, $first:$port" >&2
  waits=1
  sleep 1
done

# a store per attempt: with torchrun's own, a node that comes back is not told where the others are
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# seconds for a save after a signal; --shutdown-timeout is the same, but not before torch 2.12, where 30 is fixed
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE:-540}
begin "$dir"
torchrun --nnodes="$nodes" --nproc-per-node="${NPROC:-gpu}" --max-restarts="${RESTARTS:-10}" \
  --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="${JOB:-megalite}" \
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
