"""float8 weights for the decoder: one scale for each output channel, made from the float32 masters before the weights travel.

`w8a16` keeps activations as they are and multiplies by the weights' values. `w8a8` also rounds activations, with one scale for each token,
and multiplies float8 by float8: on NVIDIA GPUs XLA turns exactly this form (scales applied to the product) into cuBLASLt's float8 product,
while scaling before the product does not match. Both accumulate in float32.

float8_e4m3fn has no infinity, and a plain cast of 465 gives NaN, so values are clipped to ±448 first. A channel's largest value is
mapped to 448, which uses the whole range.

Source of the per-channel and per-token scheme: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.

Dimensions: O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from llamarl_jax.quantization.row_product import row_product

Mode = Literal["none", "w8a16", "w8a8"]
LAYER_KERNELS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
KERNELS = (*LAYER_KERNELS, "lm_head")
"""What can be quantised."""
DTYPE = jnp.float8_e4m3fn
LARGEST = 448.0
_LEAST_SCALE = 1e-30
"""Keeps the scale of a channel of zeros, or of subnormal numbers, a normal float32 whose reciprocal is finite."""


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Which of the decoder's weights are float8."""

    mode: Mode = "none"
    """`none`; `w8a16`: weights only; `w8a8`: weights and, token by token, the activations they are multiplied with."""
    kernels: tuple[str, ...] = LAYER_KERNELS
    """Kernels that are quantised. `lm_head` can be added for a model whose head is not its embedding. Embeddings and norms never are:
    a small error in them is one in every token."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.kernels) - set(KERNELS)):
            raise ValueError(f"quantization.kernels has {unknown}; only {', '.join(KERNELS)} can be quantised")

    def mode_of(self, kernel: str) -> Mode:
        """Returns how one kernel is stored."""
        return self.mode if kernel in self.kernels else "none"


def quantize(x: Float[Array, "*rows I"]) -> tuple[Float[Array, "*rows I"], Float[Array, "*rows"]]:
    """Returns float8 values and float32 scales with values · scale ≈ x, one scale for each row; finite for every finite input."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1) / LARGEST, _LEAST_SCALE)
    # Dividing twice would be one rounding more than needed; multiplying by a reciprocal could overflow.
    values = jnp.clip(wide / scale[..., None], -LARGEST, LARGEST).astype(DTYPE)
    return values, scale


def quantize_kernel(linear: dict[str, Any]) -> dict[str, Any]:
    """Returns a linear layer's parameters with a float8 kernel and its scales; a bias stays as it is."""
    kernel, scale = quantize(linear["kernel"])
    return {**linear, "kernel": kernel, "kernel_scale": scale}


def quantize_kernels(params: dict[str, Any], config: QuantizationConfig) -> dict[str, Any]:
    """Returns parameters of the decoding form, of a layer or around the layers, with the kernels of the config in float8."""

    def visit(tree: dict[str, Any]) -> dict[str, Any]:
        return {
            name: quantize_kernel(entry) if config.mode_of(name) != "none" else (visit(entry) if isinstance(entry, dict) else entry)
            for name, entry in tree.items()
        }

    return visit(params)


def fp8_product(
    x: Float[Array, "*rows I"], kernel: Float[Array, "O I"], kernel_scale: Float[Array, " O"], mode: Mode
) -> Float[Array, "*rows O"]:
    """Returns x · (kernel · scale)ᵀ in float32."""
    if mode == "w8a16":
        return row_product(x, kernel.astype(x.dtype)) * kernel_scale
    values, scale = quantize(x)
    product = row_product(values.reshape(-1, values.shape[-1]), kernel).reshape(*x.shape[:-1], -1)
    return product * scale[..., None] * kernel_scale
