"""Grouped-query attention behind one function, so that faster implementations can be chosen by platform in one place.

Dimensions: B rows, T query tokens, C key positions, H query heads, K key-value heads, Q head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED_SCORE = -1e30  # finite, so that a row with no visible key (padding) gives zeros and ones instead of NaN


def attend(
    queries: Float[Array, "B T H Q"],
    keys: Float[Array, "B K C Q"],
    values: Float[Array, "B K C Q"],
    mask: Bool[Array, "B T C"],
) -> Float[Array, "B T H Q"]:
    """Computes softmax(q·k / √Q)·v with float32 scores; query head h reads key-value head h // (H / K).

    Keys and values are head-major, as the decoder's cache stores them: one (row, head) is contiguous.
    """
    batch, length, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgq,bkcq->bkgtc", grouped, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED_SCORE)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgtc,bkcq->btkgq", weights, values, preferred_element_type=jnp.float32)
    return mixed.reshape(batch, length, num_heads, head_dim).astype(queries.dtype)
