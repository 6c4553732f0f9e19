"""Media made for tests: small images and sounds as files hold them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from transformers import AddedToken, PreTrainedTokenizerFast

from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.families import build_processor
from yatt_jax.data.media.processor import MediaProcessor
from yatt_jax.data.tokenizer import character_tokenizer

WHERE = 'p.jsonl:4: field "prompt", turn 1, part 1'


def pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Noise, ``[height, width, 3]``."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(width, height, seed))


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sound(samples: np.ndarray, rate: int = 16_000, form: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is so large, with a few bytes of data that would unpack to nothing but zeros."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(100_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def wav_header(seconds: float, rate: int = 16_000) -> bytes:
    """A WAV file that says it is so long, with 100 samples in it."""
    size = round(seconds * rate) * 2
    head = struct.pack(
        "<4sI4s4sIHHIIHH", b"RIFF", min(size + 36, 2**32 - 1), b"WAVE", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16
    )
    return head + struct.pack("<4sI", b"data", size) + bytes(200)


def flac_header(seconds: float, rate: int = 16_000) -> bytes:
    """A FLAC file that says it is so long, cut off in its first frame."""
    whole = bytearray(sound(tone(0.5, rate), rate, "FLAC"))
    # STREAMINFO begins at 8; bytes 13 to 17 of it end with 36 bits of the number of samples.
    at, count = 8 + 13, round(seconds * rate)
    whole[at] = (whole[at] & 0xF0) | (count >> 32)
    whole[at + 1 : at + 5] = struct.pack(">I", count & 0xFFFFFFFF)
    return bytes(whole[:200])


ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?!\n"
SPECIAL = (
    *("[u]", "[a]", "[s]", "<end>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *(
        "<|vision_bos|>",
        "<|vision_eos|>",
        "<|audio_bos|>",
        "<|audio_eos|>",
        "<|AUDIO|>",
        "<|IMAGE|>",
        "<|VIDEO|>",
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
    ),
)
TEMPLATE = """
{%- for turn in messages %}{{ '[' + turn.role[0] + ']' }}
{%- if turn.content is string %}{{ turn.content }}{% else %}
{%- for part in turn.content %}{% if part.type == 'text' %}{{ part.text }}
{%- else %}{{ places[part.type] }}{% endif %}{% endfor %}{% endif %}{{ '<end>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[a]' }}{% endif %}"""
PLACES: dict[str, dict[str, str]] = {
    "qwen2_5_vl": {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    },
    "qwen2_audio": {"audio": "<|AUDIO|>"},
    "qwen2_5_omni": {"image": "<|IMAGE|>", "audio": "<|AUDIO|>", "video": "<|VIDEO|>"},
    "gemma3": {"image": "<start_of_image>"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"image": {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}}},
    "qwen2_audio": {"audio": {"feature_size": 16, "chunk_length": 2}},
    "gemma3": {"image": {"size": {"height": 16, "width": 16}}, "image_tokens": 4, "patch": 4},
}
SETTINGS["qwen2_5_vl"]["video"] = SETTINGS["qwen2_5_vl"]["image"]
SETTINGS["qwen2_5_omni"] = SETTINGS["qwen2_5_vl"] | SETTINGS["qwen2_audio"]


def tokenizer_with_places() -> PreTrainedTokenizerFast:
    """Characters, the placeholders of every family, and a template that writes those of the variable ``places``."""
    tokenizer = character_tokenizer(ALPHABET)
    for token in SPECIAL:
        tokenizer.add_tokens(AddedToken(token, special=True, normalized=False))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def processor_of(family: str, **limits: Any) -> MediaProcessor:
    """A processor of small sizes."""
    return build_processor(family, tokenizer_with_places(), MediaConfig(**limits), **SETTINGS[family])
