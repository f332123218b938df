from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.data.packing import Packing, pack, unpack
from llamarl_jax.types import Completion, FinishReason, Prompt, Trajectory, TrajectoryGroup

STEP = 9


def _group(index: int, lengths: list[tuple[int, int]]) -> TrajectoryGroup:
    random = np.random.default_rng(index)
    num_prompt = lengths[0][0]
    trajectories = tuple(
        Trajectory(
            completion=Completion(
                sample_index=sample,
                token_ids=random.integers(1, 1000, num_new).astype(np.int32),
                behaviour_logprobs=-random.random(num_new).astype(np.float32) - 0.1,
                weight_versions=random.integers(5, STEP + 1, num_new).astype(np.int32),
                finish_reason=FinishReason.STOP,
            ),
            reward=0.0,
            advantage=float(np.float32(random.normal())),
            reward_terms={},
        )
        for sample, (_, num_new) in enumerate(lengths)
    )
    prompt = Prompt(prompt_id=index, token_ids=random.integers(1, 1000, num_prompt).astype(np.int32), text="")
    return TrajectoryGroup(prompt=prompt, admission_index=index, version_class=5, trajectories=trajectories)


groups = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=5)).map(lambda x: [(x[0], n) for n in x[1]]),
    min_size=1,
    max_size=6,
).map(lambda all_lengths: [_group(i, lengths) for i, lengths in enumerate(all_lengths)])


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(32, 70), st.integers(1, 4), st.sampled_from(["shared_prompts", "trajectories", "none"]))
def test_every_token_comes_back_with_its_own_numbers(groups, row_length, multiple, packing):
    batch, places = pack(groups, row_length=row_length, num_rows_multiple=multiple, step=STEP, packing=packing)
    trajectories = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
    assert len(places) == len(trajectories)
    assert batch.token_ids.shape[0] % multiple == 0
    for (prompt, trajectory), place in zip(trajectories, places, strict=True):
        completion = trajectory.completion
        np.testing.assert_array_equal(unpack(batch.token_ids, place), completion.token_ids)
        np.testing.assert_array_equal(unpack(batch.behaviour_logprobs, place), completion.behaviour_logprobs)
        np.testing.assert_array_equal(unpack(batch.staleness, place), STEP - completion.weight_versions)
        np.testing.assert_array_equal(unpack(batch.advantages, place), np.float32(trajectory.advantage))
        np.testing.assert_array_equal(unpack(batch.loss_mask, place), 1)
        # The tokens that the completion may see, in order of position: exactly prompt and completion, from 0 on without a gap.
        row, last = place.row, place.start + place.num_tokens - 1
        is_own = batch.segment_ids[row] == batch.segment_ids[row, last]
        is_prefix = (batch.segment_ids[row] == batch.prefix_ids[row, last]) & (batch.segment_ids[row] > 0)
        seen = np.flatnonzero(is_own | is_prefix)
        assert seen.max() == last  # a prefix stands before those who see it, as the causal mask needs
        np.testing.assert_array_equal(batch.positions[row, seen], np.arange(len(seen)))
        np.testing.assert_array_equal(batch.token_ids[row, seen], np.concatenate([prompt.token_ids, completion.token_ids]))
        assert is_own.sum() == place.num_tokens
        assert len(set(batch.prefix_ids[row, is_own])) == 1
    # Nothing else is in the batch: segments are 1 … n in each row, and those that are no trajectory are prefixes that some token names.
    assert batch.loss_mask.sum() == sum(len(t.completion.token_ids) for _, t in trajectories)
    named = {(row, int(name)) for row, names in enumerate(batch.prefix_ids) for name in names if name}
    assert batch.segment_ids.max(axis=1).sum() == len(trajectories) + len(named)
    assert packing == "shared_prompts" or not named
    for array in (batch.behaviour_logprobs, batch.advantages):
        assert (array[batch.loss_mask == 0] == 0).all()


