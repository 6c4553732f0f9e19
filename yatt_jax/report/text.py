"""Numbers and durations as people read them, and which metrics matter most."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence

# What a line on the console has room for, most telling first: a label, and the names a metric of that kind goes by
# (the part after its last slash), of which the first that is there counts.
KL = ("kl", "kl_k3", "kl_k1")
LENGTH = ("response_length", "length")
HEADLINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward",)),
    ("loss", ("loss",)),
    ("accuracy", ("accuracy",)),
    ("kl", KL),
    ("entropy", ("entropy", "entropy_sampled")),
    ("clipped", ("clip_fraction",)),
    ("length", LENGTH),
)
# Control characters, halves of surrogate pairs, and those that would turn the direction of the text around them.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
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
    """The most telling metrics of a step as (label, value); held-out reward, or loss, included where there is one.

    The loss of a run that has rewards says little, and is left out.
    """
    rewarded = find(metrics, ("reward",)) or "eval/reward" in metrics
    found = []
    for label, kinds in HEADLINES:
        name = None if label == "loss" and rewarded else find(metrics, kinds)
        if name:
            found.append((label, metrics[name]))
    held_out = "eval/reward" if rewarded else "eval/loss"
    if held_out in metrics:
        found.insert(min(len(found), 1), ("held-out", metrics[held_out]))
    return found


def find(names: Iterable[str], kinds: Sequence[str]) -> str | None:
    """The name of a training metric of one of these kinds, the first kind first; None if there is none.

    Args:
      names: metrics, as "rollout/kl_k3".
      kinds: what may follow the last slash.
    """
    training = [name for name in names if not name.startswith(("eval/", "time/"))]
    for kind in kinds:
        for name in training:
            if name.rpartition("/")[2] == kind:
                return name
    return None


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


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as "0 to 3, 5, 7 to 9"."""
    found: list[list[int]] = []
    for value in sorted(set(numbers)):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    parts = (
        str(low) if low == high else f"{low}, {high}" if high == low + 1 else f"{low} to {high}" for low, high in found
    )
    return ", ".join(parts)


def listed(what: str, numbers: Iterable[int]) -> str:
    """Things by their numbers: "process 3", "processes 0 to 3, 5"."""
    known = set(numbers)
    return f"{_plural(what, len(known))} {ranges(known)}"


def counted(count: int, what: str) -> str:
    """A number and its noun: "1 device", "1,024 devices"."""
    return f"{count:,} {_plural(what, count)}"


def _plural(what: str, count: int) -> str:
    return what if count == 1 else what + ("es" if what.endswith("s") else "s")


def safe(text: object) -> str:
    """Text as HTML, also within attributes: no markup, and no character that cannot be seen."""
    return html.escape(_HIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(text)))
