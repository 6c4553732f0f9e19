"""The run directory: everything a run leaves behind, as plain files.

    config.json       the resolved config, the command, versions, devices, parameter counts     process 0
    metrics.jsonl     a line a step: {"step": 3, "rollout/reward": 0.41, "time/train": 2.5}     process 0
    samples.jsonl     a line a completion                                                       every process
    timeline.jsonl    where the process runs; a line when a phase starts and when it ends       every process
    media/            small copies of images and audio in logged prompts                        every process
    tensorboard/      event files                                                               process 0
    report.html       one self-contained page, made from the files above                        process 0

Process p > 0 writes ``samples.p.jsonl``, ``timeline.p.jsonl`` and ``media.p/`` beside them, so processes never share a
file and a report only has to read them all. Every line carries its step, so that a resumed run can be cut back to where
it continues. Lines are appended by one system call each: a reader sees whole lines, and a killed process leaves at
most one broken line at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from yatt_jax.errors import InputError

Log = Literal["metrics", "samples", "timeline"]
LOGS: tuple[Log, ...] = ("metrics", "samples", "timeline")


class RunDirError(InputError):
    """The run directory cannot be used; the message says which file, why, and what to do."""


class DiskFullError(RunDirError):
    """The disk of the run directory is full: it may be tried again."""

    status = 1


class RunDir:
    """A run directory as one process sees it.

    Attributes:
      path: the folder.
      process: this process's index.
      processes: number of processes in the job.
    """

    def __init__(self, path: Path, process: int, processes: int):
        self.path = path
        self.process = process
        self.processes = processes
        self._handles: dict[Log, int] = {}
        self._lock = threading.Lock()
        self._lock_handle: int | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], process: int = 0, processes: int = 1) -> RunDir:
        """Creates the folder if needed and checks that it can be written to.

        Args:
          path: ``--workdir``; a local or mounted folder.
          process: index of this process.
          processes: number of processes.

        Raises:
          RunDirError: the path is not a folder, cannot be created, is not writable, or its disk is full.
        """
        text = os.fspath(path)
        if "://" in text:
            raise RunDirError(f"--workdir={text}: a run directory is a local or mounted folder, not a URL")
        if not text:
            raise RunDirError("--workdir is empty: name a folder for the run, e.g. --workdir=runs/first")
        folder = Path(text).expanduser()
        if folder.exists() and not folder.is_dir():
            raise RunDirError(f"--workdir={text} is a file: name a folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"\n")
        except OSError as error:
            raise _explain(error, folder) from error
        return cls(folder, process, processes)

    def take(self) -> None:
        """Keeps a second run out of the folder (process 0; the others do nothing), until ``close`` or its end.

        Raises:
          RunDirError: another run is writing here; the message names its process and host.
        """
        if not self.is_main:
            return
        file = self.path / ".lock"
        try:
            self._lock_handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return  # a file system without locks
            owner = file.read_text("utf-8", errors="replace").strip()
            raise RunDirError(
                f"{self.path}: another run writes here ({owner}); wait for it, or use another --workdir"
            ) from None
        os.ftruncate(self._lock_handle, 0)
        os.write(self._lock_handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    @property
    def is_main(self) -> bool:
        """Whether this process writes what the job writes once."""
        return self.process == 0

    @property
    def config_file(self) -> Path:
        """Config, command and facts of the run."""
        return self.path / "config.json"

    @property
    def report_file(self) -> Path:
        """The page."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """Folder of the event files."""
        return self.path / "tensorboard"

    def file(self, log: Log) -> Path:
        """This process's file of a log."""
        return self.path / log_name(log, self.process)

    def append(self, log: Log, record: Mapping[str, Any]) -> None:
        """Appends one line; it is in the hands of the operating system when this returns.

        Args:
          log: which file.
          record: anything JSON can say, and NumPy scalars and arrays; must hold "step". NaN and infinities become null.

        Raises:
          RunDirError: the disk is full, or the file cannot be written; the file still ends in a whole line.
        """
        if "step" not in record:
            raise ValueError(f"a {log} record needs its step, so that a resumed run can be cut back: {dict(record)}")
        text = json.dumps(to_json(record), ensure_ascii=False, allow_nan=False) + "\n"
        line = text.encode(errors="backslashreplace")  # half a surrogate pair becomes the JSON escape it needs
        with self._lock:
            try:
                handle = self._handles.get(log)
                if handle is None:
                    handle = self._handles[log] = _open_for_append(self.file(log))
                _write_whole(handle, line)
            except OSError as error:
                raise _explain(error, self.file(log)) from error

    def write_config(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Writes config.json (process 0; the others do nothing).

        Args:
          config: the resolved config, nested.
          facts: whatever else describes the run: see ``yatt_jax.report.facts``.
        """
        if self.is_main:
            text = json.dumps(to_json({**facts, "config": config}), indent=2, ensure_ascii=False, allow_nan=False)
            replace_text(self.config_file, text + "\n")

    def last_step(self) -> int | None:
        """The highest step in metrics.jsonl, or None in a fresh folder."""
        steps = [record["step"] for record in read_log(self.path / log_name("metrics", 0))]
        return max(steps, default=None)

    def cut_back(self, step: int) -> None:
        """Drops every line of a later step, and a half-written last line.

        Each process cuts its own files; process 0 also those of processes that the job no longer has. Call it before
        the first ``append`` of a resumed run; ``cut_back(-1)`` empties the logs.

        Args:
          step: the last step to keep.

        Raises:
          RunDirError: as in ``append``.
        """
        with self._lock:
            self._close_handles()
            for log in LOGS:
                for index, file in log_files(self.path, log):
                    if index == self.process or (self.is_main and index >= self.processes):
                        try:
                            _keep_until(file, step)
                        except OSError as error:
                            raise _explain(error, file) from error

    def close(self) -> None:
        """Closes the files; a later ``append`` opens them again."""
        with self._lock:
            self._close_handles()
            if self._lock_handle is not None:
                os.close(self._lock_handle)
                self._lock_handle = None

    def _close_handles(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def log_files(folder: Path, log: Log) -> list[tuple[int, Path]]:
    """The files of a log, as (process, path), in the order of processes."""
    found = [(0, folder / f"{log}.jsonl")] if (folder / f"{log}.jsonl").exists() else []
    for file in folder.glob(f"{log}.*.jsonl"):
        index = file.name.split(".")[1]
        if index.isdecimal():
            found.append((int(index), file))
    return sorted(found)


def read_log(file: Path, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Reads the whole lines of a log; what a killed process left half-written is passed over.

    Args:
      file: the log; an absent one has no lines.
      last: only the lines that begin within so many bytes of its end.

    Raises:
      OSError: it is there and cannot be read.
    """
    if not file.exists():
        return
    with file.open("rb") as lines:
        skipped = 0 if last is None else file.stat().st_size - last
        if skipped > 0:
            lines.seek(skipped - 1)
            lines.readline()  # the rest of the line before
        for line in lines:
            record = _parse(line)
            if record is not None:
                yield record


def replace_text(file: Path, text: str) -> None:
    """Replaces a whole file at once: a reader sees the old or the new one, never a part.

    Raises:
      RunDirError: the disk is full, or the file cannot be written; the old one is untouched.
    """
    replace_bytes(file, text.encode(errors="backslashreplace"))


def replace_bytes(file: Path, content: bytes) -> None:
    """The same for bytes; the folder is made if it is not there.

    Raises:
      RunDirError: as for text.
    """
    try:
        file.parent.mkdir(exist_ok=True)
        with _replacing(file) as out:
            out.write(content)
    except OSError as error:
        raise _explain(error, file) from error


def to_json(value: Any) -> Any:
    """Turns a value into what JSON can hold: NaN and infinities become None, arrays lists, the unknown text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def log_name(log: Log, process: int) -> str:
    """Name of a process's file of a log."""
    return f"{log}.jsonl" if process == 0 else f"{log}.{process}.jsonl"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _open_for_append(file: Path) -> int:
    """Opens a log, first mending what a killed process left half-written at its end."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        with file.open("rb") as content:
            last = content.read().rpartition(b"\n")[2]
        if _parse(last) is None:
            os.ftruncate(handle, size - len(last))
        else:
            os.write(handle, b"\n")
    return handle


def _write_whole(handle: int, line: bytes) -> None:
    """Writes all of a line, or, when the disk is full, none of it."""
    start = os.fstat(handle).st_size
    try:
        written = 0
        while written < len(line):
            written += os.write(handle, line[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, start)
        raise


def _keep_until(file: Path, step: int) -> None:
    with file.open("rb") as lines, _replacing(file) as out:
        for line in lines:
            record = _parse(line)
            if record is not None and record["step"] <= step:
                out.write(line if line.endswith(b"\n") else line + b"\n")


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[Any]:
    """A binary file that takes the place of ``file`` when the block ends well, and leaves no trace when it does not."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as out:
            yield out
        os.replace(scratch, file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _explain(error: OSError, file: Path) -> RunDirError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(file if file.is_dir() else file.parent).free
            return DiskFullError(
                f"{file}: the disk is full ({free / 2**20:.1f} MiB free): free some space, or use another --workdir"
            )
        return DiskFullError(f"{file}: the disk is full: free some space, or use another --workdir")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunDirError(f"{file}: not writable ({error.strerror}): change its permissions, or use another --workdir")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return RunDirError(f"{file}: a part of this path is a file ({error.filename}): use another --workdir")
    return RunDirError(f"{file}: {error.strerror or error}")
