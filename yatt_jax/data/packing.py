"""Several documents to a row."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Puts documents into as few rows as is easily found.

    The longest first, each into the first row that still has room for it (Johnson 1973: at most 11/9 of the fewest rows
    possible, and one more).

    Args:
      lengths: tokens of each document.
      limit: tokens of a row.

    Returns:
      For each row the numbers of its documents, ascending; each document is in one row.

    Raises:
      ValueError: a document longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > limit:
            raise ValueError(f"a document of {lengths[i]} tokens does not fit into a row of {limit}")
        row = next((r for r, left in enumerate(room) if left >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(limit)
        rows[row].append(i)
        room[row] -= lengths[i]
    return [sorted(row) for row in rows]
