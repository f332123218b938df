"""Writes trained weights as a folder that transformers, vLLM and this package load.

Tensors are fetched from the devices one after another and each goes to disk before the next is fetched, so that the host holds one.
The folder is written under a temporary name beside its place and renamed at the end; an interrupted export leaves nothing that looks
finished.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.hf_config import to_hugging_face_dict
from llamarl_jax.models.hugging_face import hugging_face_names, tree_key
from llamarl_jax.models.safetensors_files import DTYPE_NAMES, INDEX_NAME, SINGLE_NAME, write_safetensors
from llamarl_jax.models.transformer import Params, TransformerSpec

TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.json", "merges.txt", "added_tokens.json")
Shapes = dict[str, tuple[int, ...]]


def export_model(
    folder: Path,
    params: Params,
    config: ModelConfig,
    source_folder: Path | None,
    *,
    dtype: Any = np.float32,
    max_shard_bytes: int = 5_000_000_000,
    replaces: bool = False,
) -> Path:
    """Writes config, weights and tokenizer, and returns the folder.

    Args:
        params: the stacked form, in any sharding.
        source_folder: where the tokenizer files and other generation settings are copied from; None copies none.
        dtype: type of the written weights: float32, bfloat16, float16 or float64.
        max_shard_bytes: largest file, in bytes of weights; a bigger model is split and gets an index. One tensor is never split.
        replaces: overwrite an existing folder.

    Raises:
        FileExistsError: the folder exists and `replaces` is False.
        ValueError: the parameters are not those of `config` in the stacked form, or the dtype cannot be written.
    """
    if folder.exists() and not replaces:
        raise FileExistsError(f"{folder} exists; choose another output folder or remove it")
    dtype = np.dtype(dtype)
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"weights cannot be exported as {dtype}; choose one of {', '.join(map(str, DTYPE_NAMES))}")
    _check_params(params, config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        written = temporary / "new"
        written.mkdir()
        _write_configs(written, config, dtype, source_folder)
        _write_weights(written, params, config, dtype, max_shard_bytes)
        _copy_tokenizer(written, source_folder)
        if folder.exists():
            folder.rename(temporary / "old")
        written.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _check_params(params: Params, config: ModelConfig) -> None:
    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    expected, found = shapes(TransformerSpec.build(config, is_scanned=True).shapes), shapes(params)
    if different := sorted(set(expected.items()) ^ set(found.items())):
        name = different[0][0]
        raise ValueError(
            f"parameter {name} has shape {found.get(name, 'none')}, but the stacked form of this model has "
            f"{expected.get(name, 'none')} there; export the trainer's parameters, with the config that they were made from"
        )


def _write_configs(folder: Path, config: ModelConfig, dtype: np.dtype, source_folder: Path | None) -> None:
    raw = {**to_hugging_face_dict(config), "torch_dtype": str(dtype)}  # read by transformers 4 and 5, and by vLLM
    _write_json(folder / "config.json", raw)
    source = source_folder / "generation_config.json" if source_folder else None
    generation = json.loads(source.read_text(encoding="utf-8")) if source and source.is_file() else {}
    ids = {name: raw[name] for name in ("eos_token_id", "bos_token_id", "pad_token_id") if name in raw}
    _write_json(folder / "generation_config.json", {**generation, **ids})


def _write_weights(folder: Path, params: Params, config: ModelConfig, dtype: np.dtype, max_shard_bytes: int) -> None:
    shards = _plan(_tensor_shapes(params, config), dtype, max_shard_bytes)
    tensors = _tensors(params, config)
    weight_map = {}
    for number, shapes in enumerate(shards):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shapes, dtype, islice(tensors, len(shapes)))
        weight_map |= dict.fromkeys(shapes, name)
    if len(shards) > 1:
        num_bytes = sum(leaf.size for leaf in jax.tree.leaves(params)) * dtype.itemsize
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _plan(shapes: Shapes, dtype: np.dtype, max_shard_bytes: int) -> list[Shapes]:
    """Splits the tensors, in order, into files, without fetching any."""
    numbers, number, used = {}, 0, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * dtype.itemsize
        if used and used + size > max_shard_bytes:
            number, used = number + 1, 0
        numbers[name], used = number, used + size
    return [{name: shapes[name] for name in group} for _, group in groupby(shapes, key=numbers.__getitem__)]


def _tensor_shapes(params: Params, config: ModelConfig) -> Shapes:
    names = hugging_face_names(config, params)
    return {
        name: leaf.shape[1:] if path[0].key == "layers" else leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        for name in names[tree_key(path)]
    }


def _tensors(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    names = hugging_face_names(config, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        # An array keeps what was fetched of it for as long as it lives, so only slices and copies are fetched, which die at once.
        parts = (leaf[layer] for layer in range(config.num_layers)) if path[0].key == "layers" else [leaf.copy()]
        for name, part in zip(names[tree_key(path)], parts, strict=True):
            yield name, jax.device_get(part)


def _copy_tokenizer(folder: Path, source_folder: Path | None) -> None:
    if source_folder is None:
        return
    for file in (file for pattern in TOKENIZER_PATTERNS for file in source_folder.glob(pattern)):
        if file.is_file():
            shutil.copy(file, folder / file.name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
