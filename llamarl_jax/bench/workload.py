"""The model and the prompts of a benchmark: a folder's real weights, or random ones in a well-known shape."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from llamarl_jax.bench.options import DecodeOptions
from llamarl_jax.bench.sample import TokenIds
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.evaluate import open_decoder
from llamarl_jax.meshes import PlacementConfig, build_meshes
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import INIT_SCALE, Params, TransformerSpec, decoder_dtype
from llamarl_jax.policy import Policy, open_policy
from llamarl_jax.quantization.fp8 import QuantizationConfig

PLACEMENT = PlacementConfig(kind="shared")

SHAPES = {
    "1b": ModelConfig(  # Llama 3.2 1B
        vocab_size=128256,
        valid_vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=500000.0,
    ),
    "8b": ModelConfig(  # Llama 3.1 8B
        vocab_size=128256,
        valid_vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        is_tied_embedding=False,
    ),
}
"""Architectures that need no files; the weights are random, which changes no time."""


@dataclass(frozen=True)
class Workload:
    """A model on its mesh, ready to decode.

    Attributes:
        name: without the folders of this machine.
        folder: Hugging Face folder, or None for random weights.
        origin: where the weights come from.
    """

    name: str
    folder: Path | None
    origin: str
    config: ModelConfig
    spec: TransformerSpec
    mesh: Mesh
    params: Params


def open_workload(options: DecodeOptions) -> Workload:
    """Loads the weights as training does, through the weight export, or makes random ones."""
    quantization = QuantizationConfig(mode=options.quantization)
    if options.model in SHAPES:
        config, mesh = SHAPES[options.model], build_meshes(PLACEMENT).generator
        spec = TransformerSpec.build(config, is_scanned=False, quantization=quantization)
        origin = f"random weights, seed {options.seed}"
        return Workload(options.model, None, origin, config, spec, mesh, random_params(spec, mesh, options.dtype, options.seed))
    policy = open_policy(options.model)
    smallest = EngineConfig(num_slots=1, max_prompt_tokens=1, max_new_tokens=1, dtype=options.dtype, quantization=quantization)
    params = open_decoder(policy, PLACEMENT, smallest, options.seed).params
    name, origin = describe_model(options.model, policy)
    return Workload(
        name,
        policy.folder,
        origin,
        policy.config,
        policy.listed(quantization),
        build_meshes(PLACEMENT).generator,
        params,
    )


def describe_model(model: str, policy: Policy) -> tuple[str, str]:
    """Returns a model's name without the folders of this machine, and where its weights come from."""
    is_path = Path(model).expanduser().is_dir()
    return (policy.folder.name, "a local folder") if is_path else (model, f"llamarl fetch {model}")


def random_params(spec: TransformerSpec, mesh: Mesh, dtype: Any, seed: int) -> Params:
    """Returns random weights in `dtype`, a leaf at a time, so that one program per shape is compiled and no float32 copy is kept."""

    @partial(jax.jit, static_argnames=("shape", "sharding", "dtype"))
    def normal(key: jax.Array, shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint((jax.random.normal(key, shape) * INIT_SCALE).astype(dtype), sharding)

    def make(path: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding, number: int) -> jax.Array:
        if path[-1].key in ("scale", "kernel_scale"):
            return jax.device_put(jnp.ones(shape.shape, shape.dtype), sharding)
        return normal(jax.random.fold_in(jax.random.key(seed), number), shape.shape, sharding, decoder_dtype(path, shape, dtype))

    numbers = jax.tree.unflatten(jax.tree.structure(spec.shapes), range(len(jax.tree.leaves(spec.shapes))))
    return jax.tree_util.tree_map_with_path(make, spec.shapes, spec.shardings(mesh), numbers)


def make_prompts(config: ModelConfig, count: int, num_tokens: int, seed: int, *, samples: int = 1) -> TokenIds:
    """Returns `count` prompts of random ids that the tokenizer knows, without the model's special ones; each `samples` times in a row."""
    special = {*config.eos_token_ids, config.bos_token_id, config.pad_token_id} - {None}
    allowed = np.array([i for i in range(config.valid_vocab_size) if i not in special])
    distinct = np.random.default_rng(seed).choice(allowed, (-(-count // samples), num_tokens))
    return np.repeat(distinct, samples, axis=0)[:count].tolist()


def without_end(config: ModelConfig) -> ModelConfig:
    """Returns the architecture with no end-of-sequence ids, so that every completion uses up its budget."""
    return dataclasses.replace(config, eos_token_ids=())
