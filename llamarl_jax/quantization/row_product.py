"""Products of a few rows with a large kernel, in narrow types with float32 sums, without a copy of the kernel.

XLA has no such product for a single row on an NVIDIA GPU: it computes a matrix-vector product in float32 and converts the whole kernel for
it, at every decode step (float8 and bfloat16 alike). Two rows are enough to avoid it, so a lone row is computed twice. What counts is
the rows of one device: two slots over two replicas are lone rows too. `tests/aot/test_decode.py` looks for the copy.

In float32 there is nothing to convert, and rows are left as they are.

Dimensions: I inputs, O outputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llamarl_jax.meshes import num_row_shards


def row_product(x: Float[Array, "*rows I"], kernel: Float[Array, "O I"]) -> Float[Array, "*rows O"]:
    """Returns x · kernelᵀ in float32; both are of one type."""
    if x.dtype == jnp.float32 or x.size != num_row_shards() * x.shape[-1]:
        return _multiply(x, kernel)
    # Each row twice in a row, not all rows and then all again: so both copies of a row stay on its device.
    twice = jnp.repeat(x.reshape(-1, x.shape[-1]), 2, axis=0)
    return _multiply(twice, kernel)[::2].reshape(*x.shape[:-1], -1)


def _multiply(x: Array, kernel: Array) -> Array:
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
