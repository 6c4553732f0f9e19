"""Charts as inline SVG. Colours are CSS variables (``--c0`` ...), so one drawing serves light and dark pages."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from yatt_jax.report.read import Points
from yatt_jax.report.text import duration, number, safe

COLOURS = 8
MAX_POINTS = 400  # a line's points after thinning: about two a pixel column
SMOOTHED_FROM = 40  # a line of more points than this is drawn faint, with its moving average on top
_LEFT, _RIGHT, _TOP = 46, 12, 10
BOTTOM = 26  # room for the axis


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
      label: for the legend.
      points: ascending in x; None breaks the line.
      colour: number of the colour.
      style: "solid"; "dots" for few points, each marked; "faint" for a line in the background.
      margin: half-width of the uncertainty at an x, drawn as a band.
      smoothed: whether a long solid line is drawn faint, with its moving average on top.
    """

    label: str
    points: Points
    colour: int
    style: Literal["solid", "dots", "faint"] = "solid"
    margin: Mapping[int, float | None] = dataclasses.field(default_factory=dict)
    smoothed: bool = True

    def edges(self) -> list[tuple[int, float, float]]:
        """The band as (x, low, high), where there is one."""
        known = [(x, y, self.margin.get(x)) for x, y in self.points if y is not None]
        return [(x, y - half, y + half) for x, y, half in known if half is not None]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(lines: Sequence[Line], width: int = 360, height: int = 190, label: str = "") -> str:
    """Lines over steps, with axes, and their values embedded for the page's tooltips.

    Args:
      lines: what to draw; without a single number the chart says so.
      width: of the drawing, in pixels at its natural size; it scales with the page.
      height: the same.
      label: for screen readers.
    """
    drawn = plot(lines, width, height)
    if drawn is None:
        return f'<div class="empty" style="aspect-ratio:{width}/{height}">no data</div>'
    marks, tips = drawn
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{safe(label)}" '
        f'data-tips="{safe(json.dumps(tips))}">{marks}</svg>'
    )


def plot(lines: Sequence[Line], width: int, height: int) -> tuple[str, dict[str, object]] | None:
    """The inside of a line chart, and what the page's tooltips read; None without a single number."""
    values = [y for line in lines for _, y in line.points if y is not None]
    values += [edge for line in lines for _, *both in line.edges() for edge in both]
    steps = [x for line in lines for x, y in line.points if y is not None]
    if not values:
        return None
    x = Scale(*_spread(min(steps), max(steps), 0.0), _LEFT, width - _RIGHT)
    y = Scale(*_spread(min(values), max(values), 0.06), height - BOTTOM, _TOP)
    marks = [_y_axis(y, width), x_axis(x, height)]
    tips = []
    for line in lines:
        points = thin(line.points)
        marks.append(_band(line, x, y))
        smooth = line.smoothed and line.style == "solid" and len(line.points) > SMOOTHED_FROM
        marks.append(_path(points, x, y, line.colour, "faint" if smooth else line.style))
        if smooth:
            marks.append(_path(thin(moving_average(line.points)), x, y, line.colour, "solid"))
        shown = [[px, number(py)] for px, py in points if py is not None]
        tips.append({"n": line.label, "c": line.colour % COLOURS, "p": shown})
    frame = {"x": [x.low, x.high, x.start, x.end], "w": width, "h": [_TOP, height - BOTTOM], "lines": tips}
    return "".join(marks), frame


def _band(line: Line, x: Scale, y: Scale) -> str:
    edges = line.edges()
    if len(edges) < 2:
        return ""
    corners = [(at, high) for at, _, high in edges] + [(at, low) for at, low, _ in reversed(edges)]
    outline = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in corners)
    return f'<polygon style="fill:var(--c{line.colour % COLOURS});opacity:.13" points="{outline}"/>'


def _path(points: Points, x: Scale, y: Scale, colour: int, style: str) -> str:
    runs: list[list[str]] = [[]]
    for px, py in points:
        if py is None:
            runs.append([])
        else:
            runs[-1].append(f"{x(px):.1f},{y(py):.1f}")
    ink = f"var(--c{colour % COLOURS})"
    out = [
        f'<polyline class="line {style}" style="stroke:{ink}" points="{" ".join(run)}"/>'
        for run in runs
        if len(run) > 1
    ]
    for run in runs:
        for point in run if style == "dots" else run if len(run) == 1 else ():
            cx, cy = point.split(",")
            out.append(f'<circle class="dot" style="fill:{ink}" cx="{cx}" cy="{cy}" r="2.6"/>')
    return "".join(out)


def _y_axis(y: Scale, width: int) -> str:
    ticks, digits = nice_ticks(y.low, y.high, max(3, round((y.start - y.end) / 42)))
    out = []
    for tick in ticks:
        place = f"{y(tick):.1f}"
        out.append(f'<line class="rung" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{place}" y2="{place}"/>')
        out.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{place}" dy=".32em" text-anchor="end">{_tick(tick, digits)}</text>'
        )
    return "".join(out)


