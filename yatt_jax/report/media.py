"""Media beside completions: small copies in the run directory, and how the page shows them.

Process 0 keeps its copies in ``media``, process p > 0 in ``media.p``, named after their content: a prompt that is
answered again and again is there once. Of training prompts the copies of the last logged step are kept alone.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from yatt_jax.errors import InputError
from yatt_jax.report.rundir import RunDir, replace_bytes
from yatt_jax.report.text import safe
from yatt_jax.types import MediaItem

Entry: TypeAlias = dict[str, str]

PAGE_BYTES = 8_000_000  # of media in a section of the page
_ENDINGS = {"image/png": "png", "image/webp": "webp", "audio/flac": "flac"}
_TYPES = {ending: mime for mime, ending in _ENDINGS.items()}
_NAME = re.compile(r"media(\.\d+)?/[0-9a-f]+\.(png|webp|flac)", re.ASCII)


class MediaFolder:
    """Keeps copies of the media of logged prompts.

    Args:
      run: the run directory.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._name = "media" if run.process == 0 else f"media.{run.process}"
        self._held_out: set[str] = set()
        self._last: set[str] = set()

    def keep(self, split: Literal["train", "eval"], media: Iterable[Sequence[MediaItem]]) -> list[list[Entry]]:
        """Keeps copies of the media of a step's prompts.

        Args:
          split: what they are of.
          media: of each prompt.

        Returns:
          Of each medium its kind, and its file relative to the run directory where a copy could be made.

        Raises:
          RunDirError: a file cannot be written.
        """
        files: dict[str, str] = {}
        entries = [[self._entry(item, files) for item in items] for items in media]
        found = {name for name in files.values() if name}
        if split == "eval":
            self._held_out |= found
        else:
            for name in self._last - found - self._held_out:
                (self._run.path / name).unlink(missing_ok=True)
            self._last = found
        return entries

    def _entry(self, item: MediaItem, files: dict[str, str]) -> Entry:
        if item.digest not in files:
            files[item.digest] = self._file(item)
        name = files[item.digest]
        return {"kind": item.kind, "file": name} if name else {"kind": item.kind}

    def _file(self, item: MediaItem) -> str:
        """Name of the copy, made if it is not there yet; nothing where the medium can no longer be read."""
        for ending in _TYPES:
            name = f"{self._name}/{item.digest}.{ending}"
            if (self._run.path / name).is_file():
                return name
        try:
            mime, content = item.preview()
        except InputError:
            return ""
        name = f"{self._name}/{item.digest}.{_ENDINGS[mime]}"
        replace_bytes(self._run.path / name, content)
        return name


class Shown:
    """Media of one section of the page, as far as there is room for them.

    Args:
      folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._room = folder, PAGE_BYTES

    def of(self, record: dict[str, Any]) -> str:
        """The media of a logged completion as HTML; nothing where it has none."""
        entries = record.get("media")
        if not isinstance(entries, list):
            return ""
        made = [self._element(entry) for entry in entries if isinstance(entry, dict)]
        return f'<div class="media">{"".join(made)}</div>' if made else ""

    def _element(self, entry: dict[str, Any]) -> str:
        kind, name = str(entry.get("kind", "media")), entry.get("file")
        content = self._read(name) if isinstance(name, str) and _NAME.fullmatch(name) else b""
        if not content:
            return f'<span class="soft small">[{safe(kind)}]</span>'
        ending = str(name).rpartition(".")[2]
        url = f"data:{_TYPES[ending]};base64,{base64.b64encode(content).decode()}"
        if ending == "flac":
            return f'<audio controls preload="none" src="{url}"></audio>'
        drawn = ' class="pixels"' if ending == "png" else ""  # only small images are kept so
        return f'<img{drawn} alt="{safe(kind)}" src="{url}">'

    def _read(self, name: str) -> bytes:
        """A copy's bytes, taken off the room; nothing where they are not there or there is no room."""
        try:
            content = (self._folder / name).read_bytes()
        except OSError:
            return b""
        if len(content) > self._room:
            return b""
        self._room -= len(content)
        return content
