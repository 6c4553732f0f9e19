"""When each phase of a run began and ended, on every process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from yatt_jax.report.rundir import RunDir


class Timeline:
    """Writes phases to timeline.jsonl and adds up their seconds for the metrics.

    A phase inside a phase is named by its path, ``rollout/prefill``. Threads nest on their own, so a phase may run
    beside another one. A phase named "wait" is time in which this process, and so its devices, waited for the others
    at an agreement; the report counts on it to end on all processes at the same moment.
    """

    def __init__(self, run: RunDir, step: int = 0):
        self._run = run
        self._step = step
        self._seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._nesting = threading.local()
        self._epoch = time.time() - time.monotonic()  # one clock for the whole run: never adjusted backwards
        self._mark = time.monotonic()

    def introduce(self, host: str, devices: Sequence[str], versions: Mapping[str, str]) -> None:
        """Says where this process runs; once, before its first phase: what an earlier start left open ends here.

        Args:
          host: name of the machine.
          devices: a name for each local device.
          versions: of the packages that have to be the same on every process; see ``facts.here``.

        Raises:
          RunDirError: the timeline cannot be written.
        """
        moment = time.monotonic()
        about = {"processes": self._run.processes, "host": host, "devices": list(devices), "versions": dict(versions)}
        self._write(self._step, None, "process", moment, **about)

    def begin(self, step: int) -> None:
        """Says which step the following phases belong to, and starts its clock."""
        with self._lock:
            self._step = step
            self._seconds.clear()
            self._mark = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, whether it ends or raises.

        Args:
          name: "rollout", "score", "train", ...; becomes the metric ``time/<name>``.

        Raises:
          RunDirError: the timeline cannot be written.
        """
        stack: list[str] = self._nesting.__dict__.setdefault("stack", [])
        stack.append(name)
        path, step, start = "/".join(stack), self._step, time.monotonic()
        failed = True
        try:
            self._write(step, path, "start", start)
            yield
            failed = False
        finally:
            stack.pop()
            end = time.monotonic()
            with self._lock:
                self._seconds[path] += end - start
            # A failure to write must not hide the error that ended the phase.
            with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
                self._write(step, path, "error" if failed else "end", end, seconds=round(end - start, 6))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase since ``begin``, as ``time/<phase>``, and of the whole step as ``time/step``."""
        with self._lock:
            phases = {f"time/{name}": value for name, value in self._seconds.items()}
            return {**phases, "time/step": time.monotonic() - self._mark}

    def _write(self, step: int, phase: str | None, event: str, moment: float, **more: Any) -> None:
        when = round(self._epoch + moment, 6)
        record = {"step": step, "process": self._run.process, "phase": phase, "event": event, "time": when, **more}
        self._run.append("timeline", record)
