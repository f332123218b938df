"""Turns a llama-architecture GGUF file into a Hugging Face folder: weights dequantised to float32, config, and tokenizer rebuilt.

llama.cpp stores query and key rows in another order (its rotary embedding pairs neighbours, Hugging Face's pairs halves); it is
undone here. The tokenizer is byte-level BPE with the pre-tokenizer that the file names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_jax.models.safetensors_files import SINGLE_NAME, write_safetensors

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


class GgufError(ValueError):
    """A GGUF file holds what cannot be converted; the message names file, thing and what is supported."""


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Writes the model into an existing, empty folder.

    Raises:
        GgufError: the file's architecture, tokenizer or a tensor is of a kind that is not supported, or the metadata lacks a key.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(gguf_path))
    except (ValueError, IndexError) as error:
        raise GgufError(f"{gguf_path} is not a whole GGUF file ({error}); download it again") from error
    fields = _Fields({name: field.contents() for name, field in reader.fields.items()}, gguf_path)
    if fields["general.architecture"] != "llama":
        raise GgufError(f"{gguf_path}: architecture {fields['general.architecture']!r} is not supported; supported: llama")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise GgufError(f"{gguf_path}: RoPE scaling {fields['llama.rope.scaling.type']!r} is not supported; supported: none")
    tensors = {_tensor_name(tensor.name, gguf_path): tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    weights = ((name, _weight(tensor, fields, gguf_path)) for name, tensor in tensors.items())
    write_safetensors(folder / SINGLE_NAME, shapes, np.float32, weights)
    _write_json(folder / "config.json", _config(fields, shapes))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write_tokenizer(folder, fields, gguf_path)


def undo_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rows of a query or key kernel [heads · Q, D] back into Hugging Face's order."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


class _Fields(dict[str, Any]):
    """The file's metadata; a missing key is named together with the file."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        super().__init__(fields)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise GgufError(f"{self._path} has no metadata {name!r}; only complete llama models can be converted")


def _tensor_name(name: str, path: Path) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk" and len(parts) == 3 and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    if len(parts) == 1 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.weight"
    raise GgufError(f"{path}: tensor {name!r} is of no known kind; only plain llama models can be converted")


def _weight(tensor: Any, fields: dict[str, Any], path: Path) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise GgufError(
            f"{path}: tensor {tensor.name!r} is stored as {kind}, which is not supported; use F32, F16, BF16 or Q8_0"
        ) from error
    kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
    return undo_permutation(weight, fields[PERMUTED[kind]]) if kind in PERMUTED else weight


def _config(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    theta = float(fields.get("llama.rope.freq_base", 10000.0))
    hidden_size, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        **_special_ids(fields),
        "torch_dtype": "float32",
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int | None]:
    return {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise GgufError(f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; supported: 'gpt2' with 'smollm'")
    tokens, merges = fields["tokenizer.ggml.tokens"], [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, fuse_unk=False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)  # pyright: ignore
    special = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind in (CONTROL_TOKEN, USER_TOKEN)
    ]
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
