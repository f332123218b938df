"""Reads and writes safetensors files by memory map and stream, so that no whole file is ever held in memory.

A file is 8 bytes of header length (little-endian), a JSON header that names dtype, shape and byte range of each tensor, and the raw
data; see https://huggingface.co/docs/safetensors. The format is read here directly because NumPy alone has no bfloat16, and written here
directly because the library's writer copies all tensors of a file once more before it writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype(np.float64)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightsError(ValueError):
    """Weights in a folder are damaged or do not fit its config; the message names file, tensor and fix."""


def open_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Maps all tensors of a folder's safetensors files into memory, by name; reads their headers only.

    Each array is a view of a memory map: indexing it reads just that slice from disk, and `file_of` tells its file.

    Raises:
        FileNotFoundError: there are none, or the index names a file that is missing.
        WeightsError: a file is damaged.
    """
    if (folder / SINGLE_NAME).is_file():  # before the index, as transformers does
        return dict(_map_file(folder / SINGLE_NAME))
    index = folder / INDEX_NAME
    if not index.is_file():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors weights can be loaded, "
            "so convert others (`save_pretrained` of transformers writes them)"
        )
    weight_map = _read_index(index)
    tensors: dict[str, np.ndarray] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{index} names {name!r}, which is not in the folder; download the model again")
        tensors.update(_map_file(folder / name))
    for name, file in weight_map.items():
        if name not in tensors:
            raise WeightsError(f"{index} says that tensor {name!r} is in {file!r}, but it is not; download the model again")
    return tensors


def file_of(tensor: np.ndarray, folder: Path) -> Path:
    """Returns the file of a tensor from `open_tensors(folder)`, or the folder for an empty tensor, which no map holds."""
    return Path(getattr(tensor, "filename", None) or folder)


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: Any, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes one file of tensors of one dtype, each as it comes from the iterable.

    Args:
        shapes: of all tensors, in the order in which `tensors` gives them.
    """
    dtype = np.dtype(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (expected, shape), (name, tensor) in zip(shapes.items(), tensors, strict=True):
            assert (name, tensor.shape) == (expected, shape), f"{name} {tensor.shape} came where {expected} {shape} was announced"
            file.write(np.ascontiguousarray(tensor, dtype).reshape(-1).view(np.uint8).data)


def _read_index(index: Path) -> dict[str, str]:
    try:
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index} is not a safetensors index ({type(error).__name__}: {error}); download the model again") from error


def _map_file(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    header, data_start = _read_header(path)
    data = np.memmap(path, np.uint8, mode="r")[data_start:]
    num_bytes = len(data)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        (start, end), shape = entry["data_offsets"], tuple(entry["shape"])
        if end > num_bytes:
            raise WeightsError(f"{path} is cut off: tensor {name!r} ends at byte {end} of {num_bytes}; download it again")
        if entry["dtype"] not in DTYPES:
            raise WeightsError(f"{path}: tensor {name!r} has dtype {entry['dtype']}; supported: {', '.join(DTYPES)}")
        dtype = DTYPES[entry["dtype"]]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise WeightsError(f"{path}: tensor {name!r} has {end - start} bytes, which is not shape {shape} of {dtype}; download it again")
        yield name, data[start:end].view(dtype).reshape(shape)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header and the position of the first byte of data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 + header_size:
            raise WeightsError(
                f"{path} is cut off or no safetensors file (a Git LFS pointer?): it has {size} bytes, but says that its header alone has "
                f"{header_size}; download it again"
            )
        try:
            return json.loads(file.read(header_size)), 8 + header_size
        except ValueError as error:
            raise WeightsError(f"{path} has a damaged header ({error}); download it again") from error
