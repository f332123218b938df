#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up, gets SmolLM2-135M-Instruct, trains it by asynchronous RL and prints both accuracies.
# Usage: bash launch/quickstart.sh [overrides, for instance --seed 1]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

config=configs/smollm2_arithmetic_cpu.py
if [ "$HAS_GPU" = yes ]; then config=configs/smollm2_arithmetic_gpu.py; fi

say "fetching the model"
"$VENV/bin/llamarl" fetch smollm2-135m
say "training with $config"
exec "$VENV/bin/llamarl" train "$config" --run-dir "runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
