#!/usr/bin/env bash
# Make .venv with the dev extras (once) and run the quick tests; arguments go to pytest. As the first argument:
# --commit adds the presubmit tests, as .ci/run does; --all runs all tests, which takes an hour, and needs more packages.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
which="not presubmit and not nightly" extras=dev
case "${1:-}" in
  --commit) which="(not nightly and not slow) or guarded"; shift ;;
  --all) which="" extras=nightly; shift ;;
esac
source tools/venv.sh "$extras"
if [ "$extras" = nightly ] && [ ! -d .venv/fla ]; then
  # apart from the other packages: transformers would call its GPU kernels on a CPU (tests/kernels/fla_interpreter.py)
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target .venv/fla \
    fla-core einops
fi
exec .venv/bin/python -m pytest -m "$which" -n "${MEGALITE_TEST_WORKERS:-2}" --dist worksteal "$@"
