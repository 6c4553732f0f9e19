"""Prompts for the online algorithms: mixed, shuffled, sharded by process, resumable.

Order. The sources are shuffled (anew in each epoch), repeated without end and mixed by weight: an endless list of rows,
fixed by the seed. It is dealt out to *lanes*, one for each place in a step's global batch: lane ``l`` of ``L`` serves
rows ``l, l + L, l + 2 L, ...`` of the list, and passes over those that cannot be used. Each process owns a contiguous
block of lanes and reads no row of another's. So the prompts of a step, and their order, are the same for any number of
processes, and a state of one run can be taken up by another number of processes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast

from yatt_jax.data.config import DataConfig, DataError, SourceConfig
from yatt_jax.data.conversation import Conversation
from yatt_jax.data.gym import open_prompts
from yatt_jax.data.media.processor import MediaProcessor
from yatt_jax.data.order import Row, Rows, endless_order, hold_out, read_row
from yatt_jax.data.reader import Outcome, PromptReader
from yatt_jax.data.records import Joined, Record
from yatt_jax.types import Prompt

__all__ = ["DataConfig", "DataError", "Draw", "PromptSource", "SourceConfig"]

_log = logging.getLogger(__name__)
_MENDS = {
    "malformed": "skipped, as data.on_error says",
    "overlong": "skipped, as data.overlong says; raise data.max_prompt_tokens or use overlong='cut'",
    "cut": "cut from the beginning, as data.overlong says; raise data.max_prompt_tokens to keep it whole",
    "held_out": "skipped: the same prompt is held out for evaluation",
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """Prompts drawn by this process.

    Attributes:
      prompts: this process's share, in the order of the global batch.
      numbers: of each, its place in the run's global sequence of prompts, from 0; unique over steps and processes, and
        the same for any number of processes.
      places: of each, its row in the endless order of the data, for ``PromptSource.read``.
    """

    prompts: list[Prompt]
    numbers: list[int]
    places: list[int]


class Reader(Protocol):
    """Makes prompts of records; see ``PromptReader``."""

    def parse(self, record: Record) -> Conversation:
        """The conversation of a record, without rendering it."""
        ...

    def read(self, records: Sequence[tuple[int, Record | DataError]], *, keep: bool = True) -> list[Outcome]:
        """Prompts of records, in order; ``keep`` says whether media hold their values."""
        ...


class PromptSource:
    """An endless iterator over this process's prompts of each step.

    Args:
      config: the data section.
      tokenizer: the model's.
      prompts_per_step: prompts of a step over all processes; the number of lanes.
      seed: of the order.
      process_index: which process this is.
      process_count: how many there are.
      media: reads the model's media; None for a model of text.
      reader: reads the records; by default those of prompts.

    Raises:
      DataError: files that are missing, empty or malformed, records that do not fit, or a holdout that leaves nothing.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerFast,
        *,
        prompts_per_step: int,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        media: MediaProcessor | None = None,
        reader: Reader | None = None,
    ) -> None:
        if not config.train:
            raise DataError("data.train is empty: name at least one file of prompts")
        if prompts_per_step < 1 or not 0 <= process_index < process_count:
            raise ValueError(f"prompts_per_step {prompts_per_step}, process {process_index} of {process_count}")
        self._config, self._seed = config, seed
        self._process, self._processes = process_index, process_count
        self._reader: Reader = reader or PromptReader(config, tokenizer, media)
        self._lanes = prompts_per_step
        self._drawn = 0
        self._next = {lane: 0 for lane in range(prompts_per_step) if self._owner(lane) == process_index}
        self._counts = dict.fromkeys(_MENDS, 0)
        self._said: set[str] = set()

        tables = [open_prompts(source.path) for source in config.train]
        held_out = hold_out([len(table) for table in tables], config.holdout)
        starts = np.cumsum([0, *map(len, tables)])[:-1].tolist()
        self._sources = [Rows(*source) for source in zip(tables, held_out, starts, strict=True)]
        held_rows = [
            read_row(table, row, start + row)
            for table, rows, start in zip(tables, held_out, starts, strict=True)
            for row in rows.tolist()
        ]
        eval_table = Joined([open_prompts(path) for path in config.eval])
        self._evaluation: Sequence[Row] | Rows = Rows(eval_table) if config.eval else held_rows
        self._check()
        self._held_out = {o.prompt.identity for o in self._reader.read(held_rows, keep=False) if o.prompt}
        self._rows = endless_order(self._sources, [source.weight for source in config.train], config.shuffle, seed)

    @property
    def skipped(self) -> dict[str, int]:
        """Counts of this process's draws since the start of the run; a row counts each time it is drawn.

        "malformed", "overlong" and "held_out" were passed over, "cut" were shortened.
        """
        return dict(self._counts)

    def __iter__(self) -> PromptSource:
        return self

    def __next__(self) -> list[Prompt]:
        """This process's prompts of the next step."""
        return self.draw().prompts

    def draw(self, count: int | None = None) -> Draw:
        """Draws the next prompts.

        Args:
          count: how many over all processes; a step's by default. Every process must ask for the same number.

        Raises:
          DataError: a prompt that the settings do not allow to skip, or none that can be used.
        """
        numbers = range(self._drawn, self._drawn + (self._lanes if count is None else count))
        wanted: dict[int, list[int]] = {}
        for number in numbers:
            if number % self._lanes in self._next:
                wanted.setdefault(number % self._lanes, []).append(number)
        found: dict[int, tuple[Prompt, int]] = {}
        misses = dict.fromkeys(wanted, 0)
        while wanted:
            lanes = [lane for lane, numbers_left in wanted.items() for _ in numbers_left]
            places = [self._advance(lane) for lane in lanes]
            outcomes = self._reader.read([self._rows[place] for place in places])
            for lane, place, outcome in zip(lanes, places, outcomes, strict=True):
                if self._usable(outcome) and outcome.prompt is not None:
                    found[wanted[lane].pop(0)] = outcome.prompt, place
                    misses[lane] = 0
                else:
                    misses[lane] += 1
                    self._check_not_stuck(misses[lane], outcome)
            wanted = {lane: numbers_left for lane, numbers_left in wanted.items() if numbers_left}
        self._drawn = numbers.stop
        drawn = [found[number] for number in sorted(found)]
        return Draw([prompt for prompt, _ in drawn], sorted(found), [place for _, place in drawn])

    def owns(self, number: int) -> bool:
        """Whether this process draws the prompt with this number."""
        return number % self._lanes in self._next

    def read(self, places: Sequence[int]) -> list[Prompt]:
        """Prompts that were drawn before, by this or another process, by their ``Draw.places``; counts nothing.

        Raises:
          DataError: a record that has changed, so that it is no prompt any more.
        """
        outcomes = self._reader.read([self._rows[place] for place in places])
        for outcome in outcomes:
            if outcome.prompt is None:
                raise DataError(f"{outcome.message}; it was used before: the file has changed since")
        return [outcome.prompt for outcome in outcomes if outcome.prompt is not None]

    def evaluation(self, limit: int = 0) -> list[Prompt]:
        """This process's share of the held-out prompts: a contiguous block of them, in file order.

        Args:
          limit: use the first ``limit`` rows only; 0: all.

        Returns:
          The share, the tail included; over all processes each row once. ``Prompt.index`` is unique over all of them.
          Their media do not hold their values, and make them each time they are asked for.

        Raises:
          DataError: a row that the settings do not allow to skip.
        """
        count = min(len(self._evaluation), limit or len(self._evaluation))
        first, last = (count * (self._process + i) // self._processes for i in (0, 1))
        outcomes = self._reader.read([self._evaluation[i] for i in range(first, last)], keep=False)
        faults = [outcome for outcome in outcomes if outcome.fault]
        for outcome in faults:
            self._raise_if_told(outcome)
        if faults:
            _log.warning(
                "%d of %d held-out prompts were skipped or cut; the first: %s", len(faults), count, faults[0].message
            )
        return [outcome.prompt for outcome in outcomes if outcome.prompt is not None]

    def state(self) -> dict[str, Any]:
        """Where this process stands, as plain JSON values. A checkpoint holds the states of all processes."""
        return {
            "drawn": self._drawn,
            "next": [[lane, place] for lane, place in self._next.items()],
            "counts": dict(self._counts),
            "process": [self._process, self._processes],
            "order": self._identity(),
        }

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on where a run stopped, with any number of processes.

        Args:
          states: the ``state()`` of every process of that run.

        Raises:
          DataError: states of different moments or not of all processes, or of a run whose data, seed or prompts a step
            were others; the message says which.
        """
        for state in states:
            for key, value in self._identity().items():
                if state["order"].get(key) != value:
                    raise DataError(
                        f"data cannot be resumed: {key} was {state['order'].get(key)} when the run was saved and is "
                        f"now {value}; the order of the prompts depends on it"
                    )
        if len({state["drawn"] for state in states}) != 1:
            raise DataError(f"data cannot be resumed: the processes had drawn {[s['drawn'] for s in states]} prompts")
        places = {lane: place for state in states for lane, place in state["next"]}
        missing = sorted(set(self._next) - set(places))
        if missing:
            raise DataError(
                f"data cannot be resumed: no saved state covers lanes {missing}; give every process's state"
            )
        self._drawn = states[0]["drawn"]
        self._next = {lane: places[lane] for lane in self._next}
        same = [state for state in states if state["process"] == [self._process, self._processes]]
        counted = same or (states if self._process == 0 else [])
        self._counts = {name: sum(state["counts"].get(name, 0) for state in counted) for name in _MENDS}

    def _identity(self) -> dict[str, Any]:
        """What the order of rows depends on."""
        return {
            "prompts_per_step": self._lanes,
            "seed": self._seed,
            "shuffle": self._config.shuffle,
            "holdout": self._config.holdout,
            "rows": [len(source) for source in self._sources],
            "weights": [source.weight for source in self._config.train],
        }

    def _owner(self, lane: int) -> int:
        return lane * self._processes // self._lanes

    def _advance(self, lane: int) -> int:
        """The place of the lane's next row."""
        place = lane + self._lanes * self._next[lane]
        self._next[lane] += 1
        return place

    def _usable(self, outcome: Outcome) -> bool:
        """Whether a prompt is trained on; counts it, and says it once, where something is amiss."""
        self._raise_if_told(outcome)
        fault: str = outcome.fault
        message = outcome.message
        if outcome.prompt is not None and outcome.prompt.identity in self._held_out:
            fault, message = "held_out", outcome.prompt.source
        if not fault:
            return True
        self._counts[fault] += 1
        if fault not in self._said:
            self._said.add(fault)
            _log.warning("%s (%s; further ones are counted and not shown)", message, _MENDS[fault])
        return fault == "cut"

    def _raise_if_told(self, outcome: Outcome) -> None:
        if outcome.fault == "malformed" and self._config.on_error == "raise":
            raise DataError(f"{outcome.message} (data.on_error='skip' would pass over such records)")
        if outcome.fault == "overlong" and self._config.overlong == "error":
            raise DataError(f"{outcome.message}; raise it, or set data.overlong to 'skip' or 'cut'")

    def _check_not_stuck(self, misses: int, outcome: Outcome) -> None:
        rows = sum(len(source) for source in self._sources)
        if misses < min(100_000, 10 * rows + 100):
            return
        hint = "" if self._config.shuffle else " (data.shuffle=True would offer this place of the batch other rows)"
        raise DataError(
            f"data.train: {misses} rows one after the other cannot be used{hint}; the last: {outcome.message}"
        )

    def _check(self) -> None:
        """Parses the first rows of each source, this process every n-th, and renders one."""
        for rows in (*self._sources, self._evaluation):
            checked = range(self._process, min(len(rows), self._config.check_rows), self._processes)
            faults: list[str] = []
            good: Row | None = None
            for i in checked:
                index, record = rows[i]
                try:
                    if isinstance(record, DataError):
                        raise record
                    self._reader.parse(record)
                    good = good or (index, record)
                except DataError as error:
                    self._raise_if_told(Outcome(None, "malformed", str(error)))
                    faults.append(str(error))
            if faults and good is None:
                raise DataError(f"none of {len(faults)} records checked can be used; the first: {faults[0]}")
            if faults:
                _log.warning(
                    "%d of %d records checked will be skipped; the first: %s", len(faults), len(checked), faults[0]
                )
            if good is not None:
                self._raise_if_told(self._reader.read([good])[0])
