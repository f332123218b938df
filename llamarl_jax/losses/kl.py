"""Penalty for leaving a frozen reference policy: KL(π ‖ π_ref), estimated at the sampled tokens.

With d_t = log π_t − log π_ref,t at a sampled token, per token:

    k1 = d                      unbiased, but of either sign, with a high variance
    k2 = d² / 2                 biased in value by third order in d, never negative
    k3 = exp(−d) − 1 + d        unbiased and never negative

Source: Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html. k3 in the loss: GRPO (Shao et al.,
"DeepSeekMath", arXiv 2402.03300).

A good value does not make a good gradient. What a loss term contributes is the mean of ∇k over sampled tokens, and for y ~ π:

    E[∇k1] = E[∇log π] = 0                            no penalty at all, only noise: refused as a loss term
    E[∇k2] = E[d · ∇log π] = ∇KL(π ‖ π_ref)           the gradient of the KL: the default
    E[∇k3] = E[(1 − π_ref/π) · ∇log π]
           = −Σ_y π_ref · ∇log π = ∇KL(π_ref ‖ π)     the gradient of the other KL: equal to first order near the reference, and bounded
                                                      by π_ref where π is large, but huge where π ≪ π_ref

Off-policy, y ~ μ, these hold only with the weight π/μ on each token (`is_importance_weighted`, on by default): a stop-gradient weight
min(π/μ, cap), which is 1 on-policy. GRPO has none.

Where the gradient flows: through log π in d; not through the weight, not into the reference.

Numbers: d saturates at ±20 with derivative 1 (`ratios.py`), so a token 50 nats away still has a finite value and a gradient of the right
sign.

Dimensions: B rows, L tokens of a row; `*shape` is any shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked
from llamarl_jax.losses.ratios import check_cap, importance_ratio, saturate

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """Penalty for leaving the reference policy."""

    coefficient: float = 0.0
    """Weight of the penalty, per token; 0 switches it off."""
    estimator: KlEstimator = "k2"
    """k2 has the gradient of KL(π ‖ π_ref); k3, as in GRPO, that of KL(π_ref ‖ π); k1 has none on average and is refused."""
    is_importance_weighted: bool = True
    """Weighs each token by min(π/μ, importance_cap), so that the mean is over π and not over the behaviour policy."""
    importance_cap: float = 4.0
    """Largest importance weight."""

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"kl.coefficient = {self.coefficient} must be a finite number, 0 (off) or above")
        if self.estimator == "k1":
            raise ValueError("kl.estimator = 'k1' cannot be a loss term (the mean gradient of k1 is 0); choose 'k2' or 'k3'")
        check_cap("kl.importance_cap", self.importance_cap)


def kl_estimate(
    logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"], estimator: KlEstimator
) -> Float[Array, "*shape"]:
    """Returns the estimate of KL(π ‖ π_ref) at each token, in nats; see the table above."""
    log_ratio = saturate(logprobs - reference_logprobs)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio)
    return jnp.expm1(-log_ratio) + log_ratio


def kl_penalty(inputs: LossInputs, reference_logprobs: Float[Array, "B L"], config: KlConfig) -> LossOutput:
    """Returns coefficient · Σ_t w_t · sg(min(π_t/μ_t, cap)) · k_t, and the unweighted mean of k as metric `kl/reference`.

    Args:
        inputs: a microbatch; `advantages` and `proximal_logprobs` are not used.
        reference_logprobs: log-probabilities of the same tokens under the reference policy, at the same temperature.
        config: estimator, coefficient and cap.
    """
    is_loss = inputs.loss_mask > 0
    inputs = masked(inputs)
    reference = jax.lax.stop_gradient(jnp.where(is_loss, reference_logprobs, 0.0))
    estimate = kl_estimate(inputs.logprobs, reference, config.estimator)
    weight = inputs.token_weights
    if config.is_importance_weighted:
        ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs)
        weight = weight * jax.lax.stop_gradient(jnp.minimum(ratio, config.importance_cap))
    metrics = {"sum/kl/reference": jax.lax.stop_gradient(jnp.sum(estimate))}
    return LossOutput(config.coefficient * jnp.sum(weight * estimate), metrics)
