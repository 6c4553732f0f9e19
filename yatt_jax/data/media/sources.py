"""Media parts of messages: what a record says about an image, an audio or a video, without reading it."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from yatt_jax.data.config import DataError
from yatt_jax.data.records import json_type

Kind: TypeAlias = Literal["image", "audio", "video"]
KINDS: tuple[Kind, ...] = ("image", "audio", "video")
Form: TypeAlias = Literal["path", "bytes", "base64", "data", "url", "frames"]

_TYPES: Mapping[str, Kind] = {
    **{kind: kind for kind in KINDS},
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
_KEYS = ("bytes", "base64", "data", "path", "url")  # of a part, or of the object under its kind; the first counts
_FORMS = "a path, bytes, base64, a data URL or an address"
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*", re.ASCII)
# How base64 of PNG, JPEG, RIFF (WebP, WAV), FLAC and GIF begins; what begins so and is so long is no path.
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR", "ZkxhQ", "R0lGOD")
_SHORTEST = 64


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one image, audio or video comes from.

    Attributes:
      kind: what it is.
      form: what ``value`` is: a path, bytes, base64, a data URL, an address, or the sources of a video's frames.
      value: as the record has it.
      folder: what paths are relative to.
      where: file, line and place in the record, that messages begin with.
      fps: frames of a video a second; None where the record does not say.
    """

    kind: Kind
    form: Form
    value: str | bytes | tuple[Source, ...] = dataclasses.field(repr=False)
    folder: str
    where: str = dataclasses.field(compare=False)
    fps: float | None = None

    @property
    def name(self) -> str:
        """The path or address; what it is instead for media inside the record."""
        if self.form in ("path", "url"):
            return str(self.value)
        if self.form == "frames":
            return f"{len(self.value)} frames"
        return f"{self.kind} in the record"

    @property
    def place(self) -> str:
        """What messages begin with: the record, and the file where there is one."""
        return f"{self.where} ({self.name})"


def is_media(part: Any) -> bool:
    """Whether a part of a message is an image, an audio or a video by its type."""
    return isinstance(part, dict) and part.get("type") in _TYPES


def parse_media(part: Mapping[str, Any], folder: str, where: str) -> Source:
    """What a media part says.

    Its type is "image", "audio" or "video" (or "image_url", "input_image", "audio_url", "input_audio", "video_url").
    The medium is under the same name, or under "path", "bytes", "base64", "data" or "url"; or under the same name is
    an object that has one of these. A video is also a list of its frames; "fps" says how many of them are a second.

    Args:
      part: as read.
      folder: what paths are relative to.
      where: the place in the record, that messages begin with.

    Raises:
      DataError: nothing there, or of a wrong type.
    """
    name = str(part["type"])
    kind = _TYPES[name]
    found = {key: part[key] for key in (name, kind, *_KEYS) if part.get(key) is not None}
    if not found:
        raise DataError(f'{where}: expected {_FORMS} under "{kind}", found the fields {sorted(part)}')
    key, value = next(iter(found.items()))
    return _source(kind, key, value, folder, f"{where}, {key}", _fps(part, kind, where))


def _source(kind: Kind, key: str, value: Any, folder: str, where: str, fps: float | None) -> Source:
    if isinstance(value, dict):
        inside = [name for name in _KEYS if value.get(name) is not None]
        if not inside:
            raise DataError(f"{where}: expected one of {list(_KEYS)}, found the fields {sorted(value)}")
        return _source(kind, inside[0], value[inside[0]], folder, where, fps)
    if isinstance(value, list | tuple) and kind == "video":
        if not value:
            raise DataError(f"{where}: a video without frames")
        frames = tuple(
            _source("image", "image", v, folder, f"{where}, frame {i + 1}", None) for i, v in enumerate(value)
        )
        return Source(kind, "frames", frames, folder, where, fps)
    if isinstance(value, bytes | bytearray):
        return Source(kind, "bytes", bytes(value), folder, where, fps)
    if not isinstance(value, str):
        raise DataError(f"{where}: expected {_FORMS}, found {json_type(value)}")
    if not value.strip():
        raise DataError(f"{where}: empty; expected {_FORMS}")
    return Source(kind, _form(key, value), value, folder, where, fps)


def _form(key: str, value: str) -> Form:
    if key == "path":
        return "path"
    if value[:5].lower() == "data:":
        return "data"
    if re.match(r"https?://", value, re.IGNORECASE):
        return "url"
    if key in ("base64", "data"):
        return "base64"
    likely = len(value) >= _SHORTEST and value.startswith(_BEGINNINGS) and _BASE64.fullmatch(value)
    return "base64" if likely else "path"


def _fps(part: Mapping[str, Any], kind: Kind, where: str) -> float | None:
    fps = part.get("fps") if kind == "video" else None
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise DataError(f'{where}: expected a positive number under "fps", found {fps!r}')
    return float(fps)


def from_base64(text: str, place: str) -> bytes:
    """The bytes of base64 text; blanks are passed over.

    Raises:
      DataError: it is none.
    """
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise DataError(f"{place}: not base64, or cut off: {error}") from error
