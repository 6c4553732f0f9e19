"""Where a run goes on: from its newest checkpoint, from one that is named, or from the start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from yatt_jax.controller.hosts import Hosts
from yatt_jax.errors import InputError
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_read import Found
from yatt_jax.io.config_changes import Change, compare, refused, shown
from yatt_jax.report.rundir import RunDir


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
      step: steps done before.
      found: the checkpoint to go on from; None: a new run.
      changes: of the configuration since then.
      history: earlier resumptions, for config.json.
    """

    step: int = 0
    found: Found | None = None
    changes: tuple[Change, ...] = ()
    history: tuple[Any, ...] = ()

    def record(self) -> list[Any]:
        """All resumptions of the run, this one included."""
        if self.found is None:
            return []
        return [*self.history, {"step": self.step, "changes": [str(change) for change in self.changes]}]


def find_start(
    run: RunDir, checkpoints: Checkpoints, config: Mapping[str, Any], hosts: Hosts, resume: str, overwrite: bool
) -> Start:
    """Decides where to begin, and cuts logs and checkpoints back to there.

    Args:
      run: the run directory.
      checkpoints: the run's checkpoints.
      config: the configuration as a dict.
      hosts: this process among those of the job.
      resume: "latest", "never" or a step.
      overwrite: discard what is there.

    Raises:
      InputError: a run that must not be discarded, or that cannot go on with this configuration.
    """
    if resume not in ("latest", "never") and not resume.isdecimal():
        raise InputError(f"--resume={resume}: expected latest, never, or the step of a checkpoint")
    if resume.isdecimal() and overwrite:
        raise InputError(f"--resume={resume} and --overwrite: give one of them")
    holds = [step for step in hosts.gather("the run directory", run.last_step()) if step is not None]
    start = Start()
    if not overwrite:
        found = None
        if resume != "never":
            found = checkpoints.find(int(resume) if resume.isdecimal() else None)
        if found is not None:
            start = Start(found.step, found, *_compared(found.common["config"], config, run))
        elif checkpoints.steps():
            raise InputError(
                f"{checkpoints.folder}: holds checkpoints of a run, and --resume=never would discard them; name "
                "another --workdir or config.checkpoint.folder, or discard them with --overwrite"
            )
        elif holds:
            _check_discard(run, config, max(holds), resume, saves=bool(checkpoints.config.keep))
    hosts.barrier("the run directory is read")
    checkpoints.cut_back(start.step if start.found else -1)
    run.cut_back(start.step if start.found else -1)
    return start


def _compared(
    old: Mapping[str, Any], new: Mapping[str, Any], run: RunDir
) -> tuple[tuple[Change, ...], tuple[Any, ...]]:
    changes = compare(old, new)
    faults = refused(changes)
    if faults:
        raise InputError(
            "\n".join([f"{run.path}: holds a run that cannot go on with this configuration:", *faults])
            + "\nuse another --workdir, or discard the run with --overwrite"
        )
    return tuple(changes), tuple(_saved(run).get("resumed", ()))


def _check_discard(run: RunDir, config: Mapping[str, Any], last: int, resume: str, *, saves: bool) -> None:
    """A run that ended before its first checkpoint begins anew; any other is not thrown away unasked."""
    changes = compare(_saved(run).get("config", {}), config)
    if resume == "never" or not saves or refused(changes):
        raise InputError(
            f"{run.path}: holds a run of {last} steps"
            + ("" if resume == "never" else ", and no checkpoint to go on from")
            + "; name another --workdir, or discard it with --overwrite"
        )


def _saved(run: RunDir) -> dict[str, Any]:
    try:
        return json.loads(run.config_file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def describe(start: Start) -> str:
    """What the console says about it."""
    said = f"going on after step {start.step}"
    return f"{said}, with a changed configuration:\n{shown(list(start.changes))}" if start.changes else said
