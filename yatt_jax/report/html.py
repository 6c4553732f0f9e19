"""report.html: one page that needs nothing but itself, made from the files of one or more run directories."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from yatt_jax.report import panels
from yatt_jax.report.charts import COLOURS
from yatt_jax.report.completions import before_and_after, sample_table
from yatt_jax.report.markup import card, cell, fold, table
from yatt_jax.report.read import Run, read_run
from yatt_jax.report.rundir import RunDir, replace_text
from yatt_jax.report.style import CSS, SCRIPT
from yatt_jax.report.text import KL, LENGTH, counted, duration, find, listed, number, safe
from yatt_jax.report.times import time_section, wall_seconds

HOSTS_SHOWN = 16

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:; media-src data:">"""


def write(run: RunDir) -> Path:
    """Makes report.html in a run directory, from its files (process 0; the others do nothing).

    Returns:
      The page.

    Raises:
      RunDirError: it cannot be written.
    """
    if run.is_main:
        replace_text(run.report_file, page([read_run(run.path)]))
    return run.report_file


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several with their curves overlaid.

    Args:
      runs: at least one.
    """
    title = ", ".join(run.name for run in runs)
    body = [_title(runs, title), _headline(runs)]
    if any(line.points for line in panels.headline_lines(runs)):
        body.append(f"<h2>{panels.judged_by(runs[0]).what.capitalize()}</h2>{card(panels.headline_chart(runs))}")
    body.append(_per_run(runs, "Before and after", before_and_after))
    if charts := panels.curves(runs):
        body.append(f"<h2>Curves</h2>{charts}")
    body.append(_per_run(runs, "Time", time_section))
    body.append(_per_run(runs, "Samples", sample_table))
    if charts := panels.remaining(runs):
        body.append(fold("All other metrics", charts))
    body.append(_per_run(runs, "Run", _facts))
    return (
        f"{_HEAD}<title>{safe(title)}</title><style>{CSS}</style></head>\n"
        f"<body><main>{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _per_run(runs: Sequence[Run], heading: str, section: Callable[[Run], str]) -> str:
    made = [(run.name, section(run)) for run in runs]
    made = [(name, content) for name, content in made if content]
    if not made:
        return ""
    if len(runs) == 1:
        return f"<h2>{heading}</h2>{made[0][1]}"
    folded = [fold(name, content, opened=i == 0) for i, (name, content) in enumerate(made)]
    return f"<h2>{heading}</h2>{''.join(folded)}"


def _title(runs: Sequence[Run], title: str) -> str:
    heading = f"<h1>{safe(title)}</h1>"
    if len(runs) == 1:
        return heading + _origin(runs[0])
    return heading + fold("Commands", "".join(_origin(run) for run in runs))


def _origin(run: Run) -> str:
    """What was run, when, and the command that ran it."""
    started = str(run.facts.get("started", "")).replace("T", " ")
    said = [safe(part) for part in (_what(run), f"started {started}" if started else "") if part]
    out = f'<p class="soft">{" · ".join(said)}</p>' if said else ""
    if command := run.facts.get("command"):
        out += f'<code class="command">{safe(command)}</code>'
    return out


def _what(run: Run) -> str:
    """The algorithm, the model and the devices, as far as they are known."""
    devices, model = run.facts.get("devices"), run.config.get("model")
    parts = [str(run.config.get("algo", "")).rpartition(".")[2].upper()]
    if isinstance(model, dict):
        parts.append(Path(str(model.get("path") or "model from scratch")).name)
    if isinstance(devices, dict):
        parts.append(f"{devices.get('count', '?')} x {devices.get('kind', 'device')}")
    return " · ".join(part for part in parts if part)


def headline_change(run: Run) -> tuple[str, float, float] | None:
    """What the reward (or loss) was and what it became: (which, start, end).

    The held-out one is the first and the last evaluation. Without it, it is that of training, the mean of the first and
    of the last tenth of the steps.
    """
    headline = panels.judged_by(run)
    held_out = run.values(headline.held_out)
    if len(held_out) > 1:
        return f"held-out {headline.what}", held_out[0], held_out[-1]
    training = run.values(headline.training)
    if not training:
        return None
    part = max(1, len(training) // 10)
    return f"training {headline.what}", sum(training[:part]) / part, sum(training[-part:]) / part


def _headline(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        tiles = _tiles(runs[0])
        return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""
    rows = []
    for i, run in enumerate(runs):
        change = headline_change(run)
        of, *figures = [change[0], *map(number, change[1:]), _change(run, *change[1:])] if change else ["-"] * 4
        kl = _kl(run)
        figures += [number(kl[-1]) if kl else "-", str(max(run.steps, default=0)), duration(wall_seconds(run))]
        name = f'<i class="key" style="background:var(--c{i % COLOURS})"></i>{safe(run.name)}'
        rows.append(f"<tr>{cell(name)}{cell(of, 'soft')}{''.join(cell(figure, 'n') for figure in figures)}</tr>")
    numeric = ("start", "end", "change", "KL", "steps", "duration")
    return table(rows, ("run", "", *numeric), numeric)


def _tiles(run: Run) -> list[str]:
    tiles = []
    if change := headline_change(run):
        what, start, end = change
        figure = f'{number(start)}<span class="arrow">→</span>{number(end)} {_change(run, start, end)}'
        tiles.append(_tile(what.capitalize(), figure, "wide"))
    if kl := _kl(run):
        tiles.append(_tile("KL to the reference", number(kl[-1])))
    if run.steps:
        planned = run.config.get("steps")
        done = max(run.steps)
        tiles.append(_tile("Steps", f"{done:,}" if planned in (None, done) else f"{done:,} of {planned:,}"))
    if seconds := wall_seconds(run):
        tiles.append(_tile("Duration", duration(seconds)))
    length = find(run.names(), LENGTH)
    if length and (lengths := run.values(length)):
        tiles.append(_tile("Response length", f'{lengths[0]:,.0f}<span class="arrow">→</span>{lengths[-1]:,.0f}'))
    return tiles


def _tile(what: str, figure: str, extra: str = "") -> str:
    return card(f'<div class="what">{safe(what)}</div><div class="figure">{figure}</div>', kind=f"tile {extra}")


def _change(run: Run, start: float, end: float) -> str:
    difference = end - start
    sign = "+" if difference >= 0 else ""
    better = difference >= 0 if panels.judged_by(run).higher else difference <= 0
    return f'<span class="{"up" if better else "down"}">{sign}{number(difference)}</span>'


def _kl(run: Run) -> list[float]:
    name = find(run.names(), KL)
    return run.values(name) if name else []


def _facts(run: Run) -> str:
    rows = []
    hosts = [("hosts", _hosts(run))] if run.places else []
    for name, value in [*run.facts.items(), *hosts, ("folder", str(run.path))]:
        text = f'<span class="text">{safe(_said(value))}</span>'
        rows.append(f"<tr>{cell(safe(name), 'fact')}{cell(text)}</tr>")
    if not run.config:
        return table(rows)
    config = safe(json.dumps(run.config, indent=2, ensure_ascii=False))
    return table(rows) + fold("Config", f'<pre class="card">{config}</pre>')


def _said(value: object) -> str:
    """A fact as text: "count 8, per process 4"."""
    if isinstance(value, dict):
        return ", ".join(f"{str(k).replace('_', ' ')} {_said(v)}" for k, v in value.items())
    if isinstance(value, list):
        return " + ".join(f"{n} x {v}" if n > 1 else v for v, n in Counter(map(str, value)).items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _hosts(run: Run) -> str:
    """Which processes ran on which machine."""
    of_host: dict[str, list[int]] = defaultdict(list)
    for process, place in run.places.items():
        of_host[place.host or "unknown"].append(process)
    devices = sum(len(place.devices) for place in run.places.values())
    each = [
        f"{host} ({listed('process', processes)})" for host, processes in sorted(of_host.items(), key=lambda e: e[1])
    ]
    more = f", and {len(each) - HOSTS_SHOWN} more" if len(each) > HOSTS_SHOWN else ""
    return f"{counted(len(of_host), 'host')}, {counted(devices, 'device')}: {', '.join(each[:HOSTS_SHOWN])}{more}"
