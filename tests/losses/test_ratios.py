import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.ratios import MAX_LOG_RATIO, check_cap, check_clip_range, importance_ratio, saturate


def test_nothing_changes_inside_the_range():
    x = jnp.linspace(-MAX_LOG_RATIO, MAX_LOG_RATIO, 1001)
    np.testing.assert_array_equal(saturate(x), x)
    np.testing.assert_array_equal(importance_ratio(x, jnp.zeros_like(x)), jnp.exp(x))


@pytest.mark.parametrize("delta", [50.0, 90.0, 1e4, 1e30, np.inf])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_far_ratios_saturate_but_still_have_the_gradient_of_a_ratio(delta, sign):
    value, slope = jax.value_and_grad(lambda x: importance_ratio(x, jnp.asarray(-sign * delta)))(0.0)
    np.testing.assert_allclose(value, np.exp(sign * MAX_LOG_RATIO), rtol=1e-6)
    assert slope == value


def test_a_nan_is_not_hidden():
    assert np.isnan(importance_ratio(jnp.asarray(jnp.nan), jnp.asarray(0.0)))


@pytest.mark.parametrize("cap", [0.99, 0.0, -1.0, float("nan")])
def test_caps_below_one_are_refused(cap):
    with pytest.raises(ValueError, match=rf"rho = {cap} cuts even on-policy tokens"):
        check_cap("rho", cap)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (float("nan"), 0.2), (0.2, float("nan"))])
def test_impossible_clip_ranges_are_refused(low, high):
    with pytest.raises(ValueError, match=rf"clip_low = {low} and clip_high = {high} are distances"):
        check_clip_range(low, high)


def test_limits_of_the_ranges_are_allowed():
    check_cap("rho", 1.0)
    check_cap("rho", float("inf"))
    check_clip_range(0.0, 0.0)
    check_clip_range(1.0, float("inf"))
