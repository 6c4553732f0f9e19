"""From files to patches and frames: equal to what transformers' processors and torch make, and without torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.data.media_files import (
    SETTINGS,
    picture,
    pixels,
    processor_of,
    saved,
    sound,
    tokenizer_with_places,
    tone,
)
from yatt_jax.data.config import DataError
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.families import FAMILIES, build_processor, load_processor, with_tokens
from yatt_jax.data.media.mel import Mel, audio_tokens, log_mel
from yatt_jax.data.media.places import expand
from yatt_jax.data.media.preview import make_preview
from yatt_jax.data.media.sources import Source, parse_media
from yatt_jax.data.media.vision import QwenPatches, SquarePatches
from yatt_jax.errors import InputError
from yatt_jax.types import MediaItem

SIZE: Any = {"size": {"shortest_edge": 16, "longest_edge": 10_000}, "patch_size": 4}
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


def source(kind: str, value: object, **more: object) -> Source:
    return parse_media({"type": kind, kind: value, **more}, "", f"p.jsonl:{kind}")


def normal(image: Image.Image | np.ndarray) -> np.ndarray:
    return (np.asarray(image) / 255 - MEAN) / STD


def patches_by_hand(frames: list[np.ndarray], side: int = 4, merge: int = 2, step: int = 2) -> np.ndarray:
    """Patches of normalized frames ``[h, w, 3]``, one after the other."""
    found = []
    for t in range(0, len(frames), step):
        height, width = (n // side for n in frames[0].shape[:2])
        for block_y in range(0, height, merge):
            for block_x in range(0, width, merge):
                for y in range(block_y, block_y + merge):
                    for x in range(block_x, block_x + merge):
                        own = [f[y * side : (y + 1) * side, x * side : (x + 1) * side] for f in frames[t : t + step]]
                        found.append(np.stack(own).transpose(3, 0, 1, 2).reshape(-1))
    return np.array(found)


def test_patches_of_images():
    image = picture(24, 16)
    values, grid = QwenPatches(SIZE).image(image, "x")
    assert grid == (1, 4, 6)
    np.testing.assert_allclose(values, patches_by_hand([normal(image)] * 2), atol=1e-5)
    # Another size is brought to whole blocks, as transformers does it.
    for size in ((50, 71), (3, 90), (200, 200)):
        values, grid = QwenPatches(SIZE).image(picture(*size), "x")
        whole = Qwen2VLImageProcessorPil(**SIZE)(picture(*size), return_tensors="np")
        assert grid == tuple(whole["image_grid_thw"][0])
        np.testing.assert_array_equal(values, whole["pixel_values"])
    with pytest.raises(DataError, match=r"^x: absolute aspect ratio must be smaller than 200"):
        QwenPatches(SIZE).image(picture(201, 1), "x")


def test_patches_of_videos():
    frames = [picture(24, 16, seed) for seed in range(5)]
    values, grid = QwenPatches(SIZE, SIZE).video(frames, "x")
    assert grid == (3, 4, 6)
    whole = [normal(frame) for frame in frames]
    np.testing.assert_allclose(values, patches_by_hand([*whole, whole[-1]]), atol=1e-5)
    with pytest.raises(DataError, match=r"^x: frames of different sizes: \[\(8, 8\), \(24, 16\)\]"):
        QwenPatches(SIZE).video([picture(24, 16), picture(8, 8)], "x")


def test_videos_are_resized_as_torch_does_it():
    frames = [picture(50, 30, seed).resize((100, 60), Image.Resampling.BICUBIC) for seed in range(2)]
    values, grid = QwenPatches(SIZE, SIZE | {"size": {"shortest_edge": 16, "longest_edge": 1600}}).video(frames, "x")
    height, width = 4 * grid[1], 4 * grid[2]
    assert height * width <= 1600
    stacked = torch.tensor(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(stacked, (height, width), mode="bicubic", antialias=True)
    wanted = patches_by_hand([normal(frame.numpy()) for frame in made.permute(0, 2, 3, 1)])
    one_level = 1 / 255 / STD.min()
    assert np.abs(values - wanted).max() <= 1.01 * one_level  # both round to whole levels, in another order
    assert np.abs(values - wanted).mean() < 0.1 * one_level


def test_square_patches_are_what_a_convolution_sees():
    settings: Any = {"size": {"height": 56, "width": 56}}
    values, grid = SquarePatches(settings, 14, 4).image(picture(33, 44), "x")
    assert grid == (1, 4, 4)
    whole = Gemma3ImageProcessorPil(**settings, do_pan_and_scan=False)(picture(33, 44), return_tensors="np")
    weight = torch.randn(8, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    seen = torch.nn.functional.conv2d(torch.tensor(np.array(whole["pixel_values"])), weight, stride=14)[0]
    got = values @ weight.reshape(8, -1).numpy().T
    squares = [(y, x) for y in (0, 2) for x in (0, 2)]
    order = [(y + i, x + j) for y, x in squares for i in (0, 1) for j in (0, 1)]
    wanted = np.stack([seen[:, y, x].numpy() for y, x in order])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    # The mean of four patches side by side is a feature of the tower's pooling.
    pooled = torch.nn.functional.avg_pool2d(seen, 2).flatten(1).T.numpy()
    np.testing.assert_allclose(got.reshape(4, 4, 8).mean(1), pooled, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "tokens", "message"),
    [
        ({"do_pan_and_scan": True}, 4, "do_pan_and_scan is on"),
        ({"size": {"height": 56, "width": 28}}, 4, "images of 56 x 28 pixels in patches of 14 do not make 4"),
        ({"size": {"height": 60, "width": 60}}, 4, "do not make 4 features"),
        ({"size": {"height": 56, "width": 56}}, 5, "do not make 5 features"),
        ({"size": {"height": 56, "width": 56}}, 9, "do not make 9 features"),
        ({"size": {"height": 56, "width": 56}}, 64, "do not make 64 features"),
    ],
)
def test_sizes_that_do_not_divide(settings, tokens, message):
    with pytest.raises(InputError, match=message):
        SquarePatches(settings, 14, tokens)


@pytest.mark.parametrize("seconds", [1, 30])
def test_log_mel_equals_whispers(seconds):
    mel = Mel(bins=128 if seconds == 30 else 80, seconds=seconds)
    extractor = WhisperFeatureExtractor(feature_size=mel.bins, chunk_length=seconds)
    noise = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    for count in (480, 481, 5000, 15_500, 15_840, 15_999, 16_000):
        wanted = extractor(noise[:count], sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
        got = log_mel(noise[:count], mel.filters, window=400, hop=160, longest=seconds * 16_000)
        frames = int(wanted["attention_mask"].sum())
        assert frames == -(-count // 160)
        assert len(got) == min(frames + 2, 100 * seconds)
        np.testing.assert_allclose(got, wanted["input_features"][0].T[: len(got)], atol=2e-5)


def test_audio_tokens_are_those_of_the_encoders():
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths

    assert [audio_tokens(n) for n in (0, 1, 2, 3, 4, 5, 3000)] == [0, 0, 0, 1, 1, 1, 750]
    assert all(audio_tokens(n) == _get_feat_extract_output_lengths(n) for n in range(3, 400))


def test_items():
    vl, audio, gemma = (processor_of(family) for family in ("qwen2_5_vl", "qwen2_audio", "gemma3"))
    item = vl.item(source("image", saved(picture(24, 16))))
    assert (item.kind, item.grid, item.tokens, item.values.shape) == ("image", (1, 4, 6), 6, (24, 3 * 2 * 16))
    item = vl.item(source("video", [saved(picture(24, 16, seed)) for seed in range(3)], fps=4))
    assert (item.kind, item.grid, item.tokens, item.seconds) == ("video", (2, 4, 6), 12, 0.5)
    item = audio.item(source("audio", sound(tone(0.5))))
    assert (item.kind, item.grid, item.tokens, item.values.shape) == ("audio", (1, 1, 50), 12, (52, 16))
    item = gemma.item(source("image", saved(picture(24, 16))))
    assert (item.kind, item.grid, item.tokens, item.values.shape) == ("image", (1, 4, 4), 4, (16, 48))


def test_values_can_be_made_again():
    processor = processor_of("qwen2_5_omni")
    for made in (source("image", saved(picture())), source("audio", sound(tone(0.3)))):
        item = processor.item(made)
        light = item.light()
        assert light.kept is None
        np.testing.assert_array_equal(light.values, item.values)
        assert light == item
    other = processor.item(source("image", saved(picture(seed=1))))
    assert other.digest != processor.item(source("image", saved(picture()))).digest
    assert processor.item(source("image", saved(picture(), "WEBP", lossless=True))).digest != other.digest


def test_lengths_of_audio():
    processor = processor_of("qwen2_audio", max_seconds=60.0)
    with pytest.raises(DataError, match=r"20\.0 ms of audio, and more than 20 are needed"):
        processor.item(source("audio", sound(tone(0.02))))
    assert processor.item(source("audio", sound(tone(0.021)))).tokens == 1
    with pytest.raises(DataError, match=r"2\.1 s of audio, .* the most that the model takes is 2$"):
        processor.item(source("audio", sound(tone(2.1))))
    assert processor.item(source("audio", sound(tone(2.0, 44_100), 44_100))).grid == (1, 1, 200)
    short = processor_of("qwen2_audio", max_seconds=1.0)
    with pytest.raises(DataError, match=r"data.media.max_seconds is 1$"):
        short.item(source("audio", sound(tone(1.5))))


def test_many_are_decoded_in_order_each_once():
    processor = processor_of("qwen2_5_omni", workers=3)
    files = [saved(picture(seed=i)) if i % 3 else sound(tone(0.1 + i / 100)) for i in range(12)]
    sources = [source("image" if i % 3 else "audio", file) for i, file in enumerate(files)]
    sources[4] = source("image", b"broken")
    wanted = [None if i == 4 else processor.item(s) for i, s in enumerate(sources)]
    for got, expected in zip(processor.items([*sources, sources[5]]), [*wanted, wanted[5]], strict=True):
        if expected is None:
            assert isinstance(got, DataError)
            assert "p.jsonl:image, image (image in the record): neither PNG" in str(got)
        else:
            assert isinstance(got, MediaItem)
            assert got == expected
    twice = processor.items([sources[1], sources[1]])
    assert twice[0] is twice[1]
    (light,) = processor.items(sources[:1], keep=False)
    assert isinstance(light, MediaItem)
    assert light.kept is None


def test_previews():
    processor = processor_of("qwen2_5_omni")
    mime, content = processor.item(source("image", saved(picture(8, 8)))).preview()
    assert mime == "image/png"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels(8, 8))
    mime, content = processor.item(source("image", saved(picture(500, 300)))).preview()
    assert (mime, Image.open(io.BytesIO(content)).size) == ("image/webp", (256, 154))
    mime, content = processor.item(source("audio", sound(tone(0.5, 8_000), 8_000))).preview()
    samples, rate = soundfile.read(io.BytesIO(content))
    assert (mime, rate, len(samples)) == ("audio/flac", 16_000, 8000)
    np.testing.assert_allclose(samples[400:-400], tone(0.5)[400:-400], atol=2e-3)
    long = sound(tone(20.0, 1000, 100), 1000)
    made = make_preview(source("audio", long), MediaConfig())
    assert soundfile.info(io.BytesIO(made[1])).duration == 15
    frames = [saved(picture(300, 200, seed)) for seed in range(3)]
    mime, content = processor.item(source("video", frames, fps=10)).preview()
    moving = Image.open(io.BytesIO(content))
    assert (mime, getattr(moving, "n_frames", 1), moving.size) == ("image/webp", 3, (128, 85))


def test_limits_of_videos():
    frames = [saved(picture(24, 16, seed)) for seed in range(3)]
    exact = processor_of("qwen2_5_vl", max_frames=3, max_pixels=3 * 24 * 16)
    assert exact.item(source("video", frames)).grid == (2, 4, 6)
    with pytest.raises(DataError, match=r"p.jsonl:video, video: 3 frames, and data.media.max_frames is 2"):
        processor_of("qwen2_5_vl", max_frames=2).item(source("video", frames))
    with pytest.raises(DataError, match=r"1,152 pixels in 3 frames, and data.media.max_pixels is 1,151"):
        processor_of("qwen2_5_vl", max_pixels=1151).item(source("video", frames))
    with pytest.raises(DataError, match=r"video, frame 2 \(image in the record\): neither PNG"):
        exact.item(source("video", [frames[0], b"broken"]))


def test_what_a_family_does_not_read():
    for family, kind in (("qwen2_audio", "image"), ("gemma3", "video"), ("qwen2_5_vl", "audio")):
        with pytest.raises(DataError, match=rf"p.jsonl:{kind}, {kind}: the model reads no {kind}"):
            processor_of(family).item(source(kind, b"x"))
    with pytest.raises(InputError, match=r"'llama' reads no media; those that do: qwen2_5_vl, "):
        build_processor("llama", tokenizer_with_places(), MediaConfig())
    from yatt_jax.data.tokenizer import character_tokenizer

    for family in FAMILIES:
        with pytest.raises(InputError, match=r"the tokenizer has no special token '<.*' \(\w+\), and " + family):
            build_processor(family, character_tokenizer("ab"), MediaConfig())
    with pytest.raises(InputError, match=r"dither = 0.1 is not read"):
        build_processor("qwen2_audio", tokenizer_with_places(), MediaConfig(), audio={"dither": 0.1})


def test_settings_come_from_the_folder(tmp_path):
    tokenizer = tokenizer_with_places()

    def load(config: dict, **files: dict) -> object:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, content in {"config": config, **files}.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return load_processor(folder, tokenizer, MediaConfig())

    assert load({"model_type": "qwen2"}) is None
    with pytest.raises(InputError, match=r"a qwen2_5_vl model without preprocessor_config.json"):
        load({"model_type": "qwen2_5_vl"})
    image = Qwen2VLImageProcessorPil(**SETTINGS["qwen2_5_vl"]["image"]).to_dict()
    audio = WhisperFeatureExtractor(**SETTINGS["qwen2_audio"]["audio"]).to_dict()
    audio.pop("mel_filters", None)
    picture_source, sound_source = source("image", saved(picture())), source("audio", sound(tone(0.5)))
    for made, wanted, family in (
        (load({"model_type": "qwen2_5_vl"}, preprocessor_config=image), picture_source, "qwen2_5_vl"),
        (load({"model_type": "qwen2_5_vl"}, processor_config={"image_processor": image}), picture_source, "qwen2_5_vl"),
        (load({"model_type": "qwen2_audio"}, preprocessor_config=audio), sound_source, "qwen2_audio"),
        (load({"model_type": "qwen2_5_omni"}, preprocessor_config=image | audio), picture_source, "qwen2_5_omni"),
        (load({"model_type": "qwen2_5_omni"}, preprocessor_config=image | audio), sound_source, "qwen2_5_omni"),
    ):
        assert made.item(wanted) == processor_of(family).item(wanted)  # type: ignore[attr-defined]
    square = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}).to_dict()
    gemma = {"model_type": "gemma3", "mm_tokens_per_image": 4, "vision_config": {"patch_size": 4}}
    made = load(gemma, preprocessor_config=square)
    assert made.item(picture_source) == processor_of("gemma3").item(picture_source)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"config.json says image_token_index = 7, and the tokenizer has the image"):
        load(gemma | {"image_token_index": 7}, preprocessor_config=square)
    omni = {"model_type": "qwen2_5_omni", "thinker_config": {"audio_token_index": 3}}
    with pytest.raises(InputError, match=r"config.json says audio_token_index = 3"):
        load(omni, preprocessor_config=image | audio)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_of_models_from_scratch(family, tmp_path):
    """With the template of the digits configs, each part becomes the family's tokens."""
    from transformers import AutoTokenizer

    from yatt_jax.data.tokenizer import character_tokenizer

    plain = character_tokenizer("0123456789\n")
    tokenizer = with_tokens(plain, family)
    assert tokenizer.convert_ids_to_tokens(list(range(12))) == plain.convert_ids_to_tokens(list(range(12)))
    tokenizer.chat_template = Path("configs/data/parts.jinja").read_text()
    processor = build_processor(family, tokenizer, MediaConfig(), **SETTINGS[family])
    files = {"image": saved(picture()), "audio": sound(tone(0.1)), "video": [saved(picture())] * 2}
    parts = [{"type": kind, kind: source(kind, files[kind])} for kind in processor.places]
    turns = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "12"}]},
        {"role": "assistant", "content": "3"},
    ]
    for made in (tokenizer, None):
        if made is None:
            tokenizer.save_pretrained(str(tmp_path))
            made = AutoTokenizer.from_pretrained(str(tmp_path))
        text = processor.rewrite(str(made.apply_chat_template(turns, tokenize=False)))[0]
        ids = np.array(made(text, add_special_tokens=False)["input_ids"])
        items = [processor.item(source(kind, files[kind])) for kind in processor.places]
        expanded, _ = expand(ids, items, processor.places, "f:1")
        assert len(expanded) == len(ids) + sum(item.tokens - 1 for item in items)
        assert text.endswith("123<eos>")
        bounds = {"gemma3": 2 + 4}.get(family, 2)
        assert len(ids) == 4 + len(items) * (1 + bounds)
        assert processor.places == build_processor(family, made, MediaConfig(), **SETTINGS[family]).places


def test_nothing_of_it_needs_torch():
    script = """
import sys
sys.modules["torch"] = sys.modules["torchvision"] = None
from tests.data.media_files import *
from yatt_jax.data.media.sources import parse_media
for family, kind, value in (
    ("qwen2_5_vl", "image", saved(picture())), ("qwen2_5_vl", "video", [saved(picture())] * 2),
    ("qwen2_5_omni", "audio", sound(tone(0.2))), ("gemma3", "image", saved(picture())),
):
    print(processor_of(family).item(parse_media({"type": kind, kind: value}, "", "")).digest)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.split()
    vl, omni, gemma = (processor_of(family) for family in ("qwen2_5_vl", "qwen2_5_omni", "gemma3"))
    assert found == [
        vl.item(source("image", saved(picture()))).digest,
        vl.item(source("video", [saved(picture())] * 2)).digest,
        omni.item(source("audio", sound(tone(0.2)))).digest,
        gemma.item(source("image", saved(picture()))).digest,
    ]
