"""From decoded images and frames to the patches that vision towers read, by ``transformers``' processors for Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float

from yatt_jax.data.config import DataError
from yatt_jax.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

Grid: TypeAlias = tuple[int, int, int]


class QwenPatches:
    """Patches of images of any size, in blocks of ``merge_size`` x ``merge_size``: Qwen2.5-VL and -Omni.

    Args:
      image: settings of ``Qwen2VLImageProcessor``.
      video: settings of ``Qwen2VLVideoProcessor``, of which those that are not about choosing frames are read.
    """

    def __init__(self, image: Mapping[str, Any], video: Mapping[str, Any] | None = None) -> None:
        # The modules named so need neither torch nor torchvision.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._image = Qwen2VLImageProcessorPil(**_known(image, Qwen2VLImageProcessorPil))
        # Videos have limits of their own; everything else is as for images.
        size: Any = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
        settings: dict[str, Any] = _known(image, Qwen2VLImageProcessorPil)
        settings = {k: v for k, v in settings.items() if k not in ("min_pixels", "max_pixels")}
        settings = settings | {"size": size} | _known(video or {}, Qwen2VLImageProcessorPil)
        self._video = Qwen2VLImageProcessorPil(**settings)
        self.merge = int(self._image.merge_size)

    def image(self, image: Image.Image, place: str) -> tuple[Float[np.ndarray, "P F"], Grid]:
        """Patches of an image, and their grid.

        Raises:
          DataError: an image that is 200 times as long as wide.
        """
        try:
            made = self._image(image, return_tensors="np")
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
        return made["pixel_values"].astype(np.float32), _grid(made["image_grid_thw"][0])

    def video(self, frames: Sequence[Image.Image], place: str) -> tuple[Float[np.ndarray, "P F"], Grid]:
        """Patches of a video: each spans ``temporal_patch_size`` frames, the last frame repeated to fill up.

        Args:
          frames: of one size.
          place: of the record and file, for messages.

        Raises:
          DataError: frames of different sizes, or 200 times as long as wide.
        """
        sizes = {frame.size for frame in frames}
        if len(sizes) > 1:
            raise DataError(f"{place}: frames of different sizes: {sorted(sizes)}")
        # The processor takes a frame for an image, and repeats it in time: of its patches one time is kept.
        step = int(self._video.temporal_patch_size)
        filled = [*frames, *[frames[-1]] * (-len(frames) % step)]
        try:
            made = self._video(filled, return_tensors="np")
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
        _, height, width = _grid(made["image_grid_thw"][0])
        side = int(self._video.patch_size)
        patches = made["pixel_values"].reshape(len(filled) // step, step, height * width, -1, step, side**2)
        patches = np.moveaxis(patches[..., 0, :], 1, 3)  # times, patches, channels, frames of a time, pixels
        times = len(filled) // step
        return patches.reshape(times * height * width, -1).astype(np.float32), (times, height, width)

    @property
    def frames_a_patch(self) -> int:
        """Frames of a video that a patch spans."""
        return int(self._video.temporal_patch_size)


class SquarePatches:
    """Patches of images that are all resized to one square size: the SigLIP tower of Gemma 3.

    Args:
      image: settings of ``Gemma3ImageProcessor``.
      patch: pixels of a patch's side.
      tokens: features of an image, each of a square of patches.

    Raises:
      InputError: sizes that patches and features do not divide, or crops beside the image.
    """

    def __init__(self, image: Mapping[str, Any], patch: int, tokens: int) -> None:
        # The module named so needs neither torch nor torchvision.
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        self._image = Gemma3ImageProcessorPil(**_known(image, Gemma3ImageProcessorPil))
        if self._image.do_pan_and_scan:
            raise InputError("the image processor's do_pan_and_scan is on: crops beside the image are not read")
        size = dict(self._image.size)
        self._patch, self._side = patch, size["width"] // patch
        self.merge = self._side // max(math.isqrt(tokens), 1)
        whole = self.merge and self.merge * math.isqrt(tokens) * patch
        if not size["height"] == size["width"] == whole or math.isqrt(tokens) ** 2 != tokens:
            raise InputError(
                f"images of {size['height']} x {size['width']} pixels in patches of {patch} do not make {tokens} "
                f"features of equal squares"
            )

    def image(self, image: Image.Image, place: str) -> tuple[Float[np.ndarray, "P F"], Grid]:
        """Patches of an image, channels first within a patch, and their grid.

        They follow each other square by square of ``merge`` x ``merge``, as those of Qwen's processors.
        """
        pixels = np.asarray(self._image(image, return_tensors="np")["pixel_values"][0], np.float32)
        squares = self._side // self.merge
        shape = (squares, self.merge, self._patch)
        patches = pixels.reshape(-1, *shape, *shape).transpose(1, 4, 2, 5, 0, 3, 6)
        return patches.reshape(self._side**2, -1), (1, self._side, self._side)


def _grid(values: Any) -> Grid:
    times, height, width = (int(v) for v in values)
    return times, height, width


def _known(settings: Mapping[str, Any], processor: Any) -> dict[str, Any]:
    """The settings that an image processor has; of a folder's file some are another processor's, and some null."""
    names = {"size", "resample", *processor.valid_kwargs.__annotations__}
    return {key: value for key, value in settings.items() if key in names and value is not None}
