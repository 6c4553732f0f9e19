"""Responses to other prompts: each row of a data set gets the response of another, always the same one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from yatt_jax.data.documents import Encoder
from yatt_jax.data.encoded import Document, Encoded
from yatt_jax.data.order import Rows
from yatt_jax.data.records import Table

_SHARE = 0.382  # of the data set; rows about one prompt are mostly next to each other, or half of it apart
_TRIES = 32


class Pool:
    """Rows of a table, and where in them a record is.

    Args:
      table: the records.
      left_out: numbers of those that do not belong to the pool, ascending.
    """

    def __init__(self, table: Table, left_out: np.ndarray) -> None:
        self.rows = Rows(table, left_out)
        self._left_out = left_out
        self.records = len(table)

    def position(self, index: int) -> int:
        """The place in ``rows`` of the record with this number."""
        return index - int(np.searchsorted(self._left_out, index))


def rotate(rows: Sequence[Encoded], pool: Pool, encoder: Encoder, limit: int) -> list[Encoded]:
    """Rows with a second document: their prompt, and the response of a row some way further on in the pool.

    Rows with the same prompt, and those that cannot be used, are passed over; after 32 of them a response to the same
    prompt will do. A row for which there is no other at all is left out.

    Args:
      rows: with one document each.
      pool: what they were drawn from; two rows or more.
      encoder: reads the others.
      limit: tokens that the second document is cut to.
    """
    size = len(pool.rows)
    found: dict[int, Document] = {}
    spare: dict[int, Document] = {}
    for attempt in range(min(_TRIES, size)):
        wanted = [i for i in range(len(rows)) if i not in found]
        places = [(pool.position(rows[i].index) + max(1, round(_SHARE * size)) + attempt) % size for i in wanted]
        outcomes = encoder.read([pool.rows[place] for place in places]) if wanted else []
        for i, outcome in zip(wanted, outcomes, strict=True):
            if outcome.row is None or outcome.row.index == rows[i].index:
                continue
            (other,) = outcome.row.documents
            if np.array_equal(other.prompt, rows[i].documents[0].prompt):
                spare.setdefault(i, other)
            else:
                found[i] = other
    found = spare | found
    return [
        dataclasses.replace(row, documents=(row.documents[0], row.documents[0].answered_by(found[i]).cut(limit)))
        for i, row in enumerate(rows)
        if i in found
    ]
