import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.diagnostics import finish, policy_diagnostics
from tests.losses.batches import inputs_of, random_inputs, rows_of


def finished(inputs, entropy, staleness=None):
    """Metrics of one microbatch."""
    sums = policy_diagnostics(inputs, entropy, staleness)
    return finish({name: float(value) for name, value in sums.items()}, float(inputs.loss_mask.sum()))


def accumulated(inputs, entropy, staleness, split):
    """Sums and maxima over microbatches, combined as their names say."""
    total: dict[str, float] = {}
    borders = np.cumsum([0, *split])
    for a, b in itertools.pairwise(borders):
        for name, value in policy_diagnostics(rows_of(inputs, slice(a, b)), entropy[a:b], staleness[a:b]).items():
            total[name] = max(total.get(name, -np.inf), float(value)) if name.startswith("max/") else total.get(name, 0.0) + float(value)
    return total


@pytest.mark.parametrize("split", [[6], [1, 5], [2, 2, 2], [1] * 6])
def test_equal_an_oracle_on_a_ragged_batch_however_it_is_split(split):
    inputs = random_inputs(0, 6, 11)
    rng = np.random.default_rng(0)
    entropy, staleness = jnp.asarray(rng.exponential(size=(6, 11))), jnp.asarray(rng.integers(0, 3, (6, 11)))
    is_loss = np.asarray(inputs.loss_mask) > 0
    log_ratio = np.asarray(inputs.logprobs - inputs.behaviour_logprobs, np.float64)[is_loss]
    ratio, num_tokens = np.exp(log_ratio), is_loss.sum()
    is_equal = np.asarray(staleness)[is_loss] == 0
    expected = {
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "ratio/effective_sample_size": ratio.sum() ** 2 / (num_tokens * (ratio**2).sum()),
        "mismatch/logprob_abs_mean": np.abs(log_ratio).mean(),
        "mismatch/logprob_abs_max": np.abs(log_ratio).max(),
        "mismatch/equal_version_share": is_equal.mean(),
        "mismatch/equal_version_logprob_abs_mean": np.abs(log_ratio)[is_equal].mean(),
        "policy/kl_behaviour": (ratio - 1 - log_ratio).mean(),
        "policy/entropy": np.asarray(entropy)[is_loss].mean(),
    }
    actual = finish(accumulated(inputs, entropy, staleness, split), float(num_tokens))
    assert actual == pytest.approx(expected, rel=1e-4)


def test_on_policy_values():
    inputs = random_inputs(1, spread=0.0)
    assert finished(inputs, jnp.ones_like(inputs.logprobs)) == pytest.approx(
        {
            "ratio/mean": 1.0,
            "ratio/max": 1.0,
            "ratio/effective_sample_size": 1.0,
            "mismatch/logprob_abs_mean": 0.0,
            "mismatch/logprob_abs_max": 0.0,
            "policy/kl_behaviour": 0.0,
            "policy/entropy": 1.0,
        }
    )


def test_kl_of_the_behaviour_is_that_of_tokens_it_sampled():
    pi, mu = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    counts = (10 * mu).astype(int)  # 10 tokens, exactly as often as μ draws them
    inputs = inputs_of(np.repeat(np.log(pi), counts)[None], np.repeat(np.log(mu), counts)[None])
    metrics = finished(inputs, jnp.zeros((1, 10)))
    assert metrics["policy/kl_behaviour"] == pytest.approx(np.sum(mu * np.log(mu / pi)), rel=1e-5)
    assert metrics["ratio/mean"] == pytest.approx(1.0)


def test_no_token_at_equal_versions_leaves_the_mean_out():
    inputs = random_inputs(2)
    metrics = finished(inputs, jnp.zeros_like(inputs.logprobs), jnp.ones(inputs.logprobs.shape, int))
    assert metrics["mismatch/equal_version_share"] == 0
    assert "mismatch/equal_version_logprob_abs_mean" not in metrics


def test_nan_under_the_mask_and_extreme_ratios_stay_finite():
    inputs = inputs_of([[jnp.nan, -1.0, -60.0]], [[jnp.inf, -60.0, -1.0]], mask=[[0, 1, 1]])
    metrics = policy_diagnostics(inputs, jnp.array([[jnp.nan, 1.0, 1.0]]))
    assert all(np.isfinite(value) for value in metrics.values())


def test_an_empty_batch_gives_zeros():
    inputs = inputs_of(np.zeros((1, 3)), mask=np.zeros((1, 3)))
    assert set(finished(inputs, jnp.ones((1, 3))).values()) == {0.0}


def test_finish_names_and_divides():
    metrics = {"sum/a/b": 6.0, "max/c/d": 5.0, "grad_norm": 2.0}
    assert finish(metrics, 3.0) == {"a/b": 2.0, "c/d": 5.0, "trainer/grad_norm": 2.0}
