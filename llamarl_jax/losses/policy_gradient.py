"""The policy gradient with a given weight per token, and its plain form REINFORCE.

    update direction = Σ_t weight_t · A · ∇log π_t

AIPO, CISPO and truncated importance sampling differ only in their weight. REINFORCE has weight 1: Williams, "Simple Statistical
Gradient-Following Algorithms for Connectionist Reinforcement Learning", Machine Learning 8, 1992, https://doi.org/10.1007/BF00992696.

Where the gradient flows: only through log π; weights are behind a stop-gradient.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """Policy gradient without any correction: for on-policy data only (max_staleness 0, and a decoder that agrees with the trainer)."""

    is_off_policy_safe: ClassVar[bool] = False

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · A_t · log π_t."""
        return reinforce(inputs)


def reinforce(inputs: LossInputs) -> LossOutput:
    """Returns −Σ_t w_t · A_t · log π_t, with token weights w; only logprobs, advantages and mask are used."""
    inputs = masked(inputs)
    return weighted_policy_gradient(inputs, jnp.ones_like(inputs.logprobs), jnp.zeros_like(inputs.logprobs, bool))


def weighted_policy_gradient(inputs: LossInputs, weight: Float[Array, "B L"], is_clipped: Bool[Array, "B L"]) -> LossOutput:
    """Returns −Σ_t w_t · sg(weight_t) · A_t · log π_t, the form that all losses with a stop-gradient weight share.

    The value has no meaning beyond its gradient, Σ_t w_t · weight_t · A_t · ∇log π_t.

    Args:
        inputs: masked inputs.
        weight: importance weight of each token.
        is_clipped: which tokens' ratios were cut; their share is a metric.
    """
    loss = -inputs.token_weights * jax.lax.stop_gradient(weight) * inputs.advantages * inputs.logprobs
    return LossOutput(jnp.sum(loss), clipped_share(inputs, is_clipped))


def clipped_share(inputs: LossInputs, is_clipped: Bool[Array, "B L"]) -> dict[str, Float[Array, ""]]:
    """Returns the metric that says how many loss tokens a clip or cap acted on."""
    return {"sum/ratio/clipped_share": jax.lax.stop_gradient(jnp.sum(inputs.loss_mask * is_clipped))}
