import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llamarl_jax.models.attention import attend, attend_cache
from llamarl_jax.models.kv_cache import CacheType, init_cache, resize, write
from llamarl_jax.quantization.int8 import quantize_int8
from tests.engine.tiny_engine import CONFIG

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FINITE))
def test_int8_is_within_half_a_step_for_every_finite_input(x):
    values, scale = jax.device_get(jax.jit(quantize_int8)(x))
    assert values.dtype == np.int8
    assert values.min() >= -127  # symmetric
    error = np.abs(values.astype(np.float64) * scale.astype(np.float64)[:, None] - x)
    assert (error <= scale[:, None] * 0.5 * (1 + 1e-5)).all()


def _random(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, jnp.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02), ("int8", 0.03), ("float8_e4m3fn", 0.12)])
def test_attention_over_a_written_and_resized_cache_is_close_to_plain_attention(dtype: CacheType, tolerance):
    """Two slots, five and seven tokens written in two pieces at their own positions; the cache grows in between."""
    cache = init_cache(CONFIG, 2, 8, dtype)[:1]
    keys, values = _random((2, 9, 2, 12), 0), _random((2, 9, 2, 12), 1)
    start = jnp.array([0, 2])
    cache = (write(cache[0], keys[:, :4], values[:, :4], start),)
    cache = resize(cache, 16)
    layer = write(cache[0], keys[:, 4:], values[:, 4:], start + 4)
    assert layer.keys.shape == (2, 2, 16, 12)
    queries = _random((2, 1, 4, 12), 2)
    seen = jnp.arange(16)[None, None, :]
    mask = (seen >= start[:, None, None]) & (seen < start[:, None, None] + 9)
    mixed = attend_cache(queries, layer, mask)
    plain_mask = jnp.ones((2, 1, 9), bool)
    plain = attend(queries, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), plain_mask)
    spread = float(jnp.std(values))
    assert float(jnp.abs(mixed - plain).mean()) <= tolerance * spread
    assert mixed.dtype == queries.dtype


def test_shortening_drops_the_end_and_growing_adds_zeros():
    cache = init_cache(CONFIG, 1, 8, "int8")
    cache = tuple(write(layer, _random((1, 8, 2, 12), 0), _random((1, 8, 2, 12), 1), jnp.array([0])) for layer in cache)
    short, grown = resize(cache, 4), resize(resize(cache, 4), 8)
    for before, after, longer in zip(jax.tree.leaves(cache), jax.tree.leaves(short), jax.tree.leaves(grown), strict=True):
        np.testing.assert_array_equal(after, before[:, :, :4])
        np.testing.assert_array_equal(longer[:, :, :4], after)
        assert (longer[:, :, 4:] == 0).all()
