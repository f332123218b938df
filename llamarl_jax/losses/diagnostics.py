"""How far the sampled tokens are from the policy being trained, as numbers that can be added up over microbatches.

With ratio r = π/μ at the n loss tokens of a batch:

* `ratio/mean`, `ratio/max`: r. In expectation the mean is 1 whatever μ is, so another value shows a broken alignment, not staleness.
* `ratio/effective_sample_size`: (Σ r)² / (n · Σ r²), 1 on-policy: the share of the tokens that would estimate as well with equal weights
  (Kong, "A Note on Importance Sampling using Standardized Weights", University of Chicago, 1992).
* `mismatch/logprob_abs_mean`, `mismatch/logprob_abs_max`: |log π − log μ| in nats.
* `mismatch/equal_version_logprob_abs_mean`: the same over tokens that the very weights being trained sampled (staleness 0), so what
  numerics alone cause; `mismatch/equal_version_share` is the share of such tokens, and without any the mean is absent.
* `policy/kl_behaviour`: KL(μ ‖ π) in nats by the k3 estimator r − 1 − log r, which is unbiased over tokens from μ.
* `policy/entropy`: entropy of the next-token distribution in nats.

All are plain means over loss tokens, independent of the loss's normalisation.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llamarl_jax.losses.inputs import LossInputs, masked
from llamarl_jax.losses.kl import kl_estimate
from llamarl_jax.losses.ratios import importance_ratio
from llamarl_jax.metrics import names

_MEAN_SQUARE = "ratio/mean_square"
_EQUAL_SHARE = "mismatch/equal_version_share"
_EQUAL_MEAN = "mismatch/equal_version_logprob_abs_mean"


def policy_diagnostics(
    inputs: LossInputs, entropy: Float[Array, "B L"], staleness: Int[Array, "B L"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Returns sums and maxima over the loss tokens of a microbatch, without gradients; `finish` makes the metrics of the table.

    Args:
        inputs: a microbatch.
        entropy: from `logprobs.token_logprobs`, in nats.
        staleness: versions by which each token's weights lag behind those being trained; None leaves the equal-version mismatch out.
    """
    is_loss = inputs.loss_mask > 0
    inputs, entropy = jax.lax.stop_gradient((masked(inputs), jnp.where(is_loss, entropy, 0.0)))
    ratio = jnp.where(is_loss, importance_ratio(inputs.logprobs, inputs.behaviour_logprobs), 0.0)
    distance = jnp.abs(inputs.logprobs - inputs.behaviour_logprobs)
    diagnostics = {
        "sum/ratio/mean": jnp.sum(ratio),
        f"sum/{_MEAN_SQUARE}": jnp.sum(jnp.square(ratio)),
        f"max/{names.RATIO_MAX}": jnp.max(ratio),
        "sum/mismatch/logprob_abs_mean": jnp.sum(distance),
        "max/mismatch/logprob_abs_max": jnp.max(distance),
        "sum/policy/kl_behaviour": jnp.sum(kl_estimate(inputs.behaviour_logprobs, inputs.logprobs, "k3")),
        f"sum/{names.ENTROPY}": jnp.sum(entropy),
    }
    if staleness is not None:
        is_equal = is_loss & (staleness == 0)
        diagnostics[f"sum/{_EQUAL_SHARE}"] = jnp.sum(is_equal.astype(jnp.float32))
        diagnostics[f"sum/{_EQUAL_MEAN}"] = jnp.sum(jnp.where(is_equal, distance, 0.0))
    return diagnostics


def finish(metrics: Mapping[str, float], num_loss_tokens: float) -> dict[str, float]:
    """Returns the metrics of a step from its sums and maxima, on the host.

    `sum/<name>` becomes `<name>`, divided by the number of loss tokens; `max/<name>` becomes `<name>`; a name with neither prefix is a
    finished number of the trainer's and becomes `trainer/<name>`.

    Args:
        metrics: sums and maxima over all microbatches and processes of a step.
        num_loss_tokens: loss tokens of the whole batch; with 0, sums are reported as they are (0).
    """
    num_tokens = max(num_loss_tokens, 1.0)
    finished = dict(_finish_one(name, float(value), num_tokens) for name, value in metrics.items())
    mean_square = finished.pop(_MEAN_SQUARE, 0.0)
    if mean_square > 0:
        finished["ratio/effective_sample_size"] = finished["ratio/mean"] ** 2 / mean_square
    equal_share = finished.get(_EQUAL_SHARE, 0.0)
    if equal_share > 0:
        finished[_EQUAL_MEAN] /= equal_share
    else:
        finished.pop(_EQUAL_MEAN, None)
    return finished


def _finish_one(name: str, value: float, num_tokens: float) -> tuple[str, float]:
    kind, _, rest = name.partition("/")
    if kind == "sum":
        return rest, value / num_tokens
    return (rest, value) if kind == "max" else (f"trainer/{name}", value)
