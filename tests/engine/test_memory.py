import dataclasses

import jax
import jax.numpy as jnp
import pytest

from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.engine.memory import MEMORY_SHARE, device_memory_bytes, plan_memory, resolve_slots
from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.transformer import TransformerSpec
from llamarl_jax.quantization.fp8 import QuantizationConfig
from tests.engine.tiny_engine import CONFIG, LISTED, make_engine

ENGINE = EngineConfig(num_slots="auto", max_prompt_tokens=40, max_new_tokens=24, prefill_chunk_tokens=128)
LAYER = 96 * 48 + 48 * 48 + 3 * 48 * 96  # qkv, o, mlp
NORMS = 2 * 2 * 48 + 48


def _mesh(data: int, tensor: int):
    return build_mesh(jax.devices()[: data * tensor], {"data": data, "tensor": tensor})


def test_a_plan_worked_out_by_hand():
    plan = plan_memory(LISTED, _mesh(1, 1), ENGINE, num_weight_copies=3, limit_bytes=10_000_000)
    assert plan.weight_bytes == 3 * 4 * (300 * 48 + 2 * LAYER + NORMS)
    token = 2 * 2 * 2 * 12 * 4  # keys and values, two layers, two heads of 12
    assert plan.slot_bytes == 1.5 * 32 * token + 3 * 4 * 300  # 24 tokens in multiples of 16
    assert plan.prompt_bytes == 1.5 * 48 * token
    scores, gates = 4 * 64, 2 * 96  # four heads of up to 64 tokens; in float32 and what the softmax, or the mlp, makes of them
    assert plan.prefill_bytes == 128 * (token + max(scores, gates) * (4 + 4) + 2 * 4 * 48)
    assert plan.limit_bytes == 10_000_000 * MEMORY_SHARE
    free = plan.limit_bytes - plan.weight_bytes - plan.prefill_bytes
    assert plan.most_slots == free // (plan.slot_bytes + plan.prompt_bytes)


@pytest.mark.parametrize("slots_per_prompt", [1, 3, 4, 100])
def test_slots_that_share_prompts_are_as_many_as_fit(slots_per_prompt):
    config = dataclasses.replace(ENGINE, slots_per_prompt=slots_per_prompt)
    plans = [plan_memory(LISTED, _mesh(1, 1), config, num_weight_copies=1, limit_bytes=n) for n in range(800_000, 1_000_000, 9_999)]
    for plan in plans:
        free = plan.limit_bytes - plan.weight_bytes - plan.prefill_bytes
        counts = [n for n in range(200) if n * plan.slot_bytes + -(-n // slots_per_prompt) * plan.prompt_bytes <= free]
        assert plan.most_slots == max(counts)
    assert plans[0].most_slots < plans[-1].most_slots


def test_tensor_splits_weights_and_heads_data_only_slots():
    alone = plan_memory(LISTED, _mesh(1, 1), ENGINE, num_weight_copies=1, limit_bytes=10_000_000)
    split = plan_memory(LISTED, _mesh(2, 2), ENGINE, num_weight_copies=1, limit_bytes=10_000_000)
    assert split.weight_bytes == 4 * (300 * 48 + 2 * LAYER) // 2 + 4 * NORMS
    hidden = 128 * 2 * 4 * 48  # which every device has whole
    assert split.prefill_bytes - hidden == (alone.prefill_bytes - hidden) // 2
    assert split.slot_bytes == alone.slot_bytes // 2  # one of two heads, half of the vocabulary
    assert split.most_slots % 2 == 0
    short = plan_memory(LISTED, _mesh(1, 2), dataclasses.replace(ENGINE, max_prompt_tokens=16, max_new_tokens=16), num_weight_copies=1)
    assert short.prefill_bytes == 128 * (2 * 2 * 12 * 4 + 96 * 8 + 2 * 4 * 48)  # the mlp needs more than the scores
    half = plan_memory(LISTED, _mesh(1, 1), dataclasses.replace(ENGINE, dtype="bfloat16"), num_weight_copies=1, limit_bytes=10_000_000)
    assert half.weight_bytes == 2 * (300 * 48 + 2 * LAYER) + 4 * NORMS
    spec = TransformerSpec.build(CONFIG, is_scanned=False, quantization=QuantizationConfig(mode="w8a8"))
    fp8 = plan_memory(spec, _mesh(1, 1), dataclasses.replace(ENGINE, dtype="bfloat16"), num_weight_copies=1, limit_bytes=10_000_000)
    assert fp8.weight_bytes == 2 * 300 * 48 + 2 * LAYER + 4 * (NORMS + 2 * (96 + 48 + 192 + 48))


def test_the_plan_holds_what_the_engine_allocates():
    engine = make_engine(num_slots=4, max_prompt_tokens=40, max_new_tokens=24)
    state = engine.init_decode_state()
    cache = sum(x.nbytes for x in jax.tree.leaves((state.cache, state.prompts)))
    plan = plan_memory(LISTED, engine.mesh, engine.config, num_weight_copies=1, limit_bytes=10_000_000)
    assert cache * 80 // 128 <= plan.cache_bytes(4) <= 2.2 * cache  # the shortest caches are longer than both capacities
    assert jnp.dtype(engine.config.dtype) == jnp.float32


def test_auto_takes_what_fits_and_too_many_is_an_error_with_the_figure():
    plan = plan_memory(LISTED, _mesh(2, 1), ENGINE, num_weight_copies=1, limit_bytes=2_000_000)
    assert plan.most_slots > 0
    resolved = resolve_slots(ENGINE, plan)
    assert resolved.num_slots == plan.most_slots
    fitting = dataclasses.replace(ENGINE, num_slots=plan.most_slots)
    assert resolve_slots(fitting, plan) is fitting
    with pytest.raises(
        ValueError, match=rf"engine.num_slots = {plan.most_slots + 2} does not fit: .* choose at most {plan.most_slots}, or 'auto'"
    ):
        resolve_slots(dataclasses.replace(ENGINE, num_slots=plan.most_slots + 2), plan)
    with pytest.raises(ValueError, match=r"the decoder does not fit: .* use more devices on placement.generator_tensor"):
        resolve_slots(ENGINE, plan_memory(LISTED, _mesh(1, 1), ENGINE, num_weight_copies=1, limit_bytes=100_000))
    huge = plan_memory(LISTED, _mesh(1, 1), ENGINE, num_weight_copies=1, limit_bytes=10**12)
    assert resolve_slots(ENGINE, huge).num_slots == 1024
    assert resolve_slots(ENGINE, huge, most_completions=96).num_slots == 96
    assert resolve_slots(dataclasses.replace(ENGINE, num_slots=200), huge, most_completions=96).num_slots == 200  # as asked for
    two = plan_memory(LISTED, _mesh(2, 1), ENGINE, num_weight_copies=1, limit_bytes=10**12)
    assert resolve_slots(ENGINE, two, most_completions=7).num_slots == 8
    assert resolve_slots(ENGINE, plan, most_completions=10**6).num_slots == plan.most_slots
    with pytest.raises(ValueError, match=r"engine.num_slots is 'auto'"):
        DecodeEngine(LISTED, _mesh(1, 1), ENGINE, eos_token_ids=(), seed=0)


def test_virtual_devices_share_the_host():
    assert 2**27 < device_memory_bytes(_mesh(1, 1)) < 2**44
    reserved = plan_memory(LISTED, _mesh(1, 1), ENGINE, num_weight_copies=1, reserved_bytes=1000)
    free = plan_memory(LISTED, _mesh(1, 1), ENGINE, num_weight_copies=1)
    assert free.limit_bytes - reserved.limit_bytes == 1000
