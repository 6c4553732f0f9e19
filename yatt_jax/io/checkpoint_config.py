"""When a run saves, what it keeps, and when it stops because a metric no longer improves: settings and pure rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from yatt_jax.ops.options import CountOrZero, NotNegative, check


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run.

    Attributes:
      folder: where they lie: a local or mounted folder that every host sees, or gs://BUCKET/PATH; empty:
        ``checkpoints`` in the run directory.
      every_steps: save after every so many steps; 0: not by steps.
      every_minutes: save once so many minutes have passed since the last one; 0: not by time. Whatever these two say,
        a run saves its last step, and where it is told to stop.
      keep: how many of the newest stay; 0: save none at all. With 2, a damaged one still leaves one to go back to.
      best_metric: a figure of the evaluation, such as "eval/reward", for ``keep_best`` and ``early_stop_patience``.
      best_mode: whether a higher or a lower value of it is better.
      keep_best: how many of the best by ``best_metric`` stay as well; an evaluation among the best is saved at once.
      early_stop_patience: stop the run after so many evaluations in a row without a new best; 0: never.
      on_failure: what a save that fails does, on a full disk for example. "stop" ends the run; "warn" says so, counts
        it in ``checkpoint/failed`` and goes on. Earlier checkpoints stay as they are in both cases.
    """

    folder: str = ""
    every_steps: CountOrZero = 50
    every_minutes: NotNegative = 0.0
    keep: CountOrZero = 2
    best_metric: str = ""
    best_mode: Literal["max", "min"] = "max"
    keep_best: CountOrZero = 0
    early_stop_patience: CountOrZero = 0
    on_failure: Literal["stop", "warn"] = "stop"

    def __post_init__(self) -> None:
        uses = bool(self.keep_best or self.early_stop_patience)
        check(
            self,
            (bool(self.best_metric) or not uses, "best_metric is empty, and keep_best or early_stop_patience needs it"),
            (uses or not self.best_metric, f"best_metric = {self.best_metric!r}: set keep_best or early_stop_patience"),
            (bool(self.keep) or not self.keep_best, f"keep_best = {self.keep_best}: with keep = 0 nothing is saved"),
        )

    def better(self, value: float, than: float) -> bool:
        """Whether a value of the metric is better than another; NaN is better than nothing."""
        return value > than if self.best_mode == "max" else value < than


class Saved(NamedTuple):
    """A checkpoint as the rules see it: its step, and the metric measured then, if it was."""

    step: int
    metric: float | None = None


def is_due(
    config: CheckpointConfig, step: int, saved: Sequence[Saved], *, minutes: float, metric: float | None, last: bool
) -> bool:
    """Whether to save now.

    Args:
      config: the rules.
      step: steps done.
      saved: the checkpoints that exist.
      minutes: since the last save, or since the start.
      metric: value of ``best_metric``, if it was measured at this step.
      last: whether this is the last step, or the run is about to stop.
    """
    if not config.keep or any(one.step == step for one in saved):
        return False
    if last or (config.every_steps and step and step % config.every_steps == 0):
        return True
    if config.every_minutes and minutes >= config.every_minutes:
        return True
    now = Saved(step, metric)
    return now in _best(config, [*saved, now])


def superseded(config: CheckpointConfig, saved: Sequence[Saved]) -> list[int]:
    """Steps of the checkpoints to delete: neither among the newest nor among the best; ascending."""
    ordered = sorted(saved)
    kept = {one.step for one in (*ordered[-config.keep :], *_best(config, ordered))}
    return [one.step for one in ordered if one.step not in kept]


def _best(config: CheckpointConfig, saved: Sequence[Saved]) -> list[Saved]:
    """The best checkpoints; of equal ones the earlier."""
    measured = [one for one in saved if one.metric is not None and math.isfinite(one.metric)]
    sign = -1.0 if config.best_mode == "max" else 1.0
    return sorted(measured, key=lambda one: (sign * (one.metric or 0.0), one.step))[: config.keep_best]


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """How the metric has gone so far; a checkpoint holds it, as ``dataclasses.asdict`` gives it.

    Attributes:
      best: the best value; None before the first evaluation.
      since: evaluations since then.
    """

    best: float | None = None
    since: int = 0

    def after(self, value: float, config: CheckpointConfig) -> EarlyStop:
        """The state after one more evaluation; NaN is no improvement."""
        if math.isfinite(value) and (self.best is None or config.better(value, self.best)):
            return EarlyStop(value, 0)
        return EarlyStop(self.best, self.since + 1)

    def reached(self, config: CheckpointConfig) -> bool:
        """Whether to stop the run."""
        return bool(config.early_stop_patience) and self.since >= config.early_stop_patience
