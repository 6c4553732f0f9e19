"""The media of rows: which feature stands for which token, and the positions that rotary embeddings turn by.

Runs on the host, in NumPy. ``media_items`` says what an item is, ``media_packs`` lays items into packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.media_items import Item, MediaError, Picture, describe, features, placeholder
from yatt_jax.models.media_packs import Pack, Room, room
from yatt_jax.models.tower_config import QwenVisionConfig
from yatt_jax.types import Frames, Media, Patches


def media_of_rows(
    config: DecoderConfig,
    tokens: Int[np.ndarray, "B T"],
    segments: Int[np.ndarray, "B T"],
    items: Sequence[Sequence[Item]],
    *,
    packs: int = 1,
    size: Room | None = None,
) -> Media:
    """The media of some rows, as arrays of NumPy.

    Args:
      config: the model.
      tokens: ids, with a placeholder for each feature of each item.
      segments: documents, as in ``Inputs``; placeholders in padding count for nothing.
      items: of each row, in the order of their placeholders. An object that several rows of a pack show passes the
        tower once.
      packs: see ``types.Media``; divides the rows.
      size: of a pack; by default ``room`` for these.

    Raises:
      MediaError: placeholders and features do not agree, or an item does not fit the model or the room.
    """
    B = len(tokens)
    if B % packs:
        raise MediaError(f"{B} rows cannot be split among {packs} packs of media")
    at: list[list[slice]] = [_find(config, b, tokens[b], segments[b], items[b]) for b in range(B)]
    pack_of_row = np.arange(B) * packs // max(B, 1)
    content: list[dict[int, Item]] = [{} for _ in range(packs)]
    for b, row in enumerate(items):
        content[pack_of_row[b]].update((id(item), item) for item in row)
    lists = [list(pack.values()) for pack in content]
    size = size or room(config, lists)
    made = [Pack(config, pack, size) for pack in lists]
    index, spans = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, np.int32)
    for b, row in enumerate(items):
        for number, (item, there) in enumerate(zip(row, at[b], strict=True), 1):
            index[b, there] = made[pack_of_row[b]].feature[id(item)] + 1
            spans[b, there] = number if isinstance(item, Picture) else 0
    rotary = any(rope.sections for rope in config.ropes)
    return Media(
        index,  # pyright: ignore[reportArgumentType]
        _stack([pack.patches for pack in made], Patches) if size.patches else None,
        _stack([pack.frames for pack in made], Frames) if size.chunks else None,
        spans=spans if config.image_spans else None,  # pyright: ignore[reportArgumentType]
        positions=_positions(config, segments, items, at) if rotary else None,  # pyright: ignore[reportArgumentType]
    )


def _find(
    config: DecoderConfig,
    row: int,
    tokens: Int[np.ndarray, "T"],
    segments: Int[np.ndarray, "T"],
    items: Sequence[Item],
) -> list[slice]:
    """Where the placeholders of each item of a row stand."""
    known = placeholders(config)
    waiting = np.flatnonzero(np.isin(tokens, known) & (segments > 0))
    found = []
    for number, item in enumerate(items, 1):
        token, count = placeholder(config, item), features(config, item)
        own = waiting[:count]
        run = 0
        if len(own):
            fits = (tokens[own] == token) & (segments[own] == segments[own[0]]) & (own == own[0] + np.arange(len(own)))
            run = int(np.argmin(fits)) if not fits.all() else len(own)
        if run < count:
            where = f"follow one another from token {own[0]} on" if len(own) else "are left"
            raise MediaError(
                f"row {row}: item {number}, {describe(item)}, has {count} features, and {run} placeholders (id {token})"
                f" {where}; a row must keep those of an item in one piece, and is not cut through them"
            )
        found.append(slice(int(own[0]), int(own[0]) + count))
        waiting = waiting[count:]
    if len(waiting):
        raise MediaError(
            f"row {row}: {len(waiting)} placeholders from token {waiting[0]} (id {tokens[waiting[0]]}) on stand for "
            f"nothing: the row has {len(items)} items"
        )
    return found


def placeholders(config: DecoderConfig) -> tuple[int, ...]:
    """The tokens that stand for features."""
    result = () if config.vision is None else (config.vision.token,)
    if isinstance(config.vision, QwenVisionConfig):
        result += (config.vision.video_token,)
    return result if config.audio is None else (*result, config.audio.token)


def _positions(
    config: DecoderConfig, segments: Int[np.ndarray, "B T"], items: Sequence[Sequence[Item]], at: list[list[slice]]
) -> Int[np.ndarray, "B T 3"]:
    """Positions of M-RoPE (Wang et al. 2024): texts and sounds count in all three; pictures by time, row and column.

    What follows a picture begins past its largest position, or, without ``after_time``, past that of its rows and
    columns, as transformers 5 has it for Qwen2.5-VL: the paper's rule but for videos that last longer.
    """
    index = np.arange(segments.shape[1])
    begins = np.diff(segments, axis=1, prepend=-1) != 0
    counts = index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    result = np.repeat(counts[..., None], 3, axis=-1).astype(np.int32)
    for b, row in enumerate(items):
        for item, there in zip(row, at[b], strict=True):
            if not isinstance(item, Picture):
                continue
            vision = config.vision
            assert isinstance(vision, QwenVisionConfig)
            own = result[b, there.start] + _picture_positions(vision, item)
            after = (index >= there.stop) & (segments[b] == segments[b, there.start])
            result[b, after] += own[:, 0 if vision.after_time else 1 :].max() - result[b, there.stop - 1]
            result[b, there] = own
    return result * (segments > 0)[..., None]


def _picture_positions(vision: QwenVisionConfig, item: Picture) -> Int[np.ndarray, "N 3"]:
    frames, rows, columns = item.grid[0], item.grid[1] // vision.merge, item.grid[2] // vision.merge
    frame, row, column = (x.ravel() for x in np.indices((frames, rows, columns)))
    time = np.arange(frames, dtype=np.float32) * np.float32(item.seconds or 0) * np.float32(vision.rate)
    return np.stack([time.astype(np.int32)[frame], row, column], axis=-1)


def _stack(parts: Sequence[dict[str, np.ndarray]], kind: type[Any]) -> Any:
    return kind(**{name: np.stack([part[name] for part in parts]) for name in parts[0]})
