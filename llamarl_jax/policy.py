"""A model folder made ready: architecture, tokenizer, both forms of the transformer, and weights on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from llamarl_jax.data.tokenizer import Tokenizer
from llamarl_jax.fetch import fetch
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.hf_config import from_hugging_face
from llamarl_jax.models.hugging_face import load_params
from llamarl_jax.models.transformer import Params, TransformerSpec
from llamarl_jax.quantization.fp8 import QuantizationConfig


@dataclass(frozen=True)
class Policy:
    """A model without its weights; `stacked` is the form for training."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    stacked: TransformerSpec

    def listed(self, quantization: QuantizationConfig) -> TransformerSpec:
        """Returns the form for decoding."""
        return TransformerSpec.build(self.config, is_scanned=False, quantization=quantization)

    def load_params(self, mesh: Mesh, dtype: Any = jnp.float32) -> Params:
        """Reads the weights of the folder straight into the stacked form's sharding on `mesh`."""
        return load_params(self.folder, self.config, self.stacked.shardings(mesh), dtype)

    def stop_ids(self, stop_texts: Sequence[str]) -> tuple[int, ...]:
        """Returns every id that ends a completion: the model's own and those of `engine.stop_texts`.

        Raises:
            ValueError: a text is not exactly one token.
        """
        ids = list(self.config.eos_token_ids)
        for text in stop_texts:
            encoded = self.tokenizer.encode_fragment(text)
            if len(encoded) != 1:
                raise ValueError(
                    f"engine.stop_texts has {text!r}, which is {len(encoded)} tokens of {self.folder.name}; each must be one token"
                )
            ids.append(int(encoded[0]))
        return tuple(sorted(set(ids)))


def open_policy(name: str) -> Policy:
    """Fetches a model by name, Hub id or folder and reads everything but its weights."""
    folder = fetch(name)
    tokenizer = Tokenizer.from_folder(folder)
    config = from_hugging_face(folder)
    config = dataclasses.replace(config, valid_vocab_size=min(config.vocab_size, tokenizer.num_tokens))
    return Policy(
        folder,
        config,
        tokenizer,
        TransformerSpec.build(config, is_scanned=True),
    )
