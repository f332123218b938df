"""Grouped-query attention: over tokens that are computed together (training, prefill), and over the two caches of a decode step.

A decode step attends to the prompt, which its slot may share with others, and to what the slot has of its own. Each part gives its mixed
values and the logarithm of the sum of its scores' exponentials (lse), from which the softmax over both follows:

    mixed = Σ_parts e^(lse_part − lse) · mixed_part,    lse = log Σ_parts e^lse_part

A part has two implementations with one signature: `attend_part` here, for every device, and a kernel for GPUs
(`llamarl_jax.kernels.gpu`). `part_of` chooses. The kernel for CPUs (`llamarl_jax.kernels.native`) does both parts at once and stores the
new token as well, so it stands beside them.

Dimensions: B rows, T query tokens, C key positions, H query heads, K key-value heads, G = H / K, Q head dim, S slots, R prompts, P prompt
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from llamarl_jax.kernels.gpu import decode_attention_part
from llamarl_jax.kernels.implementations import MASKED_SCORE, Kernels
from llamarl_jax.models.kv_cache import LayerCache
from llamarl_jax.models.prompt_index import PromptIndex, gather_members, scatter_members

Part = Callable[[Float[Array, "B T H Q"], LayerCache, Int[Array, " B"]], tuple[Float[Array, "B T H Q"], Float[Array, "B T H"]]]
"""Queries, a cache, and how many of its positions each row sees → the mixed values in float32, and their lse."""


def attend(
    queries: Float[Array, "B T H Q"], keys: Num[Array, "B K C Q"], values: Num[Array, "B K C Q"], mask: Bool[Array, "B #T C"]
) -> Float[Array, "B T H Q"]:
    """Computes softmax(q·k / √Q)·v with float32 scores; query head h reads key-value head h // (H / K).

    Keys and values are head-major, as the decoder's cache stores them: one (row, head) is contiguous.
    """
    return attend_cache(queries, LayerCache(keys, values), mask)


def attend_cache(queries: Float[Array, "B T H Q"], cache: LayerCache, mask: Bool[Array, "B #T C"]) -> Float[Array, "B T H Q"]:
    """Does what `attend` does with a cache; the scales of a float8 or int8 one are applied to the scores and the weights."""
    weights = _scaled(jax.nn.softmax(_scores(queries, cache, mask), axis=-1), cache)
    return _mix(weights.astype(queries.dtype), cache.values.astype(queries.dtype))


def attend_part(
    queries: Float[Array, "B T H Q"], cache: LayerCache, lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T H Q"], Float[Array, "B T H"]]:
    """Returns the mixed values of one part, in float32, and its lse; rows of length 0 get an lse that takes no share."""
    mask = jnp.arange(cache.keys.shape[2]) < lengths[:, None, None]
    scores = _scores(queries, cache, mask)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = _scaled(jnp.exp(scores - lse[..., None]), cache)
    mixed = _mix_to_float32(weights.astype(queries.dtype), cache.values.astype(queries.dtype))
    return mixed, jnp.moveaxis(lse, 3, 1).reshape(mixed.shape[:3])


def part_of(kernels: Kernels) -> Part:
    """Returns the implementation of a part; native kernels, which attend to both parts at once, leave to XLA what they do not take."""
    if kernels in ("xla", "native"):
        return attend_part
    return partial(decode_attention_part, is_interpreted=kernels == "pallas_interpreted")


def attend_prompt_and_own(
    queries: Float[Array, "S H Q"],
    own: LayerCache,
    own_positions: Int[Array, " S"],
    prompts: LayerCache,
    index: PromptIndex,
    attend_part: Part = attend_part,
) -> Float[Array, "S H Q"]:
    """Attends to each slot's prompt, and to its own tokens up to `own_positions`, that one included.

    Args:
        attend_part: attends to one of the two caches.
    """
    mixed, lse = (part[:, 0] for part in attend_part(queries[:, None], own, own_positions + 1))
    of_members = attend_part(gather_members(queries, index), prompts, index.lengths)
    prompt_mixed, prompt_lse = (scatter_members(part, index, fill) for part, fill in zip(of_members, (0.0, MASKED_SCORE), strict=True))
    own_share = jax.nn.sigmoid(lse - prompt_lse)[..., None]
    return (own_share * mixed + (1 - own_share) * prompt_mixed).astype(queries.dtype)


def _scores(queries: Float[Array, "B T H Q"], cache: LayerCache, mask: Bool[Array, "B #T C"]) -> Float[Array, "B K G T C"]:
    batch, length, num_heads, head_dim = queries.shape
    num_kv_heads = cache.keys.shape[1]
    grouped = queries.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Queries become rows of their key-value head first: XLA for CPUs would transpose the scores instead, which are far larger.
    rows = jnp.moveaxis(grouped, 1, 3).reshape(batch, num_kv_heads, -1, head_dim)
    scores = _product(rows, cache.keys.astype(queries.dtype), 3, jnp.float32)
    scores = scores.reshape(batch, num_kv_heads, -1, length, scores.shape[-1]) * head_dim**-0.5
    if cache.key_scales is not None:
        scores = scores * cache.key_scales[:, :, None, None, :]
    return jnp.where(mask[:, None, None], scores, MASKED_SCORE)


def _scaled(weights: Float[Array, "B K G T C"], cache: LayerCache) -> Float[Array, "B K G T C"]:
    return weights if cache.value_scales is None else weights * cache.value_scales[:, :, None, None, :]


def _mix(weights: Float[Array, "B K G T C"], values: Float[Array, "B K C Q"], dtype: Any = None) -> Float[Array, "B T H Q"]:
    batch, num_kv_heads, group, length, num_positions = weights.shape
    mixed = _product(weights.reshape(batch, num_kv_heads, group * length, num_positions), values, 2, dtype)
    mixed = mixed.reshape(batch, num_kv_heads, group, length, -1)
    return jnp.moveaxis(mixed, 3, 1).reshape(batch, length, num_kv_heads * group, -1)


def _product(rows: Float[Array, "B K R I"], matrices: Float[Array, "B K _ _"], dim: int, dtype: Any) -> Float[Array, "B K R _"]:
    """Returns rows times the matrix of their row and head, over its dimension `dim`."""
    return jax.lax.dot_general(rows, matrices, (((3,), (dim,)), ((0, 1), (0, 1))), preferred_element_type=dtype)


def _mix_to_float32(weights: Float[Array, "B K G T C"], values: Float[Array, "B K C Q"]) -> Float[Array, "B T H Q"]:
    def on_cpu(weights: Array, values: Array) -> Array:
        # XLA for CPUs has no such product of bfloat16 with a float32 result: it fails when it runs.
        return _mix(weights.astype(jnp.float32), values.astype(jnp.float32))

    return jax.lax.platform_dependent(weights, values, cpu=on_cpu, default=lambda w, v: _mix(w, v, jnp.float32))
