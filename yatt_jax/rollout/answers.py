"""Rows of self-play: what was sampled, and beside it what the data answers to the same prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from yatt_jax.rollout.assemble import padded_length
from yatt_jax.types import Inputs, Prompt, Rollout


def with_answers(rollout: Rollout, prompts: Sequence[Prompt]) -> Rollout:
    """Puts a second document into each row: the prompt again, with the data's own answer.

    Args:
      rollout: sampled rows, as NumPy arrays.
      prompts: of each row; ``answer`` holds the tokens.

    Returns:
      Rows in which segment 1 is what was sampled and segment 2 the data's answer, both marked by ``response_mask``;
      log-probabilities are 0 there, and no support is kept: both are scored under the whole vocabulary.
    """
    given = [[*prompt.tokens, *prompt.answer] for prompt in prompts]
    ends = np.sum(np.asarray(rollout.inputs.segments) > 0, axis=1)
    width = padded_length(max((int(end) + len(more) for end, more in zip(ends, given, strict=True)), default=1))

    def wider(x: Any) -> Any:
        x = np.asarray(x)
        return np.pad(x[:, :width], [(0, 0), (0, max(0, width - x.shape[1]))])

    names = ("response_mask", "sampled_logprobs", "plain_logprobs")
    mask, sampled, plain = (wider(getattr(rollout, name)) for name in names)
    tokens, positions, segments = map(wider, (rollout.inputs.tokens, rollout.inputs.positions, rollout.inputs.segments))
    for row, (prompt, more) in enumerate(zip(prompts, given, strict=True)):
        begin, end = int(ends[row]), int(ends[row]) + len(more)
        tokens[row, begin:end] = more
        positions[row, begin:end] = np.arange(len(more))
        segments[row, begin:end] = 2
        mask[row, begin + len(prompt.tokens) : end] = 1
    return dataclasses.replace(
        rollout,
        inputs=Inputs(tokens, positions, segments),
        response_mask=mask,
        sampled_logprobs=sampled,
        plain_logprobs=plain,
        kept=None,
    )
