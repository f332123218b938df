"""Reads the weights of a Hugging Face folder straight into their sharding.

Each device's slice is cut from the memory-mapped files when JAX asks for it, so that a process touches the bytes that its own devices
hold, one leaf at a time, and never the whole model. A slice that several devices hold is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.safetensors_files import WeightsError, file_of, open_tensors
from llamarl_jax.models.transformer import Params, TransformerSpec


def load_params(folder: Path, config: ModelConfig, shardings: Params, dtype: Any) -> Params:
    """Returns the stacked form's parameters in the given shardings.

    Args:
        shardings: nested dict of `jax.sharding.Sharding`, as `TransformerSpec.shardings` gives it.
        dtype: type of the result.

    Raises:
        WeightsError: a tensor is missing, unexpected or of another shape, or a file is damaged.
        FileNotFoundError: there are no safetensors files, or one that the index names is missing.
    """
    tensors = open_tensors(folder)
    shapes = TransformerSpec.build(config, is_scanned=True).shapes
    names = hugging_face_names(config, shapes)
    _check(tensors, names, shapes, folder, config)

    def load(path: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        sources = [tensors[name] for name in names[tree_key(path)]]
        return _load_leaf(sources, shape.shape, sharding, np.dtype(dtype), is_stacked=path[0].key == "layers")

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def hugging_face_names(config: ModelConfig, shapes: Params) -> dict[tuple[str, ...], list[str]]:
    """Maps each leaf of the stacked form to its tensors in a Hugging Face file: one, or one a layer."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention": "self_attn"}
    top = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    result = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(shapes):
        keys = tree_key(path)
        leaf = "bias" if keys[-1] == "bias" else "weight"
        if keys[0] != "layers":
            result[keys] = [f"{top[keys[0]]}.{leaf}"]
            continue
        inner = ".".join(norms.get(key, key) for key in keys[1:-1])
        result[keys] = [f"model.layers.{layer}.{inner}.{leaf}" for layer in range(config.num_layers)]
    return result


def tree_key(path: Any) -> tuple[str, ...]:
    """Returns the keys of a leaf of a nested dict from its tree path."""
    return tuple(entry.key for entry in path)


def _load_leaf(
    sources: Sequence[np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: np.dtype, *, is_stacked: bool
) -> jax.Array:
    slices: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

    def cut(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        key = tuple(s.indices(size) for s, size in zip(index, shape, strict=True))
        if key not in slices:
            slices[key] = _cut_stacked(sources, index, dtype) if is_stacked else np.array(sources[0][index], dtype)
        return slices[key]

    return jax.make_array_from_callback(shape, sharding, cut)


def _cut_stacked(sources: Sequence[np.ndarray], index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Fills one array layer by layer; stacking a list would hold every layer twice."""
    layers = sources[index[0]]
    result = np.empty((len(layers), *layers[0][index[1:]].shape), dtype)
    for row, source in zip(result, layers, strict=True):
        row[...] = source[index[1:]]
    return result


def _check(
    tensors: Mapping[str, np.ndarray],
    names: Mapping[tuple[str, ...], list[str]],
    shapes: Params,
    folder: Path,
    config: ModelConfig,
) -> None:
    expected = {"lm_head.weight"} if config.is_tied_embedding else set()  # some files hold the tied head again
    for path, shape in jax.tree_util.tree_leaves_with_path(shapes):
        wanted = shape.shape[1:] if path[0].key == "layers" else shape.shape
        for name in names[tree_key(path)]:
            expected.add(name)
            if name not in tensors:
                raise WeightsError(f"{folder} has no tensor {name!r} of shape {wanted}; the weights do not belong to its config.json")
            if (found := tensors[name].shape) != wanted:
                raise WeightsError(
                    f"{file_of(tensors[name], folder)}: tensor {name!r} has shape {found}, but config.json asks for {wanted}; the weights "
                    "do not belong to it"
                )
    extra = sorted(name for name in tensors if name not in expected and not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise WeightsError(
            f"{file_of(tensors[extra[0]], folder)}: {len(extra)} tensors are not explained by config.json, such as {extra[0]!r} of shape "
            f"{tensors[extra[0]].shape}; is it another architecture?"
        )
