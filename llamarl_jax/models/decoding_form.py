"""Turns one layer of the training form into the decoding form: kernels that read the same input become one.

The order inside a fused kernel does not depend on the mesh: a slice by any tensor axis that divides the key-value heads (or the blocks of
the mlp) holds everything that its device needs, so weights are fused once, on the trainer mesh, before they travel.

| fused kernel | rows, in order |
|---|---|
| `qkv_proj` | for each key-value head: its query heads, its key, its value |
| `gate_up_proj` | alternating blocks of `gate_up_block` rows: gate, up |

Dimensions: K key-value heads, Q head dim, F mlp, D model.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import Params, gate_up_block


def fuse_layer(layer: Params, config: ModelConfig) -> Params:
    """Returns the decoding form of one unstacked layer of the training form."""
    attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
    parts = [attention.pop(name) for name in ("q_proj", "k_proj", "v_proj")]
    attention["qkv_proj"] = {name: _interleave([part[name] for part in parts], config.num_kv_heads) for name in parts[0]}
    pair = [mlp.pop(name)["kernel"] for name in ("gate_proj", "up_proj")]
    mlp["gate_up_proj"] = {"kernel": _interleave(pair, config.intermediate_size // gate_up_block(config))}
    return {**layer, "attention": attention, "mlp": mlp}


def _interleave(parts: list[Array], num_pieces: int) -> Array:
    """Cuts each part into `num_pieces` along its first axis and joins first pieces, second pieces, and so on."""
    cut = [part.reshape(num_pieces, -1, *part.shape[1:]) for part in parts]
    return jnp.concatenate(cut, axis=1).reshape(-1, *parts[0].shape[1:])
