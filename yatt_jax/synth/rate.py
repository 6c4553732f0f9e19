"""Ratings of answers by a regression reward model, written as labels to train on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.reward_models import TextScorer, read_head
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.data.attributes import ATTRIBUTES, format_label
from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import Turn
from yatt_jax.data.documents import Encoder
from yatt_jax.data.examples import Chat, Reading
from yatt_jax.data.formats import Parser
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.records import Record, Table
from yatt_jax.errors import InputError, RunFailure, nearest
from yatt_jax.io import hf
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.rewards.model import Marked
from yatt_jax.synth.output import Output
from yatt_jax.types import LabelRows, TextRows


@dataclasses.dataclass(frozen=True)
class Scale:
    """What ratings are rounded to: multiples of ``step`` from ``low`` to ``high``."""

    low: float = 0.0
    high: float = 4.0
    step: float = 1.0

    def __post_init__(self) -> None:
        if not self.low < self.high or not self.step > 0:
            raise InputError(f"ratings from {self.low} to {self.high} in steps of {self.step}: no such scale")

    def round(self, value: float) -> float:
        """The nearest rating."""
        steps = round((min(max(value, self.low), self.high) - self.low) / self.step)
        return self.low + steps * self.step


class Rater:
    """A regression reward model that rates answers.

    Args:
      path: its folder.
      attributes: names of those that are wanted. A model with one output for each of ``data.attributes.ATTRIBUTES`` has
        them in that order; any other model has these, in this order.
      max_tokens: longest conversation.
      rows: answers that are rated at a time.
      chat_template: see ``OfflineConfig``.
      compute_dtype: of activations.

    Attributes:
      attributes: their names.
      tokenizer: the model's.

    Raises:
      InputError: a folder that holds no reward model, or attributes that are not its.
    """

    def __init__(
        self,
        path: Path,
        attributes: Sequence[str],
        *,
        max_tokens: int = 1024,
        rows: int = 64,
        chat_template: str = "auto",
        compute_dtype: str = "float32",
    ) -> None:
        _, outputs, _ = read_head(str(path), "the model of the attributes")
        self.attributes, self._columns = tuple(attributes), columns(attributes, outputs)
        self.tokenizer = tokenizers.load_tokenizer(str(path))
        config = OfflineConfig(max_tokens=max_tokens, chat_template=chat_template, on_error="skip")
        self._encoder = Encoder(config, self.tokenizer, LabelRows)
        train, _ = make_partitions(Split(), Split())
        model, self._params = hf.load_model(path, "reward", train, compute_dtype=compute_dtype)
        self._scorer = TextScorer(
            model, train, Hosts(), rows=rows, max_tokens=max_tokens, budget=max(max_tokens, min(8 * max_tokens, 4096))
        )

    def rate(self, conversations: Sequence[tuple[Sequence[Turn], str]]) -> list[dict[str, float] | str]:
        """The ratings of the last turn of each conversation, or why it has none.

        Args:
          conversations: turns, and "file:line" of their record.
        """
        outcomes = self._encoder.read([(i, _rated(*one)) for i, one in enumerate(conversations)])
        texts = [
            Marked(outcome.row.documents[0].tokens, (len(outcome.row) - 1,))
            for outcome in outcomes
            if outcome.row is not None
        ]
        found = iter(self._scorer(self._params, texts)[:, self._columns])
        return [
            outcome.message if outcome.row is None else self._named(next(found), outcome.row.example.source)
            for outcome in outcomes
        ]

    def _named(self, values: np.ndarray, source: str) -> dict[str, float] | str:
        if not np.isfinite(values).all():
            return f"{source}: the model's output is not finite"
        return dict(zip(self.attributes, values.tolist(), strict=True))


def columns(attributes: Sequence[str], outputs: int) -> list[int]:
    """Which outputs of a model are the wanted attributes; see ``Rater``.

    Raises:
      InputError: attributes that are not the model's.
    """
    for name in attributes:
        if not name or set(name) & set(":,\n"):
            raise InputError(f"attribute {name!r}: expected a name without colons and commas")
    if len(set(attributes)) < len(attributes):
        raise InputError(f"attributes {', '.join(attributes)}: one is named twice")
    if outputs == len(ATTRIBUTES):
        for name in attributes:
            if name not in ATTRIBUTES:
                near = nearest(name, ATTRIBUTES)
                raise InputError(f"the model has no attribute {name!r}{near}; it has {', '.join(ATTRIBUTES)}")
        return [ATTRIBUTES.index(name) for name in attributes]
    if len(attributes) != outputs:
        raise InputError(f"the model has {outputs} outputs, and {len(attributes)} attributes are named; name each")
    return list(range(outputs))


def _rated(turns: Sequence[Turn], source: str) -> Record:
    """A conversation as the model's training data has it; the rating is only there to have one."""
    written: list[dict[str, Any]] = [{"from": turn["role"], "value": turn["content"]} for turn in turns]
    written[-1]["label"] = f"{ATTRIBUTES[0]}:0"
    return Record({"conversations": written}, source)


