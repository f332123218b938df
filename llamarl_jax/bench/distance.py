"""How far two next-token distributions are from each other, exactly, over the whole vocabulary and not by the sampled token alone.

π is the trainer's distribution of token t, μ the decoder's, d = log π − log μ.

**KL(μ ‖ π)** = Σ_v μ (log μ − log π). Σ_v μ = Σ_v π = 1 lets us add Σ_v (π − μ) = 0, which gives

    KL = Σ_v μ (e^d − 1 − d)

No term is negative, so none cancels another; the first form loses a KL of 1e-9 in the float32 rounding of its larger terms.

**Effective sample size.** A gradient over n tokens sampled from μ weighs each with r = π/μ. Its effective size is (Σ r)² / Σ r² tokens
(Kong, see `llamarl_jax.losses.diagnostics`), as a share of n and for many tokens (E r)² / E r², where the expectation draws t evenly from
the batch and v from μ_t. E r = mean_t Σ_v μ · π/μ = 1, so

    ESS = 1 / mean_t Σ_v π²/μ = 1 / (1 + mean_t χ²_t),    χ² = Σ_v π²/μ − 1 = Σ_v (π − μ)²/μ = Σ_v μ (e^d − 1)²

This is what sampling estimates, without its noise: a rare token that carries the mean of r² is seldom drawn. χ² is again a sum of terms
of at least 0, and it is kept as a logarithm, because a single token with μ = 1e-40 and π = 0.1 would overflow.

Ids that the tokenizer does not know have a logit of −1e30 on both sides: d = 0 there, and they add nothing.

Dimensions: B rows, T tokens, V vocabulary; N tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from llamarl_jax.losses.logprobs import LOGIT_FLOOR

SERIES_BELOW = 1.0
"""|d| below which e^d − 1 − d is taken from expm1; above, nothing cancels and e^d might overflow."""


class Divergence(NamedTuple):
    """Distance between π and μ, one number for each distribution; KL in nats."""

    kl: Float[Array, "B T"]
    log_chi_square: Float[Array, "B T"]
    is_same_choice: Bool[Array, "B T"]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distance between trainer and decoder over the N completion tokens of a batch.

    Attributes:
        logprob_abs_mean, logprob_abs_max: |log π − log μ| of the tokens themselves, in nats.
        kl: mean of the exact KL(μ ‖ π), in nats per token.
        effective_sample_size: exact share, from 0 to 1.
        greedy_agreement: share of the tokens at whose place both would choose the same one greedily.
    """

    logprob_abs_mean: float
    logprob_abs_max: float
    kl: float
    effective_sample_size: float
    greedy_agreement: float


def divergence(trainer_logits: Float[Array, "B T V"], decoder_logits: Float[Array, "B T V"]) -> Divergence:
    """Compares softmax(trainer logits) = π with softmax(decoder logits) = μ by the formulas above.

    It is finite for every pair of logits that are finite or −inf, save that log χ² is −inf where both distributions are equal.
    """
    log_pi, log_mu = (jax.nn.log_softmax(jnp.maximum(x.astype(jnp.float32), LOGIT_FLOOR)) for x in (trainer_logits, decoder_logits))
    difference = log_pi - log_mu
    mu = jnp.exp(log_mu)
    near = jnp.clip(difference, -SERIES_BELOW, SERIES_BELOW)
    terms = jnp.where(difference == near, mu * (jnp.expm1(near) - near), jnp.exp(log_pi) - mu - mu * difference)
    # log (e^d − 1)² = 2 (max(d, 0) + log(1 − e^−|d|)): no exponential of a positive number.
    log_square = 2 * (jnp.maximum(difference, 0.0) + jnp.log(-jnp.expm1(-jnp.abs(difference))))
    return Divergence(
        kl=jnp.sum(terms, axis=-1),
        log_chi_square=jax.nn.logsumexp(log_mu + log_square, axis=-1),
        is_same_choice=jnp.argmax(log_pi, axis=-1) == jnp.argmax(log_mu, axis=-1),
    )


def summarise(
    logprob_difference: Float[np.ndarray, " N"],
    kl: Float[np.ndarray, " N"],
    log_chi_square: Float[np.ndarray, " N"],
    is_same_choice: Bool[np.ndarray, " N"],
) -> Distance:
    """Returns the means and maxima over all tokens, added up in float64.

    Args:
        logprob_difference: log π − log μ of each token, in nats.
        kl, log_chi_square, is_same_choice: from `divergence`, of the distribution that each token was drawn from.
    """
    distance = np.abs(logprob_difference.astype(np.float64))
    log_mean_chi_square = np.logaddexp.reduce(log_chi_square.astype(np.float64)) - np.log(len(log_chi_square))
    return Distance(
        logprob_abs_mean=float(distance.mean()),
        logprob_abs_max=float(distance.max()),
        kl=float(kl.astype(np.float64).mean()),
        effective_sample_size=float(np.exp(-np.logaddexp(0.0, log_mean_chi_square))),
        greedy_agreement=float(is_same_choice.mean()),
    )
