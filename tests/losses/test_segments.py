import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.segments import segment_mean, segment_sum
from tests.losses.batches import random_inputs


def oracle_sum(values, segments):
    out = np.zeros_like(values, dtype=np.float64)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            out[row, column] = values[row][segments[row] == segments[row, column]].sum(dtype=np.float64)
    return out


def test_hand_worked():
    values, segments = jnp.array([[1.0, 2, 4, 8, 16, 32]]), jnp.array([[1, 1, 2, 3, 3, 0]])
    np.testing.assert_array_equal(segment_sum(values, segments), [[3, 3, 4, 24, 24, 32]])
    mask = jnp.array([[0.0, 1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(segment_mean(values * mask, mask, segments), [[2, 2, 4, 12, 12, 0]])


@pytest.mark.parametrize("seed", range(10))
def test_equals_a_loop(seed):
    inputs = random_inputs(seed, 4, 13)
    values, segments = np.asarray(inputs.logprobs), np.asarray(inputs.segment_ids)
    np.testing.assert_allclose(segment_sum(inputs.logprobs, inputs.segment_ids), oracle_sum(values, segments), rtol=1e-5)


def test_gradient_reaches_the_own_segment_only():
    segments = jnp.array([[1, 1, 2, 2, 2]])
    grads = jax.grad(lambda x: segment_sum(x, segments)[0, 3] * 7.0)(jnp.arange(5.0)[None])
    np.testing.assert_array_equal(grads, [[0, 0, 7, 7, 7]])


def test_a_short_segment_behind_a_huge_one_keeps_its_digits():
    values = jnp.array([[3e8, 1e-3, 2e-3]])
    np.testing.assert_allclose(segment_sum(values, jnp.array([[1, 2, 2]]))[0, 1:], 3e-3, rtol=1e-6)


def test_memory_grows_like_the_row():
    """A comparison of all pairs would hold L² numbers: 68 GB for these rows."""
    length = 1 << 17
    total = jax.jit(segment_sum)(jnp.ones((1, length)), jnp.repeat(jnp.arange(length // 4), 4)[None])
    np.testing.assert_array_equal(total, np.full((1, length), 4.0))
