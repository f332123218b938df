"""The decode step with the GPU's attention kernel, run step by step on CPUs, gives what it gives with XLA's operations."""

import jax
import numpy as np
import pytest

from llamarl_jax.engine.slots import SlotScheduler
from llamarl_jax.kernels.implementations import Kernels
from llamarl_jax.types import Completion
from tests.engine.tiny_engine import LISTED, make_engine, make_prompts, place, random_params, requests, run_to_end

PARAMS = jax.device_get(random_params(LISTED))


def complete(kernels: Kernels, **options) -> dict[int, Completion]:
    engine = make_engine(forced_kernels=kernels, max_new_tokens=40, **options)
    assert engine.kernels == engine.spec.bind(PARAMS).kernels == kernels
    slots = SlotScheduler(engine, place(engine, PARAMS), 0)
    slots.submit(requests(make_prompts([3, 17, 24, 9]), 2, max_new_tokens=40, temperature=0.0))
    return run_to_end(slots)


@pytest.mark.parametrize(
    "options",
    [{"slots_per_prompt": 2, "kv_dtype": "int8"}, {"data": 2, "tensor": 2, "slots_per_prompt": 2}, {"tensor": 4}],
    ids=["int8 cache", "data 2 × tensor 2", "tensor 4 with whole heads"],
)
def test_greedy_tokens_are_those_of_xla(options):
    ours, theirs = (complete(kernels, **options) for kernels in ("pallas_interpreted", "xla"))
    assert ours.keys() == theirs.keys()
    assert sum(len(c.token_ids) for c in ours.values()) > 50
    for ticket, completion in ours.items():
        np.testing.assert_array_equal(completion.token_ids, theirs[ticket].token_ids)
        np.testing.assert_allclose(completion.behaviour_logprobs, theirs[ticket].behaviour_logprobs, atol=1e-4)
