"""int8 with one scale for each row, for the decoder's KV cache.

Dimensions: I numbers of a row.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST = 127.0
_LEAST_SCALE = 1e-30


def quantize_int8(x: Float[Array, "*rows I"]) -> tuple[Int[Array, "*rows I"], Float[Array, "*rows"]]:
    """Returns int8 values and float32 scales with values · scale ≈ x, symmetric around 0; defined for every finite input."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1) / LARGEST, _LEAST_SCALE)
    return jnp.clip(jnp.round(wide / scale[..., None]), -LARGEST, LARGEST).astype(jnp.int8), scale
