"""The GPU's attention kernel, run step by step with XLA's operations, against the implementation for every device."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.engine.engine import EngineConfig, choose_kernels
from llamarl_jax.kernels import gpu
from llamarl_jax.kernels.gpu import count_parts, tile_length
from llamarl_jax.meshes import build_mesh, named_sharding
from llamarl_jax.models.attention import MASKED_SCORE, attend_part, attend_prompt_and_own, part_of
from llamarl_jax.models.kv_cache import CACHE_AXES, CacheType, LayerCache, init_cache, write
from llamarl_jax.models.prompt_index import index_prompts
from tests.engine.tiny_engine import CONFIG

interpreted = jax.jit(part_of("pallas_interpreted"))


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def make_cache(rows: int, heads: int, length: int, dim: int, dtype: CacheType, seed: int = 1) -> LayerCache:
    """A full cache, written as the decoder does it."""
    (empty,) = init_cache(dataclasses.replace(CONFIG, num_heads=heads, num_kv_heads=heads, head_dim=dim, num_layers=1), rows, length, dtype)
    keys, values = (normal(seed + i, rows, length, heads, dim) for i in range(2))
    return write(empty, keys, values, jnp.zeros(rows, jnp.int32))


def poisoned(cache: LayerCache, lengths: jax.Array) -> LayerCache:
    """What lies behind the lengths belongs to nobody: NaN, and the largest number of an int8 cache."""
    is_seen = jnp.arange(cache.keys.shape[2]) < lengths[:, None, None]

    def poison(x: jax.Array) -> jax.Array:
        bad = jnp.asarray(127 if x.dtype == jnp.int8 else jnp.nan, x.dtype)
        return jnp.where(is_seen if x.ndim == 3 else is_seen[..., None], x, bad)

    return jax.tree.map(poison, cache)


def check(queries: jax.Array, cache: LayerCache, lengths: jax.Array, tolerance: float) -> None:
    mixed, lse = interpreted(queries, poisoned(cache, lengths), lengths)
    assert (mixed.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    expected, expected_lse = attend_part(queries, cache, lengths)
    is_seen = np.asarray(lengths) > 0
    np.testing.assert_allclose(np.asarray(mixed)[is_seen], np.asarray(expected)[is_seen], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(lse)[is_seen], np.asarray(expected_lse)[is_seen], rtol=1e-5, atol=1e-5)
    assert not np.asarray(mixed)[~is_seen].any()
    assert (np.asarray(lse)[~is_seen] == np.float32(MASKED_SCORE)).all()


@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "dim", "length"), [
    (8, 2, 1, 64, 300),
    (9, 3, 1, 64, 16),
    (4, 4, 3, 80, 128),
    (8, 1, 2, 96, 80),
    (4, 2, 1, 128, 256),
    (4, 2, 5, 12, 48),
    (7, 1, 40, 16, 64),
])  # fmt: skip
def test_equals_the_attention_of_the_model(heads, kv_heads, tokens, dim, length):
    """Lengths of nothing, one position, either side of a tile's edge, and all; grouped and single heads; several blocks of queries."""
    tile = tile_length(max(16, 1 << (dim - 1).bit_length()), length, jnp.float32)
    lengths = jnp.asarray(sorted({0, 1, tile - 1, tile, min(tile + 1, length), length - 1, length}), jnp.int32)
    queries = normal(0, len(lengths), tokens, heads, dim)
    check(queries, make_cache(len(lengths), kv_heads, length, dim, "float32"), lengths, 3e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_types(dtype, cache_dtype, tokens):
    """In bfloat16 weights are rounded before they are divided by their sum, there after it: two units in the last of 8 bits."""
    lengths = jnp.asarray([0, 5, 64, 77], jnp.int32)
    queries = normal(0, 4, tokens, 4, 32, dtype=dtype)
    tolerance = 2**-7 if dtype == "bfloat16" else 3e-6
    check(queries, make_cache(4, 2, 96, 32, cache_dtype), lengths, tolerance)


@pytest.mark.parametrize("lengths", [[0], [1], [63], [64], [65], [257], [511], [1024]])
def test_the_tiles_of_a_single_row_are_shared_out(lengths):
    """Eight programs and less; with few tiles some of them have none."""
    queries, cache = normal(0, 1, 1, 4, 128), make_cache(1, 2, 1024, 128, "float32")
    assert count_parts(2, 1024, tile_length(128, 1024, jnp.float32)) == 8
    check(queries, cache, jnp.asarray(lengths, jnp.int32), 3e-6)


@pytest.mark.parametrize("factor", [1e-30, 30.0, 1e4])
def test_scores_of_any_size(factor):
    check(normal(0, 2, 1, 4, 16) * factor, make_cache(2, 2, 64, 16, "float32"), jnp.asarray([64, 33], jnp.int32), 3e-5)


def test_a_length_beyond_the_cache_counts_as_all_of_it():
    """A slot that has ended keeps its position while the cache is shortened."""
    queries, cache = normal(0, 1, 1, 4, 16), make_cache(1, 2, 48, 16, "float32")
    for got, wanted in zip(interpreted(queries, cache, jnp.array([90])), attend_part(queries, cache, jnp.array([90])), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_parts_follow_from_shapes():
    """Llama 3.1 8B with 2048 positions: 64 slots fill a card, an eighth of their heads or one slot does not."""
    tile = tile_length(128, 2048, jnp.bfloat16)
    assert tile == 64
    assert [count_parts(programs, 2048, tile) for programs in (64 * 8, 264, 263, 64, 8, 1)] == [1, 1, 2, 5, 8, 8]
    assert [count_parts(1, length, tile) for length in (16, 255, 256, 511, 512, 32768)] == [1, 1, 1, 1, 2, 128]
    assert tile_length(128, 2048, jnp.float32) == 32
    assert tile_length(64, 2048, jnp.bfloat16) == 128
    assert tile_length(64, 16, jnp.bfloat16) == 16


@pytest.mark.parametrize(("data", "tensor", "kv_heads"), [(2, 2, 2), (1, 4, 4), (2, 4, 2)])
@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_over_a_mesh_every_device_attends_with_what_it_has(data, tensor, kv_heads, cache_dtype):
    """Two heads on a tensor axis of four are whole on every device; nothing is sent in any case."""
    mesh = build_mesh(jax.devices()[: data * tensor], {"data": data, "tensor": tensor})
    queries, cache = normal(0, 4, 2, 4, 16), make_cache(4, kv_heads, 32, 16, cache_dtype)
    lengths = jnp.asarray([0, 7, 16, 32], jnp.int32)
    heads = "kv_heads" if kv_heads % tensor == 0 else None
    placed = (
        jax.device_put(queries, named_sharding(mesh, ("rows", None, heads, None), queries.shape)),
        jax.tree.map(lambda x: jax.device_put(x, named_sharding(mesh, CACHE_AXES[: x.ndim], x.shape)), cache),
        jax.device_put(lengths, named_sharding(mesh, ("rows",), lengths.shape)),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(part_of("pallas_interpreted")).lower(*placed).compile()
        mixed, lse = compiled(*placed)
    expected = interpreted(queries, cache, lengths)
    np.testing.assert_allclose(mixed, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-6)
    text = compiled.as_text() or ""
    assert not any(kind in text for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    assert mixed.sharding.is_equivalent_to(placed[0].sharding, 4)


def test_prompt_and_own_together():
    """Four slots, two of which share a prompt, and one of which has none."""
    rows, lengths = jnp.asarray([0, 1, 1, 0]), jnp.asarray([20, 9, 9, 20])
    index = index_prompts(rows, lengths, jnp.asarray([True, True, True, False]), num_prompts=2, most_members=3, num_replicas=1)
    queries, positions = normal(0, 4, 4, 16), jnp.asarray([0, 15, 3, 2])
    own, prompts = make_cache(4, 2, 16, 16, "float32"), make_cache(2, 2, 32, 16, "float32", seed=7)
    got, wanted = (attend_prompt_and_own(queries, own, positions, prompts, index, part_of(name)) for name in ("pallas_interpreted", "xla"))
    np.testing.assert_allclose(got[:3], wanted[:3], rtol=1e-5, atol=1e-6)


def card(**facts: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", **facts})


class TestChoice:
    def test_a_cpu_cannot_have_it(self):
        two = build_mesh(jax.devices()[:2], {"data": 1, "tensor": 2})
        with pytest.raises(
            ValueError, match=r"is 'pallas', but it runs on NVIDIA GPUs, and the generator mesh is 2 × cpu; or choose 'auto'"
        ):
            choose_kernels(EngineConfig(kernels="pallas"), two)
        assert choose_kernels(EngineConfig(), two) == "xla"

    def test_which_cards_can_have_it(self):
        old, amd = card(compute_capability="8.0", device_kind="A100"), card(compute_capability="gfx942", device_kind="MI300X")
        assert gpu.find_obstacle([card()], "float8_e4m3fn") is None  # only compiled for
        assert gpu.find_obstacle([card(compute_capability="9.0")] * 2, "float8_e4m3fn") is None
        assert gpu.find_obstacle([old], "int8") is None
        assert gpu.find_obstacle([old], "float8_e4m3fn") == "A100 has compute capability 8.0, and a float8 cache needs 8.9"
        assert gpu.find_obstacle([amd], "bfloat16") == "it runs on NVIDIA GPUs, and the generator mesh is 1 × MI300X (gfx942)"
        assert gpu.find_obstacle([card(), card(platform="cpu")], "bfloat16") == (
            "it runs on NVIDIA GPUs, and the generator mesh is 2 × cpu/gpu"
        )

    def test_without_triton_there_is_none(self, monkeypatch):
        def missing() -> None:
            raise ImportError("no module of that name")

        monkeypatch.setattr(gpu, "_triton", missing)
        assert "has no Pallas for Triton (no module of that name)" in (gpu.find_obstacle([card()], "bfloat16") or "")
