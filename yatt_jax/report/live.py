"""The live view on a terminal: progress bars and a table of the latest metrics."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TextIO

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from yatt_jax.report.console import Advance, Eta
from yatt_jax.report.samples import Record, pick, shown_prompt
from yatt_jax.report.text import duration, headlines, number, one_line, sparkline

_GROUPS = (
    "rollout",
    "data",
    "train",
    "train/actor",
    "train/critic",
    "train/reward",
    "eval",
    "time",
)  # the order of the panels
_HISTORY = 16


class LiveConsole:
    """A view that is redrawn in place; messages, prints and log lines scroll above it."""

    def __init__(self, stream: TextIO):
        self._rich = RichConsole(file=stream)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._rich,
        )
        self._steps = Progress(
            TextColumn("[bold]steps"),
            BarColumn(bar_width=48),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._rich,
        )
        self._step_bar = self._steps.add_task("steps", total=None, left="", visible=False)
        self._history: dict[str, collections.deque[float]] = {}
        self._tables = Columns()  # replaced as a whole, because another thread draws it
        self._eta = Eta()
        # Bars come first: what does not fit on the screen is cut from below.
        self._live = Live(Group(), console=self._rich, refresh_per_second=4, get_renderable=self._view)
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def __enter__(self) -> LiveConsole:
        before = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        self._live.start()
        # Log handlers keep the stream they were made with; without this their lines would tear the view.
        for handler in _stream_handlers():
            if handler.stream in before:
                self._moved.append((handler, handler.stream))
                handler.setStream(sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A bar that only moves."""
        task = self._bars.add_task(escape(name), total=None)
        try:
            yield
        finally:
            self._bars.remove_task(task)

    @contextlib.contextmanager
    def progress(self, name: str, total: int) -> Iterator[Advance]:
        """A bar."""
        task = self._bars.add_task(escape(name), total=total)
        try:
            yield lambda count: self._bars.advance(task, count)
        finally:
            self._bars.remove_task(task)

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Updates the table, and leaves a line of the step above it."""
        took, left = self._eta.step(step, total, metrics.get("time/step"))
        for name, value in metrics.items():
            self._history.setdefault(name, collections.deque(maxlen=_HISTORY)).append(value)
        self._tables = self._draw()
        remaining = f"{duration(took)} a step, eta {duration(left)}" if step < total else "done"
        self._steps.update(self._step_bar, completed=step, total=total, left=remaining, visible=True)
        line = Text(f"step {step}/{total}", style="bold")
        for label, value in headlines(metrics):
            line.append(f"  {label} ", style="dim").append(number(value), style="default not bold")
        if math.isfinite(took):
            line.append(f"  {duration(took)}", style="dim")
        self._rich.print(line)

    def message(self, text: str) -> None:
        """A line above the view."""
        self._rich.print(Text(text))

    def warning(self, text: str) -> None:
        """A coloured line above the view."""
        self._rich.print(Text(f"warning: {text}", style="yellow"))

    def samples(self, records: Sequence[Record], title: str, count: int = 4) -> None:
        """A table above the view."""
        if not records or count < 1:
            return
        table = Table(title=Text(title), title_justify="left", expand=True, show_lines=True)
        table.add_column("prompt", ratio=2)
        table.add_column("completion", ratio=3)
        table.add_column("reward", justify="right")
        table.add_column("advantage", justify="right")
        table.add_column("end")
        for record in pick(records, count):
            table.add_row(
                Text(one_line(shown_prompt(record), 160), style="dim"),
                Text(one_line(record["completion"], 300)),
                _signed(record["total"]),
                _signed(record["advantage"]),
                Text(f"{record['finish']} {record['length']}", style="dim"),
            )
        self._rich.print(table)

    def _view(self) -> Group:
        return Group(self._steps, self._bars, self._tables)

    def _draw(self) -> Columns:
        groups: dict[str, list[str]] = {group: [] for group in _GROUPS}
        for name in self._history:
            groups.setdefault(_group(name), []).append(name)
        shown = {group: names for group, names in groups.items() if names}
        return Columns(
            Panel(self._table(group, names), title=escape(group), border_style="dim", padding=(0, 1))
            for group, names in shown.items()
        )

    def _table(self, group: str, names: Sequence[str]) -> Table:
        table = Table.grid(padding=(0, 1))
        for name in names:
            values = list(self._history[name])
            value = duration(values[-1]) if group == "time" else number(values[-1])
            table.add_row(
                Text(name.removeprefix(group + "/"), style="dim"),
                Text(value, justify="right"),
                Text(sparkline(values), style="cyan"),
            )
        return table


def _group(name: str) -> str:
    """The panel of a metric: "rollout" of rollout/reward, "train/actor" of train/actor/loss."""
    parts = name.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 and parts[0] != "time" else parts[0]


def _signed(value: float | None) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(number(value), style="green" if value > 0 else "red" if value < 0 else "")


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            inner = getattr(handler, "python_handler", handler)  # absl wraps its stream handler
            if isinstance(inner, logging.StreamHandler):
                yield inner
