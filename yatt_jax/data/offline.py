"""Rows for the offline algorithms: every row once an epoch, mixed, shuffled, sharded by process, resumable.

Order. The rows are shuffled (anew in each epoch) into an endless list, fixed by the seed. A step takes the next
``batch`` of them, at the end of an epoch those that are left; each process owns a contiguous block of the places of a
batch and reads what lies there. A row that cannot be used leaves its place empty, with weight 0. So what a step trains
on is a function of seed and step alone, the same for any number of processes and with or without packing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from yatt_jax.data.collate import Draw, Rows
from yatt_jax.data.config import DataError
from yatt_jax.data.documents import Encoder, Outcome
from yatt_jax.data.encoded import Encoded
from yatt_jax.data.formats import Kind
from yatt_jax.data.media.processor import MediaProcessor
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.order import Row, endless_order, hold_out
from yatt_jax.data.order import Rows as Selection
from yatt_jax.data.packing import first_fit_decreasing
from yatt_jax.data.records import Joined
from yatt_jax.data.rotation import Pool, rotate
from yatt_jax.errors import InputError
from yatt_jax.types import LabelRows, TextRows, TopKRows, UnpairedRows

__all__ = ["DataError", "Draw", "OfflineConfig", "OfflineSource"]

_log = logging.getLogger(__name__)
_MENDS = {
    "malformed": "left out, as data.on_error says",
    "overlong": "left out, as data.overlong says; raise data.max_tokens or use overlong='cut'",
    "cut": "its end cut off, as data.overlong says; raise data.max_tokens to keep it whole",
    "tie": "left out: it says nothing about preferences",
    "held_out": "left out: the same is held out for evaluation",
}


class OfflineSource:
    """An endless iterator over this process's rows of each step.

    Args:
      config: the data section.
      tokenizer: the model's.
      kind: type of the rows.
      needs_gap: whether each pair must say by how much the chosen answer is better.
      seed: of the order.
      process_index: which process this is.
      process_count: how many there are.
      media: reads the model's media; None for a model of text.

    Raises:
      DataError: files that are missing, empty or malformed, records that do not fit, or a holdout that leaves nothing.
      InputError: settings that are none of this kind's.
    """

    def __init__(
        self,
        config: OfflineConfig,
        tokenizer: PreTrainedTokenizerFast,
        kind: Kind,
        *,
        needs_gap: bool = False,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        media: MediaProcessor | None = None,
    ) -> None:
        if not config.train:
            raise DataError("data.train is empty: name at least one file of rows")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process {process_index} of {process_count}")
        if config.pack and kind not in (TextRows, TopKRows):
            raise InputError(f"data.pack = {config.pack}: {kind.__name__} are not packed; set it to 0")
        self._config, self._kind, self._seed = config, kind, seed
        self._process, self._processes = process_index, process_count
        self._encoder = Encoder(config, tokenizer, kind, needs_gap=needs_gap, media=media)
        self._step, self._misses = 0, 0
        self._counts = dict.fromkeys(_MENDS, 0)
        self._said: set[str] = set()

        tables = [self._encoder.open(source.path) for source in config.train]
        held_out = hold_out([len(table) for table in tables], config.holdout)
        starts = np.cumsum([0, *map(len, tables)])[:-1].tolist()
        held = np.concatenate([rows + start for rows, start in zip(held_out, starts, strict=True)])
        self._train = Pool(Joined(tables), held)
        self._sources = [self._train.rows]
        if config.mix == "weights":
            self._sources = [Selection(*source) for source in zip(tables, held_out, starts, strict=True)]
        if config.eval:
            self._evaluation = Pool(Joined([self._encoder.open(path) for path in config.eval]), held[:0])
        else:
            self._evaluation = Pool(Joined(tables), np.setdiff1d(np.arange(sum(map(len, tables))), held))
        self._steps_per_epoch = self._count_steps()
        self._encoder.find_width(self._train.rows)
        for rows in (*self._sources, self._evaluation.rows):
            self._check(rows)
        self._held_out: set[bytes] = set()
        if config.holdout:
            found = self._encoder.read([self._evaluation.rows[i] for i in range(config.holdout)], keep=False)
            self._held_out = {self._identity_of(outcome.row) for outcome in found if outcome.row}
        self._rows = endless_order(self._sources, [source.weight for source in config.train], config.shuffle, seed)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which each row is seen once; under mix = "weights", in which as many rows are drawn as there are."""
        return self._steps_per_epoch

    @property
    def records(self) -> tuple[int, int]:
        """Records that numbers of training rows, and of held-out ones, may point to: see ``Draw.numbers``."""
        return self._train.records, self._evaluation.records

    @property
    def width(self) -> int:
        """Attributes of a label, or teacher's logits a token; 0 where there are none."""
        return self._encoder.width

    @property
    def skipped(self) -> dict[str, int]:
        """Counts of this process's draws since the start of the run; a row counts each time it is drawn.

        "malformed", "overlong", "tie" and "held_out" were left out, "cut" were shortened.
        """
        return dict(self._counts)

    def __iter__(self) -> OfflineSource:
        return self

    def __next__(self) -> Rows:
        """This process's rows of the next step, as arrays."""
        return self.draw().collate()

    def draw(self) -> Draw:
        """This process's rows of the next step; every process must draw the same number of times.

        Raises:
          DataError: a row that the settings do not allow to leave out, or none that can be used for long.
        """
        batch, total = self._config.batch, len(self._train.rows)
        if self._config.mix == "weights":
            first, count = self._step * batch, batch
            epoch = self._step // self._steps_per_epoch
        else:
            epoch, place = divmod(self._step, self._steps_per_epoch)
            first, count = epoch * total + place * batch, min(batch, total - place * batch)
        outcomes = self._encoder.read([self._rows[first + place] for place in self._own(batch) if place < count])
        rows = [outcome.row if self._usable(outcome) else None for outcome in outcomes]
        self._step += 1
        return self._finish(rows, batch, epoch, self._train, self._config.pack)

    def evaluation(self, limit: int = 0) -> Iterator[Draw]:
        """The held-out rows in file order, not packed, in batches of ``data.batch``, each row once over all processes.

        Every process gets the same number of batches; the last one is filled up with rows of weight 0.

        Args:
          limit: use the first ``limit`` rows only; 0: all.

        Raises:
          DataError: a row that the settings do not allow to leave out.
        """
        pool, batch = self._evaluation, self._config.batch
        total = min(len(pool.rows), limit or len(pool.rows))
        faults: list[str] = []
        for first in range(0, total, batch):
            own = [first + place for place in self._own(batch) if first + place < total]
            outcomes = self._encoder.read([pool.rows[i] for i in own])
            for outcome in outcomes:
                self._raise_if_told(outcome)
            faults += [outcome.message for outcome in outcomes if outcome.fault]
            yield self._finish([outcome.row for outcome in outcomes], batch, 0, pool)
        if faults:
            _log.warning("%d held-out rows were left out or cut; the first: %s", len(faults), faults[0])

    def state(self) -> dict[str, Any]:
        """Where this process stands, as plain JSON values. A checkpoint holds the states of all processes."""
        return {
            "step": self._step,
            "counts": dict(self._counts),
            "process": [self._process, self._processes],
            "order": self._identity(),
        }

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on where a run stopped, with any number of processes.

        Args:
          states: the ``state()`` of every process of that run.

        Raises:
          DataError: states of different moments or not of all processes, or of a run whose data, seed or batch were
            others; the message says which.
        """
        for state in states:
            for key, value in self._identity().items():
                if state["order"].get(key) != value:
                    raise DataError(
                        f"data cannot be resumed: {key} was {state['order'].get(key)} when the run was saved and is "
                        f"now {value}; the order of the rows depends on it"
                    )
        if len({state["step"] for state in states}) != 1:
            raise DataError(f"data cannot be resumed: the processes stood at steps {[s['step'] for s in states]}")
        missing = set(range(states[0]["process"][1])) - {state["process"][0] for state in states}
        if missing:
            raise DataError(f"data cannot be resumed: the states of processes {sorted(missing)} are not there")
        self._step, self._misses = states[0]["step"], 0
        same = [state for state in states if state["process"] == [self._process, self._processes]]
        counted = same or (states if self._process == 0 else [])
        self._counts = {name: sum(state["counts"].get(name, 0) for state in counted) for name in _MENDS}

    def _identity(self) -> dict[str, Any]:
        """What the order of rows depends on."""
        return {
            "batch": self._config.batch,
            "seed": self._seed,
            "shuffle": self._config.shuffle,
            "holdout": self._config.holdout,
            "mix": self._config.mix,
            "last": self._config.last,
            "rows": [len(source) for source in self._sources],
            "weights": [source.weight for source in self._config.train],
        }

    def _count_steps(self) -> int:
        total, batch = len(self._train.rows), self._config.batch
        if self._kind is UnpairedRows and total < 2:
            raise DataError("data.train: one row; each needs the response of another, so there must be 2 or more")
        if self._config.last == "drop" and self._config.mix == "once":
            if total < batch:
                raise DataError(
                    f"data.train: {total} rows make no batch of {batch}, and data.last = 'drop' leaves out those that "
                    f"do not fill one; lower data.batch or set data.last = 'pad'"
                )
            return total // batch
        return math.ceil(total / batch)

    def _own(self, batch: int) -> range:
        """This process's places in a batch."""
        first, end = (-(-batch * process // self._processes) for process in (self._process, self._process + 1))
        return range(first, end)

    def _finish(self, rows: Sequence[Encoded | None], batch: int, epoch: int, pool: Pool, pack: int = 0) -> Draw:
        """Rows of a batch, packed or one by one, and filled up."""
        found = [row for row in rows if row is not None]
        if self._kind is UnpairedRows:
            found = rotate(found, pool, self._encoder, self._config.max_tokens)
        if pack:
            packed = first_fit_decreasing([len(row) for row in found], pack)
            filled = [[found[i] for i in row] for row in packed]
        else:
            filled = [[row] for row in found]
            filled += [[] for _ in range(len(self._own(batch)) - len(found))]
        return Draw(self._kind, filled, self.width, epoch, pack)

    def _identity_of(self, row: Encoded) -> bytes:
        """What makes a row the same as one that is held out: its prompt, or all of it where there is none."""
        first = row.documents[0]
        by_prompt = self._kind not in (TextRows, TopKRows, LabelRows) and len(first.prompt) > 1
        media = "".join(item.digest for item in first.media)
        return (first.prompt if by_prompt else first.tokens).tobytes() + media.encode()

    def _usable(self, outcome: Outcome) -> bool:
        """Whether a row is trained on; counts it, and says it once, where something is amiss."""
        self._raise_if_told(outcome)
        fault: str = outcome.fault
        message = outcome.message
        if outcome.row is not None and self._identity_of(outcome.row) in self._held_out:
            fault, message = "held_out", outcome.row.example.source
        if fault:
            self._counts[fault] += 1
            if fault not in self._said:
                self._said.add(fault)
                _log.warning("%s (%s; further ones are counted and not shown)", message, _MENDS[fault])
        usable = fault in ("", "cut")
        self._misses = 0 if usable else self._misses + 1
        if self._misses >= min(100_000, 10 * len(self._train.rows) + 100):
            raise DataError(f"data.train: {self._misses} rows one after the other cannot be used; the last: {message}")
        return usable

    def _raise_if_told(self, outcome: Outcome) -> None:
        if outcome.fault == "malformed" and self._config.on_error == "raise":
            raise DataError(f"{outcome.message} (data.on_error='skip' would leave out such records)")
        if outcome.fault == "overlong" and self._config.overlong == "error":
            raise DataError(f"{outcome.message}; raise it, or set data.overlong to 'skip' or 'cut'")

    def _check(self, rows: Selection) -> None:
        """Parses the first rows of a source, this process every n-th, and renders one."""
        checked = range(self._process, min(len(rows), self._config.check_rows), self._processes)
        faults: list[str] = []
        good: Row | None = None
        for i in checked:
            index, record = rows[i]
            try:
                if isinstance(record, DataError):
                    raise record
                self._encoder.parse(record)
                good = good or (index, record)
            except DataError as error:
                self._raise_if_told(Outcome(None, "malformed", str(error)))
                faults.append(str(error))
        if faults and good is None:
            raise DataError(f"none of {len(faults)} records checked can be used; the first: {faults[0]}")
        if faults:
            _log.warning(
                "%d of %d records checked will be left out; the first: %s", len(faults), len(checked), faults[0]
            )
        if good is not None:
            self._raise_if_told(self._encoder.read([good])[0])
