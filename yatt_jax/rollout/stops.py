"""Stop strings: where in a row of tokens one is complete, and the text before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the sampling loop needs of a Hugging Face tokenizer."""

    @property
    def all_special_tokens(self) -> Sequence[str]:
        """Texts of the special tokens."""
        ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]:
        """Text of the ids."""
        ...


@dataclasses.dataclass(frozen=True)
class Stop:
    """A stop string found.

    Attributes:
      tokens: number of tokens up to and including the one that completes it.
      text: what precedes it.
    """

    tokens: int
    text: str


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, without special tokens."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def check_stops(tokenizer: Tokenizer, stop: Sequence[str]) -> None:
    """Refuses stop strings that could never be seen.

    Raises:
      ValueError: a stop string that is a special token: those are not part of the text.
    """
    for text in stop:
        if text in tokenizer.all_special_tokens:
            raise ValueError(
                f"sampling.stop: {text!r} is a special token of the tokenizer, and special tokens are not in the text "
                f"that is searched; put its id in sampling.stop_token_ids"
            )


def find_stop(
    tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str], *, checked: int = 0, min_new_tokens: int = 0
) -> Stop | None:
    """The first stop string in the text of a response.

    The token that completes it is the first one with which the text holds a stop string; this does not depend on how
    many tokens were sampled between two checks. Text that the first ``min_new_tokens - 1`` tokens already hold does not
    count, since a response cannot end there.

    Args:
      tokenizer: for decoding.
      tokens: the response so far.
      stop: the stop strings.
      checked: number of tokens known to hold none.
      min_new_tokens: least number of tokens of a response.
    """
    free = text_of(tokenizer, tokens[: min_new_tokens - 1]) if min_new_tokens > 1 else ""

    def position(count: int) -> int | None:
        text = text_of(tokenizer, tokens[:count])
        found = [text.find(s, max(0, len(free) - len(s) + 1)) for s in stop]
        return min((at for at in found if at >= 0), default=None)

    first = max(checked + 1, min_new_tokens, 1)
    if first > len(tokens) or position(len(tokens)) is None:
        return None
    for count in range(first, len(tokens) + 1):
        at = position(count)
        if at is not None:
            return Stop(count, text_of(tokenizer, tokens[:count])[:at])
    return None


class StopWatch:
    """Looks for stop strings in rows as they grow.

    Args:
      tokenizer: for decoding.
      stop: the stop strings.
      min_new_tokens: least number of tokens of a response.
      rows: number of rows watched.

    Attributes:
      found: the stop string of each row, or None.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_new_tokens: int, rows: int):
        self.found: list[Stop | None] = [None] * rows
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_new_tokens = min_new_tokens
        self._checked = [0] * rows

    def look(self, tokens_BN: np.ndarray, count_B: np.ndarray) -> list[bool]:
        """Checks what was written since the last look, and says which rows hold a stop string."""
        for row, checked in enumerate(self._checked):
            count = int(count_B[row])
            if self.found[row] is None and count > checked:
                self.found[row] = find_stop(
                    self._tokenizer,
                    tokens_BN[row, :count].tolist(),
                    self._stop,
                    checked=checked,
                    min_new_tokens=self._min_new_tokens,
                )
                self._checked[row] = count
        return [found is not None for found in self.found]
