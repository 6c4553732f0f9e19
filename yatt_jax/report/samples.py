"""Completions with their rewards: the log, and which of them to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from yatt_jax.report.media import MediaFolder
from yatt_jax.report.rundir import RunDir
from yatt_jax.types import Sample

Split = Literal["train", "eval"]
Record: TypeAlias = dict[str, Any]


class SampleLog:
    """Writes completions to samples.jsonl.

    Attributes:
      train_rows: training completions kept a step by all processes together, of each as many from the front; the
        held-out ones are all kept.
    """

    def __init__(self, run: RunDir, train_rows: int = 64):
        if train_rows < 0:
            raise ValueError(f"train_rows = {train_rows}: a number of rows, 0 or more")
        self.train_rows = train_rows
        self._own_rows = math.ceil(train_rows / run.processes)
        self._run = run
        self._media = MediaFolder(run)

    def write(
        self,
        step: int,
        split: Split,
        samples: Sequence[Sample],
        total: Float[np.ndarray, "B"],
        rewards: Mapping[str, Float[np.ndarray, "B"]],
        advantages: Float[np.ndarray, "B"] | None = None,
    ) -> list[Record]:
        """Logs the completions of a step.

        Args:
          step: the step that sampled them.
          split: "train", or "eval" for held-out prompts.
          samples: the completions, B of them.
          total: reward of each; NaN where it is invalid.
          rewards: each single reward by name.
          advantages: mean advantage of each row over its response, if there is one.

        Returns:
          The records as written: ``console.samples`` takes them.

        Raises:
          ValueError: arrays that do not have one value a sample.
          RunDirError: the log, or a copy of media, cannot be written.
        """
        columns = {"total": total, **{f"rewards[{k!r}]": v for k, v in rewards.items()}}
        if advantages is not None:
            columns["advantages"] = advantages
        for name, values in columns.items():
            if len(values) != len(samples):
                raise ValueError(f"{name} has {len(values)} values for {len(samples)} samples")
        count = len(samples) if split == "eval" else min(self._own_rows, len(samples))
        media = self._media.keep(split, [sample.prompt.media for sample in samples[:count]])
        records = []
        for row, sample in enumerate(samples[:count]):
            record: Record = {
                "step": step,
                "split": split,
                "sample_id": int(sample.sample_id),
                "group": int(sample.group),
                "prompt_index": int(sample.prompt.index),
                "prompt": sample.prompt.text,
                "asked": _asked(sample),
                "completion": sample.completion,
                "total": short(total[row]),
                "rewards": {name: short(values[row]) for name, values in rewards.items()},
                "advantage": None if advantages is None else short(advantages[row]),
                "finish": sample.finish,
                "length": len(sample.tokens),
            }
            if media[row]:
                record["media"] = media[row]
            self._run.append("samples", record)
            records.append(record)
        return records


def short(value: float | np.floating[Any]) -> float:
    """The shortest decimal that is this float32, as a Python float: 0.1 and not 0.10000000149011612."""
    return float(str(np.float32(value)))


def pick(records: Sequence[Record], count: int) -> list[Record]:
    """Chooses rows that show the spread: evenly over the order of rewards, best first, invalid ones last.

    Args:
      records: rows of one step.
      count: how many to take at most.
    """
    ranked = sorted(records, key=lambda record: -_rank(record.get("total")))
    if len(ranked) <= count:
        return ranked
    places = np.linspace(0, len(ranked) - 1, count).round().astype(int) if count > 0 else []
    return [ranked[i] for i in places]


def pairs(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Held-out completions of the first and the last evaluation to the same prompts, in the order of prompts."""
    held_out = [r for r in records if r.get("split") == "eval"]
    if not held_out:
        return []
    steps = [r["step"] for r in held_out]
    before = _by_prompt([r for r in held_out if r["step"] == min(steps)])
    after = _by_prompt([r for r in held_out if r["step"] == max(steps)])
    if min(steps) == max(steps):
        return []
    return [(before[key], after[key]) for key in sorted(before.keys() & after.keys())]


def shown_prompt(record: Record) -> str:
    """The prompt as a reader wants it: the last message where there are messages, else the whole text."""
    return str(record.get("asked") or record.get("prompt", ""))


def _asked(sample: Sample) -> str | None:
    """Text of the last message, without the chat template around it."""
    if not sample.prompt.messages:
        return None
    content = sample.prompt.messages[-1].get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    return None if content is None else str(content)


def _by_prompt(records: Sequence[Record]) -> dict[tuple[int, str, int], Record]:
    """Keys a step's rows by prompt and, where a prompt was sampled several times, by rank."""
    found: dict[tuple[int, str, int], Record] = {}
    seen: dict[tuple[int, str], int] = {}
    for record in sorted(records, key=lambda r: r.get("sample_id", 0)):
        prompt = (record.get("prompt_index", 0), record.get("prompt", ""))
        seen[prompt] = seen.get(prompt, -1) + 1
        found[(*prompt, seen[prompt])] = record
    return found


def _rank(total: float | None) -> float:
    return -math.inf if total is None or math.isnan(total) else total
