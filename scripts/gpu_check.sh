#!/usr/bin/env bash
# The five-minute check on a GPU host: random weights in real shapes, no downloads; see scripts/gpu_check.py.
#   scripts/gpu_check.sh [--budget-s 270] [--only WORD] [--tiny]
# Writes gpu_check.json ($OUT/gpu_check.json where OUT is set) and exits with 1 if any section failed.
# Needs jaxrt's dependencies and a CUDA plugin (`pip install -e '.[cuda13]'`); PYTHON names another interpreter.
set -euo pipefail
OUT=$(realpath -m "${OUT:-.}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
# Without preallocation: the start-up section's processes need memory beside this one's.
export OUT PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}
exec "$python" scripts/gpu_check.py "$@"
