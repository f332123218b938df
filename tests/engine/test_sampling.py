import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.engine.sampling import completion_key, sample, token_uniforms


def _uniforms(num: int, seed: int = 0) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), (num, 2))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_frequencies_and_logprobs_are_those_of_the_tempered_softmax(temperature):
    num_draws, vocab = 40_000, 700  # three blocks, the last one partly padding
    logits = 3 * jax.random.normal(jax.random.key(1), (vocab,))
    ids, logprobs = sample(jnp.tile(logits, (num_draws, 1)), _uniforms(num_draws), jnp.full(num_draws, temperature))
    exact = jax.nn.log_softmax(logits / temperature)
    np.testing.assert_allclose(logprobs, exact[ids], atol=1e-5)
    counts = np.bincount(np.asarray(ids), minlength=vocab)
    expected = np.exp(np.asarray(exact, np.float64)) * num_draws
    # Pearson's statistic over entries that are expected often enough; its standard deviation is √(2·n).
    often = expected > 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(statistic - often.sum()) < 5 * np.sqrt(2 * often.sum())


def test_an_entry_of_probability_zero_is_never_drawn_even_at_the_ends_of_the_unit_interval():
    logits = jnp.full((4, 600), -1e30).at[:, 300].set(0.0).at[:, 301].set(-1e30)
    edge = 1 - 2.0**-23  # the largest float32 that jax.random.uniform can give
    uniforms = jnp.array([[0.0, 0.0], [edge, edge], [0.0, edge], [edge, 0.0]])
    ids, logprobs = sample(logits, uniforms, jnp.ones(4))
    assert ids.tolist() == [300] * 4
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


def test_temperature_zero_takes_the_maximum_and_reports_its_logprob_at_one():
    logits = jax.random.normal(jax.random.key(2), (3, 50))
    ids, logprobs = sample(logits, _uniforms(3), jnp.array([0.0, 0.0, 0.0]))
    assert ids.tolist() == jnp.argmax(logits, -1).tolist()
    np.testing.assert_allclose(logprobs, jnp.max(jax.nn.log_softmax(logits), -1), atol=1e-6)


def test_random_numbers_differ_by_seed_prompt_sample_and_position_and_by_nothing_else():
    keys = [completion_key(s, jnp.uint32(p), jnp.uint32(i)) for s in (0, 1) for p in (0, 1, 2**31) for i in (0, 1)]
    draws = token_uniforms(jnp.stack(keys + keys), jnp.array([5] * len(keys) + [6] * len(keys)))
    assert len({tuple(row) for row in np.asarray(draws).tolist()}) == 2 * len(keys)
    alone = token_uniforms(keys[3][None], jnp.array([5]))
    assert alone[0].tolist() == draws[3].tolist()
