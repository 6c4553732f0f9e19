r"""What a completion answers, for majority votes of an evaluation: functions of samples, as rewards are.

Each gives a text for every sample, equal where two samples answer the same; None where there is no answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yatt_jax.rewards.rules import last_number

if TYPE_CHECKING:
    from yatt_jax.types import Sample


def text(samples: list[Sample]) -> list[str | None]:
    """The whole completion, without white space around it; upper and lower case are the same."""
    return [sample.completion.strip().casefold() or None for sample in samples]


def number(samples: list[Sample]) -> list[str | None]:
    """The last number in the completion: "3/4" and ".75" are the same."""
    found = [last_number(sample.completion) for sample in samples]
    return [None if value is None else repr(value) for value in found]


def boxed(samples: list[Sample]) -> list[str | None]:
    r"""What the last ``\boxed{...}`` holds, without white space."""
    return [_boxed(sample.completion) for sample in samples]


def _boxed(completion: str) -> str | None:
    _, found, rest = completion.rpartition(r"\boxed{")
    depth = 1
    for end, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return "".join(rest[:end].split()) or None
    return None
