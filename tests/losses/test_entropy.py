import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.entropy import entropy_bonus
from tests.losses.batches import inputs_of

INPUTS = inputs_of(np.zeros((1, 3)), mask=[[0, 1, 1]], weights=[[np.nan, 0.5, 1]])


def test_hand_worked_and_more_entropy_is_a_smaller_loss():
    entropy = jnp.array([[jnp.nan, 2.0, 3.0]])
    value, slope = jax.value_and_grad(lambda h: entropy_bonus(h, INPUTS, 0.1).loss_sum)(entropy)
    assert float(value) == pytest.approx(-0.1 * (0.5 * 2 + 3))
    np.testing.assert_allclose(slope, [[0, -0.05, -0.1]])


def test_coefficient_zero_has_no_gradient():
    assert not np.any(jax.grad(lambda h: entropy_bonus(h, INPUTS, 0.0).loss_sum)(jnp.ones((1, 3))))