def open_conversations(path: str, form: str = "auto") -> tuple[Parser, Table]:
    """The conversations of a path, in any format of fine-tuning.

    Raises:
      InputError: no such format, or files that cannot be read.
    """
    parser = Parser(TextRows, form, Reading(wrap=True))
    return parser, parser.open(path)


def annotate(
    rater: Rater, parser: Parser, table: Table, output: Output, *, scale: Scale | None = None, batch: int = 64
) -> None:
    """Writes every conversation with its answers rated, as records ``{"conversations", "mask", "type"}``.

    They are what attribute-conditioned fine-tuning reads: each turn of the assistant's has a label such as
    "quality:4,humor:0". Conversations with an answer that cannot be rated are left out and counted.

    Args:
      rater: the model.
      parser: of the records.
      table: the records.
      output: where they go; it may hold the first ones.
      scale: of the ratings.
      batch: records at a time.

    Raises:
      DataError: a record that fits no format, or that is no conversation.
      RunFailure: not one answer can be rated.
    """
    scale = scale or Scale()
    while not output.whole and output.done < len(table):
        chosen = range(output.done, min(output.done + batch, len(table)))
        chats = [_chat(parser, table[i]) for i in chosen]
        answers = [(chat, i) for chat in chats for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
        rated = rater.rate([(chat.turns[: i + 1], chat.source) for chat, i in answers])
        labels: dict[int, dict[int, dict[str, float]]] = {id(chat): {} for chat in chats}
        counts: Counter[str] = Counter()
        for (chat, i), ratings in zip(answers, rated, strict=True):
            if not isinstance(ratings, str):
                labels[id(chat)][i] = {name: scale.round(value) for name, value in ratings.items()}
        lines = []
        for chat in chats:
            wanted = sum(turn["role"] == "assistant" for turn in chat.turns)
            whole = len(labels[id(chat)]) == wanted
            counts["written" if whole else "not rated"] += 1
            if whole:
                lines.append(_line(chat, labels[id(chat)]))
                for ratings in labels[id(chat)].values():
                    counts["answers"] += 1
                    counts.update({f"sum of {name}": value for name, value in ratings.items()})  # type: ignore[dict-item]
        output.add(lines, len(chosen), counts)
    if not output.counts["written"]:
        raise RunFailure(f"{output.path}: none of {len(table)} conversations could be rated; raise max_tokens?")
    output.finish()


def means(counts: Mapping[str, float]) -> dict[str, float]:
    """The mean of each attribute over all answers, from what ``annotate`` counts."""
    answers = counts.get("answers", 0)
    sums = {name.removeprefix("sum of "): value for name, value in counts.items() if name.startswith("sum of ")}
    return {name: value / answers for name, value in sums.items()} if answers else {}


def _chat(parser: Parser, record: Record) -> Chat:
    example = parser.parse(record)
    if not isinstance(example, Chat):
        raise DataError(f"{record.source}: a text and no conversation, so that it has no answer to rate")
    return example


def _line(chat: Chat, ratings: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    names = {"user": "User", "assistant": "Assistant"}
    turns = list(enumerate(chat.turns))
    system = {"system": turns.pop(0)[1]["content"]} if chat.turns[0]["role"] == "system" else {}
    written = []
    for i, turn in turns:
        label = {"label": format_label(ratings[i])} if i in ratings else {}
        written.append({"from": names.get(turn["role"], turn["role"]), "value": turn["content"], **label})
    # With a mask, everybody else's turns would be learned.
    mask = {"mask": "User"} if {turn["role"] for _, turn in turns} == {"user", "assistant"} else {}
    return {**system, "conversations": written, **mask, "type": "VALUE_TO_TEXT"}
