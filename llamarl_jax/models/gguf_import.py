"""Turns a llama-architecture GGUF file into a Hugging Face folder: weights dequantised to float32, config, and tokenizer rebuilt.

llama.cpp stores query and key rows in another order (its rotary embedding pairs neighbours, Hugging Face's pairs halves); it is undone here.
The tokenizer is byte-level BPE with the pre-tokenizer that the file names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PERMUTED = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN, USER_TOKEN = 3, 4


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Writes the model into an existing, empty folder.

    Raises:
        ValueError: the file's architecture, tokenizer or a tensor is of a kind that is not supported.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{gguf_path}: architecture {fields['general.architecture']!r} is not supported; supported: llama")
    weights = dict(_convert_tensor(tensor, fields, gguf_path) for tensor in reader.tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(fields, weights))
    _write_json(folder / "generation_config.json", {"eos_token_id": fields["tokenizer.ggml.eos_token_id"]})
    _write_tokenizer(folder, fields, gguf_path)


def undo_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rows of a query or key kernel [heads · Q, D] back into Hugging Face's order."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _convert_tensor(tensor: Any, fields: dict[str, Any], path: Path) -> tuple[str, np.ndarray]:
    from gguf.quants import dequantize

    weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    parts = tensor.name.removesuffix(".weight").split(".")
    if parts[0] == "blk" and parts[2] in LAYER_NAMES:
        if parts[2] in PERMUTED:
            weight = undo_permutation(weight, fields[PERMUTED[parts[2]]])
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight", weight
    if parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.weight", weight
    raise ValueError(f"{path}: tensor {tensor.name!r} is of no known kind; only plain llama models can be converted")


def _config(fields: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, Any]:
    theta = float(fields.get("llama.rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise ValueError(f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; supported: 'gpt2' with 'smollm'")
    tokens, merges = fields["tokenizer.ggml.tokens"], [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, fuse_unk=False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)  # pyright: ignore
    special = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind in (CONTROL_TOKEN, USER_TOKEN)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **{role: tokens[i] for role, i in ids.items() if i is not None},
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
