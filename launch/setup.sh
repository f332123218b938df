#!/usr/bin/env bash
# Makes .venv with the locked packages and this project in it; the second call only compares a stamp.
# Run it, or source it from another script of this folder: it leaves ROOT, VENV, HAS_GPU and the functions below defined.
# Needs Python 3.11 to 3.13 with its venv module. LLAMARL_PYTHON names an interpreter; LLAMARL_CUDA=none|cuda12|cuda13 overrides what is
# found on the machine.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A name on PATH may be a launcher that refuses to start (pyenv's are), so each candidate is run, not only looked up.
python_is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 </dev/null
}

find_python() {
  local candidate
  for candidate in ${LLAMARL_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if python_is_supported "$candidate"; then echo "$candidate"; return; fi
  done
  local found="no python3"
  if command -v "${LLAMARL_PYTHON:-python3}" >/dev/null; then
    found="$("${LLAMARL_PYTHON:-python3}" --version 2>&1 </dev/null | head -n 1) as ${LLAMARL_PYTHON:-python3}"
  fi
  fail "Python 3.11, 3.12 or 3.13 is needed and this machine has $found; install one (for instance 'apt-get install python3.11" \
    "python3.11-venv', or 'pyenv install 3.11') or set LLAMARL_PYTHON to its path, and run this again"
}

# cuda13 if the driver can run CUDA 13 programs, else cuda12; empty without an NVIDIA GPU.
find_cuda_extra() {
  if [ -n "${LLAMARL_CUDA:-}" ]; then
    if [ "$LLAMARL_CUDA" != none ]; then echo "$LLAMARL_CUDA"; fi
    return
  fi
  if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null </dev/null | grep -q '^GPU'; then return; fi
  local major
  major="$(nvidia-smi </dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | head -n 1)"
  if [ "${major:-12}" -ge 13 ]; then echo cuda13; else echo cuda12; fi
}

# make_environment FOLDER PYTHON CUDA_EXTRA: creates or completes one virtual environment.
make_environment() {
  local folder="$1" python="$2" cuda="$3" version lock wanted
  version="$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])' </dev/null)"
  lock="$ROOT/launch/locks/py312.txt" # the lock of 3.12 also serves 3.13
  if [ "$version" = py311 ]; then lock="$ROOT/launch/locks/py311.txt"; fi
  wanted="$("$python" - "$lock" "$ROOT/pyproject.toml" "$ROOT/launch/setup.sh" "$ROOT" "$version" "$cuda" <<'PY'
import hashlib, pathlib, sys
files, words = sys.argv[1:4], sys.argv[4:]
print(hashlib.sha256(b"\0".join([*(pathlib.Path(f).read_bytes() for f in files), *(w.encode() for w in words)])).hexdigest())
PY
)"
  if [ "$(cat "$folder/llamarl_stamp" 2>/dev/null)" = "$wanted" ] && "$folder/bin/python" -c '' 2>/dev/null </dev/null; then return; fi

  say "installing the packages of $(basename "$lock") into $(basename "$folder") (once; a few minutes)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null </dev/null ||
    fail "$python lacks its venv module; install it (Debian and Ubuntu: 'apt-get install python3-venv') and run this again"
  "$python" -m venv --clear "$folder" </dev/null
  local pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input)
  "${pip[@]}" install -qq --no-deps --require-hashes -r "$lock" </dev/null
  "${pip[@]}" install -qq --no-deps -e "$ROOT" </dev/null
  if [ -n "$cuda" ]; then
    say "adding jax[$cuda] for the NVIDIA GPU"
    "${pip[@]}" install -qq "jax[$cuda]==$("$folder/bin/python" -c 'import importlib.metadata as m; print(m.version("jax"))')" </dev/null
  fi
  printf '%s\n' "$wanted" >"$folder/llamarl_stamp"
}

PYTHON="$(find_python)"
CUDA_EXTRA="$(find_cuda_extra)"
HAS_GPU=no
if [ -n "$CUDA_EXTRA" ]; then HAS_GPU=yes; fi
make_environment "$VENV" "$PYTHON" "$CUDA_EXTRA"
say "$("$VENV/bin/python" --version), jax $("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("jax"))'), ${CUDA_EXTRA:-CPU only}"
