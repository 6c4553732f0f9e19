"""Prompts made by rule: the tasks of reasoning-gym, an optional extra, in place of a file.

A source is written ``reasoning_gym:NAME?size=1000&seed=1&KEY=VALUE``: a task's name and what its own configuration
takes. The same text gives the same prompts. Rewards for them are in ``yatt_jax.rewards.gym``.
"""

from __future__ import annotations

import importlib
import json
import urllib.parse
from typing import Any

from yatt_jax.data.config import DataError
from yatt_jax.data.records import Record, Table, open_table
from yatt_jax.errors import nearest

PREFIX = "reasoning_gym:"


def open_prompts(path: str) -> Table:
    """The records of a source of prompts: of files, or tasks made by rule.

    Raises:
      DataError: see ``records.open_table`` and ``GymTable``.
    """
    return GymTable(path) if path.startswith(PREFIX) else open_table(path)


class GymTable:
    """The tasks of a source, each made when it is read.

    Records have ``prompt`` (the question), ``answer`` (a right one) and ``metadata`` (what the reward reads).

    Args:
      path: of the source.

    Raises:
      DataError: the extra is not installed, no task of this name, or settings that it does not take.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        name, _, query = path.removeprefix(PREFIX).partition("?")
        try:
            gym = importlib.import_module("reasoning_gym")
            known = list(importlib.import_module("reasoning_gym.factory").DATASETS)
        except ModuleNotFoundError as error:
            raise DataError(f"{path}: needs reasoning-gym: pip install 'yatt_jax[gym]' ({error})") from error
        if name not in known:
            raise DataError(f"{path}: reasoning-gym has no task {name!r}{nearest(name, known)}")
        settings = {"seed": 0} | {key: _value(text) for key, text in _settings(path, query)}
        try:
            self._tasks = gym.create_dataset(name, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise DataError(f"{path}: {name} does not take these settings: {error}") from error

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, row: int) -> Record:
        source = f"{self._path}:{row + 1}"
        if not 0 <= row < len(self):
            raise DataError(f"{source}: there are {len(self)} rows")
        task = self._tasks[row]
        fields = {"prompt": task["question"], "answer": task["answer"], "metadata": task["metadata"]}
        return Record(fields, source)


def _settings(path: str, query: str) -> list[tuple[str, str]]:
    try:
        return urllib.parse.parse_qsl(query, strict_parsing=True) if query else []
    except ValueError as error:
        raise DataError(f"{path}: expected KEY=VALUE&KEY=VALUE after the question mark: {error}") from error


def _value(text: str) -> Any:
    """A number, true, false, null or a list as JSON writes it; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
