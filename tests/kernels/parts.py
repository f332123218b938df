"""The test that every implementation of attention to one cache must pass: `check`, against float64 sums in NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models.attention import MASKED_SCORE, Part
from llamarl_jax.models.kv_cache import CacheType, LayerCache, init_cache, write
from tests.engine.tiny_engine import CONFIG

SHAPES = [
    (8, 2, 1, 64, 300),
    (9, 3, 1, 64, 16),
    (4, 4, 3, 80, 128),
    (8, 1, 2, 96, 80),
    (4, 2, 1, 128, 256),
    (4, 2, 5, 12, 48),
    (7, 1, 40, 16, 64),
]
"""Heads, key-value heads, tokens, head dim, positions: groups and single heads, dims that are no power of two, many queries."""
TOLERANCE = {"float32": 3e-6, "bfloat16": 2**-7}
"""By the type of the queries. In bfloat16 the weights are rounded to 8 bits, before or after they are divided by their sum."""


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def make_cache(rows: int, heads: int, length: int, dim: int, dtype: CacheType, seed: int = 1) -> LayerCache:
    """A full cache, written as the decoder does it."""
    config = dataclasses.replace(CONFIG, num_heads=heads, num_kv_heads=heads, head_dim=dim, num_layers=1)
    keys, values = (normal(seed + i, rows, length, heads, dim) for i in range(2))
    return write(init_cache(config, rows, length, dtype)[0], keys, values, jnp.zeros(rows, jnp.int32))


def poisoned(cache: LayerCache, lengths: jax.Array) -> LayerCache:
    """What lies behind the lengths belongs to nobody: NaN, and the largest number of an int8 cache."""
    is_seen = jnp.arange(cache.keys.shape[2]) < lengths[:, None, None]

    def poison(x: jax.Array) -> jax.Array:
        bad = jnp.asarray(127 if x.dtype == jnp.int8 else jnp.nan, x.dtype)
        return jnp.where(is_seen if x.ndim == 3 else is_seen[..., None], x, bad)

    return jax.tree.map(poison, cache)


def check(attend: Part, queries: jax.Array, cache: LayerCache, lengths: list[int], *, is_poisoned: bool, tolerance: float = 0.0) -> None:
    """Compares with sums in float64; a row of no length needs an lse that gives it no share, and no NaN.

    Args:
        is_poisoned: whether the implementation must not even multiply what lies behind a length by 0.
        tolerance: that of the type by default.
    """
    visible = jnp.asarray(lengths, jnp.int32)
    mixed, lse = attend(queries, poisoned(cache, visible) if is_poisoned else cache, visible)
    assert (mixed.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    assert np.isfinite(mixed).all()
    tolerance = tolerance or TOLERANCE[queries.dtype.name]
    # A cache is multiplied in the type of the queries, and scales are applied to the results.
    keys, values = (np.asarray(x.astype(queries.dtype), np.float64) for x in (cache.keys, cache.values))
    group, scale = queries.shape[2] // keys.shape[1], queries.shape[-1] ** -0.5
    for row, head in np.ndindex(len(lengths), queries.shape[2]):
        seen = slice(min(lengths[row], keys.shape[2]))
        if not lengths[row]:
            assert (np.asarray(lse)[row, :, head] < MASKED_SCORE / 2).all()
            continue
        of_head = row, head // group, seen
        scores = np.asarray(queries, np.float64)[row, :, head] @ keys[of_head].T * scale
        scores = scores if cache.key_scales is None else scores * np.asarray(cache.key_scales, np.float64)[of_head]
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights if cache.value_scales is None else weights * np.asarray(cache.value_scales, np.float64)[of_head]
        np.testing.assert_allclose(np.asarray(mixed)[row, :, head], weights / total @ values[of_head], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(np.asarray(lse)[row, :, head], (largest + np.log(total))[:, 0], rtol=1e-5, atol=1e-5)
