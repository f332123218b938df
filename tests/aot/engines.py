"""The decoder that the tests of this folder compile: 64 slots of 4096 tokens in bfloat16, with float8 weights and activations."""

import dataclasses
from typing import Any

from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.presets import PRESETS
from llamarl_jax.quantization.fp8 import Mode, QuantizationConfig

MODEL = PRESETS["llama3.1-8b"]
SHALLOW = dataclasses.replace(MODEL, num_layers=2)
"""The same layers, two of them: for variants, where a program of 32 layers would only take longer."""


def engine_config(mode: Mode = "w8a8", **changes: Any) -> EngineConfig:
    options: dict[str, Any] = {"num_slots": 64, "max_prompt_tokens": 2048, "max_new_tokens": 2048, "dtype": "bfloat16", **changes}
    return EngineConfig(quantization=QuantizationConfig(mode=mode), **options)


def collectives_of_a_step(model: ModelConfig, slots: int, tensor: int) -> dict[str, tuple[int, int]]:
    """Counts by hand what a w8a8 step must send over the tensor axis: kind → (operations, bytes).

    Of `slots` rows on each replica, all-reduced:

    | what | operations | bytes a row |
    |---|---|---|
    | embedding: each device has a slice of the vocabulary, and zeros for the other ids (bfloat16) | 1 | 2 D |
    | o_proj and down_proj: each device has a part of the inputs (float32, before the scales) | 2 L | 4 D |
    | their inputs' scale: the largest activation of a row is on one device | 2 L | 4 |
    | sampling: mass of each block of 256 ids | 1 | 4 ⌈V / 256⌉ |
    | sampling: the chosen block; the softmax's sum, which XLA sends along with it | 1 | 4 (256 + 1) |
    | sampling: the logit of the chosen id | 1 | 4 |

    All-gathered: the largest logit of each device and its id, 8 bytes a row from each device.
    """
    D, L, V = model.hidden_size, model.num_layers, model.vocab_size
    reduced = 2 * D + 2 * L * 4 * D + 2 * L * 4 + 4 * -(-V // 256) + 4 * 257 + 4
    return {"all-reduce": (1 + 4 * L + 3, slots * reduced), "all-gather": (1, slots * 8 * tensor)}
