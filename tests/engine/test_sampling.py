import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.engine.sampling import SamplingArrays, SamplingConfig, completion_key, sample, token_uniforms


def _arrays(num: int, **options) -> SamplingArrays:
    return SamplingArrays.of([SamplingConfig(**options)] * num)


def _uniforms(num: int, seed: int = 0) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), (num, 2))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_frequencies_and_logprobs_are_those_of_the_tempered_softmax(temperature):
    num_draws, vocab = 40_000, 700  # three blocks, the last one partly padding
    logits = 3 * jax.random.normal(jax.random.key(1), (vocab,))
    ids, logprobs = sample(
        jnp.tile(logits, (num_draws, 1)), _uniforms(num_draws), _arrays(num_draws, temperature=temperature), is_truncated=False
    )
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
    ids, logprobs = sample(logits, uniforms, _arrays(4), is_truncated=False)
    assert ids.tolist() == [300] * 4
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


def test_temperature_zero_takes_the_maximum_and_reports_its_logprob_at_one():
    logits = jax.random.normal(jax.random.key(2), (3, 50))
    ids, logprobs = sample(logits, _uniforms(3), _arrays(3, temperature=0.0, top_k=1), is_truncated=True)
    assert ids.tolist() == jnp.argmax(logits, -1).tolist()
    np.testing.assert_allclose(logprobs, jnp.max(jax.nn.log_softmax(logits), -1), atol=1e-6)


def test_random_numbers_differ_by_seed_prompt_sample_and_position_and_by_nothing_else():
    keys = [completion_key(s, jnp.uint32(p), jnp.uint32(i)) for s in (0, 1) for p in (0, 1, 2**31) for i in (0, 1)]
    draws = token_uniforms(jnp.stack(keys + keys), jnp.array([5] * len(keys) + [6] * len(keys)))
    assert len({tuple(row) for row in np.asarray(draws).tolist()}) == 2 * len(keys)
    alone = token_uniforms(keys[3][None], jnp.array([5]))
    assert alone[0].tolist() == draws[3].tolist()


def _kept_by_sorting(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The same rules in float64 with a sort, one after the other."""
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        order = order[:top_k]
    left = p[order] / p[order].sum()
    if top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(left), top_p)) + 1]
    return {int(i) for i in order if p[i] >= min_p * p.max()}


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
        {"top_k": 5000, "top_p": 0.999},
    ],
    ids=str,
)
def test_truncation_keeps_what_a_sort_keeps_and_logprobs_are_those_of_the_truncated_distribution(options):
    num_draws, vocab = 4000, 700
    logits = np.asarray(3 * jax.random.normal(jax.random.key(3), (vocab,)))
    sampling = SamplingConfig(**options)
    assert sampling.is_truncated
    ids, logprobs = sample(
        jnp.tile(jnp.asarray(logits), (num_draws, 1)), _uniforms(num_draws), _arrays(num_draws, **options), is_truncated=True
    )
    kept = _kept_by_sorting(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    assert set(np.asarray(ids).tolist()) <= kept
    masked = np.full(vocab, -np.inf)
    masked[list(kept)] = logits[list(kept)].astype(np.float64) / sampling.temperature
    exact = masked - np.log(np.exp(masked - masked.max()).sum()) - masked.max()
    np.testing.assert_allclose(logprobs, exact[np.asarray(ids)], atol=1e-5)
    likely = {i for i in kept if exact[i] > np.log(20 / num_draws)}
    assert likely <= set(np.asarray(ids).tolist())


def test_slots_truncate_each_for_itself_and_ties_are_kept():
    logits = jnp.zeros((3, 4)).at[:, 3].set(-1.0)
    arrays = SamplingArrays.of([SamplingConfig(), SamplingConfig(top_k=1), SamplingConfig(top_p=0.5)])
    drawn = [set(), set(), set()]
    for seed in range(60):
        ids, _ = sample(logits, _uniforms(3, seed), arrays, is_truncated=True)
        for slot in range(3):
            drawn[slot].add(int(ids[slot]))
    assert drawn == [{0, 1, 2, 3}, {0, 1, 2}, {0, 1, 2}]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 1.0}], ids=str)
def test_impossible_sampling_is_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"sampling {name} is {value}; it must be"):
        SamplingConfig(**options)
