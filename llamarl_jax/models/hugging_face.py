"""Reads the weights of a Hugging Face folder straight into their sharding.

Every safetensors file is memory-mapped and each device's slice is cut from the map when JAX asks for it, so that a process touches the bytes that
its own devices hold, one leaf at a time, and never the whole model. The map is made from the file's header (8 bytes of length, JSON, raw
data; see the safetensors documentation), because one code path then serves float32, float16 and bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import Params, TransformerSpec

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype(np.float64)}
INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


class WeightsError(ValueError):
    """The weights in a folder do not fit its config; the message names file, tensor and fix."""


def load_params(folder: Path, config: ModelConfig, shardings: Params, dtype: Any) -> Params:
    """Returns the stacked form's parameters in the given shardings.

    Args:
        shardings: nested dict of `jax.sharding.Sharding`, as `TransformerSpec.shardings` gives it.
        dtype: type of the result.

    Raises:
        WeightsError: a tensor is missing, unexpected or of another shape, or a file is damaged.
        FileNotFoundError: there are no safetensors files.
    """
    tensors = open_tensors(folder)
    spec = TransformerSpec.build(config, is_scanned=True)
    names = hugging_face_names(config, spec.shapes)
    _check(tensors, names, spec.shapes, folder, config)

    def load(path: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        sources = [tensors[name] for name in names[_key(path)]]
        is_stacked = path[0].key == "layers"

        def cut(index: tuple[slice, ...]) -> np.ndarray:
            if not is_stacked:
                return np.asarray(sources[0][index], dtype)
            return np.stack([np.asarray(source[index[1:]], dtype) for source in sources[index[0]]])

        return jax.make_array_from_callback(shape.shape, sharding, cut)

    return jax.tree_util.tree_map_with_path(load, spec.shapes, shardings)


def hugging_face_names(config: ModelConfig, shapes: Params) -> dict[tuple[str, ...], list[str]]:
    """Maps each leaf of the stacked form to its tensors in a Hugging Face file: one, or one a layer."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention": "self_attn"}
    top = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    result = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(shapes):
        keys = _key(path)
        leaf = "bias" if keys[-1] == "bias" else "weight"
        if keys[0] != "layers":
            result[keys] = [f"{top[keys[0]]}.{leaf}"]
            continue
        inner = ".".join(norms.get(key, key) for key in keys[1:-1])
        result[keys] = [f"model.layers.{layer}.{inner}.{leaf}" for layer in range(config.num_layers)]
    return result


def open_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Maps all tensors of a folder's safetensors files into memory, by name; reads their headers only.

    Raises:
        FileNotFoundError: there are none, or the index names a file that is missing.
        WeightsError: a file is damaged.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{index} names {missing[0]!r}, which is not in the folder; download the model again")
    elif (folder / SINGLE_NAME).is_file():
        files = [SINGLE_NAME]
    else:
        raise FileNotFoundError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors weights can be loaded")
    return {name: tensor for file in files for name, tensor in _map_file(folder / file)}


def _map_file(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 + header_size:
            raise WeightsError(f"{path} is cut off: {size} bytes, but its header alone has {header_size}; download it again")
        header = json.loads(file.read(header_size))
    data = np.memmap(path, np.uint8, mode="r", offset=8 + header_size) if size > 8 + header_size else np.empty(0, np.uint8)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if end > len(data):
            raise WeightsError(f"{path} is cut off: tensor {name!r} ends at byte {end} of {len(data)}; download it again")
        if entry["dtype"] not in DTYPES:
            raise WeightsError(f"{path}: tensor {name!r} has dtype {entry['dtype']}; supported: {', '.join(DTYPES)}")
        yield name, data[start:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _check(
    tensors: Mapping[str, np.ndarray], names: Mapping[tuple[str, ...], list[str]], shapes: Params, folder: Path, config: ModelConfig
) -> None:
    expected: set[str] = set()
    for path, shape in jax.tree_util.tree_leaves_with_path(shapes):
        wanted = shape.shape[1:] if path[0].key == "layers" else shape.shape
        for name in names[_key(path)]:
            expected.add(name)
            if name not in tensors:
                raise WeightsError(f"{folder} has no tensor {name!r} of shape {wanted}; the weights do not belong to its config.json")
            if tensors[name].shape != wanted:
                raise WeightsError(f"{folder}: tensor {name!r} has shape {tensors[name].shape}, but config.json asks for {wanted}")
    ignored = {"lm_head.weight"} if config.is_tied_embedding else set()
    extra = sorted(name for name in tensors if name not in expected | ignored and not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise WeightsError(f"{folder} has {len(extra)} tensors that config.json does not explain, such as {extra[0]!r}; is it another architecture?")


def _key(path: Any) -> tuple[str, ...]:
    return tuple(entry.key for entry in path)
