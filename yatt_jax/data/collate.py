"""Rows put together as arrays, padded on the right with zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from yatt_jax.data.attributes import MISSING
from yatt_jax.data.encoded import Document, Encoded
from yatt_jax.data.examples import Pair, Rated, Steps, Teacher, Unpaired
from yatt_jax.data.formats import Kind
from yatt_jax.rollout.assemble import padded_length
from yatt_jax.types import Inputs, LabelRows, MediaItem, PairRows, StepRows, TextRows, TopK, TopKRows, UnpairedRows

Rows: TypeAlias = TextRows | PairRows | UnpairedRows | LabelRows | StepRows | TopKRows


@dataclasses.dataclass(frozen=True)
class Draw:
    """This process's rows of a step.

    Attributes:
      kind: type of the rows.
      rows: of each row its documents' examples; more than one where they are packed, none in a row that pads.
      width: attributes of a label, or logits a token; 0 where there are none.
      epoch: epoch that the step belongs to, from 0.
      pack: tokens of the rows that documents are packed into; 0: each has a row of its own.
    """

    kind: Kind
    rows: list[list[Encoded]]
    width: int
    epoch: int
    pack: int = 0

    @property
    def numbers(self) -> list[list[int]]:
        """Of each row its records' numbers in the data set: what a cache of frozen models' scores can be kept under."""
        return [[encoded.index for encoded in row] for row in self.rows]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and tokens that they are padded to. Processes that share a step agree on the largest of each."""
        longest = max((sum(map(len, row)) for row in self.rows), default=1)
        return len(self.rows), padded_length(longest)

    def media(self, rows: int | None = None) -> list[list[MediaItem]]:
        """The media of each sequence of the arrays, in the order of their places in it.

        Args:
          rows: as for ``collate``; those of weight 0 have none.

        Returns:
          A list for each row, or, where rows have two sequences, for each of these: ``[2 b, 2 b + 1]`` are of row b.
        """
        two = self.kind in (PairRows, UnpairedRows)
        empty: list[list[Encoded]] = [[] for _ in range((rows or self.shape[0]) - len(self.rows))]
        found: list[list[MediaItem]] = []
        for row in [*self.rows, *empty]:
            for i in (0, 1) if two else (0,):
                found.append([item for encoded in row for item in encoded.documents[i].media])
        return found

    def padding(self, rows: int | None = None, length: int | None = None) -> tuple[int, int]:
        """Token places without a token, and all token places, to be added over processes and steps."""
        shape = self.shape
        places = (rows or shape[0]) * (length or shape[1])
        if self.kind in (PairRows, UnpairedRows):
            places *= 2
        return places - sum(len(d) for row in self.rows for encoded in row for d in encoded.documents), places

    def collate(self, rows: int | None = None, length: int | None = None) -> Rows:
        """The rows as arrays.

        Args:
          rows: how many, filled up with rows of weight 0; ``shape[0]`` by default.
          length: tokens that they are padded to; ``shape[1]`` by default.

        Raises:
          ValueError: fewer rows or tokens than ``shape`` says.
        """
        shape = self.shape
        B, T = rows or shape[0], length or shape[1]
        if shape[0] > B or shape[1] > T:
            raise ValueError(f"collate to {B} rows of {T} tokens: there are {shape[0]} of {shape[1]}")
        return collate(self.kind, [*self.rows, *([] for _ in range(B - len(self.rows)))], T, self.width)


def collate(kind: Kind, rows: Sequence[Sequence[Encoded]], length: int, width: int = 0) -> Rows:
    """Puts rows together.

    Args:
      kind: type of the rows.
      rows: of each row what it holds; nothing in a row of weight 0. More than one only in TextRows and TopKRows.
      length: tokens that rows are padded to.
      width: attributes of a label, or logits a token.

    Returns:
      ``len(rows)`` rows, as numpy arrays.
    """
    B, T = len(rows), length
    weight = _floats([bool(row) for row in rows])
    if kind in (PairRows, UnpairedRows):
        two = [[row[0].documents[i]] if row else [] for row in rows for i in (0, 1)]
        inputs, mask = _place(two, T, (B, 2, T))
        firsts = [row[0].example if row else None for row in rows]
        if kind is PairRows:
            gap = [(e.gap or 0.0) if isinstance(e, Pair) else 0.0 for e in firsts]
            return PairRows(inputs, mask, _floats(gap), weight)
        good: Any = np.array([isinstance(e, Unpaired) and e.good for e in firsts], bool)
        return UnpairedRows(inputs, mask, good, weight)
    inputs, mask = _place([[e.documents[0] for e in row] for row in rows], T, (B, T))
    if kind is LabelRows:
        labels = np.full((B, width), MISSING, np.float32)
        for b, row in enumerate(rows):
            for encoded in row:
                if isinstance(encoded.example, Rated):
                    labels[b] = encoded.example.ratings
        known = labels != MISSING
        return LabelRows(inputs, _floats(np.where(known, labels, 0)), _floats(known), weight)
    if kind is StepRows:
        return StepRows(inputs, *_steps(rows, T), weight)
    if kind is TopKRows:
        return TopKRows(inputs, mask, *_teacher(rows, T, width), weight)
    return TextRows(inputs, mask, weight)


def _floats(values: Any) -> Any:
    return np.asarray(values, np.float32)


def _place(rows: Sequence[Sequence[Document]], T: int, shape: tuple[int, ...]) -> tuple[Inputs, Any]:
    """Documents side by side in each row: what a model reads, and the mask of what is learned."""
    tokens, positions, segments = (np.zeros((len(rows), T), np.int32) for _ in range(3))
    mask = np.zeros((len(rows), T), np.float32)
    for b, documents in enumerate(rows):
        begin = 0
        for number, document in enumerate(documents, 1):
            own = slice(begin, begin + len(document))
            tokens[b, own], mask[b, own] = document.tokens, document.mask
            positions[b, own], segments[b, own] = np.arange(len(document)), number
            begin = own.stop

    def to(values: np.ndarray) -> Any:
        return values.reshape(shape)

    return Inputs(to(tokens), to(positions), to(segments)), to(mask)


def _steps(rows: Sequence[Sequence[Encoded]], T: int) -> tuple[Any, Any]:
    """Labels and mask of steps."""
    labels, mask = np.zeros((len(rows), T), np.float32), np.zeros((len(rows), T), np.float32)
    for b, row in enumerate(rows):
        for encoded in row:
            if isinstance(encoded.example, Steps):
                for at, rating in zip(encoded.documents[0].steps, encoded.example.ratings, strict=False):
                    if rating != MISSING:
                        labels[b, at], mask[b, at] = rating, 1
    return labels, mask


def _teacher(rows: Sequence[Sequence[Encoded]], T: int, K: int) -> tuple[TopK, Any]:
    """The teacher's logits, and the logarithms of their sums."""
    logits, ids = np.zeros((len(rows), T, K), np.float32), np.zeros((len(rows), T, K), np.int32)
    normalizer = np.zeros((len(rows), T), np.float32)
    for b, row in enumerate(rows):
        begin = 0
        for encoded in row:
            size, example = len(encoded), encoded.example
            own = slice(begin, begin + size)
            if isinstance(example, Teacher):
                logits[b, own], ids[b, own] = example.logits[:size], example.ids[:size]
                normalizer[b, own] = example.log_normalizer[:size]
            begin += size
    to: Any = (logits, ids)
    return TopK(*to), normalizer
