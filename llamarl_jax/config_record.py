"""Writes a resolved config down as plain data, and compares two such records.

A run folder keeps the config that the run really had, after files and command line. On resume the record is compared with the new config,
so that a changed batch size is noticed before it silently changes the meaning of the checkpoint. Code cannot be written as JSON, so a class
or function is recorded by its address, `module:qualname`, and a dataclass by its address (key `@class`) and its fields.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE_NAME = "config.json"
CLASS_KEY = "@class"
_MISSING = "(absent)"


class Difference(NamedTuple):
    """One entry in which two records differ; `path` is dotted, as on the command line."""

    path: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.saved!r} -> {self.current!r}"


def to_plain(value: Any, path: str = "config") -> Any:
    """Turns a config into dicts, lists, strings, numbers, booleans and None.

    Non-finite floats become the strings 'inf', '-inf' and 'nan', because JSON has none.

    Args:
        value: a dataclass instance or anything that a config field may hold.
        path: name of the value in error messages.

    Raises:
        TypeError: a field holds something that has no plain form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_plain(getattr(value, field.name), f"{path}.{field.name}") for field in dataclasses.fields(value)}
        return {CLASS_KEY: address(type(value)), **fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{path}.{i}") for i, item in enumerate(value)]
    if isinstance(value, functools.partial):
        bound = {"args": to_plain(value.args, path), "keywords": to_plain(value.keywords, path)}
        return {"@partial": address(value.func), **bound}
    if isinstance(value, type) or inspect.isroutine(value):
        return address(value)
    raise TypeError(
        f"{path} holds {value!r} of type {type(value).__name__}, which cannot be written down; use a frozen dataclass, a named "
        "function or a plain value"
    )


def address(value: Any) -> str:
    """Returns `module:qualname` of a class or function."""
    return f"{value.__module__}:{value.__qualname__}"


def save_config(config: Any, run_dir: Path) -> Path:
    """Writes `config.json` into the run folder and returns its path."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    path.write_text(json.dumps(to_plain(config), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read_config_record(run_dir: Path) -> dict[str, Any]:
    """Reads what `save_config` wrote.

    Raises:
        FileNotFoundError: the folder is not that of a run.
    """
    path = run_dir / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist, so {run_dir} is not the folder of a run; check the path")
    return json.loads(path.read_text(encoding="utf-8"))


def differences(saved: Any, current: Any) -> list[Difference]:
    """Lists the entries in which two records of `to_plain` differ, in the order of the fields.

    An entry that only one of them has is reported as '(absent)' on the other side.
    """
    return list(_differences(saved, current, ()))


def _differences(saved: Any, current: Any, path: tuple[str, ...]) -> Iterator[Difference]:
    if isinstance(saved, list) and isinstance(current, list):
        saved, current = ({str(i): item for i, item in enumerate(items)} for items in (saved, current))
    if isinstance(saved, dict) and isinstance(current, dict):
        for key in [*current, *(key for key in saved if key not in current)]:
            yield from _differences(saved.get(key, _MISSING), current.get(key, _MISSING), (*path, key))
    elif saved != current:
        yield Difference(".".join(path), saved, current)
