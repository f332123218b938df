"""The estimators against the exact KL divergence of a distribution small enough to enumerate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.kl import KlConfig, kl_estimate, kl_penalty
from tests.losses.batches import inputs_of

POLICY = jnp.array([0.3, -1.0, 1.2, 0.0])  # logits of one token over V = 4
REFERENCE, BEHAVIOUR = jax.nn.log_softmax(jnp.array([-0.5, 0.4, 0.9, 0.1])), jax.nn.log_softmax(jnp.array([1.0, 1.0, -1.0, 0.0]))


def kl(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def mean_gradient(estimator, sampling):
    """Mean over sampled tokens of the estimator's gradient: the sampling probabilities are not differentiated."""

    def mean(logits):
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(sampling)) * kl_estimate(jax.nn.log_softmax(logits), REFERENCE, estimator))

    return jax.grad(mean)(POLICY)


ON_POLICY = jax.nn.log_softmax(POLICY)
KL_GRADIENT = jax.grad(lambda logits: kl(jax.nn.log_softmax(logits), REFERENCE))(POLICY)
REVERSED_KL_GRADIENT = jax.grad(lambda logits: kl(REFERENCE, jax.nn.log_softmax(logits)))(POLICY)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_mean_value_is_the_exact_kl(estimator):
    mean = jnp.sum(jnp.exp(ON_POLICY) * kl_estimate(ON_POLICY, REFERENCE, estimator))
    np.testing.assert_allclose(mean, kl(ON_POLICY, REFERENCE), rtol=1e-5)


def test_mean_value_of_k2_is_the_kl_to_second_order():
    near = jax.nn.log_softmax(POLICY + 0.01 * jnp.array([1.0, -2.0, 0.5, 1.5]))
    exact = float(np.sum(np.exp(np.float64(near)) * (np.float64(near) - np.float64(ON_POLICY))))
    mean = float(jnp.sum(jnp.exp(near) * kl_estimate(near, ON_POLICY, "k2")))
    assert mean == pytest.approx(exact, rel=2e-2)
    far = float(jnp.sum(jnp.exp(ON_POLICY) * kl_estimate(ON_POLICY, REFERENCE, "k2")))
    assert far != pytest.approx(float(kl(ON_POLICY, REFERENCE)), rel=2e-2)


def test_k2_and_k3_are_never_negative_and_k1_is():
    values = {name: np.asarray(kl_estimate(ON_POLICY, REFERENCE, name)) for name in ("k1", "k2", "k3")}
    assert values["k1"].min() < 0
    assert values["k2"].min() >= 0
    assert values["k3"].min() >= 0


def test_hand_worked():
    d = jnp.array(np.log(2.0), jnp.float32)
    values = [float(kl_estimate(d, jnp.zeros(()), name)) for name in ("k1", "k2", "k3")]
    np.testing.assert_allclose(values, [np.log(2), np.log(2) ** 2 / 2, 0.5 - 1 + np.log(2)], rtol=1e-6)


def test_k1_in_the_loss_has_no_mean_gradient():
    np.testing.assert_allclose(mean_gradient("k1", ON_POLICY), 0, atol=1e-6)
    assert np.abs(KL_GRADIENT).max() > 0.1


def test_k2_has_the_gradient_of_the_kl():
    np.testing.assert_allclose(mean_gradient("k2", ON_POLICY), KL_GRADIENT, rtol=1e-5, atol=1e-6)


def test_k3_has_the_gradient_of_the_other_kl():
    np.testing.assert_allclose(mean_gradient("k3", ON_POLICY), REVERSED_KL_GRADIENT, rtol=1e-5, atol=1e-6)
    assert np.abs(KL_GRADIENT - REVERSED_KL_GRADIENT).max() > 0.01


def penalty_gradient(config):
    """Gradient of the penalty over tokens drawn from the behaviour policy."""

    def loss(logits):
        inputs = inputs_of(np.zeros((1, 4)), BEHAVIOUR[None], weights=jnp.exp(BEHAVIOUR)[None])
        return kl_penalty(inputs._replace(logprobs=jax.nn.log_softmax(logits)[None]), REFERENCE[None], config).loss_sum

    return jax.grad(loss)(POLICY)


@pytest.mark.parametrize(("estimator", "expected"), [("k2", KL_GRADIENT), ("k3", REVERSED_KL_GRADIENT)])
def test_importance_weights_restore_the_gradient_off_policy(estimator, expected):
    config = KlConfig(coefficient=0.1, estimator=estimator, importance_cap=np.inf)
    np.testing.assert_allclose(penalty_gradient(config), 0.1 * expected, rtol=1e-4, atol=1e-6)
    plain = KlConfig(coefficient=0.1, estimator=estimator, is_importance_weighted=False)
    np.testing.assert_allclose(penalty_gradient(plain), 0.1 * mean_gradient(estimator, BEHAVIOUR), rtol=1e-4, atol=1e-6)
    assert np.abs(penalty_gradient(plain) - 0.1 * expected).max() > 1e-3


def test_penalty_hand_worked():
    inputs = inputs_of([[0.0, -1.0, -2.0]], [[0.0, -1.0 - np.log(8), -2.0]], mask=[[0, 1, 1]], weights=[[0, 1, 0.5]])
    reference = jnp.array([[jnp.nan, -3.0, -3.0]])  # d = 2 and 1
    output = kl_penalty(inputs, reference, KlConfig(coefficient=0.5, importance_cap=4.0))
    assert float(output.loss_sum) == pytest.approx(0.5 * (4 * 2 + 0.5 * 0.5), rel=1e-6)
    assert float(output.metrics["sum/kl/reference"]) == pytest.approx(2.5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("delta", [50.0, -50.0, 1e4, -1e4, 1e30, -1e30])
def test_extreme_distances_have_a_finite_gradient_towards_the_reference(estimator, delta):
    inputs = inputs_of([[-0.5]])

    def loss(logprobs):
        return kl_penalty(
            inputs._replace(logprobs=logprobs), inputs.logprobs - delta, KlConfig(coefficient=1.0, estimator=estimator)
        ).loss_sum

    value, slope = jax.value_and_grad(loss)(inputs.logprobs)
    assert np.isfinite(value)
    assert np.isfinite(slope[0, 0])
    assert np.sign(slope[0, 0]) == np.sign(delta)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("delta", [50.0, -50.0, 200.0, -200.0])
def test_every_estimate_is_finite_at_extreme_distances(estimator, delta):
    value, slope = jax.value_and_grad(lambda x: kl_estimate(x, jnp.asarray(-delta), estimator))(0.0)
    assert np.isfinite(value)
    assert np.isfinite(slope)
    assert np.sign(slope) == (1 if estimator == "k1" else np.sign(delta))


def test_no_gradient_flows_into_the_reference():
    inputs = inputs_of([[-0.5, -1.0]])
    grads = jax.grad(lambda r: kl_penalty(inputs, r, KlConfig(coefficient=1.0)).loss_sum)(jnp.array([[-1.0, -0.2]]))
    assert not np.any(grads)


def test_fields_are_checked():
    with pytest.raises(ValueError, match=r"kl\.coefficient = -0\.1 must be a finite number"):
        KlConfig(coefficient=-0.1)
    with pytest.raises(ValueError, match=r"kl\.estimator = 'k1' cannot be a loss term"):
        KlConfig(estimator="k1")
    with pytest.raises(ValueError, match=r"kl\.importance_cap = 0\.5 cuts even on-policy tokens"):
        KlConfig(importance_cap=0.5)
