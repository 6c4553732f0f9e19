"""Numbers and durations as people read them, and which metrics matter most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# What a line on the console has room for: (label, last part of the metric's name), most telling first.
HEADLINES: tuple[tuple[str, str], ...] = (
    ("reward", "reward"),
    ("kl", "kl"),
    ("entropy", "entropy"),
    ("clipped", "clip_fraction"),
    ("length", "length"),
)
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """About four significant digits; a dash for "no data"."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.4g}" if size >= 1 else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """Seconds as "0.42 s", "18.2 s", "3 min 20 s", "2 h 05 min"."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def headlines(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """The most telling metrics of a step as (label, value), held-out reward included where there is one."""
    found = []
    for label, last in HEADLINES:
        names = [name for name in metrics if name.rpartition("/")[2] == last and not name.startswith("eval/")]
        if names:
            found.append((label, metrics[names[0]]))
    if "eval/reward" in metrics:
        found.insert(1, ("held-out", metrics["eval/reward"]))
    return found


def sparkline(values: Sequence[float]) -> str:
    """A row of small bars, one a value, from the lowest to the highest."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def one_line(text: str, width: int) -> str:
    """Text on one line, cut to a width."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: max(width - 1, 0)] + "…"
