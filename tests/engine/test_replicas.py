"""Replicas of the decoder do everything by themselves: no program has a collective, and a prompt is computed where it is wanted."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from llamarl_jax.engine.api import PrefillRequest, SlotRequest
from llamarl_jax.engine.engine import DecodeEngine
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import SlotScheduler
from tests.engine.tiny_engine import STACKED, make_engine, make_prompts, place, random_params, requests, run_to_end, unstack

COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\(")
PROGRAMS = ("_init", "_prefill_first", "_prefill_next", "_store_prompt", "_store_own", "_start", "_generate", "_resize", "_release")


@pytest.fixture(scope="module")
def params():
    return random_params(STACKED)


def record_programs(engine: DecodeEngine) -> dict[str, set[str]]:
    """Returns the compiled text of each program that the engine runs from now on, by its name."""
    texts: dict[str, set[str]] = {name: set() for name in PROGRAMS}

    def recorded(name: str, program: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            texts[name].add(program.lower(*args, **options).compile().as_text())
            return program(*args, **options)

        return call

    for name in PROGRAMS:
        setattr(engine, name, recorded(name, getattr(engine, name)))
    return texts


@pytest.mark.parametrize("slots_per_prompt", [1, 2])
def test_no_program_of_a_replica_needs_another_one(params, slots_per_prompt):
    options: dict[str, Any] = {"max_prompt_tokens": 100, "max_new_tokens": 90, "prefill_chunk_tokens": 64}
    engine = make_engine(num_slots=8, data=4, slots_per_prompt=slots_per_prompt, **options)
    texts = record_programs(engine)
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(make_prompts([3, 20, 70, 100, 90, 5]), 4, max_new_tokens=90, temperature=2.0, top_k=200))
    for _ in range(4):
        slots.step()
    slots.swap_weights(slots.params, 1, recomputes_cache=True)
    slots.abort([0])
    run_to_end(slots)
    assert all(texts.values()), [name for name, seen in texts.items() if not seen]
    assert not {name: COLLECTIVE.findall(text) for name, seen in texts.items() for text in seen if COLLECTIVE.search(text)}


def test_the_search_for_collectives_finds_them(params):
    engine = make_engine(num_slots=8, tensor=2)
    texts = record_programs(engine)
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(make_prompts([3]), 1))
    run_to_end(slots)
    assert all(COLLECTIVE.search(text) for name in ("_prefill_first", "_generate") for text in texts[name])


def test_a_prefill_is_computed_on_the_replica_that_wants_it_and_beside_those_of_others(params):
    """Two prompts on replica 1 and one on replica 0: two calls, and rows of replica 0 that nobody wants."""
    engine = make_engine(num_slots=8, data=2, prefill_chunk_tokens=16)
    placed = place(engine, unstack(params))
    prompts = make_prompts([9, 12, 15])
    wanted = [PrefillRequest(prompt.token_ids, replica) for prompt, replica in zip(prompts, (1, 0, 1), strict=True)]
    turns = list(engine.prefill(placed, wanted))
    assert [sorted(turn.prefixes) for turn in turns] == [[0, 1], [2]]
    prefixes = {number: prefix for turn in turns for number, prefix in turn.prefixes.items()}
    assert [(prefixes[n].replica, prefixes[n].row) for n in range(3)] == [(1, 0), (0, 0), (1, 0)]
    alone = make_engine(num_slots=4)
    for number, prefix in prefixes.items():
        (turn,) = alone.prefill(place(alone, unstack(params)), [PrefillRequest(prompts[number].token_ids, 0)])
        expected = turn.prefixes[0].cache[1].keys[0]
        shard = next(s for s in prefix.cache[1].keys.addressable_shards if s.device == engine.mesh.devices[prefix.replica, 0])
        length = len(prompts[number].token_ids) - 1
        np.testing.assert_allclose(np.asarray(shard.data)[prefix.row, :, :length], np.asarray(expected)[:, :length], atol=1e-5)


def test_a_prompt_cannot_be_put_on_a_replica_that_has_not_prefilled_it(params):
    engine = make_engine(num_slots=8, data=2)
    (turn,) = engine.prefill(place(engine, unstack(params)), [PrefillRequest(make_prompts([5])[0].token_ids, 1)])
    request = SlotRequest(
        slot=3, prompt_row=3, num_prompt_tokens=5, prompt_id=0, sample_index=0, sampling=SamplingConfig(), max_new_tokens=1
    )
    with pytest.raises(ValueError, match="slot 3 and prompt row 3 are on the replicas 0 and 0, but the prefix on 1; prefill the prompt on"):
        engine.bulk_insert(turn.prefixes[0], engine.init_decode_state(), [request])


@pytest.mark.parametrize("slots_per_prompt", [1, 2])
def test_a_group_is_prefilled_on_each_replica_that_completes_it_and_kept_there(params, slots_per_prompt):
    """Twelve siblings in 2 × 4 slots: eight start at once, the last four where one ends, without a prefill more."""
    engine = make_engine(num_slots=8, data=2, slots_per_prompt=slots_per_prompt, eos_token_ids=())
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(make_prompts([9]), 12, temperature=1.0))
    together = run_to_end(slots)
    assert slots.take_counters().num_prefills == 2
    alone = make_engine(num_slots=12, eos_token_ids=())
    reference = SlotScheduler(alone, place(alone, unstack(params)), 0)
    reference.submit(requests(make_prompts([9]), 12, temperature=1.0))
    for ticket, completion in run_to_end(reference).items():
        assert together[ticket].token_ids.tolist() == completion.token_ids.tolist()


def test_a_small_group_stays_on_one_replica(params):
    engine = make_engine(num_slots=8, data=2, eos_token_ids=())
    slots = SlotScheduler(engine, place(engine, unstack(params)), 0)
    slots.submit(requests(make_prompts([9, 5]), 4))
    run_to_end(slots)
    assert slots.take_counters().num_prefills == 2


def test_each_replica_sends_its_part_of_a_call_to_the_host(params):
    engine = make_engine(num_slots=8, data=4)
    state, result = engine.generate(place(engine, unstack(params)), engine.init_decode_state())
    assert [shard.data.shape for shard in result.packed.addressable_shards] == [(7, 2)] * 4
    assert len({shard.device for shard in result.packed.addressable_shards}) == 4
    assert result.to_host().token_ids.shape == (3, 8)
    jax.block_until_ready(state)
