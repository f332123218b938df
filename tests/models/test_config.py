import dataclasses

import pytest

from llamarl_jax.models.config import ModelConfig, RopeScaling
from tests.engine.tiny_engine import CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "model num_layers is 0; it must be at least 1"),
        ({"hidden_size": -4}, "model hidden_size is -4; it must be at least 1"),
        ({"valid_vocab_size": 301}, "valid_vocab_size is 301, but vocab_size is 300"),
        ({"valid_vocab_size": 0}, "valid_vocab_size is 0, but vocab_size is 300"),
        ({"eos_token_ids": (7, 300)}, "eos_token_ids has 300, not an id below vocab_size 300"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 11}, "head_dim is 11; rotary embeddings need an even one"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0 and rms_norm_eps 1e-05; both must be positive"),
        ({"rms_norm_eps": 0.0}, "rope_theta is 10000.0 and rms_norm_eps 0.0; both must be positive"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, qwen2, qwen3"),
        ({"has_qkv_bias": True}, "model_type 'llama' goes with has_qkv_bias=False and has_qk_norm=False, not True and False"),
        ({"model_type": "qwen3"}, "model_type 'qwen3' goes with has_qkv_bias=False and has_qk_norm=True, not False and False"),
    ],
)
def test_impossible_architectures_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.5}, "factor 0.5 and original_max_position_embeddings 8192; both must be at least 1"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings 0; both must be at least 1"),
        ({"low_freq_factor": 4.0}, "low_freq_factor 4.0 and high_freq_factor 4.0; the first must be positive and below the second"),
        ({"low_freq_factor": 0.0}, "low_freq_factor 0.0 and high_freq_factor 4.0"),
    ],
)
def test_impossible_rope_scalings_are_refused(change, message):
    fields = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    with pytest.raises(ValueError, match=message):
        RopeScaling(**{**fields, **change})


def test_every_family_can_be_described():
    for model_type, bias, norm in (("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)):
        config = dataclasses.replace(CONFIG, model_type=model_type, has_qkv_bias=bias, has_qk_norm=norm)
        assert isinstance(config, ModelConfig)
