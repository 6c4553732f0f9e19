"""Scores of frozen models, kept by record: computed in the first epoch, looked up in later ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float, Int


class KeptScores:
    """A few numbers for each record of a data set, those that are known so far; the same in every process.

    With a file the numbers outlast the process, so that a run that goes on reads what it had computed, bit for bit.

    Args:
      records: of the data set.
      file: where they are kept, without its ending; None: in memory alone.
      writes: whether this process writes the file.
    """

    def __init__(self, records: int, file: Path | None = None, *, writes: bool = True):
        self._known = np.zeros(records, bool)
        self._values: np.ndarray | None = None
        self._files = None if file is None else (file.with_suffix(".npy"), file.with_suffix(".known.npy"))
        self._mapped: tuple[np.memmap, np.memmap] | None = None
        self._writes = writes
        if self._files and all(one.exists() for one in self._files):
            values, known = (np.load(one) for one in self._files)
            if len(known) == records:
                self._values, self._known = values, known

    def have(self, numbers: Int[np.ndarray, "B"]) -> bool:
        """Whether the scores of all these records are known; negative numbers stand for no record."""
        return bool(self._known[numbers[numbers >= 0]].all()) and self._values is not None

    def get(self, numbers: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B *K"]:
        """The scores of records, 0 for no record."""
        assert self._values is not None
        found = self._values[numbers]
        found[numbers < 0] = 0
        return found

    def put(self, numbers: Int[np.ndarray, "B"], scores: Float[np.ndarray, "B *K"]) -> None:
        """Keeps the scores of records that are not known yet."""
        new = (numbers >= 0) & ~self._known[numbers]
        at, scores = numbers[new], np.asarray(scores, np.float32)[new]
        if self._values is None:
            self._values = np.zeros((len(self._known), *scores.shape[1:]), np.float32)
        self._values[at], self._known[at] = scores, True
        if self._files and self._writes:
            if self._mapped is None:
                self._mapped = self._map(*self._files)
            values, known = self._mapped
            values[at] = scores
            values.flush()  # a number is called known only once it is there
            known[at] = True
            known.flush()

    def _map(self, values: Path, known: Path) -> tuple[np.memmap, np.memmap]:
        """The files, as they are or made anew; places that nothing was written to take no room."""
        assert self._values is not None
        values.parent.mkdir(parents=True, exist_ok=True)
        made = []
        for file, array in ((values, self._values), (known, self._known)):
            there = file.exists() and np.load(file, mmap_mode="r").shape == array.shape
            made.append(np.lib.format.open_memmap(file, "r+" if there else "w+", array.dtype, array.shape))
        return made[0], made[1]
