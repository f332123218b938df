"""Attention of a decode step to one cache on NVIDIA GPUs, as a Pallas kernel that Triton compiles.

XLA computes such attention in three turns over memory: scores in float32, their softmax, and the mix. All of them cover the whole length
of the cache, though most rows have used a part of it. Here one program keeps the queries of one row that read the same key-value head, in
pieces of at most 64, and goes over the keys and values once, tile by tile, up to the row's own length. It remembers the largest score m,
the sum l of exponentials and the mix o so far, and rescales them when a tile holds a larger score:

    m' = max(m, max s),   l' = l·e^(m − m') + Σ e^(s − m'),   o' = o·e^(m − m') + e^(s − m')·v

"FlashAttention", Dao et al., arXiv 2205.14135; the running softmax is from "Online normalizer calculation for softmax", Milakov and
Gimelshein, arXiv 1805.02867. Scores never reach memory, and the cache is read as it is stored: float8 and int8 tiles are converted in
registers, their scales applied to scores and weights.

A few rows with long caches would occupy a few of the card's processors. Then the tiles of a row are shared out over several programs, and
XLA joins what they found by their log-sum-exps ("Flash-Decoding for long-context inference", Dao et al., 2023). How many follows from
shapes alone; how many tiles each of them gets, from the row's length.

Over a mesh every device attends with the rows and heads that it has, and nothing is sent.

JAX deprecates Triton below Pallas since 0.11 in favour of Mosaic GPU, which needs a Hopper card and tiles of 64 queries. As long as it is
there (0.12.0 has it, and warns) it also serves Ampere, and a decode step's few queries; with a JAX that has left it out, `find_obstacle`
says so and the decoder uses XLA's attention.

Dimensions: B rows, T query tokens, H query heads, K key-value heads, C cached positions, Q head dim, N = T·H / K queries of one key-value
head, P parts of a row's tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llamarl_jax.kernels.implementations import MASKED_SCORE
from llamarl_jax.meshes import partition_spec

if TYPE_CHECKING:
    from llamarl_jax.models.kv_cache import LayerCache

LEAST_SIZE = 16
"""Triton multiplies tiles of at least so many rows and columns; fewer queries are padded."""
MOST_QUERIES = 64
"""Queries of one program: with these the running mix of 128 numbers each fits the registers of four warps."""
TILE_BYTES = 16 << 10
"""Size of a tile of keys as it is multiplied; two of keys and two of values at a time fit the shared memory of every card since Ampere."""
WANTED_PROGRAMS = 264
"""Programs that keep a card busy: two for each of the 132 processors of an H100 or H200."""
LEAST_TILES = 4
"""A part of a row's tiles, at full length; with fewer, joining the parts costs more than it brings."""
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability that converts float8."""


def find_obstacle(devices: Sequence[Any], cache_dtype: str) -> str | None:
    """Returns why these devices cannot run the kernel, or None."""
    platforms = sorted({device.platform for device in devices})
    if not set(platforms) <= {"gpu", "cuda"}:
        return f"it runs on NVIDIA GPUs, and the generator mesh is {len(devices)} × {'/'.join(platforms)}"
    capability = str(devices[0].compute_capability)
    if not capability.replace(".", "").isdigit():
        return f"it runs on NVIDIA GPUs, and the generator mesh is {len(devices)} × {devices[0].device_kind} ({capability})"
    if cache_dtype == "float8_e4m3fn" and tuple(int(x) for x in capability.split(".")) < FLOAT8_CAPABILITY:
        wanted = ".".join(map(str, FLOAT8_CAPABILITY))
        return f"{devices[0].device_kind} has compute capability {capability}, and a float8 cache needs {wanted}"
    try:
        _triton()
    except ImportError as error:
        return f"JAX {jax.__version__} has no Pallas for Triton ({error})"
    return None


def decode_attention_part(
    queries: Float[Array, "B T H Q"], cache: LayerCache, lengths: Int[Array, " B"], *, is_interpreted: bool = False
) -> tuple[Float[Array, "B T H Q"], Float[Array, "B T H"]]:
    """Computes what `llamarl_jax.models.attention.attend_part` does; of a row it reads the tiles up to its length only.

    Args:
        lengths: cached positions of each row that its queries see, from the first on; more than there are count as all.
        is_interpreted: run the kernel with XLA's operations, on any device.

    Returns:
        The mixed values, in float32, and their log-sum-exp; 0 and MASKED_SCORE where the length is 0.
    """
    attend = partial(_attend_on_device, is_interpreted=is_interpreted)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(queries, cache, lengths)
    # A dimension that cannot be split is whole on every device, in the cache and here alike.
    rows, heads = partition_spec(mesh, ("rows", "kv_heads"), cache.keys.shape[:2], {})  # pyright: ignore[reportArgumentType]
    by_head = PartitionSpec(rows, None, heads)
    specs = jax.tree.map(lambda _: PartitionSpec(rows, heads), cache)
    # The kernel's results carry no types of sharding, which shard_map would check.
    mapped = jax.shard_map(attend, in_specs=(by_head, specs, PartitionSpec(rows)), out_specs=(by_head, by_head), check_vma=False)
    return mapped(queries, cache, lengths)


@partial(jax.jit, static_argnames="is_interpreted")  # traced once for all layers, not once for each
def _attend_on_device(
    queries: Float[Array, "B T H Q"], cache: LayerCache, lengths: Int[Array, " B"], *, is_interpreted: bool
) -> tuple[Float[Array, "B T H Q"], Float[Array, "B T H"]]:
    num_rows, num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = cache.keys.shape[1]
    grouped = jnp.swapaxes(queries.reshape(num_rows, num_tokens, num_kv_heads, -1, head_dim), 1, 2)
    grouped = grouped.reshape(num_rows, num_kv_heads, -1, head_dim)
    mixed, lse = _join(*_call(grouped, cache, jnp.minimum(lengths, cache.keys.shape[2]).astype(jnp.int32), is_interpreted))

    def ungroup(x: Array) -> Array:
        by_token = jnp.swapaxes(x.reshape(num_rows, num_kv_heads, num_tokens, -1, *x.shape[3:]), 1, 2)
        return by_token.reshape(num_rows, num_tokens, num_heads, *x.shape[3:])

    return ungroup(mixed), ungroup(lse)


def _call(
    queries: Float[Array, "B K N Q"], cache: LayerCache, lengths: Int[Array, " B"], is_interpreted: bool
) -> tuple[Float[Array, "B K P N Q"], Float[Array, "B K P N"]]:
    num_rows, num_kv_heads, num_queries, head_dim = queries.shape
    num_positions = cache.keys.shape[2]
    width = max(LEAST_SIZE, pl.next_power_of_2(head_dim))
    block = min(MOST_QUERIES, max(LEAST_SIZE, pl.next_power_of_2(num_queries)))
    tile = tile_length(width, num_positions, queries.dtype)
    num_blocks = pl.cdiv(num_queries, block)
    num_parts = count_parts(num_rows * num_kv_heads * num_blocks, num_positions, tile)

    # Programs of one head are neighbours, so that the second finds the tiles of the first in the card's cache.
    def head(i: Array) -> Array:
        return jax.lax.div(i, jnp.int32(num_blocks))

    def block_of(i: Array) -> Array:
        return jax.lax.rem(i, jnp.int32(num_blocks))

    of_head = pl.BlockSpec((None, None, num_positions, width), lambda i, part, row: (row, head(i), 0, 0))
    scales_of_head = pl.BlockSpec((None, None, num_positions), lambda i, part, row: (row, head(i), 0))
    scales = [] if cache.key_scales is None else [cache.key_scales, cache.value_scales]
    shape = (num_rows, num_kv_heads, num_parts, num_queries)
    return pl.pallas_call(
        partial(_attend_kernel, head_dim=head_dim, num_queries=num_queries, num_blocks=num_blocks, tile=tile, num_parts=num_parts),
        grid=(num_kv_heads * num_blocks, num_parts, num_rows),
        in_specs=[
            pl.BlockSpec((None,), lambda i, part, row: (row,)),
            pl.BlockSpec((None, None, block, width), lambda i, part, row: (row, head(i), block_of(i), 0)),
            of_head,
            of_head,
            *[scales_of_head] * len(scales),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, block, width), lambda i, part, row: (row, head(i), part, block_of(i), 0)),
            pl.BlockSpec((None, None, None, block), lambda i, part, row: (row, head(i), part, block_of(i))),
        ],
        out_shape=[jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        compiler_params=_triton().CompilerParams(num_warps=4, num_stages=2),
        interpret=is_interpreted,
        name="decode_attention",
    )(lengths, queries, cache.keys, cache.values, *scales)


def tile_length(width: int, num_positions: int, dtype: Any) -> int:
    """Returns how many positions a program reads at a time: a power of two, the padded head dim being `width`."""
    most = TILE_BYTES // (width * jnp.dtype(dtype).itemsize)
    return max(LEAST_SIZE, min(most, 2 * MOST_QUERIES, pl.next_power_of_2(num_positions)))


def count_parts(num_programs: int, num_positions: int, tile: int) -> int:
    """Returns over how many programs the tiles of one row are shared out, where one for each row and head makes `num_programs`."""
    return max(1, min(pl.cdiv(WANTED_PROGRAMS, num_programs), num_positions // (LEAST_TILES * tile)))


def _attend_kernel(
    length_ref: Any,
    queries_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    *refs: Any,
    head_dim: int,
    num_queries: int,
    num_blocks: int,
    tile: int,
    num_parts: int,
) -> None:
    """Attends with one block of queries to one part of a row's tiles; see the module docstring."""
    *scales, mixed_ref, lse_ref = refs
    triton = _triton()
    block, width = queries_ref.shape
    dims, offsets = jnp.arange(width), jnp.arange(tile)
    is_dim = (dims < head_dim)[None, :]
    first_query = jax.lax.rem(pl.program_id(0), jnp.int32(num_blocks)) * block
    is_query = first_query + jnp.arange(block) < num_queries
    queries = triton.load(queries_ref, mask=is_query[:, None] & is_dim, other=0.0)
    length = length_ref[...]
    num_tiles = pl.cdiv(length, tile)
    tiles_of_part = pl.cdiv(num_tiles, num_parts)
    first = pl.program_id(1) * tiles_of_part
    last = jnp.minimum(first + tiles_of_part, num_tiles)

    def turn(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, mixed = carry
        span = pl.ds(number * tile, tile)
        is_seen = number * tile + offsets < length

        def load(ref: Any) -> Array:
            # What lies behind the length may be NaN, so it is masked before it is multiplied by a weight of 0.
            zero = 0 if ref.dtype == jnp.int8 else 0.0  # Triton has no conversion from an integer to float8
            return triton.load(ref.at[span], mask=is_seen[:, None] & is_dim, other=zero).astype(queries.dtype)

        def load_scales(ref: Any) -> Array:
            return triton.load(ref.at[span], mask=is_seen, other=0.0)[None, :]

        scores = jnp.dot(queries, load(keys_ref).T, preferred_element_type=jnp.float32) * head_dim**-0.5
        if scales:
            scores = scores * load_scales(scales[0])
        scores = jnp.where(is_seen[None, :], scores, MASKED_SCORE)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new_largest[:, None])
        shrink = jnp.exp(largest - new_largest)
        total = total * shrink + jnp.sum(weights, axis=1)
        if scales:
            weights = weights * load_scales(scales[1])
        products = jnp.dot(weights.astype(queries.dtype), load(values_ref), preferred_element_type=jnp.float32)
        return new_largest, total, mixed * shrink[:, None] + products

    nothing = jnp.full(block, MASKED_SCORE, jnp.float32), jnp.zeros(block, jnp.float32), jnp.zeros((block, width), jnp.float32)
    largest, total, mixed = jax.lax.fori_loop(first, last, turn, nothing)
    total = jnp.where(last > first, total, 1.0)  # no tile: 0 / 1, and MASKED_SCORE + log 1
    triton.store(mixed_ref, mixed / total[:, None], mask=is_query[:, None] & is_dim)
    triton.store(lse_ref, largest + jnp.log(total), mask=is_query)


def _join(mixed: Float[Array, "B K P N Q"], lse: Float[Array, "B K P N"]) -> tuple[Float[Array, "B K N Q"], Float[Array, "B K N"]]:
    """Joins the softmax of the parts: each weighs as much as the sum of its scores' exponentials."""
    if mixed.shape[2] == 1:
        return mixed[:, :, 0], lse[:, :, 0]
    joined = jax.nn.logsumexp(lse, axis=2)
    return jnp.sum(jnp.exp(lse - joined[:, :, None])[..., None] * mixed, axis=2), joined


def _triton() -> Any:
    """Returns Pallas' module for Triton, imported at first use, because a later JAX will not have it."""
    from jax.experimental.pallas import triton

    return triton
