# Sourced by scripts/demo and scripts/test: `setup EXTRAS` makes .venv in the checkout's root and installs jaxrt there,
# editable, with the pinned tree of constraints.txt and the native kernels built. Does nothing when that is already done.

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local name
    for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$name"
            return
        fi
    done
    say "jaxrt: found no Python 3.11 or newer; install one, or set PYTHON to its path"
    return 1
}

setup() {
    local extras=$1 python tree stamp=.venv/jaxrt.stamp
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # none yet, or one whose making was interrupted
        python=$(find_python)
        say "jaxrt: making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
    fi
    tree=$(.venv/bin/python -c '
import hashlib, pathlib
native = sorted(p for p in pathlib.Path("jaxrt/native").iterdir() if p.suffix in (".cc", ".h"))
files = [*map(pathlib.Path, ("pyproject.toml", "constraints.txt", "setup.py")), *native]
print(hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest())
')
    if ! grep -qsxF "$tree $extras" "$stamp"; then
        say "jaxrt: installing jaxrt$extras and what it stands on (a few minutes the first time)"
        .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".$extras" >&2
        grep -qsF "$tree" "$stamp" || : >"$stamp" # what was installed for another tree counts no more
        printf '%s\n' "$tree $extras" >>"$stamp"
    fi
}
