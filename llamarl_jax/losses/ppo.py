"""PPO's clipped objective, as it is and decoupled from the behaviour policy.

PPO-clip, with r_t = π_t/μ_t:

    objective = Σ_t min(r_t · A, clip(r_t, 1 − clip_low, 1 + clip_high) · A)

Schulman et al., "Proximal Policy Optimization Algorithms", arXiv 1707.06347; two different distances ("clip-higher") from Yu et al.,
"DAPO", arXiv 2503.14476. Where the gradient flows: through r_t, whose derivative is r_t · ∇log π_t. A token has none once its ratio has
left the range in the direction of its advantage (A > 0 and r > 1 + clip_high, or A < 0 and r < 1 − clip_low). So μ plays two parts, the
distribution to correct for and the centre of the trust region; with stale data the second is wrong, since π is kept near old weights.

Decoupled PPO separates them by a proximal policy π_prox, the one before this step:

    objective = Σ_t sg(min(π_prox,t/μ_t, cap)) · min(r_t · A, clip(r_t, …) · A),    r_t = π_t/π_prox,t

Hilton, Cobbe, Schulman, "Batch size-invariance for policy optimization", arXiv 2110.00641; used for asynchronous language-model training
by Fu et al., "AReaL", arXiv 2505.24298. Where the gradient flows: through r_t only. With one optimizer step per batch r_t is 1 in value,
nothing is clipped, and the update is Σ_t min(π/μ, cap) · A · ∇log π: AIPO with ρ = cap. The papers have no cap (inf); a finite one bounds
the variance.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked
from llamarl_jax.losses.policy_gradient import clipped_share
from llamarl_jax.losses.ratios import check_cap, check_clip_range, importance_ratio


@dataclass(frozen=True, kw_only=True)
class PpoClipConfig:
    """PPO-clip (arXiv 1707.06347) on the ratio π/μ of each token."""

    clip_low: float = 0.2
    """Distance of the lower end of the trust region below a ratio of 1."""
    clip_high: float = 0.28
    """Distance of the upper end above 1; DAPO's value."""

    is_off_policy_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · min(r_t A_t, clip(r_t) A_t) with r = π/μ."""
        return ppo_clip(inputs, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class DecoupledPpoConfig:
    """Decoupled PPO (arXiv 2110.00641): trust region around the policy before the step, importance weight from there to μ."""

    clip_low: float = 0.2
    """Distance of the lower end of the trust region below a ratio π/π_prox of 1."""
    clip_high: float = 0.28
    """Distance of the upper end above 1."""
    behaviour_cap: float = 10.0
    """Largest importance weight π_prox/μ; inf, as in the papers, never caps."""

    is_off_policy_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high)
        check_cap("behaviour_cap", self.behaviour_cap)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · sg(min(π_prox/μ, cap)) · min(r_t A_t, clip(r_t) A_t) with r = π/π_prox."""
        return decoupled_ppo(inputs, self.clip_low, self.clip_high, self.behaviour_cap)


def ppo_clip(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutput:
    """Returns −Σ_t w_t · min(r_t A_t, clip(r_t, 1 − clip_low, 1 + clip_high) A_t) with r = π/μ and token weights w."""
    inputs = masked(inputs)
    ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs)
    objective, is_clipped = clipped_objective(ratio, inputs.advantages, clip_low, clip_high)
    return LossOutput(-jnp.sum(inputs.token_weights * objective), clipped_share(inputs, is_clipped))


def decoupled_ppo(inputs: LossInputs, clip_low: float, clip_high: float, behaviour_cap: float) -> LossOutput:
    """Returns −Σ_t w_t · sg(min(π_prox,t/μ_t, cap)) · min(r_t A_t, clip(r_t) A_t) with r = π/π_prox and token weights w.

    Args:
        inputs: a microbatch; `proximal_logprobs` are constants here, whatever they were computed from.
        clip_low: distance of the lower end of the clip range from 1.
        clip_high: distance of the upper end.
        behaviour_cap: largest weight π_prox/μ.
    """
    inputs = masked(inputs)
    proximal = jax.lax.stop_gradient(inputs.proximal_logprobs)
    weight = jnp.minimum(importance_ratio(proximal, inputs.behaviour_logprobs), behaviour_cap)
    ratio = importance_ratio(inputs.logprobs, proximal)
    objective, is_clipped = clipped_objective(ratio, inputs.advantages, clip_low, clip_high)
    return LossOutput(-jnp.sum(inputs.token_weights * weight * objective), clipped_share(inputs, is_clipped))


def clipped_objective(
    ratio: Float[Array, "B L"], advantages: Float[Array, "B L"], clip_low: float, clip_high: float
) -> tuple[Float[Array, "B L"], Bool[Array, "B L"]]:
    """Returns min(r A, clip(r) A), and where the clip took the gradient away."""
    free = ratio * advantages
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    # Not jnp.minimum: it splits ties, and so does jnp.clip, so with clip_low = 0 a ratio of exactly 1 would lose a quarter of its gradient.
    return jnp.where(clipped < free, clipped, free), clipped < free
