"""What every policy loss takes and gives.

A loss returns a *sum* over the tokens of its microbatch, and metrics that are sums or maxima; the trainer adds them up over microbatches
and divides once by numbers of the whole batch. So the result is the same for any split into microbatches, any packing and any mesh.

Metric names say how to combine them: `sum/<name>` is added up and divided by the number of loss tokens of the whole batch, `max/<name>` is
the largest over the microbatches. `diagnostics.finish` does the rest.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LossInputs(NamedTuple):
    """Per-token inputs of a policy loss, all [B, L] and aligned to the token they describe.

    Attributes:
        logprobs: log π, the only field that gradients flow through.
        behaviour_logprobs: log μ of the distribution that the token was really sampled from.
        proximal_logprobs: log-probabilities under the policy before this optimizer step; the centre of decoupled PPO's trust region. With
            one optimizer step per batch this is `stop_gradient(logprobs)`.
        advantages: the same value on all tokens of a trajectory.
        loss_mask: 1 on completion tokens. Whatever stands elsewhere in the other fields, NaN included, has no effect.
        token_weights: weight of each token in the summed loss, from `normalisation.token_weights`.
        segment_ids: 0 on padding, 1, 2, … on the trajectories packed into a row; equal ids are contiguous.
    """

    logprobs: Float[Array, "B L"]
    behaviour_logprobs: Float[Array, "B L"]
    proximal_logprobs: Float[Array, "B L"]
    advantages: Float[Array, "B L"]
    loss_mask: Float[Array, "B L"]
    token_weights: Float[Array, "B L"]
    segment_ids: Int[Array, "B L"]


class LossOutput(NamedTuple):
    """A microbatch's part of the loss.

    Attributes:
        loss_sum: to be minimised; weighted sum over the loss tokens, not yet divided.
        metrics: scalars named `sum/<name>` or `max/<name>`.
    """

    loss_sum: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]


def masked(inputs: LossInputs) -> LossInputs:
    """Returns the inputs with 0 wherever the mask is 0, so that no product with a NaN is ever formed.

    Multiplying by the mask at the end would not do: NaN · 0 = NaN, in the sum and in its gradient.

    Raises:
        ValueError: the fields differ in shape; broadcasting would silently train on wrong numbers.
    """
    shapes = {name: value.shape for name, value in inputs._asdict().items()}
    if len(set(shapes.values())) != 1 or len(inputs.logprobs.shape) != 2:
        raise ValueError(f"loss inputs must all have the shape [rows, tokens] but are {shapes}; align them to the token they describe")
    is_loss = inputs.loss_mask > 0
    values = [jnp.where(is_loss, value, 0.0).astype(jnp.float32) for value in inputs[:-1]]
    return LossInputs(*values, segment_ids=inputs.segment_ids)
