"""Positions in three dimensions (time, height, width) for rotary embeddings, on the host.

Text counts on in all three. An image or video that begins at ``p`` has ``(p + time, p + row, p + column)``; audio, in
Qwen2.5-Omni, counts on as text. What follows a medium begins, in Qwen2.5-VL, at ``p + max(rows, columns)``, and in
Qwen2.5-Omni after its greatest position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from yatt_jax.data.media.places import Span
from yatt_jax.types import MediaItem


def rope_positions(
    length: int,
    spans: Sequence[Span],
    items: Sequence[MediaItem],
    *,
    merge: int,
    per_second: float,
    family: Literal["qwen2_5_vl", "qwen2_5_omni"] = "qwen2_5_vl",
) -> tuple[Int[np.ndarray, "3 T"], int]:
    """Positions of the tokens of a text.

    Equal to ``get_rope_index`` of the family in ``transformers``, without audio inside of videos.

    Args:
      length: tokens of the text.
      spans: of its media, in order.
      items: the media.
      merge: patches of a side that make up one feature.
      per_second: positions in time of a second of video.
      family: whose rule for what follows a medium, and for the time of images, is used.

    Returns:
      The positions, and the position of the token that would follow.
    """
    positions = np.zeros((3, length), np.int32)
    at, place = 0, 0  # next token, and its position

    def count_to(end: int) -> None:
        nonlocal at, place
        positions[:, at:end] = np.arange(place, place + end - at)
        at, place = end, place + end - at

    for span, item in zip(spans, items, strict=True):
        count_to(span.first)
        if item.kind == "audio":
            count_to(span.end)
            continue
        times, rows, columns = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
        time, row, column = np.indices((times, rows, columns)).reshape(3, -1)
        time = _scaled(time, item, per_second, family)
        positions[:, at : span.end] = place + np.stack([time, row, column])
        omni = family == "qwen2_5_omni"
        place += int(max(time.max(), rows - 1, columns - 1)) + 1 if omni else max(rows, columns)
        at = span.end
    count_to(length)
    return positions, place_after(positions) if length else 0


def place_after(positions: Int[np.ndarray, "3 T"]) -> int:
    """The position of the first sampled token: one more than the greatest there is."""
    return int(positions.max()) + 1


def _scaled(time: np.ndarray, item: MediaItem, per_second: float, family: str) -> np.ndarray:
    """Steps in time as positions, cut to whole ones in float32 as torch does it."""
    if item.kind == "image":
        return (time * per_second).astype(np.int32) if family == "qwen2_5_omni" else time
    steps = time.astype(np.float32)
    if family == "qwen2_5_omni":
        return (steps * np.float32(item.seconds) * np.float32(per_second)).astype(np.int32)
    return (steps * np.float32(per_second * item.seconds)).astype(np.int32)
