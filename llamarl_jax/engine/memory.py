"""How many slots fit: the decoder's memory on each device, added up before anything is allocated.

    weights · copies + slots / data · (own KV cache + logits) + prompts / data · KV cache + prefill
        ≤  share of the device's memory − what others hold there

* `copies` of the weights lie side by side while new versions wait: those in force, and up to S − C + 1 that are staged, with
  S = max_staleness and C = partial_rollout_rounds.
* The caches of a slot and of a prompt are counted at their full capacity, and once more by half, because growing them keeps the old ones
  until they are copied. There is a prompt for every n slots, with n = slots_per_prompt.
* Logits and their exponentials are float32 over the vocabulary for every slot, split like the LM head.
* A prefill holds the cache of one chunk's prompts. While it computes, there are also a layer's scores of the chunk's tokens with all that a
  prompt can have (in float32, and what the softmax makes of them in the decoder's type), or a layer's mlp in both types, whichever is
  larger; and two float32 hidden states. `tests/aot` compares this with the compiled program.

Dimensions: S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.meshes import named_sharding
from llamarl_jax.models.kv_cache import CACHE_AXES, has_scales
from llamarl_jax.models.transformer import TransformerSpec, axis_units

MEMORY_SHARE = 0.85
"""Share of a device's memory that is planned with; the rest is for compiled programs, fragmentation and small buffers."""
CACHE_GROWTH = 1.5
LOGIT_COPIES = 3
"""Logits, scaled logits and their exponentials."""
MOST_AUTO_SLOTS = 1024
"""More slots than this are never chosen by `auto`: a step's time grows with them and nothing is gained."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the decoder on one device.

    Attributes:
        limit_bytes: what may be used.
        weight_bytes: of all copies.
        prefill_bytes: of one chunk, its cache included.
        slot_bytes: of one slot, without its prompt.
        prompt_bytes: of one prompt's cache.
        slots_per_prompt: as in the config.
        num_replicas: devices of the data axis, over which slots are split.
    """

    limit_bytes: int
    weight_bytes: int
    prefill_bytes: int
    slot_bytes: int
    prompt_bytes: int
    slots_per_prompt: int
    num_replicas: int

    @property
    def most_slots(self) -> int:
        """Slots that fit in all, a multiple of the replicas; 0 if not even one does."""
        free = self.limit_bytes - self.weight_bytes - self.prefill_bytes
        num_slots = max(0, free * self.slots_per_prompt // (self.slots_per_prompt * self.slot_bytes + self.prompt_bytes))
        while num_slots and self.cache_bytes(num_slots) > free:  # the last prompt may have few slots
            num_slots -= 1
        return num_slots * self.num_replicas

    def cache_bytes(self, slots_per_device: int) -> int:
        """Returns the bytes of so many slots and their prompts."""
        return slots_per_device * self.slot_bytes + -(-slots_per_device // self.slots_per_prompt) * self.prompt_bytes

    def describe(self) -> str:
        """Returns one line of figures for messages."""
        return (
            f"{_gib(self.limit_bytes)} usable per device, of which weights {_gib(self.weight_bytes)} and prefill "
            f"{_gib(self.prefill_bytes)}; {_gib(self.slot_bytes)} a slot and {_gib(self.prompt_bytes)} a prompt"
        )


def plan_memory(
    spec: TransformerSpec,
    mesh: Mesh,
    config: EngineConfig,
    *,
    num_weight_copies: int,
    reserved_bytes: int = 0,
    limit_bytes: int | None = None,
) -> MemoryPlan:
    """Adds up the decoder's memory; allocates nothing.

    Args:
        spec: the list form.
        num_weight_copies: versions that lie on the generator's devices at once.
        reserved_bytes: what others hold on each of these devices (the trainer, with placement `shared`).
        limit_bytes: memory of one device; None asks the device.
    """
    shapes, shardings = spec.decoder_shapes(config.dtype), spec.shardings(mesh)
    weights = sum(_shard_bytes(x.shape, x.dtype, s) for x, s in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True))
    model = spec.config
    cache_shape = (mesh.shape["data"], model.num_kv_heads, 1, model.head_dim)
    cache_sharding = named_sharding(mesh, CACHE_AXES, cache_shape, {**axis_units(model), "kv_heads": 1})
    token = _shard_bytes(cache_shape, config.cache_dtype, cache_sharding)
    if has_scales(config.cache_dtype):
        token += _shard_bytes((*cache_shape[:3], 1), "float32", cache_sharding)
    token *= 2 * model.num_layers
    logits_shape = (mesh.shape["data"], model.vocab_size)
    logits = _shard_bytes(logits_shape, "float32", named_sharding(mesh, ("rows", "vocab"), logits_shape))
    heads = cache_sharding.shard_shape(cache_shape)[1] * model.num_heads // model.num_kv_heads
    gates_shape = (2 * model.intermediate_size,)
    gates = named_sharding(mesh, ("gate_up",), gates_shape, axis_units(model)).shard_shape(gates_shape)[0]
    widest = max(heads * config.prefill_capacity, gates) * (4 + jnp.dtype(config.dtype).itemsize)
    scratch = config.prefill_chunk_tokens * (widest + 2 * 4 * model.hidden_size)
    limit = device_memory_bytes(mesh) if limit_bytes is None else limit_bytes
    return MemoryPlan(
        limit_bytes=int(limit * MEMORY_SHARE) - reserved_bytes,
        weight_bytes=weights * num_weight_copies,
        prefill_bytes=token * max(config.prefill_chunk_tokens, config.prefill_capacity) + scratch,
        slot_bytes=int(token * config.own_capacity * CACHE_GROWTH) + logits * LOGIT_COPIES,
        prompt_bytes=int(token * config.prompt_capacity * CACHE_GROWTH),
        slots_per_prompt=config.slots_per_prompt,
        num_replicas=mesh.shape["data"],
    )


def resolve_slots(config: EngineConfig, plan: MemoryPlan, *, most_completions: int = MOST_AUTO_SLOTS) -> EngineConfig:
    """Returns the config with `num_slots` as a number: for `auto` as many as fit and can be of use.

    Args:
        most_completions: completions that can be unfinished at once; more slots would always idle, and each is computed at every step.

    Raises:
        ValueError: the wanted slots, or not even one for each replica, do not fit.
    """
    if not plan.most_slots:
        raise ValueError(
            f"the decoder does not fit: {plan.describe()}; use more devices on placement.generator_tensor, a smaller "
            "engine.max_prompt_tokens or max_new_tokens, or engine.quantization"
        )
    if config.num_slots == "auto":
        most = -(-min(most_completions, MOST_AUTO_SLOTS) // plan.num_replicas) * plan.num_replicas
        return dataclasses.replace(config, num_slots=min(plan.most_slots, most))
    if config.num_slots > plan.most_slots:
        raise ValueError(
            f"engine.num_slots = {config.num_slots} does not fit: {plan.describe()}; choose at most {plan.most_slots}, or 'auto'"
        )
    return config


def device_memory_bytes(mesh: Mesh) -> int:
    """Returns the memory of the mesh's smallest device; virtual CPU devices share the host's, or its container's, equally."""
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()] or list(mesh.devices.flat)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    if all(limits):
        return min(int(limit) for limit in limits if limit)
    return _host_memory_bytes() // len(jax.local_devices())


def _host_memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.is_file() else "max"
    return min(total, int(limit)) if limit.isdigit() else total


def _shard_bytes(shape: tuple[int, ...], dtype: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(shape)) * jnp.dtype(dtype).itemsize


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:,.2f} MiB"
