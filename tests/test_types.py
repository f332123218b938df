import numpy as np
import pytest

from llamarl_jax.types import Completion, FinishReason


@pytest.mark.parametrize("short", ["token_ids", "behaviour_logprobs", "weight_versions"])
def test_the_arrays_of_a_completion_are_equally_long(short):
    arrays = {"token_ids": np.ones(3, np.int32), "behaviour_logprobs": np.zeros(3, np.float32), "weight_versions": np.zeros(3, np.int32)}
    Completion(sample_index=0, finish_reason=FinishReason.STOP, **arrays)
    counts = [2 if name == short else 3 for name in arrays]
    expected = "differ in length: {} ids, {} log-probs, {} versions; the producer must append to all three together".format(*counts)
    with pytest.raises(ValueError, match=expected):
        Completion(sample_index=0, finish_reason=FinishReason.STOP, **{**arrays, short: arrays[short][:2]})
