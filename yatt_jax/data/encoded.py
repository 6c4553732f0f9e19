"""Sequences of tokens that records become: what is learned of them, and the media in them."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from yatt_jax.data.examples import Example
from yatt_jax.data.media.places import Span, whole_before
from yatt_jax.types import MediaItem


@dataclasses.dataclass(frozen=True)
class Document:
    """A sequence of tokens.

    Attributes:
      tokens: ids.
      mask: which of them are learned; never the first, which nothing predicts.
      steps: indices of the last token of each rated step.
      media: images, audios and videos in it, in order.
      places: the tokens of each.
    """

    tokens: Int[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]
    steps: tuple[int, ...] = ()
    media: tuple[MediaItem, ...] = ()
    places: tuple[Span, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt(self) -> Int[np.ndarray, "t"]:
        """The tokens before the first learned one; all of them where none is learned."""
        return self.tokens[: int(np.argmax(self.mask))] if self.mask.any() else self.tokens

    def cut(self, limit: int) -> Document:
        """Its first ``limit`` tokens; fewer where these would cut through an image, audio or video."""
        end, kept = whole_before(limit, self.places)
        steps = tuple(at for at in self.steps if at < end)
        return Document(self.tokens[:end], self.mask[:end], steps, self.media[:kept], self.places[:kept])

    def answered_by(self, other: Document) -> Document:
        """Its prompt with the response of another document."""
        begin, there = len(self.prompt), len(other.prompt)
        own = sum(place.end <= begin for place in self.places)
        before = sum(place.end <= there for place in other.places)
        moved = tuple(place.moved(begin - there) for place in other.places[before:])
        return Document(
            np.concatenate([self.prompt, other.tokens[there:]]),
            np.concatenate([np.zeros(begin, bool), other.mask[there:]]),
            media=self.media[:own] + other.media[before:],
            places=self.places[:own] + moved,
        )


@dataclasses.dataclass(frozen=True)
class Encoded:
    """An example as tokens.

    Attributes:
      example: what was read.
      documents: its sequence; of a pair the chosen and the rejected one.
      index: number of the record in its data set.
    """

    example: Example
    documents: tuple[Document, ...]
    index: int

    def __len__(self) -> int:
        return max(map(len, self.documents))
