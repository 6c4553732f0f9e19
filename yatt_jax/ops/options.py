"""Ranges of options, declared in the type of the field and checked when the options are made."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Annotated, Any, Literal, TypeAlias


@dataclasses.dataclass(frozen=True)
class Range:
    """Values from ``low`` to ``high``, both included unless ``above`` leaves out ``low``."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


NotNegative: TypeAlias = Annotated[float, Range(0)]
Positive: TypeAlias = Annotated[float, Range(0, above=True)]
Share: TypeAlias = Annotated[float, Range(0, 1)]
Finite: TypeAlias = Annotated[float, Range(-math.inf)]
Count: TypeAlias = Annotated[int, Range(1)]
CountOrZero: TypeAlias = Annotated[int, Range(0)]


def check(options: Any, *rules: tuple[bool, str]) -> None:
    """Checks a dataclass of options against the types of its fields.

    Args:
      options: fields are ``bool``, ``Literal``, or numbers with a ``Range``.
      *rules: further conditions that must be true, each with the message for when it is not.

    Raises:
      ValueError: naming every field that does not fit, its value and what would fit.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    faults = [f for name, hint in hints.items() if (f := _fault(name, getattr(options, name), hint))]
    faults += [message for holds, message in rules if not holds]
    if faults:
        raise ValueError("; ".join(faults))


def _fault(name: str, value: Any, hint: Any) -> str | None:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return None if value in choices else f"{name} = {value!r}: expected one of {list(choices)}"
    if hint is bool:
        return None if isinstance(value, bool) else f"{name} = {value!r}: expected True or False"
    if typing.get_origin(hint) is not Annotated:
        return None
    kind, limits = typing.get_args(hint)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return f"{name} = {value!r}: expected {'a whole number' if kind is int else 'a number'}"
    return None if value in limits else f"{name} = {value!r}: must be {limits}"
