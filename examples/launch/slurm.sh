#!/usr/bin/env bash
# One task per GPU; ranks and rendezvous come from SLURM's own variables. sbatch examples/launch/slurm.sh FLAGS
#SBATCH --job-name=megalite
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
set -euo pipefail
srun --kill-on-bad-exit=1 python pretrain_gpt.py --exit-signal-handler "$@"
