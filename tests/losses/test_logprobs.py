import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.logprobs import token_logprobs

LN = np.log


def test_hand_worked_values_stand_at_the_token_they_describe():
    # Row: two segments (ids 1 and 2) and one padding token. Only tokens 1 and 3 are predicted, from logits 0 and 2.
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]]))
    ids, segments = jnp.array([[2, 1, 0, 2, 0]]), jnp.array([[1, 1, 2, 2, 0]])
    logprobs, entropy = token_logprobs(logits, ids, segments, 1.0)
    np.testing.assert_allclose(logprobs[0], [0, LN(0.25), 0, LN(0.6), 0], atol=1e-6)
    expected = [0, 1.5 * LN(2), 0, -(0.4 * LN(0.2) + 0.6 * LN(0.6)), 0]
    np.testing.assert_allclose(entropy[0], expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_temperature_is_that_of_the_sampling_distribution(temperature):
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(0, 3, (2, 6, 7)), rng.integers(0, 7, (2, 6))
    logprobs, entropy = token_logprobs(jnp.asarray(logits), jnp.asarray(ids), jnp.ones((2, 6), int), np.float32(temperature))
    probs = np.exp(logits / temperature)
    probs /= probs.sum(-1, keepdims=True)
    expected = LN(np.take_along_axis(probs[:, :-1], ids[:, 1:, None], -1)[..., 0])
    np.testing.assert_allclose(logprobs[:, 1:], expected, atol=1e-5)
    np.testing.assert_allclose(entropy[:, 1:], -(probs * LN(probs)).sum(-1)[:, :-1], atol=1e-5)
    assert not np.any(logprobs[:, 0])
    assert not np.any(entropy[:, 0])


def test_temperature_is_traced():
    num_traces = 0

    @jax.jit
    def function(temperature):
        nonlocal num_traces
        num_traces += 1
        return token_logprobs(jnp.ones((1, 3, 4)), jnp.ones((1, 3), int), jnp.ones((1, 3), int), temperature)

    for temperature in (0.5, 1.0, 2.0):
        function(temperature)
    assert num_traces == 1


@pytest.mark.parametrize("banned", [-np.inf, -1e30, -1e38])
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_banned_ids_change_neither_values_nor_gradients(banned, temperature):
    rng = np.random.default_rng(1)
    small = jnp.asarray(rng.normal(size=(1, 4, 5)), jnp.float32)
    ids, segments = jnp.array([[0, 3, 4, 1]]), jnp.ones((1, 4), int)

    def total(logits):
        logprobs, entropy = token_logprobs(logits, ids, segments, temperature)
        return jnp.sum(logprobs) + 0.3 * jnp.sum(entropy)

    padded = jnp.concatenate([small, jnp.full((1, 4, 3), banned)], axis=-1)
    value, grads = jax.value_and_grad(total)(padded)
    expected_value, expected_grads = jax.value_and_grad(total)(small)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(grads[..., :5], expected_grads, rtol=1e-5, atol=1e-6)
    assert not np.any(grads[..., 5:])


def test_nan_where_nothing_is_predicted_is_harmless():
    rng = np.random.default_rng(2)
    clean = jnp.asarray(rng.normal(size=(1, 5, 4)), jnp.float32)
    dirty = clean.at[0, 1].set(jnp.nan).at[0, 3:].set(jnp.nan)  # the last token of each segment, and padding
    ids, segments = jnp.array([[0, 1, 2, 3, 0]]), jnp.array([[1, 1, 2, 2, 0]])

    def total(logits):
        logprobs, entropy = token_logprobs(logits, ids, segments, 1.0)
        return jnp.sum(logprobs + entropy)

    assert total(dirty) == total(clean)
    np.testing.assert_array_equal(jax.grad(total)(dirty), jax.grad(total)(clean))


def test_packed_rows_equal_separate_rows():
    rng = np.random.default_rng(3)
    logits, ids = jnp.asarray(rng.normal(size=(1, 7, 5)), jnp.float32), jnp.asarray(rng.integers(0, 5, (1, 7)))
    packed = token_logprobs(logits, ids, jnp.array([[1, 1, 1, 2, 2, 2, 2]]), 0.7)
    first = token_logprobs(logits[:, :3], ids[:, :3], jnp.ones((1, 3), int), 0.7)
    second = token_logprobs(logits[:, 3:], ids[:, 3:], jnp.ones((1, 4), int), 0.7)
    for whole, *parts in zip(packed, first, second, strict=True):
        np.testing.assert_array_equal(whole, jnp.concatenate(parts, axis=1))


def test_half_precision_logits_are_normalised_in_float32():
    logits = jnp.zeros((1, 2, 30_000), jnp.bfloat16)
    logprobs, entropy = token_logprobs(logits, jnp.ones((1, 2), int), jnp.ones((1, 2), int), 1.0)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose([logprobs[0, 1], entropy[0, 1]], [-LN(30_000), LN(30_000)], rtol=1e-6)
