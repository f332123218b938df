import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.meshes import build_mesh, named_sharding
from llamarl_jax.quantization.row_product import row_product


def _numbers(seed: int, *shape: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 64), (1, 1, 64), (5, 64), (2, 3, 64)])
def test_a_product_is_that_of_the_factors_with_float32_sums(dtype, shape):
    x, kernel = _numbers(0, *shape, dtype=dtype), _numbers(1, 48, 64, dtype=dtype)
    result = row_product(x, kernel)
    assert result.dtype == jnp.float32
    assert result.shape == (*shape[:-1], 48)
    np.testing.assert_allclose(result, np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "num_rows", "computed"), [("bfloat16", 2, 4), ("bfloat16", 4, 4), ("float32", 2, 2)])
def test_a_lone_row_of_a_device_is_computed_twice_unless_nothing_would_be_converted(dtype, num_rows, computed):
    mesh = build_mesh(jax.devices()[:4], {"data": 2, "tensor": 2})
    x, kernel = _numbers(0, num_rows, 1, 64, dtype=dtype), _numbers(1, 48, 64, dtype=dtype)
    x = jax.device_put(x, named_sharding(mesh, ("rows", None, None), x.shape))
    kernel = jax.device_put(kernel, named_sharding(mesh, ("vocab", None), kernel.shape))
    with jax.set_mesh(mesh):
        lowered = jax.jit(row_product).lower(x, kernel)
        result = lowered.compile()(x, kernel)
    assert f"<{computed}x48xf32>" in lowered.as_text().replace("x1x48x", "x48x")
    np.testing.assert_allclose(result, np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T, rtol=1e-5, atol=1e-5)
