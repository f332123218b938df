import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.losses.inputs import masked
from tests.losses.batches import inputs_of, random_inputs


def test_masked_keeps_loss_tokens_and_replaces_the_rest():
    inputs = inputs_of([[1.0, jnp.nan, 3.0]], [[jnp.inf, 2.0, 4.0]], mask=[[0, 0, 1]], advantages=[[5, 5, 5]], segments=[[1, 1, 1]])
    clean = masked(inputs)
    np.testing.assert_array_equal(clean.logprobs, [[0, 0, 3]])
    np.testing.assert_array_equal(clean.behaviour_logprobs, [[0, 0, 4]])
    np.testing.assert_array_equal(clean.advantages, [[0, 0, 5]])
    np.testing.assert_array_equal(clean.segment_ids, [[1, 1, 1]])


def test_shapes_that_would_broadcast_are_refused():
    inputs = random_inputs(0)
    with pytest.raises(ValueError, match=r"loss inputs must all have the shape .*'advantages': \(3, 1\)"):
        AipoConfig().loss(inputs._replace(advantages=inputs.advantages[:, :1]))
