"""The bytes of media: from files below the record's folder, from the record itself, or, if allowed, from addresses."""

from __future__ import annotations

import os
import stat
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from yatt_jax.data.config import DataError
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.sources import Source, from_base64


def fetch(source: Source, limits: MediaConfig) -> bytes:
    """The bytes of an image, an audio or an animation.

    Args:
      source: not of frames.
      limits: what is allowed.

    Raises:
      DataError: nothing there, too large, empty, or not allowed; the message begins with record and file.
    """
    value = source.value
    if isinstance(value, bytes):
        content = value
        _check_size(len(content), source, limits)
    elif not isinstance(value, str):
        raise DataError(f"{source.place}: a list of frames, where one {source.kind} is expected")
    elif source.form == "path":
        content = _read_file(value, source, limits)
    elif source.form == "url":
        content = _download(value, source, limits)
    else:
        _check_size(len(value) * 3 // 4, source, limits)
        content = _read_data_url(value, source) if source.form == "data" else from_base64(value, source.place)
    if not content:
        raise DataError(f"{source.place}: empty, 0 bytes")
    return content


def resolve(path: str, source: Source, limits: MediaConfig) -> Path:
    """The file that a path names, symbolic links followed.

    Raises:
      DataError: no regular file there, or one that is not below the folder.
    """
    folder = Path(source.folder).resolve()
    try:
        found = (folder / path).resolve()
        if not limits.allow_outside and not found.is_relative_to(folder):
            raise DataError(
                f"{source.place}: leads out of {str(folder)!r}, the folder of the file that names it; move the media "
                f"there, or set data.media.allow_outside"
            )
        mode = found.stat().st_mode
    except FileNotFoundError as error:
        raise DataError(f"{source.place}: no such file in {str(folder)!r}") from error
    except (OSError, ValueError, RuntimeError) as error:  # names with a null character, loops of links
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{source.place}: cannot be read: {reason}") from error
    if not stat.S_ISREG(mode):
        raise DataError(f"{source.place}: not a regular file")
    return found


def _read_file(path: str, source: Source, limits: MediaConfig) -> bytes:
    found = resolve(path, source, limits)
    try:
        with open(found, "rb") as file:
            _check_size(os.fstat(file.fileno()).st_size, source, limits)
            content = file.read(limits.max_bytes + 1)
    except OSError as error:
        raise DataError(f"{source.place}: cannot be read: {error.strerror or error}") from error
    _check_size(len(content), source, limits)
    return content


def _read_data_url(url: str, source: Source) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise DataError(f'{source.place}: a data URL without a comma; expected "data:TYPE;base64,..."')
    if head.lower().endswith(";base64"):
        return from_base64(urllib.parse.unquote(body), source.place)
    return urllib.parse.unquote_to_bytes(body)


def _download(url: str, source: Source, limits: MediaConfig) -> bytes:
    if not limits.allow_urls:
        raise DataError(
            f"{source.place}: an address, and none is fetched; save the media beside the data, or set "
            f"data.media.allow_urls"
        )
    # Only handlers for these two schemes: a redirection cannot lead to a local file.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    try:
        with opener.open(url, timeout=limits.url_timeout_s) as answer:
            content = answer.read(limits.max_bytes + 1)
    except urllib.error.HTTPError as error:
        raise DataError(f"{source.place}: the server answered {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{source.place}: cannot be fetched: {getattr(error, 'reason', None) or error}") from error
    _check_size(len(content), source, limits)
    return content


def _check_size(size: int, source: Source, limits: MediaConfig) -> None:
    if size > limits.max_bytes:
        raise DataError(
            f"{source.place}: more than data.media.max_bytes = {limits.max_bytes:,} bytes; shrink it or raise the limit"
        )
