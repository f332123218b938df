"""Which slots read which prompt, against the obvious loops."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.models.prompt_index import gather_members, index_prompts, scatter_members

SLOTS_PER_REPLICA, PROMPTS_PER_REPLICA, MOST_MEMBERS = 6, 3, 4


@st.composite
def slots(draw, num_replicas: int = 2):
    """Rows, lengths and life of all slots, with no more members of a prompt than may be."""
    rows, lengths, is_live, taken = [], [], [], {}
    of_row = [draw(st.integers(0, 50)) for _ in range(num_replicas * PROMPTS_PER_REPLICA)]
    for slot in range(num_replicas * SLOTS_PER_REPLICA):
        row = draw(st.integers(0, PROMPTS_PER_REPLICA - 1)) + slot // SLOTS_PER_REPLICA * PROMPTS_PER_REPLICA
        live = draw(st.booleans()) and taken.get(row, 0) < MOST_MEMBERS
        taken[row] = taken.get(row, 0) + live
        rows.append(row)
        is_live.append(live)
        # A slot that has ended keeps the length of a prompt that is gone.
        lengths.append(of_row[row] if live else draw(st.integers(0, 50)))
    return np.array(rows), np.array(lengths), np.array(is_live)


def _index(rows, lengths, is_live):
    options = {"num_prompts": 2 * PROMPTS_PER_REPLICA, "most_members": MOST_MEMBERS, "num_replicas": 2}
    return jax.jit(lambda *arrays: index_prompts(*arrays, **options))(rows, lengths, is_live)


@settings(max_examples=100, deadline=None)
@given(slots())
def test_every_live_slot_is_a_member_of_its_prompt_and_nobody_else_is(arrays):
    rows, lengths, is_live = arrays
    index = _index(*arrays)
    members = np.asarray(index.members)
    for prompt in range(2 * PROMPTS_PER_REPLICA):
        replica, local = divmod(prompt, PROMPTS_PER_REPLICA)
        wanted = list(np.flatnonzero((rows == prompt) & is_live))
        found = [m + replica * SLOTS_PER_REPLICA for m in members[replica, local] if m < SLOTS_PER_REPLICA]
        assert found == wanted
        assert index.lengths[prompt] == (lengths[wanted[0]] if wanted else 0)


@settings(max_examples=100, deadline=None)
@given(slots())
def test_what_is_gathered_comes_back_to_its_slot(arrays):
    rows, _, is_live = arrays
    index = _index(*arrays)
    of_slots = jnp.arange(1.0, 2 * SLOTS_PER_REPLICA + 1)[:, None] * jnp.ones(3)
    gathered = gather_members(of_slots, index)
    assert gathered.shape == (2 * PROMPTS_PER_REPLICA, MOST_MEMBERS, 3)
    back = np.asarray(scatter_members(gathered, index, -7.0))
    np.testing.assert_array_equal(back, np.where(is_live[:, None], of_slots, -7.0))
    assert float(gathered.sum()) == float(np.asarray(of_slots)[is_live].sum())  # zeros for nobody
    of_prompts = jnp.broadcast_to(jnp.arange(2.0 * PROMPTS_PER_REPLICA)[:, None], (2 * PROMPTS_PER_REPLICA, MOST_MEMBERS))
    np.testing.assert_array_equal(scatter_members(of_prompts, index, -1.0), np.where(is_live, rows, -1))
