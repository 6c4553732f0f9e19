"""Texts as they are tokenized, and which characters of them are learned.

A chat template says which text the assistant writes if it has generation markers. Otherwise the conversation is
rendered again and again, each time one turn longer, and what a turn adds is that turn's text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from yatt_jax.data.attributes import condition
from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import Turn, text_of
from yatt_jax.data.examples import Chat, Plain, Text
from yatt_jax.data.media.processor import MediaProcessor

Span = tuple[int, int]
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A text to be tokenized without further special tokens.

    Attributes:
      text: the whole.
      spans: first and last + 1 character of each learned part, ascending.
      source: "file:line" of the record.
      answer_end: the character after the text of a last turn by the assistant (of a plain text: after the whole); None
        where another one has the last word.
    """

    text: str
    spans: list[Span]
    source: str
    answer_end: int | None


class Renderer:
    """Renders texts.

    Args:
      tokenizer: the model's.
      prefix: what goes before plain texts.
      system: put before conversations that do not begin with a system turn.
      template_kwargs: further variables of the template.
      media: what the text around media becomes; None for a model of text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        prefix: str = "",
        system: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        self._tokenizer, self._prefix, self._system = tokenizer, prefix, system
        self._kwargs = dict(template_kwargs or {})
        self._media = media

    def render(self, text: Text, *, markers: bool = True) -> Rendered:
        """A text with the spans of what is learned of it.

        Args:
          text: turns or plain text.
          markers: whether the template's generation markers are used where it has them.

        Raises:
          DataError: no chat template, one that refuses the conversation, or one that does not tell a turn's text; the
            message gives file and line.
        """
        return self._plain(text) if isinstance(text, Plain) else self._chat(text, markers)

    def _plain(self, text: Plain) -> Rendered:
        if self._system:
            raise DataError(
                f"{text.source}: data.system is set, but this is plain text that no chat template renders; clear "
                f"data.system or give the record as turns"
            )
        prefix = "" if (text.prompt or text.answer).startswith(self._prefix) else self._prefix
        before = prefix + text.prompt
        # A beginning token that is part of the text is no answer.
        start = len(before) or (len(self._prefix) if text.answer.startswith(self._prefix) else 0)
        whole = before + text.answer
        return Rendered(whole, [(start, len(whole))], text.source, len(whole))

    def _chat(self, chat: Chat, markers: bool) -> Rendered:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{chat.source}: a conversation needs a chat template, and the tokenizer has none; set "
                f"data.chat_template to a jinja file, or give plain strings"
            )
        turns, learn, labels = list(chat.turns), list(chat.learn), list(chat.labels or [""] * len(chat.turns))
        if self._system and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self._system})
            learn.insert(0, False)
            labels.insert(0, "")
        for i, label in enumerate(labels):
            if label:
                turns[i] = turns[i] | {"content": condition(label) + turns[i]["content"]}
        learned = [i for i, wanted in enumerate(learn) if wanted]
        whole, marked = self._apply(turns, chat.source)
        found = self._marked(turns, learned, marked) if markers and self._has_markers() else None
        spans = found if found is not None else [self._added(turns, i, whole, chat.source) for i in learned]
        end = self._answer_end(turns, whole, spans[-1][0] if learn[-1] else None, chat.source)
        spans = [self._after_label(whole, span, labels[i], chat.source) for span, i in zip(spans, learned, strict=True)]
        return Rendered(whole, spans, chat.source, end)

    def _answer_end(self, turns: Sequence[Turn], whole: str, begin: int | None, source: str) -> int | None:
        """Where the text of a last turn by the assistant ends; ``begin`` is where it begins, if that is known."""
        if turns[-1]["role"] != "assistant":
            return None
        text = text_of(turns[-1]["content"]).strip()
        if begin is None:
            before = self._apply(turns[:-1], source, ask=True)[0] if len(turns) > 1 else ""
            begin = len(before) if whole.startswith(before) else whole.rfind(text)
        return max(whole.find(text, begin), begin) + len(text)

    def _has_markers(self) -> bool:
        return bool(_MARKER.search(self._tokenizer.get_chat_template()))

    def _marked(self, turns: Sequence[Turn], learned: Sequence[int], marked: list[Span]) -> list[Span] | None:
        """Spans by the template's markers; None if they do not tell which turn is which."""
        assistants = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if not set(learned) <= set(assistants):
            return None
        if len(marked) == len(assistants):
            return [span for span, i in zip(marked, assistants, strict=True) if i in learned]
        return None

    def _added(self, turns: Sequence[Turn], i: int, whole: str, source: str) -> Span:
        """The span of turn ``i``: what it adds to the text that the model would be asked to go on from."""
        through, _ = self._apply(turns[: i + 1], source)
        by_assistant = turns[i]["role"] == "assistant"
        before = self._apply(turns[:i], source, ask=by_assistant)[0] if i else ""
        for shorter, longer, what in ((before, through, "before it"), (through, whole, "after it")):
            if not longer.startswith(shorter):
                raise DataError(
                    f"{source}: the chat template renders turn {i + 1} ({turns[i]['role']}) otherwise with and "
                    f"without the text {what}, so that the turn's own text cannot be told; use a template with "
                    f"{{% generation %}} markers (data.chat_template), other data.template_kwargs, or "
                    f"data.learn = 'all'"
                )
        start = len(before)
        if not by_assistant or not i:
            start = max(start, through.find(text_of(turns[i]["content"]), start))
        return start, len(through)

    def _after_label(self, whole: str, span: Span, label: str, source: str) -> Span:
        """A span without the label that its text is conditioned on."""
        if not label:
            return span
        text = condition(label)
        at = whole.find(text, *span)
        if at < 0:
            raise DataError(f"{source}: the chat template changes the label {label!r} at the beginning of a turn")
        return at + len(text), span[1]

    def _apply(self, turns: Sequence[Turn], source: str, *, ask: bool = False) -> tuple[str, list[Span]]:
        """Rendered turns and the spans of the template's markers; ``ask`` adds the beginning of an answer."""
        try:
            texts, found = render_jinja_template(
                [list(turns)],
                chat_template=self._tokenizer.get_chat_template(),
                return_assistant_tokens_mask=self._has_markers(),
                add_generation_prompt=ask,
                **{**self._tokenizer.special_tokens_map, **self._kwargs},
            )
        except Exception as error:  # a template can raise anything
            roles = ", ".join(str(turn["role"]) for turn in turns)
            raise DataError(
                f"{source}: the chat template failed on turns ({roles}): {type(error).__name__}: {error}"
            ) from error
        spans: Any = found[0] if found else ()
        return self._media.rewrite(texts[0], spans) if self._media else (texts[0], list(spans))
