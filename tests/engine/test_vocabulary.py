import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.engine.vocabulary import BLOCK_SIZE, first_largest, inverse_transform
from llamarl_jax.meshes import build_mesh, named_sharding


def _draw(mass: jax.Array, uniforms: jax.Array, data: int, tensor: int) -> np.ndarray:
    mesh = build_mesh(jax.devices()[: data * tensor], {"data": data, "tensor": tensor})
    mass = jax.device_put(mass, named_sharding(mesh, ("rows", "vocab"), mass.shape))
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(inverse_transform)(mass, uniforms))


@pytest.mark.parametrize("vocab_size", [8, 300, 8 * BLOCK_SIZE, 2008, 4104])
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 4), (1, 8)])
def test_a_split_vocabulary_gives_the_entries_of_one_device(vocab_size, data, tensor):
    """Masses are small whole numbers, whose sums are exact in any order; a third of them is zero."""
    num_slots = 512
    mass = jnp.asarray(np.random.default_rng(vocab_size).integers(-4, 9, (num_slots, vocab_size)).clip(0), jnp.float32).at[:, 5].set(1)
    edge = 1 - 2.0**-23
    uniforms = jax.random.uniform(jax.random.key(0), (num_slots, 2)).at[:4].set(jnp.array([[0, 0], [edge, edge], [0, edge], [edge, 0]]))
    alone, split = _draw(mass, uniforms, 1, 1), _draw(mass, uniforms, data, tensor)
    assert (alone == split).all()
    assert (np.asarray(mass)[np.arange(num_slots), split] > 0).all()


def test_a_vocabulary_that_cannot_be_split_is_drawn_from_whole():
    mass = jnp.ones((4, 301))
    assert _draw(mass, jnp.full((4, 2), 0.5), 1, 4).tolist() == _draw(mass, jnp.full((4, 2), 0.5), 1, 1).tolist()


def test_a_split_vocabulary_is_not_gathered():
    mesh = build_mesh(jax.devices(), {"data": 1, "tensor": 8})
    num_slots, vocab_size = 4, 8 * 2056
    mass = jax.device_put(jnp.ones((num_slots, vocab_size)), named_sharding(mesh, ("rows", "vocab"), (num_slots, vocab_size)))
    with jax.set_mesh(mesh):
        text = jax.jit(inverse_transform).lower(mass, jnp.ones((num_slots, 2))).compile().as_text() or ""
    assert "all-reduce(" in text
    assert "all-gather(" not in text


@pytest.mark.parametrize("vocab_size", [8, 300, 8 * BLOCK_SIZE, 2008])
@pytest.mark.parametrize("tensor", [1, 8])
def test_the_first_of_the_largest_is_found(vocab_size, tensor):
    """Among small whole numbers, so that most rows have several; also where all are equal or −inf."""
    x = np.random.default_rng(vocab_size).integers(-9, 0, (256, vocab_size)).astype(np.float32)
    x[0], x[1] = -np.inf, 3
    mesh = build_mesh(jax.devices()[:tensor], {"data": 1, "tensor": tensor})
    placed = jax.device_put(x, named_sharding(mesh, ("rows", "vocab"), x.shape))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(first_largest)(placed), np.argmax(x, axis=-1))
