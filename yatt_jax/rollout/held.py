"""Groups of responses that wait between steps, on the host and in checkpoints."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from yatt_jax.rollout.assemble import Result
from yatt_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Group:
    """The responses to one prompt.

    Attributes:
      number: of the prompt in the run's global sequence of prompts; unique, and the same for any number of processes.
      place: of its record in the order of the data, to read it again.
      prompt: what is answered.
      version: step whose weights began it.
      results: of each response what was written so far; None: it was not begun.
      total: the reward of each response, once they have ended and were scored.
      rewards: each single reward by name.
    """

    number: int
    place: int
    prompt: Prompt
    version: int
    results: tuple[Result | None, ...]
    total: Float32[np.ndarray, "G"] | None = None
    rewards: Mapping[str, Float32[np.ndarray, "G"]] = dataclasses.field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all responses have ended."""
        return all(ended(result) for result in self.results)

    @property
    def order(self) -> tuple[int, int]:
        """By which groups are taken: the oldest first."""
        return self.version, self.number

    def ended_results(self) -> list[Result]:
        """The responses of a whole group."""
        found = [result for result in self.results if result is not None and ended(result)]
        assert len(found) == len(self.results), f"prompt {self.number} has responses that have not ended"
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: everything but the prompt, which the data has."""
        return {
            "number": self.number,
            "place": self.place,
            "version": self.version,
            "results": [None if result is None else _from_result(result) for result in self.results],
            "total": None if self.total is None else _from_array(self.total),
            "rewards": {name: _from_array(values) for name, values in self.rewards.items()},
        }

    @staticmethod
    def from_json(saved: Mapping[str, Any], prompt: Prompt) -> Group:
        """The group that ``to_json`` wrote, with the prompt of its place."""
        return Group(
            number=saved["number"],
            place=saved["place"],
            prompt=prompt,
            version=saved["version"],
            results=tuple(None if result is None else _to_result(result) for result in saved["results"]),
            total=None if saved["total"] is None else _to_array(saved["total"]),
            rewards={name: _to_array(values) for name, values in saved["rewards"].items()},
        )


def ended(result: Result | None) -> bool:
    """Whether nothing more is to be written."""
    return result is not None and result.finish != "unfinished"


def _from_result(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {"finish": result.finish, "completion": result.completion}
    arrays = {name: getattr(result, name) for name in _ARRAYS}
    return found | {name: None if array is None else _from_array(array) for name, array in arrays.items()}


def _to_result(saved: Mapping[str, Any]) -> Result:
    arrays: dict[str, Any] = {name: None if saved[name] is None else _to_array(saved[name]) for name in _ARRAYS}
    return Result(**arrays, finish=saved["finish"], completion=saved["completion"])


def _from_array(array: np.ndarray) -> list[Any]:
    array = np.ascontiguousarray(array)
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode("ascii")]


def _to_array(saved: list[Any]) -> np.ndarray:
    dtype, shape, data = saved
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


_ARRAYS = ("tokens", "sampled", "plain", "kept")
