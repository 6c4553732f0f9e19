"""The timeline picture: phases of the last steps in time, one lane a process, waiting hatched."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from yatt_jax.report.charts import BOTTOM, COLOURS, Scale, x_axis
from yatt_jax.report.read import Phase, Place, Run
from yatt_jax.report.text import counted, duration, listed, one_line, safe
from yatt_jax.report.waits import Waits, clocks, during, is_wait, stretches

STEPS = 4
LANES = 16  # more are not readable
SKEW_S = 0.1  # clocks that differ by less are as good as equal
_RIGHT, _TOP, _ROW = 12, 26, 36
_BAR, _STRIPE, _HATCH = 16, 4, 3.0


@dataclasses.dataclass(frozen=True)
class Lane:
    """One process.

    Attributes:
      label: "process 3".
      detail: a second line, "host · 4 devices".
      phases: moved to the first process's clock.
    """

    process: int
    label: str
    detail: str
    phases: Sequence[Phase]


@dataclasses.dataclass(frozen=True)
class View:
    """The lanes of the last steps, and what a reader has to know of them."""

    lanes: Sequence[Lane]
    steps: Sequence[int]
    notes: Sequence[str]

    @property
    def title(self) -> str:
        """Which steps."""
        return f"Timeline of {listed('step', self.steps)}"

    def outer(self) -> list[str]:
        """Names of the outer phases in it."""
        names = (phase.name.partition("/")[0] for lane in self.lanes for phase in lane.phases)
        return [name for name in dict.fromkeys(names) if name != "wait"]

    def waiting(self) -> bool:
        """Whether anything in it is hatched."""
        return any(is_wait(phase.name) for lane in self.lanes for phase in lane.phases)


def view(run: Run, waits: Waits | None) -> View | None:
    """The lanes of a run's last steps, by one clock; None without a phase."""
    steps = sorted({phase.step for phase in run.phases})[-STEPS:]
    if not steps:
        return None
    ahead = clocks(run.phases, steps)
    recent = [phase for phase in run.phases if phase.step in steps]
    shares = {one.process: one.share for one in waits.each} if waits else {}
    marks = choose({phase.process: shares.get(phase.process, 0.0) for phase in recent})
    shown = [
        dataclasses.replace(phase, start=phase.start - ahead[phase.process], end=phase.end - ahead[phase.process])
        for phase in recent
        if phase.process in marks
    ]
    since = stretches(shown)[-1][0]  # what came before a stop is another picture
    of_process: dict[int, list[Phase]] = defaultdict(list)
    for phase in shown:
        if phase.start >= since:
            of_process[phase.process].append(phase)
    lanes = [
        Lane(process, _label(process, marks), place_of(run.places.get(process)), phases)
        for process, phases in sorted(of_process.items())
    ]
    steps = sorted({phase.step for lane in lanes for phase in lane.phases})
    notes = [chosen_note(len({phase.process for phase in recent}), marks), _clock_note(ahead)]
    return View(lanes, steps, [note for note in notes if note])


def choose(shares: Mapping[int, float], limit: int = LANES) -> dict[int, str]:
    """Which processes to show, and what marks them: all, or the slowest, the fastest and some of the others.

    Who waits least is the slowest, because the others wait for it.

    Args:
      shares: of its time that each process waited.
      limit: how many to show.
    """
    if len(shares) <= limit:
        return dict.fromkeys(sorted(shares), "")
    ranked = sorted(shares, key=lambda process: (shares[process], process))
    part = limit // 4
    slow, fast = ranked[:part], ranked[-part:]
    rest = sorted(ranked[part:-part])
    evenly = [rest[i] for i in np.linspace(0, len(rest) - 1, limit - 2 * part).round().astype(int)]
    marked = dict.fromkeys(slow, "slow") | dict.fromkeys(fast, "fast") | dict.fromkeys(evenly, "")
    return dict(sorted(marked.items()))


def place_of(place: Place | None) -> str:
    """Host and devices of a process, as far as it said them."""
    if place is None:
        return ""
    parts = [one_line(place.host, 24), counted(len(place.devices), "device") if place.devices else ""]
    return " · ".join(part for part in parts if part)


def _label(process: int, marks: Mapping[int, str]) -> str:
    mark = marks.get(process)
    return f"process {process}" + (f", {mark}" if mark else "")


def chosen_note(processes: int, marks: Mapping[int, str]) -> str:
    """Says which of all processes ``choose`` took; nothing where it took them all."""
    if len(marks) == processes:
        return ""
    slow, fast = (sum(mark == kind for mark in marks.values()) for kind in ("slow", "fast"))
    return (
        f"{len(marks)} of {processes} processes: the {slow} that waited least (slow: the others wait for them), "
        f"the {fast} that waited most (fast), and {len(marks) - slow - fast} spread evenly over the rest."
    )


def _clock_note(ahead: Mapping[int, float]) -> str:
    skewed = {process: abs(seconds) for process, seconds in ahead.items() if abs(seconds) >= SKEW_S}
    if not skewed:
        return ""
    worst = max(skewed, key=lambda process: skewed[process])
    return (
        f"Clocks differ from that of process {min(ahead)}: those of {listed('process', skewed)}, most by "
        f"{duration(skewed[worst])} (process {worst}). The lanes are moved by as much, so that waits which ended "
        "together end together here; durations are each process's own."
    )


