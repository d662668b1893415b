#!/usr/bin/env bash
# The five-minute check on a GPU host: what is there, are the demo model's answers right on it, how fast is it.
# Needs jaxrt installed with a CUDA plugin (`pip install -e '.[cuda13,test]'`); PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
model=${1:-smollm2-135m}

"$python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")' || {
    echo "gpu_check: JAX sees no GPU here; see: $python -m jaxrt doctor" >&2
    exit 1
}
"$python" -m jaxrt doctor
"$python" -m jaxrt plan --model "$model" --rows 8
echo "== answers, in float32 for the golden values"
timeout 120 "$python" -m jaxrt run "The capital of France is" --model "$model" --dtype float32 --max-tokens 32 --stats
echo "== speed, in the dtype of this device"
timeout 180 "$python" -m jaxrt bench --model "$model" -p 512 -n 128 -b 1 -b 8 -r 3
