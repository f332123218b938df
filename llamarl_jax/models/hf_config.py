"""A Hugging Face `config.json` as a `ModelConfig`, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl_jax.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
QWEN3_HEAD_DIM = 128  # what transformers takes where config.json is silent; the other families divide hidden_size


class ModelConfigError(ValueError):
    """A config.json is damaged or asks for what the transformer does not cover; the message names file, key and value."""


def from_hugging_face(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a model folder.

    `valid_vocab_size` is set to `vocab_size`, since only the tokenizer knows better.

    Raises:
        FileNotFoundError: there is no config.json.
        ModelConfigError: a file is damaged, or the model is of a kind that the transformer does not cover.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a Hugging Face model folder")
    raw = _read_json(path)
    _check_supported(raw, path)
    try:
        return _build(raw, folder)
    except KeyError as error:
        raise ModelConfigError(f"{path} has no {error}; the file is not complete, download it again") from error
    except ModelConfigError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelConfigError(
            f"{path} describes an impossible model: {error}; compare it with the original, or download it again"
        ) from error


def to_hugging_face_dict(config: ModelConfig) -> dict[str, Any]:
    """Returns the content of a config.json that transformers 4 and 5 read."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    eos = config.eos_token_ids
    result = {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,  # transformers 4 reads these two, 5 the third
        "rope_scaling": rope if config.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.is_tied_embedding,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }
    optional = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    return result | {name: value for name, value in optional.items() if value is not None}


def _build(raw: Mapping[str, Any], folder: Path) -> ModelConfig:
    model_type, num_heads = raw["model_type"], raw["num_attention_heads"]
    default_head_dim = QWEN3_HEAD_DIM if model_type == "qwen3" else raw["hidden_size"] // num_heads
    theta, scaling = _rope(raw, folder / "config.json")
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        valid_vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or default_head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=model_type == "qwen3",
        is_tied_embedding=raw.get("tie_word_embeddings", False),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        eos_token_ids=_eos_token_ids(raw, folder),
        bos_token_id=raw.get("bos_token_id"),
        pad_token_id=raw.get("pad_token_id"),
    )


def _check_supported(raw: Mapping[str, Any], path: Path) -> None:
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ModelConfigError(f"{path}: model_type {model_type!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    refused = ["use_sliding_window", "mlp_bias", "quantization_config"]
    refused += ["attention_bias"] if model_type != "qwen2" else []
    for name in refused:
        if value := raw.get(name):
            raise ModelConfigError(f"{path}: {name} = {value} is not supported for model_type {model_type!r}; choose a model without it")
    if sliding := set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ModelConfigError(f"{path}: layer_types has {min(sliding)!r}, which is not supported; supported: full_attention")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelConfigError(f"{path}: hidden_act {activation!r} is not supported; supported: silu")


def _rope(raw: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise ModelConfigError(f"{path}: rope type {rope_type!r} is not supported; supported: default, llama3")
    return theta, RopeScaling(
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_position_embeddings=parameters["original_max_position_embeddings"],
    )


def _eos_token_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Joins the ids of both files; every one of them ends a completion."""
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    ids: set[int] = set()
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelConfigError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{path} holds a JSON {type(raw).__name__} where an object is expected; download it again")
    return raw
