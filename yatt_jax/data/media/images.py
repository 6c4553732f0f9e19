"""Decoding of images: PNG, JPEG and WebP, by their content and not by their name."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from yatt_jax.data.config import DataError
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = ("PNG", "JPEG", "WEBP")
_MOVING = ("PNG", "WEBP", "GIF")


def open_image(content: bytes, place: str, limits: MediaConfig, formats: tuple[str, ...] = _FORMATS) -> Image.Image:
    """Reads the header of an image, and decodes nothing.

    Args:
      content: the file.
      place: of the record and file, that messages begin with.
      limits: the most pixels.
      formats: Pillow's names of those that are read.

    Raises:
      DataError: none of the formats, a damaged header, or too many pixels.
    """
    Image = _pillow()
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except Image.DecompressionBombError as error:
        raise DataError(f"{place}: refused without decoding, as data.media.max_pixels says: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise DataError(
            f"{place}: neither {', '.join(formats[:-1])} nor {formats[-1]} by its content, or damaged{_seen(content)}"
        ) from error
    except Exception as error:  # a damaged header can raise anything
        raise DataError(f"{place}: damaged: {error}") from error
    width, height = image.size
    if width * height > limits.max_pixels:
        raise DataError(
            f"{place}: {width} x {height} = {width * height:,} pixels, refused without decoding: "
            f"data.media.max_pixels is {limits.max_pixels:,}"
        )
    return image


def decode_image(content: bytes, place: str, limits: MediaConfig) -> Image.Image:
    """An image in RGB, turned as its EXIF data says.

    Transparency is dropped and CMYK converted as Pillow does it, 16-bit grey is scaled to 8 bits.

    Raises:
      DataError: see ``open_image``; data that is cut off or damaged; or an animation.
    """
    image = open_image(content, place, limits)
    frames = _frames(image, place)
    if frames > 1 and image.format in _MOVING:
        raise DataError(
            f"{place}: an animation of {frames} frames where an image is expected; save one frame of it, or give the "
            f'part the type "video"'
        )
    return _to_rgb(image, place)


def decode_animation(content: bytes, place: str, limits: MediaConfig) -> tuple[list[Image.Image], float | None]:
    """The frames of an animated PNG, WebP or GIF in RGB, and how many are a second if the file says so.

    Raises:
      DataError: see ``open_image``; more frames than ``max_frames``, or more pixels in all of them than ``max_pixels``;
        or damaged data.
    """
    if content[4:8] == b"ftyp" or content[:4] == b"\x1a\x45\xdf\xa3":
        raise DataError(
            f"{place}: a film (MP4, MOV, WebM or MKV), which is not read; save its frames as images and give their list"
        )
    image = open_image(content, place, limits, _MOVING)
    count = _frames(image, place)
    check_frames(count, count * image.size[0] * image.size[1], place, limits)
    frames, times = [], []
    for i in range(count):
        try:
            image.seek(i)
            # A copy: the next frame is drawn over this one.
            frames.append(_to_rgb(image.copy(), place))
        except DataError:
            raise
        except Exception as error:  # a damaged frame can raise anything
            raise DataError(f"{place}: frame {i + 1} of {count} is cut off or damaged: {error}") from error
        times.append(float(image.info.get("duration", 0) or 0))
    return frames, 1000 * count / sum(times) if sum(times) > 0 else None


def check_frames(count: int, pixels: int, place: str, limits: MediaConfig) -> None:
    """Raises ``DataError`` for a video of too many frames, or too many pixels in all of them."""
    if count > limits.max_frames:
        raise DataError(f"{place}: {count} frames, and data.media.max_frames is {limits.max_frames}")
    if pixels > limits.max_pixels:
        raise DataError(
            f"{place}: {pixels:,} pixels in {count} frames, and data.media.max_pixels is {limits.max_pixels:,}"
        )


def _frames(image: Image.Image, place: str) -> int:
    """How many frames a file has; telling them may read all of it."""
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception as error:  # a damaged frame can raise anything
        raise DataError(f"{place}: damaged: {error}") from error


def _to_rgb(image: Image.Image, place: str) -> Image.Image:
    from PIL import Image, ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
            grey = np.asarray(image).astype(np.int64)
            image = Image.fromarray(np.clip(grey >> 8, 0, 255).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:  # damaged data can raise anything, also from within a codec
        raise DataError(f"{place}: the image is cut off or damaged: {error}") from error


def _seen(content: bytes) -> str:
    """What a file looks like, for a message."""
    known = {
        b"GIF8": "GIF",
        b"BM": "BMP",
        b"II*\0": "TIFF",
        b"MM\0*": "TIFF",
        b"%PDF": "PDF",
        b"fLaC": "FLAC audio",
        b"\x1f\x8b": "gzip",
        b"PK": "a zip archive",
        b"version https://git-lfs": "a Git LFS pointer; fetch the file itself",
        b"<": "HTML or SVG text",
    }
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        return "; it looks like WAV audio"
    return next((f"; it looks like {what}" for start, what in known.items() if content.startswith(start)), "")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("images need Pillow: pip install 'yatt_jax[media]'") from error
    return Image
