"""The headline curve as a picture of its own, for a README."""

from __future__ import annotations

from collections.abc import Sequence

from yatt_jax.report.charts import COLOURS, plot
from yatt_jax.report.panels import reward_legend, reward_lines
from yatt_jax.report.read import Run
from yatt_jax.report.rundir import RunDirError
from yatt_jax.report.style import PICTURE_CSS
from yatt_jax.report.text import safe

_WIDTH, _HEIGHT, _HEAD = 760, 300, 62


def picture(runs: Sequence[Run], title: str) -> str:
    """An SVG file of reward by step; it needs nothing but itself and follows the viewer's light or dark theme.

    Args:
      runs: at least one.
      title: above the curve.

    Raises:
      RunDirError: no run has logged a reward.
    """
    lines = reward_lines(runs)
    drawn = plot(lines, _WIDTH, _HEIGHT)
    if drawn is None:
        raise RunDirError(
            f"{', '.join(run.name for run in runs)}: no reward in metrics.jsonl, so there is no curve to draw"
        )
    labels, left = [], 46
    for label, colour, style in reward_legend(lines, runs):
        ink = f"var(--c{colour % COLOURS})"
        labels.append(f'<line class="line {style}" style="stroke:{ink}" x1="{left}" x2="{left + 18}" y1="46" y2="46"/>')
        labels.append(f'<text class="tick" x="{left + 24}" y="50">{safe(label)}</text>')
        left += 44 + round(6.2 * len(label))
    height = _HEIGHT + _HEAD + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{safe(title)}"><style>{PICTURE_CSS}</style>'
        f'<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="10" '
        f'style="fill:var(--card);stroke:var(--rule)"/>'
        f'<text x="20" y="28" style="fill:var(--ink);font-size:15px;font-weight:600">{safe(title)}</text>'
        f'{"".join(labels)}<g transform="translate(0,{_HEAD})">{drawn[0]}</g>'
        "</svg>\n"
    )
