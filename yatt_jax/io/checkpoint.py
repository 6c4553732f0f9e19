"""Checkpoints of a run: saved in the background, all of a step or nothing.

Saving stops the run for as long as the arrays take to the host; they are written while it goes on. Then each process
takes checksums of its share of the files, and process 0 writes the manifest, which makes the checkpoint one: see
``checkpoint_files``. A process may be killed at any moment; what it leaves behind is removed by the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from yatt_jax.io import checkpoint_arrays, checkpoint_files, checkpoint_read
from yatt_jax.io.checkpoint_arrays import ArrayWriter
from yatt_jax.io.checkpoint_config import CheckpointConfig, Saved, is_due, superseded
from yatt_jax.io.checkpoint_files import ARRAYS, COMMON, MANIFEST, CheckpointFailure, FileSum, Manifest, SavedRunError
from yatt_jax.io.checkpoint_read import Alone, Found, Processes, own_file
from yatt_jax.types import PyTree

_LOG = logging.getLogger(__name__)
_PART = "part_{}.json"  # checksums by one process, for process 0
_TIMEOUT_S = 3600


@dataclasses.dataclass(frozen=True)
class SaveStats:
    """What a save cost.

    Attributes:
      step: which one.
      bytes: of all files.
      seconds_blocking: the run stood still, waiting for an earlier save included.
      seconds_total: from the start until the checkpoint existed.
      seconds_checksums: the part of it that process 0 spent on checksums.
    """

    step: int
    bytes: int
    seconds_blocking: float
    seconds_total: float
    seconds_checksums: float

    def metrics(self) -> dict[str, float]:
        """As figures of a run."""
        return {
            "checkpoint/gb": self.bytes / 1e9,
            "checkpoint/gb_per_second": self.bytes / 1e9 / max(self.seconds_total, 1e-9),
            "checkpoint/seconds": self.seconds_total,
            "checkpoint/pause_seconds": self.seconds_blocking,
            "checkpoint/checksum_seconds": self.seconds_checksums,
            "checkpoint/hidden": max(0.0, 1 - self.seconds_blocking / max(self.seconds_total, 1e-9)),
        }


class Checkpoints:
    """The checkpoints that a run writes and goes on from. Every process makes the same calls in the same order.

    Args:
      folder: of this run's checkpoints.
      config: when to save and what to keep.
      processes: of the job; alone by default.
      clock: seconds, for tests.

    Raises:
      SavedRunError: the folder cannot be used, or processes see different folders.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: CheckpointConfig,
        processes: Processes | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.failures = 0
        self.unsaved = False  # whether the last save failed
        self._job: Processes = Alone() if processes is None else processes
        self._clock = clock
        self.folder = checkpoint_files.open_folder(folder, create=True)
        self._begin = clock()
        self._stats: list[SaveStats] = []
        self._running: _Save | None = None
        self._writer = ArrayWriter(self._share_folder(), _TIMEOUT_S)
        self._known: list[Saved] = []  # in process 0
        self._agree("checkpoint leftovers", self._look, SavedRunError)

    # Looking.

    def steps(self) -> list[int]:
        """Steps that were saved to the end, ascending, as process 0 sees them; their files are not checked."""
        return self._job.gather("checkpoints", checkpoint_files.committed(self.folder))[0]

    def find(self, step: int | None = None) -> Found | None:
        """See ``checkpoint_read.find``."""
        return checkpoint_read.find(self.folder, step, self._job)

    def restore(self, found: Found, like: PyTree) -> PyTree:
        """See ``checkpoint_read.restore``."""
        return checkpoint_read.restore(found, like)

    def cut_back(self, step: int) -> None:
        """Deletes the checkpoints of later steps, whole or damaged: call it when a run goes on from ``step``.

        ``cut_back(-1)`` deletes all of them, for a run that starts anew.
        """
        self.wait()

        def cut() -> None:
            for other, path in checkpoint_files.step_folders(self.folder).items():
                if other > step:
                    checkpoint_files.remove(path)
            self._look()

        self._agree("checkpoints cut back", cut)

    # Saving.

    def due(self, step: int, *, metric: float | None = None, last: bool = False) -> bool:
        """Whether to save now, by the clock of process 0; see ``checkpoint_config.is_due``."""
        minutes = (self._clock() - self._begin) / 60
        known = [*self._known, *([Saved(self._running.step, self._running.metric)] if self._running else [])]
        answer = is_due(self.config, step, known, minutes=minutes, metric=metric, last=last)
        return bool(self._job.gather("checkpoint due", answer)[0])

    def save(
        self,
        step: int,
        arrays: PyTree,
        own: Mapping[str, Any],
        common: Mapping[str, Any],
        metric: float | None = None,
    ) -> None:
        """Begins to save. The arrays may be donated when it returns.

        Args:
          step: steps done; no checkpoint of it may exist (``cut_back``).
          arrays: a tree of jax arrays, the same in every process.
          own: what this process needs to go on, as JSON: its data, its samples.
          common: what all processes share, as JSON; that of process 0 is kept.
          metric: value of ``config.best_metric`` at this step, if it was measured.

        Raises:
          CheckpointFailure: this or the last save failed, and ``config.on_failure`` is "stop".
          TypeError: something that JSON or a checkpoint cannot hold.
        """
        begin = self._begin = self._clock()
        self.wait()
        flat = checkpoint_arrays.flatten(arrays)
        checkpoint_arrays.check_arrays(flat)
        save = _Save(
            step=step,
            path=checkpoint_files.step_folder(self.folder, step),
            metric=metric,
            arrays=checkpoint_arrays.describe(flat),
            own=checkpoint_files.encode(own, "own"),
            common=checkpoint_files.encode(common, "common"),
            begin=begin,
        )
        needed = sum(x.nbytes for x in flat.values()) + len(save.own) + len(save.common)
        try:
            self._agree("checkpoint begins", lambda: self._make_room(save, needed))
            self._writer.start(save.path / ARRAYS, flat)
        except Exception as error:  # orbax and the storages have errors of their own
            self._failed(step, self._told(error))
            return
        save.blocking = self._clock() - begin
        save.thread = threading.Thread(target=self._finish, args=(save,), name="checkpoint", daemon=True)
        self._running = save
        save.thread.start()

    def poll(self) -> None:
        """Looks whether a save has come to its end; call it once a step.

        Raises:
          CheckpointFailure: it failed, and ``config.on_failure`` is "stop".
        """
        if self._running is not None:
            ended = self._running.thread is not None and not self._running.thread.is_alive()
            if all(self._job.gather("checkpoint ended", ended)):
                self.wait()

    def wait(self) -> None:
        """Waits until nothing is being saved.

        Raises:
          CheckpointFailure: the save failed, and ``config.on_failure`` is "stop".
        """
        save, self._running = self._running, None
        if save is None or save.thread is None:
            return
        save.thread.join()
        told = save.error, save.stats and dataclasses.asdict(save.stats)
        (error, stats), *others = self._job.gather("checkpoint written", told)
        # Process 0 knows whether the checkpoint exists; the others know better why it does not.
        if stats is None:
            self._failed(save.step, next((other for other, _ in others if other), error))
        else:
            self._stats.append(SaveStats(**stats))
            self.unsaved = False

    def metrics(self) -> dict[str, float]:
        """Figures of the save that ended since the last call, if one did, and of failures, if there were any."""
        found = self._stats[-1].metrics() if self._stats else {}
        self._stats.clear()
        return found | ({"checkpoint/failed": float(self.failures)} if self.failures else {})

    def close(self) -> None:
        """Waits for this process's part of what is being saved; of the others it asks nothing. Never raises."""
        save, self._running = self._running, None
        with contextlib.suppress(Exception):
            if save is not None and save.thread is not None:
                save.thread.join()
                if save.error:
                    _LOG.error("the checkpoint of step %d was not written: %s", save.step, save.error)
            self._writer.close()

    def _finish(self, save: _Save) -> None:
        """The background part of a save."""
        try:
            self._write(save)
        except BaseException as error:  # a thread has nobody else to tell
            save.error = self._told(error)
        with contextlib.suppress(Exception):  # then process 0 finds no part of this one
            self._writer.meet()
        if self._job.process != 0:
            return
        try:
            if save.error:
                raise CheckpointFailure(save.error)
            self._commit(save)
            known = [*self._known, Saved(save.step, save.metric)]
            old = superseded(self.config, known)
            self._known = [one for one in known if one.step not in old]
            for step in old:
                checkpoint_files.remove(checkpoint_files.step_folder(self.folder, step))
        except BaseException as error:
            if save.stats is None:
                save.error = self._told(error)
                with contextlib.suppress(Exception):
                    checkpoint_files.remove(save.path)
            else:
                _LOG.warning("an old checkpoint could not be deleted: %s", checkpoint_files.reason(error))

    def _write(self, save: _Save) -> None:
        """This process's files, and the checksums of its share of what orbax wrote."""
        process, count = self._job.process, self._job.count
        self._writer.finish()
        names = [f"{ARRAYS}/{name}" for name in checkpoint_files.list_files(save.path / ARRAYS)][process::count]
        checkpoint_files.write_whole(save.path / own_file(process), save.own)
        names.append(own_file(process))
        if process == 0:
            checkpoint_files.write_whole(save.path / COMMON, save.common)
            names.append(COMMON)
        start = time.perf_counter()
        save.sums = checkpoint_files.sum_files(save.path, names)
        save.checksum_seconds = time.perf_counter() - start
        if process != 0:
            part = checkpoint_files.encode(save.sums, "part")
            checkpoint_files.write_whole(save.path / _PART.format(process), part)

    def _commit(self, save: _Save) -> None:
        """Joins the checksums of all processes and writes the manifest."""
        sums = dict(save.sums)
        for process in range(1, self._job.count):
            file = save.path / _PART.format(process)
            try:
                part = json.loads(file.read_bytes())
            except FileNotFoundError:
                raise CheckpointFailure(f"{file}: process {process} did not write its part") from None
            sums |= {name: FileSum(*found) for name, found in part.items()}
            file.unlink()
        names = checkpoint_files.list_files(save.path)
        sums |= checkpoint_files.sum_files(save.path, [name for name in names if name not in sums])
        gone = sorted(set(sums) - set(names))
        if gone:
            raise CheckpointFailure(f"{save.path / gone[0]}: disappeared while the checkpoint was written")
        manifest = Manifest(save.step, save.metric, self._job.count, save.arrays, sums)
        checkpoint_files.write_whole(save.path / MANIFEST, manifest.to_bytes())
        save.stats = SaveStats(
            step=save.step,
            bytes=sum(found.size for found in sums.values()),
            seconds_blocking=save.blocking,
            seconds_total=self._clock() - save.begin,
            seconds_checksums=save.checksum_seconds,
        )

    def _failed(self, step: int, message: str) -> None:
        self.failures += 1
        self.unsaved = True
        if self.config.on_failure == "stop":
            raise CheckpointFailure(f"the checkpoint of step {step} was not written: {message}")
        if self._job.process == 0:
            _LOG.warning("the checkpoint of step %d was not written; the run goes on. %s", step, message)

    def _told(self, error: BaseException) -> str:
        """What an error says to the user."""
        if checkpoint_files.is_full(error) and not isinstance(error, CheckpointFailure):
            return checkpoint_files.no_room(self.folder)
        if not isinstance(error, CheckpointFailure | SavedRunError):
            _LOG.debug("checkpoint", exc_info=error)
        return checkpoint_files.reason(error)

    # What process 0 does for all.

    def _agree(self, name: str, act: Callable[[], Any], raises: Callable[[str], Exception] = CheckpointFailure) -> None:
        """Process 0 acts, and the others wait for it; where it cannot, all of them raise the same."""
        told = ""
        if self._job.process == 0:
            try:
                act()
            except Exception as error:  # each storage has errors of its own
                told = self._told(error)
        told = self._job.gather(name, told)[0]
        if told:
            raise raises(told)

    def _share_folder(self) -> str:
        """A name for this object that all processes know, once they are known to see the same folder."""
        name: str = self._job.gather("checkpoint folder", uuid.uuid4().hex)[0]
        probe = self.folder / f".probe-{name}"
        self._agree("checkpoint folder", lambda: checkpoint_files.write_whole(probe, b""), SavedRunError)
        sees = self._job.gather("checkpoint folder seen", probe.exists())
        self._agree("checkpoint folder checked", lambda: probe.unlink(missing_ok=True))
        if not all(sees):
            raise SavedRunError(
                f"checkpoint.folder = {self.folder}: process {sees.index(False)} does not see what process 0 writes "
                "there; name a folder that all hosts share, or gs://BUCKET/PATH"
            )
        return name

    def _look(self) -> None:
        """Removes what interrupted saves left behind, and takes note of the checkpoints that exist."""
        self._remove_leftovers()
        self._known = []
        for step in checkpoint_files.committed(self.folder):
            metric = None
            with contextlib.suppress(SavedRunError):  # found out when it is read
                metric = checkpoint_files.read_manifest(checkpoint_files.step_folder(self.folder, step)).metric
            self._known.append(Saved(step, metric))

    def _remove_leftovers(self) -> None:
        whole = checkpoint_files.committed(self.folder)
        for step, path in checkpoint_files.step_folders(self.folder).items():
            if step not in whole:
                _LOG.warning("%s: removed, what is left of a save that was interrupted or failed", path)
                checkpoint_files.remove(path)
        for path in self.folder.glob(".probe-*"):
            path.unlink(missing_ok=True)

    def _make_room(self, save: _Save, needed: int) -> None:
        """Checks that a checkpoint of this step may be and can be written, before a byte is."""
        self._remove_leftovers()
        if save.path.exists():
            raise CheckpointFailure(f"{save.path}: exists; a run that goes on from an earlier step cuts back to it")
        free = checkpoint_files.free_bytes(self.folder)
        if free is not None and free < needed:
            raise CheckpointFailure(checkpoint_files.no_room(self.folder, needed))
        save.path.mkdir(parents=True)


@dataclasses.dataclass
class _Save:
    """A save on its way; the thread alone writes the fields from ``error`` on until it ends."""

    step: int
    path: epath.Path
    metric: float | None
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    own: bytes
    common: bytes
    begin: float
    blocking: float = 0.0
    thread: threading.Thread | None = None
    error: str = ""
    sums: dict[str, FileSum] = dataclasses.field(default_factory=dict)
    checksum_seconds: float = 0.0
    stats: SaveStats | None = None
