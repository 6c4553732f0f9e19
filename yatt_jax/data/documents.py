"""From examples to token ids: which tokens are learned, where texts end, and what happens to long ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerFast

from yatt_jax.data.attributes import MISSING
from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import media_of
from yatt_jax.data.encoded import Document, Encoded
from yatt_jax.data.examples import Chat, Example, Pair, Plain, Rated, Reading, Steps, Teacher, Text, Unpaired
from yatt_jax.data.formats import Kind, Parser
from yatt_jax.data.media.places import expand, find_spans
from yatt_jax.data.media.processor import MediaProcessor, check_sources
from yatt_jax.data.media.sources import Source
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.order import Rows as Selection
from yatt_jax.data.records import Record, Table
from yatt_jax.data.spans import Rendered, Renderer
from yatt_jax.data.tokenizer import raw_prefix, stop_token_ids
from yatt_jax.errors import InputError
from yatt_jax.types import MediaItem, TextRows

Fault: TypeAlias = Literal["", "malformed", "overlong", "cut", "tie"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a record.

    Attributes:
      row: the row; None if it cannot be used.
      fault: "" when all is well; "malformed"; "overlong"; "cut" for an over-long row made to fit; "tie" for a pair of
        which neither is preferred.
      message: what was wrong, with file and line.
    """

    row: Encoded | None
    fault: Fault = ""
    message: str = ""


