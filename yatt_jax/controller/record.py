"""What a run writes down as it goes: the line of metrics of each step, and the page."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from yatt_jax.config import Config
from yatt_jax.report import html
from yatt_jax.report.console import Console
from yatt_jax.report.metrics import ConsoleSink, JsonlSink, MetricsWriter
from yatt_jax.report.rundir import RunDir
from yatt_jax.report.sinks import open_optional
from yatt_jax.report.timeline import Timeline
from yatt_jax.typed import to_dict

_LOG = logging.getLogger(__name__)

# Where tokens are counted -> the phases of a step that they take.
_TOKENS_IN = {"rollout": ("rollout",), "data": ("data", "score", "train")}


class Record:
    """Gathers the figures of a step and writes them as one line; in all processes but the first, to nowhere.

    Args:
      config: of the run.
      run: the run directory.
      console: shows each line.
      timeline: adds the seconds of each phase.

    Attributes:
      last: the line written last.
    """

    def __init__(self, config: Config, run: RunDir, console: Console, timeline: Timeline):
        self._run, self._timeline = run, timeline
        self._writer = _open_sinks(config, run, console)
        self._pending: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds figures to the line that is written next."""
        self._pending |= metrics

    def write(self, step: int) -> None:
        """Writes the line of a step: everything gathered since the last one."""
        times = self._timeline.seconds()
        for group, phases in _TOKENS_IN.items():
            seconds = sum(times.get(f"time/{phase}", 0.0) for phase in phases)
            tokens = self._pending.pop(f"{group}/tokens", None)
            if tokens is not None and seconds:
                self._pending[f"{group}/tokens_per_second"] = tokens / seconds
        self.last = self._pending | times
        self._writer.step(step, self.last)
        self._pending = {}

    def page(self) -> None:
        """Renews report.html from the run directory; a page that cannot be made never stops a run."""
        if not self._run.is_main:
            return
        try:
            html.write(self._run)
        except Exception:
            _LOG.warning("report.html could not be written; `python -m tools.report` makes it again", exc_info=True)

    def close(self) -> None:
        """Closes everything that lines go to."""
        self._writer.close()


def _open_sinks(config: Config, run: RunDir, console: Console) -> MetricsWriter:
    if not run.is_main:
        return MetricsWriter()
    optional = open_optional(
        run, to_dict(config), tensorboard=config.report.tensorboard, wandb_project=config.report.wandb_project
    )
    return MetricsWriter([JsonlSink(run)], [ConsoleSink(console, config.steps), *optional])
