from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.engine.api import PrefillRequest, SlotRequest
from llamarl_jax.engine.engine import EngineConfig, prompt_bucket
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import SlotScheduler
from llamarl_jax.models.kv_cache import init_cache
from llamarl_jax.models.transformer import decoder_dtype
from llamarl_jax.quantization.fp8 import QuantizationConfig, quantize_kernels
from llamarl_jax.types import FinishReason
from tests.engine.tiny_engine import (
    CONFIG,
    STACKED,
    generate,
    make_engine,
    make_prompts,
    place,
    prefill_all,
    random_params,
    requests,
    run_to_end,
    trainer_logprobs,
    unstack,
)


def slot_request(*, num_prompt_tokens: int, prompt_id: int = 0, max_new_tokens: int = 10) -> SlotRequest:
    return SlotRequest(
        slot=0,
        prompt_row=0,
        num_prompt_tokens=num_prompt_tokens,
        prompt_id=prompt_id,
        sample_index=0,
        sampling=SamplingConfig(),
        max_new_tokens=max_new_tokens,
    )


@pytest.fixture(scope="module")
def params():
    return random_params(STACKED)


@pytest.mark.parametrize(("temperature", "slots_per_prompt"), [(0.6, 1), (1.0, 1), (1.3, 2)])
def test_logprobs_equal_the_trainers_full_forward(params, temperature, slots_per_prompt):
    engine = make_engine(slots_per_prompt=slots_per_prompt)
    prompts = make_prompts([1, 2, 15, 16, 17, 24])
    slots = SlotScheduler(engine, place(engine, unstack(params)), 3)
    slots.submit(requests(prompts, 3, temperature=temperature))
    finished = run_to_end(slots)
    assert sorted(finished) == list(range(18))
    for ticket, completion in finished.items():
        expected = trainer_logprobs(params, prompts[ticket // 3], completion, temperature)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-5)
        assert completion.weight_versions.tolist() == [3] * len(completion.token_ids)
        assert completion.token_ids.max() < CONFIG.valid_vocab_size


def test_a_completion_depends_on_seed_prompt_and_sample_only(params):
    """Other slots, other neighbours, another order, other steps per call: the same tokens."""
    prompts = make_prompts([5, 9, 13, 20])
    engine = make_engine(num_slots=4)
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(prompts, 4))
    together = run_to_end(slots)
    other = make_engine(num_slots=3, decode_steps_per_call=2, slots_per_prompt=2)
    slots = SlotScheduler(other, place(other, unstack(params)), 0)
    slots.submit(requests(prompts, 4)[::-1])
    apart = run_to_end(slots)
    for ticket, completion in together.items():
        assert completion.token_ids.tolist() == apart[ticket].token_ids.tolist()
        np.testing.assert_allclose(completion.behaviour_logprobs, apart[ticket].behaviour_logprobs, atol=1e-5)
    seeded = make_engine(seed=1)
    slots = SlotScheduler(seeded, place(seeded, unstack(params)), 0)
    slots.submit(requests(prompts, 4))
    assert any(c.token_ids.tolist() != together[t].token_ids.tolist() for t, c in run_to_end(slots).items())


@pytest.mark.parametrize(("data", "tensor", "slots_per_prompt"), [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 2, 2), (2, 1, 4)])
def test_every_mesh_gives_the_same_tokens(params, data, tensor, slots_per_prompt):
    prompts = make_prompts([4, 8, 12, 16])
    results = []
    for shape in ((1, 1, 1), (data, tensor, slots_per_prompt)):
        engine = make_engine(num_slots=8, data=shape[0], tensor=shape[1], slots_per_prompt=shape[2])
        slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
        slots.submit(requests(prompts, 2, temperature=0.0))
        results.append(run_to_end(slots))
    for ticket, completion in results[0].items():
        assert completion.token_ids.tolist() == results[1][ticket].token_ids.tolist()
        np.testing.assert_allclose(completion.behaviour_logprobs, results[1][ticket].behaviour_logprobs, atol=1e-4)


def test_every_eos_id_stops_and_is_kept_and_budgets_are_kept(params):
    engine = make_engine()
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(make_prompts([6] * 30), 4, max_new_tokens=9))
    finished = run_to_end(slots)
    stops = set()
    for completion in finished.values():
        inner, last = completion.token_ids[:-1].tolist(), int(completion.token_ids[-1])
        assert not set(inner) & set(CONFIG.eos_token_ids)
        if completion.finish_reason is FinishReason.STOP:
            stops.add(last)
        else:
            assert completion.finish_reason is FinishReason.LENGTH
            assert last not in CONFIG.eos_token_ids
            assert len(completion.token_ids) == 9
    assert stops == set(CONFIG.eos_token_ids)


