"""What the data section of a configuration says. Importing it loads no reader and no array library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from yatt_jax.data.media.config import MediaConfig
from yatt_jax.errors import InputError


class DataError(InputError):
    """Data that cannot be used. The message starts with "file:line" where there is one."""


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of training prompts.

    Attributes:
      path: a file, a pattern such as ``"data/part-*.jsonl"``, or a saved Hugging Face ``datasets`` folder. Files are
        .jsonl, .json, .parquet or .arrow; .jsonl and .json also with .gz. Prompts may also be made by rule, see
        ``yatt_jax.data.gym``.
      weight: share of the prompts that come from here, relative to the other sources' weights (kept to about 1 %).
        The size of a source does not matter: with equal weights a smaller one is repeated more often.
    """

    path: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name a data file, a pattern or a saved data set's folder")
        if not self.weight > 0 or self.weight == float("inf"):
            raise ValueError(f"weight = {self.weight}: must be a positive number")

    @classmethod
    def from_string(cls, path: str) -> SourceConfig:
        """A source of weight 1; lets a configuration name a path alone."""
        return cls(path)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts to train on and prompts to evaluate on.

    Attributes:
      train: sources of training prompts; several are mixed by weight.
      eval: files of held-out prompts, written as in ``train``.
      holdout: without ``eval``: number of rows taken out of ``train`` to evaluate on, the same for every seed. They are
        never trained on, and neither are further rows that hold the same prompt.
      max_prompt_tokens: longest prompt in tokens, template included.
      overlong: what happens to a longer one. "skip" draws another in its place; "cut" drops the oldest turns, and then
        the beginning of the last turn's text, so that the template stays whole and the end of the prompt is kept;
        "error" stops. Skipped and cut prompts are counted, and reported once.
      shuffle: draw in a random order that is another one in each epoch; otherwise in the order of the files.
      system: system message put before conversations that have none; empty: none.
      chat_template: "auto" wraps a plain string under ``prompt`` as one user turn when the tokenizer has a chat
        template, "raw" leaves it as it is; or a file holding a jinja template, used in place of the tokenizer's.
        ``text`` records are always raw, and ``messages`` always go through the template.
      template_kwargs: further variables of the chat template, such as ``{"enable_thinking": False}``.
      on_error: what a record that does not fit does: "raise" stops, "skip" draws another in its place and counts it.
      check_rows: rows of each source that are read and checked before a run starts, so that a bad record stops it then
        and not hours later; later rows are checked as they are drawn. Media are only looked for, and decoded when
        their row is drawn.
      media: limits on images, audio and video, and where they may come from.
    """

    train: tuple[SourceConfig, ...] = ()
    eval: tuple[str, ...] = ()
    holdout: int = 0
    max_prompt_tokens: int = 512
    overlong: Literal["skip", "cut", "error"] = "skip"
    shuffle: bool = True
    system: str = ""
    chat_template: str = "auto"
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_error: Literal["raise", "skip"] = "raise"
    check_rows: int = 100_000
    media: MediaConfig = MediaConfig()

    def __post_init__(self) -> None:
        for name, least in (("holdout", 0), ("max_prompt_tokens", 1), ("check_rows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")
        for name, choices in (("overlong", ("skip", "cut", "error")), ("on_error", ("raise", "skip"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected one of {list(choices)}")
        if self.eval and self.holdout:
            raise ValueError("eval and holdout: set one of them, files of held-out prompts or a number of rows")
        if self.chat_template not in ("auto", "raw") and not Path(self.chat_template).is_file():
            raise ValueError(
                f'chat_template = {self.chat_template!r}: expected "auto", "raw" or an existing jinja file'
            )
