"""What the implementations of a decode step have in common: their names, and the score of what a query may not see."""

from __future__ import annotations

from typing import Literal

Kernels = Literal["xla", "native", "pallas", "pallas_interpreted"]
"""Who computes a decode step:

| name | products, norms, gates | attention | where |
|---|---|---|---|
| `xla` | XLA | XLA | everywhere |
| `native` | `cpu.cc`, in prefill too | `cpu.cc` | one CPU device, float32 |
| `pallas` | XLA | `gpu.py` | NVIDIA GPUs |
| `pallas_interpreted` | XLA | `gpu.py`, step by step with XLA's operations | everywhere, in tests: it is slow |
"""

MASKED_SCORE = -1e30  # finite, so that a row with no visible key (padding) gives zeros and ones instead of NaN
