"""Truncated importance sampling, per token or per sequence, and masking of sequences that drifted too far.

    token level:     update direction = Σ_t min(π_t/μ_t, cap) · A · ∇log π_t
    sequence level:  update direction = Σ_i min(Π_t π_t/μ_t, cap) · A_i · Σ_t ∇log π_t
    geometric mask:  update direction = Σ_i 1[low ≤ g_i ≤ high] · A_i · Σ_t min(π_t/μ_t, cap) · ∇log π_t,
                     g_i = exp(mean over t of log π_t − log μ_t)

Truncation: Ionides, "Truncated Importance Sampling", Journal of Computational and Graphical Statistics 17, 2008,
https://doi.org/10.1198/106186008X320456; per step in reinforcement learning: Espeholt et al., "IMPALA", arXiv 1802.01561; for a sampler
that disagrees with the trainer: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (web article).
Sequence level and geometric mask: Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
Mismatch", 2025 (web article).

Which one: the token weight corrects the choice of a token but not how often its prefix occurs; bounded variance, some bias (AIPO is
this). The sequence weight is unbiased up to the cap, but Π_t spreads exponentially with length: on long completions most weights are near
0 and the rest at the cap. The geometric mask has no dependence on length; it drops a whole sequence when the average token left the
range, the sign of a sequence that μ produced from a state π no longer knows, and corrects the rest per token.

A masked sequence has no gradient but still counts in the loss's denominator, which is fixed before the policy is evaluated: a batch of
which half is masked makes half the step. `ratio/clipped_share` is the share of loss tokens with a capped weight or in a masked sequence.

Where the gradient flows: only through log π; weights and masks are behind a stop-gradient.

Each token's log-ratio saturates at ±20 before it enters a sum or mean, and a sum once more before exp (`ratios.py`): a token that μ could
not have produced then makes no infinity, and two of them no NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked
from llamarl_jax.losses.policy_gradient import weighted_policy_gradient
from llamarl_jax.losses.ratios import check_cap, importance_ratio, saturate
from llamarl_jax.losses.segments import segment_mean, segment_sum


@dataclass(frozen=True, kw_only=True)
class TruncatedIsConfig:
    """Truncated importance sampling: weight π/μ of the token, or of its whole sequence, capped from above."""

    level: Literal["token", "sequence"] = "token"
    """Whether a ratio is taken per token or as the product over a trajectory's loss tokens."""
    cap: float = 2.0
    """Largest importance weight; inf never caps."""

    is_off_policy_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · sg(min(ratio, cap)) · A_t · log π_t."""
        return (token_truncated_is if self.level == "token" else sequence_truncated_is)(inputs, self.cap)


@dataclass(frozen=True, kw_only=True)
class GeometricMaskConfig:
    """Drops sequences whose geometric-mean ratio leaves [low, high]; the others have token-level truncated weights."""

    low: float = 0.9
    """Smallest geometric mean of π/μ over a trajectory that is still trained on."""
    high: float = 1.1
    """Largest geometric mean that is still trained on."""
    cap: float = 2.0
    """Largest importance weight of a token; inf never caps."""

    is_off_policy_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(
                f"low = {self.low} and high = {self.high} mask even on-policy sequences, whose ratio is 1; choose low ≤ 1 ≤ high"
            )

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · sg(1[low ≤ g ≤ high] · min(π_t/μ_t, cap)) · A_t · log π_t."""
        return geometric_mask(inputs, self.low, self.high, self.cap)


def token_truncated_is(inputs: LossInputs, cap: float) -> LossOutput:
    """Returns −Σ_t w_t · sg(min(π_t/μ_t, cap)) · A_t · log π_t, with token weights w."""
    inputs = masked(inputs)
    ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs)
    return weighted_policy_gradient(inputs, jnp.minimum(ratio, cap), is_clipped=ratio > cap)


def sequence_truncated_is(inputs: LossInputs, cap: float) -> LossOutput:
    """Returns −Σ_t w_t · sg(min(Π_u π_u/μ_u, cap)) · A_t · log π_t, the product over the loss tokens of token t's sequence."""
    inputs = masked(inputs)
    ratio = jnp.exp(saturate(segment_sum(saturate(inputs.logprobs - inputs.behaviour_logprobs), inputs.segment_ids)))
    return weighted_policy_gradient(inputs, jnp.minimum(ratio, cap), is_clipped=ratio > cap)


def geometric_mask(inputs: LossInputs, low: float, high: float, cap: float) -> LossOutput:
    """Returns −Σ_t w_t · sg(1[low ≤ g ≤ high] · min(π_t/μ_t, cap)) · A_t · log π_t, g the geometric-mean ratio of token t's sequence."""
    inputs = masked(inputs)
    ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs)
    mean_log_ratio = segment_mean(saturate(inputs.logprobs - inputs.behaviour_logprobs), inputs.loss_mask, inputs.segment_ids)
    is_dropped = (mean_log_ratio < jnp.log(low)) | (mean_log_ratio > jnp.log(high))
    weight = jnp.where(is_dropped, 0.0, jnp.minimum(ratio, cap))
    return weighted_policy_gradient(inputs, weight, is_clipped=is_dropped | (ratio > cap))
