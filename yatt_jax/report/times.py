"""Where the time went: by phase, by step, and process beside process."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from yatt_jax.report.charts import lanes, stacked_bars
from yatt_jax.report.markup import broad, card, cell, legend, table
from yatt_jax.report.read import Run
from yatt_jax.report.text import duration, safe

_LANE_STEPS = 4
_PAUSE_S = 60.0


def wall_seconds(run: Run) -> float | None:
    """Seconds the run has been at work; pauses between a stop and a resume do not count."""
    total, until = 0.0, None
    for phase in run.phases:
        if until is None or phase.start - until > _PAUSE_S:
            total, until = total + phase.end - phase.start, phase.end
        elif phase.end > until:
            total, until = total + phase.end - until, phase.end
    return total if until is not None else sum(run.values("time/step")) or None


def time_section(run: Run) -> str:
    """Totals by phase, seconds of each step, and the timeline of the last steps."""
    colours = _colours(run)
    if not colours:
        return ""
    parts = [_totals(run, colours), _by_step(run, colours)]
    steps = sorted({phase.step for phase in run.phases})[-_LANE_STEPS:]
    recent = [phase for phase in run.phases if phase.step in steps]
    if recent:
        names = [name for name in colours if any(p.name.partition("/")[0] == name for p in recent)]
        named = legend((name, colours[name], "box") for name in names)
        parts.append(card(f"{named}{broad(lanes(recent, colours))}", "Timeline of the last steps"))
    return "".join(parts)


def _colours(run: Run) -> dict[str, int]:
    timed = [name.removeprefix("time/") for name in run.names() if name.startswith("time/")]
    names = [*timed, *(phase.name for phase in run.phases)]
    outer = dict.fromkeys(name.partition("/")[0] for name in names if name != "step")
    return {name: min(i, 6) for i, name in enumerate(outer)}


def _totals(run: Run, colours: dict[str, int]) -> str:
    seconds: dict[str, list[float]] = defaultdict(list)
    first = min((phase.process for phase in run.phases), default=0)
    for phase in run.phases:
        if phase.process == first:
            seconds[phase.name].append(phase.end - phase.start)
    if not seconds:
        for name in run.names():
            if name.startswith("time/") and name != "time/step":
                seconds[name.removeprefix("time/")] = run.values(name)
    whole = wall_seconds(run) or 1.0
    rows = []
    for name in _nested_order(seconds):
        spent, depth = seconds[name], name.count("/")
        share = sum(spent) / whole
        colour = colours[name.partition("/")[0]]
        bar = "" if depth else f'<div class="bar" style="width:{min(share, 1):.2%};background:var(--c{colour})"></div>'
        label = f'<span style="padding-left:{18 * depth}px">{safe(name.rpartition("/")[2])}</span>'
        figures = (duration(sum(spent)), f"{share:.0%}", str(len(spent)), duration(statistics.median(spent)))
        cells = [cell(label), *(cell(figure, "n") for figure in figures), cell(bar, "share")]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    numeric = ("total", "share", "times", "median")
    return table(rows, ("phase", *numeric, ""), numeric)


def _nested_order(seconds: dict[str, list[float]]) -> list[str]:
    """Outer phases by their total, each followed by those within it."""
    outer: dict[str, float] = defaultdict(float)
    for name, spent in seconds.items():
        outer[name.partition("/")[0]] += 0.0 if "/" in name else sum(spent)
    return sorted(seconds, key=lambda name: (-outer[name.partition("/")[0]], name.split("/")))


def _by_step(run: Run, colours: dict[str, int]) -> str:
    steps = [step for step, metrics in run.steps.items() if metrics.get("time/step") is not None]
    if not steps:
        return ""

    def column(name: str) -> list[float]:
        return [run.steps[step].get(f"time/{name}") or 0.0 for step in steps]

    parts: list[tuple[str, Sequence[float]]] = [(name, column(name)) for name in colours]
    spent = [sum(values) for values in zip(*(values for _, values in parts), strict=True)]
    rest = [max(whole - known, 0.0) for whole, known in zip(column("step"), spent, strict=True)]
    # Colours are shared by the table, the bars and the lanes; the last one is for what no phase covers.
    drawn: list[tuple[str, Sequence[float], int]] = [
        (name, values, colours[name]) for name, values in parts if any(values)
    ]
    drawn.append(("between phases", rest, 7))
    named = legend((name, colour, "box") for name, _, colour in drawn)
    return card(f"{named}{broad(stacked_bars(steps, drawn))}", "Seconds of each step")
