"""Placeholders, spans, and cuts, against those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.data.media_files import picture, processor_of, saved, sound, tokenizer_with_places, tone
from yatt_jax.data.config import DataError
from yatt_jax.data.media.places import Span, expand, find_spans, whole_before
from yatt_jax.types import MediaItem

PLACES = {"image": 90, "video": 91, "audio": 92}


def item(kind: str, tokens: int, grid: tuple[int, int, int] = (1, 1, 1), seconds: float = 0.0) -> MediaItem:
    return MediaItem(kind, grid, tokens, seconds, "", lambda: np.zeros((1, 1)), lambda: ("", b""))  # type: ignore[arg-type]


def test_expand_and_find():
    tokens = np.array([1, 90, 2, 92, 91, 3])
    items = [item("image", 3), item("audio", 1), item("video", 2)]
    ids, origin = expand(tokens, items, PLACES, "f:1")
    assert ids.tolist() == [1, 90, 90, 90, 2, 92, 91, 91, 3]
    assert origin.tolist() == [0, 1, 1, 1, 2, 3, 4, 4, 5]
    assert find_spans(ids, items, PLACES) == [Span("image", 1, 4), Span("audio", 5, 6), Span("video", 6, 8)]
    assert expand(np.array([1, 2]), [], PLACES, "f:1")[0].tolist() == [1, 2]
    assert find_spans(np.array([1, 2]), [], PLACES) == []
    # Two images side by side.
    ids, _ = expand(np.array([90, 90]), [item("image", 2), item("image", 1)], PLACES, "f:1")
    assert find_spans(ids, [item("image", 2), item("image", 1)], PLACES) == [Span("image", 0, 2), Span("image", 2, 3)]


@pytest.mark.parametrize(
    ("tokens", "items", "message"),
    [
        ([1, 2], [item("image", 1)], "the text has placeholders for none, the record has 1 image"),
        ([90, 90], [item("image", 1)], "placeholders for 2 image, the record has 1 image"),
        ([91], [item("image", 1)], "placeholders for 1 video, the record has 1 image"),
        ([90, 92], [item("audio", 1), item("image", 1)], "1 audio, 1 image"),
        ([90], [], "placeholders for 1 image, the record has none; does the chat template"),
    ],
)
def test_placeholders_and_media_must_agree(tokens, items, message):
    with pytest.raises(DataError, match=rf"^f:1: .*{message}"):
        expand(np.array(tokens), items, PLACES, "f:1")


def test_placeholders_and_features_must_agree():
    for tokens, message in (
        ([90, 90, 1], "f:1: 2 placeholders for 3 features"),
        ([90, 90, 1, 90], "not side by side"),
        ([90, 91, 90], "not side by side"),
    ):
        with pytest.raises(DataError, match=message):
            find_spans(np.array(tokens), [item("image", 3)], PLACES, "f:1")


def test_no_cut_goes_through_media():
    spans = [Span("image", 2, 5), Span("audio", 5, 6), Span("video", 8, 12)]
    cuts = [whole_before(limit, spans) for limit in range(14)]
    assert cuts == [(0, 0), (1, 0), *[(2, 0)] * 3, (5, 1), (6, 2), (7, 2), *[(8, 2)] * 4, (12, 3), (13, 3)]


def test_ids_equal_those_of_transformers_processors():
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    from yatt_jax.data.media.sources import parse_media

    tokenizer = tokenizer_with_places()
    audio = processor_of("qwen2_audio")
    text = "a: <|AUDIO|>\nb: <|AUDIO|>?"
    samples = [tone(0.31), tone(1.2)]
    stock: Any = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=2), tokenizer)
    wanted = stock(text=text, audio=samples, sampling_rate=16_000)["input_ids"][0]
    items = [audio.item(parse_media({"type": "audio", "audio": sound(s)}, "", "")) for s in samples]
    ids = np.array(tokenizer(text)["input_ids"])
    np.testing.assert_array_equal(expand(ids, items, audio.places, "")[0], wanted)

    gemma = processor_of("gemma3")
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    named = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<eos>", eos_token="<eos>", extra_special_tokens=names
    )
    images = [picture(), picture(8, 20, 1)]
    text = "see <start_of_image> and\n<start_of_image>."
    stock = Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), named, image_seq_length=4)
    wanted = stock(images=[images], text=[text])["input_ids"][0]
    items = [gemma.item(parse_media({"type": "image", "image": saved(image)}, "", "")) for image in images]
    spans = [(0, 4), (text.index(" and"), len(text))]
    whole, moved = gemma.rewrite(text, spans)
    assert whole[slice(*moved[0])] == "see "
    assert whole[slice(*moved[1])].startswith(" and\n\n\n<start_of_image>")
    assert whole[slice(*moved[1])].endswith("<end_of_image>\n\n.")
    ids = np.array(tokenizer(whole)["input_ids"])
    np.testing.assert_array_equal(expand(ids, items, gemma.places, "")[0], wanted)
