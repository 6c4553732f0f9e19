"""Optional places for metrics: TensorBoard and Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from yatt_jax.report.metrics import Sink
from yatt_jax.report.rundir import RunDir, to_json

_LOG = logging.getLogger(__name__)


class TensorboardSink:
    """Event files for TensorBoard.

    Events are written here and now: the library's own writer does it in a thread behind a bounded queue, which would
    block the run for ever once that thread has died of a full disk.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, resume_step: int | None = None):
        """Opens a new event file.

        Args:
          folder: where to.
          resume_step: the last step kept, when a run continues: TensorBoard hides what earlier files hold after it.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        folder.mkdir(parents=True, exist_ok=True)
        # The message classes are made at run time, where no type checker sees them.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        # The name has seconds only: the process keeps apart two starts within one.
        self._out = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        if resume_step is not None:
            log = self._events.SessionLog
            self._write(resume_step + 1, session_log=log(status=log.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the finite values of a step."""
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._write(step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        self._out.close()

    def _write(self, step: int, **content: Any) -> None:
        self._out.write_event(self._events.Event(step=step, wall_time=time.time(), **content))
        self._out.flush()


class WandbSink:
    """Weights & Biases, an optional extra."""

    name = "wandb"

    def __init__(self, run: RunDir, project: str, config: Mapping[str, Any]):
        """Starts, or resumes, the run that belongs to a folder.

        Args:
          run: its folder's name is the run's name.
          project: the project there.
          config: shown beside the run.

        Raises:
          ModuleNotFoundError: wandb is not installed; the message says how to mend it.
        """
        require_wandb()
        import wandb  # pyright: ignore[reportMissingImports]

        place = run.path.resolve()
        # The same folder continues the same run; the digest keeps apart folders of one name.
        key = f"{place.name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
        self._run = wandb.init(
            project=project, name=place.name, id=key, resume="allow", dir=place, config=to_json(config)
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the finite values of a step."""
        self._run.log({k: v for k, v in metrics.items() if math.isfinite(v)}, step=step)

    def close(self) -> None:
        """Waits for the upload."""
        self._run.finish()


def require_wandb() -> None:
    """Checks, before a run starts, that wandb can be imported.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ModuleNotFoundError(
            'metrics are to go to wandb, which is not installed: pip install "yatt_jax[wandb]", or switch it off'
        )


def open_optional(
    run: RunDir, config: Mapping[str, Any], *, tensorboard: bool, wandb_project: str, resume_step: int | None = None
) -> list[Sink]:
    """Opens the optional sinks; one that cannot be opened is reported, and the run goes on without it.

    Args:
      run: the run directory.
      config: the resolved config, for wandb.
      tensorboard: whether to write event files.
      wandb_project: project at wandb; "" for none.
      resume_step: the last step kept, when a run continues.

    Raises:
      ModuleNotFoundError: wandb is asked for and not installed.
    """
    openers: list[tuple[str, Callable[[], Sink]]] = []
    if tensorboard:
        openers.append(("TensorBoard", lambda: TensorboardSink(run.tensorboard, resume_step)))
    if wandb_project:
        require_wandb()
        openers.append(("wandb", lambda: WandbSink(run, wandb_project, config)))
    sinks: list[Sink] = []
    for name, opener in openers:
        try:
            sinks.append(opener())
        except Exception as error:
            _LOG.warning(
                "%s could not be opened (%s: %s); the run goes on without it", name, type(error).__name__, error
            )
    return sinks
