#!/usr/bin/env bash
# Make .venv with the dev extras (once) and run the test suite; arguments go to pytest.
# --long, as the first argument: also the tests that take more than 2 seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh dev
export OMP_NUM_THREADS=1
which="not long"
if [ "${1:-}" = --long ]; then
  which=""
  shift
fi
exec .venv/bin/python -m pytest -m "$which" -n "${MEGALITE_TEST_WORKERS:-2}" --dist worksteal "$@"
