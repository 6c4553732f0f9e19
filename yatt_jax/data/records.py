"""Readers: every accepted file as a table of records with random access.

Large files stay on disk: JSON lines are found through an index of line offsets, Arrow data is memory-mapped, and
compressed or columnar files are unpacked once into a temporary file. Only .json is read whole.
"""

from __future__ import annotations

import array
import bisect
import codecs
import dataclasses
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from yatt_jax.data.config import DataError
from yatt_jax.data.paths import expand


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file.

    Attributes:
      fields: its columns.
      source: "file:line", or "file:row N" (from 1) in formats without lines; messages begin with it.
      folder: what paths in it are relative to: the folder that the file is in, or the data set's own.
    """

    fields: dict[str, Any]
    source: str
    folder: str = ""


class Table(Protocol):
    """Records by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Record:
        """Record ``row``, from 0.

        Raises:
          DataError: the record cannot be read; the message gives file, line and column.
        """
        ...


def open_table(path: str) -> Table:
    """Opens the records of a file, of every file that matches a pattern, or of a saved data set.

    Args:
      path: see ``yatt_jax.data.paths.expand``.

    Raises:
      DataError: missing, empty, damaged or unknown files.
    """
    tables = [_open(p) for p in expand(path)]
    return tables[0] if len(tables) == 1 else Joined(tables)


def _open(path: Path) -> Table:
    name = path.name.lower()
    try:
        if path.is_dir():
            table: Table = _saved_dataset(path)
        elif name.endswith((".jsonl", ".jsonl.gz")):
            table = JsonLines(path)
        elif name.endswith((".json", ".json.gz")):
            table = _json(path)
        elif name.endswith(".parquet"):
            table = _parquet(path)
        else:
            table = _arrow([path], str(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged, or not gzip: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not len(table):
        raise DataError(f"{path}: holds no records")
    return table


class Joined:
    """Several tables as one, in order."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._starts = [0]
        for table in tables:
            self._starts.append(self._starts[-1] + len(table))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> Record:
        which = bisect.bisect_right(self._starts, row) - 1
        return self._tables[which][row - self._starts[which]]


class Rows:
    """Records held in memory."""

    def __init__(self, path: Path, rows: Sequence[Any], lines: Sequence[int]) -> None:
        self._path, self._rows, self._lines = path, rows, lines

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Record:
        return _record(self._rows[row], f"{self._path}:{self._lines[row]}", self._path)


class JsonLines:
    """A file with one JSON object a line; blank lines are passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array.array("q")  # offset of each record; one more for the end
        self._blanks = array.array("q")  # for each blank line, the number of the record after it
        if path.name.lower().endswith(".gz"):
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the table
            with gzip.open(path) as packed:
                self._index(packed, self._file)
            self._file.flush()
        else:
            self._file = open(path, "rb")  # noqa: SIM115
            self._index(self._file, None)

    def _index(self, lines: Iterator[bytes] | IO[bytes], copy: IO[bytes] | None) -> None:
        offset = 0
        for line in lines:
            if copy:
                copy.write(line)
            if (line if offset else line.removeprefix(codecs.BOM_UTF8)).strip():
                self._starts.append(offset)
            else:
                self._blanks.append(len(self._starts))
            offset += len(line)
        self._starts.append(offset)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> Record:
        line = row + 1 + bisect.bisect_right(self._blanks, row)
        start, end = self._starts[row], self._starts[row + 1]
        raw = os.pread(self._file.fileno(), end - start, start)
        if row == 0:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        source = f"{self._path}:{line}"
        try:
            return _record(json.loads(raw.decode("utf-8").rstrip()), source, self._path)
        except UnicodeDecodeError as error:
            raise DataError(f"{source}: not UTF-8 at byte {error.start + 1} of the line: {error.reason}") from error
        except json.JSONDecodeError as error:
            hint = "; each line holds one whole JSON object (name a file that is one JSON document .json)"
            raise DataError(f"{source}, column {error.colno}: malformed JSON: {error.msg}{hint}") from error


def _record(value: Any, source: str, path: Path) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{source}: expected an object with named fields, found {json_type(value)}")
    return Record(value, source, str(path.parent))


def json_type(value: Any) -> str:
    """The type of a value in words a JSON file's author knows."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    if type(value) in names:
        return names[type(value)]
    return "a number" if isinstance(value, int | float) else type(value).__name__


def _json(path: Path) -> Table:
    """A JSON document: a list, or an object with the list under "data". JSON lines under this name are read too."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    with opener(path, "rb") as file:
        raw = file.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start + 1}: {error.reason}") from error
    if not text.strip():
        raise DataError(f"{path}: empty file")
    try:
        start = _find_list(text)
        if start is None:
            if _is_json_lines(text):
                return JsonLines(path)
            raise DataError(f'{path}: expected a list of records, or an object with the list under "data"')
        rows, offsets = _elements(text, start)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}, column {error.colno}: malformed JSON: {error.msg}") from error
    lines, line, last = [], 1, 0
    for offset in offsets:
        line += text.count("\n", last, offset)
        last = offset
        lines.append(line)
    return Rows(path, rows, lines)


