"""Log-probabilities and entropies of given tokens: the one place where the one-token shift happens.

The logits at index t − 1 of a row describe the token at index t. Everything that leaves this module is aligned to the token it describes,
as is every other per-token array of the package, so nothing downstream shifts anything.

The distribution is that of the sampler, softmax(logits / temperature): a ratio π/μ of fresh weights is 1 only if both sides use one
temperature. The temperature is a traced value; changing it compiles nothing.

Ids outside the tokenizer may carry −inf or a huge negative logit. Logits are floored at `LOGIT_FLOOR`, where exp(logit) is still exactly 0,
so that neither 0 · log 0 in the entropy nor its gradient can become NaN. Logits that predict no token (the last of a segment, padding) are
replaced before the softmax, so that a NaN there reaches neither the results nor the gradient.

The shift is applied to the [B, L] arrays and the logit of a token is picked by a masked sum: no copy of the [B, L, V] logits, no gather
over a sharded vocabulary, and a backward pass without a scatter, whose order of additions a GPU does not fix.

Dimensions: B rows, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

LOGIT_FLOOR = -1e30


def token_logprobs(
    logits: Float[Array, "B L V"], token_ids: Int[Array, "B L"], segment_ids: Int[Array, "B L"], temperature: ArrayLike
) -> tuple[Float[Array, "B L"], Float[Array, "B L"]]:
    """Returns log π(token t | tokens before t in its segment), and the entropy of the distribution that token t was drawn from.

    Both are float32, in nats, and 0 for the first token of each segment and for padding, which nothing predicts.

    Args:
        logits: the network's output; index t − 1 describes token t.
        token_ids: ids of the row.
        segment_ids: 0 on padding, the same positive number on the tokens of one trajectory.
        temperature: scalar above 0, the one the tokens were sampled at.
    """
    is_predicting = _predicts_next(segment_ids)
    kept = jnp.where(is_predicting[..., None], logits.astype(jnp.float32), 0.0)
    scaled = jnp.maximum(kept, LOGIT_FLOOR) / jnp.asarray(temperature, jnp.float32)
    shifted = scaled - jax.lax.stop_gradient(jnp.max(scaled, axis=-1, keepdims=True))
    mass = jnp.exp(shifted)
    total = jnp.sum(mass, axis=-1)
    is_chosen = jnp.arange(logits.shape[-1]) == _from_next(token_ids)[..., None]
    chosen = jnp.sum(jnp.where(is_chosen, shifted, 0.0), axis=-1)
    logprobs = chosen - jnp.log(total)
    entropy = jnp.log(total) - jnp.sum(mass * shifted, axis=-1) / total
    return _to_next(jnp.where(is_predicting, logprobs, 0.0)), _to_next(jnp.where(is_predicting, entropy, 0.0))


def _predicts_next(segment_ids: Int[Array, "B L"]) -> Bool[Array, "B L"]:
    """Says at which indices the logits describe a token: where the next one belongs to the same segment."""
    return (segment_ids == _from_next(segment_ids)) & (segment_ids > 0)


def _from_next(values: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Moves each value one index down; the last becomes 0."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))


def _to_next(values: Float[Array, "B L"]) -> Float[Array, "B L"]:
    """Moves each value one index up; the first becomes 0."""
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
