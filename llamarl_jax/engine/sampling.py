"""Draws one token per slot from a tempered, optionally truncated softmax and returns its log-probability under exactly that distribution.

Sampling is by inverse transform in two levels (`llamarl_jax.engine.vocabulary`): a block of the vocabulary with probability equal
to its mass, then a token inside the block. That needs two uniform numbers per token instead of one per vocabulary entry (the Gumbel
trick), reads the exponentials that the log-softmax needs anyway, and can never return an entry of probability zero, because a search for
the first cumulative sum *above* u · total skips entries that add nothing.

Truncation keeps the entries whose probability reaches a threshold, so it needs no sort: the threshold of top-k and top-p is found by
bisection over the bits of a float32 (30 passes over the vocabulary give it exactly). Entries that tie with the last one kept are kept
too. The order is that of Hugging Face: temperature, top-k, top-p of what top-k left, min-p.

The random numbers of a token depend on (seed, prompt id, sample index, position) and on nothing else, so a completion does not depend
on its slot, its neighbours or the schedule.

Dimensions: S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from llamarl_jax.engine.vocabulary import first_largest, inverse_transform

_BITS_OF_ONE = 0x3F800000


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The distribution that tokens are drawn from."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Keeps the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keeps tokens with at least this share of the most likely token's probability; 0 keeps all."""

    def __post_init__(self) -> None:
        for name, is_valid, wanted in (
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 (off) and below 1"),
        ):
            if not is_valid:
                raise ValueError(f"sampling {name} is {getattr(self, name)}; it must be {wanted}")

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are cut off; such a distribution cannot be trained on without doing the same in the trainer."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class SamplingArrays(NamedTuple):
    """`SamplingConfig` of every slot."""

    temperature: Float[ArrayLike, " S"]
    top_k: Int[ArrayLike, " S"]
    top_p: Float[ArrayLike, " S"]
    min_p: Float[ArrayLike, " S"]

    @classmethod
    def of(cls, configs: list[SamplingConfig]) -> SamplingArrays:
        """Collects host arrays."""
        return cls(
            np.array([c.temperature for c in configs], np.float32),
            np.array([c.top_k for c in configs], np.int32),
            np.array([c.top_p for c in configs], np.float32),
            np.array([c.min_p for c in configs], np.float32),
        )


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
    logits: Float[Array, "S V"], uniforms: Float[Array, "S 2"], sampling: SamplingArrays, *, is_truncated: bool
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns sampled ids and their log-probabilities.

    At temperature 0 the most likely id is taken; its log-probability is then reported at temperature 1, since that of a point mass
    (0) would say nothing. Training refuses temperature 0.

    Args:
        logits: the network's output.
        uniforms: two numbers in [0, 1) for each slot.
        sampling: traced, so changing it compiles nothing.
        is_truncated: False leaves top-k, top-p and min-p out of the program, for batches in which no slot uses them.
    """
    temperature = jnp.asarray(sampling.temperature)
    is_greedy = temperature == 0
    scaled = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.exp(scaled - peak)
    if is_truncated:
        threshold = jnp.where(is_greedy, 0.0, _threshold(mass, sampling))
        mass = jnp.where(mass >= threshold[:, None], mass, 0.0)
    ids = jnp.where(is_greedy, first_largest(scaled), inverse_transform(mass, uniforms)).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, ids[:, None], axis=-1)
    logprobs = (chosen - peak)[:, 0] - jnp.log(jnp.sum(mass, axis=-1))
    return ids, logprobs


def _threshold(mass: Float[Array, "S V"], sampling: SamplingArrays) -> Float[Array, " S"]:
    """Returns the least mass that is kept; the largest mass of a slot is 1."""
    top_k, top_p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p)

    def has_k(is_kept: Bool[Array, "S V"]) -> Bool[Array, " S"]:
        return jnp.sum(is_kept, axis=-1) >= top_k

    of_k = jnp.where(top_k > 0, _largest_threshold(mass, has_k), 0.0)
    left = jnp.where(mass >= of_k[:, None], mass, 0.0)
    wanted = top_p * jnp.sum(left, axis=-1)

    def has_p(is_kept: Bool[Array, "S V"]) -> Bool[Array, " S"]:
        return jnp.sum(jnp.where(is_kept, left, 0.0), axis=-1) >= wanted

    of_p = jnp.where(top_p < 1, _largest_threshold(mass, has_p), 0.0)
    return jnp.maximum(jnp.maximum(of_k, of_p), jnp.asarray(sampling.min_p))


def _largest_threshold(mass: Float[Array, "S V"], is_enough: Callable[[Array], Array]) -> Float[Array, " S"]:
    """Returns the largest float32 t in [0, 1] for which `is_enough(mass >= t)`; non-negative floats order like their bits."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        is_kept = mass >= jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None]
        enough = is_enough(is_kept)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low = jnp.zeros(mass.shape[0], jnp.int32)
    bits, _ = jax.lax.fori_loop(0, _BITS_OF_ONE.bit_length(), halve, (low, jnp.full_like(low, _BITS_OF_ONE)))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
