"""Finding a checkpoint that is whole, and reading it into any sharding, by any number of processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax
from etils import epath

from yatt_jax.io import checkpoint_arrays, checkpoint_files
from yatt_jax.io.checkpoint_files import ARRAYS, COMMON, Manifest, SavedRunError
from yatt_jax.types import PyTree

_LOG = logging.getLogger(__name__)


class Processes(Protocol):
    """The processes of a job, and how they exchange small JSON values, in the same order everywhere."""

    @property
    def process(self) -> int:
        """Number of this one."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, in their order; ``name`` says what is agreed on."""
        ...


@dataclasses.dataclass(frozen=True)
class Alone:
    """A job of one process."""

    process: int = 0
    count: int = 1

    def gather(self, name: str, value: Any) -> list[Any]:
        """The value."""
        return [value]


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint whose files are all as they were written.

    Attributes:
      step: steps done.
      path: its folder.
      metric: the figure it was kept for, if it was measured.
      common: what the processes had in common.
      own: what each process kept for itself, in the order of the processes that saved it.
      arrays: name -> (dtype, shape).
      bytes: size of its files.
      verify_seconds: how long checking took.
    """

    step: int
    path: epath.Path
    metric: float | None
    common: dict[str, Any]
    own: list[dict[str, Any]]
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    bytes: int
    verify_seconds: float


def find(folder: epath.Path, step: int | None = None, processes: Processes | None = None) -> Found | None:
    """The newest checkpoint that is whole, or that of a step.

    The processes share the reading of all files. A damaged checkpoint is passed over, with a warning that names the
    file.

    Args:
      folder: of the run's checkpoints.
      step: which one; None: the newest.
      processes: of the job.

    Returns:
      The checkpoint, or None where there is none at all.

    Raises:
      SavedRunError: the one asked for is missing or damaged, or all of them are damaged.
    """
    job = Alone() if processes is None else processes
    steps: list[int] = job.gather("checkpoints", checkpoint_files.committed(folder))[0]
    if step is not None and step not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
        raise SavedRunError(f"{folder}: no checkpoint of step {step}; {there}")
    first = ""
    for candidate in [step] if step is not None else reversed(steps):
        path = checkpoint_files.step_folder(folder, candidate)
        start = time.perf_counter()
        manifest, fault = _verified(path, job)
        if manifest is not None and not fault:
            return _contents(path, manifest, time.perf_counter() - start)
        first = first or fault
        if step is None and job.process == 0:
            _LOG.warning("%s; the checkpoint of step %d is passed over", fault, candidate)
    if not first:
        return None
    if step is not None:
        others = [str(other) for other in steps if other != step]
        raise SavedRunError(f"{first}; there are also checkpoints of steps {', '.join(others) or '(none)'}")
    raise SavedRunError(
        f"{folder}: no checkpoint can be used ({first}); start anew with --overwrite, or in another --workdir"
    )


def restore(found: Found, like: PyTree, *, partial: bool = False) -> PyTree:
    """Reads arrays.

    Args:
      found: the checkpoint.
      like: the tree that was saved, or a part of it if ``partial``, with ``ShapeDtypeStruct``s or arrays as leaves that
        have the sharding to read into: any, on any number of devices and processes.
      partial: whether the checkpoint may hold more.

    Returns:
      The tree, bit by bit as it was saved.

    Raises:
      SavedRunError: arrays are missing, left over, or of another shape or dtype.
    """
    wanted = checkpoint_arrays.flatten(like)
    checkpoint_arrays.check_same(found.arrays, wanted, found.path, partial=partial)
    arrays = checkpoint_arrays.read(found.path / ARRAYS, wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def _verified(path: epath.Path, job: Processes) -> tuple[Manifest | None, str]:
    """The manifest, and the first fault that any process found; each checks its share of the files."""
    manifest: Manifest | None = None
    try:
        manifest = checkpoint_files.read_manifest(path)
        names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
        mine = checkpoint_files.faults(path, manifest, names[job.process :: job.count])
    except SavedRunError as error:
        mine = [str(error)]
    everyone: list[str] = job.gather("checkpoint checked", mine[0] if mine else "")
    return manifest, next(filter(None, everyone), "")


def _contents(path: epath.Path, manifest: Manifest, seconds: float) -> Found:
    own = [json.loads((path / own_file(process)).read_bytes()) for process in range(manifest.processes)]
    return Found(
        step=manifest.step,
        path=path,
        metric=manifest.metric,
        common=json.loads((path / COMMON).read_bytes()),
        own=own,
        arrays=manifest.arrays,
        bytes=sum(file.size for file in manifest.files.values()),
        verify_seconds=seconds,
    )


def own_file(process: int) -> str:
    """Name of the file that a process keeps for itself."""
    return f"process_{process}.json"
