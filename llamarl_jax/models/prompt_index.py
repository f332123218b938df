"""Who reads which prompt: the decoder keeps the keys and values of a prompt once, for all slots that complete it.

A step gathers the queries of the slots that read the same prompt, so that the prompt is read once for all of them, and gives each slot its
part of the result. Slots and prompts of one replica of the mesh are neighbours and refer to nothing outside of it, so numbers count within
a replica, and nothing crosses the data axis.

Dimensions: S slots, R prompts, M members of a prompt, D replicas.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


class PromptIndex(NamedTuple):
    """Slots and prompts by each other; a number that is out of range is nobody's.

    Attributes:
        lengths: cached tokens of each prompt; 0 where nobody reads it.
        members: slots that read each prompt.
        rows: the prompt of each slot.
        ranks: the slot's place among the members of its prompt.
    """

    lengths: Int[Array, " R"]
    members: Int[Array, "D R/D M"]
    rows: Int[Array, "D S/D"]
    ranks: Int[Array, "D S/D"]


def index_prompts(
    rows: Int[Array, " S"],
    lengths: Int[Array, " S"],
    is_live: Bool[Array, " S"],
    *,
    num_prompts: int,
    most_members: int,
    num_replicas: int,
) -> PromptIndex:
    """Returns the index for slots whose prompts are `rows`, with `lengths` cached tokens; those that are not live read nothing.

    At most `most_members` live slots may have the same prompt, and it must be one of the slot's own replica.
    """
    per_replica = num_prompts // num_replicas

    def of_replica(number: Array, rows: Array, lengths: Array, is_live: Array) -> tuple[Array, ...]:
        num_slots = rows.shape[0]
        rows = jnp.where(is_live, rows - number * per_replica, per_replica)
        is_earlier_sibling = (rows[:, None] == rows) & jnp.tri(num_slots, k=-1, dtype=bool)
        ranks = jnp.sum(is_earlier_sibling, axis=1)
        members = jnp.full((per_replica, most_members), num_slots).at[rows, ranks].set(jnp.arange(num_slots), mode="drop")
        return jnp.zeros(per_replica, jnp.int32).at[rows].max(lengths, mode="drop"), members, rows, ranks

    split = (x.reshape(num_replicas, -1) for x in (rows, lengths, is_live))
    found = jax.vmap(of_replica)(jnp.arange(num_replicas), *split)
    return PromptIndex(found[0].reshape(-1), *found[1:])


def gather_members(of_slots: Shaped[Array, "S *rest"], index: PromptIndex) -> Shaped[Array, "R M *rest"]:
    """Returns what belongs to the members of each prompt, zeros for nobody."""
    split = of_slots.reshape(index.members.shape[0], -1, *of_slots.shape[1:])
    found = jax.vmap(lambda of_slots, members: of_slots.at[members].get(mode="fill", fill_value=0))(split, index.members)
    return found.reshape(-1, *found.shape[2:])


def scatter_members(of_members: Shaped[Array, "R M *rest"], index: PromptIndex, fill_value: float) -> Shaped[Array, "S *rest"]:
    """Returns what belongs to each slot, `fill_value` where it reads no prompt."""
    split = of_members.reshape(index.rows.shape[0], -1, *of_members.shape[1:])

    def of_replica(of_members: Array, rows: Array, ranks: Array) -> Array:
        return of_members.at[rows, ranks].get(mode="fill", fill_value=fill_value)

    found = jax.vmap(of_replica)(split, index.rows, index.ranks)
    return found.reshape(-1, *found.shape[2:])
