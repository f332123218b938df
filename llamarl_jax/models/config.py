"""TEMPORARY stand-in, replaced by the real file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int
    valid_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_tied_embedding: bool = True
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
