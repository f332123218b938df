"""CISPO: clips the importance weight itself and keeps the gradient of every token.

    update direction = Σ_t clip(π_t/μ_t, 1 − clip_low, 1 + clip_high) · A · ∇log π_t

Source: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv 2506.13585. There the lower end is not
used (clip_low = 1 here) and only clip_high is tuned. A rare token that starts a new line of thought soon has a large ratio; PPO's clip
would silence just these tokens.

Where the gradient flows: only through log π; the clipped ratio is a stop-gradient weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked
from llamarl_jax.losses.policy_gradient import weighted_policy_gradient
from llamarl_jax.losses.ratios import check_clip_range, importance_ratio


@dataclass(frozen=True, kw_only=True)
class CispoConfig:
    """CISPO (MiniMax-M1, arXiv 2506.13585): importance weight clipped to [1 − clip_low, 1 + clip_high]."""

    clip_low: float = 1.0
    """Distance of the smallest weight below 1; 1 leaves small ratios as they are."""
    clip_high: float = 3.0
    """Distance of the largest weight above 1."""

    is_off_policy_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · sg(clip(π_t/μ_t)) · A_t · log π_t."""
        return cispo(inputs, self.clip_low, self.clip_high)


def cispo(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutput:
    """Returns −Σ_t w_t · sg(clip(π_t/μ_t, 1 − clip_low, 1 + clip_high)) · A_t · log π_t, with token weights w."""
    inputs = masked(inputs)
    ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs)
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return weighted_policy_gradient(inputs, weight, is_clipped=weight != ratio)
