"""What the slot scheduler promises whatever is dispatched when: same tokens, clean slots, honest versions."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from llamarl_jax.engine.api import PrefillRequest
from llamarl_jax.engine.engine import PackedResult
from llamarl_jax.engine.slots import SlotScheduler
from llamarl_jax.models.kv_cache import cache_length, init_cache
from llamarl_jax.models.transformer import Params
from llamarl_jax.types import Completion, FinishReason
from tests.engine.tiny_engine import (
    STACKED,
    make_engine,
    make_prompts,
    place,
    random_params,
    requests,
    run_to_end,
    trainer_logprobs,
    unstack,
)

LONG: dict[str, Any] = {"max_prompt_tokens": 150, "max_new_tokens": 120, "decode_steps_per_call": 8}


@pytest.fixture(scope="module")
def params():
    return random_params(STACKED)


def _start(params: Params, engine=None, *, dispatch_ahead: int = 0, version: int = 0, clock=None, **options) -> SlotScheduler:
    engine = engine or make_engine(**options)
    clocks = {"clock": clock} if clock else {}
    return SlotScheduler(engine, place(engine, unstack(params)), version, dispatch_ahead=dispatch_ahead, **clocks)


def _assert_same(first: dict[int, Completion], second: dict[int, Completion]) -> None:
    assert first.keys() == second.keys()
    for ticket, completion in first.items():
        assert completion.token_ids.tolist() == second[ticket].token_ids.tolist(), ticket
        assert completion.finish_reason is second[ticket].finish_reason
        np.testing.assert_allclose(completion.behaviour_logprobs, second[ticket].behaviour_logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def expected(params):
    """Nine groups of two, prompts of 1 to 150 tokens, completions of up to 120."""
    slots = _start(params, num_slots=18, **LONG)
    slots.submit(_long_requests())
    return run_to_end(slots)


def _long_requests():
    return requests(make_prompts([1, 17, 33, 64, 65, 100, 129, 149, 150]), 2, max_new_tokens=120, temperature=0.8)


def test_the_cache_is_as_long_as_the_longest_live_slot_needs(params):
    """It grows with a long completion, is short again for the next short one, and each pair of lengths compiles one program."""
    engine = make_engine(num_slots=2, **LONG)
    assert engine.config.prompt_lengths == (64, 128, 160)
    assert engine.config.own_lengths == (64, 128)
    slots = _start(params, engine)
    lengths = []
    for seed in (0, 1):
        long, short = make_prompts([100, 3], seed)
        slots.submit(requests([long], 1, max_new_tokens=120) + requests([short], 1, max_new_tokens=5))
        while not slots.is_idle:
            slots.step()
            lengths.append((cache_length(slots._state.prompts), cache_length(slots._state.cache)))
        slots.submit(requests(make_prompts([4], seed), 1, max_new_tokens=8))
        run_to_end(slots)
        lengths.append((cache_length(slots._state.prompts), cache_length(slots._state.cache)))
    assert lengths[0] == (128, 64)
    assert max(lengths) == (128, 128)
    assert lengths[-1] == (64, 64)
    assert engine.num_compilations()["generate"] == len(set(lengths)) == 3
    slots.submit(requests(make_prompts([90, 4, 8, 100], 5), 2, max_new_tokens=110, temperature=0.3))
    run_to_end(slots)
    assert engine.num_compilations()["generate"] <= len(engine.config.prompt_lengths) * len(engine.config.own_lengths)


@pytest.mark.parametrize(
    "options",
    [
        {"num_slots": 4},
        {"num_slots": 3, "prefill_chunk_tokens": 32},
        {"num_slots": 5, "dispatch_ahead": 2},
        {"num_slots": 4, "slots_per_prompt": 2},
        {"num_slots": 6, "slots_per_prompt": 2, "data": 2, "dispatch_ahead": 1, "prefill_chunk_tokens": 32},
    ],
    ids=str,
)
def test_slots_chunks_and_calls_ahead_change_no_token(params, expected, options):
    options = {**LONG, **options}
    ahead = options.pop("dispatch_ahead", 0)
    slots = _start(params, dispatch_ahead=ahead, **options)
    slots.submit(_long_requests())
    _assert_same(run_to_end(slots), expected)


def test_logprobs_of_long_chunked_prompts_equal_the_trainers(params, expected):
    prompts = make_prompts([1, 17, 33, 64, 65, 100, 129, 149, 150])
    for ticket in (0, 7, 11, 16):
        wanted = trainer_logprobs(params, prompts[ticket // 2], expected[ticket], 0.8)
        np.testing.assert_allclose(expected[ticket].behaviour_logprobs, wanted, atol=2e-5)


def test_running_completions_wait_for_one_chunk_at_most(params):
    """A prompt of 150 tokens in chunks of 16 arrives over ten calls, in all of which the other slot goes on."""
    slots = _start(params, num_slots=2, prefill_chunk_tokens=16, eos_token_ids=(), **LONG)
    slots.submit(requests(make_prompts([3]), 1, max_new_tokens=120, temperature=2.0))
    slots.step()
    slots.take_counters()
    slots.submit([r for r in requests(make_prompts([3, 150]), 1) if r.ticket == 1])
    num_calls_before_it_started = 0
    while 1 not in {t.request.ticket for t in slots._tenants.values()}:
        slots.step()
        num_calls_before_it_started += 1
        assert slots.take_counters().num_kept_tokens >= 8
    assert num_calls_before_it_started == 10


def _without_an_end(**options: Any):
    return make_engine(num_slots=2, eos_token_ids=(), max_prompt_tokens=24, max_new_tokens=24, decode_steps_per_call=3, **options)


@pytest.mark.parametrize("dispatch_ahead", [0, 1, 2])
def test_calls_are_dispatched_before_the_results_of_earlier_ones_are_read(params, monkeypatch, dispatch_ahead):
    engine, events, numbers = _without_an_end(), [], itertools.count()
    generate, to_host = engine.generate, PackedResult.to_host

    def noted(*args: Any, **options: Any) -> Any:
        state, result = generate(*args, **options)
        object.__setattr__(result, "number", number := next(numbers))
        events.append(("dispatch", number))
        return state, result

    def read(result: Any) -> Any:
        events.append(("read", result.number))
        return to_host(result)

    monkeypatch.setattr(engine, "generate", noted)
    monkeypatch.setattr(PackedResult, "to_host", read)
    slots = _start(params, engine, dispatch_ahead=dispatch_ahead)
    slots.submit(requests(make_prompts([5]), 2, max_new_tokens=24))
    run_to_end(slots)
    assert [number for kind, number in events if kind == "read"] == list(range(8))
    for number in range(8):
        last_before = max(n for kind, n in events[: events.index(("read", number))] if kind == "dispatch")
        assert last_before == min(number + dispatch_ahead, 7)


@pytest.mark.parametrize("dispatch_ahead", [0, 1])
def test_one_array_a_call_is_copied_to_the_host(params, monkeypatch, dispatch_ahead):
    """Whatever happens between two calls: prompts that start, slots that end, caches that grow.

    On two replicas, because an array on a single CPU device is read in place.
    """
    copied: list[tuple[int, ...]] = []
    value = ArrayImpl._value

    def counted(array: Any) -> np.ndarray:
        if len(array.sharding.device_set) > 1:  # the whole array, not a part of it
            copied.append(array.shape)
        return value.fget(array)  # pyright: ignore[reportOptionalCall]

    slots = _start(params, num_slots=2, data=2, dispatch_ahead=dispatch_ahead, **LONG)
    slots.submit(requests(make_prompts([5, 90, 150]), 2, max_new_tokens=100))
    num_calls = 0
    monkeypatch.setattr(ArrayImpl, "_value", property(counted))
    while not slots.is_idle:
        slots.step()
        num_calls += slots.take_counters().num_slot_steps // (2 * 8)
    assert num_calls > 10
    assert copied == [(2 * 8 + 1, 2)] * num_calls


def test_siblings_start_in_slots_that_came_free_while_their_prompt_was_prefilled(params):
    """A prompt of 150 tokens takes ten turns, in which the second slot comes free: both completions begin with the same call."""
    slots = _start(params, num_slots=2, prefill_chunk_tokens=16, eos_token_ids=(), **LONG)
    short, long = make_prompts([3, 150])
    slots.submit(requests([short], 2, max_new_tokens=8)[:1] + requests([short], 2, max_new_tokens=40)[1:])
    slots.submit(requests([long], 2, max_new_tokens=16))
    while sum(tenant.request.prompt is long for tenant in slots._tenants.values()) == 0:
        slots.step()
    running = [tenant.request for tenant in slots._tenants.values()]
    assert [(request.prompt.prompt_id, request.sample_index) for request in running] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(("num_tokens", "lengths"), [(513, [512, 64]), (600, [512, 128]), (900, [512, 512]), (1100, [512, 512, 128])])
def test_the_last_chunk_of_a_long_prompt_is_not_much_longer_than_what_is_left(params, monkeypatch, num_tokens, lengths):
    engine = make_engine(max_prompt_tokens=1200)
    seen = []

    def noted(token_ids: np.ndarray) -> tuple[tuple[()], jax.Array]:
        seen.append(token_ids.shape[1])
        return (), jnp.int32(0)

    monkeypatch.setattr(engine, "_prefill_first", lambda _params, token_ids, **_: noted(token_ids))
    monkeypatch.setattr(engine, "_prefill_next", lambda _params, _cache, token_ids, _start: noted(token_ids))
    (*_, turn) = engine.prefill(params, [PrefillRequest(np.zeros(num_tokens + 1, np.int32), 0)])
    assert seen == lengths
    assert turn.prefixes[0].num_tokens == num_tokens + 1


def test_short_prompts_of_several_lengths_are_prefilled_in_one_turn(params):
    """A turn is a chunk of 64 tokens: 16 + 32 fit, 64 do not fit beside them."""
    engine = make_engine(max_prompt_tokens=64, prefill_chunk_tokens=64)
    wanted = [PrefillRequest(np.zeros(n, np.int32), 0) for n in (60, 10, 30)]
    assert [sorted(turn.prefixes) for turn in engine.prefill(place(engine, unstack(params)), wanted)] == [[1, 2], [0]]


def test_an_abort_returns_what_there_is_and_leaves_a_clean_slot(params):
    slots = _start(params, num_slots=2, **LONG)
    wanted = requests(make_prompts([5, 9, 13]), 1, max_new_tokens=120, temperature=2.0)
    slots.submit(wanted)
    slots.step()
    slots.abort([0, 2])
    finished = dict(slots.step())
    assert finished[0].finish_reason is FinishReason.ABORTED
    assert len(finished[0].token_ids) == len(finished[0].behaviour_logprobs) == 8
    assert finished[2].finish_reason is FinishReason.ABORTED  # it had not started
    assert len(finished[2].token_ids) == 0
    slots.submit([wanted[2]])
    again = run_to_end(slots)
    fresh = _start(params, num_slots=2, **LONG)
    fresh.submit(wanted)
    whole = run_to_end(fresh)
    assert finished[0].token_ids.tolist() == whole[0].token_ids[:8].tolist()
    _assert_same(again, {t: whole[t] for t in (1, 2)})
    assert slots.take_counters().num_aborted == 2


def test_a_prompt_that_is_being_prefilled_can_be_aborted(params):
    slots = _start(params, num_slots=2, prefill_chunk_tokens=16, **LONG)
    slots.submit(requests(make_prompts([3]), 1, max_new_tokens=120, temperature=2.0))
    slots.step()
    slots.submit([r for r in requests(make_prompts([3, 150, 8]), 1) if r.ticket > 0])
    slots.step()
    slots.abort([1])
    finished = run_to_end(slots)
    assert [finished[t].finish_reason is FinishReason.ABORTED for t in (0, 1, 2)] == [False, True, False]


def test_a_deadline_cuts_a_completion_off(params):
    now = [0.0]
    slots = _start(params, num_slots=2, clock=lambda: now[0], **LONG)
    slots.submit(
        requests(make_prompts([5]), 1, max_new_tokens=120, temperature=2.0, deadline_s=10.0)
        + [r for r in requests(make_prompts([5, 9]), 1, max_new_tokens=120, temperature=2.0) if r.ticket == 1]
    )
    finished = {}
    while not slots.is_idle:
        finished.update(slots.step())
        now[0] += 4.0
    assert finished[0].finish_reason is FinishReason.DEADLINE
    assert len(finished[0].token_ids) == 8 * 4  # at 0, 4, 8 and 12 seconds
    assert finished[1].finish_reason is not FinishReason.DEADLINE


@pytest.mark.parametrize("dispatch_ahead", [0, 1, 3])
def test_what_was_dispatched_is_read_before_a_completion_is_cut_off(params, dispatch_ahead):
    """A deadline that is over at once leaves the tokens of one call: a completion without any could not be trained on."""
    options: dict[str, Any] = {"num_slots": 2, "eos_token_ids": (), **LONG}
    now = itertools.count()
    late = _start(params, dispatch_ahead=dispatch_ahead, clock=lambda: float(next(now)), **options)
    late.submit(requests(make_prompts([5, 9]), 1, max_new_tokens=120, deadline_s=0.5))
    finished = run_to_end(late)
    assert {t: (c.finish_reason, len(c.token_ids)) for t, c in finished.items()} == dict.fromkeys((0, 1), (FinishReason.DEADLINE, 8))
    aborted = _start(params, dispatch_ahead=dispatch_ahead, **options)
    aborted.submit(requests(make_prompts([5, 9]), 1, max_new_tokens=120))
    aborted.step()
    aborted.step()
    aborted.abort([1])
    finished = dict(aborted.step())
    assert (finished[1].finish_reason, len(finished[1].token_ids)) == (FinishReason.ABORTED, 16)


@pytest.mark.parametrize("slots_per_prompt", [1, 2])
def test_siblings_that_start_after_a_swap_have_a_prefix_of_the_new_weights(params, slots_per_prompt):
    """Neither the prefix kept for them nor the row that the first ones read may serve them."""
    other, (prompt,) = random_params(STACKED, seed=1), make_prompts([20])
    engine = make_engine(num_slots=2, slots_per_prompt=slots_per_prompt, eos_token_ids=(), **LONG)
    slots = _start(params, engine)
    slots.submit(requests([prompt], 6, max_new_tokens=24, temperature=0.9))
    slots.step()
    slots.swap_weights(place(engine, unstack(other)), 1)
    finished = run_to_end(slots)
    late = [c for c in finished.values() if c.weight_versions[0] == 1]
    assert len(late) == 4
    for completion in late:
        np.testing.assert_allclose(completion.behaviour_logprobs, trainer_logprobs(other, prompt, completion, 0.9), atol=2e-5)


@pytest.mark.parametrize(("dispatch_ahead", "slots_per_prompt"), [(0, 1), (1, 1), (0, 2)])
def test_after_a_swap_the_cache_is_kept_or_computed_again(params, dispatch_ahead, slots_per_prompt):
    """Recomputed, the rest of a completion has the new weights' log-probs of the whole sequence; kept, it does not."""
    other, engine = random_params(STACKED, seed=3), make_engine(num_slots=6, slots_per_prompt=slots_per_prompt, **LONG)
    prompts = make_prompts([20, 40, 60])
    gaps = {}
    for recomputes in (True, False):
        slots = _start(params, engine, dispatch_ahead=dispatch_ahead)
        slots.submit(requests(prompts, 2, max_new_tokens=60, temperature=2.0))
        finished = dict(slots.step()) | dict(slots.step())
        slots.swap_weights(place(engine, unstack(other)), 1, recomputes_cache=recomputes)
        finished |= run_to_end(slots)
        gaps[recomputes] = 0.0
        for ticket, completion in finished.items():
            new = completion.weight_versions == 1
            assert completion.weight_versions.tolist() == sorted(completion.weight_versions.tolist())
            exact = trainer_logprobs(other, prompts[ticket // 2], completion, 2.0)
            gaps[recomputes] = max(gaps[recomputes], float(np.abs(exact - completion.behaviour_logprobs)[new].max(initial=0)))
    assert gaps[True] < 2e-5
    assert gaps[False] > 1e-2


def _request_of(ticket: int, sample_index: int):
    return next(r for r in _long_requests() if (r.ticket, r.sample_index) == (ticket, sample_index))


@pytest.fixture(scope="module")
def engines():
    options: dict[str, Any] = {"prefill_chunk_tokens": 32, **LONG}
    shared = {"shared": make_engine(num_slots=6, slots_per_prompt=2, **options)}
    return {num_slots: make_engine(num_slots=num_slots, **options) for num_slots in (4, 6)} | shared


@pytest.mark.parametrize(
    ("dispatch_ahead", "before", "after"),
    [(0, 6, 6), (2, 6, 6), (0, 6, 4), (2, 6, 4), (0, "shared", "shared"), (0, 6, "shared"), (2, "shared", 4)],
    ids=str,
)
def test_what_is_unfinished_goes_on_in_another_scheduler(params, expected, engines, dispatch_ahead, before, after):
    """With the same tokens: running completions from where they were, those without a seat from the beginning."""
    slots = _start(params, engines[before], dispatch_ahead=dispatch_ahead)
    slots.submit(_long_requests())
    finished = {}
    while len(finished) < 3 or slots._wave is None:  # amid a prefill
        finished.update(slots.step())
    finished.update(slots.settle())
    unfinished = slots.unfinished()
    assert {ticket for ticket, _ in unfinished} | finished.keys() == expected.keys()
    assert not {ticket for ticket, _ in unfinished} & finished.keys()
    lengths = [len(completion.token_ids) for _, completion in unfinished]
    num_running = len(slots._tenants)
    assert all(lengths[:num_running])
    assert not any(lengths[num_running:])
    other = _start(params, engines[after], dispatch_ahead=dispatch_ahead, version=1)
    other.restart(unfinished, _request_of)
    going_on = {tenant.request.ticket for tenant in other._tenants.values()}
    assert len(going_on) == min(num_running, engines[after].num_slots) or after == "shared"
    assert len(going_on) > 1
    rest = run_to_end(other)
    _assert_same(finished | rest, expected)
    _assert_same(finished | run_to_end(slots), expected)
    for (ticket, completion), length in zip(unfinished, lengths, strict=True):
        if ticket not in going_on:
            continue
        assert rest[ticket].behaviour_logprobs[:length].tobytes() == completion.behaviour_logprobs.tobytes()
        assert rest[ticket].weight_versions.tolist() == [0] * length + [1] * (len(rest[ticket].token_ids) - length)


@pytest.mark.parametrize("kind", [6, "shared"])
def test_a_scheduler_that_restarts_equals_bit_for_bit_one_that_takes_up_what_it_was_doing(params, engines, kind):
    slots, other = (_start(params, engines[kind], version=version) for version in (0, 1))
    slots.submit(_long_requests())
    for _ in range(6):
        slots.step()
    slots.settle()
    unfinished = slots.unfinished()
    slots.swap_weights(other.params, 1)
    ends = []
    for scheduler in (slots, other):
        scheduler.restart(unfinished, _request_of)
        ends.append(run_to_end(scheduler))
    assert ends[0].keys() == ends[1].keys()
    for ticket, completion in ends[0].items():
        for name in ("token_ids", "behaviour_logprobs", "weight_versions"):
            assert getattr(completion, name).tobytes() == getattr(ends[1][ticket], name).tobytes()


def test_a_swap_while_a_prompt_is_prefilled_starts_it_again(params):
    """No prefix mixes versions: what comes out are the new weights' log-probs from the first token on."""
    other, engine = random_params(STACKED, seed=3), make_engine(num_slots=2, prefill_chunk_tokens=16, **LONG)
    slots = _start(params, engine)
    slots.submit(requests(make_prompts([3]), 1, max_new_tokens=120, temperature=2.0))
    slots.step()
    prompts = make_prompts([3, 150])
    slots.submit([r for r in requests(prompts, 1, temperature=2.0) if r.ticket == 1])
    slots.step()
    slots.swap_weights(place(engine, unstack(other)), 1)
    completion = run_to_end(slots)[1]
    assert set(completion.weight_versions.tolist()) == {1}
    np.testing.assert_allclose(completion.behaviour_logprobs, trainer_logprobs(other, prompts[1], completion, 2.0), atol=2e-5)


def test_rapid_swaps_show_one_version_in_each_forward_pass():
    """Every token again, one by one, with the weights that its stamp names: layers of one version and a head of another would show."""
    engine = make_engine(num_slots=4, eos_token_ids=(), **LONG)
    versions = [unstack(random_params(STACKED, seed=seed, scale=3.0)) for seed in range(3)]
    placed = [place(engine, params) for params in versions]
    slots = SlotScheduler(engine, placed[0], 0, dispatch_ahead=1)
    prompts = make_prompts([5] * 60)
    slots.submit(requests(prompts, 4, max_new_tokens=120))
    num_bytes = []
    finished, version = {}, 0
    while version < 200:
        version += 1
        slots.swap_weights(placed[version % 3], version)
        finished.update(slots.step())
        num_bytes.append(sum(array.nbytes for array in jax.live_arrays()))
    assert len(finished) > 40
    assert max(num_bytes[100:]) <= max(num_bytes[20:100])
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *versions)

    @jax.jit
    def replay(ids: jax.Array, stamps: jax.Array) -> jax.Array:
        def step(cache: Any, token: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            position, token_id, stamp = token
            model = engine.spec.bind(jax.tree.map(lambda leaf: leaf[stamp % 3], stacked))
            hidden, cache = model.extend(token_id[None, None], position[None], cache)
            return cache, jax.nn.log_softmax(model.logits(hidden)[0, 0])

        empty = init_cache(engine.spec.config, 1, 128, "float32")
        return jax.lax.scan(step, empty, (jnp.arange(len(ids)), ids, stamps))[1]

    for ticket, completion in sorted(finished.items())[::5]:
        stamps = completion.weight_versions
        assert (np.diff(stamps[::8]) == 1).all()
        assert (stamps == np.repeat(stamps[::8], 8)).all()  # eight steps a call, one version each
        ids = np.concatenate([prompts[ticket // 4].token_ids, completion.token_ids])
        # The prompt's last token is read by the first step, the others by the prefill before it.
        logprobs = replay(ids[:-1], np.concatenate([np.full(4, stamps[0]), stamps]))
        np.testing.assert_allclose(completion.behaviour_logprobs, logprobs[np.arange(4, 124), completion.token_ids], atol=1e-4)
