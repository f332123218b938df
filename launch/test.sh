#!/usr/bin/env bash
# Sets up and runs what CI runs: structure checks, the tests, and the whole loop once more on Python 3.12 with the newest JAX. Programs for
# NVIDIA GPUs are compiled by JAX's CUDA plugin, which lies in a folder of its own that only the tests see.
# Usage: bash launch/test.sh [arguments for pytest, for instance tests/losses -k aipo]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
export PATH="$VENV/bin:$PATH"

failed=()
check() { # check NAME COMMAND...: runs to the end of the list, so that one run shows everything that is wrong
  say "$1"
  if ! "${@:2}" </dev/null; then failed+=("$1"); fi
}

find_python312() {
  local candidate
  for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 </dev/null; then echo "$candidate"; return; fi
  done
}

# Puts the locked CUDA plugin into $VENV/aot (190 MB to download) and leaves PLUGIN as the path to add, or empty where there is none.
install_gpu_compiler() {
  local lock stamp
  PLUGIN="$VENV/aot"
  lock="launch/locks/aot_$("$VENV/bin/python" -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt"
  stamp="$PLUGIN/$(sha256sum "$lock" | cut -c1-16)"
  if [ "$HAS_GPU" = yes ] || [ "$(uname -s)" != Linux ]; then PLUGIN=""; return; fi # with a GPU its own plugin is there already
  if [ -e "$stamp" ]; then return; fi
  rm -rf "$PLUGIN"
  "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install -qq --no-deps --require-hashes --target "$PLUGIN" -r "$lock" \
    </dev/null && touch "$stamp"
}

list_unexecuted_raises() {
  coverage combine --quiet && python -m tests.structure.raises
}

check "ruff: lint" ruff check --quiet .
check "ruff: format" ruff format --check --quiet .
check "pyright: types" pyright --warnings
check "import-linter: layers" lint-imports
check "codespell: spelling" codespell .

python312="$(find_python312)"
if [ "$("$VENV/bin/python" -c 'import sys; print(sys.version_info >= (3, 12))')" = True ]; then
  say "smoke test on Python 3.12: not needed, the tests below already run on $("$VENV/bin/python" --version) with the newest JAX"
elif [ -z "$python312" ]; then
  say "smoke test on Python 3.12: SKIPPED, no python3.12 on PATH or under pyenv; install one to run it"
else
  make_environment "$ROOT/.venv312" "$python312" ""
  check "smoke test of the whole loop on Python 3.12 with the newest JAX" "$ROOT/.venv312/bin/python" -m pytest -q tests/test_smoke.py
fi

check "JAX's compiler for NVIDIA GPUs" install_gpu_compiler
# Two processes need about 8 GB; more than four would wait for each other's virtual devices.
processes="$("$VENV/bin/python" -c 'import os; print(min(os.cpu_count() or 1, 4))')"
if [ "$#" -gt 0 ]; then
  PYTHONPATH="$PLUGIN" check "pytest" python -m pytest -m "not gpu and not multihost and not aot_large" "$@"
else
  rm -rf build/coverage
  check "pytest" coverage run -m pytest -n "$processes" --dist worksteal -m "not gpu and not multihost and not aot"
  check "coverage: every raise is executed by a test" list_unexecuted_raises
  PYTHONPATH="$PLUGIN" check "pytest: programs for NVIDIA GPUs" python -m pytest -n "$processes" --dist worksteal -m "aot and not aot_large" tests/aot
fi

if [ "${#failed[@]}" -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
say "all checks passed"
