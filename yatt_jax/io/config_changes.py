"""What differs between the configuration that a run was saved with and the one it goes on with, and whether it may.

The state of a run depends on some settings: arrays have the shapes of the model, the numbers of prompts follow from the
number drawn a step. Those are refused, by the table below. Every other key may change from one step to the next, those
that this table does not know among them (settings of algorithms, of rewards, of later versions): the arrays and the
order of the data are still compared with the run's own when they are restored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Change:
    """A key whose value differs; ``ABSENT`` where one of the two has no such key."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.old)} -> {_show(self.new)}"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The differences between two configurations, sorted by key.

    Args:
      old: nested, as JSON or as ``config.to_dict`` gives it; tuples and lists are the same.
      new: likewise.
    """
    before, after = dict(_flat(old)), dict(_flat(new))
    keys = sorted(before.keys() | after.keys())
    changes = [Change(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
    return [change for change in changes if change.old != change.new]


def refused(changes: Sequence[Change]) -> list[str]:
    """Why a run cannot go on with these changes, a message for each that it cannot go on with; none: it can."""
    found = []
    for change in changes:
        for prefix, rule in _FIXED.items():
            if change.key == prefix or change.key.startswith((f"{prefix}.", f"{prefix}[")):
                if rule.matters(change):
                    found.append(f"config.{change}: {rule.reason}")
                break
    return found


def shown(changes: Sequence[Change]) -> str:
    """A line for each change, for the console and for the record."""
    return "\n".join(f"  config.{change}" for change in changes)


def _always(change: Change) -> bool:
    return True


def _switched(change: Change) -> bool:
    """On or off, whatever the amount: it adds a part to the optimizer, or takes one away."""
    return bool(change.old) != bool(change.new)


@dataclasses.dataclass(frozen=True)
class _Rule:
    reason: str
    matters: Callable[[Change], bool] = _always


_MODEL = _Rule("the saved weights and moments belong to the model of the run; start a new run")
_REFERENCE = _Rule("the divergence from the reference is measured anew from it; start a new run")
_ROWS = _Rule("rows would be skipped or repeated, the order of the data follows from it; start a new run")
_NUMBERS = _Rule("the numbers of prompts and samples, and so their random keys, follow from it; start a new run")
_MOMENTS = _Rule("the saved moments belong to another optimizer; start a new run")
_PARTS = _Rule("the saved state of the optimizer has a part more or less; keep it on, or off", _switched)

_FIXED: Mapping[str, _Rule] = {
    "algo": _Rule("another algorithm trains other roles by other losses; start a new run from this one's export"),
    "seed": _Rule("sampling and the order of the data follow from it; start a new run"),
    "model.path": _MODEL,
    "model.init": _MODEL,
    "model.tokenizer": _MODEL,
    "model.critic": _MODEL,
    "model.dtype": _MODEL,
    "model.reference": _REFERENCE,
    "model.frozen_dtype": _REFERENCE,
    "data.train": _ROWS,
    "data.holdout": _ROWS,
    "data.shuffle": _ROWS,
    "data.batch": _ROWS,
    "data.mix": _ROWS,
    "data.last": _ROWS,
    "rollout.prompts": _NUMBERS,
    "rollout.samples_per_prompt": _NUMBERS,
    **{
        f"{optimizer}.{key}": rule
        for optimizer in ("actor_optimizer", "critic_optimizer", "optimizer")
        for key, rule in {"name": _MOMENTS, "clip_norm": _PARTS, "weight_decay": _PARTS}.items()
    },
}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key -> value without keys of its own; an empty mapping or list is a value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{i}]")
    elif isinstance(value, list | tuple):
        yield key, list(value)
    else:
        yield key, dict(value) if isinstance(value, Mapping) else value


def _show(value: Any) -> str:
    return value if value is ABSENT else json.dumps(value, default=str)
