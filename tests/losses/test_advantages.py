"""Advantages against exact arithmetic."""

import statistics
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl_jax.losses.advantages import AdvantageConfig, advantages

MEAN, LEAVE_ONE_OUT = AdvantageConfig(), AdvantageConfig(kind="leave_one_out")
STD = AdvantageConfig(divide_by_std=True)
CONFIGS = [MEAN, LEAVE_ONE_OUT, STD, AdvantageConfig(kind="leave_one_out", divide_by_std=True)]
rewards_of_a_group = st.lists(st.sampled_from([0.0, 1.0, 0.1, 0.5, -1.0, 2.25, 1 / 3]), min_size=2, max_size=17)


def oracle(config: AdvantageConfig, rewards: list[float]) -> list[float]:
    exact = [Fraction(reward) for reward in rewards]
    if config.kind == "group_mean":
        values = [reward - statistics.mean(exact) for reward in exact]
    else:
        values = [reward - statistics.mean(exact[:i] + exact[i + 1 :]) for i, reward in enumerate(exact)]
    scale = statistics.stdev(rewards) + config.epsilon if config.divide_by_std else 1.0
    return [float(value) / scale for value in values]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MEAN, [0.75, -0.25, -0.25, -0.25]),
        (LEAVE_ONE_OUT, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (STD, [1.5, -0.5, -0.5, -0.5]),  # the standard deviation of 1, 0, 0, 0 with n − 1 is 1/2
    ],
)
def test_hand_worked(config, expected):
    result = advantages(config, np.array([1.0, 0.0, 0.0, 0.0]))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
@given(rewards=rewards_of_a_group)
def test_equals_an_oracle_for_any_group_size(config, rewards):
    np.testing.assert_allclose(advantages(config, np.array(rewards)), oracle(config, rewards), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS)
@given(rewards=rewards_of_a_group, data=st.data())
def test_follow_their_completions_through_any_order(config, rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = advantages(config, np.array(rewards)[order])
    np.testing.assert_allclose(shuffled, advantages(config, np.array(rewards))[order], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9 + 0.1, -7.7])
@pytest.mark.parametrize("num_samples", [2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(config, reward, num_samples):
    """0.1 has a mean of 0.10000000000000002 over three samples; divided by a standard deviation near 0 that would be ±1."""
    assert not np.any(advantages(config, np.full(num_samples, reward)))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_samples", [0, 1])
def test_nothing_to_compare_with_gives_zero(config, num_samples):
    np.testing.assert_array_equal(advantages(config, np.full(num_samples, 5.0)), np.zeros(num_samples, np.float32))


@pytest.mark.parametrize("config", CONFIGS)
@given(rewards=rewards_of_a_group, shift=st.sampled_from([-3.0, 0.25, 100.0]))
def test_a_constant_added_to_all_rewards_changes_nothing(config, rewards, shift):
    moved = advantages(config, np.array(rewards) + shift)
    np.testing.assert_allclose(moved, advantages(config, np.array(rewards)), rtol=1e-5, atol=1e-6)


def test_groups_of_float32_and_integer_valued_rewards():
    np.testing.assert_allclose(advantages(MEAN, np.array([0, 1], np.float32)), [-0.5, 0.5])


@pytest.mark.parametrize(("bad", "text"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_rewards_that_are_no_numbers_are_refused(bad, text):
    with pytest.raises(ValueError, match=rf"reward 1 of 3 of a group is {text}; a reward function must return a finite number"):
        advantages(MEAN, np.array([0.0, bad, 1.0]))


@pytest.mark.parametrize("epsilon", [0.0, -1e-6, np.nan, np.inf])
def test_epsilon_is_checked(epsilon):
    with pytest.raises(ValueError, match=rf"advantages\.epsilon = {epsilon} must be a finite number above 0"):
        AdvantageConfig(epsilon=epsilon)


def test_loads_without_jax():
    code = "import sys, llamarl_jax.losses.advantages; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
