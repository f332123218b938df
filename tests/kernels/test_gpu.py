"""Attention to one cache: XLA's, and the GPU's kernel run step by step with XLA's operations, against the same sums."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.kernel_choice import choose_kernels
from llamarl_jax.kernels import gpu
from llamarl_jax.kernels.gpu import count_parts, tile_length
from llamarl_jax.meshes import build_mesh, named_sharding
from llamarl_jax.models.attention import MASKED_SCORE, attend_part, attend_prompt_and_own, part_of
from llamarl_jax.models.kv_cache import CACHE_AXES
from llamarl_jax.models.prompt_index import index_prompts
from tests.engine.tiny_engine import CONFIG
from tests.kernels.parts import SHAPES, check, make_cache, normal

interpreted = jax.jit(part_of("pallas_interpreted"))


@pytest.fixture(params=["xla", "pallas_interpreted"])
def part(request) -> dict[str, Any]:
    """An implementation; XLA's multiplies what nobody sees by 0."""
    return {"attend": jax.jit(part_of(request.param)), "is_poisoned": request.param != "xla"}


@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "dim", "length"), SHAPES)
def test_shapes(part, heads, kv_heads, tokens, dim, length):
    """Lengths of nothing, one position, either side of a tile's edge, and all."""
    tile = tile_length(max(16, 1 << (dim - 1).bit_length()), length, jnp.float32)
    lengths = sorted({0, 1, tile - 1, tile, min(tile + 1, length), length - 1, length})
    queries = normal(0, len(lengths), tokens, heads, dim)
    check(**part, queries=queries, cache=make_cache(len(lengths), kv_heads, length, dim, "float32"), lengths=lengths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_types(part, dtype, cache_dtype):
    queries = normal(0, 4, 3, 4, 32, dtype=dtype)
    check(**part, queries=queries, cache=make_cache(4, 2, 96, 32, cache_dtype), lengths=[0, 5, 64, 77])


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 257, 1024])
def test_the_tiles_of_a_single_row_are_shared_out(part, length):
    """Eight programs for each head; with few tiles some of them have none."""
    assert count_parts(2, 1024, tile_length(128, 1024, jnp.float32)) == 8
    check(**part, queries=normal(0, 1, 1, 4, 128), cache=make_cache(1, 2, 1024, 128, "float32"), lengths=[length])


@pytest.mark.parametrize("factor", [1e-30, 30.0, 1e4])
def test_scores_of_any_size(part, factor):
    cache = make_cache(2, 2, 64, 16, "float32")
    check(**part, queries=normal(0, 2, 1, 4, 16) * factor, cache=cache, lengths=[64, 33], tolerance=3e-5)


def test_a_row_of_no_length_gets_zeros():
    mixed, lse = interpreted(normal(0, 2, 2, 4, 128), make_cache(2, 2, 512, 128, "float32"), jnp.zeros(2, jnp.int32))
    assert not np.asarray(mixed).any()
    assert (np.asarray(lse) == np.float32(MASKED_SCORE)).all()


def test_no_tile_behind_the_length_is_read(monkeypatch):
    """What is not masked cannot be seen by its result, so the tiles are counted as the kernel turns."""
    turns = []

    def fori_loop(first: Any, last: Any, turn: Any, carry: Any) -> Any:
        jax.debug.callback(lambda first, last: turns.append(max(0, int(last - first))), first, last)
        return original(first, last, turn, carry)

    original = jax.lax.fori_loop
    monkeypatch.setattr(gpu.jax.lax, "fori_loop", fori_loop)
    gpu._attend_on_device.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    queries, cache = normal(0, 4, 1, 2, 128), make_cache(4, 2, 1024, 128, "float32")
    jax.block_until_ready(part_of("pallas_interpreted")(queries, cache, jnp.array([0, 1, 65, 1024])))
    jax.effects_barrier()
    gpu._attend_on_device.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(turns) == 2 * (0 + 1 + 3 + 32)


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
            choose_kernels(EngineConfig(kernels="pallas"), two, CONFIG)
        assert choose_kernels(EngineConfig(), two, CONFIG) == "xla"

    def test_which_cards_can_have_it(self):
        hopper = card(compute_capability="9.0")
        old, amd = card(compute_capability="8.0", device_kind="A100"), card(compute_capability="gfx942", device_kind="MI300X")
        assert gpu.find_obstacle([hopper] * 2, "float8_e4m3fn") is None
        assert gpu.find_obstacle([old], "int8") is None
        assert gpu.find_obstacle([old], "float8_e4m3fn") == "A100 has compute capability 8.0, and a float8 cache needs 8.9"
        assert gpu.find_obstacle([amd], "bfloat16") == "it runs on NVIDIA GPUs, and the generator mesh is 1 × MI300X (gfx942)"
        assert gpu.find_obstacle([hopper, card(platform="cpu")], "bfloat16") == (
            "it runs on NVIDIA GPUs, and the generator mesh is 2 × cpu/gpu"
        )

    def test_without_triton_there_is_none(self, monkeypatch):
        def missing() -> None:
            raise ImportError("no module of that name")

        monkeypatch.setattr(gpu, "_triton", missing)
        assert "has no Pallas for Triton (no module of that name)" in (
            gpu.find_obstacle([card(compute_capability="9.0")], "bfloat16") or ""
        )
