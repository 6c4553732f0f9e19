"""Images, videos and sounds as a model's processor hands them over, and how many features each has."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from yatt_jax.errors import InputError
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.tower_config import AudioConfig, QwenVisionConfig, SiglipConfig


class MediaError(InputError):
    """Items that do not fit the model or the tokens of their row; the message names row, item and token."""


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """An image or a video.

    Attributes:
      patches: ``[N, F]``, square of ``merge x merge`` patches after square, row after row, frame after frame: the order
        of Qwen's processors, and of ``cut``.
      grid: frames (temporal patches), rows and columns of patches.
      seconds: from one temporal patch to the next; None for an image.
    """

    patches: Float[np.ndarray, "N F"]
    grid: tuple[int, int, int]
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Sound:
    """A sound.

    Attributes:
      mels: log-mel frames ``[frames, bins]``, with at least two frames of the silence that pads it, where the tower
        hears whole sounds and it is not of full length.
      length: real frames.
    """

    mels: Float[np.ndarray, "N F"]
    length: int


Item: TypeAlias = Picture | Sound


def cut(image: Float[np.ndarray, "C H W"], vision: SiglipConfig) -> Picture:
    """A square image of the size the tower takes, as patches.

    Raises:
      MediaError: another size.
    """
    side, p, m = vision.side, vision.patch, vision.merge
    if image.shape != (vision.channels, side * p, side * p):
        raise MediaError(
            f"an image of shape {image.shape}: the tower takes ({vision.channels}, {side * p}, {side * p}); let the "
            "model's own processor resize it"
        )
    squares = image.reshape(vision.channels, side // m, m, p, side // m, m, p)
    return Picture(squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(side * side, -1), (1, side, side))


def features(config: DecoderConfig, item: Item) -> int:
    """How many features an item has, and so placeholders."""
    if isinstance(item, Sound):
        return (item.length + 1) // 2 // 2
    return math.prod(item.grid) // vision_of(config, item).merge ** 2


def placeholder(config: DecoderConfig, item: Item) -> int:
    """The token that stands for a feature of the item.

    Raises:
      MediaError: the model has no tower for it.
    """
    if isinstance(item, Sound):
        return audio_of(config, item).token
    vision = vision_of(config, item)
    return vision.video_token if isinstance(vision, QwenVisionConfig) and item.seconds is not None else vision.token


def describe(item: Item) -> str:
    """The item in words, for messages."""
    if isinstance(item, Sound):
        return f"a sound of {item.length} frames"
    frames, rows, columns = item.grid
    kind = "an image" if item.seconds is None else f"a video of {frames} frames"
    return f"{kind} of {rows} x {columns} patches"


def vision_of(config: DecoderConfig, item: Picture) -> SiglipConfig | QwenVisionConfig:
    """The sizes of the tower that takes an item.

    Raises:
      MediaError: the model has no such tower, or the item does not fit it.
    """
    vision = config.vision
    if vision is None:
        raise MediaError(f"{describe(item)}: the model has no vision tower")
    if isinstance(vision, SiglipConfig) and (item.seconds is not None or item.grid != (1, vision.side, vision.side)):
        raise MediaError(f"{describe(item)}: the model takes images of {vision.side} x {vision.side} patches")
    if item.grid[1] % vision.merge or item.grid[2] % vision.merge or (item.seconds is None and item.grid[0] != 1):
        raise MediaError(
            f"{describe(item)}, grid {item.grid}: rows and columns are multiples of {vision.merge}, and an image has "
            "one frame; let the model's own processor resize it"
        )
    shape = math.prod(item.grid), math.prod(vision.patch_shape)
    if item.patches.shape != shape:
        raise MediaError(f"{describe(item)}: its patches have shape {item.patches.shape}, and the model takes {shape}")
    return vision


def audio_of(config: DecoderConfig, item: Sound) -> AudioConfig:
    """The same for a sound."""
    audio = config.audio
    if audio is None:
        raise MediaError(f"{describe(item)}: the model has no audio tower")
    given, bins = item.mels.shape
    if bins != audio.bins:
        raise MediaError(f"{describe(item)}: its frames have {bins} bins, and the model takes {audio.bins}")
    most = 2 * audio.positions
    needed = item.length if audio.chunk else min(item.length + 2, most)
    if not 0 < item.length <= (item.length if audio.chunk else most):
        raise MediaError(f"{describe(item)}: the model takes 1 to {most}; cut it")
    if given < needed:
        raise MediaError(
            f"{describe(item)}: {given} are given, and the model needs {needed}, silence that pads it included; let "
            "the model's own processor make them"
        )
    return audio
