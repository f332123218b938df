"""Packs trajectories of different lengths into rows of one length (first-fit decreasing), and takes them out again.

Packed trajectories do not see each other: the model masks by `segment_ids` and `positions` restart at 0. Every per-token array stays
aligned to the token that it describes. The result is the same for the same input; ties keep the input's order.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from llamarl_jax.types import Trajectory, TrajectoryBatch, TrajectoryGroup


class Place(NamedTuple):
    """Where a trajectory lies in the batch: row, first token, and its prompt's and whole length."""

    row: int
    start: int
    num_prompt_tokens: int
    num_tokens: int


class _Item(NamedTuple):
    prompt_ids: np.ndarray
    trajectory: Trajectory

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.trajectory.completion.token_ids)


def pack(
    groups: Sequence[TrajectoryGroup], *, row_length: int, num_rows_multiple: int, step: int, is_packed: bool = True
) -> tuple[TrajectoryBatch, list[Place]]:
    """Returns a NumPy batch [B, L] and each trajectory's place, in the order of groups and their trajectories.

    Args:
        row_length: L.
        num_rows_multiple: B is rounded up to a multiple of it with empty rows.
        step: the optimizer step that trains on the batch; staleness is step − version.
        is_packed: False gives each trajectory a row of its own.

    Raises:
        ValueError: a trajectory is longer than a row.
    """
    items = [_Item(group.prompt.token_ids, trajectory) for group in groups for trajectory in group.trajectories]
    longest = max((item.num_tokens for item in items), default=0)
    if longest > row_length:
        raise ValueError(f"a trajectory of {longest} tokens does not fit a row of {row_length}; raise trainer.row_length")
    places = _first_fit(items, row_length if is_packed else 0)
    num_rows = max((place.row + 1 for place in places), default=0)
    num_rows = max(1, -(-num_rows // num_rows_multiple)) * num_rows_multiple
    batch = _empty(num_rows, row_length)
    next_segment = [0] * num_rows
    for place, item in sorted(zip(places, items, strict=True), key=lambda pair: pair[0]):  # so that ids rise along a row
        next_segment[place.row] += 1
        _write(batch, item, place, next_segment[place.row], step)
    return batch, places


def unpack(array: ArrayLike, place: Place) -> np.ndarray:
    """Returns the entries of one [B, L] array that belong to the completion at `place`."""
    return np.asarray(array)[place.row, place.start + place.num_prompt_tokens : place.start + place.num_tokens]


def _first_fit(items: Sequence[_Item], row_length: int) -> list[Place]:
    """Places the longest first, each in the first row with room; row_length 0 opens a row for each."""
    used: list[int] = []
    places: dict[int, Place] = {}
    order = sorted(range(len(items)), key=lambda i: -items[i].num_tokens) if row_length else range(len(items))
    for index in order:
        size = items[index].num_tokens
        row = next((r for r, taken in enumerate(used) if taken + size <= row_length), len(used))
        if row == len(used):
            used.append(0)
        places[index] = Place(row, used[row], len(items[index].prompt_ids), size)
        used[row] += size
    return [places[i] for i in range(len(items))]


def _empty(num_rows: int, row_length: int) -> TrajectoryBatch:
    shape = (num_rows, row_length)
    return TrajectoryBatch(
        token_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.float32),
        behaviour_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        staleness=np.full(shape, -1, np.int32),
    )


def _write(batch: TrajectoryBatch, item: _Item, place: Place, segment: int, step: int) -> None:
    completion = item.trajectory.completion
    whole = (place.row, slice(place.start, place.start + place.num_tokens))
    answer = (place.row, slice(place.start + place.num_prompt_tokens, place.start + place.num_tokens))
    batch.token_ids[whole] = np.concatenate([item.prompt_ids, completion.token_ids])
    batch.positions[whole] = np.arange(place.num_tokens)
    batch.segment_ids[whole] = segment
    batch.loss_mask[answer] = 1.0
    batch.behaviour_logprobs[answer] = completion.behaviour_logprobs
    batch.advantages[answer] = item.trajectory.advantage
    batch.staleness[answer] = step - completion.weight_versions
