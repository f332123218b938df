"""Draws one token per slot from softmax(logits / temperature) and returns its log-probability under exactly that distribution.

Sampling is by inverse transform in two levels: a block of the vocabulary with probability equal to its mass, then a token inside
the block. That needs two uniform numbers per token instead of one per vocabulary entry (the Gumbel trick), reads the exponentials
that the log-softmax needs anyway, and can never return an entry of probability zero, because a search for the first cumulative sum
*above* u · total skips entries that add nothing.

The random numbers of a token depend on (seed, prompt id, sample index, position) and on nothing else, so a completion does not depend
on its slot, its neighbours or the schedule.

Dimensions: S slots, V vocabulary, W vocabulary blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

BLOCK_SIZE = 256


def completion_key(seed: int, prompt_id: UInt32[Array, ""], sample_index: UInt32[Array, ""]) -> UInt32[Array, "2"]:
    """Returns the key data of one completion's random stream."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), prompt_id), sample_index)
    return jax.random.key_data(key)


def token_uniforms(key_data: UInt32[Array, "S 2"], positions: Int[Array, " S"]) -> Float[Array, "S 2"]:
    """Returns the two uniform numbers in [0, 1) that decide the token at each slot's position."""

    def draw(data: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(data), position), (2,))

    return jax.vmap(draw)(key_data, positions)


def sample(
    logits: Float[Array, "S V"], uniforms: Float[Array, "S 2"], temperature: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns sampled ids and their log-probabilities.

    At temperature 0 the most likely id is taken; its log-probability is then reported at temperature 1, since that of a point mass
    (0) would say nothing. Training refuses temperature 0.
    """
    is_greedy = temperature == 0
    scaled = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.exp(scaled - peak)
    ids = jnp.where(is_greedy, jnp.argmax(scaled, axis=-1), _inverse_transform(mass, uniforms)).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, ids[:, None], axis=-1)
    logprobs = (chosen - peak)[:, 0] - jnp.log(jnp.sum(mass, axis=-1))
    return ids, logprobs


def _inverse_transform(mass: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> Int[Array, " S"]:
    """Returns ids drawn with probability proportional to `mass` (float32, not negative, at least one positive)."""
    num_slots, vocab_size = mass.shape
    blocks = jnp.pad(mass, ((0, 0), (0, -vocab_size % BLOCK_SIZE))).reshape(num_slots, -1, BLOCK_SIZE)
    block = _first_above(jnp.sum(blocks, axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK_SIZE + _first_above(inside, uniforms[:, 1])


def _first_above(mass: Float[Array, "S W"], uniform: Float[Array, " S"]) -> Int[Array, " S"]:
    """Returns the first index whose cumulative mass exceeds uniform · total; total itself is never reached since uniform ≤ 1 − 2⁻²³."""
    cumulative = jnp.cumsum(mass, axis=-1)
    return jnp.argmax(cumulative > uniform[:, None] * cumulative[:, -1:], axis=-1)
