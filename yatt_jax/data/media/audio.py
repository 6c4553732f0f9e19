"""Decoding of audio: WAV and FLAC, by their content, to one channel at the model's sampling rate."""

from __future__ import annotations

import dataclasses
import io
import math
import struct
from typing import Any

import numpy as np
from jaxtyping import Float

from yatt_jax.data.config import DataError
from yatt_jax.errors import InputError

_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC")
# Other files never reach the decoders of other formats.
_BEGINNINGS = (b"RIFF", b"RF64", b"fLaC")
_CHANNELS = 8
_RATES = (1_000, 384_000)


@dataclasses.dataclass(frozen=True)
class Longest:
    """The longest audio that is decoded.

    Attributes:
      seconds: its length.
      why: what sets it, for messages.
    """

    seconds: float
    why: str = "data.media.max_seconds is"


def decode_audio(content: bytes, place: str, longest: Longest, rate: int) -> Float[np.ndarray, "S"]:
    """Samples from -1 to 1; several channels are averaged, another rate is resampled.

    Args:
      content: the file.
      place: of the record and file, that messages begin with.
      longest: the greatest length, checked in the header.
      rate: samples a second that are wanted.

    Raises:
      DataError: neither WAV nor FLAC, too long, cut off, damaged, without samples, or with samples that are no numbers.
    """
    soundfile = _soundfile()
    if not content.startswith(_BEGINNINGS):
        raise DataError(f"{place}: neither WAV nor FLAC by its content{_seen(content)}")
    _check_wav(content, place, longest)
    try:
        file = soundfile.SoundFile(io.BytesIO(content))
    except (soundfile.SoundFileError, RuntimeError, OSError) as error:
        raise DataError(f"{place}: damaged: {error}") from error
    with file:
        if file.format not in _FORMATS:
            raise DataError(f"{place}: neither WAV nor FLAC, but {file.format}; convert it")
        low, high = _RATES
        if not low <= file.samplerate <= high or not 1 <= file.channels <= _CHANNELS:
            raise DataError(
                f"{place}: {file.samplerate} samples a second and {file.channels} channels; read are {low:,} to "
                f"{high:,} and 1 to {_CHANNELS}"
            )
        _check_length(file.frames / file.samplerate, place, longest)
        if file.frames == 0:
            raise DataError(f"{place}: holds no samples")
        try:
            samples = file.read(file.frames, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, RuntimeError) as error:
            raise DataError(f"{place}: the audio is damaged: {error}") from error
        if len(samples) < file.frames:
            raise DataError(f"{place}: cut off: its header tells {file.frames} samples, there are {len(samples)}")
        own = file.samplerate
    if not np.isfinite(samples).all():
        raise DataError(f"{place}: holds samples that are NaN or infinite")
    return resample(samples.mean(1, dtype=np.float32), own, rate)


def resample(samples: Float[np.ndarray, "S"], own: int, wanted: int) -> Float[np.ndarray, "s"]:
    """Samples at another rate, through a low-pass filter of 20 zero crossings (a Kaiser window, beta 5).

    Args:
      samples: one channel.
      own: their rate.
      wanted: the rate of the result.
    """
    if own == wanted:
        return samples
    from scipy.signal import resample_poly

    common = math.gcd(own, wanted)
    return resample_poly(samples, wanted // common, own // common).astype(np.float32)


def encode_flac(samples: Float[np.ndarray, "S"], rate: int) -> bytes:
    """16-bit FLAC of one channel; what is beyond -1 and 1 is clipped."""
    buffer = io.BytesIO()
    _soundfile().write(buffer, np.clip(samples, -1, 1), rate, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def _check_length(seconds: float, place: str, longest: Longest) -> None:
    if seconds > longest.seconds:
        raise DataError(
            f"{place}: {seconds:,.1f} s of audio, refused without decoding: {longest.why} {longest.seconds:g}"
        )


def _check_wav(content: bytes, place: str, longest: Longest) -> None:
    """Raises where a WAV file is shorter than its header says; the decoder would read what there is and say nothing."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return
    at, rate = 12, 0
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        if name == b"fmt " and at + 24 <= len(content):
            (rate,) = struct.unpack_from("<I", content, at + 16)  # bytes a second
        if name == b"data":
            if rate:
                _check_length(size / rate, place, longest)
            if at + 8 + size > len(content):
                have = len(content) - at - 8
                raise DataError(f"{place}: cut off: its header tells {size:,} bytes of samples, there are {have:,}")
            return
        at += 8 + size + size % 2
    raise DataError(f"{place}: cut off: a WAV file without samples")


def _seen(content: bytes) -> str:
    """What a file looks like, for a message."""
    known = {
        b"OggS": "Ogg",
        b"FORM": "AIFF",
        b"ID3": "MP3",
        b"\xff\xfb": "MP3",
        b"\xff\xf3": "MP3",
        b"\x89PNG": "a PNG image",
        b"\xff\xd8\xff": "a JPEG image",
        b"version https://git-lfs": "a Git LFS pointer; fetch the file itself",
    }
    if content[4:8] == b"ftyp":
        return "; it looks like MP4; convert it"
    return next((f"; it looks like {what}" for start, what in known.items() if content.startswith(start)), "")


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the library under it is not there
        raise InputError("audio needs soundfile: pip install 'yatt_jax[media]'") from error
    return soundfile
