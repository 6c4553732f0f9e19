"""What a run shows while it runs: a live view on a terminal, plain lines anywhere else."""

from __future__ import annotations

import collections
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, TextIO

from yatt_jax.report.samples import Record, pick, shown_prompt
from yatt_jax.report.text import duration, headlines, number, one_line

Advance = Callable[[int], None]
HEARTBEAT_S = 15.0


class Console(Protocol):
    """Where the loop says what it does. Use it as a context manager around the run."""

    def __enter__(self) -> Console: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Shows that something of unknown length goes on: loading, compiling."""
        ...

    def progress(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Shows a bar while the block runs; call what it yields with the number of items just done."""
        ...

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Shows metrics after ``step`` of ``total`` steps."""
        ...

    def message(self, text: str) -> None:
        """Shows a line that stays."""
        ...

    def warning(self, text: str) -> None:
        """Shows a line that stays and that no process keeps to itself: something went wrong."""
        ...

    def samples(self, records: Sequence[Record], title: str, count: int = 4) -> None:
        """Shows ``count`` completions with rewards and advantage, spread from the best to the worst."""
        ...


def open_console(process: int = 0, stream: TextIO | None = None, *, quiet: bool = False) -> Console:
    """The console that suits where the output goes.

    Args:
      process: index of this process; all but the first are quiet, and their lines are marked with it.
      stream: where to; standard output by default.
      quiet: show warnings only: every process has the same to say, and one of them says it.
    """
    out = sys.stdout if stream is None else stream
    if quiet or process > 0:
        return QuietConsole(out, process)
    if out.isatty():
        from yatt_jax.report.live import LiveConsole

        return LiveConsole(out)
    return PlainConsole(out)


class PlainConsole:
    """Plain lines, flushed one by one, for log files and pipes."""

    def __init__(self, stream: TextIO):
        self._out = stream
        self._eta = Eta()
        self._announced: set[str] = set()

    def __enter__(self) -> PlainConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Says when it starts and how long it took, the first time only: that is the time which compiles."""
        if name in self._announced:
            yield
            return
        self._announced.add(name)
        start = time.monotonic()
        self._line(f"{name} ...")
        yield
        self._line(f"{name}: {duration(time.monotonic() - start)}")

    @contextlib.contextmanager
    def progress(self, name: str, total: int) -> Iterator[Advance]:
        """Says how far it is every quarter of a minute, and nothing when it is quicker than that."""
        start = last = time.monotonic()
        done = 0

        def advance(count: int) -> None:
            nonlocal done, last
            done += count
            now = time.monotonic()
            if now - last >= HEARTBEAT_S:
                last = now
                self._line(f"{name} {done}/{total}  {duration(now - start)}")

        yield advance

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """One line."""
        took, left = self._eta.step(step, total, metrics.get("time/step"))
        parts = [f"step {step}/{total}", *(f"{label} {number(value)}" for label, value in headlines(metrics))]
        if math.isfinite(took):
            parts.append(duration(took))
        if step < total and math.isfinite(left):
            parts.append(f"eta {duration(left)}")
        self._line("  ".join(parts))

    def message(self, text: str) -> None:
        """The text."""
        self._line(text)

    def warning(self, text: str) -> None:
        """The text, marked as a warning."""
        self._line(f"warning: {text}")

    def samples(self, records: Sequence[Record], title: str, count: int = 4) -> None:
        """A few lines a completion."""
        if not records or count < 1:
            return
        self._line(title)
        for record in pick(records, count):
            advantage = "" if record["advantage"] is None else f"  advantage {number(record['advantage'])}"
            self._line(f"  reward {number(record['total'])}{advantage}  {record['finish']}, {record['length']} tokens")
            self._line(f"    {one_line(shown_prompt(record), 110)}")
            self._line(f"    -> {one_line(record['completion'], 160)}")

    def _line(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class QuietConsole:
    """Warnings, and nothing else: for processes that run beside the one that reports."""

    def __init__(self, stream: TextIO, process: int = 0):
        self._out = stream
        self._mark = f"[process {process}] " if process else ""

    def __enter__(self) -> QuietConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Shows nothing."""
        return contextlib.nullcontext()

    def progress(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Shows nothing."""
        return contextlib.nullcontext(_no_advance)

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Shows nothing."""

    def message(self, text: str) -> None:
        """Shows nothing."""

    def warning(self, text: str) -> None:
        """One line in one write, so that those of several processes on a terminal do not mix."""
        self._out.write(f"{self._mark}warning: {text}\n")
        self._out.flush()

    def samples(self, records: Sequence[Record], title: str, count: int = 4) -> None:
        """Shows nothing."""


def _no_advance(count: int) -> None:
    return None


class Eta:
    """Time left, from the median of recent steps: a slow one, such as the first with its compilation, is no guide."""

    def __init__(self) -> None:
        self._took: collections.deque[float] = collections.deque(maxlen=20)
        self._last = time.monotonic()
        self._step = 0

    def step(self, step: int, total: int, took: float | None = None) -> tuple[float, float]:
        """Notes that ``step`` steps are done; returns the seconds that the last one took and the seconds left.

        Args:
          step: steps done.
          total: steps to do.
          took: seconds of this step, where they were measured; else since the last call.
        """
        now = time.monotonic()
        if step > self._step:  # an evaluation reports the step before it once more
            self._took.append(now - self._last if took is None else took)
        self._step, self._last = step, now
        recent = list(self._took)[1:] or list(self._took)
        if not recent:
            return math.nan, math.nan
        return self._took[-1], statistics.median(recent) * max(total - step, 0)