def lanes(shown: View, colours: Mapping[str, int], width: int = 960) -> str:
    """The lanes as a chart of the page.

    Args:
      shown: at least one lane.
      colours: colour of each outer phase.
      width: in pixels at the natural size.
    """
    marks, height = draw(shown, colours, width)
    return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="timeline">{marks}</svg>'


def draw(shown: View, colours: Mapping[str, int], width: int) -> tuple[str, int]:
    """The inside of the chart, and its height.

    A phase is a bar; phases within it are the thin stripes below, but for waiting, which is hatched into the bar.
    """
    phases = [phase for lane in shown.lanes for phase in lane.phases]
    start, end = min(phase.start for phase in phases), max(phase.end for phase in phases)
    text = max(max(len(lane.label), len(lane.detail)) for lane in shown.lanes)
    left = max(74, 20 + round(5.8 * text))
    height = _TOP + _ROW * len(shown.lanes) + BOTTOM
    x = Scale(0.0, (end - start) or 1.0, left, width - _RIGHT)
    out = [x_axis(x, height, " s"), _step_marks(shown.lanes[0], x, start, height)]
    for row, lane in enumerate(shown.lanes):
        top = _TOP + _ROW * row
        out.append(_name(lane, left, top))
        open_end = {id(phase): end for phase in _still_open(lane.phases)}
        bars, hatches = [], []
        for phase in lane.phases:
            depth = phase.name.count("/")
            span = x(phase.start - start), x(open_end.get(id(phase), phase.end) - start)
            if is_wait(phase.name):
                hatches.append(_hatch(phase, span, top))
            elif depth <= 2 and (depth == 0 or span[1] - span[0] >= 0.2):
                bars.append(_bar(phase, span, top, depth, colours))
        out += bars + hatches
    return "".join(out), height


def _still_open(phases: Sequence[Phase]) -> list[Phase]:
    """Phases that the process was in when it last wrote: as far as is known, it still is."""
    latest = max(phase.end for phase in phases)
    return [phase for phase in phases if phase.state == "open" and phase.end == latest]


def _name(lane: Lane, left: int, top: int) -> str:
    lines = [(lane.label, 7 if lane.detail else 13), *([(lane.detail, 19)] if lane.detail else [])]
    return "".join(
        f'<text class="tick{" fine" if i else ""}" x="{left - 8}" y="{top + down}" dy=".32em" '
        f'text-anchor="end">{safe(text)}</text>'
        for i, (text, down) in enumerate(lines)
    )


def _step_marks(lane: Lane, x: Scale, start: float, height: int) -> str:
    begins: dict[int, float] = {}
    for phase in lane.phases:
        begins.setdefault(phase.step, phase.start)
    out, free = [], 0.0
    for step, moment in sorted(begins.items()):
        place, label = x(moment - start), f"step {step}"
        out.append(f'<line class="rung" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP - 8}" y2="{height - BOTTOM}"/>')
        if place >= free:
            out.append(f'<text class="tick" x="{place:.1f}" y="{_TOP - 12}">{label}</text>')
            free = place + 8 * len(label)
    return "".join(out)


def _bar(phase: Phase, span: tuple[float, float], top: int, depth: int, colours: Mapping[str, int]) -> str:
    colour = colours.get(phase.name.partition("/")[0], COLOURS - 1)
    place = top + (5, _BAR + 6, _BAR + 6 + _STRIPE + 1)[depth]
    note = f"process {phase.process}, step {phase.step}: {phase.name} {duration(phase.end - phase.start)}"
    note += {"error": ", ended by an error", "open": ", never ended"}.get(phase.state, "")
    return (
        f'<rect class="depth{depth} {phase.state}" x="{span[0]:.2f}" y="{place}" width="{_width(span):.2f}" '
        f'height="{_STRIPE if depth else _BAR}" style="fill:var(--c{colour})"><title>{safe(note)}</title></rect>'
    )


def _hatch(phase: Phase, span: tuple[float, float], top: int) -> str:
    """A pale bar of dashes: a dashed line as thick as the bar is a hatching that needs no definitions."""
    middle = top + 5 + _BAR / 2
    end = {"open": ", never ended", "error": ", in vain"}.get(phase.state, "")
    note = (
        f"process {phase.process}, step {phase.step}: waited for the others, {during(phase.name)}, "
        f"{duration(phase.end - phase.start)}{end}"
    )
    wide = span[1] - span[0]
    return (
        f'<g class="wait {phase.state}"><title>{safe(note)}</title>'
        f'<rect x="{span[0]:.2f}" y="{top + 5}" width="{wide:.2f}" height="{_BAR}"/>'
        + (
            f'<line x1="{span[0]:.2f}" x2="{span[1]:.2f}" y1="{middle}" y2="{middle}" stroke-width="{_BAR}"/>'
            if wide >= _HATCH
            else ""
        )
        + "</g>"
    )


def _width(span: tuple[float, float]) -> float:
    return max(span[1] - span[0], 0.6)
