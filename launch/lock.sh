#!/usr/bin/env bash
# Writes launch/locks/py311.txt and py312.txt anew: exact versions and hashes of the development set (3.13 uses the lock of 3.12), and
# aot_py311.txt and aot_py312.txt: the two packages of the extra aot, of the same version as jax.
# Usage: bash launch/lock.sh [more arguments of `uv pip compile`, for instance --upgrade-package jax]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV="${UV:-uv}"
command -v "$UV" >/dev/null || { echo "uv was not found: run 'pip install uv' (or set UV to its path) and try again" >&2; exit 1; }
for version in 3.11 3.12; do
  lock="launch/locks/py${version/./}.txt"
  echo "== $lock"
  "$UV" pip compile pyproject.toml --extra dev --universal --python-version "$version" --generate-hashes \
    --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "bash launch/lock.sh" \
    --quiet --output-file "$lock" "$@"
  jax="$(sed -n 's/^jax==\([0-9.]*\).*/\1/p' "$lock" | head -n 1)"
  echo "== ${lock/py/aot_py}"
  printf '%s\n' "jax-cuda12-plugin==$jax" "jax-cuda12-pjrt==$jax" | "$UV" pip compile - --no-deps --universal --python-version "$version" \
    --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "bash launch/lock.sh" \
    --quiet --output-file "${lock/py/aot_py}"
done
