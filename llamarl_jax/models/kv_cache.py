"""The key-value cache of the decoder: dense slots, one pair of arrays a layer, indexed by token position.

A key's index in the cache is its position, so a query at position p may see exactly the indices ≤ p: what lies behind (the rest of a
padded prefill, or a former tenant of the slot) is overwritten before it can be seen. Freeing a slot needs no work.

Dimensions: S slots, K key-value heads, C capacity in tokens, Q head dim, T new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llamarl_jax.models.config import ModelConfig


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    keys: Float[Array, "S K C Q"]
    values: Float[Array, "S K C Q"]


KVCache = tuple[LayerCache, ...]
"""One entry a layer: a list, because XLA updates separate arrays in place but copies slices of a stacked one."""

CACHE_AXES = ("rows", "kv_heads", None, None)
"""Logical axes of a cache array."""


def init_cache(config: ModelConfig, num_slots: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """Returns a zeroed cache for `num_slots` sequences of up to `capacity` tokens."""
    shape = (num_slots, config.num_kv_heads, capacity, config.head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def write(cache: LayerCache, keys: Float[Array, "S T K Q"], values: Float[Array, "S T K Q"], start: Int[Array, " S"]) -> LayerCache:
    """Stores T consecutive new tokens of every slot at positions start … start + T − 1."""

    def store(old: Array, new: Array) -> Array:
        new = jnp.swapaxes(new, 1, 2).astype(old.dtype)
        return jax.vmap(lambda o, n, p: jax.lax.dynamic_update_slice(o, n, (0, p, 0)))(old, new, start)

    return LayerCache(store(cache.keys, keys), store(cache.values, values))
