"""Sums over the trajectories that are packed into a row.

Running sums are made by doubling: after the steps 1, 2, 4, … each token holds the sum of the last 2, 4, 8, … tokens of its segment. One
pass from each side gives the sum of the whole segment at every token. Work is O(L log L), the memory is [B, L], the number of segments
need not be known, rows stay independent (so that sharded rows need no communication), and the order of additions is fixed. A scatter-add
would not fix it on a GPU, and differences of one running sum would lose the digits of short segments behind long ones.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def segment_sum(values: Float[Array, "B L"], segment_ids: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns at every token the sum of `values` over its segment.

    Args:
        values: finite numbers.
        segment_ids: equal ids must be contiguous; padding (0) counts as a segment wherever it stands.
    """
    up_to = _running_sum(values, segment_ids)
    onward = _running_sum(values[:, ::-1], segment_ids[:, ::-1])[:, ::-1]
    return up_to + (onward - values)


def segment_mean(values: Float[Array, "B L"], loss_mask: Float[Array, "B L"], segment_ids: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns at every token the mean of `values` over the loss tokens of its segment; 0 where a segment has none.

    Args:
        values: must be 0 where the mask is 0.
        loss_mask: 1 on the tokens that count.
        segment_ids: see `segment_sum`.
    """
    return segment_sum(values, segment_ids) / jnp.maximum(segment_sum(loss_mask, segment_ids), 1.0)


def _running_sum(values: Float[Array, "B L"], segment_ids: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns the sum from the start of each token's segment up to it."""
    distance = 1
    while distance < values.shape[1]:
        # Segments are contiguous, so equal ids at both ends mean one segment in between.
        is_same = segment_ids[:, distance:] == segment_ids[:, :-distance]
        earlier = jnp.where(is_same, values[:, :-distance], 0.0)
        values = values + jnp.pad(earlier, ((0, 0), (distance, 0)))
        distance *= 2
    return values
