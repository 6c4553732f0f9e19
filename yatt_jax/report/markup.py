"""The few shapes that the page is put together from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from yatt_jax.report.charts import COLOURS
from yatt_jax.report.text import safe


def card(content: str, heading: str = "", kind: str = "") -> str:
    """A framed block.

    Args:
      content: HTML.
      heading: plain text.
      kind: further classes.
    """
    title = f"<h3>{safe(heading)}</h3>" if heading else ""
    return f'<div class="card {kind}">{title}{content}</div>'


def table(rows: Iterable[str], heads: Sequence[str] = (), numeric: Iterable[str] = ()) -> str:
    """A table in a frame that scrolls sideways where it must.

    Args:
      rows: HTML of each.
      heads: plain text of the column heads.
      numeric: those of them whose columns are aligned to the right.
    """
    right = set(numeric)
    cells = "".join(f"<th{' class=n' if head in right else ''}>{safe(head)}</th>" for head in heads)
    head = f"<tr>{cells}</tr>" if heads else ""
    return card(f"<table>{head}{''.join(rows)}</table>", kind="wrap")


def cell(content: str, kind: str = "") -> str:
    """A table cell of HTML; kind "n" is a number."""
    return f'<td class="{kind}">{content}</td>' if kind else f"<td>{content}</td>"


def fold(summary: str, content: str, opened: bool = False) -> str:
    """A block that opens on a click."""
    return f"<details{' open' if opened else ''}><summary>{safe(summary)}</summary>{content}</details>"


def broad(chart: str) -> str:
    """A chart as wide as the page; on a narrow screen it scrolls, so that its text stays readable."""
    return f'<div class="broad">{chart}</div>'


def note(text: str) -> str:
    """A small line of plain text; nothing of nothing."""
    return f'<p class="soft small note">{safe(text)}</p>' if text else ""


def legend(entries: Iterable[tuple[str, int, str]], more: str = "") -> str:
    """Labels with the colour and the style ("box", or that of a line) of what they name; ``more`` is HTML."""
    items = [
        f'<span><i class="{style}" style="background:var(--c{colour % COLOURS})"></i>{safe(label)}</span>'
        for label, colour, style in entries
    ]
    return f'<div class="legend">{"".join(items)}{more}</div>'
