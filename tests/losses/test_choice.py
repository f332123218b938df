"""What must hold for every policy loss."""

import dataclasses
import itertools
import typing

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.losses.choice import LossConfig
from llamarl_jax.losses.gspo import GspoConfig
from llamarl_jax.losses.inputs import LossInputs
from llamarl_jax.losses.policy_gradient import ReinforceConfig
from llamarl_jax.losses.truncated_is import TruncatedIsConfig
from tests.losses.batches import gradient, inputs_of, output, random_inputs, rows_of

CONFIGS = [*(cls() for cls in typing.get_args(LossConfig)), TruncatedIsConfig(level="sequence")]
every_loss = pytest.mark.parametrize("config", CONFIGS, ids=repr)


def unpack(inputs: LossInputs) -> LossInputs:
    """One row per trajectory, padded at the end, and empty rows up to a fixed number."""
    length, rows = inputs.logprobs.shape[1], []
    for row in range(len(inputs.segment_ids)):
        for segment in np.unique(inputs.segment_ids[row]):
            keep = np.flatnonzero(np.asarray(inputs.segment_ids[row]) == segment)
            if segment:
                rows.append([np.pad(np.asarray(value)[row, keep], (0, length - len(keep))) for value in inputs])
    num_empty = 4 * len(inputs.segment_ids) - len(rows)
    return LossInputs(*(jnp.asarray(np.pad(np.stack(values), ((0, num_empty), (0, 0)))) for values in zip(*rows, strict=True)))


@every_loss
def test_config_is_frozen_with_keyword_fields_only(config):
    assert config == type(config)(**dataclasses.asdict(config))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        config.anything = 1
    with pytest.raises(TypeError, match="positional argument"):
        type(config)(1.0)


def test_only_the_uncorrected_loss_is_unsafe_off_policy():
    assert [type(config) for config in CONFIGS if not config.is_off_policy_safe] == [ReinforceConfig]


def test_the_uncorrected_loss_ignores_the_behaviour_and_the_others_do_not():
    inputs = random_inputs(5)
    fresh = inputs._replace(behaviour_logprobs=inputs.logprobs, proximal_logprobs=inputs.logprobs)
    for config in CONFIGS:
        is_same = np.array_equal(gradient(config.loss, inputs), gradient(config.loss, fresh))
        assert is_same == (not config.is_off_policy_safe)


@every_loss
def test_a_better_than_average_token_is_made_likelier(config):
    inputs = inputs_of([[-1.0, -2.0]], advantages=[[1.0, -1.0]], segments=[[1, 2]])
    np.testing.assert_allclose(gradient(config.loss, inputs), [[-1, 1]], rtol=1e-6)


@pytest.mark.parametrize("config", [c for c in CONFIGS if not isinstance(c, GspoConfig)], ids=repr)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_on_policy_every_token_level_loss_is_reinforce(config, seed):
    """GSPO is left out: it spreads a sequence's gradient evenly over its tokens only if their weights are equal."""
    inputs = random_inputs(seed, spread=0.0)
    inputs = inputs._replace(proximal_logprobs=inputs.logprobs)
    np.testing.assert_allclose(gradient(config.loss, inputs), gradient(ReinforceConfig().loss, inputs), rtol=1e-6)


@every_loss
def test_zero_advantages_give_a_gradient_of_exactly_zero(config):
    inputs = random_inputs(6)
    assert not np.any(gradient(config.loss, inputs._replace(advantages=jnp.zeros_like(inputs.advantages))))


@every_loss
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_packed_rows_equal_separate_rows(config, seed):
    inputs = random_inputs(seed, spread=0.05)
    separate = unpack(inputs)
    np.testing.assert_allclose(output(config.loss, inputs).loss_sum, output(config.loss, separate).loss_sum, rtol=1e-4, atol=1e-5)
    flat, expected = gradient(config.loss, inputs), gradient(config.loss, separate)
    np.testing.assert_allclose(flat[np.asarray(inputs.loss_mask) > 0], expected[np.asarray(separate.loss_mask) > 0], rtol=1e-4, atol=1e-6)
    for name, value in output(config.loss, inputs).metrics.items():
        np.testing.assert_allclose(value, output(config.loss, separate).metrics[name])


@every_loss
def test_any_split_into_microbatches_adds_up(config):
    inputs = random_inputs(8, 6, 11)
    whole = output(config.loss, inputs)
    for split in ([1, 5], [5, 1], [1] * 6):
        borders = np.cumsum([0, *split])
        parts = [output(config.loss, rows_of(inputs, slice(a, b))) for a, b in itertools.pairwise(borders)]
        np.testing.assert_allclose(sum(float(part.loss_sum) for part in parts), whole.loss_sum, rtol=1e-5)
        for name, value in whole.metrics.items():
            assert name.startswith("sum/")
            np.testing.assert_allclose(sum(float(part.metrics[name]) for part in parts), value)


@every_loss
def test_nan_under_the_mask_is_harmless(config):
    clean = random_inputs(9)
    is_loss = clean.loss_mask > 0
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        dirty = clean._replace(
            **{
                name: jnp.where(is_loss, getattr(clean, name), bad)
                for name in ("logprobs", "behaviour_logprobs", "proximal_logprobs", "advantages", "token_weights")
            }
        )
        assert float(output(config.loss, dirty).loss_sum) == float(output(config.loss, clean).loss_sum)
        np.testing.assert_array_equal(gradient(config.loss, dirty), gradient(config.loss, clean))


@every_loss
def test_nan_at_a_loss_token_is_not_hidden(config):
    inputs = inputs_of([[-1.0, jnp.nan]])
    assert np.isnan(output(config.loss, inputs).loss_sum)


@every_loss
@pytest.mark.parametrize("delta", [50.0, -50.0, 200.0, -200.0, 1e30, -1e30])
def test_extreme_ratios_give_finite_gradients(config, delta):
    for advantage in (-2.0, 2.0):
        inputs = inputs_of(
            [[-0.1, -0.2, -0.3]], [[-0.1, -0.2 - delta, -0.3]], proximal=[[-0.1, -0.2 - delta / 2, -0.3]], advantages=[[advantage] * 3]
        )
        assert np.isfinite(output(config.loss, inputs).loss_sum)
        assert np.all(np.isfinite(gradient(config.loss, inputs)))


@every_loss
def test_a_behaviour_probability_of_zero_gives_a_finite_gradient(config):
    inputs = inputs_of([[-0.1, -0.2]], [[-jnp.inf, -0.2]], proximal=[[-0.1, -0.2]])
    assert np.all(np.isfinite(gradient(config.loss, inputs)))


@every_loss
def test_gradient_stays_outside_the_mask_at_zero(config):
    inputs = random_inputs(10)
    assert not np.any(gradient(config.loss, inputs)[np.asarray(inputs.loss_mask) == 0])
