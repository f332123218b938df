"""Entropy bonus: keeps the policy from settling on one answer too early.

    objective += coefficient · Σ_t H(π(· | x, y_<t))

Williams and Peng, "Function Optimization using Connectionist Reinforcement Learning Algorithms", Connection Science 3, 1991,
https://doi.org/10.1080/09540099108946587. The entropy is that of the whole next-token distribution, exact and not an estimate from the
sampled token. It is averaged over the prefixes that the behaviour policy wrote, without an importance weight.

Where the gradient flows: through all logits of a position.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from llamarl_jax.losses.inputs import LossInputs, LossOutput, masked


def entropy_bonus(entropy: Float[Array, "B L"], inputs: LossInputs, coefficient: float) -> LossOutput:
    """Returns −coefficient · Σ_t w_t · H_t, with token weights w; the entropy itself is reported by `policy_diagnostics`.

    Args:
        entropy: from `logprobs.token_logprobs`, in nats.
        inputs: its mask and token weights are used.
        coefficient: weight of the bonus; 0 gives exactly no gradient.
    """
    kept = jnp.where(inputs.loss_mask > 0, entropy, 0.0)
    return LossOutput(-coefficient * jnp.sum(masked(inputs).token_weights * kept), {})
