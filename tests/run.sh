#!/usr/bin/env bash
# Make .venv with the dev extras (once) and run the quick tests; arguments go to pytest. As the first argument:
# --commit: also those that take more than a second, as .ci/run does; --all: everything, 50 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh dev
export OMP_NUM_THREADS=1
which="not commit and not everything"
case "${1:-}" in
  --commit) which="not everything or changed"; shift ;;
  --all) which=""; shift ;;
esac
exec .venv/bin/python -m pytest -m "$which" -n "${MEGALITE_TEST_WORKERS:-2}" --dist worksteal "$@"
