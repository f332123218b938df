"""Attention in two parts equals attention over both at once."""

import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.models.attention import MASKED_SCORE, attend, attend_part, attend_prompt_and_own
from llamarl_jax.models.kv_cache import LayerCache
from llamarl_jax.models.prompt_index import index_prompts


def _normal(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
def test_prompt_and_own_equal_one_sequence(factor):
    """Five slots on two replicas and four prompts, one of them of no tokens; shared by three, by one, and by none."""
    rows, lengths, positions = [1, 1, 0, 1, 3, 3], [9, 9, 4, 9, 0, 0], [0, 6, 3, 2, 5, 6]
    is_live = [True, True, True, True, True, False]
    # Replica 0 has slots 0–2 and rows 0–1, replica 1 slots 3–5 and rows 2–3.
    rows[3] = 2
    index = index_prompts(*map(jnp.asarray, (rows, lengths, is_live)), num_prompts=4, most_members=2, num_replicas=2)
    queries = _normal(0, 6, 4, 8) * factor
    own = LayerCache(_normal(1, 6, 2, 7, 8), _normal(2, 6, 2, 7, 8))
    prompts = LayerCache(_normal(3, 4, 2, 12, 8), _normal(4, 4, 2, 12, 8))
    mixed = attend_prompt_and_own(queries, own, jnp.asarray(positions), prompts, index)
    for slot, (row, length, position) in enumerate(zip(rows, lengths, positions, strict=True)):
        if not is_live[slot]:
            continue
        keys, values = (
            jnp.concatenate([shared[row, :, :length], mine[slot, :, : position + 1]], axis=1)[None]
            for shared, mine in zip((prompts.keys, prompts.values), (own.keys, own.values), strict=True)
        )
        expected = attend(queries[slot][None, None], keys, values, jnp.ones((1, 1, keys.shape[2]), bool))[0, 0]
        np.testing.assert_allclose(mixed[slot], expected, rtol=1e-4, atol=1e-5)


def test_a_part_that_nobody_sees_has_no_weight():
    queries, cache = _normal(0, 1, 1, 2, 8), LayerCache(_normal(1, 1, 2, 4, 8), _normal(2, 1, 2, 4, 8))
    mixed, lse = attend_part(queries, cache, jnp.zeros(1, jnp.int32))
    assert np.isfinite(mixed).all()
    assert (np.asarray(lse) < MASKED_SCORE / 2).all()


def test_the_lse_is_that_of_the_scores():
    queries, cache = _normal(0, 2, 3, 4, 8), LayerCache(_normal(1, 2, 2, 5, 8), _normal(2, 2, 2, 5, 8))
    lengths = jnp.array([3, 5])
    mask = jnp.arange(5) < lengths[:, None, None]
    mixed, lse = attend_part(queries, cache, lengths)
    np.testing.assert_allclose(mixed, attend(queries, cache.keys, cache.values, mask), rtol=1e-5, atol=1e-6)
    for row, token, head in np.ndindex(2, 3, 4):
        scores = cache.keys[row, head // 2] @ queries[row, token, head] / np.sqrt(8)
        visible = np.asarray(scores, np.float64)[: (3, 5)[row]]
        np.testing.assert_allclose(lse[row, token, head], np.log(np.exp(visible).sum()), rtol=1e-5)
