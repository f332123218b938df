"""Measures what this device can do at most: memory bandwidth and matmul peak, with the same compiler that runs the decoder.

Bandwidth is that of reading, since a decode step reads its weights and writes next to nothing. No single program reads fastest on every
backend, so several are timed and the fastest counts: sums over either axis and a matrix-vector product. The plain copy is reported too.

On a shared machine these rates change by the minute, so a run is compared with what was measured right before and after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

NUM_TRIES = 5
SLOW_S = 0.5
"""Matmul sizes grow until one takes this long."""
SIZES = (512, 1024, 2048, 4096, 8192, 16384)

_product, _copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
_sums = [jax.jit(partial(jnp.sum, axis=axis)) for axis in (0, 1)]


@dataclass(frozen=True)
class DeviceLimits:
    """Rates of one device; each is the best that was seen."""

    read_bytes_per_s: float
    copy_bytes_per_s: float  # bytes read plus bytes written
    matmul_flops_per_s: float

    def best(self, other: DeviceLimits) -> DeviceLimits:
        """Returns the higher of both measurements, rate by rate."""
        return DeviceLimits(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.copy_bytes_per_s, other.copy_bytes_per_s),
            max(self.matmul_flops_per_s, other.matmul_flops_per_s),
        )


def measure_limits(dtype: Any, num_bytes: int) -> DeviceLimits:
    """Measures the default device.

    Args:
        dtype: of the matrices whose product is timed.
        num_bytes: size of the array that is read, much larger than the caches.
    """
    return DeviceLimits(*_bandwidths(num_bytes), _matmul_peak(jnp.dtype(dtype), num_bytes))


def _bandwidths(num_bytes: int) -> tuple[float, float]:
    """Returns the rates of reading and of copying float32 numbers, in bytes per second."""
    columns = 4096
    array, vector = jnp.ones((max(1, num_bytes // (4 * columns)), columns)), jnp.ones(columns)
    reads = [*(partial(total, array) for total in _sums), partial(_product, array, vector)]
    return array.nbytes / min(map(_best_time, reads)), 2 * array.nbytes / _best_time(partial(_copy, array))


def _matmul_peak(dtype: Any, num_bytes: int) -> float:
    best = 0.0
    for size in SIZES:
        if 3 * size * size * dtype.itemsize > num_bytes and best:
            break
        x = jnp.ones((size, size), dtype)
        seconds = _best_time(partial(_product, x, x))
        best = max(best, 2 * size**3 / seconds)
        if seconds > SLOW_S:
            break
    return best


def _best_time(run: Callable[[], Any]) -> float:
    """Returns the least time of several calls after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(NUM_TRIES):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)
