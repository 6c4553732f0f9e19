"""Shared by the reward tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from yatt_jax.types import Prompt, Sample


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """Makes samples: a completion, the record's columns, and more."""
    numbers = itertools.count()

    def make(
        completion: str, *, text: str = "question", finish: str = "stop", tokens: int = 0, **columns: Any
    ) -> Sample:
        number = next(numbers)
        prompt = Prompt([], text, [1], columns, f"p.jsonl:{number + 1}", number)
        return Sample(prompt, completion, [7] * (tokens or len(completion) + 1), finish, number, number)

    return make
