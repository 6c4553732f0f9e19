"""The headline curve and the timeline as pictures of their own, for a README."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from yatt_jax.report.charts import COLOURS, Line, plot
from yatt_jax.report.lanes import draw, view
from yatt_jax.report.panels import headline_legend, headline_lines
from yatt_jax.report.read import Run
from yatt_jax.report.rundir import RunDirError
from yatt_jax.report.style import PICTURE_CSS
from yatt_jax.report.text import safe
from yatt_jax.report.times import phase_colours, waiting_summary
from yatt_jax.report.waits import measure

_WIDTH, _HEIGHT, _HEAD = 760, 300, 62
_EDGE, _LETTERS = 8, 128  # beside the lanes, and in a line of text below them


def picture(runs: Sequence[Run], title: str) -> str:
    """An SVG file of reward (or loss) by step; it needs nothing else and follows the viewer's light or dark theme.

    Args:
      runs: at least one.
      title: above the curve.

    Raises:
      RunDirError: no run has logged a reward or a loss.
    """
    lines = headline_lines(runs)
    drawn = plot(lines, _WIDTH, _HEIGHT)
    if drawn is None:
        raise RunDirError(
            f"{', '.join(run.name for run in runs)}: no reward or loss in metrics.jsonl, so there is no curve to draw"
        )
    return _curve(drawn[0], headline_legend(lines, runs), title)


def curves(lines: Sequence[Line], title: str) -> str:
    """An SVG file of lines by step, as ``picture`` draws its own.

    Args:
      lines: at least one with a number.
      title: above them; says what they measure.

    Raises:
      ValueError: no line has a number.
    """
    drawn = plot(lines, _WIDTH, _HEIGHT)
    if drawn is None:
        raise ValueError(f"{title}: no line has a number, so there is nothing to draw")
    return _curve(drawn[0], [(line.label, line.colour, line.style) for line in lines], title)


def _curve(marks: str, named: Sequence[tuple[str, int, str]], title: str) -> str:
    left, labels = 46, []
    for label, colour, style in named:
        ink = f"var(--c{colour % COLOURS})"
        labels.append(f'<line class="line {style}" style="stroke:{ink}" x1="{left}" x2="{left + 18}" y1="46" y2="46"/>')
        labels.append(f'<text class="tick" x="{left + 24}" y="50">{safe(label)}</text>')
        left += 44 + round(6.2 * len(label))
    return _framed(title, f'{"".join(labels)}<g transform="translate(0,{_HEAD})">{marks}</g>', _HEIGHT + _HEAD + 4)


def timeline_picture(run: Run) -> str:
    """An SVG file of the last steps' timeline, as on the page, with how much the devices waited below.

    Raises:
      RunDirError: the run has written no timeline.
    """
    waits = measure(run) if len(run.processes) > 1 else None
    shown = view(run, waits)
    if shown is None:
        raise RunDirError(f"{run.name}: no phase in timeline.jsonl, so there is no timeline to draw")
    colours = phase_colours(run)
    marks, tall = draw(shown, colours, _WIDTH - 2 * _EDGE)
    left, labels = 20, []
    for name in shown.outer():
        labels.append(f'<rect x="{left}" y="41" width="11" height="11" rx="2" style="fill:var(--c{colours[name]})"/>')
        labels.append(f'<text class="tick" x="{left + 17}" y="50">{safe(name)}</text>')
        left += 34 + round(6.2 * len(name))
    if shown.waiting():
        labels.append(f'<g class="wait"><line x1="{left}" x2="{left + 15}" y1="46.5" y2="46.5" stroke-width="11"/></g>')
        labels.append(f'<text class="tick" x="{left + 21}" y="50">waiting for the others</text>')
    foot = [waiting_summary(waits)] if waits and shown.waiting() else []
    foot += shown.notes
    lines = [line for text in foot for line in textwrap.wrap(text, _LETTERS)]
    below = [
        f'<text class="tick" x="20" y="{_HEAD + tall + 16 + 15 * i}">{safe(line)}</text>'
        for i, line in enumerate(lines)
    ]
    body = f'{"".join(labels)}<g transform="translate({_EDGE},{_HEAD})">{marks}</g>{"".join(below)}'
    return _framed(shown.title, body, _HEAD + tall + 12 + 15 * len(lines))


def _framed(title: str, body: str, height: int) -> str:
    """A file of its own: a card with a heading, and the rules that its marks are drawn by."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{safe(title)}"><style>{PICTURE_CSS}</style>'
        f'<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="10" '
        f'style="fill:var(--card);stroke:var(--rule)"/>'
        f'<text x="20" y="28" style="fill:var(--ink);font-size:15px;font-weight:600">{safe(title)}</text>'
        f"{body}</svg>\n"
    )
