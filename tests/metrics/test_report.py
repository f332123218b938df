"""The decoder's counters and what a report makes of them, against sums done by hand."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamarl_jax.engine.api import Prefilled, PrefillRequest, Prefix, ResultTokens
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, SlotScheduler
from llamarl_jax.metrics.report import counter_metrics
from llamarl_jax.types import Prompt


def test_ratios_are_of_the_sums_of_a_step():
    sums = {
        "generated_tokens": 60.0,
        "slot_steps": 80.0,
        "prefill_tokens": 40.0,
        "prefill_s": 1.0,
        "decode_s": 3.0,
        "tail_s": 0.5,
        "scored": 4.0,
        "reward": 3.0,
    }
    metrics = counter_metrics(sums, wall_s=10.0)
    assert metrics["throughput/generated_tokens_per_s"] == 6.0
    assert metrics["generator/slot_utilisation"] == 0.75
    assert metrics["generator/prefill_share"] == 0.25
    assert metrics["generator/decode_share"] == 0.75
    assert metrics["generator/tail_share"] == 0.125
    assert metrics["generator/tail_s"] == 0.5
    assert metrics["reward/mean_all"] == 0.75


def test_a_ratio_without_a_denominator_is_left_out():
    metrics = counter_metrics({}, wall_s=1.0)
    left_out = {"slot_utilisation", "prefill_share", "decode_share", "tail_share"}
    assert not {f"generator/{name}" for name in left_out} & metrics.keys()
    assert "reward/mean_all" not in metrics


class ScriptedEngine:
    """Four slots and a device that takes 2 s for each turn of a prefill and 1 s for a call of two steps; its clock is the test's.

    A completion ends after as many tokens as its prompt's number says.
    """

    num_slots, num_prompt_rows, most_members, num_replicas, num_steps_per_call = 4, 4, 1, 1, 2
    eos_token_ids = frozenset[int]()

    def __init__(self) -> None:
        self.now_s = self.free_s = 0.0
        self.left = np.zeros(4, int)

    def clock(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> Any:
        """Dispatches work, which takes the host 0.25 s; waiting for it moves the clock to its end."""
        self.now_s += 0.25
        end_s = self.free_s = max(self.free_s, self.now_s) + seconds

        def wait() -> None:
            self.now_s = max(self.now_s, end_s)

        return SimpleNamespace(block_until_ready=wait)

    def init_decode_state(self) -> Any:
        return None

    def prefill(self, params: Any, requests: list[PrefillRequest]) -> Iterator[Prefilled]:
        del params
        for number, request in enumerate(requests):
            yield Prefilled({number: Prefix((), 0, 0, 0, len(request.token_ids))}, self.work(2.0))

    def bulk_insert(self, prefix: Prefix, state: Any, requests: Any) -> Any:
        del prefix
        for request in requests:
            self.left[request.slot] = request.max_new_tokens
        return state

    def fit(self, state: Any, num_prompt_tokens: int, num_new_tokens: int) -> Any:
        del num_prompt_tokens, num_new_tokens
        return state

    def generate(self, params: Any, state: Any, *, is_truncated: bool) -> Any:
        del params, is_truncated
        emitted = np.array([self.left > 0, self.left > 1])
        self.left = np.maximum(self.left - 2, 0)
        done, is_live = self.work(1.0), self.left > 0

        def to_host() -> ResultTokens:
            done.block_until_ready()
            return ResultTokens(np.where(emitted, 5, -1).astype(np.int32), np.zeros((2, 4), np.float32), emitted, is_live)

        return state, SimpleNamespace(to_host=to_host)

    def release(self, state: Any, slots: Any) -> Any:
        del slots
        return state


@pytest.mark.parametrize("dispatch_ahead", [0, 1])
def test_the_seconds_of_prefill_decode_and_tail_are_the_devices(dispatch_ahead):
    """Two prompts, 4 s in all; then calls that begin with 2, 2, 1 and 1 of 4 slots live, of which the last two are the tail.

    With the next call dispatched before the last is read, the host's quarters of a second pass while the device works.
    """
    engine: Any = ScriptedEngine()
    slots = SlotScheduler(engine, {}, 0, dispatch_ahead=dispatch_ahead, clock=engine.clock)
    for number, num_tokens in enumerate((4, 8)):
        prompt = Prompt(prompt_id=number, token_ids=np.arange(3, dtype=np.int32), text="")
        slots.submit(
            [CompletionRequest(ticket=number, prompt=prompt, sample_index=0, sampling=SamplingConfig(), max_new_tokens=num_tokens)]
        )
    while not slots.is_idle:
        slots.step()
    counters = slots.take_counters()
    assert (counters.num_kept_tokens, counters.num_slot_steps, counters.num_prefill_tokens) == (12, 4 * 2 * 4, 6)
    assert (counters.prefill_s, counters.decode_s, counters.tail_s) == (4.0, 4.0, 2.0)
    assert engine.now_s == 8.25 + (0.75 if dispatch_ahead == 0 else 0.0)
