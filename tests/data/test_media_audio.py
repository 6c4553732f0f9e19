"""Decoding of audio: channels, depths, rates and lengths, and how broken files are refused."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile

from tests.data.media_files import WHERE, flac_header, picture, saved, sound, tone, wav_header
from yatt_jax.data.config import DataError
from yatt_jax.data.media.audio import Longest, decode_audio, encode_flac, resample

LONGEST = Longest(30.0)


def decode(content: bytes, rate: int = 16_000, seconds: float = 30.0) -> np.ndarray:
    return decode_audio(content, WHERE, Longest(seconds), rate)


@pytest.mark.parametrize(
    ("form", "subtype", "error"),
    [
        ("WAV", "PCM_U8", 8e-3),
        ("WAV", "PCM_16", 4e-5),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "PCM_32", 1e-6),
        ("WAV", "FLOAT", 0),
        ("WAV", "DOUBLE", 0),
        ("WAV", "ULAW", 2e-2),
        ("WAVEX", "PCM_16", 4e-5),
        ("FLAC", "PCM_16", 4e-5),
        ("FLAC", "PCM_24", 1e-6),
    ],
)
def test_depths(form, subtype, error):
    got = decode(sound(tone(0.2), form=form, subtype=subtype))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, tone(0.2), atol=error)


def test_channels_are_averaged():
    left, right = tone(0.1), tone(0.1, hertz=1000)
    for form in ("WAV", "FLAC"):
        got = decode(sound(np.stack([left, right], 1), form=form))
        np.testing.assert_allclose(got, (left + right) / 2, atol=1e-4)
    six = np.stack([left, right, left, left, right, right], 1)
    np.testing.assert_allclose(decode(sound(six, subtype="FLOAT")), six.mean(1), atol=1e-6)


@pytest.mark.parametrize("rate", [8_000, 11_025, 12_345, 16_001, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_rates(rate):
    got = decode(sound(tone(0.5, rate), rate, subtype="FLOAT"))
    assert abs(len(got) - 8000) <= 1
    inside = slice(400, 7600)  # away from the ends, where the filter sees silence
    np.testing.assert_allclose(got[inside], tone(0.5)[inside], atol=2e-3)


def test_resampling_filters_what_the_lower_rate_cannot_hold():
    high = resample(tone(0.5, 48_000, 12_000), 48_000, 16_000)
    assert np.abs(high[400:-400]).max() < 1e-3
    np.testing.assert_array_equal(resample(tone(0.1), 16_000, 16_000), tone(0.1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"RIFF", "damaged: "),
        (b"fLaC" + bytes(100), "damaged: "),
        (b"RIFF" + bytes(100), "damaged: "),
        (sound(tone(0.1))[:8] + b"AVI " + bytes(100), "damaged: |neither WAV nor FLAC, but"),
        (b"nothing of the kind", "neither WAV nor FLAC"),
        (saved(picture()), "it looks like a PNG image"),
        (b"ID3" + bytes(50), "it looks like MP3"),
        (b"\0\0\0\x20ftypM4A ", "it looks like MP4"),
        (sound(tone(0.5), form="OGG", subtype="VORBIS"), "neither WAV nor FLAC by its content; it looks like Ogg"),
        (sound(tone(0.5), form="AIFF"), "it looks like AIFF"),
        (sound(tone(0.5))[:40], "cut off: a WAV file without samples|neither"),
        (sound(tone(0.5))[:-100], "cut off: its header tells 16,000 bytes of samples, there are 15,900"),
        (sound(tone(0.5), form="FLAC")[:-2000], "cut off|damaged"),
        (sound(tone(0.0)), "holds no samples"),
        (sound(np.array([0, np.nan, 1], np.float32), subtype="FLOAT"), "samples that are NaN or infinite"),
        (sound(np.array([0, np.inf], np.float32), subtype="FLOAT"), "samples that are NaN or infinite"),
        (sound(tone(0.5, 500), 500), "500 samples a second and 1 channels; read are 1,000 to 384,000 and 1 to 8"),
        (sound(np.zeros((100, 9))), "16000 samples a second and 9 channels"),
    ],
    # Encoders write times into files: names of tests must be the same in every process.
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_what_is_broken_is_refused(content, message):
    with pytest.raises(DataError, match=f"^{WHERE}: .*({message})"):
        decode(content)


def test_long_audio_is_refused_by_its_header():
    hours = 36_000
    for content in (wav_header(hours), flac_header(hours)):
        assert len(content) < 1000
        with pytest.raises(
            DataError, match=r"36,000\.0 s of audio, refused without decoding: data.media.max_seconds is 30"
        ):
            decode(content)
    with pytest.raises(DataError, match=r"31\.0 s of audio.*the most that the model takes is 30"):
        decode_audio(wav_header(31), WHERE, Longest(30, "the most that the model takes is"), 16_000)
    assert len(decode(sound(tone(0.5)), seconds=0.5)) == 8000
    with pytest.raises(DataError, match=r"refused without decoding"):
        decode(sound(tone(0.51)), seconds=0.5)


def test_headers_that_promise_more_than_there_is():
    with pytest.raises(DataError, match=r"cut off: its header tells 640,000 bytes of samples, there are 200"):
        decode(wav_header(20))
    with pytest.raises(DataError, match=r"cut off|damaged"):
        decode(flac_header(20))


def test_a_streamed_wav_is_refused():
    whole = bytearray(sound(tone(0.1)))
    whole[40:44] = struct.pack("<I", 2**32 - 1)
    with pytest.raises(DataError, match=r"refused without decoding|cut off"):
        decode(bytes(whole))


def test_chunks_before_the_samples():
    whole = sound(tone(0.1))
    extra = b"LIST" + struct.pack("<I", 5) + b"abcde\0"
    content = b"RIFF" + struct.pack("<I", len(whole) - 8 + len(extra)) + whole[8:12] + extra + whole[12:]
    np.testing.assert_array_equal(decode(content), decode(whole))


def test_every_cut_of_a_file_is_an_error():
    for form in ("WAV", "FLAC"):
        whole = sound(tone(0.05), form=form)
        for end in range(1, len(whole) - 8, 29):
            with pytest.raises(DataError, match=WHERE):
                decode(whole[:end])


def test_encoding():
    samples = np.concatenate([tone(0.1), [2.0, -2.0]]).astype(np.float32)
    back, rate = soundfile.read(io.BytesIO(encode_flac(samples, 16_000)), dtype="float32")
    assert rate == 16_000
    np.testing.assert_allclose(back, np.clip(samples, -1, 1), atol=5e-5)
