import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.losses.policy_gradient import ReinforceConfig
from llamarl_jax.losses.ppo import DecoupledPpoConfig, PpoClipConfig
from tests.losses.batches import gradient, inputs_of, output, random_inputs

LN2 = float(np.log(2))
# Ratios 1, 2, 2, 1/2, 1/2, 1.1 with advantages of both signs.
LOGPROBS = [[-1.0] * 6]
BEHAVIOUR = [[-1.0, -1 - LN2, -1 - LN2, -1 + LN2, -1 + LN2, -1 - float(np.log(1.1))]]
ADVANTAGES = [[1.0, 1.0, -1.0, 1.0, -1.0, 3.0]]
PAIRS = [
    (DecoupledPpoConfig(clip_low=low, clip_high=high), PpoClipConfig(clip_low=low, clip_high=high))
    for low, high in ((0.0, 0.1), (0.2, 0.28), (1.0, 5.0))
]


def test_clip_hand_worked():
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, advantages=ADVANTAGES)
    config = PpoClipConfig(clip_low=0.2, clip_high=0.3)
    result = output(config.loss, inputs)
    # clipped: ratio 2 with A > 0 (at 1.3) and ratio 1/2 with A < 0 (at 0.8)
    assert float(result.loss_sum) == pytest.approx(-(1 + 1.3 - 2 + 0.5 - 0.8 + 3.3), rel=1e-6)
    np.testing.assert_allclose(gradient(config.loss, inputs), [[-1, 0, 2, -0.5, 0, -3.3]], rtol=1e-6)
    assert float(result.metrics["sum/ratio/clipped_share"]) == 2


def test_decoupled_hand_worked():
    # π/π_prox as above, π_prox/μ = 2 everywhere, capped at 1.5
    proximal = np.array(BEHAVIOUR)
    inputs = inputs_of(LOGPROBS, proximal - LN2, proximal=proximal, advantages=ADVANTAGES)
    expected = np.array([[-1, 0, 2, -0.5, 0, -3.3]])
    for cap, weight in ((1.5, 1.5), (np.inf, 2.0)):
        config = DecoupledPpoConfig(clip_low=0.2, clip_high=0.3, behaviour_cap=cap)
        np.testing.assert_allclose(gradient(config.loss, inputs), weight * expected, rtol=1e-6)
        assert float(output(config.loss, inputs).metrics["sum/ratio/clipped_share"]) == 2


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), pair=st.sampled_from(PAIRS))
def test_decoupled_with_the_behaviour_as_proximal_policy_is_ppo_clip(seed, pair):
    inputs = random_inputs(seed)
    inputs = inputs._replace(proximal_logprobs=inputs.behaviour_logprobs)
    decoupled, plain = pair
    # Not bit for bit: the compiler fuses the two differently.
    np.testing.assert_allclose(output(decoupled.loss, inputs).loss_sum, output(plain.loss, inputs).loss_sum, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient(decoupled.loss, inputs), gradient(plain.loss, inputs), rtol=1e-6)


@pytest.mark.parametrize("cap", [1.0, 2.0, np.inf])
def test_decoupled_at_the_first_step_is_aipo(cap):
    """One optimizer step per batch: the proximal policy is π itself, nothing is clipped, and AIPO with ρ = cap remains."""
    inputs = random_inputs(3)
    inputs = inputs._replace(proximal_logprobs=inputs.logprobs)
    decoupled = gradient(DecoupledPpoConfig(behaviour_cap=cap).loss, inputs)
    np.testing.assert_allclose(decoupled, gradient(AipoConfig(rho=cap).loss, inputs), rtol=1e-6)


@pytest.mark.parametrize("config", [PpoClipConfig(), DecoupledPpoConfig()])
def test_on_policy_it_is_reinforce(config):
    inputs = random_inputs(1, spread=0.0)
    inputs = inputs._replace(proximal_logprobs=inputs.logprobs)
    np.testing.assert_allclose(gradient(config.loss, inputs), gradient(ReinforceConfig().loss, inputs), rtol=1e-6)


@pytest.mark.parametrize("config", [PpoClipConfig(clip_low=0.0, clip_high=0.0), DecoupledPpoConfig(clip_low=0.0, clip_high=0.0)])
def test_a_ratio_on_the_border_of_the_range_has_its_whole_gradient(config):
    inputs = inputs_of([[-1.0, -1.0]], advantages=[[1.0, -1.0]])
    np.testing.assert_array_equal(gradient(config.loss, inputs), [[-1, 1]])


def test_no_gradient_flows_into_the_proximal_policy():
    inputs = random_inputs(2)
    grads = jax.grad(lambda x: DecoupledPpoConfig().loss(inputs._replace(proximal_logprobs=x)).loss_sum)(inputs.proximal_logprobs)
    assert not np.any(grads)


def test_a_hugely_likelier_token_that_turned_out_bad_is_still_pushed_down():
    """A clamp whose derivative is 0 outside its range would leave such a token as it is."""
    assert gradient(PpoClipConfig().loss, inputs_of([[-1.0]], [[-60.0]], advantages=[[-1.0]]))[0, 0] > 1e8


def test_fields_are_checked():
    with pytest.raises(ValueError, match=r"clip_low = 0\.2 and clip_high = -1\.0 are distances"):
        PpoClipConfig(clip_high=-1.0)
    with pytest.raises(ValueError, match=r"clip_low = 2\.0 and clip_high = 0\.28 are distances"):
        DecoupledPpoConfig(clip_low=2.0)
    with pytest.raises(ValueError, match=r"behaviour_cap = 0\.5 cuts even on-policy tokens"):
        DecoupledPpoConfig(behaviour_cap=0.5)
