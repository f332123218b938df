import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.losses.policy_gradient import ReinforceConfig
from llamarl_jax.losses.truncated_is import GeometricMaskConfig, TruncatedIsConfig
from tests.losses.batches import gradient, inputs_of, output, random_inputs

LN2 = float(np.log(2))
TRIPLES = [
    (TruncatedIsConfig(cap=cap), GeometricMaskConfig(low=0.0, high=np.inf, cap=cap), AipoConfig(rho=cap)) for cap in (1.0, 2.0, np.inf)
]


def example():
    """Two sequences in a row; log-ratios ln 2, ln 8 and −ln 2, 0: products 16 and 1/2, geometric means 4 and 1/√2."""
    return inputs_of(
        [[-1.0] * 6],
        [[9, -1 - LN2, -1 - 3 * LN2, 9, -1 + LN2, -1]],
        advantages=[[-1, -1, -1, 3, 3, 3]],
        mask=[[0, 1, 1, 0, 1, 1]],
        segments=[[1, 1, 1, 2, 2, 2]],
    )


def test_sequence_level_hand_worked():
    config = TruncatedIsConfig(level="sequence", cap=10.0)
    np.testing.assert_allclose(gradient(config.loss, example()), [[0, 10, 10, 0, -1.5, -1.5]], rtol=1e-6)
    assert float(output(config.loss, example()).metrics["sum/ratio/clipped_share"]) == 2
    uncapped = TruncatedIsConfig(level="sequence", cap=np.inf)
    np.testing.assert_allclose(gradient(uncapped.loss, example()), [[0, 16, 16, 0, -1.5, -1.5]], rtol=1e-5)


def test_geometric_mask_hand_worked():
    first_dropped = GeometricMaskConfig(low=0.5, high=3.9, cap=5.0)
    np.testing.assert_allclose(gradient(first_dropped.loss, example()), [[0, 0, 0, 0, -1.5, -3]], rtol=1e-6)
    assert float(output(first_dropped.loss, example()).metrics["sum/ratio/clipped_share"]) == 2
    second_dropped = GeometricMaskConfig(low=0.8, high=4.1, cap=5.0)
    np.testing.assert_allclose(gradient(second_dropped.loss, example()), [[0, 2, 5, 0, 0, 0]], rtol=1e-6)
    assert float(output(second_dropped.loss, example()).metrics["sum/ratio/clipped_share"]) == 3  # the capped token as well


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), triple=st.sampled_from(TRIPLES))
def test_token_level_is_aipo_with_the_same_cap(seed, triple):
    inputs = random_inputs(seed)
    token, masked_by_nothing, aipo = triple
    np.testing.assert_array_equal(gradient(token.loss, inputs), gradient(aipo.loss, inputs))
    np.testing.assert_array_equal(gradient(masked_by_nothing.loss, inputs), gradient(token.loss, inputs))


def test_the_uncapped_sequence_weight_is_unbiased_where_the_token_weight_is_not():
    """Sequences of two coin flips with P(1) = p; the reward is 1 for (1, 1). ∇E_π[reward] by log-odds is 2 p² (1 − p)."""
    p, q = 0.6, 0.3
    flips = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    log_pi, log_mu = np.where(flips, np.log(p), np.log(1 - p)), np.where(flips, np.log(q), np.log(1 - q))
    weights = np.repeat(np.exp(log_mu.sum(axis=1))[:, None], 2, axis=1)  # each sequence as often as μ writes it
    inputs = inputs_of(log_pi, log_mu, advantages=np.outer(flips.all(axis=1), [1, 1]), weights=weights)

    def slope(config):
        return float(np.sum(-gradient(config.loss, inputs) * (flips - p)))  # ∂log π/∂log-odds = flip − p

    assert slope(TruncatedIsConfig(level="sequence", cap=np.inf)) == pytest.approx(2 * p**2 * (1 - p), rel=1e-5)
    assert abs(slope(TruncatedIsConfig(level="token", cap=np.inf)) - 2 * p**2 * (1 - p)) > 0.05


@pytest.mark.parametrize("config", [TruncatedIsConfig(), TruncatedIsConfig(level="sequence"), GeometricMaskConfig()])
def test_on_policy_it_is_reinforce(config):
    inputs = random_inputs(1, spread=0.0)
    np.testing.assert_array_equal(gradient(config.loss, inputs), gradient(ReinforceConfig().loss, inputs))


def test_fields_are_checked():
    with pytest.raises(ValueError, match=r"cap = 0\.0 cuts even on-policy tokens"):
        TruncatedIsConfig(cap=0.0)
    with pytest.raises(ValueError, match=r"cap = 0\.0 cuts even on-policy tokens"):
        GeometricMaskConfig(cap=0.0)
    for low, high in ((1.01, 1.1), (0.5, 0.9), (-0.1, 1.1)):
        with pytest.raises(ValueError, match=rf"low = {low} and high = {high} mask even on-policy sequences"):
            GeometricMaskConfig(low=low, high=high)
