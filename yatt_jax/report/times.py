"""Where the time went: by phase, by step, process beside process, and waiting for one another."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from yatt_jax.report.charts import stacked_bars
from yatt_jax.report.lanes import View, choose, chosen_note, lanes, place_of, view
from yatt_jax.report.markup import broad, card, cell, legend, note, table
from yatt_jax.report.read import Run
from yatt_jax.report.text import duration, safe
from yatt_jax.report.waits import BETWEEN, Waited, Waits, measure, seconds_at_work

_WAITED_FROM = 0.005  # a smaller share is none worth a word
_COUNTED = "Counted where processes agree on how to go on; what devices wait inside collectives is part of the phases."


def wall_seconds(run: Run) -> float | None:
    """Seconds the run has been at work, by its first process; pauses between a stop and a resume do not count."""
    first = min(run.processes, default=0)
    return seconds_at_work(p for p in run.phases if p.process == first) or sum(run.values("time/step")) or None


def time_section(run: Run) -> str:
    """Totals by phase, seconds of each step, the timeline of the last steps, and who waited for whom."""
    parts = [note(text) for text in run.notes]
    colours = phase_colours(run)
    if not colours:
        return "".join(parts)
    several = len(run.processes) > 1
    if several:
        parts.append(note(f"Totals and seconds of each step are those of process {run.processes[0]}."))
    parts += [_totals(run, colours), _by_step(run, colours)]
    waits = measure(run) if several else None
    if shown := view(run, waits):
        parts.append(_timeline(shown, colours))
    if waits:
        parts.append(_waiting(run, waits, colours))
    return "".join(parts)


def phase_colours(run: Run) -> dict[str, int]:
    """The colour of each outer phase, the same in every table and chart."""
    names = [phase.name for phase in run.phases]
    if not names:  # the metrics know them too, and beside them sums over several phases, such as time/repartition
        timed = [name.removeprefix("time/") for name in run.names() if name.startswith("time/")]
        nested = {name.rpartition("/")[2] for name in timed if "/" in name}
        names = [name for name in timed if "/" in name or name not in nested | {"step"}]
    outer = dict.fromkeys(name.partition("/")[0] for name in names)
    return {name: min(i, 6) for i, name in enumerate(name for name in outer if name != "wait")}


def waiting_summary(waits: Waits) -> str:
    """How much devices waited, and for whom."""
    text = f"Devices waited {waits.share:.1%} of their time for other processes."
    worst = waits.slowest()
    if worst is None or waits.share < _WAITED_FROM:
        return text
    one, part = worst
    return (
        f"{text} They waited most for process {one.process}: {duration(one.held_up)} each on average, {part:.0%} of "
        "the waiting for whoever came last."
    )


def _timeline(shown: View, colours: Mapping[str, int]) -> str:
    waiting = '<span><i class="wait"></i>waiting for the others</span>' if shown.waiting() else ""
    named = legend(((name, colours[name], "box") for name in shown.outer()), waiting)
    notes = "".join(note(text) for text in shown.notes)
    return card(f"{named}{broad(lanes(shown, colours))}{notes}", shown.title)


def _waiting(run: Run, waits: Waits, colours: Mapping[str, int]) -> str:
    """The share of time that each process's devices waited."""
    if not any(one.phases for one in waits.each):
        return note("No process wrote down that it waited for another.")
    marks = choose({one.process: one.share for one in waits.each})
    worst = waits.slowest()
    rows = []
    for one in waits.each:
        if one.process in marks:
            slowest = worst is not None and worst[0] is one
            label = f"process {one.process}" + (f", {marks[one.process]}" if marks[one.process] else "")
            where = place_of(run.places.get(one.process))
            kind = ' class="worst"' if slowest else ""
            rows.append(f"<tr{kind}>{cell(label, 'who')}{cell(safe(where), 'fact')}{_figures(one, colours)}</tr>")
    mean = Waited(-1, 1, waits.work, waits.phases, statistics.fmean(one.held_up for one in waits.each))
    devices = sum(one.devices for one in waits.each)
    label = f"mean of {devices:,} devices" if run.places else "mean of processes"
    rows.append(f'<tr class="sum">{cell(label, "who")}{cell("")}{_figures(mean, colours)}</tr>')
    numeric = ("waited", "share", "others waited for it")
    made = table(rows, ("", "", "waited", "share", "", "most in", "others waited for it"), numeric)
    span = f"Steps {waits.first} to {waits.last}. {waiting_summary(waits)} {_COUNTED}"
    return f"<h3 class=apart>Share of time waited</h3>{note(span)}{made}{note(chosen_note(len(waits.each), marks))}"


def _figures(one: Waited, colours: Mapping[str, int]) -> str:
    parts, most = [], "-"
    if one.total:
        name = max(one.phases, key=lambda phase: one.phases[phase])
        most = f"{safe(name)}, {one.phases[name] / one.total:.0%}"
    for name, seconds in one.phases.items():
        if seconds and one.work:
            colour = 7 if name == BETWEEN else colours.get(name, 7)
            parts.append(
                f'<i style="width:{min(seconds / one.work, 1):.2%};background:var(--c{colour})" '
                f'title="{safe(name)}: {duration(seconds)}"></i>'
            )
    return "".join(
        (
            cell(duration(one.total), "n"),
            cell(f"{one.share:.1%}", "n"),
            cell(f'<div class="stack">{"".join(parts)}</div>', "share"),
            cell(most, "fact"),
            cell(duration(one.held_up), "n"),
        )
    )


def _totals(run: Run, colours: Mapping[str, int]) -> str:
    seconds: dict[str, list[float]] = defaultdict(list)
    first = min(run.processes, default=0)
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
        colour = colours.get(name.partition("/")[0], 7)
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


def _by_step(run: Run, colours: Mapping[str, int]) -> str:
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
    drawn.append((BETWEEN, rest, 7))
    named = legend((name, colour, "box") for name, _, colour in drawn)
    return card(f"{named}{broad(stacked_bars(steps, drawn))}", "Seconds of each step")
