#!/usr/bin/env bash
# From a fresh clone to a trained model: .venv, packages, data, TP 2 x PP 2 training, a summary. Cheap to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh tensorboard,plots
exec .venv/bin/python examples/quickstart.py "$@"
