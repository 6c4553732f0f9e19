"""From records to tokenized prompts that fit the length limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerFast

from yatt_jax.data.config import DataConfig, DataError
from yatt_jax.data.conversation import Conversation, Turn, parse_prompt
from yatt_jax.data.records import Record
from yatt_jax.data.tokenizer import encode, raw_prefix, render
from yatt_jax.types import Prompt


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

    Raises:
      DataError: an empty template file.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        self._config, self._tokenizer = config, tokenizer
        if config.chat_template not in ("auto", "raw"):
            template = Path(config.chat_template).read_text("utf-8")
            if not template.strip():
                raise DataError(f"{config.chat_template}: empty chat template")
            tokenizer.chat_template = template
        self._wrap = config.chat_template != "raw" and bool(tokenizer.chat_template)
        self._prefix = raw_prefix(tokenizer)

    def parse(self, record: Record) -> Conversation:
        """The conversation of a record, without rendering it.

        Raises:
          DataError: the record does not fit.
        """
        conversation = parse_prompt(record, wrap=self._wrap)
        if self._config.system and not conversation.messages:
            raise DataError(
                f"{record.source}: data.system is set, but this prompt is plain text that no chat template renders; "
                f"clear data.system or give the prompt as messages"
            )
        return conversation

    def read(self, records: Sequence[tuple[int, Record | DataError]]) -> list[Outcome]:
        """Prompts of records, in order.

        Args:
          records: number of the record in its data set, and the record or why it could not be read.
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
        for (place, conversation, text), ids in zip(rendered, tokens, strict=True):
            index = records[place][0]
            outcomes[place] = (
                Outcome(None, "malformed", f"{conversation.source}: {ids}")
                if isinstance(ids, str)
                else self._fit(conversation, text, ids, index)
            )
        return [outcome for outcome in outcomes if outcome is not None]

    def _render(self, messages: Sequence[Turn], text: str, record: Record | Conversation) -> str:
        """The text to tokenize: turns through the template, plain text after the beginning token."""
        if messages:
            return render(
                self._tokenizer,
                messages,
                system=self._config.system,
                template_kwargs=self._config.template_kwargs,
                source=record.source,
            )
        return text if text.startswith(self._prefix) else self._prefix + text

    def _encode(self, texts: Sequence[str]) -> list[list[int] | str]:
        """Token ids of each text, or why it has none."""
        try:
            return list(encode(self._tokenizer, texts))
        except Exception as error:  # the tokenizers library raises Exception itself
            if len(texts) == 1:
                return [f"the tokenizer failed: {error}; does its vocabulary have every character of the prompt?"]
            return [self._encode([text])[0] for text in texts]

    def _fit(self, conversation: Conversation, text: str, ids: list[int], index: int) -> Outcome:
        limit = self._config.max_prompt_tokens
        if not ids:
            return Outcome(None, "malformed", f"{conversation.source}: the prompt has no tokens")
        if len(ids) <= limit:
            return Outcome(_prompt(conversation, conversation.messages, text, ids, index))
        message = f"{conversation.source}: a prompt of {len(ids)} tokens, and data.max_prompt_tokens is {limit}"
        if self._config.overlong != "cut":
            return Outcome(None, "overlong", message)
        try:
            messages, text, ids = self._cut(conversation)
        except DataError as error:
            return Outcome(None, "malformed", f"{message}; it cannot be cut: {error}")
        return Outcome(_prompt(conversation, messages, text, ids, index), "cut", message)

    def _cut(self, conversation: Conversation) -> tuple[list[Turn], str, list[int]]:
        """Turns, rendered text and tokens of an over-long conversation, cut from its beginning until it fits."""
        limit, messages = self._config.max_prompt_tokens, conversation.messages
        while True:
            text = self._render(messages, conversation.text, conversation)
            ids = encode(self._tokenizer, [text])[0]
            shorter = _without_oldest(messages)
            if len(ids) <= limit or shorter == messages:
                break
            messages = shorter
        whole = messages[-1]["content"] if messages else conversation.text
        encoding = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoding["offset_mapping"]
        keep = len(offsets)
        while len(ids) > limit:
            keep -= len(ids) - limit
            if keep <= 0:
                raise DataError("what surrounds the text of the last turn takes the whole limit")
            part = whole[offsets[-keep][0] :]
            if messages:
                messages = [*messages[:-1], messages[-1] | {"content": part}]
            text = self._render(messages, part, conversation)
            ids = encode(self._tokenizer, [text])[0]
        return messages, text, ids


def _without_oldest(messages: Sequence[Turn]) -> list[Turn]:
    """A conversation that begins one user turn later, system turns kept; the same if there is no later user turn."""
    start = next((i for i, turn in enumerate(messages) if turn["role"] not in ("system", "developer")), 0)
    later = next((i for i in range(start + 1, len(messages)) if messages[i]["role"] == "user"), None)
    return list(messages) if later is None else [*messages[:start], *messages[later:]]


def _prompt(conversation: Conversation, messages: list[Turn], text: str, ids: list[int], index: int) -> Prompt:
    return Prompt(messages, text, ids, conversation.columns, conversation.source, index)
