"""Saves a run between its steps, and knows when it no longer improves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from yatt_jax.config import Config
from yatt_jax.controller.hosts import Hosts
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_config import EarlyStop
from yatt_jax.typed import to_dict
from yatt_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class State:
    """Where a run stands between two steps.

    Attributes:
      arrays: the same tree in every process.
      own: what this process alone knows: its place in the data.
      common: what all processes know, beside the configuration.
    """

    arrays: PyTree
    own: dict[str, Any]
    common: dict[str, Any]


class Keeper:
    """The checkpoints of a run.

    Args:
      config: of the run.
      workdir: where checkpoints lie by default.
      hosts: this process among those of the job.
      state: reads where the run stands.

    Attributes:
      checkpoints: the files.
      early: how the best metric has gone.
    """

    def __init__(self, config: Config, workdir: Path, hosts: Hosts, state: Callable[[], State]):
        self._config, self._state = config, state
        self.checkpoints = Checkpoints(config.checkpoint.folder or workdir / "checkpoints", config.checkpoint, hosts)
        self.early = EarlyStop()
        self._own: dict[str, Any] = {}

    def mark(self) -> None:
        """A step begins: should the run be told to stop within it, it goes on from here."""
        self._own = self._state().own

    def save(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Saves if it is time.

        Args:
          step: steps done.
          metrics: what was measured at this step.

        Returns:
          Whether the run has stopped improving.

        Raises:
          CheckpointFailure: the last save failed, and ``config.checkpoint.on_failure`` is "stop".
        """
        config = self._config.checkpoint
        metric = metrics.get(config.best_metric) if config.best_metric else None
        if metric is not None:
            self.early = self.early.after(metric, config)
        ends = self.early.reached(config)
        self.mark()
        self.checkpoints.poll()
        self._save(step, metric, last=ends or step == self._config.steps)
        return ends

    def stop(self, step: int) -> None:
        """Saves the steps that are done, though the next one has begun: nothing of it must have changed the weights."""
        self._save(step, None, last=True)
        self.checkpoints.wait()

    def _save(self, step: int, metric: float | None, *, last: bool) -> None:
        if not self.checkpoints.due(step, metric=metric, last=last):
            return
        state = self._state()
        common = {"config": to_dict(self._config), "early_stop": dataclasses.asdict(self.early)} | state.common
        self.checkpoints.save(step, state.arrays, self._own, common, metric)
