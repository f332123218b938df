import dataclasses
import json

import pytest

from llamarl_jax.models.config import RopeScaling
from llamarl_jax.models.hf_config import ModelConfigError, from_hugging_face, to_hugging_face_dict
from tests.models.folders import FAMILIES, GOLDEN

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "eos_token_id": 5,
}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
EXPECTED_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


@pytest.fixture
def folder(tmp_path):
    def write(generation=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500000.0, "rope_scaling": SCALING},
        {"rope_parameters": {**SCALING, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": SCALING},
        {"rope_theta": 500000.0, "rope_scaling": {"type" if name == "rope_type" else name: value for name, value in SCALING.items()}},
    ],
    ids=["transformers 4", "transformers 5", "theta outside", "old key 'type'"],
)
def test_rope_of_every_transformers_version_is_read(folder, keys):
    config = from_hugging_face(folder(**keys))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == EXPECTED_SCALING


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 1e5),
    ],
)
def test_rope_without_scaling(folder, keys, theta):
    config = from_hugging_face(folder(**keys))
    assert (config.rope_theta, config.rope_scaling) == (theta, None)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, None, (5,)),
        (5, {"eos_token_id": [7, 5]}, (5, 7)),
        ([9, 7], {"eos_token_id": 3}, (3, 7, 9)),
        (None, {}, ()),
        (0, {"eos_token_id": None}, (0,)),
    ],
)
def test_eos_ids_of_both_files_are_joined(folder, in_config, in_generation, expected):
    """A model that stops on only one of its EOS ids rambles on behind the other."""
    assert from_hugging_face(folder(in_generation, eos_token_id=in_config)).eos_token_ids == expected


def test_defaults_of_the_families(folder):
    llama = from_hugging_face(folder(num_key_value_heads=None))
    assert (llama.num_kv_heads, llama.head_dim, llama.is_tied_embedding, llama.has_qkv_bias, llama.has_qk_norm) == (
        4,
        8,
        False,
        False,
        False,
    )
    qwen2 = from_hugging_face(folder(model_type="qwen2", tie_word_embeddings=True, use_sliding_window=False, sliding_window=4096))
    assert (qwen2.head_dim, qwen2.is_tied_embedding, qwen2.has_qkv_bias, qwen2.has_qk_norm) == (8, True, True, False)
    qwen3 = from_hugging_face(folder(model_type="qwen3", attention_bias=False))
    assert (qwen3.head_dim, qwen3.has_qkv_bias, qwen3.has_qk_norm) == (128, False, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_gives_the_same_config(tmp_path, family):
    config = from_hugging_face(GOLDEN / family)
    assert config.pad_token_id == 0
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face_dict(config)))
    assert from_hugging_face(tmp_path) == config


def test_single_and_no_eos_are_written_as_hugging_face_does():
    config = from_hugging_face(GOLDEN / "qwen2")
    assert to_hugging_face_dict(dataclasses.replace(config, eos_token_ids=(4,)))["eos_token_id"] == 4
    assert to_hugging_face_dict(dataclasses.replace(config, eos_token_ids=()))["eos_token_id"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; supported: llama, qwen2, qwen3"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = True is not supported for model_type 'qwen2'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention', which is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported for model_type 'llama'"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8.* is not supported for model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported; supported: default, llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "config.json has no 'low_freq_factor'; the file is not complete"),
    ],
)
def test_what_the_transformer_does_not_cover_is_refused(folder, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        from_hugging_face(folder(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"num_attention_heads": 0}, "division"),
        ({"hidden_size": None}, "'NoneType'"),
        ({"eos_token_id": 500}, "eos_token_ids has 500, not an id below vocab_size 100"),
        ({"rope_scaling": {**SCALING, "factor": 0.5}}, "rope scaling with factor 0.5"),
    ],
)
def test_an_impossible_model_is_refused_with_the_name_of_its_file(folder, changes, message):
    with pytest.raises(ModelConfigError, match=f"config.json describes an impossible model: .*{message}.*; compare it with the original"):
        from_hugging_face(folder(**changes))


def test_missing_key_missing_file_and_damaged_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist; give a Hugging Face model folder"):
        from_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}))
    with pytest.raises(ModelConfigError, match=r"config.json has no 'hidden_size'; the file is not complete"):
        from_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match=r"config.json holds a JSON list where an object is expected; download it again"):
        from_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ModelConfigError, match=r"config.json is not valid JSON \(.*\); download it again"):
        from_hugging_face(tmp_path)
