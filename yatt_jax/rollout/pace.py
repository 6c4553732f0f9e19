"""How fast an engine decodes: what it times, and what a step costs without rows and for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some decode steps in a row, with what went before them.

    Attributes:
      rows: slots that were computed on each device.
      steps: decode steps.
      seconds: wall time since the chunk before.
      admitted: rows that began with it.
      waiting: rows that waited for a slot.
    """

    rows: float
    steps: int
    seconds: float
    admitted: int = 0
    waiting: int = 0


def fit_steps(chunks: Sequence[Chunk]) -> tuple[float, float]:
    """Seconds of a decode step without rows, and those that each row on a device adds, by least squares.

    Neither is negative. Where all chunks had as many rows, nothing tells the two apart, and all of the time is taken to
    be the step's.

    Args:
      chunks: at least one; those at the end of a phase, with few rows, tell most.
    """
    rows, steps, seconds = (
        np.array([getattr(c, name) for c in chunks], float) for name in ("rows", "steps", "seconds")
    )
    # Weighted by steps, so that a chunk counts as much as all its steps.
    per_step = seconds / steps
    mean_rows, mean_time = np.average(rows, weights=steps), np.average(per_step, weights=steps)
    spread = np.average((rows - mean_rows) ** 2, weights=steps)
    slope = np.average((rows - mean_rows) * (per_step - mean_time), weights=steps) / spread if spread else 0.0
    if slope <= 0:
        return float(mean_time), 0.0
    if slope * mean_rows >= mean_time:  # more than in proportion: no fixed part
        return 0.0, float(np.sum(seconds * rows) / np.sum(steps * rows**2))
    return float(mean_time - slope * mean_rows), float(slope)
