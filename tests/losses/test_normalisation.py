import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.losses.normalisation import denominator, token_weights
from llamarl_jax.types import TrajectoryBatch
from tests.losses.batches import gradient, inputs_of, random_inputs, rows_of

MASK = np.array([[0, 1, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2], [1, 1, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)  # one segment has no loss token


def batch_of(mask, segments) -> TrajectoryBatch:
    zeros = np.zeros(np.shape(mask))
    return TrajectoryBatch(zeros, zeros, np.asarray(segments), zeros, np.asarray(mask), zeros, zeros, zeros)


def weights_of(mask, segments, normalisation):
    return np.asarray(token_weights(jnp.asarray(mask, jnp.float32), jnp.asarray(segments), normalisation))


def test_hand_worked_weights():
    np.testing.assert_array_equal(weights_of(MASK, SEGMENTS, "token_mean"), MASK)
    np.testing.assert_array_equal(weights_of(MASK, SEGMENTS, "constant"), MASK)
    third = 1 / np.float32(3)
    expected = [[0, third, third, third, 0, 1], [0, 1, 0, 0, 0, 0], [0] * 6]
    np.testing.assert_array_equal(weights_of(MASK, SEGMENTS, "sequence_mean"), np.array(expected, np.float32))


@pytest.mark.parametrize(("normalisation", "expected"), [("token_mean", 5.0), ("sequence_mean", 3.0), ("constant", 30.0)])
def test_hand_worked_denominators(normalisation, expected):
    assert denominator(batch_of(MASK, SEGMENTS), normalisation, max_tokens=10) == expected


@pytest.mark.parametrize(("normalisation", "expected"), [("token_mean", 1.0), ("sequence_mean", 1.0), ("constant", 10.0)])
def test_an_empty_batch_divides_by_a_positive_number(normalisation, expected):
    assert denominator(batch_of(np.zeros((2, 3)), np.zeros((2, 3))), normalisation, max_tokens=10) == expected


def test_sizes_as_documented():
    """Equal lengths: token_mean = sequence_mean, and constant is smaller by length / max_tokens."""
    mask, segments = np.ones((4, 5), np.float32), np.ones((4, 5), np.int32)
    size = {
        kind: weights_of(mask, segments, kind).sum() / denominator(batch_of(mask, segments), kind, max_tokens=20)
        for kind in ("token_mean", "sequence_mean", "constant")
    }
    assert size["token_mean"] == pytest.approx(1)
    assert size["sequence_mean"] == pytest.approx(1)
    assert size["constant"] == pytest.approx(5 / 20)


@pytest.mark.parametrize("normalisation", ["token_mean", "sequence_mean", "constant"])
def test_any_split_into_microbatches_gives_the_same_gradient(normalisation):
    inputs = random_inputs(4, 6, 11)
    batch = batch_of(inputs.loss_mask, inputs.segment_ids)

    def step(rows):
        part = rows_of(inputs, rows)
        part = part._replace(token_weights=token_weights(part.loss_mask, part.segment_ids, normalisation))
        return gradient(AipoConfig().loss, part) / denominator(batch, normalisation, max_tokens=9)

    whole = step(slice(None))
    for split in ([1, 5], [5, 1], [1] * 6):
        borders = np.cumsum([0, *split])
        parts = [step(slice(a, b)) for a, b in itertools.pairwise(borders)]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6)


def test_packing_changes_no_weight():
    packed = weights_of([[0, 1, 1, 0, 1, 1, 1]], [[1, 1, 1, 2, 2, 2, 2]], "sequence_mean")
    rows = weights_of([[0, 1, 1, 0], [0, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]], "sequence_mean")
    np.testing.assert_array_equal(packed[0], np.concatenate([rows[0, :3], rows[1]]))
    inputs = inputs_of(np.zeros((1, 7)), mask=[[0, 1, 1, 0, 1, 1, 1]], weights=packed)
    assert float(jnp.sum(inputs.token_weights)) == pytest.approx(2)
