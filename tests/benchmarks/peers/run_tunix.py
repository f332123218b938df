# pyright: reportMissingImports=false
"""Peer Tunix: its vanilla sampler and its Llama 3 model with the folder's weights, float32, greedy.

Its prefill samples the first token, and its decode loop then runs one step for each new token (the result of the last one is dropped), so
all of these steps are counted for it.
"""

import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from protocol import Run, serve
from tunix.generate import sampler as sampler_lib
from tunix.models.llama3 import model as model_lib
from tunix.models.llama3 import params as params_lib

NO_ID = -1


class IdsAsText:
    """Stands in for a tokenizer: a prompt's text is the JSON list of its ids, so that Tunix gets the very same ids."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return json.loads(text)

    def decode(self, ids: Any, **_: Any) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # none is put before a prompt

    def eos_id(self) -> int:
        return NO_ID

    def pad_id(self) -> int:
        return NO_ID


def load(folder: str) -> tuple[Any, Any]:
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type {config['model_type']!r} is not one that this script can load into Tunix; supported: llama")
    # Tunix 0.1.7 calls apply_rope without the model's rope_theta, so the default is what takes effect.
    model_lib.apply_rope.__defaults__ = (config["rope_theta"],)
    sizes = model_lib.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    return params_lib.create_model_from_safe_tensors(folder, sizes, dtype=jnp.float32), sizes


def start(folder: str, _: list[str]) -> tuple[str, Run]:
    model, sizes = load(folder)
    samplers: dict[int, Any] = {}
    times: list[float] = []

    def timed(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            result = jax.block_until_ready(function(*arguments, **options))
            times.append(time.perf_counter())
            return result

        return call

    def run(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        length = len(prompts[0])
        capacity = length + new_tokens
        if capacity not in samplers:
            cache = sampler_lib.CacheConfig(capacity, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)
            samplers[capacity] = sampler_lib.Sampler(model, IdsAsText(), cache)
            samplers[capacity]._compiled_prefill_fn = timed(samplers[capacity]._compiled_prefill_fn)
            samplers[capacity]._compiled_decode_fn = timed(samplers[capacity]._compiled_decode_fn)
        times.clear()
        begin = time.perf_counter()
        result = samplers[capacity](
            [json.dumps(prompt) for prompt in prompts],
            max_generation_steps=new_tokens,
            max_prompt_length=length,
            eos_tokens=[NO_ID],
        )
        end = time.perf_counter()
        return {
            "total_s": end - begin,
            "prefill_s": times[0] - begin,
            "decode_steps": new_tokens,
            "step_s": (times[1] - times[0]) / new_tokens,
            "token_ids": [tokens.tolist() for tokens in result.tokens],
        }

    return f"{importlib.metadata.version('google-tunix')} (jax {jax.__version__})", run


if __name__ == "__main__":
    serve(start)
