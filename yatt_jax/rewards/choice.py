"""Which rewards a prompt asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from yatt_jax.errors import InputError, nearest

if TYPE_CHECKING:
    from yatt_jax.types import Sample


class Choice:
    """Reads the choice from a column of the prompt's record.

    The column holds the name of a reward, a list of names, or names with weights in place of the configured ones.

    Args:
      column: its name; empty: every prompt asks for all rewards.
      configured: weight of each reward by name.
    """

    def __init__(self, column: str, configured: Mapping[str, float]) -> None:
        self._column, self._configured = column, configured

    def weights(self, sample: Sample) -> Mapping[str, float]:
        """Weight of each reward that the sample's prompt asks for, by name.

        Raises:
          InputError: the record lacks the column, or it holds something else, an unknown name, or no name at all.
        """
        if not self._column:
            return self._configured
        where = f'{sample.prompt.source}: field "{self._column}"'
        if self._column not in sample.prompt.columns:
            raise InputError(
                f"{where} is missing, and reward_column says that it names the prompt's rewards; "
                f"there are {list(self._configured)}"
            )
        value = sample.prompt.columns[self._column]
        if isinstance(value, Mapping):
            # A table's rows have every name; those without a number are not asked for.
            asked = {name: weight for name, weight in value.items() if weight is not None}
            bad = {n: w for n, w in asked.items() if isinstance(w, bool) or not isinstance(w, int | float)}
            if bad or not all(math.isfinite(weight) for weight in asked.values()):
                raise InputError(f"{where}: expected a finite number for each reward, found {value!r}")
        else:
            names = [value] if isinstance(value, str) else value
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise InputError(f"{where}: expected a reward's name, a list of names, or weights, found {value!r}")
            asked = {name: self._configured.get(name, 0.0) for name in names}
        for name in asked:
            if name not in self._configured:
                known = list(self._configured)
                raise InputError(f"{where}: no reward {name!r}{nearest(name, known)}; there are {known}")
        if not asked:
            raise InputError(f"{where} names no reward; there are {list(self._configured)}")
        return {name: float(weight) for name, weight in asked.items()}
