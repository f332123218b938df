"""A Hugging Face `config.json` as a `ModelConfig`, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl_jax.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def from_hugging_face(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a model folder.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: the model is of a kind that the transformer does not cover; the message names what.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a Hugging Face model folder")
    raw = json.loads(path.read_text(encoding="utf-8"))
    _check_supported(raw, path)
    model_type = raw["model_type"]
    num_heads = raw["num_attention_heads"]
    theta, scaling = _rope(raw, path)
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        valid_vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=model_type == "qwen3",
        is_tied_embedding=raw.get("tie_word_embeddings", False),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        eos_token_ids=_eos_token_ids(raw, folder),
    )


def to_hugging_face_dict(config: ModelConfig) -> dict[str, Any]:
    """Returns the content of a config.json that transformers 4 and 5 read."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return {
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
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "attention_bias": False,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.is_tied_embedding,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


def _check_supported(raw: Mapping[str, Any], path: Path) -> None:
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type {model_type!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    refused = {"use_sliding_window": True, "mlp_bias": True}
    if model_type != "qwen2":
        refused["attention_bias"] = True
    for name, value in refused.items():
        if raw.get(name, False) == value:
            raise ValueError(f"{path}: {name} = {value} is not supported for model_type {model_type!r}; choose a model without it")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported: silu")


def _rope(raw: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    parameters = raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta", 10000.0)}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise ValueError(f"{path}: rope type {rope_type!r} is not supported; supported: default, llama3")
    return theta, RopeScaling(
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_position_embeddings=parameters["original_max_position_embeddings"],
    )


def _eos_token_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Joins the ids of both files; every one of them ends a completion."""
    generation_path = folder / "generation_config.json"
    generation = json.loads(generation_path.read_text(encoding="utf-8")) if generation_path.is_file() else {}
    ids: set[int] = set()
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
