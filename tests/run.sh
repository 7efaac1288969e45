#!/usr/bin/env bash
# Make .venv with the dev extras (once) and run the whole test suite; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh dev
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -n "${MEGALITE_TEST_WORKERS:-2}" --dist worksteal "$@"
