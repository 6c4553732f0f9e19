"""What the data section of a configuration says where rows are read and not sampled. Importing it loads no reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from yatt_jax.data.config import SourceConfig
from yatt_jax.data.media.config import MediaConfig


@dataclasses.dataclass(frozen=True)
class OfflineConfig:
    """Rows to train on and rows to evaluate on.

    A *row* here is what one record holds: a conversation, a preference pair, a rated response; see
    ``yatt_jax.data.formats`` for every format that is read.

    Attributes:
      train: sources of training rows, written as for prompts.
      eval: files of held-out rows.
      holdout: without ``eval``: number of rows taken out of ``train`` to evaluate on, the same for every seed. They are
        never trained on, and neither are other rows with the same tokens (of pairs, unpaired and steps: the same
        prompt).
      format: name of the format of every record; "auto" tells it from each record's fields.
      batch: rows of a step over all processes.
      mix: "once": all sources are one data set, and an epoch has each of its rows once; "weights": they are drawn by
        their weights, and smaller ones are repeated more often.
      last: what becomes of the rows that do not fill the last batch of an epoch: "pad" makes a batch of them, filled up
        by rows of weight 0; "drop" leaves them out (others in each epoch). Without effect under mix = "weights", where
        epochs have no end.
      shuffle: draw in a random order that is another one in each epoch; otherwise in the order of the files.
      max_tokens: longest row in tokens, template included; of a pair, of each of its two sequences.
      overlong: what happens to a longer one. "skip" leaves it out, "cut" drops its end (and skips it when nothing
        to train would be left), "error" stops. Rows skipped and cut are counted, and reported once.
      learn: which tokens of a conversation or text are trained: "answers" those of the assistant's turns (of
        ``completion``, ``output``, ...), the end of each turn included; "all" every token.
      pack: tokens of a row that several documents are packed into; 0: a row for each. For plain text and conversations
        alone; at least ``max_tokens``.
      end_token: end texts with the tokenizer's end token where neither they nor the chat template end them.
      system: system message put before conversations that have none; empty: none.
      chat_template: "auto" turns the strings of a prompt and its answer into turns when the tokenizer has a chat
        template, "raw" leaves them as they are; or a file holding a jinja template, used in place of the tokenizer's.
        ``text`` records are always raw, and turns always go through the template.
      template_kwargs: further variables of the chat template, such as ``{"enable_thinking": False}``.
      step_separator: what joins the steps of a record with rated steps.
      on_error: what a record that does not fit does: "raise" stops, "skip" leaves it out and counts it.
      check_rows: rows of each source that are read and checked before a run starts, so that a bad record stops it then
        and not hours later; later rows are checked as they are drawn. Media are only looked for, and decoded when
        their row is drawn.
      media: limits on images, audio and video, and where they may come from.
    """

    train: tuple[SourceConfig, ...] = ()
    eval: tuple[str, ...] = ()
    holdout: int = 0
    format: str = "auto"
    batch: int = 32
    mix: Literal["once", "weights"] = "once"
    last: Literal["pad", "drop"] = "pad"
    shuffle: bool = True
    max_tokens: int = 1024
    overlong: Literal["skip", "cut", "error"] = "skip"
    learn: Literal["answers", "all"] = "answers"
    pack: int = 0
    end_token: bool = True
    system: str = ""
    chat_template: str = "auto"
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step_separator: str = "\n"
    on_error: Literal["raise", "skip"] = "raise"
    check_rows: int = 100_000
    media: MediaConfig = MediaConfig()

    def __post_init__(self) -> None:
        for name, least in (("holdout", 0), ("batch", 1), ("max_tokens", 2), ("pack", 0), ("check_rows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")
        for name, choices in (
            ("mix", ("once", "weights")),
            ("last", ("pad", "drop")),
            ("overlong", ("skip", "cut", "error")),
            ("learn", ("answers", "all")),
            ("on_error", ("raise", "skip")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected one of {list(choices)}")
        if self.eval and self.holdout:
            raise ValueError("eval and holdout: set one of them, files of held-out rows or a number of rows")
        if 0 < self.pack < self.max_tokens:
            raise ValueError(f"pack = {self.pack}: must be at least max_tokens = {self.max_tokens}, or 0")
        if self.mix == "once" and len({source.weight for source in self.train}) > 1:
            raise ValueError('train: weights differ, and mix = "once" does not use them; set mix = "weights"')
        if self.chat_template not in ("auto", "raw") and not Path(self.chat_template).is_file():
            raise ValueError(
                f'chat_template = {self.chat_template!r}: expected "auto", "raw" or an existing jinja file'
            )