def test_ids_beyond_the_tokenizer_are_never_sampled_even_when_their_weights_are_largest(params):
    boosted = {**params, "embed": {"embedding": params["embed"]["embedding"].at[CONFIG.valid_vocab_size :].mul(100.0)}}
    engine = make_engine()
    slots = SlotScheduler(engine, place(engine, unstack(boosted)), 0)
    slots.submit(requests(make_prompts([3, 5, 7, 9]), 4, temperature=1.3))
    assert max(int(c.token_ids.max()) for c in run_to_end(slots).values()) < CONFIG.valid_vocab_size


def test_new_temperature_budget_prompt_or_weights_compile_nothing(params):
    engine = make_engine()
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(make_prompts([3, 20]), 4))
    run_to_end(slots)
    before = engine.num_compilations()
    expected = {"prefill": 2, "prefill_next": 0, "store_prompt": 2, "store_own": 0, "start": 1, "generate": 1, "resize": 0}
    expected |= {"init": 1, "release": 0}
    assert before == expected  # two buckets
    slots.swap_weights(place(engine, unstack(random_params(STACKED, seed=1))), 1)
    slots.submit(requests(make_prompts([10, 16, 18, 24], seed=5), 4, temperature=0.3, max_new_tokens=4))
    run_to_end(slots)
    slots.submit(requests(make_prompts([7], seed=6), 1))  # a single completion
    run_to_end(slots)
    assert engine.num_compilations() == before
    truncations: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_p": 0.5, "temperature": 2.0}, {"top_k": 3}, {"min_p": 0.1, "top_k": 50}]
    for truncation in truncations:
        slots.submit(requests(make_prompts([3, 20], seed=7), 2, **truncation))
        run_to_end(slots)
    assert engine.num_compilations() == {**before, "generate": 2}  # truncated sampling is one program more, whichever kind it is


def test_slots_are_refilled_at_once_and_one_prefill_serves_a_group(params):
    engine = make_engine(num_slots=2, decode_steps_per_call=1)
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(make_prompts([4, 5, 6]), 4))
    run_to_end(slots)
    counters = slots.take_counters()
    assert counters.num_prefills == 3
    assert counters.num_prefill_tokens == 4 + 5 + 6
    # One step per call and a slot refilled before the next call: only the last completion's neighbour can idle.
    assert counters.num_slot_steps - counters.num_kept_tokens < 10


def test_a_swap_between_calls_stamps_tokens_with_their_own_version(params):
    engine = make_engine()
    slots = SlotScheduler(engine, place(engine, unstack(params)), 5)
    slots.submit(requests(make_prompts([4]), 4))
    finished = dict(slots.step())
    slots.swap_weights(place(engine, unstack(random_params(STACKED, seed=2))), 6)
    finished |= run_to_end(slots)
    longest = max(finished.values(), key=lambda c: len(c.token_ids))
    assert longest.weight_versions.tolist() == [5] * 3 + [6] * (len(longest.token_ids) - 3)
    assert len(longest.token_ids) > 3


def test_a_released_slot_is_clean(params):
    engine = make_engine()
    placed = place(engine, unstack(params))
    prompts = make_prompts([6, 12])
    state = engine.init_decode_state()
    start = [slot_request(num_prompt_tokens=6)]
    state, _ = generate(engine, placed, engine.bulk_insert(prefill_all(engine, placed, [prompts[0].token_ids])[0], state, start))
    state = engine.release(state, [0])
    state, result = generate(engine, placed, state)
    assert not result.is_emitted.any()
    again = [slot_request(num_prompt_tokens=12, prompt_id=1)]
    state, reused = generate(engine, placed, engine.bulk_insert(prefill_all(engine, placed, [prompts[1].token_ids])[0], state, again))
    fresh = engine.bulk_insert(prefill_all(engine, placed, [prompts[1].token_ids])[0], engine.init_decode_state(), again)
    _, expected = generate(engine, placed, fresh)
    np.testing.assert_array_equal(reused.token_ids[:, 0], expected.token_ids[:, 0])
    np.testing.assert_array_equal(reused.logprobs[:, 0], expected.logprobs[:, 0])


