"""Metrics of a step: from device results to floats, and out to every sink.

Names are grouped by a prefix, ``rollout/ data/ train/ time/ eval/``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float

from yatt_jax.report.console import Console
from yatt_jax.report.rundir import RunDir
from yatt_jax.report.samples import short
from yatt_jax.types import Max, Ratio

_LOG = logging.getLogger(__name__)

Metric: TypeAlias = Ratio | Max | Float[Array, ""] | float
Metrics: TypeAlias = Mapping[str, Metric]


def to_floats(metrics: Metrics | Sequence[Metrics]) -> dict[str, float]:
    """Brings metrics to the host in one transfer and makes plain floats of them.

    Args:
      metrics: results by name, or those of several updates, which are added up here: ``Ratio`` by total and weight,
        ``Max`` by maximum; of a plain scalar (a learning rate) the last one counts.

    Returns:
      The floats by name, in the order they first appear. A ``Ratio`` of weight 0 and a ``Max`` of nothing
      are NaN: "no data".

    Raises:
      TypeError: a value that is not a scalar; the message names it.
    """
    parts: Sequence[Metrics] = [metrics] if isinstance(metrics, Mapping) else metrics
    totals: dict[str, Any] = {}
    # Lists, because a dict comes back from the device in alphabetical order.
    values = jax.device_get([list(part.values()) for part in parts])
    for part, fetched in zip(parts, values, strict=True):
        for name, value in zip(part, fetched, strict=True):
            totals[name] = _combine(totals.get(name), value)
    return {name: _to_float(name, value) for name, value in totals.items()}


def grouped(group: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The same metrics, named ``group/name``."""
    return {f"{group}/{name}": value for name, value in metrics.items()}


def _combine(so_far: Any, value: Any) -> Any:
    if isinstance(so_far, Ratio) and isinstance(value, Ratio):
        # float64: thousands of token counts are added up here.
        return Ratio(np.float64(so_far.total) + value.total, np.float64(so_far.weight) + value.weight)  # pyright: ignore[reportArgumentType]
    if isinstance(so_far, Max) and isinstance(value, Max):
        return Max(np.maximum(so_far.value, value.value))  # pyright: ignore[reportArgumentType]
    return value


def _to_float(name: str, value: Any) -> float:
    if isinstance(value, Ratio):
        weight = float(value.weight)
        return short(np.float64(value.total) / weight) if weight else math.nan
    if isinstance(value, Max):
        value = value.value if value.value > -math.inf else math.nan
    if isinstance(value, bool | int | float):
        return float(value)
    if np.ndim(value) != 0:
        raise TypeError(f"metric {name} has shape {np.shape(value)}: a metric is a scalar, a Ratio or a Max")
    return float(value) if np.asarray(value).dtype == np.float64 else short(np.float32(value))


class Sink(Protocol):
    """Takes the metrics of each step."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one step's metrics; NaN means "no data"."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class MetricsWriter:
    """Hands each step's metrics to every sink.

    A required sink that fails stops the run with its own error. An optional one that fails is reported once; the
    run and the other sinks go on, and it is tried again each step.
    """

    def __init__(self, required: Sequence[Sink] = (), optional: Sequence[Sink] = ()):
        self._required = tuple(required)
        self._optional = tuple(optional)
        self._reported: set[str] = set()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step.

        Args:
          step: the step.
          metrics: floats by name: see ``to_floats``.
        """
        for sink in self._required:
            sink.write(step, metrics)
        for sink in self._optional:
            self._try(sink, lambda sink=sink: sink.write(step, metrics))

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._required:
            sink.close()
        for sink in self._optional:
            self._try(sink, sink.close)

    def _try(self, sink: Sink, action: Any) -> None:
        try:
            action()
        except Exception as error:
            if sink.name not in self._reported:
                self._reported.add(sink.name)
                _LOG.warning(
                    "%s failed (%s: %s); the run goes on, and metrics.jsonl holds everything",
                    sink.name,
                    type(error).__name__,
                    error,
                )


class JsonlSink:
    """metrics.jsonl."""

    name = "metrics.jsonl"

    def __init__(self, run: RunDir):
        self._run = run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line."""
        self._run.append("metrics", {"step": step, **metrics})

    def close(self) -> None:
        """Does nothing: a line is out when it is written."""


class ConsoleSink:
    """The console, as one of the sinks."""

    name = "console"

    def __init__(self, console: Console, total: int):
        """Shows steps of ``total``."""
        self._console = console
        self._total = total

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step."""
        self._console.step(step, self._total, metrics)

    def close(self) -> None:
        """Does nothing: whoever opened the console closes it."""
