"""One object for everything that a model's family says about media: what is read, how, and where it goes in a text."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from yatt_jax.data.config import DataError
from yatt_jax.data.media.audio import Longest, decode_audio
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.decode import decode_all
from yatt_jax.data.media.fetch import fetch, resolve
from yatt_jax.data.media.images import decode_image
from yatt_jax.data.media.mel import Mel, audio_tokens, log_mel
from yatt_jax.data.media.preview import make_preview, read_video
from yatt_jax.data.media.sources import Source
from yatt_jax.data.media.vision import QwenPatches, SquarePatches
from yatt_jax.types import MediaItem

Vision: TypeAlias = QwenPatches | SquarePatches


class MediaProcessor:
    """Reads media for one model.

    Args:
      places: the token that stands for each kind in a rendered text, by its id; a kind that is not there is refused.
      limits: what may be read, and from where.
      vision: makes patches of images and videos.
      mel: makes frames of audio.
      begin: what the template writes for an image, where that is not the placeholder itself.
      whole: what ``begin`` is replaced with before tokenization: the placeholder and all that belongs around it.
    """

    def __init__(
        self,
        places: Mapping[str, int],
        limits: MediaConfig,
        *,
        vision: Vision | None = None,
        mel: Mel | None = None,
        begin: str = "",
        whole: str = "",
    ) -> None:
        self.places: dict[str, int] = dict(places.items())
        self.limits = limits
        self._vision, self._mel = vision, mel
        self._begin, self._whole = begin, whole

    def rewrite(self, text: str, spans: Sequence[tuple[int, int]] = ()) -> tuple[str, list[tuple[int, int]]]:
        """A rendered text as it is to be tokenized, with one placeholder for each medium; spans move along with it.

        Args:
          text: what the chat template wrote.
          spans: first and last + 1 characters of parts of it.
        """
        if not self._begin:
            return text, list(spans)
        ends = [found.end() for found in re.finditer(re.escape(self._begin), text)]
        longer = len(self._whole) - len(self._begin)
        moved = [tuple(place + longer * bisect.bisect_right(ends, place) for place in span) for span in spans]
        return text.replace(self._begin, self._whole), [(first, end) for first, end in moved]

    def items(self, sources: Sequence[Source], *, keep: bool = True) -> list[MediaItem | DataError]:
        """Fetches, decodes and processes, each source once; for each its item, or why there is none.

        Args:
          sources: where they come from.
          keep: whether the items hold their values, or make them again when they are asked for.
        """

        def make(source: Source) -> MediaItem:
            item = self.item(source)
            return item if keep else item.light()

        different = list(dict.fromkeys(sources))
        found = dict(zip(different, decode_all(different, make, self.limits.workers), strict=True))
        return [found[source] for source in sources]

    def item(self, source: Source) -> MediaItem:
        """Fetches, decodes and processes one medium.

        Raises:
          DataError: not there, not allowed, beyond a limit, or broken; the message begins with record and file.
        """
        made = self._read(source)
        return MediaItem(
            source.kind,
            made.grid,
            made.tokens,
            made.seconds,
            hashlib.sha256(np.ascontiguousarray(made.values).tobytes()).hexdigest()[:24],
            load=functools.partial(self._values, source),
            preview=functools.partial(make_preview, source, self.limits),
            kept=made.values,
        )

    def _values(self, source: Source) -> Float[np.ndarray, "P F"]:
        return self._read(source).values

    def _read(self, source: Source) -> _Read:
        if source.kind == "audio" and self._mel is not None:
            return self._audio(source, self._mel)
        if source.kind == "image" and self._vision is not None:
            image = decode_image(fetch(source, self.limits), source.place, self.limits)
            values, grid = self._vision.image(image, source.place)
            return _Read(values, grid, math.prod(grid) // self._vision.merge**2)
        if source.kind == "video" and isinstance(self._vision, QwenPatches):
            frames, fps = read_video(source, self.limits)
            values, grid = self._vision.video(frames, source.place)
            seconds = self._vision.frames_a_patch / fps
            return _Read(values, grid, math.prod(grid) // self._vision.merge**2, seconds)
        raise DataError(f"{source.where}: the model reads no {source.kind}")

    def _audio(self, source: Source, mel: Mel) -> _Read:
        longest = Longest(self.limits.max_seconds)
        if mel.seconds < longest.seconds:
            longest = Longest(mel.seconds, "the most that the model takes is")
        samples = decode_audio(fetch(source, self.limits), source.place, longest, mel.rate)
        samples = samples[: mel.seconds * mel.rate]  # resampling may have added one
        frames = -(-len(samples) // mel.hop)
        tokens = audio_tokens(frames)
        if not tokens:
            least, length = 1000 * 2 * mel.hop / mel.rate, 1000 * len(samples) / mel.rate
            raise DataError(f"{source.place}: {length:.1f} ms of audio, and more than {least:g} are needed")
        values = log_mel(samples, mel.filters, window=mel.window, hop=mel.hop, longest=mel.seconds * mel.rate)
        return _Read(values, (1, 1, frames), tokens)


@dataclasses.dataclass(frozen=True)
class _Read:
    """What was made of a source; as in ``MediaItem``."""

    values: Float[np.ndarray, "P F"]
    grid: tuple[int, int, int]
    tokens: int
    seconds: float = 0.0


def check_sources(sources: Sequence[Source], processor: MediaProcessor | None) -> None:
    """Looks whether media can be read, as far as that is known without reading them.

    Args:
      sources: of one text.
      processor: the model's; None for a model of text.

    Raises:
      DataError: media of a kind that the model does not read, too many, files that are not there or not allowed.
    """
    for source in sources:
        if processor is None or source.kind not in processor.places:
            known = "text only" if processor is None else f"text and {', '.join(sorted(processor.places))}"
            raise DataError(f"{source.where}: found {source.kind}, and the model reads {known}")
    if processor is None or not sources:
        return
    if len(sources) > processor.limits.max_items:
        raise DataError(
            f"{sources[0].where}: {len(sources)} media in one text, and data.media.max_items is "
            f"{processor.limits.max_items}"
        )
    for source in sources:
        for single in source.value if isinstance(source.value, tuple) else (source,):
            if single.form == "path":
                resolve(str(single.value), single, processor.limits)
