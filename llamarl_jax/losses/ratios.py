"""Ratios of probabilities that cannot overflow.

exp(x) is infinite in float32 from x = 89 on, and one infinite ratio makes the whole gradient NaN. Log-ratios therefore saturate at
±`MAX_LOG_RATIO`. At 20 a ratio is at most 4.9e8, so that its square, summed over a batch for the effective sample size, still fits. Ratios
met in training lie far inside; there nothing changes, not even the rounding.

Only the value saturates. The derivative stays 1, where `jnp.clip` has 0: a token whose probability rose too far and whose advantage is
negative must still be pushed down.

Dimensions: `*shape` is the same for both arguments, [B, L] in the losses.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0


@jax.custom_jvp
def saturate(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the value clipped to ±MAX_LOG_RATIO, with derivative 1 everywhere."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@saturate.defjvp
def _saturate_jvp(primals, tangents):
    return saturate(*primals), tangents[0]


def importance_ratio(logprobs: Float[Array, "*shape"], other_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns exp(logprobs − other_logprobs), saturated; its derivative by `logprobs` is the ratio itself."""
    return jnp.exp(saturate(logprobs - other_logprobs))


def check_cap(name: str, cap: float) -> None:
    """Checks the upper limit of an importance ratio.

    Raises:
        ValueError: the cap is below 1 or NaN, so that even on-policy tokens, whose ratio is 1, would be cut.
    """
    if math.isnan(cap) or cap < 1:
        raise ValueError(f"{name} = {cap} cuts even on-policy tokens, whose ratio is 1; choose at least 1 (float('inf') for no limit)")


def check_clip_range(clip_low: float, clip_high: float) -> None:
    """Checks the distances of a clip range [1 − clip_low, 1 + clip_high] from 1.

    Raises:
        ValueError: a distance is negative or NaN, or the lower end is below 0.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low = {clip_low} and clip_high = {clip_high} are distances from a ratio of 1; choose 0 ≤ clip_low ≤ 1 and clip_high ≥ 0"
        )
