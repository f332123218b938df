"""Model folders for the tests of this folder: the golden ones, and logits of any."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.hf_config import from_hugging_face
from llamarl_jax.models.hugging_face import load_params
from llamarl_jax.models.transformer import Params, TransformerSpec

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llama3_scaled", "smollm2", "qwen2", "qwen3")


def one_device() -> Mesh:
    return build_mesh(jax.devices()[:1], {"data": 1, "fsdp": 1, "tensor": 1})


def load(folder: Path, mesh: Mesh | None = None, dtype: Any = jnp.float32, config: ModelConfig | None = None) -> tuple[Params, ModelConfig]:
    config = config or from_hugging_face(folder)
    shardings = TransformerSpec.build(config, is_scanned=True).shardings(mesh or one_device())
    return load_params(folder, config, shardings, dtype), config


def logits(params: Params, config: ModelConfig, ids: np.ndarray) -> np.ndarray:
    """Logits of whole rows, one sequence each."""
    spec = TransformerSpec.build(config, is_scanned=True)

    @jax.jit
    def run(params: Params, ids: jax.Array) -> jax.Array:
        model = spec.bind(params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return model.logits(model(ids, positions, jnp.ones_like(ids)))

    return np.asarray(run(params, jnp.asarray(ids, jnp.int32)))
