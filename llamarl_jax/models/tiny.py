"""A tiny random Llama with a character tokenizer, for tests, notebooks and bug reports.

There is nothing to download, and it is small enough to learn a task from scratch within a minute on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from llamarl_jax.models.safetensors_files import SINGLE_NAME, write_safetensors

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*=?.,:\n"
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 2, 4, 2, 128


def write_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """Writes the model into an existing folder as Hugging Face files.

    Args:
        seed: of the random weights.
    """
    vocab_size = len(SPECIAL_TOKENS) + len(CHARACTERS)
    weights = _weights(vocab_size, np.random.default_rng(seed))
    shapes = {name: weight.shape for name, weight in weights.items()}
    write_safetensors(folder / SINGLE_NAME, shapes, np.float32, weights.items())
    eos = SPECIAL_TOKENS.index("<eos>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": eos,
        "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}) + "\n", encoding="utf-8")
    _write_tokenizer(folder)


def _weights(vocab_size: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    def kernel(out_size: int, in_size: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal((out_size, in_size)) * scale / np.sqrt(in_size)).astype(np.float32)

    kv_size, residual_scale = HIDDEN * KV_HEADS // HEADS, (2 * LAYERS) ** -0.5
    weights = {
        "model.embed_tokens.weight": (random.standard_normal((vocab_size, HIDDEN)) * 0.1).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}self_attn.q_proj.weight": kernel(HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": kernel(kv_size, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": kernel(kv_size, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": kernel(HIDDEN, HIDDEN, residual_scale),
            f"{prefix}mlp.gate_proj.weight": kernel(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": kernel(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": kernel(HIDDEN, INTERMEDIATE, residual_scale),
        }
    return weights


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256, "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
