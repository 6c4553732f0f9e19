"""Rewards from servers over HTTP."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from yatt_jax.errors import InputError
from yatt_jax.rewards.counts import Counts
from yatt_jax.rewards.servers import Patience, RequestFailed, Servers
from yatt_jax.rewards.spec import Failed, Invalid

if TYPE_CHECKING:
    from yatt_jax.types import Sample

Format = Literal["samples", "sentences", "tokens"]


@dataclasses.dataclass(frozen=True)
class Remote:
    """A reward that servers compute: ``fn = "yatt_jax.rewards.remote:Remote"``.

    Samples are sent in batches, several at a time; every sample is in exactly one batch, and its reward is taken from
    exactly one answer. A batch that gets none fails, as ``reward_on_error`` says.

    Attributes:
      urls: servers that all score alike, as ``("http://10.0.0.2:8000",)``.
      path: of the request.
      format: "samples" sends ``{"samples": [{"sample_id", "prompt", "messages", "completion", "finish", "columns"}]}``;
        "sentences" and "tokens" are NeMo-Aligner's: ``{"sentences": [prompt and completion]}``, and
        ``{"tokens": [[ids]], "sequence_lengths": [numbers]}`` with rows filled up with 0.
      columns: of the prompt's record, sent along with "samples".
      field: of the answer, a list of a number for each sample; null: it cannot be judged.
      attribute_weights: where the answer has several numbers a sample, how much each counts.
      batch: samples a request.
      concurrency: requests at a time.
      token_env: environment variable that holds a bearer token.
      patience: tries, pauses and deadlines.
    """

    urls: tuple[str, ...] = ()
    path: str = "/score"
    format: Format = "samples"
    columns: tuple[str, ...] = ()
    field: str = "rewards"
    attribute_weights: tuple[float, ...] = ()
    batch: int = 16
    concurrency: int = 4
    token_env: str = ""
    patience: Patience = Patience()

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("urls is empty: name at least one server, as 'http://127.0.0.1:8000'")
        if not self.path.startswith("/"):
            raise ValueError(f"path = {self.path!r}: must begin with /")
        for name in ("batch", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.columns and self.format != "samples":
            raise ValueError(f"columns are sent with format = 'samples' only, and it is {self.format!r}")

    def open(self) -> RemoteScorer:
        """The reward function.

        Raises:
          InputError: a malformed address, or no token in the environment.
        """
        return RemoteScorer(self)


class RemoteScorer:
    """Scores samples by asking servers; made by ``Remote.open``."""

    def __init__(self, settings: Remote) -> None:
        self._settings = settings
        self.counts = Counts()
        self._servers = Servers(settings.urls, settings.patience, settings.token_env, self.counts)
        self._threads = ThreadPoolExecutor(settings.concurrency, "remote")

    def __call__(self, samples: list[Sample]) -> list[float | Invalid | Failed]:
        """A number for each sample, in order.

        Raises:
          InputError: the servers do not know the token or the path, or a record lacks a column.
        """
        size = self._settings.batch
        deadline = time.monotonic() + self._settings.patience.deadline_s
        parts = [samples[first : first + size] for first in range(0, len(samples), size)]
        return [value for part in self._threads.map(lambda part: self._score(part, deadline), parts) for value in part]

    def close(self) -> None:
        """Ends the threads and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._servers.close()

    def _score(self, samples: list[Sample], deadline: float) -> list[float | Invalid | Failed]:
        payload = _FORMATS[self._settings.format](samples, self._settings.columns)
        try:
            answer = self._servers.post(self._settings.path, payload, deadline)
            values = answer.get(self._settings.field) if isinstance(answer, dict) else None
            if not isinstance(values, list) or len(values) != len(samples):
                found = f"{len(values)} values" if isinstance(values, list) else f"no list {self._settings.field!r}"
                raise RequestFailed(f"the answer has {found} for {len(samples)} samples")
            return [self._number(value) for value in values]
        except RequestFailed as error:
            return [Failed(str(error))] * len(samples)

    def _number(self, value: Any) -> float | Invalid:
        """A sample's reward."""
        weights = self._settings.attribute_weights
        if value is None:
            return Invalid("the server gave null")
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
            raise RequestFailed(f"the answer has {str(value)[:80]} where numbers were expected")
        if len(numbers) != len(weights or (1.0,)):
            expected = f"attribute_weights has {len(weights)}" if weights else "attribute_weights is empty"
            raise RequestFailed(f"the answer has {len(numbers)} numbers a sample, and {expected}")
        return float(math.fsum(a * b for a, b in zip(numbers, weights or (1.0,), strict=True)))


def _as_samples(samples: Sequence[Sample], columns: Sequence[str]) -> dict[str, Any]:
    return {"samples": [describe(sample, columns) for sample in samples]}


def _as_sentences(samples: Sequence[Sample], columns: Sequence[str]) -> dict[str, Any]:
    del columns
    return {"sentences": [sample.prompt.text + sample.completion for sample in samples]}


def _as_tokens(samples: Sequence[Sample], columns: Sequence[str]) -> dict[str, Any]:
    del columns
    rows = [[*map(int, sample.prompt.tokens), *map(int, sample.tokens)] for sample in samples]
    lengths = [len(row) for row in rows]
    return {"tokens": [row + [0] * (max(lengths) - len(row)) for row in rows], "sequence_lengths": lengths}


_FORMATS: dict[Format, Callable[[Sequence[Sample], Sequence[str]], dict[str, Any]]] = {
    "samples": _as_samples,
    "sentences": _as_sentences,
    "tokens": _as_tokens,
}


def describe(sample: Sample, columns: Sequence[str]) -> dict[str, Any]:
    """A sample as servers read it.

    Args:
      sample: what to describe.
      columns: of the prompt's record, to be sent along.

    Raises:
      InputError: the record lacks one of them.
    """
    prompt = sample.prompt
    for name in columns:
        if name not in prompt.columns:
            raise InputError(
                f"{prompt.source}: the record has no field {name!r} to send along; it has {sorted(prompt.columns)}"
            )
    return {
        "sample_id": int(sample.sample_id),
        "prompt": prompt.text,
        "messages": prompt.messages,
        "completion": sample.completion,
        "finish": sample.finish,
        "columns": {name: prompt.columns[name] for name in columns},
    }