def test_buckets_are_powers_of_two():
    assert [prompt_bucket(n) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


def test_bad_requests_name_the_limit(params):
    engine = make_engine()
    placed = place(engine, unstack(params))
    with pytest.raises(ValueError, match=r"a prefill of 49 tokens; it must have 1 to 48, which is what engine.max_prompt_tokens = 24"):
        engine.prefill(placed, [PrefillRequest(np.zeros(49, np.int32), 0)])
    with pytest.raises(ValueError, match="a prefill of 0 tokens"):
        engine.prefill(placed, [PrefillRequest(np.zeros(0, np.int32), 0)])
    prefix = prefill_all(engine, placed, [np.zeros(3, np.int32)])[0]
    with pytest.raises(ValueError, match="budget of 16 new tokens behind 1 does not fit the cache of 16"):
        engine.bulk_insert(prefix, engine.init_decode_state(), [slot_request(num_prompt_tokens=2, max_new_tokens=16)])
    with pytest.raises(ValueError, match=r"have prompts of \[2, 3\] tokens and a prefix of 3; give the prefix of their one prompt"):
        engine.bulk_insert(prefix, engine.init_decode_state(), [slot_request(num_prompt_tokens=n) for n in (2, 3)])
    with pytest.raises(ValueError, match=r"have prompts of \[4\] tokens and a prefix of 3"):
        engine.bulk_insert(prefix, engine.init_decode_state(), [slot_request(num_prompt_tokens=4)])
    with pytest.raises(ValueError, match="bulk_insert needs at least one request"):
        engine.bulk_insert(prefix, engine.init_decode_state(), [])
    with pytest.raises(ValueError, match="num_slots = 3 cannot be split over 2 replicas"):
        make_engine(num_slots=3, data=2)
    with pytest.raises(ValueError, match=r"engine.num_slots is 0"):
        EngineConfig(num_slots=0)
    with pytest.raises(ValueError, match=r"engine.dispatch_ahead is -1"):
        EngineConfig(dispatch_ahead=-1)
    with pytest.raises(ValueError, match=r"engine.prefill_chunk_tokens is 100; it must be a power of two"):
        EngineConfig(prefill_chunk_tokens=100)
    with pytest.raises(ValueError, match=r"engine.slots_per_prompt is 0"):
        EngineConfig(slots_per_prompt=0)
    with pytest.raises(ValueError, match=r"33 tokens do not fit the cache of 32; raise engine.max_prompt_tokens"):
        engine.fit(engine.init_decode_state(), 34, 1)
    with pytest.raises(ValueError, match=r"17 tokens do not fit the cache of 16; raise engine.max_new_tokens"):
        engine.fit(engine.init_decode_state(), 1, 17)


def test_decoding_with_stacked_weights_is_refused(params):
    model = STACKED.bind(params)
    with pytest.raises(ValueError, match="needs the list form"):
        model.extend(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), init_cache(CONFIG, 1, 8, "float32"))


def test_cache_is_split_over_slots_and_heads():
    engine = make_engine(data=2, tensor=2)
    state = engine.init_decode_state()
    keys = state.cache[0].keys
    assert keys.addressable_shards[0].data.shape == (2, 1, *keys.shape[2:])
    assert len({s.device for s in keys.addressable_shards}) == 4
    assert state.cache[0].keys.sharding.device_set == set(jax.devices()[:4])
    shared = make_engine(data=2, tensor=2, slots_per_prompt=2).init_decode_state().prompts[0].keys
    assert shared.shape[0] == 2
    assert shared.addressable_shards[0].data.shape == (1, 1, *shared.shape[2:])


@pytest.mark.parametrize(
    ("mode", "dtype", "least", "most"), [("none", "bfloat16", 1e-4, 0.1), ("w8a16", "float32", 1e-3, 0.3), ("w8a8", "bfloat16", 1e-3, 0.3)]
)
@pytest.mark.parametrize(("data", "tensor", "slots_per_prompt"), [(1, 1, 1), (1, 1, 2), (2, 2, 2)])
def test_narrow_weights_stay_close_to_the_trainers_full_forward(params, mode, dtype, least, most, data, tensor, slots_per_prompt):
    quantization = QuantizationConfig(mode=mode)
    engine = make_engine(dtype=dtype, quantization=quantization, data=data, tensor=tensor, slots_per_prompt=slots_per_prompt)
    prompts = make_prompts([1, 2, 15, 16, 17, 24])
    narrow = jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(decoder_dtype(path, x, dtype)), quantize_kernels(unstack(params), quantization)
    )
    slots = SlotScheduler(engine, place(engine, narrow), 3)
    slots.submit(requests(prompts, 3))
    gaps = [np.abs(c.behaviour_logprobs - trainer_logprobs(params, prompts[t // 3], c, 1.0)) for t, c in run_to_end(slots).items()]
    assert least < np.concatenate(gaps).mean() < most


@pytest.mark.parametrize(("kv_dtype", "mean_gap"), [("int8", 0.02), ("float8_e4m3fn", 0.1)])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 2)])
def test_a_small_kv_cache_stays_close_to_the_trainers_full_forward(params, kv_dtype, mean_gap, data, tensor):
    engine = make_engine(kv_dtype=kv_dtype, data=data, tensor=tensor, slots_per_prompt=data)
    assert engine.init_decode_state().cache[0].keys.dtype == jnp.dtype(kv_dtype)
    prompts = make_prompts([1, 2, 15, 16, 17, 24])
    slots = SlotScheduler(engine, place(engine, unstack(params)), 3)
    slots.submit(requests(prompts, 3))
    gaps = [np.abs(c.behaviour_logprobs - trainer_logprobs(params, prompts[t // 3], c, 1.0)) for t, c in run_to_end(slots).items()]
    mean = np.concatenate(gaps).mean()
    assert 1e-5 < mean < mean_gap  # it is rounded, and not by much
