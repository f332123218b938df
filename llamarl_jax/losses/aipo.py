"""AIPO: the policy gradient of off-policy tokens, with a one-sided clip of the importance ratio.

    update direction = Σ_t min(π_t / μ_t, ρ) · A · ∇log π_t
    π_t = π(y_t | x, y_<t) now,  μ_t = μ(y_t | x, y_<t) when the token was sampled,  A = the trajectory's advantage

Source: Wu et al., "LlamaRL: A Distributed Asynchronous Reinforcement Learning Framework for Efficient Large-scale LLM Training",
arXiv 2505.24034, section 6; ρ there lies between 2 and 10.

Why a ratio
    The trainer sees tokens drawn from μ: older weights, perhaps in 8 bits, perhaps of several versions in one completion. The mean of
    A · ∇log π over such tokens is not the policy gradient. Weighting a token by π/μ makes it so at that token: for a fixed prefix,

        E_{y ~ μ}[ (π(y)/μ(y)) · A(y) · ∇log π(y) ] = Σ_y π(y) · A(y) · ∇log π(y).

    What stays uncorrected is how often the prefixes themselves occur (that needs the product of all earlier ratios, whose variance grows
    exponentially with length; `truncated_is.py` has it) and how the advantage depends on what μ writes after the token. Without any weight,
    asynchronous training collapses now and then; with it the paper's runs are stable.

Why a cap, and only from above
    A token that μ found unlikely and π likes can have a ratio in the thousands, and then it is the whole gradient. min(·, ρ) bounds the
    weight, for a bias on those tokens. A small ratio is harmless: it says that π hardly produces the token any more, and the weight fades
    to 0 by itself. A lower clip would only give such tokens more weight than they deserve. So the ratio is here a correction, not the
    trust region that PPO builds with it: tokens above ρ are not dropped, they keep the weight ρ.

Where the gradient flows: only through log π. The clipped ratio is a stop-gradient weight.
    This matters. Differentiating the objective  min(π/μ, ρ) · A  itself gives

        (π/μ) · A · ∇log π   where π/μ < ρ,      0   where π/μ > ρ,

    the same below the cap, but above it the minimum is the constant ρ, and a constant has no gradient: the tokens whose probability rose
    most would stop learning. For A > 0 that is PPO's rule; for A < 0 it is worse, since a token that became too likely and turned out bad
    would never be pushed down. The rule of the paper keeps ρ · A · ∇log π there. The tests carry the direct derivative along as a
    negative control.

Relations (tested): ρ = ∞ leaves the full per-token weight; with π = μ it is REINFORCE; it is token-level truncated importance sampling
(`truncated_is.py`) with cap ρ, and CISPO (`cispo.py`) without a lower clip and with clip_high = ρ − 1. Those carry their own papers and
defaults; the arithmetic is shared.

Numbers: the log-ratio saturates at ±20 before exp (`ratios.py`), so the weight is min(π/μ, ρ) for every ρ up to 4.9e8, and log π is
finite (`logprobs.py`): no Δ log-prob gives an infinity. Inputs are masked with `where` before any product, so a NaN at a padding or
prompt token is harmless; a NaN at a loss token is not hidden, and the trainer skips that step.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked
from llamarl_jax.losses.policy_gradient import weighted_policy_gradient
from llamarl_jax.losses.ratios import check_cap, importance_ratio


@dataclass(frozen=True, kw_only=True)
class AipoConfig:
    """AIPO (LlamaRL, arXiv 2505.24034): importance weight π/μ, capped from above."""

    rho: float = 4.0
    """Largest importance ratio ρ, without unit; the paper uses 2 to 10, inf never caps."""

    is_off_policy_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_cap("rho", self.rho)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Returns −Σ_t w_t · sg(min(π_t/μ_t, ρ)) · A_t · log π_t."""
        return aipo(inputs, self.rho)


def aipo(inputs: LossInputs, rho: float) -> LossOutput:
    """Returns −Σ_t w_t · sg(min(π_t/μ_t, ρ)) · A_t · log π_t, with token weights w and stop-gradient sg.

    Args:
        inputs: a microbatch; `proximal_logprobs` are not used.
        rho: cap of the ratio.
    """
    inputs = masked(inputs)
    ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs)
    return weighted_policy_gradient(inputs, jnp.minimum(ratio, rho), is_clipped=ratio > rho)
