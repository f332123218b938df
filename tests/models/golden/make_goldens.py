"""Makes small random models of every family with transformers, and their logits, as the golden files beside this script.

Run it where PyTorch and transformers are installed: `python tests/models/golden/make_goldens.py`. The weights are larger than at
initialisation, and biases and norms are not the 0 and 1 of a fresh model, so that a forgotten one changes the logits.
"""

import shutil
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FOLDER = Path(__file__).parent
VOCABULARY, ROWS, LENGTH = 61, 2, 24
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "dtype": "float32",
}
# The original context is short and the frequencies are slow, so that all three zones of the scaling occur within LENGTH tokens.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def main() -> None:
    """Writes all families."""
    save(
        "llama3_scaled",
        LlamaForCausalLM,
        LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5, tie_word_embeddings=False),
    )
    odd_heads = {**COMMON, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    save(
        "smollm2", LlamaForCausalLM, LlamaConfig(**odd_heads, rope_parameters=plain(100000.0), rms_norm_eps=1e-5, tie_word_embeddings=True)
    )
    save("qwen2", Qwen2ForCausalLM, Qwen2Config(**COMMON, rope_parameters=plain(1000000.0), rms_norm_eps=1e-6, tie_word_embeddings=True))
    wide_heads = {**COMMON, "head_dim": 16, "attention_bias": False}
    save(
        "qwen3", Qwen3ForCausalLM, Qwen3Config(**wide_heads, rope_parameters=plain(1000000.0), rms_norm_eps=1e-6, tie_word_embeddings=False)
    )


def plain(theta: float) -> dict[str, object]:
    """Returns rotary parameters without scaling."""
    return {"rope_type": "default", "rope_theta": theta}


def save(name: str, model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Writes one family's folder with config, weights and `expected.npz`."""
    torch.manual_seed(sum(map(ord, name)))
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 1.0 if "embed_tokens" in parameter_name else 0.25)
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        logits = model(ids).logits
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    np.savez(folder / "expected.npz", token_ids=ids.numpy().astype(np.int32), logits=logits.numpy())


if __name__ == "__main__":
    main()
