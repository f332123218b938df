import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.losses.cispo import CispoConfig
from tests.losses.batches import gradient, inputs_of, output, random_inputs

PAIRS = [(CispoConfig(clip_low=1.0, clip_high=rho - 1), AipoConfig(rho=rho)) for rho in (1.0, 4.0, 10.0)]


def test_hand_worked():
    ln2 = float(np.log(2))
    inputs = inputs_of([[-1.0] * 4], [[-1.0, -1 - ln2, -1 + ln2, -1 - 3 * ln2]], advantages=[[1, 1, 1, -1]])  # ratios 1, 2, 1/2, 8
    config = CispoConfig(clip_low=0.2, clip_high=0.5)
    np.testing.assert_allclose(gradient(config.loss, inputs), [[-1, -1.5, -0.8, 1.5]], rtol=1e-6)
    assert float(output(config.loss, inputs).metrics["sum/ratio/clipped_share"]) == 3


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), pair=st.sampled_from(PAIRS))
def test_without_a_lower_clip_it_is_aipo(seed, pair):
    inputs = random_inputs(seed)
    cispo, aipo = pair
    np.testing.assert_array_equal(gradient(cispo.loss, inputs), gradient(aipo.loss, inputs))


def test_a_lower_clip_differs():
    inputs = random_inputs(0)
    assert np.any(gradient(CispoConfig(clip_low=0.1).loss, inputs) != gradient(CispoConfig(clip_low=1.0).loss, inputs))


def test_range_is_checked():
    with pytest.raises(ValueError, match=r"clip_low = 1\.5 and clip_high = 3\.0 are distances"):
        CispoConfig(clip_low=1.5)