_decoder = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _expect(text: str, at: int, wanted: str) -> str:
    if at >= len(text) or text[at] not in wanted:
        raise json.JSONDecodeError(f"Expecting {' or '.join(repr(c) for c in wanted)}", text, min(at, len(text)))
    return text[at]


def _find_list(text: str) -> int | None:
    """Offset of the document's list; None where there is none."""
    at = _skip(text, 0)
    if _expect(text, at, "[{") == "[":
        return at
    at = _skip(text, at + 1)
    while at < len(text) and text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        at = _skip(text, at)
        _expect(text, at, ":")
        at = _skip(text, at + 1)
        if key == "data" and at < len(text) and text[at] == "[":
            return at
        _, at = _decoder.raw_decode(text, at)
        at = _skip(text, at)
        if _expect(text, at, ",}") == ",":
            at = _skip(text, at + 1)
    _expect(text, at, "}")
    return None


def _elements(text: str, start: int) -> tuple[list[Any], list[int]]:
    """The elements of the list that starts at an offset, with their offsets; the rest of the document is checked."""
    json.loads(text)  # finds faults anywhere, with their place
    rows: list[Any] = []
    offsets: list[int] = []
    at = _skip(text, start + 1)
    while text[at] != "]":
        value, end = _decoder.raw_decode(text, at)
        rows.append(value)
        offsets.append(at)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return rows, offsets


def _is_json_lines(text: str) -> bool:
    """Whether a document without a list is in fact a record a line."""
    first = text.lstrip().split("\n", 1)[0]
    try:
        return isinstance(json.loads(first), dict)
    except json.JSONDecodeError:
        return False


class ArrowRows:
    """Arrow record batches, as a rule memory-mapped."""

    def __init__(self, name: str, batches: Sequence[Any]) -> None:
        self._name, self._batches = name, batches
        self._folder = str(Path(name) if Path(name).is_dir() else Path(name).parent)
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> Record:
        which = bisect.bisect_right(self._starts, row) - 1
        (fields,) = self._batches[which].slice(row - self._starts[which], 1).to_pylist()
        # A column is there for every row; null says that this record lacks it.
        fields = {key: value for key, value in fields.items() if value is not None}
        return Record(fields, f"{self._name}:row {row + 1}", self._folder)


def _arrow(paths: Sequence[Path], name: str) -> ArrowRows:
    """Arrow files, in the stream or the file layout."""
    import pyarrow as pa

    batches = []
    for path in paths:
        try:
            with pa.memory_map(str(path)) as mapped:
                in_file_layout = mapped.read(6) == b"ARROW1"
                mapped.seek(0)
                if in_file_layout:
                    reader = pa.ipc.open_file(mapped)
                    batches += [reader.get_batch(i) for i in range(reader.num_record_batches)]
                else:
                    batches += list(pa.ipc.open_stream(mapped))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be read as Arrow: {error}") from error
    return ArrowRows(name, [batch for batch in batches if batch.num_rows])


def _parquet(path: Path) -> ArrowRows:
    """A Parquet file, unpacked once: its row groups would be decoded anew at each random access."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file, tempfile.NamedTemporaryFile(suffix=".arrow") as spool:
            with pa.OSFile(spool.name, "wb") as sink, pa.ipc.new_stream(sink, file.schema_arrow) as writer:
                for batch in file.iter_batches(batch_size=4096):
                    writer.write_batch(batch)
            return _arrow([Path(spool.name)], str(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def _saved_dataset(folder: Path) -> ArrowRows:
    """A folder written by ``datasets.Dataset.save_to_disk``."""
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'}: damaged: {error!r}") from error
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder}: state.json names files that are not there: {missing}")
    return _arrow(files, str(folder))
