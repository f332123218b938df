import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.losses.gspo import GspoConfig
from llamarl_jax.losses.ppo import PpoClipConfig
from tests.losses.batches import gradient, inputs_of, output, random_inputs

LN2 = float(np.log(2))
SEQUENCE, TOKEN = GspoConfig(clip_low=0.5, clip_high=0.9), PpoClipConfig(clip_low=0.5, clip_high=0.9)


def test_hand_worked():
    # Sequence 1: log-ratios ln 2 and ln 8, so s = 4; sequence 2: −ln 2 and ln 2, so s = 1; a prompt token before each.
    inputs = inputs_of(
        np.zeros((1, 6)),
        [[9, -LN2, -3 * LN2, 9, LN2, -LN2]],
        advantages=[[-1, -1, -1, 3, 3, 3]],
        mask=[[0, 1, 1, 0, 1, 1]],
        weights=[[0, 0.5, 0.5, 0, 0.5, 0.5]],  # sequence_mean
        segments=[[1, 1, 1, 2, 2, 2]],
    )
    config = GspoConfig(clip_low=0.2, clip_high=0.2)
    result = output(config.loss, inputs)
    assert float(result.loss_sum) == pytest.approx(4 * 1 - 1 * 3, rel=1e-6)  # −Σ_i min(s_i A_i, …)
    # s_i · A_i / |y_i| at each token: the trajectory's tokens share one weight
    np.testing.assert_allclose(gradient(config.loss, inputs), [[0, 2, 2, 0, -1.5, -1.5]], rtol=1e-6)
    assert float(result.metrics["sum/ratio/clipped_share"]) == 0
    positive = inputs._replace(advantages=jnp.abs(inputs.advantages))
    np.testing.assert_allclose(gradient(config.loss, positive), [[0, 0, 0, 0, -1.5, -1.5]], rtol=1e-6)
    assert float(output(config.loss, positive).metrics["sum/ratio/clipped_share"]) == 2


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_sequences_of_one_token_are_ppo_clip(seed):
    inputs = random_inputs(seed)
    inputs = inputs._replace(segment_ids=jnp.broadcast_to(jnp.arange(1, inputs.logprobs.shape[1] + 1), inputs.logprobs.shape))
    np.testing.assert_allclose(output(SEQUENCE.loss, inputs).loss_sum, output(TOKEN.loss, inputs).loss_sum, rtol=1e-5)
    np.testing.assert_allclose(gradient(SEQUENCE.loss, inputs), gradient(TOKEN.loss, inputs), rtol=1e-5)


def test_range_is_checked():
    with pytest.raises(ValueError, match=r"clip_low = -1\.0 and clip_high = 0\.0004 are distances"):
        GspoConfig(clip_low=-1.0)