class Encoder:
    """Parses, renders, tokenizes and fits records.

    Where ``config.chat_template`` names a file, its template is set on the tokenizer, so that a model exported with the
    tokenizer carries it.

    Args:
      config: the data section.
      tokenizer: the model's.
      kind: the kind of rows that is wanted.
      needs_gap: whether each pair must say by how much the chosen answer is better.
      media: reads the model's media; None for a model of text.

    Raises:
      DataError: an empty template file.
      InputError: ``config.format`` or ``config.learn`` is none of this kind's.
    """

    def __init__(
        self,
        config: OfflineConfig,
        tokenizer: PreTrainedTokenizerFast,
        kind: Kind,
        *,
        needs_gap: bool = False,
        media: MediaProcessor | None = None,
    ) -> None:
        self._config, self._tokenizer, self._needs_gap, self._media = config, tokenizer, needs_gap, media
        self._all = config.learn == "all"
        if self._all and kind is not TextRows:
            raise InputError(f"data.learn = 'all' is for texts to imitate; {kind.__name__} need 'answers'")
        if config.chat_template not in ("auto", "raw"):
            template = Path(config.chat_template).read_text("utf-8")
            if not template.strip():
                raise DataError(f"{config.chat_template}: empty chat template")
            tokenizer.chat_template = template
        wrap = config.chat_template != "raw" and bool(tokenizer.chat_template)
        self._parser = Parser(kind, config.format, Reading(wrap, config.step_separator))
        self._renderer = Renderer(
            tokenizer,
            prefix=raw_prefix(tokenizer),
            system=config.system,
            template_kwargs=config.template_kwargs,
            media=media,
        )
        self._stops = np.array(stop_token_ids(tokenizer, template_kwargs=config.template_kwargs))
        self._width: tuple[int, str] | None = None

    @property
    def width(self) -> int:
        """Attributes of a label, or logits a token; 0 where there are none."""
        return self._width[0] if self._width else 0

    def find_width(self, rows: Selection) -> None:
        """Takes the width from the first record that fits; from then on every other must have the same."""
        for i in range(len(rows)):
            _, record = rows[i]
            try:
                if isinstance(record, Record):
                    self._width = _width(self.parse(record)), record.source
                    return
            except DataError:
                continue  # reported when the records are checked

    def open(self, path: str) -> Table:
        """Opens the records of a path, see ``formats.Parser.open``."""
        return self._parser.open(path)

    def parse(self, record: Record) -> Example:
        """The example in a record, without rendering it or decoding its media.

        Raises:
          DataError: the record does not fit, or names media that are not there or that the model does not read.
        """
        example = self._parser.parse(record)
        for text in _texts(example):
            check_sources(_media(text), self._media)
        if isinstance(example, Pair) and self._needs_gap and example.gap is None:
            raise DataError(
                f"{record.source}: the loss reads by how much the chosen answer is better, and the record has neither "
                f'"chosen_reward" and "rejected_reward", nor "margin", nor a strength'
            )
        if isinstance(example, Teacher):
            highest = max(int(example.tokens.max()), int(example.ids.max()))
            if highest >= len(self._tokenizer):
                raise DataError(
                    f"{record.source}: token id {highest}, and the tokenizer has {len(self._tokenizer)} tokens"
                )
        if self._width and _width(example) != self._width[0]:
            what = "attributes" if isinstance(example, Rated) else "logits a token"
            raise DataError(f"{record.source}: {_width(example)} {what}, and {self._width[1]} has {self._width[0]}")
        return example

    def read(self, records: Sequence[tuple[int, Record | DataError]], *, keep: bool = True) -> list[Outcome]:
        """Rows of records, in order.

        Args:
          records: number of the record in its data set, and the record or why it could not be read.
          keep: whether media hold their values, or make them again when they are asked for.
        """
        outcomes: list[Outcome | None] = [None] * len(records)
        texts: list[Rendered] = []
        media: list[Source] = []
        places: list[tuple[int, Example, int]] = []  # of the record, its example, and how many texts it has
        for place, (_, record) in enumerate(records):
            try:
                if isinstance(record, DataError):
                    raise record
                example = self.parse(record)
                rendered = [self._render(text) for text in _texts(example)]
            except DataError as error:
                outcomes[place] = Outcome(None, "malformed", str(error))
                continue
            texts += rendered
            media += [source for text in _texts(example) for source in _media(text)]
            places.append((place, example, len(rendered)))
        encodings, at = self._tokenize(texts), 0
        items = iter(self._media.items(media, keep=keep) if self._media else ())
        for place, example, count in places:
            own = slice(at, at + count)
            at += count
            found = [[next(items) for _ in _media(text)] for text in _texts(example)]
            try:
                parts = zip(texts[own], encodings[own], found, strict=True)
                documents = tuple(self._document(*part, example) for part in parts)
                outcomes[place] = self._fit(example, documents, records[place][0])
            except DataError as error:
                outcomes[place] = Outcome(None, "malformed", str(error))
        return [outcome for outcome in outcomes if outcome is not None]

    def _render(self, text: Text) -> Rendered:
        if self._all and isinstance(text, Chat):
            text = dataclasses.replace(text, learn=[False] * len(text.turns))
        return self._renderer.render(text)

    def _tokenize(self, texts: Sequence[Rendered]) -> list[_Encoding | str]:
        """Token ids of each text, and the characters of each token; or why it has none."""
        if not texts:
            return []
        try:
            found = self._tokenizer(
                [rendered.text for rendered in texts],
                add_special_tokens=False,
                return_offsets_mapping=True,
                verbose=False,
            )
        except Exception as error:  # the tokenizers library raises Exception itself
            if len(texts) == 1:
                return [f"the tokenizer failed: {error}; does its vocabulary have every character of the text?"]
            return [self._tokenize([text])[0] for text in texts]
        return [
            (np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2))
            for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True)
        ]

    def _document(
        self,
        rendered: Rendered,
        encoding: _Encoding | str,
        media: Sequence[MediaItem | DataError],
        example: Example,
    ) -> Document:
        if isinstance(encoding, str):
            raise DataError(f"{rendered.source}: {encoding}")
        tokens, offsets = encoding
        if not len(tokens):
            raise DataError(f"{rendered.source}: the text has no tokens")
        items, places = _whole(media), []
        if self._media:
            tokens, origin = expand(tokens, items, self._media.places, rendered.source)
            offsets, places = offsets[origin], find_spans(tokens, items, self._media.places, rendered.source)
        mask = np.full(len(tokens), self._all)
        for span in rendered.spans:
            mask[self._learned(rendered.text, span, tokens, offsets)] = True
        if self._lacks_end(rendered, tokens, offsets):
            learned = self._all or bool(rendered.spans)
            end: Any = self._tokenizer.eos_token_id
            tokens, mask = np.append(tokens, np.int32(end)), np.append(mask, learned)
        mask[0] = False
        for place in places:
            mask[place.first : place.end] = False
        steps = _step_ends(example, rendered, offsets) if isinstance(example, Steps) else ()
        return Document(tokens, mask, steps, tuple(items), tuple(places))

    def _learned(self, text: str, span: tuple[int, int], tokens: np.ndarray, offsets: np.ndarray) -> slice:
        """The tokens of a span, up to the one that ends the turn: what the template writes after it is no answer."""
        inside = _overlapping(offsets, *span)
        if not len(inside):
            return slice(0, 0)
        first, end = int(inside[0]), int(inside[-1]) + 1
        stops = first + np.flatnonzero(np.isin(tokens[first:end], self._stops))
        if len(stops) and not text[offsets[stops[-1], 1] : span[1]].strip():
            end = int(stops[-1]) + 1
        elif end < len(tokens) and tokens[end] in self._stops:
            end += 1
        return slice(first, end)

    def _lacks_end(self, rendered: Rendered, tokens: np.ndarray, offsets: np.ndarray) -> bool:
        """Whether an end token is to follow: the text ends with an answer, and neither it nor the template ends it."""
        if not self._config.end_token or self._tokenizer.eos_token_id is None or rendered.answer_end is None:
            return False
        tail = tokens[offsets[:, 0] >= rendered.answer_end]
        return not np.any(np.isin(np.append(tail, tokens[-1]), self._stops))

    def _fit(self, example: Example, documents: tuple[Document, ...], index: int) -> Outcome:
        limit, source = self._config.max_tokens, example.source
        if isinstance(example, Teacher):
            documents = (Document(example.tokens, example.mask),)
        if isinstance(example, Pair) and example.tie:
            return Outcome(None, "tie", f"{source}: neither of the two is preferred")
        if not _trains(example, documents):
            raise DataError(f"{source}: no token of it would be trained")
        longest = max(map(len, documents))
        if longest <= limit:
            return Outcome(Encoded(example, documents, index))
        message = f"{source}: a row of {longest} tokens, and data.max_tokens is {limit}"
        if self._config.overlong != "cut":
            return Outcome(None, "overlong", message)
        documents = tuple(document.cut(limit) for document in documents)
        if not _trains(example, documents):
            return Outcome(None, "overlong", f"{message}; cut, nothing to train would be left of it")
        return Outcome(Encoded(example, documents, index), "cut", message)


