"""Loads configs from Python and gin files and applies overrides from the command line, for any nested frozen dataclass.

A Python config file defines `get_config()` and returns the config; it is ordinary code, so jump-to-definition and type checks work. A gin
file binds the same dataclasses (`config_gin.py`). Whatever the source, every field's value is checked against its annotation, and a wrong
name is answered with the nearest right one.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import typeguard
import tyro

ConfigT = TypeVar("ConfigT")

_UNEXPECTED_KEYWORD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


class ConfigError(ValueError):
    """A config file or a config value is wrong; the message names the file or field and the fix."""


def load_config(path: str | Path, config_type: type[ConfigT]) -> ConfigT:
    """Loads a `.py` or `.gin` config file.

    Args:
        path: the file.
        config_type: the dataclass that the file must produce.

    Raises:
        FileNotFoundError: there is no such file; the message names the nearest one beside it.
        ConfigError: the file has another suffix, fails, or gives something that does not fit `config_type`.
        ModuleNotFoundError: a gin file is given and gin-config is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config file {path} does not exist{_nearest_file(path)}")
    if path.suffix == ".py":
        config = _load_python(path, config_type)
    elif path.suffix == ".gin":
        from llamarl_jax.config_gin import load_gin

        config = load_gin(path, config_type)
    else:
        raise ConfigError(f"config file {path} ends in {path.suffix or 'no suffix'!r}; give a .py file with get_config() or a .gin file")
    check_types(config, str(path))
    return config


def override(config: ConfigT, argv: Sequence[str], *, prog: str | None = None, description: str | None = None) -> ConfigT:
    """Applies command-line overrides such as `--trainer.learning-rate 1e-5`.

    A wrong name or value ends the program with status 2 and the nearest names; `--help` prints every field with its type, its value in
    `config` and its docstring.

    Args:
        config: the values that are not overridden.
        argv: the arguments after the config file.
        prog: program name for the help text.
        description: first paragraph of the help text.
    """
    return tyro.cli(type(config), default=config, args=list(argv), prog=prog, description=description, config=(tyro.conf.AvoidSubcommands,))


def check_types(config: Any, source: str, path: str = "") -> None:
    """Checks the value of every field of a nested dataclass against its annotation.

    Raises:
        ConfigError: a value does not fit; the message names `source`, the dotted field, the value and the expected type.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        try:
            typeguard.check_type(value, hints[field.name], collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS)
        except typeguard.TypeCheckError as error:
            raise ConfigError(f"{source}: {name} is {value!r}, but {error}; expected {_type_text(field, hints)}") from error
        if is_dataclass_instance(value):
            check_types(value, source, f"{name}.")


def is_dataclass_instance(value: Any) -> bool:
    """Tells whether the value is an instance of a dataclass (and not a dataclass itself)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def reachable_types(config_type: type) -> list[type]:
    """Lists the classes that the annotations of a dataclass mention, itself first, through nested dataclasses, unions and containers."""
    found: dict[type, None] = {}
    pending: list[Any] = [config_type]
    while pending:
        hint = pending.pop(0)
        pending.extend(typing.get_args(hint))
        if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and hint not in found:
            found[hint] = None
            if dataclasses.is_dataclass(hint):
                pending.extend(typing.get_type_hints(hint).values())
    return list(found)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the known name closest to a wrong one, or an empty string if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _load_python(path: Path, config_type: type[ConfigT]) -> ConfigT:
    module_name = f"llamarl_config_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "the suffix .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    # Reward workers cannot import this module, so what it defines (a reward function) travels to them by value.
    cloudpickle.register_pickle_by_value(module)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"config file {path} does not define get_config(); add `def get_config() -> {config_type.__name__}:`")
        config = module.get_config()
    except (ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ConfigError(_describe_failure(path, error, config_type)) from error
    if not isinstance(config, config_type):
        raise ConfigError(f"get_config() of {path} returned {type(config).__name__}; return a {config_type.__name__}")
    return config


def _describe_failure(path: Path, error: Exception, config_type: type) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    where = f"{path}, line {line}" if line else str(path)
    hint = ""
    if match := _UNEXPECTED_KEYWORD.search(str(error)):
        for cls in reachable_types(config_type):
            if cls.__qualname__.rpartition(".")[2] == match[1] and dataclasses.is_dataclass(cls):
                hint = nearest(match[2], (field.name for field in dataclasses.fields(cls)))
    return f"config file {where}: {type(error).__name__}: {error}{hint}"


def _nearest_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    if not folder.is_dir():
        return f", nor does its folder {path.parent}; check the path"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".py", ".gin"))
    hint = nearest(path.name, names)
    return hint or f"; {folder} has {', '.join(names) or 'no config files'}"


def _type_text(field: dataclasses.Field[Any], hints: dict[str, Any]) -> str:
    return field.type if isinstance(field.type, str) else getattr(hints[field.name], "__name__", str(hints[field.name]))