def test_packing_uses_fewer_rows_and_the_fallback_one_row_each():
    group = _group(0, [(4, 4)] * 6)
    shared, _ = pack([group], row_length=16, num_rows_multiple=1, step=STEP)
    packed, _ = pack([group], row_length=16, num_rows_multiple=1, step=STEP, packing="trajectories")
    alone, _ = pack([group], row_length=16, num_rows_multiple=1, step=STEP, packing="none")
    assert (len(shared.token_ids), len(packed.token_ids), len(alone.token_ids)) == (3, 3, 6)
    longer = [len(pack([group], row_length=33, num_rows_multiple=1, step=STEP, packing=p)[0].token_ids) for p in get_args(Packing)]
    assert longer == [1, 2, 6]  # 3 + 6 · (1 + 4) tokens; 6 · (4 + 4)
    padded, _ = pack([group], row_length=16, num_rows_multiple=4, step=STEP)
    assert len(padded.token_ids) == 4
    assert (padded.segment_ids[3] == 0).all()


def test_limit_minus_one_limit_and_above():
    for size in (15, 16):
        pack([_group(0, [(4, size - 4)])], row_length=16, num_rows_multiple=1, step=STEP)
    with pytest.raises(ValueError, match="a trajectory of 17 tokens does not fit a row of 16"):
        pack([_group(0, [(4, 13)])], row_length=16, num_rows_multiple=1, step=STEP)


def test_an_empty_batch_is_one_empty_microbatch():
    batch, places = pack([], row_length=8, num_rows_multiple=2, step=STEP)
    assert places == []
    assert batch.token_ids.shape == (2, 8)
    assert batch.loss_mask.sum() == 0


@settings(max_examples=40, deadline=None)
@given(groups, st.integers(32, 70), st.sampled_from(["shared_prompts", "trajectories"]))
def test_packing_repeats_itself_and_no_row_is_two_that_would_fit_into_one(groups, row_length, packing):
    batch, places = pack(groups, row_length=row_length, num_rows_multiple=1, step=STEP, packing=packing)
    again, places_again = pack(groups, row_length=row_length, num_rows_multiple=1, step=STEP, packing=packing)
    assert places == places_again
    for first, second in zip(batch, again, strict=True):
        np.testing.assert_array_equal(first, second)
    used = (batch.segment_ids > 0).sum(axis=1)
    assert all(used[i] + used[j] > row_length for i in range(len(used)) for j in range(i))
    for row in batch.segment_ids:  # trajectories lie side by side from the start of the row, padding behind them
        assert (np.diff(row[row > 0]) >= 0).all()
        assert (row[: (row > 0).sum()] > 0).all()


def test_a_worked_example():
    """Lengths 6 and 4 share the first row of 10, 5 opens the second; ties keep their order."""
    groups = [_group(0, [(2, 3)]), _group(1, [(2, 4), (2, 2)])]
    batch, places = pack(groups, row_length=10, num_rows_multiple=1, step=STEP, packing="trajectories")
    assert [tuple(place) for place in places] == [(1, 0, 2, 5), (0, 0, 2, 6), (0, 6, 2, 4)]
    assert batch.segment_ids.tolist() == [[1] * 6 + [2] * 4, [1] * 5 + [0] * 5]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 1, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert (batch.staleness[batch.loss_mask == 0] == -1).all()


def test_a_worked_example_with_a_shared_prompt():
    """Two completions of 4 and 2 behind a prompt of 3: its first two tokens once, its last one with each completion."""
    batch, places = pack([_group(0, [(3, 4), (3, 2)])], row_length=12, num_rows_multiple=1, step=STEP)
    assert [tuple(place) for place in places] == [(0, 2, 1, 5), (0, 7, 1, 3)]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 0, 0]]
    assert batch.prefix_ids.tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0]]


def test_a_prompt_of_one_token_or_with_one_completion_is_not_shared():
    for lengths in ([(1, 2), (1, 3)], [(5, 4)]):
        batch, _ = pack([_group(0, lengths)], row_length=12, num_rows_multiple=1, step=STEP)
        assert (batch.prefix_ids == 0).all()
