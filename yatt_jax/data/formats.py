"""The formats of rows: which a record is in, by the kind of rows that are wanted and the fields it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

from yatt_jax.data import dialogues, preferences
from yatt_jax.data.config import DataError
from yatt_jax.data.examples import Example, Reading
from yatt_jax.data.paths import expand
from yatt_jax.data.records import Joined, Record, Table, open_table
from yatt_jax.data.teacher import topk_logits
from yatt_jax.errors import InputError, nearest
from yatt_jax.types import LabelRows, PairRows, StepRows, TextRows, TopKRows, UnpairedRows

Kind: TypeAlias = (
    type[TextRows] | type[PairRows] | type[UnpairedRows] | type[LabelRows] | type[StepRows] | type[TopKRows]
)


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      name: what a configuration calls it.
      fields: those that a record of it has; they tell it from the others.
      parse: makes an example of a record.
      parse_two: instead, for formats with two lines a row: makes an example of both.
    """

    name: str
    fields: tuple[str, ...]
    parse: Callable[[Record, Reading], Example] | None = None
    parse_two: Callable[[Record, Record, Reading], Example] | None = None


_TOPK = ("tokens", "labels", "loss_mask", "topk_logits", "topk_token_ids", "log_sum_exp_logits")

FORMATS: Mapping[Kind, tuple[Format, ...]] = {
    TextRows: (
        Format("messages", ("messages",), dialogues.messages),
        Format("conversations", ("conversations",), dialogues.conversations),
        Format("completion", ("prompt", "completion"), dialogues.prompt_completion),
        Format("output", ("input", "output"), dialogues.input_output),
        Format("text", ("text",), dialogues.plain_text),
    ),
    PairRows: (
        Format("preference", ("prompt", "chosen", "rejected"), preferences.preference),
        Format("conversations", ("chosen", "rejected"), preferences.whole_conversations),
        Format("responses", ("prompt", "chosen_response", "rejected_response"), preferences.responses),
        Format("strength", ("text", "label"), parse_two=preferences.strength),
        Format("lines", ("text",), parse_two=preferences.lines),
    ),
    UnpairedRows: (
        Format("preference", ("prompt", "response", "preference"), preferences.by_preference),
        Format("label", ("prompt", "completion", "label"), preferences.by_label),
    ),
    LabelRows: (
        Format("regression", ("text", "label"), preferences.regression),
        Format("conversations", ("conversations",), preferences.labelled_turns),
    ),
    StepRows: (Format("steps", ("prompt", "completions", "labels"), preferences.rated_steps),),
    TopKRows: (Format("topk", _TOPK, topk_logits),),
}
"""Formats of each kind of rows; of those whose fields a record has, it is in the first."""


class Parser:
    """Makes examples of records.

    Args:
      kind: the kind of rows that is wanted.
      name: of the format of every record, or "auto".
      how: how strings become texts.

    Raises:
      InputError: no format of this name for this kind.
    """

    def __init__(self, kind: Kind, name: str, how: Reading) -> None:
        self._kind, self._how = kind, how
        names = [format.name for format in FORMATS[kind]]
        if name != "auto" and name not in names:
            raise InputError(
                f'data.format = {name!r}: expected "auto" or, for {kind.__name__}, one of {names}{nearest(name, names)}'
            )
        self._formats = [format for format in FORMATS[kind] if name in ("auto", format.name)]

    def open(self, path: str) -> Table:
        """Opens a path of a source, as ``records.open_table`` does; two lines that make up one row become one record.

        Raises:
          DataError: missing, empty or damaged files, or an odd number of lines where two make up one row.
        """
        return Joined([self._open(str(file)) for file in expand(path)])

    def _open(self, path: str) -> Table:
        table = open_table(path)
        try:
            two = (self._formats[0] if len(self._formats) == 1 else self._format(table[0])).parse_two
        except DataError:
            return table  # its first record does not fit, and is reported when the records are checked
        return Adjacent(table) if two else table

    def parse(self, record: Record) -> Example:
        """The example in a record.

        Raises:
          DataError: it fits no format, or not the one its fields tell.
        """
        if isinstance(record, Two):
            first, second = (self._with_fields(half) for half in (record.first, record.second))
            both = self._format(first), self._format(second)
            if both[0].parse_two is None or both[0] is not both[1]:
                raise DataError(
                    f"{second.source}: two lines make up a pair in this file, and these differ in format: "
                    f"{first.source} has the fields {sorted(first.fields)}, this one {sorted(second.fields)}"
                )
            return both[0].parse_two(first, second, self._how)
        record = self._with_fields(record)
        format = self._format(record)
        if format.parse is None:
            raise DataError(
                f"{record.source}: one line of a pair (fields {sorted(record.fields)}), in a file whose first "
                f"record is a whole one; give the two kinds in files of their own"
            )
        return format.parse(record, self._how)

    def _with_fields(self, record: Record) -> Record:
        fields = {name: value for name, value in record.fields.items() if value is not None}
        return dataclasses.replace(record, fields=fields)

    def _format(self, record: Record) -> Format:
        present = {name for name, value in record.fields.items() if value is not None}
        for format in self._formats:
            if present.issuperset(format.fields):
                return format
        raise DataError(
            f"{record.source}: fits no format: it has the fields {sorted(present)}{self._expected(present)}"
        )

    def _expected(self, present: set[str]) -> str:
        """What the record lacks for the format it comes nearest to, and all formats."""

        def likeness(format: Format) -> float:
            found = [1.0 if name in present else 0.5 * bool(nearest(name, present)) for name in format.fields]
            return sum(found) / len(found)

        best = max(self._formats, key=likeness)
        hints = [f'"{name}"{nearest(name, present)}' for name in best.fields if name not in present]
        near = f"; for {best.name!r} it lacks {', '.join(hints)}" if likeness(best) else ""
        known = "; ".join(f"{format.name!r}: {', '.join(format.fields)}" for format in self._formats)
        return f"{near}. Formats of {self._kind.__name__}: {known}"


@dataclasses.dataclass(frozen=True)
class Two(Record):
    """Two adjacent records that make up one row; the fields are empty."""

    first: Record = dataclasses.field(kw_only=True)
    second: Record = dataclasses.field(kw_only=True)


class Adjacent:
    """A table of which rows 2k and 2k + 1 make up row k.

    Raises:
      DataError: an odd number of rows.
    """

    def __init__(self, table: Table) -> None:
        if len(table) % 2:
            raise DataError(
                f"{table[len(table) - 1].source}: the last of {len(table)} lines has no partner; two adjacent lines "
                f"make up a pair: remove it, or add the missing line"
            )
        self._table = table

    def __len__(self) -> int:
        return len(self._table) // 2

    def __getitem__(self, row: int) -> Two:
        first, second = self._table[2 * row], self._table[2 * row + 1]
        return Two({}, first.source, first=first, second=second)
