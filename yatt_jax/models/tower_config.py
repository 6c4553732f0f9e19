"""The shape of vision and audio towers, independent of the family their weights come from."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and switches of a stack of blocks whose tokens see each other both ways.

    Attributes:
      hidden: width of the residual stream.
      layers: number of blocks.
      heads: attention heads; divides ``hidden``.
      mlp: width of the MLP.
      norm: "layer" (Ba et al. 2016) or "rms" norms.
      norm_eps: their epsilon.
      activation: of the MLP.
      gated: whether the MLP has a gate, as the decoder's has.
      key_bias: a bias on the keys; queries, values and outputs always have one.
      fused: queries, keys and values come from one matrix.
      whole: layers that see whole segments; the others see windows. None: all do.
    """

    hidden: int
    layers: int
    heads: int
    mlp: int
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu_tanh"
    gated: bool = False
    key_bias: bool = True
    fused: bool = False
    whole: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden = {self.hidden} of a tower is not a multiple of its heads = {self.heads}")


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """SigLIP (Zhai et al. 2023) for square images of one size, whose features are means over squares of patches.

    Attributes:
      encoder: the stack.
      token: placeholder of a feature of an image.
      side: patches on a side of an image.
      merge: patches on a side of a feature.
      patch: pixels on a side of a patch.
      channels: of a pixel.
    """

    encoder: EncoderConfig
    token: int
    side: int
    merge: int
    patch: int
    channels: int = 3

    def __post_init__(self) -> None:
        if self.side % self.merge:
            raise ValueError(f"{self.side} patches on a side of an image are not whole features of {self.merge}")

    @property
    def window(self) -> int:
        """Features on a side of a window; 0: there are none."""
        return 0

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Dimensions of a patch: channels, height, width."""
        return self.channels, self.patch, self.patch


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig:
    """The tower of Qwen2.5-VL (Bai et al. 2025) for images and videos of any size.

    Attributes:
      encoder: the stack.
      token: placeholder of a feature of an image.
      video_token: placeholder of a feature of a video.
      merge: patches on a side of a feature.
      window: features on a side of a window.
      patch: pixels on a side of a patch.
      temporal: frames of a video in a patch.
      channels: of a pixel.
      theta: base of the rotary frequencies.
      rate: temporal positions in a second of video.
      after_time: what follows a video begins past its last time, too (Qwen2.5-Omni), and not past the larger of its
        rows and columns alone.
    """

    encoder: EncoderConfig
    token: int
    video_token: int
    merge: int
    window: int
    patch: int
    temporal: int = 2
    channels: int = 3
    theta: float = 10000.0
    rate: float = 4.0
    after_time: bool = False

    def __post_init__(self) -> None:
        size = self.encoder.hidden // self.encoder.heads
        if size % 4:
            raise ValueError(
                f"heads of size {size} in a vision tower: rows and columns turn pairs, so 4 must divide it"
            )

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Dimensions of a patch: channels, frames, height, width."""
        return self.channels, self.temporal, self.patch, self.patch


@dataclasses.dataclass(frozen=True)
class AudioConfig:
    """The encoder of Whisper (Radford et al. 2023), with features that are means of two positions.

    Attributes:
      encoder: the stack.
      token: placeholder of a feature of a sound.
      bins: of a log-mel frame.
      positions: the most positions of a chunk; there is one for two frames.
      chunk: frames of a chunk, heard alone, without what precedes and follows; 0: a chunk is a whole sound, whose
        convolutions also read the frames that pad it, and positions are learned.
    """

    encoder: EncoderConfig
    token: int
    bins: int
    positions: int
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.chunk % 4:
            raise ValueError(f"chunks of {self.chunk} frames: a feature is made of 4, which must divide it")
        if self.chunk > 2 * self.positions:
            raise ValueError(f"chunks of {self.chunk} frames do not fit into {self.positions} positions of two frames")