_Encoding: TypeAlias = tuple[Int[np.ndarray, "T"], Int[np.ndarray, "T 2"]]


def _texts(example: Example) -> tuple[Text, ...]:
    """The texts of an example that are to be tokenized."""
    match example:
        case Pair():
            return example.chosen, example.rejected
        case Unpaired() | Rated() | Steps():
            return (example.text,)
        case Chat() | Plain():
            return (example,)
        case Teacher():
            return ()


def _media(text: Text) -> list[Source]:
    """Where the media of a text come from, in order."""
    return media_of(text.turns) if isinstance(text, Chat) else []


def _whole(media: Sequence[MediaItem | DataError]) -> list[MediaItem]:
    """Media of which none is broken.

    Raises:
      DataError: one is.
    """
    items: list[MediaItem] = []
    for item in media:
        if isinstance(item, DataError):
            raise item
        items.append(item)
    return items


def _overlapping(offsets: np.ndarray, first: int, end: int) -> np.ndarray:
    """The tokens that hold some character from ``first`` to before ``end``; a token of none, by its place."""
    return np.flatnonzero((np.maximum(offsets[:, 1], offsets[:, 0] + 1) > first) & (offsets[:, 0] < end))


def _step_ends(example: Steps, rendered: Rendered, offsets: np.ndarray) -> tuple[int, ...]:
    """The token that holds the last character of each step.

    Raises:
      DataError: the template changes the steps, or two of them end within one token.
    """
    answer = example.text.answer if isinstance(example.text, Plain) else example.text.turns[-1]["content"]
    begin = rendered.text.find(answer, rendered.spans[0][0])
    if begin < 0:
        raise DataError(
            f"{example.source}: the chat template changes the text of the steps, so that they are not found"
        )
    ends = tuple(int(_overlapping(offsets, begin + end - 1, begin + end)[-1]) for end in example.ends)
    if len(set(ends)) < len(ends):
        raise DataError(f"{example.source}: two steps end within one token; set data.step_separator to a longer one")
    return ends


def _width(example: Example) -> int:
    match example:
        case Rated():
            return len(example.ratings)
        case Teacher():
            return example.ids.shape[1]
        case _:
            return 0


def _trains(example: Example, documents: tuple[Document, ...]) -> bool:
    """Whether there is anything to learn in each document."""
    match example:
        case Rated():
            return True
        case Steps():
            kept = len(documents[0].steps)
            return any(rating != MISSING for rating in example.ratings[:kept])
        case _:
            return all(document.mask.any() for document in documents)
