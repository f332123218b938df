import threading
from collections.abc import Sequence

import numpy as np
import pytest

from llamarl_jax.channels import Channel, ChannelClosed
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.procedural import DigitPrompts
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.executors.reward import Reward
from llamarl_jax.losses.advantages import AdvantageConfig, advantages
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.rewards.api import RewardConfig, RewardTerm
from llamarl_jax.rewards.pool import RewardFailureError, RewardPool
from llamarl_jax.rewards.scoring import RewardScorer
from llamarl_jax.schedule import Schedule, ScheduleConfig, SharedSchedule
from llamarl_jax.types import Completion, CompletionGroup, FinishReason, TrajectoryGroup
from tests.data.characters import CharacterTokenizer
from tests.rewards import hostile

LONG_S = 60  # only a run that hangs waits so long


class Wiring:
    """The reward executor between its real neighbours: schedule, cursor, channels and one worker process."""

    def __init__(self, **changes) -> None:
        config = RewardConfig(terms=(RewardTerm(name="length", function=hostile.by_text),), **{"max_failure_share": 1.0, **changes})
        prompts = PromptsConfig(source=DigitPrompts(num_digits=1), template=PlainTemplate())
        tokenizer = CharacterTokenizer()
        self.pool = RewardPool(config)
        self.schedule = SharedSchedule(Schedule(ScheduleConfig(num_steps=1, groups_per_step=2, group_size=3, mode="in_flight")))
        self.cursor = PromptCursor(PromptStream(prompts, tokenizer, max_prompt_tokens=99, seed=0))  # pyright: ignore[reportArgumentType]
        self.completions, self.trajectories = Channel[CompletionGroup]("completions", 9), Channel[TrajectoryGroup]("trajectories", 9)
        self.counters, self.beats, self.timeline = Counters(), [], Timeline()
        self.reward = Reward(
            scorer=RewardScorer(config, tokenizer, self.pool, lambda rewards: advantages(AdvantageConfig(), rewards)),
            schedule=self.schedule,
            cursor=self.cursor,
            completions=self.completions,
            trajectories=self.trajectories,
            timeline=self.timeline,
            counters=self.counters,
            heartbeat=lambda: self.beats.append(1),
        )
        self.thread = threading.Thread(target=self.reward.run, daemon=True)
        self.results, self.states = [], []

    def send(self, texts: Sequence[str]) -> int:
        """Does what the generator does: admits a group, draws its prompt and hands over its completions."""
        index = self.schedule.admit(0).admission_index
        completions = tuple(
            Completion(
                sample_index=i,
                token_ids=np.array([ord(c) for c in text], np.int32),
                behaviour_logprobs=np.zeros(len(text), np.float32),
                weight_versions=np.zeros(len(text), np.int32),
                finish_reason=FinishReason.STOP,
            )
            for i, text in enumerate(texts)
        )
        group = CompletionGroup(prompt=self.cursor.draw(index), admission_index=index, version_class=0, completions=completions)
        self.completions.put(group)
        return index


@pytest.fixture(scope="module")
def wiring():
    """One whole run: a good group, one that is dropped, one that replaces it with a failed sample."""
    wiring = Wiring()
    with wiring.pool:
        wiring.thread.start()
        for texts in (["a", "ab", "abcd"], ["raise", "nan", "a"], ["raise", "abc", "a"]):
            index = wiring.send(texts)
            wiring.schedule.wait_until(lambda s, i=index: s.state().num_completed + s.state().num_dropped > i, timeout_s=LONG_S)
            wiring.states.append((wiring.schedule.state(), len(wiring.cursor.state()["outstanding"])))
        wiring.thread.join(LONG_S)
    wiring.results = wiring.trajectories.drain()
    return wiring


def test_groups_are_scored_in_order_and_go_on_unless_they_are_dropped(wiring):
    first, third = wiring.results
    assert [t.reward for t in first.trajectories] == [1, 2, 4]
    assert ([t.reward for t in third.trajectories], third.num_excluded, third.admission_index) == ([3, 1], 1, 2)


def test_the_schedule_and_the_cursor_know_before_the_trainer_does(wiring):
    counts = [(state.num_completed, state.num_dropped, num_outstanding) for state, num_outstanding in wiring.states]
    assert counts == [(1, 0, 1), (1, 1, 1), (2, 1, 2)]
    assert wiring.schedule.next_batch() == (0, 2)


def test_it_ends_when_no_group_can_be_needed_any_more(wiring):
    assert not wiring.thread.is_alive()
    assert wiring.schedule.is_exhausted
    assert len(wiring.beats) == 3


def test_what_it_did_is_counted_and_on_the_timeline(wiring):
    assert dict(wiring.counters.take()) == {"reward": 11, "scored": 5, "failed": 3, "dropped_groups": 1}
    assert {span.executor for span in wiring.timeline.spans()} == {"reward"}
    assert sum(span.kind == "score" for span in wiring.timeline.spans()) == 3


def test_too_many_failures_end_it_and_nothing_is_handed_on():
    wiring = Wiring(max_failure_share=0.5, min_failures=2)
    with wiring.pool:
        wiring.send(["raise", "raise", "a"])
        with pytest.raises(RewardFailureError, match=r"2 of 3 completions could not be scored \(2 × exception, such as: .*no such column"):
            wiring.reward.run()
    assert len(wiring.trajectories) == 0
    assert wiring.schedule.outstanding() == (0,)


def test_a_failure_elsewhere_ends_its_wait():
    wiring = Wiring()
    with wiring.pool:
        wiring.completions.close(KeyError("the generator died"))
        with pytest.raises(ChannelClosed, match="channel 'completions' was closed by KeyError: 'the generator died'"):
            wiring.reward.run()
