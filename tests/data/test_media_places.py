"""Placeholders, spans, cuts and positions in three dimensions, against those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.data.media_files import picture, processor_of, saved, sound, tokenizer_with_places, tone
from yatt_jax.data.config import DataError
from yatt_jax.data.media.places import Span, expand, find_spans, whole_before
from yatt_jax.data.media.positions import rope_positions
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


def vl_positions(ids: torch.Tensor, kinds: list[int], images: list, videos: list, seconds: list) -> torch.Tensor:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    config = Qwen2_5_VLConfig(
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 8},
        text_config={
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "intermediate_size": 8,
            "vocab_size": 100,
        },
    )
    with torch.device("meta"):
        model: Any = Qwen2_5_VLModel(config)
    positions, delta = model.get_rope_index(
        ids[None],
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    return torch.cat([positions[:, 0], (delta[0] + len(ids)).expand(3, 1)], 1)


def omni_positions(ids: torch.Tensor, images: list, videos: list, seconds: list, frames: list) -> torch.Tensor:
    from types import SimpleNamespace

    from transformers import Qwen2_5OmniThinkerConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniPreTrainedModelForConditionalGeneration,
    )

    settings: Any = Qwen2_5OmniThinkerConfig
    config = settings(
        image_token_index=90,
        video_token_index=91,
        audio_token_index=92,
        vision_start_token_id=80,
        audio_start_token_id=82,
    )
    names = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "audio_start_token_id")
    values = dict(zip(names, (90, 91, 92, 80, 82), strict=True))
    more = {"position_id_per_seconds": config.position_id_per_seconds, "seconds_per_chunk": config.seconds_per_chunk}
    model = SimpleNamespace(config=SimpleNamespace(**values, **more), spatial_merge_size=2)
    whole: Any = Qwen2_5OmniPreTrainedModelForConditionalGeneration
    model.get_llm_pos_ids_for_vision = whole.get_llm_pos_ids_for_vision.__get__(model)
    model.get_chunked_index = whole.get_chunked_index.__get__(model)
    positions, delta = whole.get_rope_index(
        model,
        ids[None],
        torch.tensor(images) if images else None,
        torch.tensor(videos) if videos else None,
        torch.ones_like(ids)[None],
        False,
        torch.tensor(frames) if frames else None,
        torch.tensor(seconds) if seconds else None,
    )
    return torch.cat([positions[:, 0], (delta[0] + len(ids)).expand(3, 1)], 1)


def random_text(dice: np.random.Generator, kinds: list[str]) -> tuple[np.ndarray, list[MediaItem]]:
    """Ids with placeholders, between those that begin and end them."""
    ids: list[int] = []
    items = []
    for kind in kinds:
        ids += dice.integers(1, 70, int(dice.integers(0, 6))).tolist()
        if kind == "audio":
            frames = int(dice.integers(3, 300))
            tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
            items.append(item("audio", tokens, (1, 1, frames)))
            ids += [82, 92, 83]
            continue
        times = int(dice.integers(2, 6)) if kind == "video" else 1
        rows, columns = (2 * int(n) for n in dice.integers(1, 7, 2))
        seconds = float(dice.choice([0.5, 1.0, 2 / 3, 0.04, 2 / 24])) if kind == "video" else 0.0
        items.append(item(kind, times * rows * columns // 4, (times, rows, columns), seconds))
        ids += [80, PLACES[kind], 81]
    ids += dice.integers(1, 70, int(dice.integers(1, 6))).tolist()
    return expand(np.array(ids), items, PLACES, "")[0], items


@pytest.mark.parametrize("seed", range(8))
def test_positions_of_qwen2_5_vl(seed):
    dice = np.random.default_rng(seed)
    ids, items = random_text(dice, dice.choice(["image", "video"], seed % 5).tolist())
    kinds = [{90: 1, 91: 2}.get(int(i), 0) for i in ids]
    images, videos = ([list(i.grid) for i in items if i.kind == kind] for kind in ("image", "video"))
    wanted = vl_positions(torch.tensor(ids), kinds, images, videos, [i.seconds for i in items if i.kind == "video"])
    got, after = rope_positions(len(ids), find_spans(ids, items, PLACES), items, merge=2, per_second=4)
    np.testing.assert_array_equal(np.concatenate([got, [[after]] * 3], 1), wanted.numpy())


@pytest.mark.parametrize("seed", range(8))
def test_positions_of_qwen2_5_omni(seed):
    dice = np.random.default_rng(seed)
    kinds = [["image", "audio"], ["audio", "image", "video"], ["video", "audio", "audio"]][seed % 3] * (1 + seed // 3)
    ids, items = random_text(dice, kinds)
    images, videos = ([list(i.grid) for i in items if i.kind == kind] for kind in ("image", "video"))
    frames = [i.grid[2] for i in items if i.kind == "audio"]
    wanted = omni_positions(torch.tensor(ids), images, videos, [i.seconds for i in items if i.kind == "video"], frames)
    spans = find_spans(ids, items, PLACES)
    got, after = rope_positions(len(ids), spans, items, merge=2, per_second=25, family="qwen2_5_omni")
    np.testing.assert_array_equal(np.concatenate([got, [[after]] * 3], 1), wanted.numpy())


def test_positions_of_text():
    got, after = rope_positions(4, [], [], merge=2, per_second=4)
    assert got.tolist() == [[0, 1, 2, 3]] * 3
    assert after == 4


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
