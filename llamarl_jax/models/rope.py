"""Rotary position embeddings in the Hugging Face convention (halves rotated), with Llama 3's frequency scaling.

"RoFormer: Enhanced Transformer with Rotary Position Embedding", Su et al., arXiv 2104.09864. The scaling is that of the Llama 3.1
release: long wavelengths are stretched by `factor`, short ones are kept, and those between are interpolated.

Dimensions: B rows, T tokens, N heads, Q head dim.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamarl_jax.models.config import ModelConfig

Rope = tuple[Float[Array, "B T Q"], Float[Array, "B T Q"]]
"""Cosines and sines of positions."""


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns float32 [Q/2], radians per position of each rotated pair."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1.0 / (np.float32(config.rope_theta) ** exponents)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    old_context = scaling.original_max_position_embeddings
    smooth = (old_context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)  # 0: long wavelength, fully stretched; 1: short wavelength, kept
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def rope_tables(config: ModelConfig, positions: Int[Array, "B T"]) -> Rope:
    """Returns float32 cosines and sines of every position."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N Q"], cos: Float[Array, "B T Q"], sin: Float[Array, "B T Q"]) -> Float[Array, "B T N Q"]:
    """Rotates queries or keys; computed in float32, returned in the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    rotated = x.astype(jnp.float32) * cos[:, :, None, :] + turned * sin[:, :, None, :]
    return rotated.astype(x.dtype)
