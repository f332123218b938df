"""Grouped-query attention behind one function, so that faster implementations can be chosen by platform in one place.

Dimensions: B rows, T query tokens, C key positions, H query heads, K key-value heads, Q head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

MASKED_SCORE = -1e30  # finite, so that a row with no visible key (padding) gives zeros and ones instead of NaN


def attend(
    queries: Float[Array, "B T H Q"],
    keys: Num[Array, "B K C Q"],
    values: Num[Array, "B K C Q"],
    mask: Bool[Array, "B T C"],
    key_scales: Float[Array, "B K C"] | None = None,
    value_scales: Float[Array, "B K C"] | None = None,
) -> Float[Array, "B T H Q"]:
    """Computes softmax(q·k / √Q)·v with float32 scores; query head h reads key-value head h // (H / K).

    Keys and values are head-major, as the decoder's cache stores them: one (row, head) is contiguous. Where they are float8 or int8, a
    scale for each of them is applied to the scores and the weights.
    """
    batch, length, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgq,bkcq->bkgtc", grouped, keys.astype(queries.dtype), preferred_element_type=jnp.float32) * head_dim**-0.5
    if key_scales is not None:
        scores = scores * key_scales[:, :, None, None, :]
    scores = jnp.where(mask[:, None, None], scores, MASKED_SCORE)
    weights = jax.nn.softmax(scores, axis=-1)
    if value_scales is not None:
        weights = weights * value_scales[:, :, None, None, :]
    dtype = queries.dtype
    mixed = jnp.einsum("bkgtc,bkcq->btkgq", weights.astype(dtype), values.astype(dtype), preferred_element_type=jnp.float32)
    return mixed.reshape(batch, length, num_heads, head_dim).astype(queries.dtype)
