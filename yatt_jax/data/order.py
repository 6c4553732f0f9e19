"""The order of training rows: held-out rows taken out, shuffled anew in each epoch, repeated, mixed by weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from yatt_jax.data.config import DataError
from yatt_jax.data.records import Record, Table

Row = tuple[int, Record | DataError]


class Rows:
    """A table as a data source for grain: each row with its number in the data set, held-out rows left out."""

    def __init__(self, table: Table, held_out: np.ndarray | None = None, start: int = 0) -> None:
        held = np.zeros(0, np.int64) if held_out is None else held_out
        self._table, self._start = table, start
        self._length = len(table) - len(held)
        self._shifts = held - np.arange(len(held))  # rows kept before each row held out

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        row = int(index) + int(np.searchsorted(self._shifts, int(index), side="right"))
        return read_row(self._table, row, self._start + row)


def read_row(table: Table, row: int, index: int) -> Row:
    """A row of a table under its number in the data set, or why it cannot be read."""
    try:
        return index, table[row]
    except DataError as error:
        return index, error


def hold_out(lengths: Sequence[int], count: int) -> list[np.ndarray]:
    """Rows of each table that are held out, ascending: ``count`` of all, the same ones whatever the run's seed."""
    total = sum(lengths)
    if count >= total:
        raise DataError(f"data.holdout = {count} leaves nothing of the {total} rows in data.train")
    rows = np.sort(np.random.default_rng(0).choice(total, count, replace=False))
    starts = np.cumsum([0, *lengths])
    split = [rows[(rows >= low) & (rows < high)] - low for low, high in itertools.pairwise(starts)]
    for i, (held, length) in enumerate(zip(split, lengths, strict=True)):
        if len(held) == length:
            raise DataError(f"data.holdout = {count} takes all {length} rows of data.train[{i}]")
    return split


def endless_order(sources: Sequence[Rows], weights: Sequence[float], shuffle: bool, seed: int) -> Any:
    """The endless list of rows, a grain data set with random access.

    Args:
      sources: one or more.
      weights: of each source.
      shuffle: whether each epoch of a source is put in a random order of its own.
      seed: of the orders.
    """
    import grain

    # Epoch e is shuffled by seed + e, so the seeds of sources and runs are spread far apart.
    seeds = [int(np.random.SeedSequence([seed, i]).generate_state(1)[0]) for i in range(len(sources))]
    endless = []
    for source, source_seed in zip(sources, seeds, strict=True):
        rows = grain.MapDataset.source(source)
        endless.append((rows.shuffle(seed=source_seed) if shuffle else rows).repeat())
    return endless[0] if len(endless) == 1 else grain.MapDataset.mix(endless, weights)
