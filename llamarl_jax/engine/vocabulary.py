"""Chooses from a vocabulary in two levels, a block and then an entry inside the block: the largest, or one in proportion to its mass.

Where the vocabulary is split over the tensor axis, masses stay where they are. Each device adds up its part of each block, block sums are
added over devices (a block may lie on two of them, as 128,256 entries over 8 devices are no whole number of blocks), and the one chosen
block of each slot is collected: some hundred numbers a slot are sent instead of the vocabulary. Left to itself XLA gathers everything to
reshape it to blocks. The blocks, and so the entry that two given numbers lead to, are those of one device.

Dimensions: S slots, V vocabulary, W vocabulary blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llamarl_jax.meshes import partition_spec

BLOCK_SIZE = 256


def inverse_transform(mass: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> Int[Array, " S"]:
    """Returns ids drawn with probability proportional to `mass` (float32, not negative, at least one positive).

    Args:
        uniforms: two numbers in [0, 1) for each slot, which decide the block and the entry in it.
    """
    split = _split(mass)
    if split[1] is None:
        return _draw_whole(mass, uniforms)
    draw = partial(_draw_split, axis=split[1], vocab_size=mass.shape[1])
    return jax.shard_map(draw, in_specs=(split, PartitionSpec(split[0])), out_specs=PartitionSpec(split[0]))(mass, uniforms)


def first_largest(x: Float[Array, "S V"]) -> Int[Array, " S"]:
    """Returns the first index of the largest entry of each row; some index where the row has a NaN.

    On one device it is looked for in the first block that has it, since XLA's argmax over a vocabulary takes half of all the time that
    sampling does on CPU; the maximum of each block takes next to none.
    """
    if _split(x)[1] is not None:
        return jnp.argmax(x, axis=-1)
    blocks = _in_blocks(x, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    return block * BLOCK_SIZE + jnp.argmax(_take(blocks, block), axis=-1)


def _split(x: Float[Array, "S V"]) -> PartitionSpec:
    mesh: Any = jax.sharding.get_abstract_mesh()
    return PartitionSpec(None, None) if mesh.empty else partition_spec(mesh, ("rows", "vocab"), x.shape, {})


def _in_blocks(x: Float[Array, "S V"], padding: float) -> Float[Array, "S W block"]:
    num_slots, vocab_size = x.shape
    return jnp.pad(x, ((0, 0), (0, -vocab_size % BLOCK_SIZE)), constant_values=padding).reshape(num_slots, -1, BLOCK_SIZE)


def _take(blocks: Float[Array, "S W block"], block: Int[Array, " S"]) -> Float[Array, "S block"]:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _draw_whole(mass: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> Int[Array, " S"]:
    blocks = _in_blocks(mass, 0.0)
    block = _first_above(jnp.sum(blocks, axis=-1), uniforms[:, 0])
    return block * BLOCK_SIZE + _first_above(_take(blocks, block), uniforms[:, 1])


def _draw_split(mass: Float[Array, "S v"], uniforms: Float[Array, "S 2"], *, axis: Any, vocab_size: int) -> Int[Array, " S"]:
    """Runs on each device with its slice of the vocabulary, which may begin and end inside a block."""
    num_slots, slice_size = mass.shape
    first_block, offset = jnp.divmod(jax.lax.axis_index(axis) * slice_size, BLOCK_SIZE)
    num_blocks = (slice_size + 2 * BLOCK_SIZE - 2) // BLOCK_SIZE  # as many as a slice of this size can touch
    padded = jnp.pad(mass, ((0, 0), (0, num_blocks * BLOCK_SIZE - slice_size)))
    blocks = jnp.roll(padded, offset, axis=1).reshape(num_slots, num_blocks, BLOCK_SIZE)
    num_all = -(-vocab_size // BLOCK_SIZE)
    sums = jnp.zeros((num_slots, num_all + num_blocks)).at[:, first_block + jnp.arange(num_blocks)].set(jnp.sum(blocks, axis=-1))
    block = _first_above(jax.lax.psum(sums[:, :num_all], axis), uniforms[:, 0])
    is_here = (block >= first_block) & (block < first_block + num_blocks)
    here = jnp.where(is_here, block - first_block, 0)
    inside = jax.lax.psum(jnp.where(is_here[:, None], _take(blocks, here), 0.0), axis)
    return block * BLOCK_SIZE + _first_above(inside, uniforms[:, 1])


def _first_above(mass: Float[Array, "S W"], uniform: Float[Array, " S"]) -> Int[Array, " S"]:
    """Returns the first index whose cumulative mass exceeds uniform · total; total itself is never reached since uniform ≤ 1 − 2⁻²³."""
    cumulative = jnp.cumsum(mass, axis=-1)
    return jnp.argmax(cumulative > uniform[:, None] * cumulative[:, -1:], axis=-1)
