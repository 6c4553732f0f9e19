"""Where media are in token ids: one placeholder each becomes as many as there are features, and none is ever cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from yatt_jax.data.config import DataError
from yatt_jax.types import MediaItem


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens that the features of one medium go in the place of.

    Attributes:
      kind: of the medium.
      first: its first token.
      end: the token after its last.
    """

    kind: str
    first: int
    end: int

    def moved(self, by: int) -> Span:
        """The span so many tokens further on."""
        return Span(self.kind, self.first + by, self.end + by)


def expand(
    tokens: Int[np.ndarray, "t"], items: Sequence[MediaItem], places: Mapping[str, int], source: str
) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "T"]]:
    """Repeats each placeholder as often as its medium has features.

    Args:
      tokens: ids, with one placeholder for each medium.
      items: the media, in their order in the text.
      places: the placeholder of each kind.
      source: "file:line" of the record, for messages.

    Returns:
      The ids, and of each the index in ``tokens`` that it comes from.

    Raises:
      DataError: placeholders and media that do not agree in number, order or kind.
    """
    kinds = {token: kind for kind, token in places.items()}
    at = np.flatnonzero(np.isin(tokens, list(kinds)))
    found, wanted = [kinds[int(tokens[i])] for i in at], [item.kind for item in items]
    if found != wanted:
        raise DataError(
            f"{source}: the text has placeholders for {_count(found)}, the record has {_count(wanted)}; does the chat "
            f"template write one for each part, and is none written in a text?"
        )
    repeats = np.ones(len(tokens), np.int64)
    repeats[at] = [item.tokens for item in items]
    origin = np.repeat(np.arange(len(tokens)), repeats)
    return tokens[origin], origin


def find_spans(
    tokens: Int[np.ndarray, "T"], items: Sequence[MediaItem], places: Mapping[str, int], source: str = ""
) -> list[Span]:
    """The span of each medium.

    Args:
      tokens: ids as ``expand`` makes them, or some of the first of them that cut no span.
      items: the media whose spans are there, in order.
      places: the placeholder of each kind.
      source: "file:line" of the record, for messages.

    Raises:
      DataError: placeholders and features that do not agree in number.
    """
    at = np.flatnonzero(np.isin(tokens, list(places.values())))
    if len(at) != sum(item.tokens for item in items):
        raise DataError(
            f"{source or 'tokens'}: {len(at)} placeholders for {sum(item.tokens for item in items)} features of media"
        )
    spans, begin = [], 0
    for item in items:
        own = at[begin : begin + item.tokens]
        begin += item.tokens
        whole = own[-1] - own[0] + 1 == len(own) and bool(np.all(tokens[own] == places[item.kind]))
        if not whole:
            raise DataError(f"{source or 'tokens'}: the placeholders of an {item.kind} are not side by side")
        spans.append(Span(item.kind, int(own[0]), int(own[-1]) + 1))
    return spans


def whole_before(limit: int, spans: Sequence[Span]) -> tuple[int, int]:
    """Where a text of at most ``limit`` tokens can end so that no medium is cut.

    Args:
      limit: tokens at most.
      spans: of the media, in order.

    Returns:
      The number of tokens, ``limit`` or where the span that it cuts begins, and the number of media before it.
    """
    kept = 0
    for span in spans:
        if span.end > limit:
            return min(limit, span.first), kept
        kept += 1
    return limit, kept


def _count(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none"
