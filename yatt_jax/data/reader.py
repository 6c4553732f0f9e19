"""From records to tokenized prompts that fit the length limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from yatt_jax.data.config import DataConfig, DataError
from yatt_jax.data.conversation import Content, Conversation, Turn, media_of, parse_prompt, text_of
from yatt_jax.data.media.places import expand
from yatt_jax.data.media.processor import MediaProcessor, check_sources
from yatt_jax.data.media.sources import Source
from yatt_jax.data.records import Record
from yatt_jax.data.tokenizer import encode, raw_prefix, render
from yatt_jax.types import MediaItem, Prompt


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a record.

    Attributes:
      prompt: the prompt; None if it cannot be used.
      fault: "" when all is well; "malformed"; "overlong"; or "cut" for an over-long prompt made to fit.
      message: what was wrong, with file and line.
    """

    prompt: Prompt | None
    fault: Literal["", "malformed", "overlong", "cut"] = ""
    message: str = ""


class PromptReader:
    """Parses, renders, tokenizes and fits prompt records.

    Where ``config.chat_template`` names a file, its template is set on the tokenizer, so that a model exported with the
    tokenizer carries it.

    Args:
      config: the data section.
      tokenizer: the model's.
      media: reads its media; None for a model of text.

    Raises:
      DataError: an empty template file.
    """

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerFast, media: MediaProcessor | None = None
    ) -> None:
        self._config, self._tokenizer, self._media = config, tokenizer, media
        if config.chat_template not in ("auto", "raw"):
            template = Path(config.chat_template).read_text("utf-8")
            if not template.strip():
                raise DataError(f"{config.chat_template}: empty chat template")
            tokenizer.chat_template = template
        self._wrap = config.chat_template != "raw" and bool(tokenizer.chat_template)
        self._prefix = raw_prefix(tokenizer)

    def parse(self, record: Record) -> Conversation:
        """The conversation of a record, without rendering it or decoding its media.

        Raises:
          DataError: the record does not fit, or names media that are not there or that the model does not read.
        """
        conversation = parse_prompt(record, wrap=self._wrap)
        if self._config.system and not conversation.messages:
            raise DataError(
                f"{record.source}: data.system is set, but this prompt is plain text that no chat template renders; "
                f"clear data.system or give the prompt as messages"
            )
        check_sources(conversation.media, self._media)
        return conversation

    def read(self, records: Sequence[tuple[int, Record | DataError]], *, keep: bool = True) -> list[Outcome]:
        """Prompts of records, in order.

        Args:
          records: number of the record in its data set, and the record or why it could not be read.
          keep: whether media hold their values, or make them again when they are asked for.
        """
        outcomes: list[Outcome | None] = [None] * len(records)
        rendered: list[tuple[int, Conversation, str]] = []
        for place, (_, record) in enumerate(records):
            try:
                if isinstance(record, DataError):
                    raise record
                conversation = self.parse(record)
                rendered.append((place, conversation, self._render(conversation.messages, conversation.text, record)))
            except DataError as error:
                outcomes[place] = Outcome(None, "malformed", str(error))
        tokens = self._encode([text for _, _, text in rendered])
        media = self._items([conversation.media for _, conversation, _ in rendered], keep)
        for (place, conversation, text), ids, items in zip(rendered, tokens, media, strict=True):
            try:
                if isinstance(items, DataError):
                    raise items
                if isinstance(ids, str):
                    raise DataError(f"{conversation.source}: {ids}")
                outcomes[place] = self._fit(conversation, text, ids, items, records[place][0])
            except DataError as error:
                outcomes[place] = Outcome(None, "malformed", str(error))
        return [outcome for outcome in outcomes if outcome is not None]

    def _items(self, sources: Sequence[list[Source]], keep: bool) -> list[list[MediaItem] | DataError]:
        """The media of each conversation, or why one of them cannot be used."""
        if self._media is None:
            return [[] for _ in sources]
        found = iter(self._media.items([source for own in sources for source in own], keep=keep))
        media: list[list[MediaItem] | DataError] = []
        for own in sources:
            items = [next(found) for _ in own]
            broken = next((item for item in items if isinstance(item, DataError)), None)
            media.append(broken or [item for item in items if not isinstance(item, DataError)])
        return media

    def _render(self, messages: Sequence[Turn], text: str, record: Record | Conversation) -> str:
        """The text to tokenize: turns through the template, plain text after the beginning token."""
        if not messages:
            return text if text.startswith(self._prefix) else self._prefix + text
        rendered = render(
            self._tokenizer,
            messages,
            system=self._config.system,
            template_kwargs=self._config.template_kwargs,
            source=record.source,
        )
        return self._media.rewrite(rendered)[0] if self._media else rendered

    def _encode(self, texts: Sequence[str]) -> list[list[int] | str]:
        """Token ids of each text, or why it has none."""
        try:
            return list(encode(self._tokenizer, texts))
        except Exception as error:  # the tokenizers library raises Exception itself
            if len(texts) == 1:
                return [f"the tokenizer failed: {error}; does its vocabulary have every character of the prompt?"]
            return [self._encode([text])[0] for text in texts]

    def _expand(self, ids: list[int], items: Sequence[MediaItem], source: str) -> list[int]:
        """Token ids with as many placeholders as the media have features."""
        if self._media is None:
            return ids
        return expand(np.array(ids, np.int64), items, self._media.places, source)[0].tolist()

    def _fit(
        self, conversation: Conversation, text: str, ids: list[int], items: list[MediaItem], index: int
    ) -> Outcome:
        limit = self._config.max_prompt_tokens
        if not ids:
            raise DataError(f"{conversation.source}: the prompt has no tokens")
        ids = self._expand(ids, items, conversation.source)
        if len(ids) <= limit:
            return Outcome(_prompt(conversation, conversation.messages, text, ids, items, index))
        of_media = sum(item.tokens for item in items)
        message = f"{conversation.source}: a prompt of {len(ids)} tokens, and data.max_prompt_tokens is {limit}"
        if of_media:
            message = message.replace(" tokens,", f" tokens, {of_media} of them for images, audio and video,", 1)
        if self._config.overlong != "cut":
            return Outcome(None, "overlong", message)
        try:
            messages, text, ids, items = self._cut(conversation, items)
        except DataError as error:
            return Outcome(None, "malformed", f"{message}; it cannot be cut: {error}")
        return Outcome(_prompt(conversation, messages, text, ids, items, index), "cut", message)

    def _cut(
        self, conversation: Conversation, items: list[MediaItem]
    ) -> tuple[list[Turn], str, list[int], list[MediaItem]]:
        """Turns, rendered text, tokens and media of an over-long conversation, cut from its beginning until it fits.

        Media go with their turn; of the last turn only text is cut.
        """
        limit, messages = self._config.max_prompt_tokens, conversation.messages

        def tokens_of(messages: Sequence[Turn], plain: str) -> tuple[str, list[int]]:
            text = self._render(messages, plain, conversation)
            return text, self._expand(encode(self._tokenizer, [text])[0], items, conversation.source)

        while True:
            items = items[len(items) - len(media_of(messages)) :]
            text, ids = tokens_of(messages, conversation.text)
            shorter = _without_oldest(messages)
            if len(ids) <= limit or shorter == messages:
                break
            messages = shorter
        whole = text_of(messages[-1]["content"]) if messages else conversation.text
        encoding = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoding["offset_mapping"]
        keep = len(offsets)
        while len(ids) > limit:
            keep -= len(ids) - limit
            if keep <= 0:
                raise DataError("what surrounds the text of the last turn takes the whole limit")
            part = whole[offsets[-keep][0] :]
            if messages:
                messages = [*messages[:-1], messages[-1] | {"content": _last(messages[-1]["content"], len(part))}]
            text, ids = tokens_of(messages, part)
        return messages, text, ids, items


def _last(content: Content, characters: int) -> Content:
    """A content with the last characters of its text alone, and all its media."""
    if isinstance(content, str):
        return content[len(content) - characters :]
    parts: list[dict[str, Any]] = []
    for part in reversed(content):
        if part["type"] == "text":
            own = part["text"]
            part = part | {"text": own[max(len(own) - characters, 0) :]}
            characters = max(characters - len(own), 0)
        parts.append(part)
    return parts[::-1]


def _without_oldest(messages: Sequence[Turn]) -> list[Turn]:
    """A conversation that begins one user turn later, system turns kept; the same if there is no later user turn."""
    start = next((i for i, turn in enumerate(messages) if turn["role"] not in ("system", "developer")), 0)
    later = next((i for i in range(start + 1, len(messages)) if messages[i]["role"] == "user"), None)
    return list(messages) if later is None else [*messages[:start], *messages[later:]]


def _prompt(
    conversation: Conversation,
    messages: list[Turn],
    text: str,
    ids: list[int],
    items: Sequence[MediaItem],
    index: int,
) -> Prompt:
    return Prompt(messages, text, ids, conversation.columns, conversation.source, index, tuple(items))
