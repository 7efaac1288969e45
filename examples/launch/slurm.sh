#!/usr/bin/env bash
# sbatch examples/launch/slurm.sh DIR FLAGS, from the root of the repository. One torchrun per node.
# With --ntasks-per-node=8 instead there is one task per GPU and no torchrun; ranks and meeting place come from SLURM.
#SBATCH --job-name=megalite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
dir=${1:?the run directory}
shift
source examples/launch/outcome.sh

if [ "${SLURM_NTASKS_PER_NODE:-1}" = 1 ]; then
  FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  export FIRST NNODES=$SLURM_JOB_NUM_NODES JOB=$SLURM_JOB_ID
  run=(bash examples/launch/torchrun.sh "$dir")
else
  run=(python pretrain_gpt.py --save "$dir" --load "$dir")
fi

# USR1 comes 600 s before the time limit, TERM when a job is preempted: the run saves, ends, and is queued again
begin "$dir"
srun --kill-on-bad-exit=1 "${run[@]}" "$@" &
step=$!
trap 'kill -USR1 $step' USR1
trap 'kill -TERM $step' TERM
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done
if worth_another "$dir" && [ "${SLURM_RESTART_COUNT:-0}" -lt "${REQUEUES:-50}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
