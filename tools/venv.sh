# Create .venv and install the extras in $1, once. Sourced by examples/quickstart.sh and tests/run.sh.
# Needs Python 3.11+ with venv and pip; set MEGALITE_PYTHON to use another interpreter.
python=${MEGALITE_PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Python 3.11 or newer is needed; $python is $("$python" --version 2>&1). Set MEGALITE_PYTHON." >&2
  exit 3
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
stamp=.venv/.installed-$1-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
if [ ! -f "$stamp" ]; then
  quiet=--quiet
  [ ! -t 1 ] || quiet=  # show pip's progress on a terminal
  if [ "$(uname)" = Linux ] && [ ! -e /dev/nvidiactl ] && ! .venv/bin/python -c 'import torch' 2> /dev/null; then
    case "${PIP_INDEX_URL-} ${PIP_EXTRA_INDEX_URL-}" in
    */cpu*) ;;
    *) echo "No NVIDIA GPU here: pip may bring torch's build for CUDA all the same (5 GB on disk). For the CPU's (0.8 GB)," \
      "stop this and first: export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" >&2 ;;
    esac
  fi
  echo "installing (once) into .venv ..."
  .venv/bin/python -m pip install $quiet --disable-pip-version-check -c constraints.txt -e ".[$1]"
  touch "$stamp"
fi
