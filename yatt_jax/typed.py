"""From nested dicts to a tree of frozen dataclasses, strictly, and back."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from yatt_jax.errors import nearest

T = TypeVar("T")


def to_dict(value: Any) -> Any:
    """Dataclasses to dicts, all the way down; what ``config.json`` holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: to_dict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(to_dict(v) for v in value)
    return value


def from_dict(cls: type[T], raw: Any, path: str, faults: list[str]) -> T:
    """The dataclass that nested dicts describe; where something is amiss, anything at all.

    Args:
      cls: the dataclass. Its fields' types are dataclasses, literals, unions, tuples, mappings and plain types.
      raw: keys to values; a string where the class has ``from_string``.
      path: key of the whole, for messages.
      faults: messages are added here, one for each unknown key, wrong type or value out of range.
    """
    if isinstance(raw, cls):
        return raw
    if isinstance(raw, str) and hasattr(cls, "from_string"):
        try:
            return cls.from_string(raw)  # type: ignore[attr-defined]
        except ValueError as error:
            faults.append(f"{path}: {error}")
            return raw  # type: ignore[return-value]
    if not isinstance(raw, Mapping):
        faults.append(f"{path} = {raw!r}: expected keys of {cls.__name__}")
        return raw  # type: ignore[return-value]
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    before = len(faults)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in names:
            faults.append(f"{path}.{key}: unknown key{nearest(str(key), names)}; known here: {', '.join(names)}")
        else:
            values[key] = _value(hints[key], value, f"{path}.{key}", faults)
    if len(faults) > before:
        return raw  # type: ignore[return-value]
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        faults.append(f"{path}: {error}")
        return raw  # type: ignore[return-value]


def _value(hint: Any, value: Any, path: str, faults: list[str]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, path, faults)
    if origin is Literal:
        if value not in args:
            near = nearest(str(value), [str(a) for a in args])
            faults.append(f"{path} = {value!r}{near}: expected one of {list(args)}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        plain = [a for a in args if a is not type(None)]
        for choice in plain:
            trial: list[str] = []
            result = _value(choice, value, path, trial)
            if not trial:
                return result
        faults.append(f"{path} = {value!r}: expected {' or '.join(_name(a) for a in args)}")
        return value
    if origin in (tuple, list):
        if isinstance(value, str) or not isinstance(value, list | tuple):
            value = (value,)  # one path on a command line stands for a list of one
        return tuple(_value(args[0], v, f"{path}[{i}]", faults) for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            faults.append(f"{path} = {value!r}: expected a mapping")
            return value
        return {k: _value(args[1], v, f"{path}.{k}", faults) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        faults.append(f"{path} = {value!r}: expected {_name(hint)}, got {type(value).__name__}")
    elif isinstance(value, float) and value != value:
        faults.append(f"{path} is NaN")
    return value


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))
