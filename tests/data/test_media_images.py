"""Decoding of images: what every kind of file becomes, and how the broken ones are refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.data.media_files import WHERE, picture, pixels, png_header, saved, sound, tone
from yatt_jax.data.config import DataError
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.images import decode_animation, decode_image

LIMITS = MediaConfig()


def decode(content: bytes, max_pixels: int = LIMITS.max_pixels) -> np.ndarray:
    return np.asarray(decode_image(content, WHERE, MediaConfig(max_pixels=max_pixels)))


def test_lossless_formats_give_their_pixels():
    for content in (saved(picture()), saved(picture(), "WEBP", lossless=True)):
        np.testing.assert_array_equal(decode(content), pixels(40, 30))


def test_jpeg():
    smooth = Image.fromarray(np.indices((32, 48)).sum(0).astype(np.uint8)).convert("RGB")
    for options in ({}, {"progressive": True}, {"subsampling": 2}):
        assert np.abs(decode(saved(smooth, "JPEG", quality=95, **options)).astype(int) - np.asarray(smooth)).max() < 4


def test_modes():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    three = np.repeat(grey[..., None], 3, 2)
    np.testing.assert_array_equal(decode(saved(Image.fromarray(grey))), three)
    np.testing.assert_array_equal(decode(saved(Image.fromarray(grey > 100))), 255 * (three > 100))
    palette = picture(16, 16).quantize(8)
    np.testing.assert_array_equal(decode(saved(palette)), np.asarray(palette.convert("RGB")))
    # Transparency is dropped, as transformers' processors drop it.
    clear = Image.fromarray(np.concatenate([pixels(16, 16), grey[..., None]], 2))
    np.testing.assert_array_equal(decode(saved(clear)), pixels(16, 16))


def test_16_bit_grey_is_scaled_and_not_clipped():
    deep = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    got = decode(saved(Image.fromarray(deep)))
    np.testing.assert_array_equal(got, np.repeat(np.arange(256).reshape(16, 16, 1), 3, 2))


def test_cmyk_is_converted():
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    got = decode(saved(cyan, "JPEG", quality=100))
    assert np.abs(got.reshape(-1, 3).mean(0) - [0, 255, 255]).max() < 4


def test_exif_orientation_turns_the_image():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned = decode(saved(picture(), "PNG", exif=exif))
    np.testing.assert_array_equal(turned, np.rot90(pixels(40, 30), -1))


def test_the_content_counts_and_not_the_name(tmp_path):
    from yatt_jax.data.media.fetch import fetch
    from yatt_jax.data.media.sources import parse_media

    (tmp_path / "a.png").write_bytes(saved(picture(), "WEBP", lossless=True))
    source = parse_media({"type": "image", "image": "a.png"}, str(tmp_path), WHERE)
    np.testing.assert_array_equal(np.asarray(decode_image(fetch(source, LIMITS), source.place, LIMITS)), pixels(40, 30))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not an image at all", "neither PNG, JPEG nor WEBP by its content, or damaged$"),
        (saved(picture(), "GIF"), "it looks like GIF"),
        (saved(picture(), "BMP"), "it looks like BMP"),
        (saved(picture(), "TIFF"), "it looks like TIFF"),
        (sound(tone(0.1)), "it looks like WAV audio"),
        (b"<svg></svg>", "it looks like HTML or SVG text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (saved(picture())[:20], "neither|damaged"),
        (saved(picture())[:-200], "the image is cut off or damaged"),
        (saved(picture(), "JPEG")[:-200], "the image is cut off or damaged"),
        (saved(picture(), "WEBP")[:-200], "neither|damaged"),
        (saved(picture(), "WEBP")[:60], "neither|damaged"),
    ],
    # Encoders write times into files: names of tests must be the same in every process.
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_what_is_broken_is_refused(content, message):
    with pytest.raises(DataError, match=f"^{WHERE}: .*({message})"):
        decode(content)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_every_cut_of_a_file_is_an_error_or_the_image(form):
    whole = saved(picture(12, 12), form)
    refused = 0
    for end in range(1, len(whole) - 12, 7):
        try:
            # What is lacking may be no more than an end marker.
            np.testing.assert_array_equal(decode(whole[:end]), decode(whole))
        except DataError:
            refused += 1
    assert refused >= len(range(1, len(whole) - 12, 7)) - 1


def test_bombs_are_refused_without_decoding():
    for size, message in (
        ((30_000, 30_000), "refused without decoding.*data.media.max_pixels"),
        ((2**31 - 1, 2**31 - 1), "data.media.max_pixels|damaged"),
        ((10_000, 3_000), r"10000 x 3000 = 30,000,000 pixels, refused.*max_pixels is 16,777,216"),
    ):
        with pytest.raises(DataError, match=message):
            decode(png_header(*size))
    with pytest.raises(DataError, match=r"max_pixels is 1,199"):
        decode(saved(picture()), max_pixels=1199)
    assert decode(saved(picture()), max_pixels=1200).shape == (30, 40, 3)


def animation(form: str, count: int = 3, duration: int = 50) -> bytes:
    frames = [picture(seed=i) for i in range(count)]
    options = {"lossless": True} if form == "WEBP" else {}
    return saved(frames[0], form, save_all=True, append_images=frames[1:], duration=duration, **options)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_animations_are_videos_and_not_images(form):
    with pytest.raises(DataError, match=r'an animation of 3 frames where an image is expected.*type "video"'):
        decode(animation(form))
    frames, fps = decode_animation(animation(form), WHERE, LIMITS)
    assert fps == pytest.approx(20)
    for i, frame in enumerate(frames):
        np.testing.assert_array_equal(np.asarray(frame), pixels(40, 30, i))


def test_other_animations():
    frames, fps = decode_animation(animation("GIF"), WHERE, LIMITS)
    assert (len(frames), fps) == (3, pytest.approx(20))
    frames, fps = decode_animation(saved(picture()), WHERE, LIMITS)  # one frame that does not say how long it lasts
    assert (len(frames), fps) == (1, None)
    with pytest.raises(DataError, match=r"3 frames, and data.media.max_frames is 2"):
        decode_animation(animation("GIF"), WHERE, MediaConfig(max_frames=2))
    with pytest.raises(DataError, match=r"cut off or damaged"):
        decode_animation(animation("PNG")[:-2000], WHERE, LIMITS)
    with pytest.raises(DataError, match=r"3,600 pixels in 3 frames, and data.media.max_pixels is 3,599"):
        decode_animation(animation("GIF"), WHERE, MediaConfig(max_pixels=3599))
    bomb = bytearray(animation("GIF"))
    second = bomb.index(b"\x2c", bomb.index(b"\x21\xf9", bomb.index(b"\x21\xf9") + 8))
    bomb[second + 1 : second + 9] = b"\xff" * 8  # the second frame says that it is 65,535 pixels wide and high
    with pytest.raises(DataError, match=rf"^{WHERE}: .*damaged: .*(exceeds limit|bomb)"):
        decode_animation(bytes(bomb), WHERE, LIMITS)
    with pytest.raises(DataError, match=r"a film .* is not read; save its frames"):
        decode_animation(b"\0\0\0\x20ftypisom" + bytes(50), WHERE, LIMITS)


def test_several_pictures_in_a_jpeg_are_its_first():
    buffer = io.BytesIO()
    picture().save(buffer, "MPO", save_all=True, append_images=[picture(seed=1)])
    assert decode(buffer.getvalue()).shape == (30, 40, 3)
