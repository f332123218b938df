from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl_jax.losses.advantages import AdvantageConfig, advantages
from llamarl_jax.rewards.api import RewardConfig, RewardInput, RewardTerm
from llamarl_jax.rewards.pool import Failure
from llamarl_jax.rewards.scoring import RewardScorer
from llamarl_jax.types import Completion, CompletionGroup, DroppedGroup, FinishReason, Prompt, TrajectoryGroup
from tests.rewards import hostile


class _Letters:
    def decode(self, ids: np.ndarray) -> str:
        return "".join(chr(97 + int(i)) for i in ids)


class _FakePool:
    """Scores in this process: the number of letters, twice and once; a completion that holds a `z` fails. Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[RewardInput] = []
        self.num_calls = 0

    def score(self, samples):
        self.asked += samples
        self.num_calls += 1
        return [
            Failure("exception", "z")
            if "z" in s.completion_text
            else {"a": float(len(s.completion_text)), "b": float(s.completion_text == "c")}
            for s in samples
        ]


def _scorer(pool: _FakePool, **changes) -> RewardScorer:
    terms = (RewardTerm(name="a", function=hostile.length, weight=2.0), RewardTerm(name="b", function=hostile.length, weight=-0.5))
    config = RewardConfig(terms=terms, **changes)
    return RewardScorer(config, _Letters(), pool, partial(advantages, AdvantageConfig()))  # pyright: ignore[reportArgumentType]


def _group(index: int, texts: list[str]) -> CompletionGroup:
    prompt = Prompt(prompt_id=index, token_ids=np.zeros(1, np.int32), text=f"p{index}", reference=f"r{index}", metadata={"m": index})
    completions = tuple(
        Completion(
            sample_index=i,
            token_ids=np.array([ord(c) - 97 for c in text], np.int32),
            behaviour_logprobs=np.zeros(len(text), np.float32),
            weight_versions=np.zeros(len(text), np.int32),
            finish_reason=FinishReason.LENGTH,
        )
        for i, text in enumerate(texts)
    )
    return CompletionGroup(prompt=prompt, admission_index=10 + index, version_class=3, completions=completions)


def test_weighted_terms_become_rewards_and_advantages():
    pool = _FakePool()
    (group,) = _scorer(pool).score_groups([_group(0, ["c", "ab", "abc"])])
    assert isinstance(group, TrajectoryGroup)
    assert [t.reward for t in group.trajectories] == [1.5, 4.0, 6.0]
    assert [t.reward_terms for t in group.trajectories] == [{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 0.0}, {"a": 3.0, "b": 0.0}]
    mean = (1.5 + 4.0 + 6.0) / 3
    assert [t.advantage for t in group.trajectories] == pytest.approx([1.5 - mean, 4 - mean, 6 - mean])
    assert (group.admission_index, group.version_class, group.num_excluded) == (10, 3, 0)
    assert pool.asked[0] == RewardInput(prompt_text="p0", completion_text="c", reference="r0", metadata={"m": 0}, finish_reason="length")


texts = st.text("abcz", min_size=1, max_size=4)


@given(st.lists(st.lists(texts, min_size=1, max_size=6), min_size=1, max_size=5), st.booleans())
def test_each_group_is_judged_as_if_it_were_alone(all_texts, drops):
    """Groups of unequal sizes, duplicates and failures: advantages equal an oracle, one pool call serves all, nothing is mixed up."""
    pool = _FakePool()
    results = _scorer(pool, drops_zero_variance=drops).score_groups([_group(i, group) for i, group in enumerate(all_texts)])
    assert pool.num_calls == 1
    assert len(results) == len(all_texts)
    for i, (result, group) in enumerate(zip(results, all_texts, strict=True)):
        assert result.admission_index == 10 + i
        kept = [(j, text) for j, text in enumerate(group) if "z" not in text]
        rewards = np.array([2.0 * len(text) - 0.5 * (text == "c") for _, text in kept])
        if len(kept) < 2 or (drops and len(set(rewards)) == 1):
            assert isinstance(result, DroppedGroup)
            continue
        assert isinstance(result, TrajectoryGroup)
        assert [t.completion.sample_index for t in result.trajectories] == [j for j, _ in kept]
        assert [t.reward for t in result.trajectories] == rewards.tolist()
        np.testing.assert_allclose([t.advantage for t in result.trajectories], rewards - rewards.mean(), atol=1e-6)
        assert result.num_excluded == len(group) - len(kept)


def test_a_dropped_group_says_why():
    scorer = _scorer(_FakePool(), drops_zero_variance=True)
    failed, equal = scorer.score_groups([_group(0, ["az", "z", "a"]), _group(1, ["ab", "ba"])])
    assert failed == DroppedGroup(admission_index=10, reason="2 of 3 completions failed", num_excluded=2)
    assert equal == DroppedGroup(admission_index=11, reason="all rewards are 4.0")
    (kept,) = _scorer(_FakePool()).score_groups([_group(1, ["ab", "ba"])])
    assert isinstance(kept, TrajectoryGroup)
    assert [t.advantage for t in kept.trajectories] == [0.0, 0.0]


def test_single_completions_for_evaluation():
    group = _group(0, ["c", "z", "ab"])
    assert _scorer(_FakePool()).score([(group.prompt, completion) for completion in group.completions]) == [1.5, None, 4.0]
    assert _scorer(_FakePool()).score_groups([]) == []
    assert _scorer(_FakePool()).text_of(group.completions[2]) == "ab"
