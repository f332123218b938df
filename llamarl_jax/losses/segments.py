"""Sums over the trajectories that are packed into a row.

A segmented scan from each side gives, for every token, the sum from the start of its segment up to it and from it to the end; together
they are the sum of the whole segment. Work is O(L log L), the memory is [B, L], no number of segments need be known, rows stay
independent (so that the scan needs no communication when rows are sharded), and the order of additions is fixed. A scatter-add would not
fix it on a GPU, and differences of one running sum would lose the digits of short segments behind long ones.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Running = tuple[Float[Array, "B _"], Bool[Array, "B _"]]


def segment_sum(values: Float[Array, "B L"], segment_ids: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns at every token the sum of `values` over its segment.

    Args:
        values: finite numbers.
        segment_ids: equal ids must be contiguous; padding (0) counts as a segment wherever it stands.
    """
    is_border = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_first = jnp.pad(is_border, ((0, 0), (1, 0)), constant_values=True)
    is_last = jnp.pad(is_border, ((0, 0), (0, 1)), constant_values=True)
    up_to, _ = jax.lax.associative_scan(_add_unless_new, (values, is_first), axis=1)
    onward, _ = jax.lax.associative_scan(_add_unless_new, (values, is_last), axis=1, reverse=True)
    return up_to + (onward - values)


def segment_mean(values: Float[Array, "B L"], loss_mask: Float[Array, "B L"], segment_ids: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns at every token the mean of `values` over the loss tokens of its segment; 0 where a segment has none.

    Args:
        values: must be 0 where the mask is 0.
        loss_mask: 1 on the tokens that count.
        segment_ids: see `segment_sum`.
    """
    return segment_sum(values, segment_ids) / jnp.maximum(segment_sum(loss_mask, segment_ids), 1.0)


def _add_unless_new(before: Running, here: Running) -> Running:
    """Adds the sum before, unless a segment begins in between."""
    (sum_before, is_new_before), (sum_here, is_new_here) = before, here
    return jnp.where(is_new_here, sum_here, sum_before + sum_here), is_new_before | is_new_here
