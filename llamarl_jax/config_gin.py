"""Builds a config from a gin file: a thin adapter that binds the very dataclasses of the Python configs.

    TrainerConfig.learning_rate = 1e-5
    trainer/MeshConfig.fsdp = 2
    RewardTerm.function = @llamarl_jax.rewards.numbers.exact_number
    ScheduleConfig.weight_mode = %WeightMode.BOUNDARY

Three things are added to plain gin. Every dataclass that the config's annotations reach is a configurable under its own name, and every
enum gives constants. Every field whose type is a dataclass is built from the bindings of that class, in a scope of the field's name, so
that two fields of one type can differ. A reference with a dotted path, `@package.module.name`, imports what it names.

gin wraps functions that it knows; the wrapper is taken off again, so that the config equals one written in Python and its functions pickle.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Any, TypeVar

from llamarl_jax.config_files import ConfigError, is_dataclass_instance, nearest, reachable_types

ConfigT = TypeVar("ConfigT")

_DOTTED_REFERENCE = re.compile(r"@(?:[\w/]+/)?(\w+(?:\.\w+)+)")
_UNKNOWN_PARAMETER = re.compile(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'")
_UNKNOWN_CONSTANT = re.compile(r"In call to configurable 'macro' .* in scope '(?:.*/)?([\w.]+)'")
_UNKNOWN_CONFIGURABLE = re.compile(r"No configurable matching (?:reference )?'@?(?:[\w/]+/)?([\w.]+)'")


def load_gin(path: Path, config_type: type[ConfigT]) -> ConfigT:
    """Reads a gin file into a config.

    Raises:
        ModuleNotFoundError: gin-config is not installed.
        ConfigError: the file does not parse, or names something that does not exist.
    """
    try:
        import gin
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is a gin file but gin-config is not installed; run `pip install 'llamarl_jax[gin]'` or use a .py config"
        ) from error
    classes = {cls.__name__: cls for cls in reachable_types(config_type) if dataclasses.is_dataclass(cls)}
    enums = [cls for cls in reachable_types(config_type) if issubclass(cls, enum.Enum)]
    constants = {f"{cls.__name__}.{member.name}": member for cls in enums for member in cls}
    text = path.read_text(encoding="utf-8")
    with gin.unlock_config():
        gin.clear_config(clear_constants=True)
        try:
            for name, member in constants.items():
                gin.constant(name, member)
            for cls in classes.values():
                _configurable(gin, cls)
            for reference in _DOTTED_REFERENCE.findall(text):
                _configurable(gin, _import_reference(reference, path))
            gin.parse_config(_nested_bindings(classes))
            gin.parse_config(text)
            config = _configurable(gin, config_type)()
        except (ValueError, SyntaxError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"config file {path}: {_explain(str(error).strip(), classes, constants)}") from error
        finally:
            gin.clear_config(clear_constants=True)
    return _unwrap(config)


_registered: dict[Any, Any] = {}  # gin refuses to register a name twice, so what was registered once is kept for the process


def _configurable(gin: Any, value: Any) -> Any:
    if value not in _registered:
        _registered[value] = gin.external_configurable(value, name=value.__name__, module=value.__module__)
    return _registered[value]


def _import_reference(reference: str, path: Path) -> Any:
    module_name, _, name = reference.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"config file {path}: @{reference} names module {module_name!r}, which cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"config file {path}: module {module_name!r} has no {name!r}{nearest(name, dir(module))}")
    return getattr(module, name)


def _nested_bindings(classes: dict[str, type]) -> str:
    """Binds every field that is a dataclass to a scoped call of that class; what the file says comes later and wins."""
    lines = []
    for cls in classes.values():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            if isinstance(hint, type) and dataclasses.is_dataclass(hint) and field.init:
                lines.append(f"{cls.__module__}.{cls.__name__}.{field.name} = @{field.name}/{hint.__module__}.{hint.__name__}()")
    return "\n".join(lines)


def _unwrap(value: Any) -> Any:
    if is_dataclass_instance(value):
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = _unwrap(old)
            if new is not old and field.init:
                changed[field.name] = new
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, list | tuple):
        items = type(value)(_unwrap(item) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        return {key: _unwrap(item) for key, item in value.items()}
    if inspect.isfunction(value):
        return inspect.unwrap(value)
    return value


def _explain(message: str, classes: dict[str, type], constants: dict[str, enum.Enum]) -> str:
    """Adds the nearest right name to gin's message about a wrong one."""
    if match := _UNKNOWN_CONSTANT.search(message):  # gin takes an unknown %NAME for a macro and complains about a missing argument
        return f"%{match[1]} is neither a macro of the file nor a constant{nearest(match[1], constants)}"
    if match := _UNKNOWN_PARAMETER.search(message):
        cls = classes.get(match[1].rpartition(".")[2])
        known = [field.name for field in dataclasses.fields(cls)] if cls else []
        return message + nearest(match[2], known)
    if match := _UNKNOWN_CONFIGURABLE.search(message):
        return message + nearest(match[1], classes)
    return message
