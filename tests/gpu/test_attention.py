"""Both implementations of attention to one cache on a real card, against the same sums as in `tests/kernels/test_gpu.py`.

JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/gpu
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamarl_jax.engine.kernel_choice import find_fault
from llamarl_jax.kernels import gpu
from llamarl_jax.models.attention import part_of
from llamarl_jax.models.presets import PRESETS
from tests.kernels.parts import SHAPES, check, make_cache, normal

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def card() -> Any:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU in this process ({error}); where there is one, run JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/gpu")


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "dim", "length"), [*SHAPES, (8, 1, 1, 128, 4096), (32, 8, 64, 128, 512)])
def test_attention_equals_the_same_sums(card, kernels, dtype, cache_dtype, heads, kv_heads, tokens, dim, length):
    if kernels == "pallas" and (obstacle := gpu.find_obstacle([card], cache_dtype)):
        pytest.skip(obstacle)
    lengths = sorted({min(n, length) for n in (0, 1, 63, 64, 65, length - 1, length)})
    with jax.default_device(card), jax.default_matmul_precision("highest"):
        queries = normal(0, len(lengths), tokens, heads, dim, dtype=jnp.dtype(dtype))
        cache = make_cache(len(lengths), kv_heads, length, dim, cache_dtype)
        check(jax.jit(part_of(kernels)), queries, cache, lengths, is_poisoned=kernels == "pallas")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama3.1-8b"])
def test_the_card_passes_the_trial(card, dtype, name):
    for cache_dtype in (dtype, "int8", "float8_e4m3fn"):
        if gpu.find_obstacle([card], cache_dtype) is None:
            assert find_fault(card, PRESETS[name], dtype, cache_dtype) is None
