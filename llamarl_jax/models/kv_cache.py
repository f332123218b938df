"""The key-value caches of the decoder: dense rows, one pair of arrays a layer, in the order of tokens.

A prefill's cache is indexed by position; a row of the prompts' cache holds the first tokens of a sequence, and a slot's own one the rest. A
query may see exactly the indices up to its own: what lies behind (the rest of a padded prefill, or a former tenant of the slot) is
overwritten before it can be seen. Freeing a slot or a prompt needs no work.

Attention reads the whole array, so a cache is kept only as long as its longest live sequence needs: `resize` moves between a few lengths.
That is a copy now and then, where reading a slice of a long array would be a copy at every step.

float8 and int8 caches have one scale for each token and head, so that a token is stored once and for all. Scales are applied to scores and
attention weights, not to the cache, which is read as it is.

Dimensions: S slots or other rows, K key-value heads, C length in tokens, Q head dim, T new tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from llamarl_jax.models.config import ModelConfig
from llamarl_jax.quantization.fp8 import quantize
from llamarl_jax.quantization.int8 import quantize_int8

CacheType = Literal["float32", "bfloat16", "float8_e4m3fn", "int8"]


class LayerCache(NamedTuple):
    """Keys and values of one layer, and the scales of a float8 or int8 cache."""

    keys: Num[Array, "S K C Q"]
    values: Num[Array, "S K C Q"]
    key_scales: Float[Array, "S K C"] | None = None
    value_scales: Float[Array, "S K C"] | None = None


KVCache = tuple[LayerCache, ...]
"""One entry a layer: a list, because XLA updates separate arrays in place but copies slices of a stacked one."""

CACHE_AXES = ("rows", "kv_heads", None, None)
"""Logical axes of a cache array; those of its scales are the first three."""


def has_scales(dtype: CacheType) -> bool:
    """Says whether a cache of this type stores scales."""
    return dtype in ("float8_e4m3fn", "int8")


def init_cache(config: ModelConfig, num_rows: int, capacity: int, dtype: CacheType) -> KVCache:
    """Returns a zeroed cache for `num_rows` sequences of up to `capacity` tokens."""
    shape = (num_rows, config.num_kv_heads, capacity, config.head_dim)

    def layer() -> LayerCache:
        arrays = LayerCache(jnp.zeros(shape, jnp.dtype(dtype)), jnp.zeros(shape, jnp.dtype(dtype)))
        return arrays._replace(key_scales=jnp.ones(shape[:3]), value_scales=jnp.ones(shape[:3])) if has_scales(dtype) else arrays

    return tuple(layer() for _ in range(config.num_layers))


def cache_length(cache: KVCache) -> int:
    """Returns for how many tokens each row has room."""
    return cache[0].keys.shape[2]


def resize(cache: KVCache, length: int) -> KVCache:
    """Returns the cache with room for `length` tokens in each slot; what lies beyond is dropped, new room is zero."""

    def change(old: Array) -> Array:
        missing = length - old.shape[2]
        widths = [(0, missing if axis == 2 else 0) for axis in range(old.ndim)]
        return jnp.pad(old, widths) if missing > 0 else old[:, :, :length]

    return jax.tree.map(change, cache)


def write(cache: LayerCache, keys: Float[Array, "S T K Q"], values: Float[Array, "S T K Q"], start: Int[Array, " S"]) -> LayerCache:
    """Stores T consecutive new tokens of every slot at positions start … start + T − 1."""

    def store(old: Array, new: Array) -> Array:
        new = jnp.swapaxes(new, 1, 2).astype(old.dtype)
        first = (0,) * (old.ndim - 3)
        return jax.vmap(lambda o, n, p: jax.lax.dynamic_update_slice(o, n, (0, p, *first)))(old, new, start)

    if cache.key_scales is None or cache.value_scales is None:
        return LayerCache(store(cache.keys, keys), store(cache.values, values))
    round_off = quantize_int8 if cache.keys.dtype == jnp.int8 else quantize
    (keys, key_scales), (values, value_scales) = round_off(keys), round_off(values)
    return LayerCache(
        store(cache.keys, keys),
        store(cache.values, values),
        store(cache.key_scales, key_scales),
        store(cache.value_scales, value_scales),
    )
