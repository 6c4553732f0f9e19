"""Held-out evaluation on given rows: the loss and what the algorithm reports beside it."""

from __future__ import annotations

import math

import jax
import numpy as np
from jaxtyping import Float

from yatt_jax.controller.offline_job import OfflineJob

INTERVALS = ("loss", "accuracy")  # figures that are reported with their confidence interval


def evaluate(job: OfflineJob, step: int) -> None:
    """Measures the held-out rows after ``step`` steps, if the configuration asks for it now.

    Every row counts once and as training would count it. Loss and accuracy are reported with the half-width of their
    95 % confidence interval.
    """
    if not job.evaluates(step):
        return
    with job.phase("evaluate"):
        parts = []
        for draw in job.rows.evaluation(job.config.evaluation.rows):
            rows = job.place(draw)
            scores = {role: job.score(role, rows) for role in job.algo.scored_by(job.config.hyper)}
            batch, _ = job.prepare(rows, scores)
            parts.append(jax.device_get(job.measure(batch)))
        for name in parts[0] if parts else ():
            total, weight = (
                np.concatenate([getattr(part[name], of) for part in parts]).astype(np.float64)
                for of in ("total", "weight")
            )
            mean, half = mean_and_interval(total, weight)
            job.record.add({f"eval/{name}": mean})
            if name in INTERVALS and math.isfinite(half):
                job.record.add({f"eval/{name}_ci95": half})


def mean_and_interval(total: Float[np.ndarray, "B"], weight: Float[np.ndarray, "B"]) -> tuple[float, float]:
    """The mean of rows and the half-width of its 95 % confidence interval.

    ``m = sum t / sum w`` with ``1.96 sqrt(n / (n - 1) sum (t - m w)^2) / sum w``, the n rows of some weight being drawn
    independently: the estimator of a ratio (Cochran 1977, "Sampling techniques", section 6.3).

    Args:
      total: of each row.
      weight: of each row; rows without weight do not count.

    Returns:
      Both; NaN for the mean where nothing has weight, and for the interval with fewer than two rows.
    """
    some = weight > 0
    total, weight, n = total[some], weight[some], int(some.sum())
    if not n:
        return math.nan, math.nan
    mean = float(total.sum() / weight.sum())
    if n < 2:
        return mean, math.nan
    squares = float(np.sum((total - mean * weight) ** 2))
    return mean, 1.96 * math.sqrt(n / (n - 1) * squares) / float(weight.sum())
