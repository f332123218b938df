"""GSPO: PPO's clip on the ratio of whole sequences, with the length taken out.

    s_i = (π(y_i | x) / μ(y_i | x))^(1/|y_i|) = exp(mean over t of log π_t − log μ_t)
    objective = Σ_i min(s_i · A_i, clip(s_i, 1 − clip_low, 1 + clip_high) · A_i)

Source: Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071. The reward is one per sequence, so the correction is as
well; a geometric mean of ratios keeps s near 1 whatever the length, so clip ranges are about a thousand times narrower than PPO's (3e-4
and 4e-4 in the paper, which are the defaults, for data a few minibatches old). s is not the importance ratio of the sequence; for stale
data the clip does the work, and the share of clipped tokens says how much of a batch is left: widen the range when it is high.

Where the gradient flows: through s_i, whose derivative is s_i · (1/|y_i|) · Σ_t ∇log π_t, so that every token of a sequence has the same
weight. A clipped sequence has no gradient at all.

The sum over a sequence is taken over its tokens, each with its token weight: `normalisation = "sequence_mean"` gives the paper's objective,
`token_mean` counts a sequence in proportion to its length. With sequences of one token it is PPO-clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked
from llamarl_jax.losses.policy_gradient import clipped_share
from llamarl_jax.losses.ppo import clipped_objective
from llamarl_jax.losses.ratios import check_clip_range, saturate
from llamarl_jax.losses.segments import segment_mean


@dataclass(frozen=True, kw_only=True)
class GspoConfig:
    """GSPO (arXiv 2507.18071): clip on the geometric-mean ratio of each sequence."""

    clip_low: float = 3e-4
    """Distance of the lower end of the trust region below a sequence ratio of 1."""
    clip_high: float = 4e-4
    """Distance of the upper end above 1."""

    is_off_policy_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · min(s A_t, clip(s) A_t) with s of the sequence of token t."""
        return gspo(inputs, self.clip_low, self.clip_high)


def gspo(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutput:
    """Returns −Σ_t w_t · min(s A_t, clip(s, 1 − clip_low, 1 + clip_high) A_t), with s of the sequence of token t and token weights w."""
    inputs = masked(inputs)
    mean_log_ratio = segment_mean(saturate(inputs.logprobs - inputs.behaviour_logprobs), inputs.loss_mask, inputs.segment_ids)
    objective, is_clipped = clipped_objective(jnp.exp(mean_log_ratio), inputs.advantages, clip_low, clip_high)
    return LossOutput(-jnp.sum(inputs.token_weights * objective), clipped_share(inputs, is_clipped))
