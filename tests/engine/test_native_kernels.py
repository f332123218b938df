"""The decode step with kernels of our own gives what it gives with XLA's operations."""

import dataclasses
from typing import Literal

import jax
import numpy as np
import pytest

from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.engine.slots import SlotScheduler
from llamarl_jax.kernels import native
from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.transformer import TransformerSpec
from llamarl_jax.types import Completion
from tests.engine.tiny_engine import CONFIG, make_prompts, random_params, requests, run_to_end

pytestmark = pytest.mark.skipif(native.find_obstacle() is not None, reason=f"no native kernels here: {native.find_obstacle()}")
SPEC = TransformerSpec.build(dataclasses.replace(CONFIG, head_dim=16), is_scanned=False)
PARAMS = random_params(SPEC)
MESH = build_mesh(jax.devices()[:1], {"data": 1, "tensor": 1})


def make_engine(kernels: Literal["auto", "xla", "native"], num_slots: int = 4) -> DecodeEngine:
    config = EngineConfig(num_slots=num_slots, max_prompt_tokens=24, max_new_tokens=40, decode_steps_per_call=3, kernels=kernels)
    return DecodeEngine(SPEC, MESH, config, eos_token_ids=CONFIG.eos_token_ids, seed=0)


def complete(engine: DecodeEngine, temperature: float = 1.0) -> dict[int, Completion]:
    slots = SlotScheduler(engine, PARAMS, 0)
    slots.submit(requests(make_prompts([3, 17, 24, 9]), 2, max_new_tokens=40, temperature=temperature))
    return run_to_end(slots)


@pytest.mark.parametrize("kernels", ["native", "auto", "xla"])
def test_the_compiled_step_calls_them_or_not(kernels):
    """Four products and the attention of each layer, and the LM head."""
    engine = make_engine(kernels)
    with jax.set_mesh(MESH):
        lowered = engine._generate.lower(PARAMS, engine.init_decode_state(), engine._eos_array, is_truncated=False)
    text = lowered.compile().as_text()
    assert text is not None
    expected = (0, 0) if kernels == "xla" else (4 * CONFIG.num_layers + 1, CONFIG.num_layers)
    found = tuple(text.count(f'custom_call_target="llamarl_{name}"') for name in ("linear", "decode_attention"))
    assert found == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_xla(temperature):
    ours, theirs = (complete(make_engine(kernels), temperature) for kernels in ("native", "xla"))
    assert ours.keys() == theirs.keys()
    assert sum(len(c.token_ids) for c in ours.values()) > 100
    for ticket, completion in ours.items():
        np.testing.assert_array_equal(completion.token_ids, theirs[ticket].token_ids)
        np.testing.assert_allclose(completion.behaviour_logprobs, theirs[ticket].behaviour_logprobs, atol=1e-4)


def test_a_completion_is_the_same_among_any_number_of_slots():
    """The kernels' part is bit for bit; the sums over the vocabulary behind a log-prob are XLA's, and those are not."""
    few, many = (complete(make_engine("native", num_slots)) for num_slots in (2, 8))
    for ticket, completion in few.items():
        np.testing.assert_array_equal(completion.token_ids, many[ticket].token_ids)
        np.testing.assert_allclose(completion.behaviour_logprobs, many[ticket].behaviour_logprobs, rtol=1e-6)
