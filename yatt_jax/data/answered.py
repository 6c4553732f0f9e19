"""Prompts with the answers that data gives them, from records of fine-tuning in any of their formats."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from yatt_jax.data.config import DataConfig, DataError
from yatt_jax.data.conversation import Conversation
from yatt_jax.data.documents import Document, Encoder
from yatt_jax.data.examples import Chat, Plain, Reading
from yatt_jax.data.formats import Parser
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.reader import Outcome, PromptReader
from yatt_jax.data.records import Record
from yatt_jax.types import TextRows

_PARTS = ("prompt", "completion", "input", "output", "messages", "conversations", "text")


class AnsweredReader:
    """Reads records of ``formats.TextRows``: the last answer that is to be learned, and what comes before it.

    The answer's text reaches rewards as the column ``completion``, beside the record's further columns.

    Args:
      config: the data section.
      tokenizer: the model's.
      max_answer_tokens: longest answer, its end included; ``config.overlong`` says what happens to longer ones ("cut"
        drops their end).

    Raises:
      DataError: an empty template file.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerFast, max_answer_tokens: int) -> None:
        self._config, self._limit = config, max_answer_tokens
        self._prompts = PromptReader(config, tokenizer)
        rows = OfflineConfig(
            format="completion",
            max_tokens=sys.maxsize,
            system=config.system,
            chat_template=config.chat_template,
            template_kwargs=config.template_kwargs,
        )
        self._documents = Encoder(rows, tokenizer, TextRows)
        wrap = config.chat_template != "raw" and bool(tokenizer.chat_template)
        self._parser = Parser(TextRows, "auto", Reading(wrap))

    def parse(self, record: Record) -> Conversation:
        """The prompt of a record, without rendering it.

        Raises:
          DataError: the record does not fit, or has no prompt.
        """
        return self._prompts.parse(self._split(record))

    def read(self, records: Sequence[tuple[int, Record | DataError]], *, keep: bool = True) -> list[Outcome]:
        """Prompts of records with their answers, in order; see ``PromptReader.read``."""
        split = [(index, self._try_split(record)) for index, record in records]
        pairs = zip(self._prompts.read(split, keep=keep), self._documents.read(split), strict=True)
        return [
            outcome
            if outcome.prompt is None
            else Outcome(None, "malformed", whole.message)
            if whole.row is None
            else self._join(outcome, whole.row.documents[0])
            for outcome, whole in pairs
        ]

    def _split(self, record: Record) -> Record:
        """The record as prompt and completion.

        Raises:
          DataError: it does not fit, or has no prompt.
        """
        example, source = self._parser.parse(record), record.source
        further = {name: value for name, value in record.fields.items() if name not in _PARTS}
        if isinstance(example, Plain):
            if not example.prompt:
                raise DataError(f'{source}: field "text": there is no prompt to answer; give "prompt" and "completion"')
            return Record(further | {"prompt": example.prompt, "completion": example.answer}, source)
        assert isinstance(example, Chat)
        if any(example.labels):
            raise DataError(f"{source}: answers that are conditioned on labels can not be sampled here")
        last = max(i for i, learned in enumerate(example.learn) if learned)
        if last == 0 or example.turns[last]["role"] != "assistant":
            raise DataError(f"{source}: there is no prompt before the last answer of the assistant's")
        answer = example.turns[last]["content"]
        return Record(further | {"prompt": example.turns[:last], "completion": answer}, source)

    def _try_split(self, record: Record | DataError) -> Record | DataError:
        try:
            return record if isinstance(record, DataError) else self._split(record)
        except DataError as error:
            return error

    def _join(self, outcome: Outcome, whole: Document) -> Outcome:
        """The prompt with the tokens of its answer."""
        prompt, answer = outcome.prompt, whole.tokens[whole.mask].tolist()
        assert prompt is not None
        # Where a token holds the end of the prompt and the beginning of the answer, it is the answer's.
        tokens = prompt.tokens if outcome.fault == "cut" else whole.prompt.tolist()
        fault, message = outcome.fault, outcome.message
        if len(tokens) > self._config.max_prompt_tokens:
            fault = "overlong"
            message = (
                f"{prompt.source}: a prompt of {len(tokens)} tokens, and data.max_prompt_tokens is "
                f"{self._config.max_prompt_tokens}"
            )
        elif len(answer) > self._limit:
            fault = "cut" if self._config.overlong == "cut" else "overlong"
            message = (
                f"{prompt.source}: an answer of {len(answer)} tokens, and rollout.sampling.max_new_tokens is "
                f"{self._limit}"
            )
            answer = answer[: self._limit]
        joined = dataclasses.replace(prompt, tokens=tokens, answer=tuple(answer))
        return Outcome(None if fault == "overlong" else joined, fault, message)
