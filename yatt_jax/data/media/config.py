"""What media in records may be. Importing it loads no decoder and no array library."""

from __future__ import annotations

import dataclasses

# Pillow refuses what is larger by itself, and this limit cannot be raised for one reader alone.
MOST_PIXELS = 89_478_485


@dataclasses.dataclass(frozen=True)
class MediaConfig:
    """Limits on media, and where they may come from. What exceeds one is an error of its record.

    Attributes:
      max_pixels: most pixels of an image as stored, read in its header before it is decoded, and of all frames of a
        video together.
      max_seconds: longest audio, read in its header before it is decoded. A model may take less.
      max_frames: most frames of a video.
      max_bytes: largest file, base64 text or download.
      max_items: most media in one text.
      allow_outside: let paths lead out of the folder of the file that names them.
      allow_urls: fetch ``http:`` and ``https:`` addresses.
      url_timeout_s: longest wait for an address.
      workers: threads that decode.
    """

    max_pixels: int = 16_777_216
    max_seconds: float = 30.0
    max_frames: int = 64
    max_bytes: int = 67_108_864
    max_items: int = 16
    allow_outside: bool = False
    allow_urls: bool = False
    url_timeout_s: float = 20.0
    workers: int = 4

    def __post_init__(self) -> None:
        for field in ("max_pixels", "max_frames", "max_bytes", "max_items", "workers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least 1")
        for field in ("max_seconds", "url_timeout_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"{field} = {getattr(self, field)}: must be a positive number")
        if self.max_pixels > MOST_PIXELS:
            raise ValueError(f"max_pixels = {self.max_pixels}: at most {MOST_PIXELS}, which the decoder refuses itself")
