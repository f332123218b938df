import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.inputs import masked
from llamarl_jax.losses.policy_gradient import ReinforceConfig, weighted_policy_gradient
from tests.losses.batches import gradient, inputs_of, random_inputs


def test_reinforce_hand_worked():
    inputs = inputs_of([[-1.0, -2.0, -3.0]], [[9.0, 9.0, 9.0]], advantages=[[2, 2, -1]], mask=[[0, 1, 1]], weights=[[0, 0.5, 1]])
    output = ReinforceConfig().loss(inputs)
    assert float(output.loss_sum) == pytest.approx(-(0.5 * 2 * -2 + 1 * -1 * -3))
    np.testing.assert_allclose(gradient(ReinforceConfig().loss, inputs), [[0, -1, 1]])
    assert float(output.metrics["sum/ratio/clipped_share"]) == 0


def test_no_gradient_flows_through_the_weight():
    inputs = random_inputs(0)

    def loss(given):
        clean = masked(given)
        return weighted_policy_gradient(clean, jnp.exp(clean.logprobs), clean.logprobs < -1)

    expected = -inputs.token_weights * inputs.loss_mask * jnp.exp(inputs.logprobs) * inputs.advantages
    np.testing.assert_allclose(gradient(loss, inputs), expected, rtol=1e-6)
