"""Writes trained weights as a folder that transformers, vLLM and this package load.

Tensors are fetched from the devices and written one file at a time, so that the host holds one shard. The folder is written under a temporary
name beside its place and renamed at the end; an interrupted export leaves nothing that looks finished.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.hf_config import to_hugging_face_dict
from llamarl_jax.models.hugging_face import INDEX_NAME, SINGLE_NAME, hugging_face_names
from llamarl_jax.models.transformer import Params

TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.json", "merges.txt", "added_tokens.json")


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
        source_folder: where the tokenizer files are copied from; None copies none.
        dtype: type of the written weights.
        max_shard_bytes: largest file; a bigger model is split and gets an index.
        replaces: overwrite an existing folder.

    Raises:
        FileExistsError: the folder exists and `replaces` is False.
    """
    if folder.exists() and not replaces:
        raise FileExistsError(f"{folder} exists; choose another output folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_configs(temporary, config)
        _write_weights(temporary, params, config, np.dtype(dtype), max_shard_bytes)
        if source_folder is not None:
            for pattern in TOKENIZER_PATTERNS:
                for file in source_folder.glob(pattern):
                    shutil.copy2(file, temporary / file.name)
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _write_configs(folder: Path, config: ModelConfig) -> None:
    raw = to_hugging_face_dict(config)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    generation = {"eos_token_id": raw["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, params: Params, config: ModelConfig, dtype: np.dtype, max_shard_bytes: int) -> None:
    shards: list[list[tuple[str, np.ndarray]]] = [[]]
    sizes = _plan(params, config, dtype, max_shard_bytes)
    total = len(set(sizes.values()))
    weight_map, written = {}, 0
    for name, tensor in _tensors(params, config, dtype):
        if sizes[name] != written:
            _save_shard(folder, shards[-1], written, total)
            shards[-1], written = [], sizes[name]
        shards[-1].append((name, tensor))
        weight_map[name] = _shard_name(written, total)
    _save_shard(folder, shards[-1], written, total)
    if total > 1:
        num_bytes = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params)) * dtype.itemsize
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan(params: Params, config: ModelConfig, dtype: np.dtype, max_shard_bytes: int) -> dict[str, int]:
    """Assigns every tensor to a file, in order, without fetching any."""
    plan, shard, used = {}, 0, 0
    for name, shape in _tensor_shapes(params, config):
        size = int(np.prod(shape)) * dtype.itemsize
        if used and used + size > max_shard_bytes:
            shard, used = shard + 1, 0
        plan[name], used = shard, used + size
    return plan


def _tensor_shapes(params: Params, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    names = hugging_face_names(config, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_stacked = path[0].key == "layers"
        for name in names[tuple(entry.key for entry in path)]:
            yield name, leaf.shape[1:] if is_stacked else leaf.shape


def _tensors(params: Params, config: ModelConfig, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    names = hugging_face_names(config, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        host = np.asarray(jax.device_get(leaf)).astype(dtype, copy=False)
        parts = host if path[0].key == "layers" else [host]
        yield from zip(names[tuple(entry.key for entry in path)], parts, strict=True)


def _save_shard(folder: Path, tensors: list[tuple[str, np.ndarray]], shard: int, total: int) -> None:
    save_file({name: np.ascontiguousarray(x) for name, x in tensors}, folder / _shard_name(shard, total), metadata={"format": "pt"})


def _shard_name(shard: int, total: int) -> str:
    return SINGLE_NAME if total == 1 else f"model-{shard + 1:05d}-of-{total:05d}.safetensors"