def x_axis(x: Scale, height: int, unit: str = "") -> str:
    """The axis below a chart of a height, of steps or of another unit."""
    ticks, digits = nice_ticks(x.low, x.high, 6, whole=not unit)  # there is no step 2.5
    base = height - BOTTOM
    out = [f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{base}" y2="{base}"/>']
    for i, tick in enumerate(ticks):
        named = "" if i or unit else "step "
        place, shown = f"{x(tick):.1f}", f"{named}{_tick(tick, digits)}{unit}"
        out.append(f'<text class="tick" x="{place}" y="{base + 16}" text-anchor="middle">{shown}</text>')
    return "".join(out)


def _tick(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or digits > 5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.{digits}f}"


def nice_ticks(low: float, high: float, count: int, whole: bool = False) -> tuple[list[float], int]:
    """Round values across a range, and the decimals that tell them apart.

    Args:
      low: start of the range.
      high: its end, above ``low``.
      count: about how many.
      whole: only whole numbers.
    """
    rough = max((high - low) / count, 1.0) if whole else (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        (m * power for m in ((1.0, 2.0, 5.0) if whole else (1.0, 2.0, 2.5, 5.0)) if m * power >= rough), 10.0 * power
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if step / 10.0**-digits % 1 > 1e-6:  # 2.5 needs one decimal more than 2
        digits += 1
    return [i * step for i in range(first, last + 1)], digits


def _spread(low: float, high: float, margin: float) -> tuple[float, float]:
    """A range to draw, never empty."""
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    room = (high - low) * margin
    return low - room, high + room


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """Fewer points with the same look: of each stretch its lowest and highest, in their order; breaks are kept."""
    if len(points) <= limit:
        return points
    kept: Points = []
    size = len(points) / (limit // 2)
    for i in range(limit // 2):
        stretch = points[round(i * size) : round((i + 1) * size)]
        numbers = [(value, place) for place, (_, value) in enumerate(stretch) if value is not None]
        places = {min(numbers)[1], max(numbers)[1]} if numbers else {0}
        if i == 0 and numbers:
            places.add(numbers[0][1])
        if i == limit // 2 - 1 and numbers:
            places.add(numbers[-1][1])
        kept += [stretch[place] for place in sorted(places)]
    return kept


def moving_average(points: Points) -> Points:
    """An exponential moving average over about a twentieth of the points, unbiased at its start."""
    decay = 1 - 1 / max(len(points) / 20, 2)
    total = weight = 0.0
    smooth: Points = []
    for step, value in points:
        if value is None:
            continue
        total = decay * total + value
        weight = decay * weight + 1
        smooth.append((step, total / weight))
    return smooth


def stacked_bars(
    steps: Sequence[int], parts: Sequence[tuple[str, Sequence[float], int]], width: int = 960, height: int = 200
) -> str:
    """Seconds of each step, stacked by phase; of many steps, neighbours are averaged.

    Args:
      steps: ascending.
      parts: of each phase its name, its seconds at each step, and its colour.
      width: in pixels at the natural size.
      height: the same.
    """
    group = max(1, math.ceil(len(steps) / 150))
    starts = range(0, len(steps), group)
    means = [[sum(v[i : i + group]) / len(v[i : i + group]) for i in starts] for _, v, _ in parts]
    top = max((sum(column) for column in zip(*means, strict=True)), default=0.0) or 1.0
    y = Scale(0.0, top * 1.05, height - BOTTOM, _TOP)
    slot = (width - _LEFT - _RIGHT) / len(starts)
    bar = min(slot * 0.8, 48)
    out = [_y_axis(y, width)]
    for column, start in enumerate(starts):
        left, floor = _LEFT + slot * (column + 0.5) - bar / 2, 0.0
        until = steps[min(start + group, len(steps)) - 1]
        where = f"step {until}" if group == 1 else f"steps {steps[start]} to {until}"
        for (label, _, colour), mean in zip(parts, means, strict=True):
            seconds = mean[column]
            if seconds > 0:
                out.append(
                    f'<rect x="{left:.1f}" y="{y(floor + seconds):.2f}" width="{bar:.2f}" '
                    f'height="{y(floor) - y(floor + seconds):.2f}" style="fill:var(--c{colour % COLOURS})">'
                    f"<title>{where}: {safe(label)} {duration(seconds)}</title></rect>"
                )
            floor += seconds
        if column % max(1, math.ceil(len(starts) / 16)) == 0:
            middle = f"{left + bar / 2:.1f}"
            out.append(f'<text class="tick" x="{middle}" y="{height - 10}" text-anchor="middle">{steps[start]}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="seconds a step">{"".join(out)}</svg>'
    )
