"""The key-value cache of the decoder: dense slots, one pair of arrays a layer, indexed by token position.

A key's index in the cache is its position, so a query at position p may see exactly the indices ≤ p: what lies behind (the rest of a
padded prefill, or a former tenant of the slot) is overwritten before it can be seen. Freeing a slot needs no work.

Attention reads the whole array, so a cache is kept only as long as its longest live sequence needs: `resize` moves between a few lengths.
That is a copy now and then, where reading a slice of a long array would be a copy at every step.

Dimensions: S slots, K key-value heads, C length in tokens, Q head dim, T new tokens.
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


def resize(cache: KVCache, length: int) -> KVCache:
    """Returns the cache with room for `length` tokens in each slot; what lies beyond is dropped, new room is zero."""

    def change(old: Array) -> Array:
        missing = length - old.shape[2]
        return jnp.pad(old, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing > 0 else old[:, :, :length]

    return jax.tree.map(change, cache)


def write(cache: LayerCache, keys: Float[Array, "S T K Q"], values: Float[Array, "S T K Q"], start: Int[Array, " S"]) -> LayerCache:
    """Stores T consecutive new tokens of every slot at positions start … start + T − 1."""

    def store(old: Array, new: Array) -> Array:
        new = jnp.swapaxes(new, 1, 2).astype(old.dtype)
        return jax.vmap(lambda o, n, p: jax.lax.dynamic_update_slice(o, n, (0, p, 0)))(old, new, start)

    return LayerCache(store(cache.keys, keys), store(cache.values, values))
