"""A reward model as a reward: how a configuration names it, and what it reads of a sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from yatt_jax.data.documents import Encoder
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.records import Record
from yatt_jax.rewards.spec import Invalid, ModelReward
from yatt_jax.types import StepRows, TextRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from yatt_jax.types import Sample


@dataclasses.dataclass(frozen=True)
class Marked:
    """A text as a reward model reads it.

    Attributes:
      tokens: ids.
      read: indices of the tokens whose outputs count: the last one, or the last of each step.
    """

    tokens: Int[np.ndarray, "T"]
    read: tuple[int, ...]


Reading: TypeAlias = Marked | Invalid


class SampleReader:
    """Makes of samples what a reward model reads.

    Args:
      spec: of the reward.
      tokenizer: the reward model's, where samples are given to it as text; None: by their own ids.
      max_tokens: longest text.
    """

    def __init__(self, spec: ModelReward, tokenizer: PreTrainedTokenizerFast | None, max_tokens: int) -> None:
        self._spec, self._limit = spec, max_tokens
        self._encoder = None
        if tokenizer is not None:
            config = OfflineConfig(max_tokens=max_tokens, step_separator=spec.step_separator, on_error="skip")
            self._encoder = Encoder(config, tokenizer, StepRows if spec.steps else TextRows)

    def read(self, samples: Sequence[Sample]) -> list[Reading]:
        """What the model reads of each sample, or why it cannot."""
        if self._encoder is not None:
            return self._as_text(self._encoder, samples)
        return [self._as_ids(sample) for sample in samples]

    def _as_ids(self, sample: Sample) -> Reading:
        tokens = np.array([*sample.prompt.tokens, *sample.tokens], np.int32)
        if len(tokens) > self._limit:
            return Invalid(f"a text of more than model.max_tokens = {self._limit} tokens")
        return Marked(tokens, (len(tokens) - 1,))

    def _as_text(self, encoder: Encoder, samples: Sequence[Sample]) -> list[Reading]:
        records = [(i, Record(self._fields(sample), sample.prompt.source)) for i, sample in enumerate(samples)]
        found: list[Reading] = []
        for outcome in encoder.read(records):
            if outcome.row is None:
                reason = f"a text of more than model.max_tokens = {self._limit} tokens"
                found.append(Invalid(reason if outcome.fault == "overlong" else "not readable as text"))
                continue
            (document,) = outcome.row.documents
            found.append(Marked(document.tokens, document.steps or (len(document) - 1,)))
        return found

    def _fields(self, sample: Sample) -> dict[str, Any]:
        """The sample as a record of the reward model's training data."""
        messages, answer = list(sample.prompt.messages), sample.completion
        if messages and messages[-1]["role"] == "assistant":  # the response went on with that turn
            answer = messages.pop()["content"] + answer
        prompt: Any = messages or sample.prompt.text
        if self._spec.steps:
            steps = [step for step in answer.split(self._spec.step_separator) if step]
            return {"prompt": prompt, "completions": steps, "labels": [True] * len(steps)}
        return {"prompt": prompt, "completion": [{"role": "assistant", "content": answer}] if messages else answer}


def combined(outputs: Float[np.ndarray, "B Y"], weights: Sequence[float]) -> list[float | Invalid]:
    """The score of each text: its outputs, weighted and added up.

    Args:
      outputs: of the model.
      weights: of each output; none for a model with a single one.
    """
    chosen = np.asarray(weights or (1.0,), np.float64)
    used = np.where(chosen != 0, outputs, 0.0)  # 0 * NaN would be NaN
    scores = (used.astype(np.float64) @ chosen).tolist()
    return [score if math.isfinite(score) else Invalid("the model's output is not finite") for score in scores]
