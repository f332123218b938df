"""A small GGUF file as llama.cpp writes it, made from Hugging Face weights, for the tests of its import."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from llamarl_jax.models.gguf_import import LAYER_NAMES

HIDDEN, HEADS, KV_HEADS, LAYERS, INTERMEDIATE = 64, 4, 2, 2, 96
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2"))


def byte_level_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names; tied, so there is no head."""
    random = np.random.default_rng(seed)
    kv_size = HIDDEN * KV_HEADS // HEADS
    shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (kv_size, HIDDEN), "v_proj": (kv_size, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
    result = {"model.embed_tokens.weight": (len(byte_level_tokens()), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        result |= {f"model.layers.{layer}.{name}.weight": shapes.get(name.split(".")[-1], (HIDDEN,)) for name in LAYER_NAMES.values()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in result.items()}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of llama.cpp, row by row: row 2·i + s of a head is row s·Q/2 + i of Hugging Face's."""
    head_dim = len(weight) // num_heads
    rows = [h * head_dim + s * head_dim // 2 + i for h in range(num_heads) for i in range(head_dim // 2) for s in range(2)]
    return weight[rows]


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], *, is_quantised: bool = False, architecture: str = "llama", **changes: Any
) -> None:
    """Writes the file; `changes` replaces metadata (`pre`, `extra_tensor`, `integer_tensor`, `rope_scaling`, `without`, `has_template`)."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    if changes.get("without") != "rope_freq_base":
        writer.add_rope_freq_base(100000.0)
    if changes.get("without") != "epsilon":
        writer.add_layer_norm_rms_eps(1e-5)
    if "rope_scaling" in changes:
        writer.add_string("llama.rope.scaling.type", changes["rope_scaling"])
    _add_tokenizer(writer, **changes)
    names = {
        f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{name}.weight" for layer in range(LAYERS) for name, hf in LAYER_NAMES.items()
    }
    names |= {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = permute(tensor, HEADS if "q_proj" in name else KV_HEADS)
        _add_tensor(writer, names[name], tensor, is_quantised)
    if "extra_tensor" in changes:
        _add_tensor(writer, changes["extra_tensor"], np.ones(HIDDEN, np.float32), False)
    if "integer_tensor" in changes:
        _add_tensor(writer, "output.weight", np.ones((len(byte_level_tokens()), HIDDEN), np.int8), False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, pre: str = "smollm", has_template: bool = True, **_: Any) -> None:
    tokens = byte_level_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if has_template:
        writer.add_chat_template(TEMPLATE)


def _add_tensor(writer: GGUFWriter, name: str, tensor: np.ndarray, is_quantised: bool) -> None:
    if is_quantised and tensor.ndim == 2:
        kind = GGMLQuantizationType.Q4_1
        writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor)
