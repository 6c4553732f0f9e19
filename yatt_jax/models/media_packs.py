"""Media of all sizes end to end in packs of few fixed sizes, so that a stream of odd sizes compiles little.

Everything that depends on the sizes of items is an array here, and no shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.media_items import Item, MediaError, Picture, Sound, audio_of, features, vision_of


@dataclasses.dataclass(frozen=True)
class Room:
    """Sizes of a pack of media.

    Attributes:
      patches: of images and videos; a multiple of ``merge**2``. 0: there are none.
      chunks: of sound. 0: there are none.
      frames: of a chunk.
    """

    patches: int = 0
    chunks: int = 0
    frames: int = 0


def bucket(size: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not smaller; 0 stays 0."""
    if size <= 2:
        return size
    power = 1 << (size - 1).bit_length()
    return power if size > power * 3 // 4 else power * 3 // 4


def room(config: DecoderConfig, packs: Sequence[Sequence[Item]]) -> Room:
    """Room for the fullest of some packs, in sizes that are few (``bucket``)."""
    most = lambda counts: bucket(max(counts, default=0))  # noqa: E731
    squares = most([sum(features(config, i) for i in pack if isinstance(i, Picture)) for pack in packs])
    merge = config.vision.merge if config.vision else 1
    sounds = [[i for i in pack if isinstance(i, Sound)] for pack in packs]
    if config.audio is None or not any(sounds):
        return Room(squares * merge**2)
    chunk = config.audio.chunk
    if chunk:
        return Room(squares * merge**2, most([sum(-(-i.length // chunk) for i in pack) for pack in sounds]), chunk)
    longest = max(i.length for pack in sounds for i in pack) + 2
    frames = min(4 * bucket(-(-longest // 4)), 2 * config.audio.positions)
    return Room(squares * merge**2, most([len(pack) for pack in sounds]), frames)


class Pack:
    """One pack of media.

    Args:
      config: the model.
      items: what lies in it.
      size: of the pack.

    Attributes:
      patches: arrays of ``types.Patches`` without the packs' axis.
      frames: the same of ``types.Frames``.
      feature: of each item, by its ``id``, where its features lie, from 0.

    Raises:
      MediaError: an item does not fit the model, or all of them not the pack.
    """

    def __init__(self, config: DecoderConfig, items: Sequence[Item], size: Room):
        self.feature: dict[int, Int[np.ndarray, "N"]] = {}
        self.patches = _patches(config, [i for i in items if isinstance(i, Picture)], size, self.feature)
        before = size.patches // config.vision.merge**2 if config.vision else 0
        self.frames = _frames(config, [i for i in items if isinstance(i, Sound)], size, self.feature, before)


def _patches(
    config: DecoderConfig, items: Sequence[Picture], size: Room, feature: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
    vision = config.vision
    P, F = size.patches, math.prod(vision.patch_shape) if vision else 0
    result = {
        "pixels": np.zeros((P, F), np.float32),
        "places": np.zeros((P, 2), np.int32),
        "segments": np.zeros(P, np.int32),
        "windows": np.zeros(P, np.int32),
    }
    end, segment, window = 0, 0, 0
    for item in items:
        own = vision_of(config, item)
        start, end = end, end + len(item.patches)
        if end > P:
            total = sum(len(i.patches) for i in items)
            raise MediaError(f"{total} patches in a pack of {P}: give it more room, or fewer images")
        order, places, frames, windows = _arrange(item.grid, own.merge, own.window)
        squares = item.patches.reshape(len(order), -1)[order]
        result["pixels"][start:end] = squares.reshape(-1, F)
        result["places"][start:end] = places
        result["segments"][start:end] = segment + frames
        result["windows"][start:end] = window + windows
        segment, window = segment + frames[-1], window + windows.max()
        feature[id(item)] = start // own.merge**2 + np.argsort(order)
    if vision is None or not vision.window:
        del result["windows"]
    return result


def _arrange(grid: tuple[int, int, int], merge: int, window: int) -> tuple[np.ndarray, ...]:
    """Squares of patches window after window.

    Returns:
      The squares' numbers in their new order; and of each patch in this order, row and column, the number of its
      frame, and of its window, from 1.
    """
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = (x.ravel() for x in np.indices((frames, rows, columns)))
    w = window or max(rows, columns)
    order = np.lexsort((column, row, column // w, row // w, frame))
    frame, row, column = frame[order], row[order], column[order]
    key = np.stack([frame, row // w, column // w])
    new = np.any(key[:, 1:] != key[:, :-1], axis=0)
    number = 1 + np.concatenate([[0], np.cumsum(new)])
    i, j = (x.ravel() for x in np.indices((merge, merge)))
    places = np.stack([row[:, None] * merge + i, column[:, None] * merge + j], axis=-1)
    repeat = merge * merge
    return order, places.reshape(-1, 2), np.repeat(frame + 1, repeat), np.repeat(number, repeat)


def _frames(
    config: DecoderConfig, items: Sequence[Sound], size: Room, feature: dict[int, np.ndarray], before: int
) -> dict[str, np.ndarray]:
    C, N = size.chunks, size.frames
    mels = np.zeros((C, N, config.audio.bins if config.audio else 0), np.float32)
    lengths = np.zeros(C, np.int32)
    chunk = 0
    for item in items:
        audio = audio_of(config, item)
        step = audio.chunk or N
        needed = audio.chunk or min(item.length + 2, 2 * audio.positions)
        if N % 4 or needed > N or audio.chunk not in (0, N):
            raise MediaError(f"chunks of {N} frames do not fit a sound of {item.length} frames: see media_packs.room")
        count = -(-item.length // step) if audio.chunk else 1
        if chunk + count > C:
            raise MediaError(f"a pack of {C} chunks of sound is too small: give it more room, or fewer sounds")
        for part in range(count):
            given = item.mels[part * step : (part + 1) * step]
            mels[chunk + part, : len(given)] = given
            lengths[chunk + part] = min(step, item.length - part * step)
        feature[id(item)] = before + chunk * (N // 4) + np.arange(features(config, item))
        chunk += count
    return {"mels": mels, "lengths": lengths}
