"""From what clients send to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerFast

from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import Turn, parse_turn
from yatt_jax.data.tokenizer import encode, raw_prefix, render, stop_token_ids
from yatt_jax.errors import InputError


class RequestError(InputError):
    """A request that cannot be answered; the message is sent back."""


class Texts:
    """Tokenizes as reward models are trained: see ``data.documents``.

    Args:
      tokenizer: the model's.
      vocab: of the model.
      limit: longest row in tokens.
      cut: whether longer ones lose their beginning; else they are refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, vocab: int, limit: int, cut: bool) -> None:
        self._tokenizer, self._vocab, self._limit, self._cut = tokenizer, vocab, limit, cut
        self._stops = stop_token_ids(tokenizer)
        self._prefix = raw_prefix(tokenizer)

    def rows(self, request: dict[str, Any]) -> tuple[list[Int[np.ndarray, "T"]], list[bool]]:
        """The rows of a request to score, and which of them were too long.

        * ``{"samples": [{"prompt": text, "messages": turns, "completion": text}]}``: the turns and an answer by the
          assistant, rendered by the chat template; without turns the two texts as they are. The end token follows
          where neither wrote one.
        * ``{"sentences": [text]}``: whole texts as they are; ``"add_EOS": true`` ends them.
        * ``{"tokens": [[ids]], "sequence_lengths": [numbers]}``: ids as they are.

        Raises:
          RequestError: none of these, malformed, or too long.
        """
        given = [name for name in ("samples", "sentences", "tokens") if name in request]
        if len(given) != 1:
            raise RequestError(
                f'give one of "samples", "sentences" and "tokens" (with "sequence_lengths"); the fields are '
                f"{sorted(request)}"
            )
        if given == ["tokens"]:
            rows = self._ids(request)
        elif given == ["sentences"]:
            texts = _listed(request, "sentences")
            for i, text in enumerate(texts):
                if not isinstance(text, str):
                    raise RequestError(f"sentences[{i}]: expected a string, found {type(text).__name__}")
            rows = self._encode(
                [self._with_prefix(text) for text in texts], [request.get("add_EOS") is True] * len(texts)
            )
        else:
            texts = [self._text(one, f"samples[{i}]") for i, one in enumerate(_listed(request, "samples"))]
            rows = self._encode(texts, [True] * len(texts))
        return self._fit(rows)

    def prompts(self, request: dict[str, Any]) -> tuple[list[str], list[Int[np.ndarray, "T"]]]:
        """The prompts of a request to answer, as text and tokens: ``{"prompts": [text, or turns]}``.

        With a chat template, a text is one turn of the user's.

        Raises:
          RequestError: malformed, or too long.
        """
        texts = []
        for i, one in enumerate(_listed(request, "prompts")):
            if isinstance(one, str) and not self._tokenizer.chat_template:
                texts.append(self._with_prefix(one))
                continue
            turns = [{"role": "user", "content": one}] if isinstance(one, str) else _turns(one, f"prompts[{i}]")
            texts.append(self._render(turns, f"prompts[{i}]"))
        rows, _ = self._fit(self._encode(texts, [False] * len(texts)))
        return texts, rows

    def _text(self, sample: Any, where: str) -> str:
        if not isinstance(sample, dict) or not isinstance(sample.get("completion"), str):
            raise RequestError(f'{where}: expected an object with a string under "completion"')
        if sample.get("messages"):
            turns, answer = _turns(sample["messages"], f"{where}.messages"), sample["completion"]
            if turns[-1]["role"] == "assistant":
                answer = turns.pop()["content"] + answer
            return self._whole([*turns, {"role": "assistant", "content": answer}], where)
        if not isinstance(sample.get("prompt"), str):
            raise RequestError(f'{where}: expected a string under "prompt", or turns under "messages"')
        return self._with_prefix(sample["prompt"] + sample["completion"])

    def _with_prefix(self, text: str) -> str:
        return text if text.startswith(self._prefix) else self._prefix + text

    def _render(self, turns: list[Turn], where: str) -> str:
        try:
            return render(self._tokenizer, turns)
        except DataError as error:
            raise RequestError(f"{where}: {error}") from error

    def _whole(self, turns: list[Turn], where: str) -> str:
        """A conversation with its answer."""
        if not self._tokenizer.chat_template:
            raise RequestError(f"{where}: turns need a chat template, and the tokenizer has none; set chat_template")
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # a template can raise anything
            raise RequestError(f"{where}: the chat template failed: {error}") from error

    def _encode(self, texts: Sequence[str], ended: Sequence[bool]) -> list[Int[np.ndarray, "T"]]:
        """Token ids; those that are to be ended get an end token where none of the last few is one."""
        try:
            rows = encode(self._tokenizer, texts)
        except Exception as error:  # the tokenizers library raises Exception itself
            raise RequestError(f"a text cannot be tokenized: {error}") from error
        end = self._tokenizer.eos_token_id
        return [
            np.array([*row, end] if wanted and not set(row[-3:]) & set(self._stops) else row, np.int32)
            for row, wanted in zip(rows, ended, strict=True)
        ]

    def _ids(self, request: dict[str, Any]) -> list[Int[np.ndarray, "T"]]:
        rows, lengths = _listed(request, "tokens"), _listed(request, "sequence_lengths")
        if len(rows) != len(lengths):
            raise RequestError(f"{len(rows)} tokens and {len(lengths)} sequence_lengths: expected as many")
        found = []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            length = length[0] if isinstance(length, list) and len(length) == 1 else length
            if not isinstance(row, list) or any(type(token) is not int for token in row):
                raise RequestError(f"tokens[{i}]: expected a list of whole numbers")
            if type(length) is not int or not 0 <= length <= len(row):
                raise RequestError(f"sequence_lengths[{i}] = {length}: expected a number up to {len(row)}")
            if any(not 0 <= token < self._vocab for token in row[:length]):
                raise RequestError(f"tokens[{i}]: the vocabulary has {self._vocab} entries, from 0")
            found.append(np.array(row[:length], np.int32))
        return found

    def _fit(self, rows: list[Int[np.ndarray, "T"]]) -> tuple[list[Int[np.ndarray, "T"]], list[bool]]:
        for i, row in enumerate(rows):
            if not len(row):
                raise RequestError(f"text {i} has no tokens")
            if len(row) > self._limit and not self._cut:
                raise RequestError(f"text {i} has {len(row)} tokens, and the longest allowed has {self._limit}")
        return [row[-self._limit :] for row in rows], [len(row) > self._limit for row in rows]


def _listed(request: dict[str, Any], name: str) -> list[Any]:
    value = request.get(name)
    if not isinstance(value, list):
        raise RequestError(f'"{name}": expected a list, found {type(value).__name__}')
    return value


def _turns(value: Any, where: str) -> list[Turn]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where}: expected a list of turns")
    try:
        return [parse_turn(turn, f"{where}[{i}]") for i, turn in enumerate(value)]
    except DataError as error:
        raise RequestError(str(error)) from error
