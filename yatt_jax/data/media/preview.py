"""Videos, and small copies of media for reports."""

from __future__ import annotations

import io
from typing import Any

from yatt_jax.data.media.audio import Longest, decode_audio, encode_flac
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.fetch import fetch
from yatt_jax.data.media.images import check_frames, decode_animation, decode_image
from yatt_jax.data.media.sources import Source

FPS = 2.0  # of videos that do not say, as the processors of these families assume
_SIDE = 256  # pixels of a preview
_SECONDS = 15
_RATE = 16_000


def read_video(source: Source, limits: MediaConfig) -> tuple[list[Any], float]:
    """Frames of a video in RGB, and how many are a second.

    Raises:
      DataError: see ``MediaProcessor.item``.
    """
    if isinstance(source.value, tuple):
        frames: list[Any] = []
        pixels = 0
        check_frames(len(source.value), pixels, source.where, limits)
        for frame in source.value:
            frames.append(decode_image(fetch(frame, limits), frame.place, limits))
            pixels += frames[-1].size[0] * frames[-1].size[1]
            check_frames(len(source.value), pixels, source.where, limits)
        return frames, source.fps or FPS
    frames, fps = decode_animation(fetch(source, limits), source.place, limits)
    return frames, source.fps or fps or FPS


def make_preview(source: Source, limits: MediaConfig) -> tuple[str, bytes]:
    """A small copy for reports: an image of at most 256 pixels a side, an animation, or 15 seconds of audio.

    Returns:
      Its MIME type and its bytes.

    Raises:
      DataError: it can no longer be read.
    """
    if source.kind == "audio":
        samples = decode_audio(fetch(source, limits), source.place, Longest(limits.max_seconds), _RATE)
        return "audio/flac", encode_flac(samples[: _SECONDS * _RATE], _RATE)
    buffer = io.BytesIO()
    if source.kind == "image":
        image = decode_image(fetch(source, limits), source.place, limits)
        image.thumbnail((_SIDE, _SIDE))
        if max(image.size) <= 64:
            image.save(buffer, "PNG", optimize=True)
            return "image/png", buffer.getvalue()
        image.save(buffer, "WEBP", quality=80)
        return "image/webp", buffer.getvalue()
    frames, fps = read_video(source, limits)
    for frame in frames:
        frame.thumbnail((_SIDE // 2, _SIDE // 2))
    duration = max(1, round(1000 / fps))
    frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:], duration=duration, loop=0, quality=70)
    return "image/webp", buffer.getvalue()
