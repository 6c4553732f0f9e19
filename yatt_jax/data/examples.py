"""What records hold, after reading and before tokens: a few host-side types that every format becomes."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from yatt_jax.data.conversation import Turn


@dataclasses.dataclass(frozen=True)
class Reading:
    """How strings in records become texts.

    Attributes:
      wrap: whether the strings of a prompt and its answer become a user's and an assistant's turn.
      step_separator: what joins rated steps.
    """

    wrap: bool
    step_separator: str = "\n"


@dataclasses.dataclass(frozen=True)
class Chat:
    """Turns, to be rendered by the chat template.

    Attributes:
      turns: ``{"role", "content"}``, see ``conversation.parse_turn``.
      learn: of each turn, whether it is an answer to be learned.
      source: "file:line" of the record.
      labels: of each turn, the label that its text is conditioned on, "" for none; empty: none at all.
    """

    turns: list[Turn]
    learn: list[bool]
    source: str
    labels: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Text that no template renders.

    Attributes:
      prompt: what the answer continues; may be empty.
      answer: the text to be learned.
      source: "file:line" of the record.
    """

    prompt: str
    answer: str
    source: str


Text: TypeAlias = Chat | Plain


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to a prompt.

    Attributes:
      chosen: prompt and preferred answer.
      rejected: prompt and the other.
      gap: how much better the chosen one is (difference of their ground-truth rewards, a margin, or the strength of the
        preference), not negative; None where the record does not say.
      tie: whether in fact neither is preferred.
    """

    chosen: Text
    rejected: Text
    gap: float | None = None
    tie: bool = False

    @property
    def source(self) -> str:
        """ "file:line" of the record."""
        return self.chosen.source


@dataclasses.dataclass(frozen=True)
class Unpaired:
    """An answer that is good or not.

    Attributes:
      text: prompt and answer.
      good: whether it is wanted.
    """

    text: Text
    good: bool

    @property
    def source(self) -> str:
        """ "file:line" of the record."""
        return self.text.source


@dataclasses.dataclass(frozen=True)
class Rated:
    """A text with numbers to be predicted for it.

    Attributes:
      text: prompt and answer; nothing of it is learned.
      ratings: one for each attribute; -100 where there is none.
    """

    text: Text
    ratings: tuple[float, ...]

    @property
    def source(self) -> str:
        """ "file:line" of the record."""
        return self.text.source


@dataclasses.dataclass(frozen=True)
class Steps:
    """An answer whose steps are rated.

    Attributes:
      text: prompt and answer; the answer is the steps, joined.
      ends: of each step, the offset in the answer after its last character.
      ratings: of each step, from 0 (wrong) to 1 (right); -100 where there is none.
    """

    text: Text
    ends: tuple[int, ...]
    ratings: tuple[float, ...]

    @property
    def source(self) -> str:
        """ "file:line" of the record."""
        return self.text.source


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Tokens with the largest logits of a teacher. Index t is about token t, as predicted from those before it.

    Attributes:
      tokens: ids.
      mask: which tokens are trained.
      logits: the teacher's K largest logits for each token.
      ids: their vocabulary entries.
      log_normalizer: logarithm of the sum of all exp(logits) of the teacher, so that ``logits - log_normalizer`` are
        log-probabilities.
      source: "file:line" of the record.
    """

    tokens: Int[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]
    logits: Float[np.ndarray, "T K"]
    ids: Int[np.ndarray, "T K"]
    log_normalizer: Float[np.ndarray, "T"]
    source: str


Example: TypeAlias = Text | Pair | Unpaired | Rated | Steps | Teacher
