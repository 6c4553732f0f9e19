"""Files with bytes changed, lost and added at random: decoders refuse them with the record's name, or read them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.data.media_files import WHERE, picture, saved, sound, tone
from yatt_jax.data.config import DataError
from yatt_jax.data.media.audio import Longest, decode_audio
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.images import decode_animation, decode_image

LIMITS = MediaConfig()
CHANGES = 200


def changed(content: bytes, dice: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 4, 16])):
        at = dice.randrange(min(len(made), dice.choice([40, 100, len(made)])))
        match dice.randrange(4):
            case 0:
                made[at] = dice.randrange(256)
            case 1:
                made[at : at + 4] = dice.choice([b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff"])
            case 2:
                del made[at : at + dice.randrange(1, 20)]
            case _:
                made[at:at] = dice.randbytes(dice.randrange(1, 20))
    return bytes(made)


def moving(form: str) -> bytes:
    frames = [picture(20, 20, seed) for seed in range(3)]
    return saved(frames[0], form, save_all=True, append_images=frames[1:], duration=50)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "decode"),
    [
        *((saved(picture(20, 20), form), decode_image) for form in ("PNG", "JPEG", "WEBP")),
        *((moving(form), decode_animation) for form in ("PNG", "WEBP", "GIF")),
    ],
)
def test_images(content: bytes, decode: Callable[[bytes, str, MediaConfig], object]) -> None:
    check(content, lambda made: decode(made, WHERE, LIMITS))


@pytest.mark.parametrize(("form", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16")])
def test_audio(form: str, subtype: str) -> None:
    content = sound(tone(0.1), form=form, subtype=subtype)
    check(content, lambda made: decode_audio(made, WHERE, Longest(30.0), 16_000))


def check(content: bytes, decode: Callable[[bytes], object]) -> None:
    dice = random.Random(0)
    decode(content)
    refused = 0
    for _ in range(CHANGES):
        try:
            decode(changed(content, dice))
        except DataError as error:
            refused += 1
            message = str(error)
            if not message.startswith(WHERE):
                raise
    assert refused > CHANGES // 10
