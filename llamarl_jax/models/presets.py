"""Published models by name, for planning and for compiling without their files: what `hf_config.from_hugging_face` would read.

Numbers are those of config.json and generation_config.json of the instruction-tuned models on the Hub (huggingface.co/meta-llama,
huggingface.co/Qwen); of the Qwen families `valid_vocab_size` is the number of entries of their tokenizers.

    config = PRESETS["llama3.1-8b"]
"""

from __future__ import annotations

from collections.abc import Mapping

from llamarl_jax.models.config import ModelConfig, RopeScaling


def _llama31(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        valid_vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        rms_norm_eps=1e-5,
        is_tied_embedding=False,
        max_position_embeddings=131072,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )


def _qwen25(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, *, is_large: bool, is_tied: bool
) -> ModelConfig:
    return ModelConfig(
        model_type="qwen2",
        vocab_size=152064 if is_large else 151936,
        valid_vocab_size=151665,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        has_qkv_bias=True,
        is_tied_embedding=is_tied,
        max_position_embeddings=32768,
        eos_token_ids=(151643, 151645),
        bos_token_id=151643,
    )


def _qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, *, is_tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=151936,
        valid_vocab_size=151669,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        has_qk_norm=True,
        is_tied_embedding=is_tied,
        max_position_embeddings=40960,
        eos_token_ids=(151643, 151645),
        bos_token_id=151643,
    )


PRESETS: Mapping[str, ModelConfig] = {
    "llama3.1-8b": _llama31(4096, 14336, 32, 32),
    "llama3.1-70b": _llama31(8192, 28672, 80, 64),
    "llama3.1-405b": _llama31(16384, 53248, 126, 128),
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, is_large=False, is_tied=True),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, is_large=False, is_tied=True),
    "qwen2.5-3b": _qwen25(2048, 11008, 36, 16, 2, is_large=False, is_tied=True),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 28, 4, is_large=True, is_tied=False),
    "qwen2.5-14b": _qwen25(5120, 13824, 48, 40, 8, is_large=True, is_tied=False),
    "qwen2.5-32b": _qwen25(5120, 27648, 64, 40, 8, is_large=True, is_tied=False),
    "qwen2.5-72b": _qwen25(8192, 29568, 80, 64, 8, is_large=True, is_tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, is_tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, is_tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, is_tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, is_tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, is_tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, is_tied=False),
}
