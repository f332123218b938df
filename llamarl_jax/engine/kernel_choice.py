"""Who computes the decode step on a mesh: `choose_kernels`.

A kernel of our own is taken where it can run. A card that Triton does not know, or does wrong, is found before it computes anything that
counts: the attention kernel computes a small example first, which is compared with XLA's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from llamarl_jax.kernels import gpu, native
from llamarl_jax.kernels.implementations import Kernels
from llamarl_jax.models.attention import Part, attend_part, part_of
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.kv_cache import CacheType, init_cache, write

if TYPE_CHECKING:
    from llamarl_jax.engine.engine import EngineConfig

TRIAL_LENGTHS = (1, 129, 300)
TRIAL_TOLERANCE = 0.03
"""Greatest difference in a trial, of values about 1: above the rounding of bfloat16 weights, below what a wrong tile does."""

_LOG = logging.getLogger(__name__)


def choose_kernels(config: EngineConfig, mesh: Mesh, model: ModelConfig) -> Kernels:
    """Returns who computes the decode step of a model on this mesh.

    Every process of a mesh must choose alike, which they do with the same cards, drivers and versions.

    Raises:
        ValueError: `engine.kernels` names kernels that this mesh or machine cannot have.
    """
    if config.kernels == "xla":
        return "xla"
    obstacles: dict[Kernels, Callable[[], str | None]] = {
        "pallas": lambda: _pallas_obstacle(config, mesh, model),
        "native": lambda: _native_obstacle(config, mesh),
    }
    if config.kernels == "auto":
        for kernels, find_obstacle in obstacles.items():
            if find_obstacle() is None:
                return kernels
        return "xla"
    if obstacle := obstacles[config.kernels]():
        raise ValueError(f"engine.kernels is {config.kernels!r}, but {obstacle}; or choose 'auto', which takes what the mesh can have")
    return config.kernels


def _pallas_obstacle(config: EngineConfig, mesh: Mesh, model: ModelConfig) -> str | None:
    """Returns why the kernel for GPUs cannot be had; says so in the log where nobody asked for it and it was tried in vain."""
    if obstacle := gpu.find_obstacle(list(mesh.devices.flat), config.cache_dtype):
        return obstacle
    card = _own_card(mesh)
    fault = None if card is None else find_fault(card, model, config.dtype, config.cache_dtype)
    if card is None or fault is None:
        return None
    obstacle = f"on {card.device_kind}, where it was tried with a small example, {fault}"
    if config.kernels == "auto":
        _LOG.warning("decoding with XLA's attention instead of the kernel of our own: %s", obstacle)
    return obstacle


def _own_card(mesh: Mesh) -> Any:
    """Returns a card of the mesh that this process can use; there is none where a program is only compiled."""
    devices = list(mesh.devices.flat)
    try:
        usable = jax.local_devices(backend=devices[0].platform)
    except RuntimeError:  # no such platform here
        return None
    return next((device for device in devices if device in usable), None)


def find_fault(device: Any, model: ModelConfig, dtype: str, cache_dtype: CacheType, kernel: Part | None = None) -> str | None:
    """Attends with the kernel and with XLA to one small cache with the model's heads on one device; returns what went wrong, or None.

    Args:
        dtype: of the activations.
        kernel: in place of the one for GPUs.
    """
    one_layer = dataclasses.replace(model, num_layers=1)
    random, rows, length = np.random.default_rng(0), len(TRIAL_LENGTHS), TRIAL_LENGTHS[-1]
    try:
        with jax.default_device(device):
            queries = jnp.asarray(random.standard_normal((rows, 1, model.num_heads, model.head_dim)), dtype)
            shape = (rows, length, model.num_kv_heads, model.head_dim)
            keys, values = (jnp.asarray(random.standard_normal(shape), dtype) for _ in range(2))
            cache = write(init_cache(one_layer, rows, length, cache_dtype)[0], keys, values, jnp.zeros(rows, jnp.int32))
            found, expected = (jax.jit(f)(queries, cache, jnp.array(TRIAL_LENGTHS)) for f in (kernel or part_of("pallas"), attend_part))
        differences = [np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in zip(found, expected, strict=True)]
    except Exception as error:  # noqa: BLE001  # whatever a compiler or a driver raises, XLA's attention is there
        return f"it fails with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    largest = float(np.max(differences))
    return None if largest < TRIAL_TOLERANCE else f"its result is {largest:.2g} from that of XLA"  # NaN is not below either


def _native_obstacle(config: EngineConfig, mesh: Mesh) -> str | None:
    """Returns why the kernels for CPUs cannot be had; says so in the log where nobody asked for them and only a compiler is missing."""
    devices = {device.platform for device in mesh.devices.flat}
    if devices != {"cpu"} or mesh.size > 1:
        return f"they run on a single CPU device, and the generator mesh is {mesh.size} × {'/'.join(sorted(devices))}"
    if config.dtype != "float32":
        return f"they compute in float32, and engine.dtype is {config.dtype!r}"
    obstacle = native.find_obstacle()
    if obstacle is not None and config.kernels == "auto":
        _LOG.warning("decoding with XLA's operations, which are slower on this CPU than kernels of our own: %s", obstacle)
    return obstacle
