"""Finished rows put together as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from yatt_jax.types import Inputs, Prompt, Rollout, Sample


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished row of n response tokens (host side).

    Attributes:
      tokens: ids, int32 ``[n]``.
      sampled: log-probabilities under the distribution drawn from, ``[n]``.
      plain: the same under the temperature alone.
      kept: support as bits ``[n, V8]``, or None.
      finish: "stop", "stop_string", "length", "invalid", or "unfinished".
      completion: the text, cut before a stop string.
    """

    tokens: np.ndarray
    sampled: np.ndarray
    plain: np.ndarray
    kept: np.ndarray | None
    finish: str
    completion: str


def padded_length(length: int) -> int:
    """Length that rows are padded to, so that what reads them sees few shapes.

    Multiples of 16 up to 128; beyond, four lengths to each doubling: 160, 192, 224, 256, 320, 384, ... So beyond 64
    tokens less than a fifth of the longest row is padding.
    """
    length = max(length, 1)
    step = max(16, 2 ** max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def assemble(
    prompts: Sequence[Prompt],
    results: Sequence[Result],
    samples: Sequence[Sample],
    versions: Sequence[int],
    vocab: int | None,
) -> Rollout:
    """Puts prompts and responses side by side, padded to ``padded_length`` of the longest.

    Args:
      prompts: the prompt of each row.
      results: the response of each row.
      samples: the same rows, for sample and group numbers.
      versions: optimizer step of the weights that began each row.
      vocab: vocabulary size where the support was recorded, else None.
    """
    B = len(prompts)
    lengths = [len(p.tokens) + len(r.tokens) for p, r in zip(prompts, results, strict=True)]
    T = padded_length(max(lengths, default=1))

    def blank(dtype: type, *more: int, fill: int = 0) -> Any:
        return np.full((B, T, *more), fill, dtype)

    tokens, segments = blank(np.int32), blank(np.int32)
    mask, sampled, plain = blank(np.float32), blank(np.float32), blank(np.float32)
    # Outside the response nothing was filtered: all bits set, so that scoring there stays finite.
    kept = None if vocab is None else blank(np.uint8, -(-vocab // 8), fill=0xFF)
    for b, (prompt, result, end) in enumerate(zip(prompts, results, lengths, strict=True)):
        begin = len(prompt.tokens)
        tokens[b, :begin], tokens[b, begin:end] = prompt.tokens, result.tokens
        segments[b, :end], mask[b, begin:end] = 1, 1
        sampled[b, begin:end], plain[b, begin:end] = result.sampled, result.plain
        if kept is not None and len(result.tokens):
            kept[b, begin:end] = result.kept

    def each(values: Sequence[int], dtype: type) -> Any:
        return np.array(values, dtype)

    return Rollout(
        inputs=Inputs(tokens, np.arange(T, dtype=np.int32) * segments, segments),
        response_mask=mask,
        sampled_logprobs=sampled,
        plain_logprobs=plain,
        sample_id=each([s.sample_id for s in samples], np.int32),
        group=each([s.group for s in samples], np.int32),
        version=each(versions, np.int32),
        ended=each([s.finish in ("stop", "stop_string") for s in samples], bool),
        kept=kept,
    )
