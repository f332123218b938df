"""Packs trajectories of different lengths into rows of one length (first-fit decreasing), and takes them out again.

Packed trajectories do not see each other: the model masks by `segment_ids` and `positions` restart at 0. Every per-token array stays
aligned to the token that it describes. The result is the same for the same input; ties keep the input's order.

With shared prompts a row holds the prompt of a group once, as a segment of its own, and the completions behind it see it through
`prefix_ids`. The last prompt token is not part of that segment: each completion's segment begins with a copy of it, because the token at
t − 1 is what predicts the token at t, and one prompt token cannot predict G first tokens. (The decoder cuts prompts at the same place.)
For a prompt of P tokens and G completions of T that makes (P − 1) + G · (1 + T) tokens instead of G · (P + T). Nothing else changes: a
completion token attends to the same keys at the same positions.

Dimensions: B rows, L tokens of a row, P prompt tokens, G completions of a group, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from llamarl_jax.types import Trajectory, TrajectoryBatch, TrajectoryGroup

Packing = Literal["shared_prompts", "trajectories", "none"]


class Place(NamedTuple):
    """Where a trajectory's segment lies: row, first token, its prompt tokens (1 if the prompt is shared), and its tokens in all."""

    row: int
    start: int
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class _Item:
    """A trajectory to place; the first `num_shared` tokens of its prompt may lie in another segment, that of its `group`."""

    index: int
    group: int
    prompt_ids: np.ndarray
    trajectory: Trajectory
    num_shared: int

    @property
    def num_own_tokens(self) -> int:
        return len(self.prompt_ids) - self.num_shared + len(self.trajectory.completion.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_shared + self.num_own_tokens


@dataclass
class _Row:
    """A row being filled: its items in order, the tokens taken, and the groups whose prompt it holds."""

    items: list[_Item] = field(default_factory=list)
    used: int = 0
    groups: set[int] = field(default_factory=set)

    def cost(self, item: _Item) -> int:
        """Returns the tokens that `item` would take here."""
        return item.num_own_tokens if item.group in self.groups else item.num_tokens

    def add(self, item: _Item) -> None:
        self.used += self.cost(item)
        self.items.append(item)
        if item.num_shared:
            self.groups.add(item.group)


def pack(
    groups: Sequence[TrajectoryGroup], *, row_length: int, num_rows_multiple: int, step: int, packing: Packing = "shared_prompts"
) -> tuple[TrajectoryBatch, list[Place]]:
    """Returns a NumPy batch [B, L] and each trajectory's place, in the order of groups and their trajectories.

    Args:
        row_length: L.
        num_rows_multiple: B is rounded up to a multiple of it with empty rows.
        step: the optimizer step that trains on the batch; staleness is step − version.
        packing: `none` gives each trajectory a row of its own; the others are told apart in the module docstring.

    Raises:
        ValueError: a trajectory is longer than a row.
    """
    items = list(_items(groups, shares_prompts=packing == "shared_prompts"))
    longest = max((item.num_tokens for item in items), default=0)
    if longest > row_length:
        raise ValueError(f"a trajectory of {longest} tokens does not fit a row of {row_length}; raise trainer.row_length")
    rows = [_Row([item]) for item in items] if packing == "none" else _first_fit(items, row_length)
    batch = _empty(max(1, -(-len(rows) // num_rows_multiple)) * num_rows_multiple, row_length)
    places: dict[int, Place] = {}
    for number, row in enumerate(rows):
        _write_row(TrajectoryBatch(*(array[number] for array in batch)), row.items, number, step, places)
    return batch, [places[item.index] for item in items]


def unpack(array: ArrayLike, place: Place) -> np.ndarray:
    """Returns the entries of one [B, L] array that belong to the completion at `place`."""
    return np.asarray(array)[place.row, place.start + place.num_prompt_tokens : place.start + place.num_tokens]


def _items(groups: Sequence[TrajectoryGroup], *, shares_prompts: bool) -> Iterator[_Item]:
    index = 0
    for number, group in enumerate(groups):
        num_shared = len(group.prompt.token_ids) - 1 if shares_prompts and len(group.trajectories) > 1 else 0
        for trajectory in group.trajectories:
            yield _Item(index, number, group.prompt.token_ids, trajectory, num_shared)
            index += 1


def _first_fit(items: Sequence[_Item], row_length: int) -> list[_Row]:
    """Places the longest first, each in the first row that has its prompt and room, else in the first row with room for both.

    Items that share a prompt come one after the other, groups with the most tokens first, so that a prompt is in few rows.
    """
    group_size: dict[int, int] = {}
    for item in items:
        if item.num_shared:
            group_size[item.group] = group_size.get(item.group, item.num_shared) + item.num_own_tokens

    def order(item: _Item) -> tuple[int, int, int, int]:
        return (-group_size.get(item.group, item.num_tokens), item.group if item.num_shared else -1, -item.num_tokens, item.index)

    rows: list[_Row] = []
    for item in sorted(items, key=order):
        fitting = [row for row in rows if row.used + row.cost(item) <= row_length]
        row = next((row for row in fitting if item.group in row.groups), fitting[0] if fitting else None)
        if row is None:
            rows.append(row := _Row())
        row.add(item)
    return rows


def _empty(num_rows: int, row_length: int) -> TrajectoryBatch:
    shape = (num_rows, row_length)
    return TrajectoryBatch(
        token_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        prefix_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.float32),
        behaviour_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        staleness=np.full(shape, -1, np.int32),
    )


def _write_row(row: TrajectoryBatch, items: Sequence[_Item], number: int, step: int, places: dict[int, Place]) -> None:
    """Fills one row ([L] views of the batch) and notes each item's place; a shared prompt comes before the first that needs it."""
    start, segment = 0, 0
    prefixes: dict[int, int] = {}
    for item in items:
        if item.num_shared and item.group not in prefixes:
            start, segment = start + item.num_shared, segment + 1
            whole = slice(start - item.num_shared, start)
            row.token_ids[whole] = item.prompt_ids[: item.num_shared]
            row.positions[whole] = np.arange(item.num_shared)
            row.segment_ids[whole] = segment
            prefixes[item.group] = segment
        segment += 1
        place = Place(number, start, len(item.prompt_ids) - item.num_shared, item.num_own_tokens)
        _write(row, item, place, segment, prefixes.get(item.group, 0), step)
        places[item.index] = place
        start += place.num_tokens


def _write(row: TrajectoryBatch, item: _Item, place: Place, segment: int, prefix: int, step: int) -> None:
    completion = item.trajectory.completion
    whole = slice(place.start, place.start + place.num_tokens)
    answer = slice(place.start + place.num_prompt_tokens, place.start + place.num_tokens)
    row.token_ids[whole] = np.concatenate([item.prompt_ids[item.num_shared :], completion.token_ids])
    row.positions[whole] = np.arange(item.num_shared, item.num_tokens)
    row.segment_ids[whole] = segment
    row.prefix_ids[whole] = prefix
    row.loss_mask[answer] = 1.0
    row.behaviour_logprobs[answer] = completion.behaviour_logprobs
    row.advantages[answer] = item.trajectory.advantage
    row.staleness[answer] = step - completion.weight_versions
