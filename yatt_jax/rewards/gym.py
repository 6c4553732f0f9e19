"""Rewards of reasoning-gym's tasks, an optional extra; see ``yatt_jax.data.gym`` for the prompts."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from yatt_jax.errors import InputError

if TYPE_CHECKING:
    from yatt_jax.types import Sample

Judge = Callable[[str | None, Mapping[str, Any]], float]


def score(samples: list[Sample], *, tag: str = "") -> list[float]:
    """What the task itself gives the answer, from 0 to 1.

    Args:
      samples: to score; their prompts have the columns ``answer`` and ``metadata``.
      tag: the answer stands in the last ``<tag>...</tag>``, and without one there is none; empty: the whole completion,
        white space around it aside.

    Raises:
      InputError: the extra is not installed, or a prompt that is none of its tasks.
    """
    values = []
    for sample in samples:
        entry, source = sample.prompt.columns, sample.prompt.source
        if "answer" not in entry or "source_dataset" not in (entry.get("metadata") or {}):
            raise InputError(
                f"{source}: no task of reasoning-gym: it needs the columns 'answer' and 'metadata', with "
                f"'source_dataset' in it, and has {sorted(entry)}"
            )
        task = {"question": sample.prompt.text, "answer": entry["answer"], "metadata": entry["metadata"]}
        try:
            judge = _judge(task["metadata"]["source_dataset"])
        except ValueError as error:
            raise InputError(f"{source}: {error}") from error
        values.append(float(judge(_answer(sample.completion, tag), task)))
    return values


def _answer(completion: str, tag: str) -> str | None:
    if not tag:
        return completion.strip() or None
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, re.DOTALL)
    return found[-1].strip() if found else None


@functools.cache
def _judge(name: str) -> Judge:
    """The function that scores answers to a task; ValueError where there is no such task."""
    try:
        return importlib.import_module("reasoning_gym").get_score_answer_fn(name)
    except ModuleNotFoundError as error:
        raise InputError(f"the reward needs reasoning-gym: pip install 'yatt_jax[gym]' ({error})") from error
