"""Media on the host: packs, indices, positions, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from tests.models import media_models
from tests.models.media_models import AUDIO, CASES, END, HEAR, IMAGE, LOOK, VIDEO, picture, sound
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.families import from_hf
from yatt_jax.models.media import media_of_rows
from yatt_jax.models.media_items import Item, MediaError, Picture, Sound, cut, features
from yatt_jax.models.media_packs import Pack, Room, bucket, room
from yatt_jax.models.tower_config import QwenVisionConfig, SiglipConfig
from yatt_jax.types import Media


def config_of(name: str) -> DecoderConfig:
    return from_hf(CASES[name].config().to_dict())


OMNI, VL, AUDIO_ONLY, GEMMA = (config_of(name) for name in ("qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "gemma3"))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def media(config: DecoderConfig, rows: list[list[int]], items: list[list[Item]], **options: Any) -> Media:
    length = max(map(len, rows))
    tokens = np.asarray([row + [0] * (length - len(row)) for row in rows])
    segments = np.asarray([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return media_of_rows(config, tokens, segments, items, **options)


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 1000)] == [
        *(0, 1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 1024)
    ]


def test_windows_and_places_are_those_of_transformers() -> None:
    grids = [(1, 4, 6), (1, 10, 4), (1, 2, 2), (3, 4, 8), (1, 12, 12)]
    items = [picture(VL, grid, rng(), 1.0 if grid[0] > 1 else None) for grid in grids]
    total = sum(len(item.patches) for item in items)
    pack = Pack(VL, items, Room(total + 8))
    order, ends = get_vision_window_index(torch.tensor(grids), spatial_merge_size=2, window_size=8, patch_size=2)
    pixels = np.concatenate([item.patches for item in items]).reshape(total // 4, 4, -1)[order.numpy()]
    np.testing.assert_array_equal(pack.patches["pixels"][:total], pixels.reshape(total, -1))
    places = get_vision_position_ids(torch.tensor(grids), 2).numpy().reshape(total // 4, 4, 2)[order.numpy()]
    np.testing.assert_array_equal(pack.patches["places"][:total], places.reshape(total, 2))
    windows = np.repeat(np.arange(1, len(ends)), np.diff(ends.numpy()))
    np.testing.assert_array_equal(pack.patches["windows"], np.pad(windows, (0, 8)))
    frames = np.repeat(np.arange(1, 8), [24, 40, 4, 32, 32, 32, 144])
    np.testing.assert_array_equal(pack.patches["segments"], np.pad(frames, (0, 8)))
    back = np.argsort(order.numpy())
    np.testing.assert_array_equal(np.concatenate([pack.feature[id(item)] for item in items]), back)


def test_squares_of_an_image_by_hand() -> None:
    vision = GEMMA.vision
    assert isinstance(vision, SiglipConfig)  # 6 x 6 patches of 4 x 4 pixels, 2 x 2 of them a feature
    rows, columns = np.indices((24, 24))
    item = cut(np.stack([rows, columns, rows * 24 + columns]), vision)
    # The fifth square is in the middle; its patches begin at pixels (8, 8), (8, 12), (12, 8), (12, 12).
    corners = item.patches.reshape(9, 4, 3, 16)[4, :, :2, 0]
    assert corners.tolist() == [[8, 8], [8, 12], [12, 8], [12, 12]]
    pack = Pack(GEMMA, [item, item], Room(72))
    assert "windows" not in pack.patches
    assert pack.patches["places"][16:20].tolist() == [[2, 2], [2, 3], [3, 2], [3, 3]]
    with pytest.raises(MediaError, match=r"takes \(3, 24, 24\)"):
        cut(np.zeros((3, 24, 20)), vision)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_omni"])
def test_positions_are_those_of_transformers(name: str) -> None:
    config = config_of(name)
    case = CASES[name]
    model = getattr(media_models.hf, case.architecture)._from_config(case.config()).model
    rows = [media_models.row(config, parts, rng()) for parts in case.parts(config, rng())]
    found = media_models.inputs_of(config, rows).media
    assert found is not None
    assert found.positions is not None
    for b, (tokens, items) in enumerate(rows):
        ids = torch.tensor([tokens])
        given = case.given(items, ids)
        keys = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        keys |= {k: given[k] for k in ("image_grid_thw", "video_grid_thw") if k in given}
        if not items:
            expected = np.arange(len(tokens))[None].repeat(3, 0)
        elif name == "qwen2_5_vl":
            seconds = given.get("second_per_grid_ts")
            expected, _ = model.get_rope_index(
                **keys, mm_token_type_ids=given["mm_token_type_ids"], second_per_grid_ts=seconds
            )
            expected = expected[:, 0].numpy()
        else:
            mask = given.get("feature_attention_mask")
            lengths = None if mask is None else mask.sum(1)
            seconds = given.get("video_second_per_grid")
            expected, _ = model.get_rope_index(**keys, audio_seqlens=lengths, second_per_grids=seconds)
            expected = expected[:, 0].numpy()
        np.testing.assert_array_equal(np.asarray(found.positions)[b, : len(tokens)].T, expected)
        assert not np.asarray(found.positions)[b, len(tokens) :].any()


def test_positions_by_hand() -> None:
    # A video of 3 temporal patches, half a second apart at 4 positions a second, of 1 x 2 features; 2 documents.
    video = picture(VL, (3, 2, 4), rng(), 0.5)
    tokens = np.asarray([[5, *[VIDEO] * 6, 6, 7, 5, 5, 0]])
    segments = np.asarray([[1] * 8 + [2] * 3 + [0]])
    for after_time, following in ((False, 3), (True, 6)):
        assert isinstance(VL.vision, QwenVisionConfig)
        config = dataclasses.replace(VL, vision=dataclasses.replace(VL.vision, after_time=after_time))
        found = np.asarray(media_of_rows(config, tokens, segments, [[video]]).positions)[0]
        times, rows, columns = found.T.tolist()
        assert times == [0, 1, 1, 3, 3, 5, 5, following, 0, 1, 2, 0]
        assert rows == [0, 1, 1, 1, 1, 1, 1, following, 0, 1, 2, 0]
        assert columns == [0, 1, 2, 1, 2, 1, 2, following, 0, 1, 2, 0]


def test_index_and_spans_by_hand() -> None:
    vision = GEMMA.vision
    assert isinstance(vision, SiglipConfig)
    a, b = (cut(rng().standard_normal((3, 24, 24)), vision) for _ in range(2))
    image = [LOOK, *[IMAGE] * 9, END]
    rows = [[4, *image, 5, *image], [*image], [7, 7], [3]]
    found = media(GEMMA, rows, [[a, b], [a], [], []], packs=2)
    index, spans = np.asarray(found.index), np.asarray(found.spans)
    assert index[0, 2:11].tolist() == list(range(1, 10))
    assert index[0, 14:23].tolist() == list(range(10, 19))
    assert index[1, 1:10].tolist() == list(range(1, 10))  # the same image passes the tower once
    assert (index > 0).sum() == 27
    assert spans[0].tolist() == [0, 0, *[1] * 9, 0, 0, 0, *[2] * 9, 0]
    assert found.patches is not None
    assert found.patches.pixels.shape == (2, 96, 48)  # room for 24 features
    assert not np.asarray(found.patches.segments)[1].any()
    assert found.positions is None


def test_chunks_of_sound() -> None:
    long, short = sound(OMNI, 19, rng()), sound(OMNI, 8, rng())
    image = picture(OMNI, (1, 4, 4), rng())
    size = room(OMNI, [[long, short, image]])
    assert size == Room(16, 4, 8)
    found = media(OMNI, [[HEAR, *[AUDIO] * 5, *[AUDIO] * 2, *[IMAGE] * 4]], [[long, short, image]])
    assert found.frames is not None
    assert np.asarray(found.frames.lengths).tolist() == [[8, 8, 3, 8]]
    np.testing.assert_array_equal(np.asarray(found.frames.mels)[0, 2, :8], long.mels[16:24])
    # Features of patches come first, 4 of them; a chunk has 2, and the third gives 1.
    assert np.asarray(found.index)[0].tolist() == [0, 5, 6, 7, 8, 9, 11, 12, 1, 2, 3, 4]
    assert room(AUDIO_ONLY, [[sound(AUDIO_ONLY, 13, rng())], []]) == Room(0, 1, 16)
    assert room(AUDIO_ONLY, [[sound(AUDIO_ONLY, 32, rng())]]) == Room(0, 1, 32)


def test_few_sizes_for_a_thousand_rows() -> None:
    sizes = set()
    generator = rng()
    for _ in range(1000):
        rows, columns = generator.integers(1, 20, 2) * 2
        frames = np.broadcast_to(np.float32(0), (rows * columns, 24))
        sizes.add(room(VL, [[Picture(frames, (1, int(rows), int(columns)))]]))
    assert len(sizes) <= 18


BAD: dict[str, tuple[DecoderConfig, list[int], list[Item], str]] = {
    "cut": (VL, [5, *[IMAGE] * 5], [picture(VL, (1, 4, 6), rng())], r"row 0: item 1, an image of 4 x 6 patches, has 6 "
            r"features, and 5 placeholders \(id 90\) follow one another from token 1 on"),
    "none": (VL, [5, 6], [picture(VL, (1, 4, 6), rng())], "0 placeholders .* are left"),
    "more": (VL, [*[IMAGE] * 7], [picture(VL, (1, 4, 6), rng())], r"1 placeholders from token 6 \(id 90\) on stand for "
             "nothing: the row has 1 items"),
    "other kind": (OMNI, [*[IMAGE] * 3], [sound(OMNI, 13, rng())], "0 placeholders"),
    "not in one piece": (OMNI, [AUDIO, 5, AUDIO, AUDIO], [sound(OMNI, 13, rng())], "1 placeholders .* in one piece"),
    "no tower": (AUDIO_ONLY, [IMAGE], [picture(VL, (1, 2, 2), rng())], "no vision tower"),
    "no ears": (VL, [AUDIO], [sound(OMNI, 13, rng())], "no audio tower"),
    "odd rows": (VL, [IMAGE], [picture(VL, (1, 3, 2), rng())], "multiples of 2"),
    "frames of an image": (VL, [IMAGE], [picture(VL, (2, 2, 2), rng())], "an image has one frame"),
    "another size": (GEMMA, [IMAGE], [picture(VL, (1, 2, 2), rng())], "takes images of 6 x 6 patches"),
    "patches": (VL, [IMAGE], [Picture(np.zeros((4, 5)), (1, 2, 2))], r"shape \(4, 5\), and the model takes \(4, 24\)"),
    "bins": (OMNI, [AUDIO], [Sound(np.zeros((9, 5)), 8)], "5 bins, and the model takes 8"),
    "no silence": (AUDIO_ONLY, [AUDIO], [Sound(np.zeros((9, 8)), 8)], "9 are given, and the model needs 10"),
    "too long": (AUDIO_ONLY, [AUDIO], [Sound(np.zeros((40, 8)), 33)], "takes 1 to 32"),
    "empty": (OMNI, [AUDIO], [Sound(np.zeros((0, 8)), 0)], "a sound of 0 frames"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    config, row, items, message = BAD[name]
    with pytest.raises(MediaError, match=message):
        media(config, [row], [items])


def test_a_pack_that_is_too_small() -> None:
    image, heard = picture(OMNI, (1, 4, 6), rng()), sound(OMNI, 19, rng())
    with pytest.raises(MediaError, match="24 patches in a pack of 16"):
        media(OMNI, [[IMAGE] * 6], [[image]], size=Room(16))
    with pytest.raises(MediaError, match="a pack of 2 chunks of sound is too small"):
        media(OMNI, [[AUDIO] * 5], [[heard]], size=Room(0, 2, 8))
    with pytest.raises(MediaError, match="chunks of 12 frames do not fit"):
        media(OMNI, [[AUDIO] * 5], [[heard]], size=Room(0, 4, 12))
    with pytest.raises(MediaError, match="3 rows cannot be split among 2 packs"):
        media(OMNI, [[5]] * 3, [[]] * 3, packs=2)


def test_features_of_an_item_depend_on_its_size_alone() -> None:
    assert [
        features(AUDIO_ONLY, dataclasses.replace(sound(AUDIO_ONLY, 9, rng()), length=n)) for n in (3, 4, 7, 32)
    ] == [*(1, 1, 2, 8)]
