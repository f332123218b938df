import json

import numpy as np
import pytest

from llamarl_jax.schedule import RoundStart
from llamarl_jax.types import Completion, CompletionGroup, FinishReason, Prompt, Trajectory, TrajectoryGroup
from llamarl_jax.unfinished import Unfinished, from_plain, to_plain

PROMPTS = {index: Prompt(prompt_id=100 + index, token_ids=np.arange(3, dtype=np.int32), text="1+1=") for index in range(9)}


def completion(sample_index: int, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    random = np.random.default_rng(sample_index)
    logprobs = np.log(random.random(num_tokens, np.float32))
    return Completion(
        sample_index=sample_index,
        token_ids=random.integers(0, 1 << 31, num_tokens).astype(np.int32),
        behaviour_logprobs=np.where(np.arange(num_tokens) == 1, -np.inf, logprobs).astype(np.float32),
        weight_versions=np.arange(num_tokens, dtype=np.int32),
        finish_reason=reason,
    )


def trajectories(index: int) -> TrajectoryGroup:
    members = (
        Trajectory(completion=completion(0, 4), reward=0.1 + 0.2, advantage=-1 / 3, reward_terms={"digits": 0.5, "length": 1e-300}),
        Trajectory(completion=completion(2, 2), reward=1.0, advantage=1 / 3, reward_terms={}),
    )
    return TrajectoryGroup(prompt=PROMPTS[index], admission_index=index, version_class=2, trajectories=members, num_excluded=1)


@pytest.fixture
def unfinished() -> Unfinished:
    """Round 5: batches 3 and 4 wait, group 6 is judged and in none of them, two groups are being sampled."""
    return Unfinished(
        schedule=RoundStart(
            round_index=5,
            num_dropped=3,
            batches=((2,), (4,)),
            class_of={2: 1, 4: 2, 5: 2, 6: 3, 7: 3},
            completed=(6,),
        ),
        cursor={"next_position": 11, "outstanding": [10]},
        groups=(
            CompletionGroup(prompt=PROMPTS[5], admission_index=5, version_class=2, completions=(completion(1, 6),)),
            CompletionGroup(prompt=PROMPTS[7], admission_index=7, version_class=3, completions=()),
        ),
        running=((5, completion(0, 3, FinishReason.ABORTED)), (7, completion(0, 0, FinishReason.ABORTED))),
        trajectories=tuple(map(trajectories, (2, 4, 6))),
    )


def plain(value):
    """Arrays as bytes, so that dataclasses can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return {name: plain(item) for name, item in vars(value).items()} if hasattr(value, "__dataclass_fields__") else value


def test_a_record_survives_json_to_the_last_bit(unfinished):
    asked = []

    def prompt_of(index, prompt_id):
        asked.append((index, prompt_id))
        return PROMPTS[index]

    text = json.dumps(to_plain(unfinished), allow_nan=False)
    assert plain(from_plain(json.loads(text), prompt_of)) == plain(unfinished)
    assert sorted(asked) == [(index, 100 + index) for index in (2, 4, 5, 6, 7)]


def test_batches_that_are_trained_on_are_left_out(unfinished):
    assert unfinished.awaiting_trainer() == [2, 4, 6]
    later = unfinished.at_step(4)
    assert later.awaiting_trainer() == [4, 6]
    assert (later.schedule.batches, dict(later.schedule.class_of)) == (((4,),), {4: 2, 5: 2, 6: 3, 7: 3})
