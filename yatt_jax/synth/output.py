"""A file of JSON lines that a long command makes batch by batch, and goes on with where it was stopped."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from yatt_jax.errors import InputError
from yatt_jax.io.config_changes import compare, shown


class Output:
    """JSON lines made of the records of a source, in order.

    While it grows, the file lies beside its place as ``NAME.partial``; what is whole of it is noted in ``NAME.made``
    after each batch, so that a command that was killed anywhere goes on without losing or repeating a line. When it is
    whole, it takes its place; ``NAME.made`` stays and says how it was made.

    Args:
      path: of the file.
      settings: whatever its lines depend on, as JSON values.
      overwrite: discard what is there.

    Attributes:
      done: records of the source that are done with.
      counts: what became of them, by name.
      whole: whether the file is whole, so that nothing is to be done.

    Raises:
      InputError: a file that is there and was made otherwise.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        self._partial, self._note = (path.with_name(path.name + ending) for ending in (".partial", ".made"))
        self._settings = json.loads(json.dumps(settings))
        self.done, self.counts, self._bytes, self.whole = 0, Counter[str](), 0, False
        path.parent.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for file in (path, self._partial, self._note):
                file.unlink(missing_ok=True)
        self._take_up()
        if not self.whole:
            with open(self._partial, "ab") as file:
                file.truncate(self._bytes)

    def _take_up(self) -> None:
        """Goes on from what is there."""
        if not self._note.exists():
            if self.path.exists():
                raise InputError(f"{self.path}: exists, and was not made here; name another file, or use --overwrite")
            return
        try:
            held = json.loads(self._note.read_text("utf-8"))
            changes = compare(held["settings"], self._settings)
            self.done, self.counts, self._bytes = held["done"], Counter(held["counts"]), held["bytes"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._note}: damaged ({error}); use --overwrite") from error
        if changes:
            raise InputError(
                f"{self.path}: was begun with other settings:\n{shown(changes)}\nname another file, or use --overwrite"
            )
        self.whole = bool(held["whole"]) and self.path.exists()
        if not self.whole and held["whole"]:  # it was ended between the two last steps of finish, or removed
            self.whole = self._partial.exists() and self._partial.stat().st_size == self._bytes
            if self.whole:
                os.replace(self._partial, self.path)
        size = self._partial.stat().st_size if self._partial.exists() else 0
        if not self.whole and size < self._bytes:
            raise InputError(f"{self._partial}: {self._bytes} bytes were written and {size} are there; use --overwrite")

    def add(self, lines: Iterable[Mapping[str, Any]], records: int, counts: Mapping[str, int] | None = None) -> None:
        """Writes what was made of the next records.

        Args:
          lines: any number of them.
          records: how many records of the source they were made of.
          counts: what became of these records, to be added up.
        """
        with open(self._partial, "ab") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._bytes = file.tell()
        self.done += records
        self.counts.update(counts or {})
        self._write(whole=False)

    def finish(self) -> None:
        """Puts the file in its place."""
        if self.whole:
            return
        self._write(whole=True)
        os.replace(self._partial, self.path)
        self.whole = True

    def _write(self, *, whole: bool) -> None:
        note = {
            "settings": self._settings,
            "done": self.done,
            "counts": dict(self.counts),
            "bytes": self._bytes,
            "whole": whole,
        }
        new = self._note.with_name(self._note.name + ".new")
        new.write_text(json.dumps(note, indent=1, ensure_ascii=False) + "\n", "utf-8")
        os.replace(new, self._note)
